"""`python -m bench.kernels`: kernel attention takes the same time per token from T=1k to T=16k.

One attention of 4 heads of 64, forwards, in one process, interleaved; softmax attention beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median

import torch

from bench.claim import Bar, Claim, interleave, ratio
from stackwise.config import BlockConfig
from stackwise.model.block import create_attention
from stackwise.model.layout import Layout

LENGTHS = (1024, 4096, 16384)
KINDS: dict[str, dict[str, object]] = {
    name: {"attention_type": "kernel", "kernel": {"feature_map": name, "n_features": 64}}
    for name in ("favor", "gaussian", "laplacian")
}
KINDS["elu"] = {"attention_type": "kernel", "kernel": {"feature_map": "elu"}}
KINDS["softmax"] = {"attention_type": "mha"}
FLAT = 1.15  # what is still called the same time per token


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    arguments = parser.parse_args()
    claim = Claim("kernels", arguments.quick)
    for name, options in KINDS.items():
        config = BlockConfig.from_dict({"d_model": 256, "d_ff": 256, "n_heads": 4, **options})
        attention = create_attention(config).eval()
        calls = {str(T): call(attention, T) for T in LENGTHS}
        samples = interleave(calls, rounds=5 if arguments.quick else 15, seconds=0.5)
        per_token = {T: [each / int(T) for each in values] for T, values in samples.items()}
        growth = ratio(per_token[str(LENGTHS[-1])], per_token[str(LENGTHS[0])])
        claim.figures[name] = {"seconds_per_token": per_token, "growth": growth}
        if name != "softmax":
            claim.bars.append(
                Bar(f"{name}: time per token, 16k over 1k", growth["median"], FLAT, at_most=True)
            )
        shown = "  ".join(f"T={T} {1e6 * median(values):6.2f}" for T, values in per_token.items())
        print(f"{name:<10} microseconds a token: {shown}", flush=True)
        claim.write()
    return claim.conclude()


def call(attention: torch.nn.Module, seq_len: int) -> Callable[[], object]:
    x = torch.randn(1, seq_len, 256)

    @torch.no_grad()
    def forward() -> object:
        return attention(x, Layout(x))

    return forward


if __name__ == "__main__":
    sys.exit(main())
