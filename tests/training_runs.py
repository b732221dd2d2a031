"""Kinds of training runs, and the place of their weights, for tests of the trainer."""

from pathlib import Path

BLOCKWISE = {"training_architecture": "blockwise"}
RUNS = {
    "rackwise": {},
    "autocast": {"precision": "bf16"},
    "narrow weights": {"precision": "bf16_weights"},
    "muon": {"optimizer": {"kind": "muon", "lr": 1e-2}},
    "accumulated": {"accumulation_steps": 2},
    "growing": {"scope": {"growth": True}},
    "blockwise": BLOCKWISE,
    "narrow blocks": BLOCKWISE | {"precision": "bf16_weights"},
    "own heads": BLOCKWISE | {"scope": {"head": "per_unit"}},
    "growing blocks": BLOCKWISE | {"scope": {"growth": True}},
    "right to left": BLOCKWISE | {"scope": {"order": "right_to_left"}},
    "kept": BLOCKWISE | {"scope": {"cache_bytes": 2**20, "overlap": 1}},
    "on disk": BLOCKWISE | {"scope": {"offload": "disk", "offload_dir": "blocks"}},
    "polished": {"training_architecture": "stackwise", "scope": {"polish_steps": 2}},
    "evaluated": {"eval_interval": 2},
}


def mapped_from(tensor):
    """Return the safetensors file that a tensor is mapped from, by proc(5); None: memory of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return path if path.endswith(".safetensors") else None
    raise AssertionError("a tensor lies in no mapping")
