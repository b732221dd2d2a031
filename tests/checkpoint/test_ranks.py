"""Two processes: each writes its part, one publishes, all agree; one goes on from what two have saved.

`main` is what each process runs: it goes through `SCENARIOS` and leaves what failed.
"""

import errno
import json
import os
import random
import shutil
import traceback
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed, nn
from torch.utils.data import DataLoader

from stackwise.checkpoint import (
    CheckpointManager,
    CheckpointWarning,
    DamagedCheckpointError,
    Termination,
    export,
)
from stackwise.checkpoint import manager as manager_module
from stackwise.stability.guard import Guard
from tests.forked import HANG_SECONDS, end_of, start

RANKS = 2


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def plain_model():
    """Parts of 5 rows are not equal, and of the last bias one process has nothing."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 8), nn.Linear(8, 1))


def sharded_model(mesh=None):
    from torch.distributed.fsdp import fully_shard

    model = plain_model()
    fully_shard(model[3], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def adamw(model):
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.05,
    )


def train(model, optimizer, steps, first=0):
    """On rows that every process has, so that it does not matter how many there are."""
    for step in range(first, first + steps):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(model, optimizer):
    """Everything by name, put together."""
    found = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}.{key}": whole(value).clone() for key, value in state.items()}
    return found


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def trained(make=sharded_model, steps=3):
    model = make()
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def meet():
    distributed.barrier()


def in_parts(rank, folder):
    """FSDP2 and AdamW: two processes to two, bit for bit, and on."""
    objects = trained()
    before = values(**objects)
    with CheckpointManager(folder / "parts") as manager:
        assert manager.save(3, objects) == folder / "parts/step-3"
    equal(values(**objects), before)
    train(objects["model"], objects["optimizer"], 4, first=3)
    after = values(**objects)
    fresh = trained(steps=0)
    found = CheckpointManager(folder / "parts").restore(fresh)
    assert (found.world_size, found.remarks) == (2, ())
    equal(values(**fresh), before)
    train(fresh["model"], fresh["optimizer"], 4, first=3)
    equal(values(**fresh), after)
    if rank == 0:
        torch.save(before, folder / "before.pt")  # for the test in one process, which made this folder
    meet()
    assert "tensors/rank-00001.safetensors" in files_of(folder / "parts/step-3")


def in_parts_later(rank, folder):
    """Asynchronous: what is written is the state of the moment, while both train on."""
    objects = trained()
    with CheckpointManager(folder / "later", asynchronous=True) as manager:
        for step in (3, 4, 5):
            before = values(**objects)
            manager.save(step, objects)
            train(objects["model"], objects["optimizer"], 1, first=step)
    fresh = trained(steps=0)
    assert CheckpointManager(folder / "later").restore(fresh).step == 5
    equal(values(**fresh), before)


def from_one(rank, folder):
    """What one process has saved."""
    fresh = trained(steps=0)
    found = CheckpointManager(folder / "one").restore(fresh)
    assert found.world_size == 1
    assert "ranks 1 to 1 are new" in found.remarks[0]
    equal(values(**fresh), torch.load(folder / "one.pt"))
    local = fresh["optimizer"].state[fresh["model"][1].weight]["exp_avg"]
    assert local.to_local().shape[0] == (3, 2)[rank]
    # The one that was there goes on; the other draws, and always the same.
    draws = [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]  # noqa: NPY002
    CheckpointManager(folder / "one").restore(fresh)
    again = [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]  # noqa: NPY002
    both = [None, None]
    distributed.all_gather_object(both, (draws, again))
    assert all(torch.equal(a, b) for mine in both for a, b in zip(*mine, strict=True))
    assert not torch.equal(both[0][0][0], both[1][0][0])
    if rank == 0:
        assert torch.equal(draws[0], torch.load(folder / "one-draw.pt"))


def copies(rank, folder):
    """DDP: the first process writes; what each has of its own is kept of each."""
    from torch.nn.parallel import DistributedDataParallel

    objects = trained(lambda: DistributedDataParallel(plain_model()))
    objects["own"] = {"rank": rank, "x": torch.full((2,), float(rank))}
    objects["same"] = {"epoch": 3}
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    CheckpointManager(folder / "copies").save(3, objects)
    drawn = torch.rand(3), random.random()
    fresh = trained(lambda: DistributedDataParallel(plain_model()), steps=0) | {"own": {}, "same": {}}
    CheckpointManager(folder / "copies").restore(fresh)
    assert (fresh["own"]["rank"], fresh["own"]["x"].tolist(), fresh["same"]) == (
        rank,
        [rank] * 2,
        {"epoch": 3},
    )
    again = torch.rand(3), random.random()
    assert torch.equal(again[0], drawn[0])
    assert again[1] == drawn[1]
    fresh_model = {"model": fresh["model"].module, "optimizer": fresh["optimizer"]}
    equal(values(**fresh_model), values(objects["model"].module, objects["optimizer"]))
    if rank == 0:
        torch.save(values(**fresh_model), folder / "copies.pt")
    meet()
    files = files_of(folder / "copies/step-3")
    assert "tensors/rank-00000.safetensors" in files
    assert "tensors/rank-00001.safetensors" not in files


def replicas(rank, folder):
    """HSDP: of equal parts only one is written."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "part"))
    objects = trained(lambda: sharded_model(mesh))
    CheckpointManager(folder / "replicas").save(3, objects)
    fresh = trained(steps=0)  # other parts
    CheckpointManager(folder / "replicas").restore(fresh)
    equal(values(**fresh), values(**objects))
    meet()
    assert "tensors/rank-00001.safetensors" not in files_of(folder / "replicas/step-3")


def read_by_torch(rank, folder):
    """torch.distributed.checkpoint reads the tensors as its own."""
    from torch.distributed import checkpoint

    objects = trained()
    CheckpointManager(folder / "dcp").save(3, objects)
    fresh = sharded_model()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    weights = {f"model.{name}": p.detach() for name, p in fresh.named_parameters()}
    reader = checkpoint.HuggingFaceStorageReader(str(folder / "dcp/step-3/tensors"))
    checkpoint.load(weights, storage_reader=reader)
    for name, parameter in objects["model"].named_parameters():
        assert torch.equal(whole(weights[f"model.{name}"]), whole(parameter.detach())), name


def refused(rank, folder):
    """The disk of one process: no process has written, one speaks, and all go on."""
    objects = trained(steps=1)
    manager = CheckpointManager(folder / "refused")
    manager.save(1, objects)
    for failing in (0, 1):
        write = os.write
        if rank == failing:

            def refuse(*_):
                raise OSError(errno.ENOSPC, "full")

            os.write = refuse
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert manager.save(2, objects) is None
        finally:
            os.write = write
        told = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
        assert len(told) == (rank == 0)
        assert all("step 2 is not written" in text and "full" in text for text in told)
        meet()
        assert names_in(folder / "refused") == ["step-1"]
        with pytest.raises(OSError, match="full") as raised:
            manager.close()
        assert raised.value.errno == errno.ENOSPC
    assert manager.save(3, objects) is not None


