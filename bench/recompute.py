"""`python -m bench.recompute`: what recomputation saves in memory and what it costs in throughput.

A forward and a backward pass of a Rack with full, sliding-window and kernel attention, in float32 and in
bfloat16 autocast, uncompiled with each kind of recomputation, and compiled with budgets. Memory is that of a
process of its own for each; throughput is of one process, interleaved.

The bars come from counting. A Block of width d with a feed-forward of width f saves some 9 d + 4 f numbers a
token (what enters the two norms and what leaves them, q, k, v, what attention says, gate, its activation, up
and their product); recomputed, the d that it was given; at f = 2.75 d that is a twentieth. `HELD` allows for
what embedding and head hold beside the Blocks. One more forward pass leaves at least 2/3 of the throughput
where a backward pass takes no less time than a forward pass.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.claim import Bar, Claim, interleave, ratio
from bench.isolated import isolated
from stackwise import create_simple_rack
from stackwise.benchmark.memory.peak import peak_memory_bytes
from stackwise.config import RecomputeConfig
from stackwise.model import Rack
from stackwise.model.compilation import compiled
from stackwise.support.tensor_tree import tensors_of
from stackwise.training.objective import next_token_loss
from stackwise.training.recompute import recomputing

ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"sliding_window": 256},
    "kernel": {"attention_type": "kernel", "kernel": {"feature_map": "favor", "n_features": 64}},
}
KINDS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "full": {"kind": "full"},
    "every_nth 2": {"kind": "every_nth", "every": 2},
    "selective": {"kind": "selective"},
    "by_name feedforward": {"kind": "by_name", "names": ["*.feedforward"]},
}
BUDGETS = (1.0, 0.5, 0.0)
HELD = {"full": 0.15, "every_nth 2": 0.6, "selective": 0.8}
THROUGHPUT = 0.66


@dataclass(frozen=True)
class Shape:
    """The Rack, its batch, and how long it is looked at."""

    d_model: int
    d_ff: int
    n_heads: int
    n_blocks: int
    batch_size: int
    seq_len: int
    rounds: int
    gigabytes: float

    def build(self, attention: str) -> tuple[Rack, dict[str, Tensor]]:
        """A Rack in training, and a batch of it."""
        torch.manual_seed(0)
        rack = create_simple_rack(
            1,
            self.n_blocks,
            d_model=self.d_model,
            d_ff=self.d_ff,
            n_heads=self.n_heads,
            vocab_size=256,
            **ATTENTION[attention],
        )
        return rack.train(), {"input_ids": torch.randint(256, (self.batch_size, self.seq_len + 1))}


FULL = Shape(512, 1408, 8, 8, batch_size=2, seq_len=1024, rounds=5, gigabytes=6.0)
QUICK = Shape(64, 176, 2, 4, batch_size=2, seq_len=128, rounds=3, gigabytes=2.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small shape, few rounds")
    arguments = parser.parse_args()
    shape = QUICK if arguments.quick else FULL
    claim = Claim("recompute", arguments.quick)
    claim.figures["shape"] = {key: value for key, value in vars(shape).items() if key != "gigabytes"}
    # What is measured in processes of their own comes first, while this one has no threads.
    memories = [(claim, shape, name, precision) for name in ATTENTION for precision in ("fp32", "bf16")]
    for each in memories:
        memory(*each)
    budget_memory(claim, shape)
    for each in memories:
        throughput(*each)
    budget_throughput(claim, shape)
    return claim.conclude()


def memory(claim: Claim, shape: Shape, attention: str, precision: str) -> None:
    """What each kind holds between the passes, and its peak; and whether gradients are the same."""
    found = {
        name: measured(partial(one_pass, shape, attention, precision, KINDS[name]), shape) for name in KINDS
    }
    plain = found["none"]
    figures = {
        name: {
            "held_bytes": each["held_bytes"],
            "held": each["held_bytes"] / plain["held_bytes"],
            "peak_bytes": each["peak_bytes"],
            "peak": each["peak_bytes"] / plain["peak_bytes"] if each["peak_bytes"] else None,
        }
        for name, each in found.items()
    }
    row = f"{attention} {precision}"
    for name, limit in HELD.items():
        held = figures[name]["held"]
        claim.enter(Bar(f"{row}: held, {name}", held, limit, at_most=True, full_size=True))
    same = all(each["gradients"] == plain["gradients"] for each in found.values())
    claim.enter(Bar(f"{row}: same gradients", float(same), 1.0))
    claim.figures[f"{row}: memory"] = figures
    print(f"\n{row}: held between the passes, and most memory of a pass beyond the Rack; MB (of none's)")
    for name, each in figures.items():
        print(f"  {name:<20} {_shown(each, 'held'):>16} {_shown(each, 'peak'):>16}", flush=True)


def throughput(claim: Claim, shape: Shape, attention: str, precision: str) -> None:
    """What part of none's throughput each kind has, with a forward and a backward pass."""
    rack, batch = shape.build(attention)

    def call(options: dict[str, Any]) -> Callable[[], object]:
        config = RecomputeConfig.from_dict(options)

        def both_ways() -> object:
            with recomputing(rack, config):
                _loss(next_token_loss, rack, batch, precision).backward()
            return rack.zero_grad()

        return both_ways

    calls = {name: call(options) for name, options in KINDS.items()}
    gains = _compared(claim, f"{attention} {precision}", interleave(calls, rounds=shape.rounds), "none")
    gain = gains["full"]["median"]
    claim.enter(Bar(f"{attention} {precision}: throughput, full", gain, THROUGHPUT, full_size=True))


