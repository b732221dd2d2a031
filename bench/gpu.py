"""`python -m bench.gpu`, or `pytest bench --gpu`: how much of a GPU training and decoding use.

- Training: model FLOPs (6 N + 12 L d T per token, Chowdhery et al. 2022, arXiv:2204.02311, appendix B)
  divided by the dense bfloat16 peak of the card.
- Decoding at batch 1: bytes of weights per second divided by the memory bandwidth, from the third new token
  on. The bandwidth is measured in the same process by a large copy, where each byte counts twice, as read and
  as written.
- Overhead: a training step with the guard or with telemetry divided by the same step without it.

Each part runs in a process of its own. Parts that are measured again replace their results in the file.
Without a GPU the file says "not measured".
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.claim import Bar, Claim, interleave, ratio
from bench.guard_overhead import Guarded
from bench.overhead import Loop
from bench.peer_models import Shape
from stackwise import create_simple_rack
from stackwise.config import TrainingConfig
from stackwise.model import Rack
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import MicroBatch, TrainStep

# Dense bfloat16 FLOPs per second from NVIDIA's data sheets, by a part of the card's name.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12}
OVERHEAD = Shape(768, 12, 12, 12, 2048, vocab_size=50304, batch_size=16, seq_len=1024)


@dataclass(frozen=True)
class Size:
    """A Rack by its shape, and how it is run."""

    name: str
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    batch_size: int
    seq_len: int
    bar: float

    def build(self, device: torch.device) -> Rack:
        torch.manual_seed(0)
        with device:
            return create_simple_rack(
                1,
                self.n_layers,
                d_model=self.d_model,
                d_ff=self.d_ff,
                n_heads=self.n_heads,
                n_kv_heads=self.n_kv_heads,
                vocab_size=self.vocab_size,
            )


TRAINING = (
    Size("124M/1k", 768, 12, 12, 12, 2048, 50304, 64, 1024, 0.45),
    Size("350M/2k", 1024, 24, 16, 16, 2816, 50304, 16, 2048, 0.50),
    Size("1.3B/2k", 2048, 24, 16, 16, 5504, 50304, 8, 2048, 0.50),
)
DECODING = (
    Size("1B", 2048, 16, 32, 8, 8192, 128256, 1, 128, 0.65),
    Size("8B", 4096, 32, 32, 8, 14336, 128256, 1, 128, 0.80),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="PART", choices=PARTS, help=f"one of {', '.join(PARTS)}")
    arguments = parser.parse_args()
    if arguments.only is None and torch.cuda.is_available():
        for part in PARTS:
            print(f"{part}:", flush=True)
            subprocess.run([sys.executable, "-m", "bench.gpu", "--only", part], check=False)
    claim = Claim("gpu", quick=False)
    claim.resume()
    device = torch.device("cuda") if torch.cuda.is_available() else None
    if arguments.only is not None or device is None:
        for part in [arguments.only] if arguments.only else PARTS:
            PARTS[part](claim, device)
    return claim.conclude()


def training_bar(claim: Claim, device: torch.device | None, size: Size) -> Bar:
    """Model FLOPs utilisation of the compiled training step."""
    name = f"train MFU {size.name}"
    if device is None:
        return _enter(claim, Bar(name, None, size.bar))
    figures = measure_training(size, device)
    return _enter(claim, Bar(name, figures["flops_per_second"] / peak_flops(device), size.bar), figures)


def decoding_bar(claim: Claim, device: torch.device | None, size: Size) -> Bar:
    """Memory bandwidth utilisation of compiled, captured decoding."""
    name = f"decode MBU {size.name}"
    if device is None:
        return _enter(claim, Bar(name, None, size.bar))
    figures = measure_decoding(size, device)
    return _enter(
        claim, Bar(name, figures["bytes_per_second"] / figures["copy_bytes_per_second"], size.bar), figures
    )


def overhead_bars(claim: Claim, device: torch.device | None, shape: Shape = OVERHEAD) -> list[Bar]:
    """Time of a training step with the guard or with telemetry, divided by that of the plain step."""
    limits = {"guarded": 1.02, "monitored": 1.01}
    if device is None:
        return [
            _enter(claim, Bar(f"{name} step", None, limit, at_most=True)) for name, limit in limits.items()
        ]
    seconds = measure_overhead(shape, device)
    bars = []
    for name, limit in limits.items():
        plain = "plain" if name == "guarded" else "loop"
        figures = {
            "seconds": seconds[name],
            "plain_seconds": seconds[plain],
            "ratio": ratio(seconds[name], seconds[plain]),
        }
        bars.append(
            _enter(claim, Bar(f"{name} step", figures["ratio"]["median"], limit, at_most=True), figures)
        )
    return bars


def _enter(claim: Claim, bar: Bar, figures: dict[str, Any] | None = None) -> Bar:
    claim.enter(bar, figures)
    return bar


def peak_flops(device: torch.device) -> float:
    """Dense bfloat16 FLOPs per second that the data sheet of the card gives.

    Raises:
        KeyError: the card is not in the table.
    """
    card = torch.cuda.get_device_name(device)
    for name, flops in PEAK_FLOPS.items():
        if name in card:
            return flops
    raise KeyError(f"bench.gpu: no peak is known of {card!r}; known: {', '.join(PEAK_FLOPS)}")


def copy_bytes_per_second(device: torch.device, n_bytes: int = 4 << 30, rounds: int = 5) -> float:
    """Bytes read and written per second by a copy that is far larger than the caches."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def once() -> float:
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        return time.perf_counter() - start

    once()
    return 2 * n_bytes / median(once() for _ in range(rounds))


