"""SandboxLimits: resource limits of a program in the sandbox."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stackwise.support.arguments import check_number, check_sizes

__all__ = ["SandboxLimits"]


@dataclass(frozen=True)
class SandboxLimits:
    """Limits for each of the two processes of a run, the code and its checks.

    Attributes:
        seconds: wall-clock time of the entire run.
        cpu_seconds: CPU time of each process.
        memory_bytes: address space of each process (RLIMIT_AS).
        processes: maximum number of processes and threads at one time.
        file_bytes: maximum size of a file.
        open_files: maximum number of open files at one time.
        scratch_bytes: total size of the temporary folder, which is in memory.
        output_bytes: maximum size of the stored output. Further output is dropped.
    """

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 2**29
    processes: int = 8
    file_bytes: int = 2**23
    open_files: int = 32
    scratch_bytes: int = 2**25
    output_bytes: int = 2**16

    def __post_init__(self) -> None:
        for key in ("seconds", "cpu_seconds"):
            check_number(key, getattr(self, key), "a number > 0, in seconds", lambda value: value > 0)
        check_sizes(2**26, memory_bytes=self.memory_bytes)
        check_sizes(16, open_files=self.open_files)
        check_sizes(2**20, file_bytes=self.file_bytes, scratch_bytes=self.scratch_bytes)
        check_sizes(processes=self.processes, output_bytes=self.output_bytes)

    def rlimits(self, *, isolated: bool = True) -> dict[str, int]:
        """Return the limits by the names of setrlimit(2).

        The limit of processes needs isolation, because the kernel counts all processes of the user.
        """
        processes = {"RLIMIT_NPROC": self.processes + 1} if isolated else {}  # one waits for the program
        return {
            **processes,
            "RLIMIT_CPU": math.ceil(self.cpu_seconds),
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }
