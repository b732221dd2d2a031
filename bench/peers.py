"""`python -m bench.peers`: the Rack beside transformers, litgpt and x-transformers, in one process.

The same Llama shape in each library, each at its own best of {fp32, bf16} x {eager, compiled}; every
round runs all of them once, in random order, and figures are medians over rounds of the ratio within a
round. Peers train with the same loss and clipping and fused AdamW. Needs `make peers`.

Threads are to spin between the kernels of a step, as they do by default where a model trains alone: it wants
OMP_WAIT_POLICY=ACTIVE. With PASSIVE, as other benches have it, our steps take a sixth longer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.claim import Bar, Claim, interleave, ratio
from bench.peer_models import PEERS, Built, Shape, rack, versions
from stackwise.config import TrainingConfig
from stackwise.data.create import documentation_text
from stackwise.model import Rack, quantize_stack
from stackwise.model.backend import attend, using
from stackwise.model.layout import Layout
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel
from stackwise.training.step import MicroBatch, TrainStep

SMALL = Shape(384, 6, 6, 2, 1024, batch_size=2, seq_len=256)
SHAPES = [
    (SMALL, 1.20),
    (Shape(384, 6, 6, 2, 1024, batch_size=8, seq_len=256), 1.45),
    (Shape(512, 8, 8, 2, 1408, batch_size=4, seq_len=1024), 1.35),
]
DECODE = Shape(768, 12, 12, 4, 2048, batch_size=1, seq_len=128)
LR, CLIP = 1e-3, 1.0
OURS = "stackwise bf16 compiled"
KEPT = 3  # candidates that are measured to the end; the others have shown to be slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one shape, few rounds")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--rows", help="only bars whose name has this in it; the others stay as they are")
    arguments = parser.parse_args()
    policy = os.environ.get("OMP_WAIT_POLICY")
    if policy != "ACTIVE" and not arguments.quick:
        parser.error(f"OMP_WAIT_POLICY: got {policy}; allowed: ACTIVE, as where a model trains alone")
    rounds = 7 if arguments.quick else arguments.rounds
    torch._dynamo.config.recompile_limit = 256  # one code object serves many models
    claim = Claim("peers", arguments.quick)
    claim.figures["versions"] = versions()

    wanted = arguments.rows or ""
    if wanted:
        claim.resume()
    for name, part in (("loss", agreement), ("window", window), ("decode", decode)):
        if wanted in name:
            part(claim, rounds)
    for shape, limit in SHAPES[: 1 if arguments.quick else None]:
        for kind, bar in (("train", limit), ("forward", 1.2)):
            if wanted in f"{kind} {shape.name}":
                compare(claim, kind, shape, bar, rounds)
    return claim.conclude()


def compare(claim: Claim, kind: str, shape: Shape, limit: float, rounds: int) -> None:
    """Training step or forward pass of every candidate; the bar is the best peer's time over ours."""
    make = train_call if kind == "train" else forward_call
    ours = our_train_call if kind == "train" else forward_call
    ids = torch.randint(shape.vocab_size, (shape.batch_size, shape.seq_len + 1))
    calls, warm_up = {}, {}
    for name, build, maker, dtype, compiled in [
        *(
            (name, build, make, dtype, compiled)
            for name, build in PEERS.items()
            for dtype in (torch.float32, torch.bfloat16)
            for compiled in (False, True)
        ),
        ("stackwise", rack, ours, torch.bfloat16, True),
    ]:
        label = (
            f"{name} {'bf16' if dtype == torch.bfloat16 else 'fp32'} {'compiled' if compiled else 'eager'}"
        )
        torch.manual_seed(0)
        start = time.perf_counter()
        calls[label] = maker(build(shape), ids, dtype, compiled)
        calls[label]()
        warm_up[label] = time.perf_counter() - start
    screening = interleave(calls, rounds=3)
    kept = sorted(set(calls) - {OURS}, key=lambda label: median(screening[label]))[:KEPT]
    samples = interleave({label: calls[label] for label in (OURS, *kept)}, rounds=rounds)
    best = min(kept, key=lambda label: median(samples[label]))
    gain = ratio(samples[best], samples[OURS])
    figures = {
        "best_peer": best,
        "times_faster": gain,
        "tokens": shape.batch_size * shape.seq_len,
        "warm_up_seconds": warm_up,
        "screening_seconds": screening,
        "seconds": samples,
    }
    claim.enter(Bar(f"{kind} {shape.name}", gain["median"], limit), figures)
    print(f"\n{kind}, {shape.name}: tokens/s (warm-up seconds)")
    for label in sorted(calls, key=lambda label: median(screening[label])):
        seconds = median(samples.get(label, screening[label]))
        print(f"  {label:<30} {shape.batch_size * shape.seq_len / seconds:9.0f}  ({warm_up[label]:.0f})")
    print(
        f"  {gain['median']:.2f} times {best} [{gain['quartile_low']:.2f}, {gain['quartile_high']:.2f}]",
        flush=True,
    )