def damaged(rank, folder):
    """One flipped bit in the part of either process: both take the one before."""
    objects = trained(steps=1)
    for part in (0, 1):
        directory = folder / f"damaged-{part}"
        manager = CheckpointManager(directory)
        manager.save(1, objects)
        before = values(**objects)
        train(objects["model"], objects["optimizer"], 1)
        manager.save(2, objects)
        meet()
        if rank == 0:
            path = directory / f"step-2/tensors/rank-{part:05d}.safetensors"
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        meet()
        fresh = trained(steps=0)
        with pytest.raises(DamagedCheckpointError, match=f"rank-{part:05d}"):
            CheckpointManager(directory).restore(fresh, 2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = CheckpointManager(directory).restore(fresh)
        assert (found.step, found.damaged) == (1, (directory / "step-2",))
        assert len(caught) == (rank == 0)
        equal(values(**fresh), before)
        meet()
        assert names_in(directory) == ["step-1", "step-2.damaged"]


def mistaken(rank, folder):
    """What one process cannot keep is an error in all; nothing waits for ever, and nothing is left."""
    manager = CheckpointManager(folder / "mistaken")
    with pytest.raises(
        ValueError, match=r"state\.x: got builtins\.object" if rank else r"rank 1: .*state\.x"
    ):
        manager.save(1, {"state": {"x": object() if rank == 1 else 0}})
    with pytest.raises(KeyError if rank == 0 else RuntimeError, match="mine"):
        manager.save(1, {}, files={"x": lambda path: {}["mine"]})
    meet()
    assert not list(folder.glob("mistaken/*"))
    assert manager.save(2, {"state": {"x": 1}}) is not None
    with pytest.raises(ValueError, match="guard"):
        manager.restore({"guard": {}} if rank == 1 else {})


def failing_copies(rank, folder):
    """Memory that one process does not have: no process writes."""
    objects = trained(plain_model)
    with CheckpointManager(folder / "copies that fail", asynchronous=True) as manager:
        copy = manager._staging.copy

        def no_memory(*_):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        for failing in (0, 1):
            if rank == failing:
                manager._staging.copy = no_memory
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert manager.save(1, objects) is None
            assert len(caught) == (rank == 0)
            manager._staging.copy = copy
            manager.save(3 + failing, objects)
    meet()
    assert manager.steps() == [3, 4]


def mistakes_of_one(rank, folder):
    """What only one process is told, or gives: all hear of it."""
    manager = CheckpointManager(folder / "mistakes")
    for step, metric in ((1, torch.ones(2)), (-1, None)):
        for mistaken in (0, 1):
            given = {"metric": metric} if rank == mistaken else {}
            number = step if rank == mistaken or step > 0 else 1
            with pytest.raises(ValueError, match=("metric" if step > 0 else "step") + ": got"):
                manager.save(number, {}, **given)
    manager.save(1, {"state": {"x": 1}})
    with pytest.raises(ValueError, match="objects"):
        manager.restore({"state": {}} if rank == 0 else {"state": 3})
    manifests_in = manager_module.manifests_in

    def hidden(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    if rank == 0:
        manager_module.manifests_in = hidden
    try:
        with pytest.raises(OSError, match="Permission denied"):
            manager.restore({"state": {}})
    finally:
        manager_module.manifests_in = manifests_in
    assert manager.restore({"state": {}}).step == 1


def together(rank, folder):
    """A signal that one process gets ends all at the same step."""
    with Termination() as termination:
        assert not termination.requested_anywhere()
        if rank == 1:
            os.kill(os.getpid(), 15)
        assert termination.requested_anywhere()
        assert termination.requested == (rank == 1)
        assert termination.exit_code == 75


def n_groups():
    return len(distributed.distributed_c10d._world.pg_map)


def groups(rank, folder):
    """All managers and requests share one, and those that write meanwhile have one each until they close."""
    CheckpointManager(folder / "groups").save(1, {"state": {}})
    before = n_groups()
    for _ in range(3):
        CheckpointManager(folder / "groups").restore({"state": {}})
        Termination().requested_anywhere()
        with CheckpointManager(folder / "groups") as manager:
            manager.restore({})
            manager.save(2, {"state": {}})
    assert n_groups() == before
    for i in range(3):
        with CheckpointManager(folder / f"groups-later-{i}", asynchronous=True) as manager:
            manager.save(3, {"state": {}})
            manager.close()
            manager.save(4, {"state": {}})  # has one again
    once = n_groups()
    assert once <= before + 1
    first, second = (CheckpointManager(folder / f"groups-{i}", asynchronous=True) for i in (1, 2))
    for manager in (first, second):
        manager.save(5, {"state": {"x": torch.ones(1000)}})
    for manager in (second, first):
        manager.close()
    assert n_groups() == once + 1
    alone = distributed.new_group([rank], use_local_synchronization=True)
    CheckpointManager(folder / f"alone-{rank}", group=alone).save(1, {"state": {"rank": rank}})
    assert n_groups() == once + 2


def completed(rank, folder):
    """The first process calls the user's function."""
    told = []
    manager = CheckpointManager(folder / "completed", asynchronous=True, on_complete=told.append)
    with manager:
        manager.save(3, {"state": {}})
    assert told == ([folder / "completed/step-3"] if rank == 0 else [])


def verified_once(rank, folder):
    """What was found whole is handed on, not read through again."""
    objects = trained()
    manager = CheckpointManager(folder / "once")
    manager.save(3, objects)
    read = []

    def reading(path, files, *, contents=True):
        read.extend(files if contents else [])

    verify = manager_module.verify_files
    manager_module.verify_files = reading
    try:
        found = manager.restore({})
        n_read = len(read)
        fresh = trained(steps=0)
        manager.restore({"model": fresh["model"], "optimizer": fresh["optimizer"]}, found)
    finally:
        manager_module.verify_files = verify
    assert len(read) == n_read > 0
    equal(values(**fresh), values(**objects))


def of_other_shapes(rank, folder):
    model = nn.Sequential(nn.Linear(4, 5))
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    with pytest.raises(ValueError, match=r"model\.0\.weight: got \(3,\); allowed: \(5, 4\)"):
        CheckpointManager(folder / "parts").restore({"model": model})


def guarded_copies(rank, folder):
    """Each process has batches and random states of its own, and a loss of its own."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2))
    model.load_state_dict({"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)})
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = adamw(model)
    guard = Guard(model, optimizer)
    for batch in guard.batches(DataLoader(torch.randn(24, 3), batch_size=4)):
        loss = model(batch).square().mean()
        loss.backward()
        guard.step(loss)
        if guard.steps == 5:
            CheckpointManager(folder / "guarded").save(5, {"guard": guard, "model": model})
    if rank == 0:
        torch.save(guard.state_dict()["detector"], folder / "detector.pt")


def gone_back(rank, folder):
    """The first process sets aside, and none goes on before that."""
    manager = CheckpointManager(folder / "gone back")
    for step in (20, 30):
        manager.save(step, {"counts": {"step": step}})
    manager.rewind(25)
    assert names_in(folder / "gone back") == ["step-20", "step-30.damaged"]
    assert manager.restore({"counts": {}}).step == 20


def one_run(rank, folder):
    """All processes know the same identity, after `begin_run` and after a first `save`."""
    begun, saved = CheckpointManager(folder / "begun"), CheckpointManager(folder / "saved")
    run = begun.begin_run()
    for manager in (begun, saved):
        manager.save(1, {})
        assert manager.run == CheckpointManager(manager.directory).restore({}).run
    assert run == begun.run


SCENARIOS = [in_parts, in_parts_later, from_one, copies, replicas, read_by_torch, refused, damaged, mistaken]
SCENARIOS += [failing_copies, mistakes_of_one, together, groups, completed, verified_once, of_other_shapes]
SCENARIOS += [guarded_copies, gone_back, one_run]


def saved_by_one(folder):
    objects = trained(plain_model)
    torch.manual_seed(11)
    CheckpointManager(folder / "one").save(3, objects)
    torch.save(values(**objects), folder / "one.pt")
    torch.save(torch.rand(2), folder / "one-draw.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The folder in which both processes were, and what failed in each."""
    folder = tmp_path_factory.mktemp("ranks")
    saved_by_one(folder)
    started = [
        start(main, rank, folder, output=folder / f"output-{rank}", OMP_NUM_THREADS="1")
        for rank in range(RANKS)
    ]
    for process in started:
        end_of(process)
    outputs = [(folder / f"output-{rank}").read_text()[-3000:] for rank in range(RANKS)]
    results = [folder / f"result-{rank}.json" for rank in range(RANKS)]
    return folder, [json.loads(path.read_text()) if path.exists() else {} for path in results], outputs


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_two_processes(ranks, scenario):
    _, results, outputs = ranks
    for rank, result in enumerate(results):
        assert result.get(scenario.__name__, f"not reached\n{outputs[rank]}") == "", f"rank {rank}"


def test_one_process_goes_on_from_parts_of_two(ranks):
    folder, _, _ = ranks
    fresh = trained(plain_model, steps=0)
    manager = CheckpointManager(folder / "parts")
    found = manager.restore(fresh)
    assert "ranks 1 to 1 are left out" in found.remarks[0]
    equal(values(**fresh), torch.load(folder / "before.pt"))
    # From here on it is the run of one process, to the rounding of sums over two.
    train(fresh["model"], fresh["optimizer"], 4, first=3)
    alone = trained(plain_model, steps=7)
    for name, tensor in values(**alone).items():
        torch.testing.assert_close(values(**fresh)[name], tensor)


def test_one_process_goes_on_from_copies_of_two(ranks):
    folder, _, _ = ranks
    fresh, manager = trained(plain_model, steps=0), CheckpointManager(folder / "copies")
    same = {}
    manager.restore(fresh | {"same": same})
    equal(values(**fresh), torch.load(folder / "copies.pt"))
    assert same == {"epoch": 3}
    with pytest.raises(ValueError, match=r"objects\['own'\]: got 'a state of 2 processes that differs"):
        manager.restore({"own": {}})


def test_one_process_goes_on_with_a_guard_of_two(ranks):
    folder, _, _ = ranks
    model = nn.Sequential(nn.Linear(3, 2))
    guard = Guard(model, adamw(model))
    found = CheckpointManager(folder / "guarded").restore({"guard": guard, "model": model})
    assert found.remarks[1:] == (
        "saved by 2 processes, restored by 1: what each process had of 'guard' for itself is left out",
    )
    state = guard.state_dict()
    assert (guard.steps, state["loader"]["index"], state["loader"]["began"]) == (5, 5, None)
    of_norm, of_loss, _ = torch.load(folder / "detector.pt")["logs"][:, -6:-1]  # a step further on
    norms, losses, _ = state["detector"]["logs"][:, -5:]
    assert torch.equal(norms, of_norm) and torch.equal(losses, of_loss)


def test_parts_of_two_are_one_file(ranks, tmp_path):
    folder, _, _ = ranks
    export(folder / "parts/step-3", "model", tmp_path / "model.safetensors")
    whole_state, found = torch.load(folder / "before.pt"), load_file(tmp_path / "model.safetensors")
    assert found.keys() == plain_model().state_dict().keys()
    assert all(torch.equal(tensor, whole_state[name]) for name, tensor in found.items())


def test_a_part_that_is_missing_is_noticed(ranks, tmp_path):
    folder, _, _ = ranks
    shutil.copytree(folder / "parts", tmp_path / "parts")
    (tmp_path / "parts/step-3/tensors/rank-00001.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="rank-00001"):
        CheckpointManager(tmp_path / "parts").restore(trained(plain_model, steps=0))


def main(rank, folder):
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=HANG_SECONDS),
        )
    results = {}
    for scenario in SCENARIOS:
        try:
            with warnings.catch_warnings():
                # torch's own, as it starts its parts.
                warnings.filterwarnings("ignore", module="torch")
                scenario(rank, folder)
            results[scenario.__name__] = ""
        except BaseException:
            results[scenario.__name__] = traceback.format_exc()
        (folder / f"result-{rank}.json").write_text(json.dumps(results))
        try:
            meet()
        except RuntimeError:
            break
    distributed.destroy_process_group()
