"""Checkpoints: a run goes on bit for bit; a full disk and damage cost one checkpoint and not the run."""

import errno
import json
import math
import os
import random
import shutil
import stat
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from stackwise.checkpoint import (
    CheckpointManager,
    CheckpointWarning,
    DamagedCheckpointError,
    export,
)
from stackwise.checkpoint.folder import MANIFEST, Manifest, entries_of
from stackwise.data import TokenWindows
from stackwise.support.tensor_tree import leaves
from tests.optimizer_kinds import PLACES, Contained, Held, Lookahead, Momentum, WithLayout

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
FILES = [MANIFEST, "state-00000.json", "state-00000.safetensors", "tensors/rank-00000.safetensors"]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


class Run:
    """A training run with everything that can be forgotten."""

    def __init__(self, seed=0, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4, bias=False)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.05, **options)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5, 5, 9], 0.5)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        self.counts = {"steps": 0}

    @property
    def objects(self):
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "counts": self.counts,
        }

    def train(self, steps):
        for _ in range(steps):
            x = torch.randn(6, 4) * random.random() + float(np.random.rand())  # noqa: NPY002
            self.scaler.scale(self.model(x).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.counts["steps"] += 1
        return self

    def bits(self):
        """All that the next step depends on."""
        state = {name: each.state_dict() for name, each in self.objects.items() if name != "counts"}
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        return flat((state, self.counts, drawn))


def flat(tree):
    if isinstance(tree, dict):
        return [(key, flat(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return [flat(value) for value in tree]
    if isinstance(tree, torch.Tensor | np.ndarray):
        array = np.asarray(tree.detach() if isinstance(tree, torch.Tensor) else tree)
        return array.dtype.str, array.shape, array.tobytes()
    return repr(tree)


def content_of(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def flip(path, offset=None, bit=3):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1 << bit
    path.write_bytes(content)


def raised_os_error(number):
    def raising(*_, **__):
        raise OSError(number, os.strerror(number))

    return raising


@BOTH
@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
    ],
    ids=["AdamW", "fused", "momentum", "SGD", "Adagrad"],
)
def test_restored_run_continues_bit_for_bit(tmp_path, kind, options, asynchronous):
    whole = Run(optimizer=kind, **options).train(12).bits()
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as manager:
        run = Run(optimizer=kind, **options).train(7)
        before = run.bits()
        assert manager.save(7, run.objects) == tmp_path / "step-7"
        assert run.bits() == before
        assert run.train(5).bits() == whole  # a save leaves the run as it is
    other = Run(seed=9, optimizer=kind, **options).train(2)
    found = CheckpointManager(tmp_path).restore(other.objects)
    assert other.bits() == before
    assert other.train(5).bits() == whole
    assert (found.step, found.path, found.world_size) == (7, tmp_path / "step-7", 1)
    assert (found.remarks, found.damaged) == ((), ())


def test_restored_state_is_independent_of_the_file(tmp_path):
    run, manager = Run().train(3), CheckpointManager(tmp_path)
    manager.save(3, run.objects)
    manager.restore(run.objects)
    before = run.bits()
    for name in FILES:
        (tmp_path / "step-3" / name).write_bytes(bytes((tmp_path / "step-3" / name).stat().st_size))
    shutil.rmtree(tmp_path)
    assert run.bits() == before
    assert run.train(2).bits() == Run().train(5).bits()


def test_asynchronous_save_keeps_the_state_at_the_call(tmp_path, monkeypatch):
    """However late the thread comes to write it."""
    run = Run().train(3)
    manager = CheckpointManager(tmp_path, asynchronous=True)
    go, finish = threading.Event(), CheckpointManager._finish
    monkeypatch.setattr(CheckpointManager, "_finish", lambda *given: go.wait(30) and finish(*given))
    manager.save(3, run.objects)
    before = run.bits()
    run.train(4)
    assert manager.steps() == []
    go.set()
    manager.wait()
    CheckpointManager(tmp_path).restore(run.objects)
    assert run.bits() == before
    # The copies of the first save are those of the second.
    manager.save(4, run.train(1).objects)
    before = run.bits()
    run.train(2)
    manager.close()
    CheckpointManager(tmp_path).restore(run.objects)
    assert run.bits() == before


def test_data_loader_resumes_at_its_position(tmp_path):
    def made():
        return TokenWindows(torch.arange(100), 2, 4, shuffle=True)

    whole = [flat(batch) for _, batch in zip(range(20), passes(made()), strict=False)]
    loader = made()
    for _, _ in zip(range(14), passes(loader), strict=False):  # in the second epoch
        pass
    CheckpointManager(tmp_path).save(14, {"data": loader})
    other = made()
    CheckpointManager(tmp_path).restore({"data": other})
    assert [flat(batch) for _, batch in zip(range(6), passes(other), strict=False)] == whole[14:]


def passes(loader):
    while True:
        yield from loader


def test_some_of_the_objects(tmp_path):
    run, manager = Run().train(3), CheckpointManager(tmp_path)
    manager.save(3, run.objects)
    other = Run(seed=1)
    manager.restore({"model": other.model})
    assert flat(other.model.state_dict()) == flat(run.model.state_dict())
    with pytest.raises(ValueError, match=r"^objects: got 'guard'; allowed: what .*step-3 has: counts, model"):
        manager.restore({"model": other.model, "guard": {}})
    with pytest.raises(RuntimeError, match="size mismatch"):
        manager.restore({"model": nn.Sequential(nn.Linear(3, 8))})


def test_checkpoint_of_a_compiled_model_restores_a_plain_model(tmp_path):
    run, manager = Run().train(3), CheckpointManager(tmp_path)
    compiled = torch.compile(run.model, backend="eager")
    manager.save(3, {"model": compiled})
    other = Run(seed=1)
    manager.restore({"model": other.model})
    assert flat(other.model.state_dict()) == flat(run.model.state_dict())


def in_parts(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    for i in compiled:
        model[i] = torch.compile(model[i], backend="eager")
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def one_step(model, optimizer):
    for p in model.parameters():  # by hand, so that nothing is compiled
        p.grad = torch.arange(1.0, p.numel() + 1).view_as(p)
    optimizer.step()
    model[1].running_mean += 1
    return flat([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("saved, restored", [((0, 1), ()), ((), (0, 1)), ((0,), (1,))])
def test_names_are_those_of_a_model_that_is_not_compiled(tmp_path, saved, restored):
    run, manager = in_parts(saved), CheckpointManager(tmp_path / "run")
    one_step(**run)
    path = manager.save(1, run)
    expected = one_step(**run)
    fresh = in_parts(restored)
    nn.init.zeros_(next(fresh["model"].parameters()))
    manager.restore(fresh)
    assert one_step(**fresh) == expected
    export(path, "model", tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == in_parts(())["model"].state_dict().keys()


class MadeWhileLoading(nn.Module):
    """Has no scale before a state has one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)

    def _load_from_state_dict(self, state, prefix, *rest):
        if f"{prefix}scale" in state:
            self.scale = state[f"{prefix}scale"].clone()
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("compiled", [False, True])
def test_state_created_by_a_compiled_part_while_loading_is_restored(tmp_path, compiled):
    def made(compiled):
        part = MadeWhileLoading()
        inside = torch.compile(part, backend="eager") if compiled else part
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(inside)), part

    model, part = made(compiled)
    part.scale = torch.tensor([5.0])
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": model})
    fresh, part = made(True)
    manager.restore({"model": fresh})
    assert part.scale == 5


class OfItsOwnLayout(torch.optim.SGD):
    def state_dict(self):
        return {"state": {"seen": 1}, "inner": super().state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state["inner"])


def test_an_optimizer_whose_state_has_a_layout_of_its_own(tmp_path):
    model, manager = nn.Linear(2, 2), CheckpointManager(tmp_path)
    manager.save(1, {"model": model, "optimizer": OfItsOwnLayout(model.parameters(), lr=0.5)})
    optimizer = OfItsOwnLayout(model.parameters(), lr=0.1)
    manager.restore({"model": model, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5


class Averaging(torch.optim.Optimizer):
    """Keeps its averages in float32, whatever the parameters are in, beside other numbers."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["average"] = torch.zeros_like(p, dtype=torch.float32)
                state["nested"] = {"several": [torch.tensor(1 / 3), torch.tensor(0)], "pair": ()}
                state["like it"] = torch.zeros_like(p)
            state["average"].mul_(0.9).add_(p.grad.float(), alpha=0.1)
            state["nested"]["several"][1] += 1
            state["like it"] += p.grad
            state["nested"]["pair"] = torch.tensor(math.nan), torch.tensor(2**30 + 1)
            p.sub_((0.1 * state["average"]).to(p.dtype))


class Halving(Averaging):
    """Does something of its own with what it is given."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for each in self.state.values():
            each["average"] = each["average"].bfloat16() / 2


def small(kind, dtype):
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = kind(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 3, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def dtypes_of(optimizer):
    [state, _] = optimizer.state.values()
    return {".".join(map(str, path)): leaf.dtype for path, leaf in leaves(state).items()}


def bits_of(optimizer):
    states = leaves(list(optimizer.state.values()))
    return {path: (leaf.dtype, leaf.reshape(-1).view(torch.uint8).tolist()) for path, leaf in states.items()}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    "kind",
    [Averaging, torch.optim.NAdam, torch.optim.ASGD, torch.optim.AdamW],
    ids=lambda kind: kind.__name__,
)
def test_the_state_of_an_optimizer_is_not_rounded(tmp_path, kind, alone):
    run, manager = small(kind, torch.bfloat16), CheckpointManager(tmp_path)
    kept = ["optimizer"] if alone else ["model", "optimizer"]
    manager.save(3, {name: run[name] for name in kept})
    fresh = small(kind, torch.bfloat16)
    fresh["optimizer"].state.clear()
    manager.restore({name: fresh[name] for name in kept})
    if alone and kind is Averaging:  # its parameters may have been in float32, for all that is known
        for state in run["optimizer"].state.values():
            state["average"] = state["average"].bfloat16()
    assert bits_of(fresh["optimizer"]) == bits_of(run["optimizer"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor], ids=lambda kind: kind.__name__)
def test_optimizer_alone_is_restored_beside_weights_of_another_dtype(tmp_path, kind):
    manager = CheckpointManager(tmp_path)
    manager.save(3, {"optimizer": small(kind, torch.float32)["optimizer"]})
    run = small(kind, torch.bfloat16)
    expected = dtypes_of(run["optimizer"])
    manager.restore({"optimizer": run["optimizer"]})
    assert dtypes_of(run["optimizer"]) == expected
    run["model"](torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    run["optimizer"].step()


def test_optimizer_state_follows_the_dtype_of_its_parameter(tmp_path):
    """Where that is another one than was saved; all else stays what it was."""
    run, manager = small(Averaging, torch.bfloat16), CheckpointManager(tmp_path)
    manager.save(3, run)
    fresh = small(Averaging, torch.float64)
    manager.restore(fresh)
    wanted = dtypes_of(run["optimizer"])
    assert wanted.pop("like it") == torch.bfloat16
    found = dtypes_of(fresh["optimizer"])
    assert found.pop("like it") == torch.float64
    assert found == wanted


def test_state_converted_by_the_optimizer_itself_is_kept(tmp_path):
    run, manager = small(Halving, torch.bfloat16), CheckpointManager(tmp_path)
    manager.save(3, run)
    fresh = small(Halving, torch.bfloat16)
    manager.restore(fresh)
    for ours, theirs in zip(fresh["optimizer"].state.values(), run["optimizer"].state.values(), strict=True):
        assert torch.equal(ours["average"], theirs["average"].bfloat16() / 2)


def test_optimizer_state_is_matched_by_parameter_name(tmp_path):
    def made(order):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        named = dict(model.named_parameters())
        groups = [{"params": [named[name] for name in names], "lr": lr} for names, lr in order]
        return model, torch.optim.Adam(groups)

    def step(model, optimizer):
        for _ in range(3):
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [flat(p) for p in model.parameters()]

    first = (["0.weight", "1.bias"], 0.1), (["0.bias", "1.weight"], 0.2)
    turned = (["1.bias", "0.weight"], 0.3), (["1.weight", "0.bias"], 0.4)
    model, optimizer = made(first)
    step(model, optimizer)
    manager = CheckpointManager(tmp_path)
    manager.save(3, {"model": model, "optimizer": optimizer})
    expected = step(model, optimizer)
    model, optimizer = made(turned)
    manager.restore({"model": model, "optimizer": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert optimizer.param_groups[0]["params"][0] is model[1].bias
    assert step(model, optimizer) == expected
    model, optimizer = made([*first[:1]])
    with pytest.raises(ValueError, match=r"param_groups\[1\]: got 'other parameters than those saved"):
        manager.restore({"model": model, "optimizer": optimizer})
    model, optimizer = made([(["0.weight", "0.bias"], 0.1), (["1.bias", "1.weight"], 0.2)])
    with pytest.raises(ValueError, match=r"param_groups\[0\].*\(model\.0\.bias, model\.1\.bias\)"):
        manager.restore({"model": model, "optimizer": optimizer})
    with pytest.raises(ValueError, match="an optimizer alone"):
        manager.restore({"optimizer": optimizer})


def test_an_optimizer_alone(tmp_path):
    run, manager = Run().train(3), CheckpointManager(tmp_path)
    manager.save(3, {"optimizer": run.optimizer})
    other = Run()
    manager.restore({"optimizer": other.optimizer})
    assert flat(other.optimizer.state_dict()) == flat(run.optimizer.state_dict())


def test_metric_notes_and_third_party_files_are_restored(tmp_path):
    weights = {"w": torch.ones(3)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            1,
            {"counts": {}},
            metric=np.float32(0.25),
            notes={"config": {"a": [1, (2, None)]}, "nan": float("nan")},
            files={
                "model.safetensors": lambda path: save_file(weights, path),
                "config.yaml": lambda path: path.write_text("a: 1\n"),
            },
        )
    found = CheckpointManager(tmp_path).restore({})
    assert found.metric == 0.25 and type(found.metric) is float
    assert found.notes["config"] == {"a": [1, (2, None)]}
    assert found.notes["nan"] != found.notes["nan"]
    assert found.versions["torch"] == torch.__version__
    assert torch.equal(load_file(found.path / "model.safetensors")["w"], weights["w"])
    # As readable as all others; the library alone would make it readable for its writer only.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in found.path.rglob("*") if path.is_file()}
    assert len(modes) == 1
    flip(found.path / "config.yaml", 0)
    with pytest.raises(DamagedCheckpointError, match=r"config\.yaml: it was changed"):
        CheckpointManager(tmp_path).restore({}, 1)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/x",
        "a/b",
        "a\\b",
        "",
        ".hidden",
        "manifest.json",
        "STATE-00000.json",
        "tensors",
        "x.pt",
        "x.PKL",
        "x.bin",
        "state-00001.safetensors",
        "a\n",
        "x" * 300,
    ],
)
def test_invalid_file_name_is_refused(tmp_path, name):
    manager = CheckpointManager(tmp_path / "here")
    with pytest.raises(ValueError, match=r"^files: got"):
        manager.save(1, {}, files={name: lambda path: path.write_text("")})
    assert content_of(tmp_path) == {}
    assert names_in(tmp_path) in ([], ["here"])


@BOTH
@pytest.mark.parametrize(
    "metric", [torch.tensor(0.25), torch.tensor(0.25, dtype=torch.bfloat16), np.array(0.25)]
)
def test_numbers_of_arrays(tmp_path, metric, asynchronous):
    """As an evaluation gives them: a step that was counted in an array, a loss that is a tensor."""
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as manager:
        assert manager.save(np.int64(3), {"counts": {}}, metric=metric) == tmp_path / "step-3"
    found = CheckpointManager(tmp_path).restore({}, np.int64(3))
    assert (found.step, found.metric) == (3, 0.25)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda m: m.save(-1, {}), "^step: got -1"),
        (lambda m: m.save(True, {}), "^step: got True"),
        (lambda m: m.save(10**19, {}), "^step: got"),
        (lambda m: m.save(1, {"model": 3}), r"^objects\['model'\]: got 'int'"),
        (lambda m: m.save(1, {"a/b": {}}), "^objects: got 'a/b'"),
        (lambda m: m.save(1, {"c": {"x": [object()]}}), r"^c\.x\.0: got builtins\.object"),
        (lambda m: m.save(1, {"c": {"x": torch.ones(1, dtype=torch.complex128)}}), "complex128"),
        (lambda m: m.save(np.float64(1), {}), "^step: got 1.0"),
        (lambda m: m.save(1, {}, metric="low"), "^metric: got 'low'"),
        (
            lambda m: m.save(1, {}, metric=10**400),
            "^metric: got 1000.*; allowed: a number that a float can hold",
        ),
        (lambda m: m.save(1, {}, metric=torch.ones(2)), "^metric: got tensor"),
        (lambda m: m.save(1, {}, notes={"t": torch.ones(1)}), "^notes: got"),
        (lambda m: m.save(1, {}, files={"x": lambda path: None}), r"^files\['x'\]: got 'no file'"),
        (lambda m: m.restore({}, 4), r"^step: got 4; allowed: one of those in .*: \[\]"),
        (lambda m: m.verify(4), "^step: got 4"),
    ],
)
def test_refused(tmp_path, call, match):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match=match):
        call(manager)
    assert list(tmp_path.iterdir()) == []
    # What was asked for wrongly does not stand in the way of what is right.
    assert manager.save(1, {}) is not None


def test_tensors_are_a_file(tmp_path):
    """As many as there are, also copied first, and the library's own reader reads them."""
    weights = {"b": torch.arange(5).bfloat16(), "a": torch.randn(3, 4)[:, ::2], "c": torch.tensor(True)}
    kept = {name: tensor.clone() for name, tensor in weights.items()}
    for asynchronous in (False, True):
        manager = CheckpointManager(tmp_path / str(asynchronous), asynchronous=asynchronous)
        path = manager.save(1, {}, files={"own": weights, "weights.safetensors": weights})
        for tensor in weights.values():
            tensor.zero_()
        manager.close()
        for name in ("own", "weights.safetensors"):
            found = load_file(path / name)
            assert found.keys() == kept.keys()
            assert all(found[key].dtype == kept[key].dtype and found[key].equal(kept[key]) for key in kept)
        for name, tensor in kept.items():
            weights[name].copy_(tensor)
    for wrong in ({"x": 3}, {"x": torch.ones(2).to_sparse()}):
        with pytest.raises(ValueError, match=r"^files\['w'\]\['x'\]: got"):
            manager.save(2, {}, files={"w": wrong})
    with pytest.raises(ValueError, match=r"^files\['w'\]: got 3; allowed: a function of a path, or tensors"):
        manager.save(2, {}, files={"w": 3})


def test_file_as_directory_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ValueError, match=r"^directory: got"):
        CheckpointManager(tmp_path / "x")


def test_restore_without_checkpoints_returns_none(tmp_path):
    manager = CheckpointManager(tmp_path / "new")
    assert manager.restore({"counts": {}}) is None
    assert (manager.latest(), manager.best(), manager.steps()) == (None, None, [])
    assert not (tmp_path / "new").exists()


def test_order_is_by_number(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=9)
    for step in (900, 10000, 9000):
        manager.save(step, {"counts": {"at": step}})
    for path, time in (("step-10000", 1), ("step-900", 3), ("step-9000", 2)):
        os.utime(tmp_path / path, (time, time))
    for junk in ("step-x", "step-099999", "step-99999.old", ".step-99999.1", "step--1", f"step-{'9' * 30}"):
        (tmp_path / junk).mkdir()
    (tmp_path / "step-77777").write_text("a file")
    assert manager.steps() == [900, 9000, 10000]
    assert manager.latest() == tmp_path / "step-10000"
    counts = {}
    assert manager.restore({"counts": counts}).step == 10000
    assert counts == {"at": 10000}
    assert manager.restore({"counts": counts}, 900).step == 900
    assert counts == {"at": 900}


@BOTH
def test_retention(tmp_path, asynchronous):
    losses = {1: 9.0, 2: 1.0, 3: 8.0, 4: 7.0, 5: 7.5, 6: 7.5, 7: float("nan")}
    with CheckpointManager(
        tmp_path, keep_last=2, keep_every=4, keep_best=1, asynchronous=asynchronous
    ) as manager:
        for step, loss in losses.items():
            manager.save(step, {"counts": {}}, metric=loss)
    assert manager.steps() == [2, 4, 6, 7]
    assert manager.best() == tmp_path / "step-2"
    assert sorted(names_in(tmp_path)) == ["step-2", "step-4", "step-6", "step-7"]
    higher = CheckpointManager(tmp_path, lower_is_better=False)
    assert higher.best() == tmp_path / "step-6"


def test_newest_save_survives_retention(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(50, {})
    manager.save(10, {})  # a run that went back
    assert manager.steps() == [10, 50]
    manager.save(11, {})
    assert manager.steps() == [11, 50]


@BOTH
def test_rewind_sets_later_checkpoints_aside(tmp_path, asynchronous):
    manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
    for step in (10, 20, 30):
        manager.save(step, {"counts": {"step": step}})
    manager.rewind(25)
    assert names_in(tmp_path) == ["step-10", "step-20", "step-30.damaged"]
    assert manager.restore({"counts": {}}).step == 20
    manager.rewind(25)  # where there is nothing later
    manager.save(30, {"counts": {"step": 30}})
    manager.close()
    assert manager.steps() == [10, 20, 30]
    assert CheckpointManager(tmp_path).restore({"counts": {}}).step == 30


@BOTH
def test_rewind_keeps_the_only_checkpoints_until_the_next_save(tmp_path, asynchronous):
    """Else a run that is killed meanwhile would begin anew."""
    manager = CheckpointManager(tmp_path, keep_last=2, asynchronous=asynchronous)
    for step in (30, 40):
        manager.save(step, {"counts": {"step": step}})
    manager.rewind(25)
    assert manager.steps() == [30, 40]
    manager.save(40 if asynchronous else 28, {"counts": {"step": "new"}})
    manager.close()
    assert manager.steps() == [40 if asynchronous else 28]
    counts = {}
    CheckpointManager(tmp_path).restore({"counts": counts})
    assert counts == {"step": "new"}


def test_rewind_warns_if_a_checkpoint_cannot_be_set_aside(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    for step in (20, 30):
        manager.save(step, {})
    monkeypatch.setattr("stackwise.checkpoint.manager.set_aside", raised_os_error(errno.EROFS))
    with pytest.warns(CheckpointWarning, match="rolled back keeps its name: .*step-30: .*Read-only"):
        manager.rewind(20)


@BOTH
def test_second_save_of_a_step_replaces_the_first(tmp_path, asynchronous):
    manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
    for value in (1, 2):
        manager.save(5, {"counts": {"value": value}})
    manager.close()
    counts = {}
    manager.restore({"counts": counts})
    assert counts == {"value": 2}
    assert names_in(tmp_path) == ["step-5"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "harm", ["flip", "truncate", "lengthen", "empty", "remove", "link", "folder", "zeros"]
)
def test_damaged_checkpoint_is_named_and_the_previous_one_restored(tmp_path, name, harm):
    run, manager = Run().train(2), CheckpointManager(tmp_path / "run")
    manager.save(2, run.objects)
    before = run.bits()
    manager.save(4, run.train(2).objects)
    path = tmp_path / "run/step-4" / name
    content = path.read_bytes()
    if harm == "flip":
        flip(path)
    elif harm == "truncate":
        path.write_bytes(content[:-1])
    elif harm == "lengthen":
        path.write_bytes(content + b"\n")
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "zeros":
        path.write_bytes(bytes(len(content)))
    else:
        path.rename(tmp_path / "elsewhere")
        if harm == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif harm == "folder":
            path.mkdir()
    with pytest.raises(DamagedCheckpointError) as raised:
        manager.verify(4)
    assert (raised.value.folder, raised.value.file) == (tmp_path / "run/step-4", name)
    assert str(path) in str(raised.value)
    fresh, other = CheckpointManager(tmp_path / "run"), Run(seed=5)
    untouched = other.bits()
    with pytest.raises(DamagedCheckpointError):
        fresh.restore(other.objects, 4)
    assert other.bits() == untouched
    with pytest.warns(CheckpointWarning, match=f"passed over: {path}"):
        found = fresh.restore(other.objects)
    assert other.bits() == before
    assert (found.step, found.damaged) == (2, (tmp_path / "run/step-4",))
    # No later restore takes what this run has gone back behind.
    assert fresh.latest() == tmp_path / "run/step-2"
    assert names_in(tmp_path / "run") == ["step-2", "step-4.damaged"]
    # The run comes to the same step again and writes it anew.
    fresh.save(4, other.objects)
    fresh.verify(4)


def test_restore_fails_if_every_checkpoint_is_damaged(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {"counts": {"step": step}})
        flip(tmp_path / f"step-{step}/state-00000.json")
    with pytest.raises(
        DamagedCheckpointError, match=r"step-2.*none of the 2 checkpoints of the run is whole"
    ):
        manager.restore({"counts": {}})


def test_retention_does_not_count_damaged_checkpoints(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    manager.save(1, {})
    manager.save(8, {})
    flip(tmp_path / "step-8/state-00000.json")
    with pytest.warns(CheckpointWarning):
        assert manager.restore({}).step == 1
    for step in (2, 3):
        manager.save(step, {})
    assert names_in(tmp_path) == ["step-2", "step-3", "step-8.damaged"]
    manager.save(9, {})
    assert names_in(tmp_path) == ["step-3", "step-8.damaged", "step-9"]
    manager.save(10, {})
    assert names_in(tmp_path) == ["step-10", "step-9"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", [MANIFEST, "state-00000.json", "tensors/rank-00000.safetensors"])
def test_temporary_read_error_is_raised_and_not_skipped(tmp_path, monkeypatch, number, name):
    """Else the run goes back, and the restart after takes what it has gone back behind."""
    run, manager = Run().train(1), CheckpointManager(tmp_path)
    manager.save(1, run.objects)
    manager.save(2, run.train(1).objects)
    opened = Path.open

    def refusing(self, *given, **options):
        if self == tmp_path / "step-2" / name:
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, *given, **options)

    monkeypatch.setattr(Path, "open", refusing)
    before = run.train(1).bits()
    with pytest.raises(OSError, match=r"step-2") as raised:
        manager.restore(run.objects)
    assert raised.value.errno == number
    assert run.bits() == before
    assert names_in(tmp_path) == ["step-1", "step-2"]
    monkeypatch.undo()
    assert manager.restore(run.objects).step == 2


def test_io_error_while_reading_counts_as_damage(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, {})
    opened = Path.open

    def broken(self, *given, **options):
        if self == tmp_path / "step-2" / MANIFEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(self, *given, **options)

    monkeypatch.setattr(Path, "open", broken)
    with pytest.warns(CheckpointWarning, match="passed over"):
        assert manager.restore({}).step == 1


@pytest.mark.parametrize("step", [None, 5])
def test_checkpoint_of_an_interrupted_replacement_is_recovered(tmp_path, monkeypatch, step):
    manager = CheckpointManager(tmp_path)
    for number in (4, 5):
        manager.save(number, {"counts": {"a": number}})
    (tmp_path / "step-5").rename(tmp_path / f".step-5.{os.getppid()}.old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", raised_os_error(errno.EROFS))
        with pytest.raises(OSError, match="Read-only"):  # and not the checkpoint before it
            manager.restore({}, step)
    counts = {}
    assert manager.restore({"counts": counts}, step).step == 5
    assert (counts, names_in(tmp_path)) == ({"a": 5}, ["step-4", "step-5"])


@BOTH
def test_on_complete_is_called_with_each_complete_checkpoint(tmp_path, asynchronous):
    copies = tmp_path / "copies"

    def copy(folder):
        shutil.copytree(folder, copies / folder.name)

    here = CheckpointManager(tmp_path / "here", keep_last=1, asynchronous=asynchronous, on_complete=copy)
    with here as manager:
        for step in (1, 2):
            manager.save(step, {"counts": {"step": step}})
    assert names_in(copies) == ["step-1", "step-2"]
    counts = {}
    assert CheckpointManager(copies).restore({"counts": counts}).step == counts["step"] == 2


@BOTH
def test_error_of_on_complete_is_a_warning(tmp_path, asynchronous):
    def fail(folder):
        raise RuntimeError("no such bucket")

    manager = CheckpointManager(tmp_path, asynchronous=asynchronous, on_complete=fail)
    with pytest.warns(CheckpointWarning, match=r"on_complete of .*step-1: RuntimeError: no such bucket"):  # noqa: PT031
        manager.save(1, {})
        manager.close()
    assert manager.steps() == [1]


NUMBERS = pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])


@NUMBERS
@BOTH
@pytest.mark.parametrize("operation", ["write", "fsync", "mkdir", "open", "rename"])
def test_disk_error_keeps_earlier_checkpoints(tmp_path, monkeypatch, number, asynchronous, operation):
    manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
    run = Run().train(2)
    manager.save(2, run.objects)
    manager.wait()
    before = content_of(tmp_path)
    refuse, call = raised_os_error(number), getattr(os, operation)

    def refusing(*given, **options):
        # To open a folder is also how it is removed.
        return refuse() if operation != "open" or given[1] & os.O_WRONLY else call(*given, **options)

    monkeypatch.setattr(os, operation, refusing)
    with pytest.warns(  # noqa: PT031
        CheckpointWarning, match=r"step 3 is not written; earlier ones are as they were.*Errno"
    ):
        path = manager.save(3, run.train(1).objects)
        assert path is None or asynchronous
        manager.wait()
    monkeypatch.undo()
    assert content_of(tmp_path) == before
    assert names_in(tmp_path) == ["step-2"]
    run.train(1)  # goes on
    with pytest.raises(OSError, match="the last checkpoint, of step 3, is not written") as raised:
        manager.close()
    assert raised.value.errno == number
    manager.save(4, run.objects)
    manager.close()
    assert manager.steps() == [2, 4]
    CheckpointManager(tmp_path).verify(4)


@pytest.mark.parametrize("count", range(1, 16))
def test_disk_error_at_any_operation_keeps_a_restorable_checkpoint(tmp_path, monkeypatch, count):
    """Also between two renames: what was there is there."""
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(3, {"counts": {"good": 1}})
    manager.save(4, {"counts": {"good": 1}})
    calls = []

    def refusing(name, function):
        def call(*given, **options):
            calls.append(name)
            if len(calls) == count:
                raise OSError(errno.ENOSPC, "full")
            return function(*given, **options)

        return call

    for name in ("write", "fsync", "mkdir", "rename", "open"):
        monkeypatch.setattr(os, name, refusing(name, getattr(os, name)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        written = manager.save(4, {"counts": {"good": 2}})
    monkeypatch.undo()
    counts = {}
    fresh = CheckpointManager(tmp_path)
    assert fresh.restore({"counts": counts}).step == 4
    assert len(caught) == (written is None) or written is not None
    assert counts == {"good": 1 if written is None else 2} or "renamed" in str(caught[0].message)
    assert [name for name in names_in(tmp_path) if not name.startswith("step-")] == []


@pytest.mark.skipif(os.name != "posix", reason="needs limits of POSIX")
@BOTH
def test_a_disk_that_is_really_full(tmp_path, asynchronous):
    import resource

    manager = CheckpointManager(tmp_path, asynchronous=asynchronous)
    manager.save(1, {"counts": {}})
    manager.wait()
    before = content_of(tmp_path)
    model = nn.Linear(300, 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.warns(CheckpointWarning, match=r"step 2 is not written.*tensors/rank-00000\.safetensors"):  # noqa: PT031
            manager.save(2, {"model": model})
            manager.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content_of(tmp_path) == before


def test_silently_truncated_write_is_detected(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {})
    write = os.write
    monkeypatch.setattr(os, "write", lambda d, data: (write(d, data[:-1]), len(data))[1])
    with pytest.warns(CheckpointWarning, match="step 2 is not written.*truncated"):
        assert manager.save(2, {}) is None
    monkeypatch.undo()
    assert names_in(tmp_path) == ["step-1"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), SafetensorError("I/O error: full")], ids=repr
)
def test_failing_third_party_file_is_not_published(tmp_path, error):
    def write(path):
        path.write_text("half")
        raise error

    manager = CheckpointManager(tmp_path)
    with pytest.warns(CheckpointWarning, match="step 2 is not written"):
        assert manager.save(2, {}, files={"x.txt": write}) is None
    assert names_in(tmp_path) == []
    with pytest.raises(OSError, match="full"):
        manager.close()
    manager.close()  # once is enough


def test_unsupported_dtype_is_refused_by_its_own_save(tmp_path):
    with CheckpointManager(tmp_path, asynchronous=True) as manager:
        with pytest.raises(ValueError, match=r"^own\.x: got torch\.complex128; allowed in a checkpoint"):
            manager.save(1, {"own": {"x": torch.ones(1, dtype=torch.complex128)}})
        manager.save(2, {"own": {"x": torch.ones(1)}})
    assert manager.steps() == [2]


def test_non_disk_error_is_raised(tmp_path, monkeypatch):
    def write(path):
        raise KeyError("mistake")

    manager = CheckpointManager(tmp_path)
    with pytest.raises(KeyError, match="mistake"):
        manager.save(2, {}, files={"x.txt": write})
    assert names_in(tmp_path) == []
    later = CheckpointManager(tmp_path, asynchronous=True)
    monkeypatch.setattr(CheckpointManager, "_publish", lambda *_: 1 / 0)
    later.save(3, {})
    with pytest.raises(ZeroDivisionError):
        later.wait()
    monkeypatch.undo()
    assert names_in(tmp_path) == []
    later.save(4, {})
    later.close()
    assert later.steps() == [4]


def test_error_of_the_run_takes_precedence_over_a_failed_save(tmp_path, monkeypatch):
    with pytest.raises(KeyError, match="of the run"), pytest.warns(CheckpointWarning):  # noqa: PT012, PT031, SIM117
        with CheckpointManager(tmp_path, asynchronous=True) as manager:
            monkeypatch.setattr(os, "fsync", raised_os_error(errno.ENOSPC))
            manager.save(1, {})
            raise KeyError("of the run")


def test_failed_removal_of_an_old_checkpoint_warns(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, {})
    monkeypatch.setattr("stackwise.checkpoint.manager.remove", raised_os_error(errno.EACCES))
    with pytest.warns(CheckpointWarning, match="could not be removed"):
        assert manager.save(2, {}) == tmp_path / "step-2"
    manager.close()
    assert manager.steps() == [1, 2]


@BOTH
def test_save_failure_is_cleared_by_the_next_save(tmp_path, monkeypatch, asynchronous):
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as manager:
        monkeypatch.setattr(os, "fsync", raised_os_error(errno.ENOSPC))
        with pytest.warns(CheckpointWarning, match="step 1 is not written"):  # noqa: PT031
            manager.save(1, {})
            manager.wait()
        monkeypatch.undo()
        assert manager.save(2, {}) == tmp_path / "step-2"
    assert manager.steps() == [2]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own, as it is imported
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_loader_resumes_at_its_position(tmp_path, workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def made():
        options = {"batch_size": 2, "shuffle": True, "num_workers": workers}
        return loaders.StatefulDataLoader(range(20), **options, generator=torch.Generator().manual_seed(1))

    loader = made()
    passed = iter(loader)
    for _ in range(3):
        next(passed)
    CheckpointManager(tmp_path).save(3, {"loader": loader})
    rest = [batch.tolist() for batch in passed]
    other = made()
    CheckpointManager(tmp_path).restore({"loader": other})
    assert [batch.tolist() for batch in other] == rest
    assert len(rest) == 7


def test_one_write_at_a_time(tmp_path, monkeypatch):
    running, most, finish = [0], [0], CheckpointManager._finish

    def counted(*given):
        running[0] += 1
        most[0] = max(most[0], running[0])
        finish(*given)
        running[0] -= 1

    monkeypatch.setattr(CheckpointManager, "_finish", counted)
    with CheckpointManager(tmp_path, asynchronous=True, keep_last=9) as manager:
        for step in range(6):
            manager.save(step, {"counts": {"step": step}})
    assert most == [1]
    assert manager.steps() == list(range(6))


def test_plain_json_is_readable(tmp_path):
    CheckpointManager(tmp_path).save(1, {"counts": {"steps": 3, "name": "x"}})
    plain = json.loads((tmp_path / "step-1/state-00000.json").read_text())
    assert plain["own"]["counts"] == {"steps": 3, "name": "x"}


@pytest.mark.gpu
@BOTH
def test_cuda(tmp_path, asynchronous):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.5), nn.Linear(512, 512)).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def train(model, optimizer, steps):
        for _ in range(steps):
            model(torch.randn(8, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [flat(p.cpu()) for p in model.parameters()]

    model, optimizer = made()
    train(model, optimizer, 3)
    with CheckpointManager(tmp_path, asynchronous=asynchronous) as manager:
        manager.save(3, {"model": model, "optimizer": optimizer})
        # The copies are made by the device behind what is queued, and before what comes now.
        whole = train(model, optimizer, 5)
    model, optimizer = made()
    CheckpointManager(tmp_path).restore({"model": model, "optimizer": optimizer})
    assert train(model, optimizer, 5) == whole


def test_path_is_a_path(tmp_path):
    assert isinstance(CheckpointManager(str(tmp_path)).directory, Path)


def test_a_tensor_with_the_name_of_the_header_is_not_published(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, {})
    with pytest.warns(CheckpointWarning, match="step 2 is not written"):
        manager.save(2, {}, files={"x.safetensors": {"__metadata__": torch.ones(1)}})
    assert names_in(tmp_path) == ["step-1"]
    with pytest.raises(OSError, match="the last checkpoint"):
        manager.close()


def test_verify_opens_files_as_restore_does(tmp_path):
    """A file that was written in another way, with a manifest that agrees."""
    manager = CheckpointManager(tmp_path)
    folder = manager.save(1, {"model": nn.Linear(2, 2)})
    (folder / "tensors/rank-00000.safetensors").write_bytes(b"")
    files = entries_of(folder, FILES[1:])
    manifest = replace(Manifest.read(folder), files=files)
    (folder / MANIFEST).unlink()
    manifest.write(folder)
    with pytest.raises(DamagedCheckpointError, match="rank-00000"):
        manager.verify(1)


@pytest.mark.parametrize(
    "call, key",
    [
        (lambda path: CheckpointManager(f"{path}/a\0b"), "directory"),
        (lambda path: export(CheckpointManager(path).save(1, {}), "model", "a\0b"), "file"),
        (lambda path: CheckpointManager(path).save(1, [nn.Linear(1, 1)]), "objects"),
        (lambda path: CheckpointManager(path).restore({}, "1"), "step"),
        (lambda path: CheckpointManager(path).restore({}, -1), "step"),
        (lambda path: CheckpointManager(path).save(10**400, {}), "step"),
    ],
)
def test_bad_argument_is_refused_by_its_key(tmp_path, call, key):
    with pytest.raises(ValueError, match=rf"^{key}: got .*; allowed: ") as refusal:
        call(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_container_that_loses_its_states_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match=r"objects\['optimizer'\].state_dict\(\): got .*\(SGD\)"):
            manager.save(1, {"model": model, "optimizer": Contained(inner)})
        manager.save(1, {"model": model, "optimizer": WithLayout(inner)})
        wanted = inner.state[model.weight]["momentum_buffer"].clone()
        inner.step()
        manager.restore({"model": model, "optimizer": WithLayout(inner)})
    assert torch.equal(inner.state[model.weight]["momentum_buffer"], wanted)


@pytest.mark.parametrize(
    "make, message",
    [
        *(
            (lambda p, place=place: Held(place, torch.optim.AdamW(p)), r"state_dict\(\)")
            for place in PLACES.values()
        ),
        (lambda p: Lookahead(torch.optim.AdamW(p)), r"state_dict\(\)"),
        (Momentum, r"momentum\.\d+"),
        (lambda p: WithLayout(Momentum(p)), r"optimizers\.0\.momentum\.\d+"),
    ],
    ids=[*PLACES, "partial state dict", "attribute", "inner attribute"],
)
def test_an_optimizer_whose_state_dict_lacks_state_is_refused(tmp_path, make, message):
    model = nn.Linear(2, 2)
    optimizer = make(list(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(
            ValueError, match=rf"^objects\['optimizer'\]\.{message}: got '.*'; allowed: "
        ) as error:
            manager.save(1, {"model": model, "optimizer": optimizer})
        assert manager.steps() == []
    assert "\n" not in str(error.value)
