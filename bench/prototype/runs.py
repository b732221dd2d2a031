"""RunStore: what each run of a part came to, a line of JSON each, so that a killed bench goes on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RunStore", "digest"]


class RunStore:
    """A file of runs that only grows.

    A line that was cut off, since the process was ended within it, is not read, and the next one is whole.
    Of two lines with the same name the later one counts. Infinite numbers and NaN are kept as text.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, plan: str) -> dict[str, dict[str, Any]]:
        """The values of all runs of one plan (see `digest`), by name."""
        found: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if record["plan"] == plan:
                    found[record["name"]] = _read(record["values"])
        return found

    def append(self, name: str, plan: str, values: Mapping[str, Any], **told: Any) -> None:
        """Write one more; `told` is what else its line says, such as when it was made."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        line = json.dumps({"name": name, "plan": plan, **told, "values": _written(values)}, allow_nan=False)
        with self.path.open("a") as file:
            file.write(("\n" if torn else "") + line + "\n")


def digest(plan: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that differ where a plan does, whatever the order of its keys."""
    text = json.dumps(plan, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _written(value: Any) -> Any:
    """With the numbers that JSON does not have as {"number": text}."""
    if isinstance(value, Mapping):
        return {str(key): _written(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_written(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    return value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"number"}:
            return _SPECIAL[value["number"]]
        return {key: _read(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_read(each) for each in value]
    return value