def loss_of(model: nn.Module, logits: Callable[[nn.Module, Tensor], Tensor], ids: Tensor) -> Tensor:
    return F.cross_entropy(logits(model, ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def train_call(built: Built, ids: Tensor, dtype: torch.dtype, compiled: bool) -> Callable[[], Tensor]:
    model, logits = built
    model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), fused=True)
    loss_function = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step() -> Tensor:
        loss = loss_function(model, logits, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def our_train_call(built: Built, ids: Tensor, dtype: torch.dtype, compiled: bool) -> Callable[[], Tensor]:
    model, _ = built
    assert isinstance(model, Rack) and dtype == torch.bfloat16
    settings = TrainingConfig.from_dict(
        {
            "precision": "bf16_weights",
            "compile": compiled,
            "grad_clip": CLIP,
            "optimizer": {"weight_decay": 0.01},
        }
    )
    objective = Objective(settings.objective, model.vocab_size)
    step = TrainStep(PhaseModel(model, objective), settings, model)
    return lambda: step([MicroBatch(objective.targets({"input_ids": ids}, ()))], LR).loss


def forward_call(built: Built, ids: Tensor, dtype: torch.dtype, compiled: bool) -> Callable[[], Tensor]:
    model, logits = built
    model.to(dtype).eval()
    function = torch.compile(logits, dynamic=False) if compiled else logits
    inputs = ids[:, :-1].contiguous()

    @torch.no_grad()
    def forward() -> Tensor:
        return function(model, inputs)

    return forward


def agreement(claim: Claim, rounds: int, steps: int = 50) -> None:  # noqa: ARG001
    """Held-out loss after equal steps from equal weights: ours in bf16, compiled, and transformers in fp32.

    Of text: on random tokens the last of 50 training losses is chaotic, and two runs in fp32 differ by a
    percent.
    """
    torch.manual_seed(0)
    peer, logits = PEERS["transformers"](SMALL)
    ours = Rack.from_pretrained(peer)
    text = torch.frombuffer(bytearray(documentation_text().encode()), dtype=torch.uint8).long()
    rows = torch.randint(len(text) - SMALL.seq_len, (steps + 16, SMALL.batch_size))
    batches = text[rows[..., None] + torch.arange(SMALL.seq_len + 1)]
    ids = batches[0].clone()
    theirs = train_call((peer, logits), ids, torch.float32, compiled=False)
    mine = our_train_call((ours, logits), ids, torch.bfloat16, compiled=True)
    losses: dict[str, list[float]] = {"transformers fp32 eager": [], OURS: []}
    for batch in batches[:steps]:
        ids.copy_(batch)
        losses["transformers fp32 eager"].append(float(theirs()))
        losses[OURS].append(float(mine()))
    with torch.no_grad():
        held_out = batches[steps:].flatten(0, 1)
        after = {
            "transformers fp32 eager": float(loss_of(peer, logits, held_out)),
            OURS: float(loss_of(ours, lambda module, ids: module(ids), held_out)),
        }
    difference = abs(after[OURS] / after["transformers fp32 eager"] - 1)
    claim.figures["loss after 50 steps"] = {"held_out": after, "training": losses}
    claim.enter(Bar("loss after 50 steps, relative", difference, 0.01, at_most=True))
    print(f"loss on held-out text after {steps} steps: {after}")


def window(claim: Claim, rounds: int) -> None:
    """A training step's attention over T=2048 that sees 256: sliced, and masked over everything."""
    q, k, v = (torch.randn(1, heads, 2048, 64, dtype=torch.bfloat16) for heads in (6, 2, 2))
    for each in (q, k, v):
        each.requires_grad_()

    def call(name: str, compiled: bool) -> Callable[[], object]:
        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = Layout(q[:, 0]).mask(causal=True, window=256)
            with using(name):
                return attend(q, k, v, mask)[0]

        function = torch.compile(attention, dynamic=False) if compiled else attention

        def both_ways() -> object:
            y = function(q, k, v)
            return torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

        return both_ways

    calls = {
        f"{name} {'compiled' if compiled else 'eager'}": call(name, compiled)
        for name in ("sliced", "sdpa")
        for compiled in (False, True)
    }
    samples = interleave(calls, rounds=rounds)
    masked = min(("sdpa eager", "sdpa compiled"), key=lambda name: median(samples[name]))
    gain = ratio(samples[masked], samples["sliced compiled"])
    forward = flex_window(rounds, q.detach(), k.detach(), v.detach())
    claim.figures["window"] = {
        "masked": masked,
        "times_faster": gain,
        "seconds": samples,
        "forward_seconds": forward,
    }
    claim.enter(Bar("window T2048 W256", gain["median"], 2.5))
    print("\nwindow of 256 in 2048, milliseconds both ways")
    for name, values in samples.items():
        print(f"  {name:<18} {1e3 * median(values):8.1f}")
    print("forward only, since flex_attention has no backward pass on the CPU")
    for name, values in forward.items():
        print(f"  {name:<18} {1e3 * median(values):8.1f}")


def flex_window(rounds: int, q: Tensor, k: Tensor, v: Tensor) -> dict[str, list[float]]:
    """Seconds of the same window's forward pass, sliced and by flex_attention, both compiled."""
    T = q.shape[2]
    rule = create_block_mask(lambda _b, _h, i, j: (j <= i) & (i - j < 256), None, None, T, T, device="cpu")
    flex = torch.compile(lambda: flex_attention(q, k, v, block_mask=rule, enable_gqa=True), dynamic=False)

    def sliced() -> Tensor:
        with using("sliced"):
            return attend(q, k, v, Layout(q[:, 0]).mask(causal=True, window=256))[0]

    calls = {"sliced": torch.compile(sliced, dynamic=False), "flex_attention": flex}
    with torch.no_grad():
        torch.testing.assert_close(calls["sliced"](), flex(), rtol=0.02, atol=0.03)
        return interleave(calls, rounds=rounds)


def decode(claim: Claim, rounds: int, n_new: int = 64) -> None:
    """Tokens per second at batch 1, one thread, bf16: generation as each library offers it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prompt = torch.randint(DECODE.vocab_size, (1, 16))
    calls = {"transformers": transformers_generate(prompt, n_new), "litgpt": litgpt_generate(prompt, n_new)}
    plain = rack(DECODE)[0].bfloat16().eval()
    assert isinstance(plain, Rack)
    calls["stackwise eager"] = lambda: plain.generate(prompt, max_new_tokens=n_new)
    calls["stackwise"] = lambda: plain.generate(prompt, max_new_tokens=n_new, compile=True)
    small = rack(DECODE)[0].bfloat16().eval()
    assert isinstance(small, Rack)
    quantize_stack(small, 0, dtype="int8")
    calls["stackwise int8"] = lambda: small.generate(prompt, max_new_tokens=n_new, compile=True)
    samples = interleave(calls, rounds=min(rounds, 9), seconds=1.0)
    torch.set_num_threads(threads)
    best = min(("transformers", "litgpt"), key=lambda name: median(samples[name]))
    weights = sum(p.nbytes for p in plain.parameters()) - plain.embedding.weight.nbytes
    figures = {name: {"tokens_per_second": n_new / median(values)} for name, values in samples.items()}
    gains = {name: ratio(samples[best], samples[name]) for name in ("stackwise", "stackwise int8")}
    claim.figures["decode"] = {
        "best_peer": best,
        "weight_bytes_read": weights,
        "figures": figures,
        "times_faster": gains,
        "seconds": samples,
    }
    claim.enter(Bar("decode bf16", gains["stackwise"]["median"], 1.2))
    claim.enter(Bar("decode int8", gains["stackwise int8"]["median"], 2.0))
    print("\ndecode, one thread: tokens/s (GB/s of weights in bf16)")
    for name, figure in figures.items():
        rate = figure["tokens_per_second"]
        print(f"  {name:<18} {rate:7.1f}  ({rate * weights / 1e9:.1f})")


def transformers_generate(prompt: Tensor, n_new: int) -> Callable[[], object]:
    model = PEERS["transformers"](DECODE)[0].bfloat16().eval()
    return lambda: model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=n_new,
        do_sample=False,
        cache_implementation="static",
    )


def litgpt_generate(prompt: Tensor, n_new: int) -> Callable[[], object]:
    from litgpt.generate.base import generate

    model = PEERS["litgpt"](DECODE)[0].bfloat16().eval()
    total = prompt.shape[1] + n_new
    model.max_seq_length = total
    model.set_kv_cache(batch_size=1, dtype=torch.bfloat16)

    @torch.inference_mode()
    def call() -> object:
        return generate(model, prompt[0], max_returned_tokens=total, temperature=0.0)

    return call


if __name__ == "__main__":
    sys.exit(main())