def budget_memory(claim: Claim, shape: Shape) -> None:
    """What the compiler saves between the passes under each budget, and the peak."""
    figures: dict[str, dict[str, Any]] = {}
    for budget in BUDGETS:
        found = measured(partial(one_compiled_pass, shape, budget), shape)
        plain = figures.get("budget 1.0", found)
        figures[f"budget {budget}"] = {
            **found,
            "held": found["held_bytes"] / plain["held_bytes"],
            "peak": found["peak_bytes"] / plain["peak_bytes"] if found["peak_bytes"] else None,
        }
    claim.figures["full bf16 compiled: memory"] = figures
    # Nothing but inputs is kept at 0; the setting is a bound, and rounded up to whole tensors.
    held = figures["budget 0.0"]["held"]
    claim.enter(Bar("full bf16 compiled: held, budget 0", held, 0.5, at_most=True, full_size=True))
    print("\nfull bf16 compiled: saved for the backward pass, and most memory of a pass; MB (of budget 1's)")
    for name, each in figures.items():
        print(f"  {name:<20} {_shown(each, 'held'):>16} {_shown(each, 'peak'):>16}", flush=True)


def budget_throughput(claim: Claim, shape: Shape) -> None:
    """What part of the throughput at budget 1 each budget has, compiled."""
    rack, batch = shape.build("full")

    def call(budget: float) -> Callable[[], object]:
        config = RecomputeConfig.from_dict({"kind": "budget", "budget": budget})
        loss = compiled(next_token_loss)

        def both_ways() -> object:
            with recomputing(rack, config):
                _loss(loss, rack, batch, "bf16").backward()
            return rack.zero_grad()

        return both_ways

    calls = {f"budget {budget}": call(budget) for budget in BUDGETS}
    _compared(claim, "full bf16 compiled", interleave(calls, rounds=shape.rounds), "budget 1.0")


def one_pass(
    shape: Shape, attention: str, precision: str, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """For `isolated`: bytes held, peak, and a digest of all gradients."""
    config = RecomputeConfig.from_dict(options)
    for each in (QUICK, shape):  # what the first call of all imports is no part of the second's peak
        rack, batch = each.build(attention)
        with recomputing(rack, config):
            held_bytes = bytes_held(lambda r=rack, b=batch: _loss(next_token_loss, r, b, precision))
            peak = _peak(lambda r=rack, b=batch: _loss(next_token_loss, r, b, precision).backward())
    digest = hashlib.sha256()
    for p in rack.parameters():
        assert p.grad is not None
        digest.update(p.grad.numpy().tobytes())
    yield {"held_bytes": held_bytes, "peak_bytes": peak, "gradients": digest.hexdigest()}


def one_compiled_pass(shape: Shape, budget: float) -> Iterator[dict[str, Any]]:
    """For `isolated`: bytes that a compiled pass saves, and the peak."""
    rack, batch = shape.build("full")
    loss = compiled(next_token_loss)
    with recomputing(rack, RecomputeConfig.from_dict({"kind": "budget", "budget": budget})):
        _loss(loss, rack, batch, "bf16").backward()
        rack.zero_grad()
        held_bytes = bytes_saved(lambda: _loss(loss, rack, batch, "bf16"), rack)
        peak = _peak(lambda: _loss(loss, rack, batch, "bf16").backward())
    yield {"held_bytes": held_bytes, "peak_bytes": peak}


def bytes_held(call: Callable[[], object]) -> int:
    """Bytes of what a call made and that lives on for as long as its result does, the result included.

    Whoever holds it: autograd's graph, or what selective recomputation keeps beside it. Sees uncompiled
    operations only.
    """
    made = _Made()
    with made:
        result = call()
    total = sum(storage.nbytes() for storage in list(made.storages.values()))
    del result
    return total


class _Made(TorchDispatchMode):
    """Notes each storage that an operation returns, without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tensors_of((args, kwargs or {}))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.storages[storage._cdata] = storage
        return result


def bytes_saved(call: Callable[[], object], rack: Rack) -> int:
    """Bytes of distinct storages that autograd saves during a call, weights left out."""
    weights = {p.untyped_storage()._cdata for p in rack.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(each.untyped_storage().nbytes() for key, each in saved.items() if key not in weights)


def measured(function: Callable[[], Iterator[dict[str, Any]]], shape: Shape) -> dict[str, Any]:
    """What `function` yields in a process of its own."""
    ended = isolated(function, seconds=600.0, gigabytes=shape.gigabytes)
    if ended.error:
        raise RuntimeError(ended.error)
    [value] = ended.values
    return dict(value)


def _loss(
    loss: Callable[[Rack, dict[str, Tensor]], Tensor], rack: Rack, batch: dict[str, Tensor], precision: str
) -> Tensor:
    context: AbstractContextManager[object] = nullcontext()
    if precision == "bf16":
        context = torch.autocast("cpu", dtype=torch.bfloat16)
    with context:
        return loss(rack, batch)


def _peak(call: Callable[[], object]) -> int | None:
    """Most resident memory of the process during a call beyond what it had before."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what is taken now
    before = peak_memory_bytes(lambda: None, torch.device("cpu"))
    peak = peak_memory_bytes(call, torch.device("cpu"))
    return None if before is None or peak is None else peak - before


def _compared(
    claim: Claim, row: str, samples: dict[str, list[float]], plain: str
) -> dict[str, dict[str, float]]:
    gains = {name: ratio(samples[plain], values) for name, values in samples.items()}
    claim.figures[f"{row}: throughput"] = {"of_none": gains, "seconds": samples}
    print(f"\n{row}: seconds forwards and backwards, and throughput as a part of that of {plain}")
    for name, gain in gains.items():
        low, high = gain["quartile_low"], gain["quartile_high"]
        print(
            f"  {name:<20} {median(samples[name]):8.3f}  {gain['median']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    return gains


def _shown(figures: dict[str, Any], key: str) -> str:
    if figures[f"{key}_bytes"] is None:
        return "-"
    return f"{figures[f'{key}_bytes'] / 1e6:.1f} ({figures[key]:.2f})"


if __name__ == "__main__":
    sys.exit(main())
