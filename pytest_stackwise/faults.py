"""Fixtures that inject the faults of a test's markers into its training loop, its processes or its files."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_stackwise import markers, records

if TYPE_CHECKING:
    from stackwise.stability.faults import Fault, Injection
    from stackwise.stability.faults.children import Child

__all__ = ["FaultFixtures", "StorageHits", "declared_faults"]


@dataclass
class StorageHits:
    """Actions of `broken_storage`.

    Attributes:
        acted: faults that acted, in the order of their first action.
        rotten: (path, index of the changed or first missing byte) of each file that `bit_rot` changed.
    """

    acted: list[Fault] = field(default_factory=list)
    rotten: list[tuple[Any, int]] = field(default_factory=list)


class FaultFixtures:
    """Fixtures that inject the faults of a test's markers."""

    @pytest.fixture
    def inject_faults(
        self, request: pytest.FixtureRequest
    ) -> Callable[..., AbstractContextManager[Injection]]:
        """Inject the faults of the test's markers into a training loop of the test.

            @pytest.mark.worker_death(step=2)
            def test_loader(inject_faults):
                with inject_faults((model, optimizer)) as injection:
                    train(model, optimizer, injection.loader(loader))
                assert injection.fired == [2]

        The arguments are those of `stackwise.stability.broken`. `faults=` adds faults to those of the
        markers. If SIGTERM has no handler, this fault fails the test and does not end pytest.
        """
        item = request.node
        marked = declared_faults(request)

        @contextmanager
        def inject(subject: Any, *, faults: Any = (), **arguments: Any) -> Iterator[Injection]:
            records.pay(item, "faults")
            from stackwise.stability.faults import broken

            chosen = [*marked, *faults]
            _refuse_kills(chosen)
            record = _record(item, chosen, _name(subject))
            with ExitStack() as stack:
                stack.enter_context(_sigterm_told(chosen))
                injection = stack.enter_context(broken(subject, chosen, **arguments))
                stack.callback(lambda: record.update(fired=injection.fired))
                yield injection

        return inject

    @pytest.fixture
    def run_processes(self, request: pytest.FixtureRequest) -> Callable[..., list[Child]]:
        """Run a function in new processes, and inject the faults of the test's markers into them.

            def train(inject, folder):
                with inject((model, optimizer)):
                    ...

            @pytest.mark.process_signal(step=3, kind="SIGKILL", moment="save")
            def test_killed(run_processes, tmp_path):
                [child] = run_processes(train, tmp_path)
                assert child.exit_code == -9 and child.fired == (3,)

        The arguments are the function, its arguments after `inject`, and the keyword arguments of
        `stackwise.stability.faults.children.run_children`. The fixture returns one `Child` per process.
        """
        item = request.node
        marked = declared_faults(request)

        def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Child]:
            __tracebackhide__ = True
            records.pay(item, "faults")
            from stackwise.stability.faults import TargetNotReachedError
            from stackwise.stability.faults.children import run_children

            faults = [*marked, *options.pop("faults", ())]
            record = _record(item, faults, getattr(function, "__name__", "a function"))
            children = run_children(function, *arguments, faults=faults, **options)
            record["fired"] = sorted({step for child in children for step in child.fired})
            acted = {number for child in children for number in child.acted}
            if missed := [str(fault) for number, fault in enumerate(faults) if number not in acted]:
                told = next((f"; process {c.rank} raised: {c.error}" for c in children if c.error), "")
                late = "; the processes did not end in time" if any(c.timed_out for c in children) else ""
                raise TargetNotReachedError(f"{', '.join(missed)}: did not act{late}{told}")
            return children

        return run

    @pytest.fixture
    def broken_storage(
        self, request: pytest.FixtureRequest
    ) -> Callable[[], AbstractContextManager[StorageHits]]:
        """Inject the storage faults of the test's markers into files written inside a `with` block.

            @pytest.mark.disk_full(after=1000)
            def test_full_disk(broken_storage, tmp_path):
                with pytest.raises(OSError), broken_storage():
                    save(model, tmp_path)

        `disk_full` and `short_write` act on files that are written inside the block. `bit_rot` changes a
        file that exists at the end of the block. Folders of the markers are relative to the `tmp_path` of
        the test.
        """
        item = request.node
        marked = declared_faults(request)

        @contextmanager
        def break_storage() -> Iterator[StorageHits]:
            records.pay(item, "faults")
            from stackwise.stability.faults import BitRot, TargetNotReachedError

            chosen = [
                fault for fault in marked if fault.breaks == "storage" and fault.name != "process_signal"
            ]
            record = _record(item, chosen, "storage")
            hits = StorageHits()
            with ExitStack() as stack:
                stack.callback(lambda: record.update(fired=[0] if hits.acted else []))
                for fault in chosen:
                    stack.enter_context(fault.around_saves(_noting(hits, fault)))
                yield hits
            # Not reached if the block raises: then nothing was written that `bit_rot` could change.
            for fault in chosen:
                if isinstance(fault, BitRot):
                    hits.rotten.append(fault.strike())
                    hits.acted.append(fault)
            missed = [str(fault) for fault in chosen if fault not in hits.acted]
            if missed:
                raise TargetNotReachedError(
                    f"{', '.join(missed)}: did not act: nothing was written that it meets"
                )

        return break_storage


def declared_faults(request: pytest.FixtureRequest) -> list[Fault]:
    """Return the faults of the test's markers. The test fails unless it calls a fixture that injects them."""
    item = request.node
    folder = request.getfixturevalue("tmp_path") if markers.wants_folder(item) else None
    faults = markers.faults_of(item, folder)
    if faults:
        readers = " or ".join(markers.fault_readers(item))
        records.owe(item, "faults", f"the test declares faults but never called {readers}")
    return faults


def _noting(hits: StorageHits, fault: Fault) -> Callable[[], None]:
    def acted() -> None:
        if fault not in hits.acted:
            hits.acted.append(fault)

    return acted


def _record(item: pytest.Item, faults: list[Fault], model: str) -> dict[str, Any]:
    """Add a record for the report and return it. Its verdict is set later, from the outcome of the test."""
    record = {
        "test": item.nodeid,
        "model": model,
        "seq_len": None,
        "faults": [str(fault) for fault in faults],
        "fired": [],
        "verdict": None,
        "alarms": [],
        "records": [],
    }
    return records.add(item, "stability", record)


def _name(subject: Any) -> str:
    inner = subject[0] if isinstance(subject, tuple) else getattr(subject, "model", subject)
    return type(inner).__name__


def _refuse_kills(faults: list[Fault]) -> None:
    """Raise an error for faults that would end the process of the tests.

    Raises:
        ValueError: the message names the fault.
    """
    for fault in faults:
        if fault.name == "dead_rank" or getattr(fault, "kind", "") == "SIGKILL":
            raise ValueError(f"{fault}: it would end the process of the tests; wanted run_processes")


@contextmanager
def _sigterm_told(faults: list[Fault]) -> Iterator[None]:
    """Fail the test, instead of ending pytest, if SIGTERM arrives inside the block and has no handler."""
    meant = any(fault.name == "process_signal" for fault in faults)
    main = threading.current_thread() is threading.main_thread()
    if not (meant and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return

    def tell(*_: Any) -> NoReturn:
        pytest.fail("SIGTERM: nothing handles it, which ends a process that is not under test", pytrace=False)

    signal.signal(signal.SIGTERM, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
