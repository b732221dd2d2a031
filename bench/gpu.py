"""`python -m bench.gpu`, or `pytest bench --gpu`: how much of a GPU training and decoding use.

Training: model FLOPs (6 N + 12 L d T a token, Chowdhery et al. 2022, arXiv:2204.02311, appendix B) over what
the tensor cores can do in bfloat16. Decoding at batch 1: weights read over what the memory can deliver. Bars
hold for one H200; without a GPU the file says "not measured".
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.claim import Bar, Claim
from stackwise import create_simple_rack
from stackwise.config import TrainingConfig
from stackwise.model import Rack
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import MicroBatch, TrainStep

PEAK_FLOPS, PEAK_BYTES = 989e12, 4.3e12  # of one H200: dense bfloat16, and as measured of its 4.8e12


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
    argparse.ArgumentParser(description=__doc__).parse_args()
    claim = Claim("gpu", quick=False)
    device = torch.device("cuda") if torch.cuda.is_available() else None
    for size in TRAINING:
        claim.bars.append(training_bar(claim, size, device))
        claim.write()
    for size in DECODING:
        claim.bars.append(decoding_bar(claim, size, device))
        claim.write()
    return claim.conclude()


def training_bar(claim: Claim, size: Size, device: torch.device | None) -> Bar:
    """Model FLOPs utilisation of the compiled training step."""
    name = f"train MFU {size.name}"
    if device is None:
        return Bar(name, None, size.bar)
    claim.figures[name] = figures = measure_training(size, device)
    return Bar(name, figures["flops_per_second"] / PEAK_FLOPS, size.bar)


def decoding_bar(claim: Claim, size: Size, device: torch.device | None) -> Bar:
    """Memory bandwidth utilisation of compiled, captured decoding."""
    name = f"decode MBU {size.name}"
    if device is None:
        return Bar(name, None, size.bar)
    claim.figures[name] = figures = measure_decoding(size, device)
    return Bar(name, figures["bytes_per_second"] / PEAK_BYTES, size.bar)


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


def measure_decoding(size: Size, device: torch.device, n_new: int = 256, rounds: int = 5) -> dict[str, Any]:
    """Seconds of each generation, warm-up beside, and bytes of weights per second of the median."""
    rack = size.build(device).bfloat16().eval()
    prompt = torch.randint(size.vocab_size, (1, size.seq_len), device=device)

    def once() -> float:
        start = time.perf_counter()
        rack.generate(prompt, max_new_tokens=n_new, compile=True).sum().item()  # waits for the device
        return time.perf_counter() - start

    warm_up = once()
    seconds = [once() for _ in range(rounds)]
    weight_bytes = sum(p.nbytes for p in rack.parameters())  # the tied embedding is read as the head
    rate = weight_bytes * n_new / median(seconds)
    return {"warm_up_seconds": warm_up, "seconds": seconds, "new_tokens": n_new, "bytes_per_second": rate}


def flops_per_token(rack: Rack, size: Size) -> float:
    """6 N + 12 L d T, of forward and backward pass; N counts the tied embedding once, as the head."""
    n_parameters = sum(p.numel() for p in rack.parameters())
    return 6 * n_parameters + 12 * size.n_layers * size.d_model * size.seq_len


if __name__ == "__main__":
    sys.exit(main())
