"""Machine: facts of hardware and software that determine the speed of code, and their key."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from stackwise.gate.history.reference import REFERENCE_VERSION
from stackwise.support.arguments import require

if TYPE_CHECKING:
    import torch

__all__ = ["Machine"]

_FACTS = (
    "cpu",
    "cpu_count",
    "torch_threads",
    "omp_wait_policy",
    "system",
    "python",
    "torch",
    "reference",
)
_OF_GPU = ("name", "memory_bytes", "capability", "cuda", "driver")


@dataclass(frozen=True)
class Machine:
    """Kind of machine. Results of two kinds are never compared.

    Attributes:
        facts: processor, number of processors, threads, versions, GPU and driver, and the version of the
            reference workload, which affects every log-ratio.
    """

    facts: dict[str, Any]

    @classmethod
    def of(cls, fingerprint: Mapping[str, Any]) -> Self:
        """Return the machine of a fingerprint (`stackwise.support.device.fingerprint`).

        Only the facts that determine the speed are used.

        Raises:
            ValueError: the fingerprint does not name the processor.
        """
        require(bool(fingerprint.get("cpu")), "fingerprint", dict(fingerprint), "one that names the cpu")
        facts: dict[str, Any] = {name: fingerprint.get(name) for name in _FACTS}
        facts["reference"] = fingerprint.get("reference", REFERENCE_VERSION)
        gpu = fingerprint.get("gpu")
        facts["gpu"] = None if gpu is None else {name: gpu.get(name) for name in _OF_GPU}
        # Converted by JSON, so that a stored machine is equal to the original.
        return cls(json.loads(json.dumps(facts)))

    @classmethod
    def here(cls, device: torch.device | str | None = None) -> Self:
        """Return the current machine, with the current number of threads of torch.

        Args:
            device: measured device, if the machine has several GPUs.
        """
        from stackwise.support.device import fingerprint

        return cls.of(fingerprint(device))

    @property
    def key(self) -> str:
        """Key of 16 hexadecimal digits. Equal facts have equal keys."""
        text = json.dumps(self.facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        gpu = self.facts.get("gpu")
        device = self.facts["cpu"] if gpu is None else gpu["name"]
        threads = self.facts.get("torch_threads")
        return (
            f"{device}, {threads} threads, Python {self.facts.get('python')}, torch {self.facts.get('torch')}"
        )

    def differences(self, other: Machine) -> list[str]:
        """Return the facts that differ between two machines, such as "torch: 2.12.0, 2.13.0"."""
        names = sorted(self.facts.keys() | other.facts.keys())
        pairs = [(name, self.facts.get(name), other.facts.get(name)) for name in names]
        return [f"{name}: {mine}, {theirs}" for name, mine, theirs in pairs if mine != theirs]