def measure_training(size: Size, device: torch.device, steps: int = 20) -> dict[str, Any]:
    """Seconds of each step, warm-up beside, and FLOPs per second of the median."""
    rack = size.build(device)
    settings = TrainingConfig.from_dict({"precision": "bf16_weights", "compile": True})
    objective = Objective(settings.objective, size.vocab_size)
    step = TrainStep(PhaseModel(rack, objective), settings, rack)
    ids = torch.randint(size.vocab_size, (size.batch_size, size.seq_len + 1), device=device)

    def once() -> float:
        start = time.perf_counter()
        loss = step([MicroBatch(objective.targets({"input_ids": ids}, ()))], 1e-4).loss
        assert loss.isfinite()  # waits for the device
        return time.perf_counter() - start

    warm_up = sum(once() for _ in range(3))
    seconds = [once() for _ in range(steps)]
    tokens = size.batch_size * size.seq_len
    flops = flops_per_token(rack, size) * tokens / median(seconds)
    return {"warm_up_seconds": warm_up, "seconds": seconds, "tokens": tokens, "flops_per_second": flops}


def measure_decoding(
    size: Size, device: torch.device, n_new: int = 256, rounds: int = 5, copied_bytes: int = 4 << 30
) -> dict[str, Any]:
    """Seconds of each generation, and bytes of weights per second of the median from the third token on.

    The first token is that of the prefill, and the second one includes the capture of the CUDA graph.
    """
    rack = size.build(device).bfloat16().eval()
    prompt = torch.randint(size.vocab_size, (1, size.seq_len), device=device)

    def once() -> tuple[float, float]:
        start = time.perf_counter()
        tokens = rack.stream(prompt, max_new_tokens=n_new, compile=True)
        next(tokens), next(tokens)
        _wait(device)
        decoding = time.perf_counter()
        for _ in tokens:
            pass
        _wait(device)
        end = time.perf_counter()
        return decoding - start, end - decoding

    warm_up = once()
    begin_seconds, seconds = zip(*(once() for _ in range(rounds)), strict=True)
    weight_bytes = sum(p.nbytes for p in rack.parameters())  # the tied embedding is read as the head
    return {
        "warm_up_seconds": sum(warm_up),
        "begin_seconds": begin_seconds,
        "seconds": seconds,
        "new_tokens": n_new,
        "bytes_per_second": weight_bytes * (n_new - 2) / median(seconds),
        "copy_bytes_per_second": copy_bytes_per_second(device, copied_bytes),
    }


def measure_overhead(
    shape: Shape,
    device: torch.device,
    rounds: int = 21,
    *,
    compile: bool = True,  # noqa: A002
) -> dict[str, list[float]]:
    """Seconds of a step, one value per round: plain and guarded, loop and monitored."""
    guarded = Guarded(shape, device, compile=compile)
    ids = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1), device=device)
    loop = Loop(shape, ids, compile=compile)
    calls: dict[str, Callable[[], object]] = {
        "plain": guarded.plain,
        "guarded": guarded.guarded,
        "loop": loop.plain,
        "monitored": loop.monitored,
        "items": loop.items,
    }
    return interleave(calls, rounds=rounds, wait=partial(_wait, device))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops_per_token(rack: Rack, size: Size) -> float:
    """6 N + 12 L d T, of forward and backward pass; N counts the tied embedding once, as the head."""
    n_parameters = sum(p.numel() for p in rack.parameters())
    return 6 * n_parameters + 12 * size.n_layers * size.d_model * size.seq_len


# In the order of their value, if time is short.
PARTS: dict[str, Callable[[Claim, torch.device | None], object]] = {
    "train-124M": partial(training_bar, size=TRAINING[0]),
    "decode-1B": partial(decoding_bar, size=DECODING[0]),
    "train-350M": partial(training_bar, size=TRAINING[1]),
    "overhead": overhead_bars,
    "train-1.3B": partial(training_bar, size=TRAINING[2]),
    "decode-8B": partial(decoding_bar, size=DECODING[1]),
}


if __name__ == "__main__":
    sys.exit(main())
