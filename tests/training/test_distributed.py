"""Two processes under torchrun, by DDP and by FSDP2, against one process on the whole batch.

`main` is what torchrun starts, once for all tests: each rank goes through `scenarios` and leaves what it saw.
"""

import contextlib
import io
import multiprocessing
import re
import shutil
import subprocess
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise import cli
from stackwise.config import StackWiseConfig, TrainingConfig
from stackwise.config.yaml import load_yaml
from stackwise.data import create_data
from stackwise.model import create_rack_from_config, quantize_stack
from stackwise.training import ArchitectureTrainer
from stackwise.training.checkpoint import load_rack
from stackwise.training.loop import NonFiniteStepError
from stackwise.training.processes import Processes
from tests.forked import HANG_SECONDS, end_of, start

RANKS, ROWS, STEPS = 2, 2, 20
MODEL = {
    "vocab_size": 23,
    "d_model": 16,
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_ff": 32,
    "architecture": {"n_stacks": 2, "blocks_per_stack": 1},
}
TRAINING = {
    "seq_len": 8,
    "max_steps": STEPS,
    "device": "cpu",
    "precision": "fp32",
    "log_interval": 3,
    "grad_clip": 0.5,
    "optimizer": {"lr": 3e-3},
}
BOTH = ("ddp", "fsdp")


def configure(strategy, world_size, *, model=None, data=None, **training):
    """Rows of all processes together are always the same."""
    sections = {
        "model": MODEL | (model or {}),
        "training": TRAINING
        | {"batch_size": ROWS * RANKS // world_size, "distributed": {"strategy": strategy}}
        | training,
        "data": data or {},
    }
    return StackWiseConfig.from_dict(sections)


def batches_of(rank, world_size, *, padded=False, count=STEPS):
    """This rank's rows. Padded, rank 1 has few tokens to predict, and none in the third batch."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(23, (count, ROWS * RANKS, 9), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[:, ROWS:, 3:] = 0
        mask[:, 0, 7:] = 0
        mask[2, ROWS:, 1:] = 0
    n = ROWS * RANKS // world_size
    mine = slice(rank * n, (rank + 1) * n)
    return [{"input_ids": i[mine], "attention_mask": m[mine]} for i, m in zip(ids, mask, strict=True)]


def rack_of(config, seed=7):
    torch.manual_seed(seed)
    return create_rack_from_config(config)


def train(processes, strategy, *, padded=False, prepare=None, **sections):
    """A training run on as many batches as it has steps: its records and its weights; of a
    NonFiniteStepError also that.
    """
    config = configure(strategy, processes.world_size if processes else 1, **sections)
    rack = rack_of(config)
    addresses = [p.data_ptr() for p in rack.parameters()]
    if prepare is not None:
        prepare(rack)
    rank, world_size = (processes.rank, processes.world_size) if processes else (0, 1)
    batches = batches_of(rank, world_size, padded=padded, count=sections.get("max_steps", STEPS))
    error = None
    try:
        trainer = ArchitectureTrainer(config, progress=False, processes=processes)
        result = trainer.train_architecture(rack, batches, batches)
        records, validation = result["records"], [r.loss for r in result.get("validation", [])]
    except NonFiniteStepError as raised:
        error, records, validation = (raised.record.step, str(raised)), [], []
    return {
        "losses": [r.loss for r in records],
        "norms": [r.grad_norm for r in records],
        "weights": rack.state_dict(),
        "kept": addresses == [p.data_ptr() for p in rack.parameters()],
        "error": error,
        "validation": validation,
        "evaluation": trainer.evaluate(rack, batches),
    }


def breaks(rank):
    """NaN in one rank's fourth pass."""

    def prepare(rack):
        passes = Counter()

        def hook(module, arguments, output):
            passes["forward"] += 1
            return output * float("nan") if passes["forward"] == 4 else output

        if rank == 1:
            rack.final_norm.register_forward_hook(hook)

    return prepare


class Collectives(TorchDispatchMode):
    """Counts them by name, with how many numbers each is about at most."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, _, name = function.name().partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self.counts[name.partition(".")[0].strip("_")] += 1
        return function(*args, **(kwargs or {}))


def collectives(processes, strategy, accumulation_steps):
    """Of one step more."""
    counts = []
    for steps in (2, 3):  # DDP arranges itself anew in the second
        with Collectives() as seen:
            train(processes, strategy, accumulation_steps=accumulation_steps, max_steps=steps)
        counts.append(seen.counts)
    return dict(counts[1] - counts[0])


def seen_inputs(processes):
    """What the model is shown of a batch that is the same in both processes."""
    shown = []
    config = configure(
        "ddp",
        2,
        model={"attention_mode": "bidirectional"},
        max_steps=1,
        objective={"kind": "masked_token", "mask_token_id": 22, "mask_fraction": 0.5},
    )
    rack = rack_of(config)
    rack.embedding.register_forward_pre_hook(lambda module, arguments: shown.append(arguments[0]))
    batch = {"input_ids": torch.arange(16).reshape(2, 8)}
    ArchitectureTrainer(config, progress=False, processes=processes).train_architecture(rack, [batch])
    return shown[0]


def refused(processes, strategy="ddp", *, seed=7, frozen=None, data=None, **training):
    config = configure(strategy, 2, **training)
    rack = rack_of(config, seed)
    if frozen is not None:
        rack.get_stack(frozen).freeze()
    try:
        ArchitectureTrainer(config, progress=False, processes=processes).train_architecture(
            rack, data or batches_of(processes.rank, 2)
        )
    except ValueError as error:
        return str(error)


def uneven(processes, strategy):
    """Evaluations, where one process has fewer batches than the other, or none."""
    world_size = processes.world_size if processes else 1
    seen = []
    for counts in ((3, 1), (0, 2)):
        config = configure(strategy, world_size, max_steps=2, eval_interval=1, eval_batches=3)
        rack = rack_of(config)
        first, second = (batches_of(rank, 2, count=n) for rank, n in enumerate(counts))
        validation = (first, second)[processes.rank] if processes else first + second
        trainer = ArchitectureTrainer(config, progress=False, processes=processes)
        if not processes:
            config.training.eval_batches = None
        batches = batches_of(processes.rank if processes else 0, world_size, count=2)
        result = trainer.train_architecture(rack, batches, Unsized(validation))
        seen += [record.loss for record in result["validation"]]
    return seen


class Unsized:
    """Batches that do not tell how many they are."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def evaluated_in_place(processes):
    """What is brought to the device as a whole for the evaluation of a Rack that was trained in parts."""
    config = configure("fsdp", 2, max_steps=1)
    rack, moved, to = rack_of(config), [], torch.nn.Module.to
    batches = batches_of(processes.rank, 2, count=1)
    trainer = ArchitectureTrainer(config, progress=False, processes=processes)
    trainer.train_architecture(rack, batches)
    torch.nn.Module.to = lambda self, *args: moved.append(type(self).__name__) or to(self, *args)
    try:
        trainer.evaluate(rack, batches)
    finally:
        torch.nn.Module.to = to
    return moved


def quantised(processes, strategy, **training):
    """A frozen Stack of small integers: the losses behind it, or what refuses it."""
    config = configure(strategy, processes.world_size if processes else 1, max_steps=3, **training)
    rack = rack_of(config)
    quantize_stack(rack, 0)
    rank, world_size = (processes.rank, processes.world_size) if processes else (0, 1)
    trainer = ArchitectureTrainer(config, progress=False, processes=processes)
    try:
        records = trainer.train_architecture(rack, batches_of(rank, world_size, count=3))["records"]
    except ValueError as error:
        return str(error)
    return [record.loss for record in records]


def configured_data(processes, strategy, folder, **training):
    """Data and checkpoints as a configuration says, one folder for all."""
    world_size = processes.world_size if processes else 1
    config = configure(
        strategy,
        world_size,
        data={"task": "markov", "validation_fraction": 0.5},
        checkpoint_dir=str(folder),
        save_interval=3,
        max_steps=6,
        **training,
    )
    rack = rack_of(config)
    training, validation = create_data(config, *((processes.rank, world_size) if processes else ()))
    trainer = ArchitectureTrainer(config, progress=False, processes=processes)
    records = trainer.train_architecture(rack, training)["records"]
    return {
        "losses": [r.loss for r in records],
        "evaluation": trainer.evaluate(rack, validation),
        "folder": str(folder),
        "saved": sorted(path.name for path in folder.iterdir()),
        "weights": rack.state_dict(),
        "saved_weights": load_rack(folder / "step-6").state_dict(),
    }


def command(processes, folder):
    """Exit code and standard output of `stackwise train`."""
    path, printed = folder / f"config-{processes.rank}.yaml", io.StringIO()
    configure("ddp", 2, data={"task": "copy"}, max_steps=2).to_yaml(path)
    with contextlib.redirect_stdout(printed):
        code = cli.main(["train", str(path)])
    return code, printed.getvalue()


def documented_script(folder):
    """The one of docs/reference/cluster.md, beside a configuration; what it prints."""
    configure("ddp", 2, data={"task": "copy"}, max_steps=2).to_yaml(folder / "config.yaml")
    (script,) = fences("python")
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        exec(compile(script, "docs/reference/cluster.md", "exec"), {})
    return printed.getvalue()


def fences(language):
    page = (Path(__file__).parents[2] / "docs/reference/cluster.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def fails_alone(processes):
    """One rank's data ends in an error; what the other gets, and after how long."""

    def data():
        yield from batches_of(processes.rank, 2, count=3)
        if processes.rank == 1:
            raise OSError("the disk is gone")
        yield from batches_of(processes.rank, 2)

    class Failing:
        def __iter__(self):
            return data()

    config = configure("ddp", 2)
    try:
        # Its own context: the rank that fails leaves it, and with it the group.
        with processes:
            ArchitectureTrainer(config, progress=False, processes=processes).train_architecture(
                rack_of(config), Failing()
            )
    except (OSError, RuntimeError) as error:
        return {"error": type(error).__name__, "message": str(error)}


def resumed(processes, strategy, folder, **sections):
    """A run with dropout that was left behind its third step: what it ends with, and what it would have."""
    ends = []
    sections |= {"max_steps": 6, "save_interval": 3, "checkpoint_dir": str(folder)}
    sections |= {"checkpoint": {"keep_last": 9}}
    for resume in (False, True):
        config = configure(strategy, 2, model={"dropout": 0.1}, resume=resume, **sections)
        rack = rack_of(config, seed=7 + resume)
        batches = batches_of(processes.rank, 2, count=4)
        trainer = ArchitectureTrainer(config, progress=False, processes=processes)
        records = trainer.train_architecture(rack, batches)["records"]
        ends.append(([r.loss for r in records], rack.state_dict()))
        if processes.is_main and not resume:
            for path in folder.iterdir():
                if path.name != "step-3":
                    shutil.rmtree(path)
        processes.wait()
    return ends


def scenarios(processes, folder):
    """All that the tests ask about, by name; the last one ends the group."""
    for strategy in BOTH:
        yield f"plain-{strategy}", lambda s=strategy: train(processes, s)
        yield f"padded-{strategy}", lambda s=strategy: train(processes, s, padded=True, accumulation_steps=2)
        yield f"nan-{strategy}", lambda s=strategy: train(processes, s, prepare=breaks(processes.rank))
        yield f"data-{strategy}", lambda s=strategy: configured_data(processes, s, folder / s)
        for n in (1, 3):
            yield f"collectives-{strategy}-{n}", lambda s=strategy, n=n: collectives(processes, s, n)
        yield f"muon-{strategy}", lambda s=strategy: train(processes, s, **MUON)
        yield f"resumed-{strategy}", lambda s=strategy: resumed(processes, s, folder / f"resumed-{s}")
    yield "data-guarded", lambda: configured_data(processes, "ddp", folder / "guarded", guard=GUARD)
    units = {"training_architecture": "blockwise", "precision": "bf16_weights"}
    yield "resumed-units", lambda: resumed(processes, "ddp", folder / "resumed-units", **units)
    yield "bf16-fsdp", lambda: train(processes, "fsdp", precision="bf16", **SHORT)
    yield "reshard-fsdp", lambda: train(processes, "fsdp", **KEEPS)
    yield "recompute-fsdp", lambda: train(processes, "fsdp", **RECOMPUTE)
    yield "per_stack-fsdp", lambda: train(processes, "fsdp", **PER_STACK)
    yield "bf16_weights-ddp", lambda: train(processes, "ddp", precision="bf16_weights", **SHORT)
    for name, sections in LOCAL.items():
        yield f"{name}-ddp", lambda sections=sections: train(processes, "ddp", **sections)
    for strategy in BOTH:
        yield f"uneven-{strategy}", lambda s=strategy: uneven(processes, s)
    yield "in place", lambda: evaluated_in_place(processes)
    yield "quantised-ddp", lambda: quantised(processes, "ddp", training_architecture="stackwise")
    yield "no quantised", lambda: quantised(processes, "fsdp")
    yield "inputs", lambda: seen_inputs(processes)
    yield "other weights", lambda: refused(processes, seed=7 + processes.rank)
    yield "other frozen", lambda: refused(processes, frozen=processes.rank)
    yield "other settings", lambda: refused(processes, grad_clip=0.5 + processes.rank)
    yield (
        "other rows",
        lambda: refused(processes, data=create_data(configure("ddp", 2, data={"task": "copy"}))[0]),
    )
    yield "no scope", lambda: refused(processes, "fsdp", training_architecture="blockwise")
    yield "no growth", lambda: refused(processes, "fsdp", scope={"growth": True})
    yield "no masters", lambda: refused(processes, "fsdp", precision="bf16_weights")
    yield "no compiled", lambda: refused(processes, "fsdp", compile=True)
    yield "command", lambda: command(processes, folder)
    yield "script", lambda: documented_script(folder)
    yield "failure", lambda: fails_alone(processes)


GUARD = {"snapshot_interval": 8}
SHORT = {"max_steps": 6, "eval_interval": 3}
MUON = SHORT | {"optimizer": {"kind": "muon", "lr": 3e-3}}
KEEPS = SHORT | {"distributed": {"strategy": "fsdp", "reshard_after_forward": False}}
PER_STACK = SHORT | {"optimizer": {"lr": 3e-3, "per_stack": {0: {"lr": 1e-3}, 1: {"weight_decay": 0.5}}}}
RECOMPUTE = SHORT | {"recompute": {"kind": "full"}}
SAME = {
    "plain": {},
    "short": SHORT,
    "padded": {"padded": True, "accumulation_steps": 2},
    "per_stack": PER_STACK,
    "muon": MUON,
}
LOCAL = {
    "blockwise": {"training_architecture": "blockwise", "max_steps": 4, "eval_interval": 2},
    "stackwise": {"training_architecture": "stackwise", "max_steps": 4, "scope": {"polish_steps": 2}},
    "growth": {"max_steps": 8, "scope": {"growth": True}},
}


def main(folder):
    """What each rank does."""
    settings = TrainingConfig.from_dict({"device": "cpu", "distributed": {"strategy": "ddp"}})
    with Processes.from_environment(settings, timeout=timedelta(seconds=HANG_SECONDS)) as group:
        seen = {}
        for name, run in scenarios(group, folder):
            seen[name] = run()
        torch.save(seen, folder / f"rank-{group.rank}.pt")


def torchrun(folder):
    """As its command does it, but for what it starts: copies of this process, which has imported torch."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    options = ["--nproc-per-node", str(RANKS), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    config, _, _ = config_from_args(parse_args([*options, "--start-method", "fork", __file__]))
    elastic_launch(config, rank)(folder)


def rank(folder):
    """In a process that ends when `main` does: functions that torchrun calls wait for each other."""
    process = multiprocessing.get_context("fork").Process(target=main, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks saw, by the name of the scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    output = folder / "output"
    process = start(torchrun, folder, output=output, RANK=None, WORLD_SIZE=None, OMP_NUM_THREADS="1")
    assert end_of(process) == 0, output.read_text()
    seen = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return {name: [of_rank[name] for of_rank in seen] for name in seen[0]}


@pytest.fixture(scope="module")
def alone():
    """The same training in this one process, on the whole batches."""
    known = {}

    def run(name):
        if name not in known:
            known[name] = train(None, "none", **{**SAME, **LOCAL}[name])
        return known[name]

    return run


def assert_same(seen, expected, tolerance=1e-6):
    assert seen["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert seen["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    assert seen["validation"] == pytest.approx(expected["validation"], rel=tolerance)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(seen["weights"][name], weight, rtol=0, atol=2e-6, msg=name)
    assert seen["evaluation"] == pytest.approx(expected["evaluation"], rel=tolerance)


class TestSharing:
    @pytest.mark.parametrize("strategy", BOTH)
    @pytest.mark.parametrize("name", ["plain", "padded"])
    def test_ranks_train_as_one_process(self, ranks, alone, name, strategy):
        expected = alone(name)
        assert len(expected["losses"]) == STEPS
        assert min(expected["norms"]) > TRAINING["grad_clip"]  # clipping is part of what is compared
        for seen in ranks[f"{name}-{strategy}"]:
            assert_same(seen, expected)

    def test_parts_in_all_ways(self, ranks, alone):
        """Weights kept between the passes, recomputation and groups of the optimizer."""
        for name, same in {"reshard": "short", "recompute": "short", "per_stack": "per_stack"}.items():
            for seen in ranks[f"{name}-fsdp"]:
                assert_same(seen, alone(same))

    @pytest.mark.parametrize("name", ["blockwise", "stackwise", "growth"])
    def test_one_unit_after_the_other(self, ranks, alone, name):
        for seen in ranks[f"{name}-ddp"]:
            assert_same(seen, alone(name))

    @pytest.mark.parametrize("strategy", BOTH)
    def test_muon(self, ranks, alone, strategy):
        """Orthogonalised in bfloat16, so only nearly the same as one process; all ranks are the same."""
        first, second = ranks[f"muon-{strategy}"]
        assert first["losses"] == second["losses"]
        assert first["losses"] == pytest.approx(alone("muon")["losses"], rel=1e-5)

    @pytest.mark.parametrize("name", ["bf16-fsdp", "bf16_weights-ddp"])
    def test_bfloat16(self, ranks, alone, name):
        """As far from float32 as three digits are; the weights are float32 in the end."""
        for seen in ranks[name]:
            assert seen["losses"] == pytest.approx(alone("short")["losses"], rel=1e-3)
            assert seen["losses"] != alone("short")["losses"]
            assert {weight.dtype for weight in seen["weights"].values()} == {torch.float32}

    @pytest.mark.parametrize("strategy", BOTH)
    def test_all_ranks_end_with_the_same_bits(self, ranks, strategy):
        for name in ("plain", "padded", "muon"):
            first, second = ranks[f"{name}-{strategy}"]
            assert first["losses"] == second["losses"]
            assert first["kept"] and second["kept"]  # the Rack's own tensors, as an optimizer may hold them
            for weight, other in zip(first["weights"].values(), second["weights"].values(), strict=True):
                assert type(weight) is torch.Tensor
                assert torch.equal(weight, other)


class TestResume:
    @pytest.mark.parametrize("name", ["ddp", "fsdp", "units"])
    def test_to_the_same_bits(self, ranks, name):
        for (losses, weights), (again, same) in ranks[f"resumed-{name}"]:
            assert losses == again
            assert all(torch.equal(weight, same[key]) for key, weight in weights.items())

    @pytest.mark.parametrize("kind", [*BOTH, "guarded"])
    def test_on_another_number_of_processes(self, ranks, kind, tmp_path):
        """One process goes on where two were, with as many rows in all."""
        folder, settings = tmp_path / "run", {"guard": GUARD} if kind == "guarded" else {}
        shutil.copytree(Path(ranks[f"data-{kind}"][0]["folder"]) / "step-3", folder / "step-3")
        expected = configured_data(None, "none", tmp_path / "whole", **settings)
        with pytest.raises(ValueError, match=r"all processes together: got 6; allowed: 4"):
            configured_data(None, "none", folder, resume=True, batch_size=6, **settings)
        seen = configured_data(None, "none", folder, resume=True, **settings)
        assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(seen["weights"][name], weight, rtol=0, atol=2e-6, msg=name)


class TestSteps:
    @pytest.mark.parametrize("strategy", BOTH)
    def test_nan_in_one_rank_is_left_out_by_all(self, ranks, strategy):
        expected = train(None, "none", prepare=breaks(1))
        for seen in ranks[f"nan-{strategy}"]:
            step, message = seen["error"]
            assert step == 3
            assert "loss nan, gradient norm nan" in message
            for name, weight in expected["weights"].items():
                torch.testing.assert_close(seen["weights"][name], weight, rtol=0, atol=1e-6)

    def test_gradients_are_sent_once_a_step(self, ranks):
        """By DDP in one bucket, by FSDP2 one a Block and one for the ends.

        Beside them are sums of the count and of the loss, and of the norms of what is in parts.
        """
        for name, expected in {
            "ddp": {"allreduce": 3},
            "fsdp": {"allreduce": 2, "all_reduce": 1, "reduce_scatter_base": 3},
        }.items():
            for steps in (1, 3):
                for seen in ranks[f"collectives-{name}-{steps}"]:
                    assert {key: seen.get(key) for key in expected} == expected

    def test_weights_are_gathered_as_asked(self, ranks):
        """The ends once; of two Blocks the first again in the backward pass, the last not."""
        for steps in (1, 3):
            for seen in ranks[f"collectives-fsdp-{steps}"]:
                assert seen["allgather_base"] == 4 * steps

    @pytest.mark.parametrize("strategy", BOTH)
    def test_one_process_may_have_less_to_evaluate(self, ranks, strategy):
        expected = uneven(None, "none")
        for seen in ranks[f"uneven-{strategy}"]:
            assert seen == pytest.approx(expected, rel=1e-6)

    def test_a_rack_in_parts_is_evaluated_without_being_moved(self, ranks):
        """But for its ends, which go to the device and back."""
        for seen in ranks["in place"]:
            assert seen == ["TokenEmbedding", "RMSNorm", "Linear"] * 2

    def test_a_quantised_stack(self, ranks):
        expected = quantised(None, "none", training_architecture="stackwise")
        for seen in ranks["quantised-ddp"]:
            assert seen == pytest.approx(expected, rel=1e-6)

    def test_each_rank_masks_differently(self, ranks):
        first, second = ranks["inputs"]
        assert (first == 22).any() and (second == 22).any()
        assert not torch.equal(first, second)


class TestRun:
    @pytest.mark.parametrize("strategy", BOTH)
    def test_data_and_checkpoints_of_a_configuration(self, ranks, tmp_path, strategy):
        expected = configured_data(None, "none", tmp_path)
        for seen in ranks[f"data-{strategy}"]:
            assert seen["saved"] == ["step-3", "step-6"]
            assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-6)
            assert seen["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-6)
            for name, weight in expected["weights"].items():
                torch.testing.assert_close(seen["weights"][name], weight, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("strategy", BOTH)
    def test_a_checkpoint_has_the_whole_rack(self, ranks, strategy):
        for seen in ranks[f"data-{strategy}"]:
            assert seen["saved_weights"].keys() == seen["weights"].keys()
            for name, weight in seen["weights"].items():
                assert torch.equal(seen["saved_weights"][name], weight)

    def test_the_command(self, ranks):
        first, second = ranks["command"]
        assert first[0] == second[0] == 0
        assert "loss" in first[1]
        assert second[1] == ""

    def test_the_documented_script(self, ranks):
        first, second = ranks["script"]
        assert re.fullmatch(r"validation \d\.\d{4} nats\n", first)
        assert second == ""

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("other weights", "model.stacks.0.blocks.0.attention.qkv.weight in rank 1"),
            ("other frozen", "model.stacks.0.blocks.0.attention_norm.weight in rank 1: got ('trains', "),
            ("other settings", "training.grad_clip in rank 1: got 1.5; allowed: 0.5, as in rank 0"),
            ("other rows", "dataloader: got 'rank 0 of 1'; allowed: rank 1 of 2"),
        ],
    )
    def test_what_is_not_the_same_in_all_is_refused(self, ranks, name, message):
        assert message in ranks[name][1]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("scope", "training.training_architecture: got 'blockwise'; allowed: 'rackwise'"),
            ("growth", "training.scope.growth: got True; allowed: false"),
            ("masters", "training.precision: got 'bf16_weights'; allowed: 'bf16'"),
            ("compiled", "training.compile: got True; allowed: false"),
            (
                "quantised",
                "training.distributed.strategy: got 'fsdp'; allowed: 'ddp', since stacks.0.blocks.0.",
            ),
        ],
    )
    def test_what_parts_cannot_do_is_refused(self, ranks, name, message):
        for seen in ranks[f"no {name}"]:
            assert seen.startswith(message)

    def test_an_error_in_one_rank_ends_all(self, ranks):
        first, second = ranks["failure"]
        assert second["error"] == "OSError"
        assert first["error"] == "RuntimeError"
        assert "Connection" in first["message"]  # gloo: the other is gone


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


class TestEnvironment:
    def settings(self, strategy, **others):
        return TrainingConfig.from_dict({"device": "cpu", "distributed": {"strategy": strategy}, **others})

    def test_without_torchrun_this_process_is_alone(self):
        processes = Processes.from_environment(self.settings("none"), {})
        assert (processes.rank, processes.world_size, processes.is_main) == (0, 1, True)
        values = torch.ones(3)
        assert processes.sum(values) is values
        with processes:
            processes.wait()
        assert not torch.distributed.is_initialized()

    @pytest.mark.parametrize("strategy", BOTH)
    def test_a_strategy_needs_torchrun(self, strategy):
        with pytest.raises(
            ValueError, match=r"training\.distributed\.strategy: got '.*'; allowed: 'none', or a start"
        ):
            Processes.from_environment(self.settings(strategy), {})
        config = configure(strategy, 1)
        with pytest.raises(ValueError, match=r"training\.distributed\.strategy: .*from_environment"):
            ArchitectureTrainer(config)

    def test_several_processes_need_a_strategy(self, monkeypatch):
        environment = {**TORCHRUN, "MASTER_PORT": "1"}
        with pytest.raises(
            ValueError, match=r"training\.distributed\.strategy: got 'none'; allowed: 'ddp' or 'fsdp' for 2"
        ):
            Processes.from_environment(self.settings("none"), environment)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=r"training\.distributed\.strategy"):
            ArchitectureTrainer(configure("none", 1))

    def test_one_process_under_torchrun_needs_none(self):
        environment = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}
        assert Processes.from_environment(self.settings("none"), environment).mesh is None

    def test_a_variable_that_is_missing_is_named(self):
        with pytest.raises(ValueError, match="MASTER_PORT: got None"):
            Processes.from_environment(self.settings("ddp"), TORCHRUN)

    @pytest.mark.parametrize(
        ("device", "count", "message"),
        [
            ("cuda", 1, r"training\.device: got 'cuda, LOCAL_RANK=1'; allowed: at most 1 processes"),
            ("cuda:1", 2, r"training\.device: got 'cuda:1'; allowed: auto, cuda or cpu"),
        ],
    )
    def test_a_device_for_each_process(self, monkeypatch, device, count, message):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        settings = self.settings("ddp", device=device)
        with pytest.raises(ValueError, match=message):
            Processes.from_environment(settings, {**TORCHRUN, "MASTER_PORT": "1"})

    def test_seeds(self):
        """The first process draws as one alone would."""
        seeds = [Processes(torch.device("cpu"), rank=rank, world_size=8).seed(2**63 - 1) for rank in range(8)]
        assert seeds[0] == 2**63 - 1
        assert len(set(seeds)) == 8
        assert all(0 <= seed < 2**63 for seed in seeds)


class TestClusterPage:
    def test_slurm_script(self):
        (script,) = (text for text in fences("bash") if "#SBATCH" in text)
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        assert "train config.yaml --training.distributed.strategy fsdp" in script

    def test_kubernetes_job(self):
        service, job = (load_yaml(text.encode()) for text in fences("yaml")[0].split("---\n"))
        pod = job["spec"]["template"]["spec"]
        assert service["metadata"]["name"] == pod["subdomain"]
        assert service["spec"]["selector"]["job-name"] == job["metadata"]["name"]
        (command,) = pod["containers"][0]["args"]
        first = f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']}"
        assert first in command and f"--nnodes {job['spec']['completions']} " in command
