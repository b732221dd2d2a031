"""`python -m bench.kill`: training runs that are killed, and checkpoints that rot, beside a run left alone.

A child process trains a small model and saves every few steps. It is killed by SIGKILL at a random moment,
started again, killed again, until it is through. In every other start the moment is within a save: the child
tells by a pipe when one begins and when it has ended, and how far into the save it is killed is random. In
the end weights, optimizer, random states and losses have to be those of the run that was not killed, to the
bit. The same with two processes that have the model in parts (FSDP2), of which one or both are killed.

Saves are of three kinds: synchronous, asynchronous, and replaced. In the last one every step is saved twice,
so that one checkpoint replaces another. The lost steps are those since the last published checkpoint. An
asynchronous checkpoint may still be in progress when the next one is due. So up to two intervals are lost
while a requested checkpoint is not published, and one interval otherwise.

Then one bit of one file of a checkpoint is flipped, or one file is cut short, at a random place: it has to be
noticed each time, and the checkpoint before it taken.

Children are forks of a process that has imported torch and computed nothing: a start takes no second. What
is asked is in parts, `--jobs` at a time; `--resume` goes on with those that the file does not have.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first step of an optimizer, which is here that of each child
from rich.console import Console
from rich.table import Table
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from bench.claim import Bar, Claim
from bench.isolated import all_isolated
from stackwise.checkpoint import CheckpointManager, CheckpointWarning, DamagedCheckpointError
from stackwise.checkpoint.folder import recover

STEPS, SAVE_EVERY, WIDTH = 60, 3, 128
SECONDS = 300.0  # of one start
PART, PART_SECONDS = 25, 3600.0  # kills that are counted together, and how long that may take
# What is saved while the run goes on, and what while it waits.
MODES = ("synchronous", "asynchronous", "replaced")
AT_ONCE = ("synchronous", "replaced")
LATER = tuple(mode for mode in MODES if mode not in AT_ONCE)


@dataclass(frozen=True)
class Death:
    """How one start of a run ended.

    Attributes:
        killed: it was, before it was through.
        saving: a save was under way then.
        pending: a checkpoint that was asked for was not published then.
        resumed: the step that it had gone on from.
        last: the step that it got to.
        saved: the last step of which it had said that it is saved; -1: none.
        torn: temporary folders that it left behind.
    """

    killed: bool
    saving: bool
    pending: bool
    resumed: int
    last: int
    saved: int
    torn: int


def child(directory: Path, rank: int, world_size: int, mode: str, meeting: str, pipe: int) -> None:
    """One process of a run. It says to the pipe: from, at, asked, begin, end STEP, done DIGEST."""
    torch.set_num_threads(1)

    def tell(*words: object) -> None:
        with suppress(BrokenPipeError):
            os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    if world_size > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        )
    if world_size > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    history: dict[str, Any] = {"losses": []}
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "history": history}

    class Telling(CheckpointManager):
        """Says when a save is asked for, begins and has ended, in whatever thread."""

        def save(self, step: int, *given: Any, **options: Any) -> Path | None:
            tell("asked", step)
            return super().save(step, *given, **options)

        def _begin(self, manifest: Any, files: Any) -> Any:
            tell("begin", manifest.step)
            return super()._begin(manifest, files)

        def _finish(self, content: Any, scratch: Path, manifest: Any, *more: Any) -> None:
            super()._finish(content, scratch, manifest, *more)
            tell("end", manifest.step)

    manager = Telling(directory, keep_last=2, asynchronous=mode not in AT_ONCE)
    found = manager.restore(objects)
    first = 0 if found is None else found.step
    tell("from", first)
    for step in range(first + 1, STEPS + 1):
        loss = model(torch.randn(8, WIDTH) * random.random()).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        history["losses"].append(loss.item())
        tell("at", step)
        if step % SAVE_EVERY == 0:
            for _ in range(2 if mode == "replaced" else 1):
                manager.save(step, objects)
    manager.close()
    digest = hashlib.sha256(repr((history["losses"], random.getstate())).encode())
    digest.update(torch.get_rng_state().numpy().tobytes())
    tensors = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    for tensor in tensors:
        local = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
        digest.update(local.contiguous().numpy().tobytes())
    tell("done", digest.hexdigest())
    if world_size > 1:
        distributed.destroy_process_group()


class Start:
    """One start of all processes of a run, and what they say."""

    def __init__(self, directory: Path, world_size: int, mode: str) -> None:
        self._meeting = Path(tempfile.mkdtemp(prefix="kill-"))
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: dict[int, int] = {}
        self._rest: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        context = multiprocessing.get_context("fork")
        for rank in range(world_size):
            reader, writer = os.pipe()
            words = (directory, rank, world_size, mode, f"{self._meeting}/file", writer)
            process = context.Process(target=_forked, args=(self._meeting / f"errors-{rank}", *words))
            process.start()
            os.close(writer)  # before the next one is started, which would hold it open
            self.processes.append(process)
            self._pipes[reader], self._rest[reader] = rank, b""
            self._selector.register(reader, selectors.EVENT_READ)

    def hear(self, seconds: float) -> list[tuple[int, str, str]] | None:
        """(rank, word, value) of what is said within `seconds`; None: nobody is there any more."""
        if not self._selector.get_map():
            return None
        said = []
        for key, _ in self._selector.select(max(0.0, seconds)):
            content = os.read(key.fd, 65536)
            if not content:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                continue
            *whole, self._rest[key.fd] = (self._rest[key.fd] + content).split(b"\n")
            for line in whole:
                word, value = line.decode().split()
                said.append((self._pipes[key.fd], word, value))
        return said

    def kill(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def end(self) -> list[int]:
        """How each ended; those that still run are ended: they wait for one that is no more."""
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
        files = sorted(self._meeting.glob("errors-*"))
        self.errors = "".join(path.read_text() for path in files)[-2000:]
        shutil.rmtree(self._meeting, ignore_errors=True)
        return [process.exitcode or 0 for process in self.processes]


def _forked(errors: Path, *words: Any) -> None:
    """`child`, and what becomes of it."""
    try:
        child(*words)
    except BaseException:
        errors.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # without what the parent would do at its end


@dataclass
class Seen:
    """What a start has said so far; saves are those of rank 0, which publishes."""

    digests: list[str]
    resumed: int = 0
    last: int = 0
    saved: int = -1
    begins: int = 0
    saving: bool = False
    missing: int = 0  # saves that were asked for and have not ended

    def note(self, rank: int, word: str, value: str) -> None:
        if word == "done":
            self.digests[rank] = value
        elif word == "at":
            self.last = max(self.last, int(value))
        elif rank == 0 and word == "from":
            self.resumed = self.last = int(value)
        elif rank == 0 and word == "asked":
            self.missing += 1
        elif rank == 0 and word == "begin":
            self.saving, self.begins = True, self.begins + 1
        elif rank == 0 and word == "end":
            self.saving, self.saved, self.missing = False, int(value), self.missing - 1


def undisturbed(directory: Path, world_size: int, mode: str) -> tuple[list[str], float, float]:
    """The digests of a run in the end, its seconds from the first step on, and those of a save."""
    start, seen = Start(directory, world_size, mode), Seen([""] * world_size)
    first = last = begun = 0.0
    saves = []
    while (said := start.hear(SECONDS)) is not None:
        now = time.monotonic()
        for rank, word, value in said:
            seen.note(rank, word, value)
            first = now if word == "from" else first
            last = now if word == "done" else last
            if rank == 0 and word == "begin":
                begun = now
            elif rank == 0 and word == "end":
                saves.append(now - begun)
    codes = start.end()
    if any(codes) or not all(seen.digests):
        raise RuntimeError(f"the run that nobody disturbs ended with {codes}: {start.errors}")
    return seen.digests, last - first, sorted(saves)[len(saves) // 2]


def disturbed(
    directory: Path,
    world_size: int,
    mode: str,
    choose: random.Random,
    *,
    run_seconds: float,
    save_seconds: float | None,
    spared: bool = False,
) -> tuple[Death, list[str]]:
    """One start that is killed at a random moment: of a save that takes `save_seconds`, or of the run.

    One that is `spared` is killed only if it hangs.
    """
    start, seen = Start(directory, world_size, mode), Seen([""] * world_size)
    both = world_size == 1 or choose.random() < 0.5
    ranks = list(range(world_size)) if both else [choose.randrange(world_size)]
    wanted = choose.randint(1, 4)
    moment = choose.uniform(0.0, run_seconds if save_seconds is None else save_seconds)
    deadline, killed = time.monotonic() + SECONDS, False
    waits = False  # until it is known when
    while (said := start.hear(deadline - time.monotonic())) is not None:
        for rank, word, value in said:
            seen.note(rank, word, value)
            begun = word == "from" if save_seconds is None else word == "begin" and seen.begins == wanted
            if rank == 0 and begun and not waits and not spared:
                deadline, waits = time.monotonic() + moment, True
        if time.monotonic() >= deadline:
            if killed:
                break
            # What has been said until now is heard first, so that it is known what was under way.
            start.kill(ranks)
            # Who is left waits for the one that is gone.
            deadline, killed = time.monotonic() + 5.0, True
    codes = start.end()
    while said := start.hear(0.0):
        for rank, word, value in said:
            seen.note(rank, word, value)
    died = any(code == -signal.SIGKILL for code in codes)
    if not died and any(codes):
        raise RuntimeError(f"a run ended with {codes}: {start.errors}")
    torn = sum(path.name.startswith(".step-") for path in directory.iterdir()) if directory.exists() else 0
    pending = died and seen.missing > 0
    return Death(died, died and seen.saving, pending, seen.resumed, seen.last, seen.saved, torn), seen.digests


def whole_checkpoints(directory: Path) -> tuple[int, int]:
    """The newest step, 0 if there is none, and how many that have the name of a checkpoint are not whole."""
    recover(directory, clear=False)  # what was being replaced has its name back, as a restore has it
    manager = CheckpointManager(directory)
    steps, half = manager.steps(), 0
    for step in steps:
        try:
            manager.verify(step)
        except DamagedCheckpointError:
            half += 1
    return (steps[-1] if steps else 0), half


def kills(world_size: int, mode: str, count: int, in_save: int, seed: int) -> dict[str, Any]:
    """Kill runs until `count` were, `in_save` of them within a save; every run is brought to its end."""
    choose = random.Random(seed)
    root = Path(tempfile.mkdtemp(prefix="kill-"))
    deaths: list[Death] = []
    different = unusable = half = runs = 0
    lost = {True: 0, False: 0}  # by whether a checkpoint was pending
    try:
        digests, run_seconds, save_seconds = undisturbed(root / "whole", world_size, mode)
        while len(deaths) < count or sum(death.saving for death in deaths) < in_save:
            directory, runs = root / str(runs), runs + 1
            newest = 0
            while True:
                missing = in_save - sum(death.saving for death in deaths)
                enough = len(deaths) >= count and missing <= 0
                within = len(deaths) % 2 == 0 or missing > count - len(deaths)
                seconds = save_seconds if within else None
                death, ended = disturbed(
                    directory,
                    world_size,
                    mode,
                    choose,
                    run_seconds=run_seconds,
                    save_seconds=seconds,
                    spared=enough,
                )
                found, broken = whole_checkpoints(directory)
                half += broken
                # It went on from the newest there was, and what it has said is saved is there.
                unusable += death.resumed != newest and death.last > 0
                unusable += death.saved > found
                newest = found
                if not death.killed:
                    different += ended != digests
                    break
                deaths.append(death)
                lost[death.pending] = max(lost[death.pending], death.last - newest)
                if len(deaths) >= 3 * count + 10:
                    raise RuntimeError(f"{len(deaths)} kills, and too few of them within a save")
            shutil.rmtree(directory)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {
        "processes": world_size,
        "mode": mode,
        "kills": len(deaths),
        "within a save": sum(death.saving for death in deaths),
        "left a temporary folder": sum(death.torn > 0 for death in deaths),
        "runs": runs,
        "ended otherwise": different,
        "unusable": unusable,
        "half checkpoints": half,
        "steps lost": lost[False],
        "steps lost, one pending": lost[True],
        "run_seconds": run_seconds,
        "save_seconds": save_seconds,
        "deaths": [asdict(death) for death in deaths],
    }


def rot(count: int, seed: int) -> dict[str, Any]:
    """Harm the newer of two checkpoints at random places: how often it is noticed, and the older taken."""
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters())
        objects = {"model": model, "optimizer": optimizer, "counts": {"step": 0}}
        manager, weights = CheckpointManager(directory), {}
        for step in (1, 2):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            manager.save(step, objects)
            weights[step] = model.weight.detach().clone()
        paths = sorted(path for path in (directory / "step-2").rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in paths]
        noticed = taken = 0
        harms = []
        for i in range(count):
            # Half of the places among all bytes, half in a file of any size.
            path = choose.choices(paths, sizes)[0] if i % 4 < 2 else choose.choice(paths)
            content = path.read_bytes()
            place = choose.randrange(len(content))
            if i % 2:
                path.write_bytes(content[:place])
            else:
                flipped = bytearray(content)
                flipped[place] ^= 1 << choose.randrange(8)
                path.write_bytes(flipped)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = None
                with suppress(Exception):  # whatever comes of damage that is not noticed
                    found = CheckpointManager(directory).restore(objects)
            told = [
                w for w in caught if issubclass(w.category, CheckpointWarning) and path.name in str(w.message)
            ]
            noticed += bool(told)
            aside = directory / "step-2.damaged"
            if aside.exists():
                aside.rename(directory / "step-2")
            taken += found is not None and found.step == 1 and torch.equal(model.weight, weights[1])
            harms.append({"file": path.name, "place": place, "kind": "truncation" if i % 2 else "bit flip"})
            path.write_bytes(content)
        found = CheckpointManager(directory).restore(objects)
        assert found is not None and found.step == 2 and torch.equal(model.weight, weights[2])
    return {"harms": count, "noticed": noticed, "previous one used": taken, "places": harms}


def bars(found: list[dict[str, Any]], harm: dict[str, Any] | None, wanted: int) -> list[Bar]:
    def total(key: str) -> int:
        return sum(row[key] for row in found)

    both = ("steps lost", "steps lost, one pending")
    result = []
    for processes in (1, 2):
        rows = [row for row in found if row["processes"] == processes]
        said = "1 process" if processes == 1 else f"{processes} processes"
        result.append(Bar(f"kills, {said}", sum(r["kills"] for r in rows) if rows else None, wanted))
        in_save = sum(r["within a save"] for r in rows) if rows else None
        result.append(Bar(f"kills within a save, {said}", in_save, wanted // 2))
    result += [
        Bar("runs that ended otherwise", total("ended otherwise"), 0, at_most=True),
        Bar("unusable states", total("unusable"), 0, at_most=True),
        Bar("half checkpoints", total("half checkpoints"), 0, at_most=True),
        Bar("steps lost, at once", _most(found, AT_ONCE, both), SAVE_EVERY, at_most=True),
        Bar("steps lost, later, none pending", _most(found, LATER, both[:1]), SAVE_EVERY, at_most=True),
        Bar(
            f"steps lost, later, 2 x {SAVE_EVERY}",
            _most(found, LATER, both[1:]),
            2 * SAVE_EVERY,
            at_most=True,
        ),
        Bar("damage noticed", None if harm is None else harm["noticed"] / harm["harms"], 1.0),
        Bar("previous one used", None if harm is None else harm["previous one used"] / harm["harms"], 1.0),
    ]
    return result


def _most(found: list[dict[str, Any]], modes: Sequence[str], keys: Sequence[str]) -> int | None:
    lost = [row[key] for row in found if row["mode"] in modes for key in keys]
    return max(lost) if lost else None


def table(found: list[dict[str, Any]]) -> Table:
    columns = ["processes", "mode", "kills", "within a save", "left a temporary folder", "runs"]
    columns += ["ended otherwise", "unusable", "half checkpoints", "steps lost", "steps lost, one pending"]
    shown = Table(*columns)
    for row in found:
        shown.add_row(*(str(row[column]) for column in columns))
    return shown


def parts(count: int, harms: int, seed: int) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """What is asked, by name: kills of each number of processes and each mode, and damage.

    Args:
        count: kills of runs of one process, and of two.
        harms: damaged files.
        seed: of what is chosen.
    """
    asked: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {}
    for world_size in (1, 2):
        for i, mode in enumerate(MODES):
            kills_left = count // len(MODES) + (i < count % len(MODES))
            saves_left = -(-kills_left // 2)
            while kills_left:
                n_kills = min(PART, kills_left)
                n_saves = min(n_kills, -(-saves_left * n_kills // kills_left))
                name = f"{world_size} {mode} {kills_left}"
                wanted = (world_size, mode, n_kills, n_saves, seed + len(asked))
                asked[name] = partial(_yielded, partial(kills, *wanted))
                kills_left, saves_left = kills_left - n_kills, saves_left - n_saves
    asked["rot"] = partial(_yielded, partial(rot, harms, seed))
    return asked


def _yielded(call: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield call()


def _summed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row of each number of processes and mode."""
    summed = []
    for world_size in (1, 2):
        for mode in MODES:
            chosen = [row for row in rows if (row["processes"], row["mode"]) == (world_size, mode)]
            if chosen:
                adds = ["kills", "within a save", "left a temporary folder", "runs"]
                adds += ["ended otherwise", "unusable", "half checkpoints"]
                row: dict[str, Any] = {"processes": world_size, "mode": mode}
                row |= {key: sum(each[key] for each in chosen) for key in adds}
                most = ("steps lost", "steps lost, one pending")
                summed.append(row | {key: max(each[key] for each in chosen) for key in most})
    return summed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kill",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few kills: proves little")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parts at a time")
    parser.add_argument("--resume", action="store_true", help="go on with the parts that the file lacks")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # of this process, which is forked
    count, harms = (6, 40) if options.quick else (200, 400)
    claim = Claim("kill", options.quick)
    if options.resume:
        claim.resume()
    asked = parts(count, harms, options.seed)
    found: dict[str, Any] = {
        name: each for name, each in claim.figures.get("parts", {}).items() if name in asked
    }
    claim.figures["parts"] = found
    errors: dict[str, str] = {}
    asked = {name: call for name, call in asked.items() if name not in found}
    for name, ended in all_isolated(asked, jobs=options.jobs, seconds=PART_SECONDS):
        if ended.error is not None:
            errors[name] = ended.error
        else:
            found[name] = ended.values[0] | {"seconds": round(ended.seconds, 1)}
        claim.write()
        shown = {k: v for k, v in found.get(name, {}).items() if k not in ("deaths", "places")}
        print(name, errors.get(name) or json.dumps(shown), flush=True)
    rows = _summed([row for name, row in found.items() if name != "rot"])
    claim.figures["errors"] = errors
    claim.bars = bars(rows, found.get("rot"), count)
    claim.bars.append(Bar("parts that did not finish", float(len(errors)), 0.0, at_most=True))
    Console(width=150).print(table(rows))
    return claim.conclude()


if __name__ == "__main__":
    sys.exit(main())
