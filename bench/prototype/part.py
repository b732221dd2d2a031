"""Part: what one question of the bench came to; Work: how it gets its runs.

A part is a module of this package with `measure(work: Work) -> Part`, listed in `__main__.PARTS`. The names
of its bars begin with the name of the part and a colon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from bench.claim import Bar
from bench.isolated import Ended, isolated
from bench.prototype.runs import RunStore, digest

__all__ = ["Part", "Work"]


@dataclass(frozen=True)
class Part:
    """What a part of the bench found, of as many of its runs as there are.

    Attributes:
        figures: for the result file, as JSON has it: no NaN and nothing infinite.
        bars: what the figures are held to. A bar whose runs are not all there has the value None.
        table: what is printed.
        missing: names of runs that are still to be made.
    """

    figures: Mapping[str, Any]
    bars: tuple[Bar, ...]
    table: Table | None = None
    missing: tuple[str, ...] = ()


@dataclass
class Work:
    """What a part's `measure(work)` is given.

    Attributes:
        quick: a plan of minutes, which proves nothing.
        store: of this part alone. A part whose library function keeps runs itself may give it `store.path`.
        jobs: processes at a time, each with one thread.
        until: `time.monotonic()` after which no run is begun; None: no limit.
        commit: of this project.
        missing: names of runs that were not begun, since the time was over.
    """

    quick: bool
    store: RunStore
    jobs: int = 1
    until: float | None = None
    commit: str = "unknown"
    missing: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether no run may be begun any more."""
        return self.until is not None and time.monotonic() >= self.until

    def complete(
        self,
        runs: Mapping[str, Callable[[], Iterator[Mapping[str, Any]]]],
        plan: Mapping[str, Any],
        *,
        seconds: float = 1800.0,
        gigabytes: float = 4.0,
        jobs: int | None = None,
    ) -> dict[str, dict[str, Any]]:
        """The values of all `runs`: those on file, and the others, made now and kept one by one.

        Args:
            runs: by name, a generator function that yields the values of the run, once. It is called in a
                process of its own, a fork of this one.
            plan: everything that the values depend on besides the name. Runs of another plan are not read.
            seconds: after which a run is ended.
            gigabytes: that it may hold.
            jobs: processes at a time, where these runs may have fewer than the bench (those that are timed).

        Returns:
            Those that there are. Of runs that were not begun, since the time was over, the names are in
            `missing`.

        Raises:
            RuntimeError: a run did not get to its end. A run that may fail has to yield that as a value.
        """
        mark = digest(plan)
        found = {name: values for name, values in self.store.read(mark).items() if name in runs}
        waiting = [name for name in runs if name not in found]
        at_once = self.jobs if jobs is None else jobs
        running: dict[Future[Ended], str] = {}
        failed: list[str] = []
        with ThreadPoolExecutor(at_once) as pool:
            while running or (waiting and not self.is_over):
                while waiting and len(running) < at_once and not self.is_over:
                    name = waiting.pop(0)
                    begun = pool.submit(isolated, runs[name], seconds=seconds, gigabytes=gigabytes)
                    running[begun] = name
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    name, ended = running.pop(future), future.result()
                    if ended.error is None:
                        found[name] = self._keep(name, mark, ended)
                    else:
                        failed.append(f"{name}: {ended.error}")
                        waiting.clear()
        if failed:
            raise RuntimeError("; ".join(failed))
        self.missing += waiting
        return {name: found[name] for name in runs if name in found}

    def _keep(self, name: str, mark: str, ended: Ended) -> dict[str, Any]:
        [values] = ended.values
        date = datetime.now(UTC).isoformat(timespec="seconds")
        took = round(ended.seconds, 3)
        self.store.append(name, mark, values, seconds=took, date=date, commit=self.commit)
        print(f"{name}: {took:.0f} s", flush=True)
        return self.store.read(mark)[name]
