"""A model at work: a forward pass, a training step, a prefill, a token or a text.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.benchmark.cache_rewind import RewoundCache, is_changed_by
from stackwise.benchmark.token_stream import (
    ALL_AGAIN,
    LOOPS,
    OnToken,
    TokenStream,
    cache_maker,
    empty_cache,
    missing_cache,
    of_last,
    token_stream,
)
from stackwise.benchmark.workload.compiled_spec import COMPILE_MODES, compile_now, compiled_spec
from stackwise.benchmark.workload.model_facts import execution, held_bytes, recomputed_by, weight_notes
from stackwise.benchmark.workload.workload import Workload
from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice, check_sizes, require
from stackwise.support.device import resolve_device

__all__ = ["DTYPES", "MODES", "check_shape", "model_workload"]

MODES = ("forward", "train", "prefill", "decode", "generate")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_GOES_ON = (
    "the same step gives other logits when it is made again: the model keeps more than the cache that it "
    "hands on, so that the context grows from call to call, or is not deterministic"
)
_CONTINUES = ("prefill", "decode", "generate")
_DEFAULT_OPTIMIZER = next(each.default for each in fields(ModelSpec) if each.name == "optimizer")


def model_workload(
    spec: Any,
    mode: str,
    *,
    batch_size: int,
    seq_len: int,
    new_tokens: int = 32,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    compile: bool | str = False,  # noqa: A002  # the name in PyTorch
    loop: str = "common",
    seed: int = 0,
) -> Workload:
    """A model at work. Inputs are random, and the same at each call; so, except in training, is the state.

    - "forward": logits of all B x T positions, in eval mode without gradients.
    - "train": forward and backward pass and the update of `spec.optimizer`. Each call goes on from the
      weights that the one before has left. Weights that are not finite afterwards are told in the notes; of
      the optimizer that a spec has by itself, `eps` is raised to what the dtype can hold.
    - "prefill": a prompt of T tokens into an empty cache, and the logits of the last. A model that cannot be
      asked for these alone computes those of all T, and `execution` says so.
    - "decode": one more token of each row, at a context of T tokens. The cache is put back before each call
      and outside of its time. A model that keeps no cache computes all T + 1 positions again; of one that
      keeps what cannot be put back, `notes` say so.
    - "generate": a prompt of T tokens, then `new_tokens` of the most likely tokens, from an empty cache.

    Args:
        spec: the model; anything that `ModelSpec.of` understands.
        mode: one of these.
        batch_size: B.
        seq_len: T.
        new_tokens: of "generate".
        device: where to run: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16", "float16" or "float64", of weights and inputs; None: as they are made.
        compile: compile the model for these shapes; a string is the mode of torch.compile. The first
            call, which compiles, is made here.
        loop: of "generate": "common", the same loop for all models, or "own", that of the model; see
            `token_stream`.
        seed: of weights and inputs.

    Raises:
        ValueError: another mode, dtype, loop or way to compile; sizes that are no positive integers or
            beyond the model; a seed that is none; a device that this machine does not have; a model that has
            no next token: one that is not causal, or takes vectors; of "train" one without a weight to train.
        FactoryError, InferenceError, TypeError: as of `ModelSpec.of`.
    """
    check_shape(
        mode=mode,
        batch_size=batch_size,
        seq_len=seq_len,
        new_tokens=new_tokens,
        dtype=dtype,
        compile=compile,
        loop=loop,
        seed=seed,
    )
    device = resolve_device(str(device))
    spec = ModelSpec.of(spec)
    _check_continues(spec, mode, seq_len, {"decode": 1, "generate": new_tokens}.get(mode, 0))
    model = spec.create(device, seed).eval()
    if dtype is not None:
        model = model.to(DTYPES[dtype])
    # Where one token follows, the head of all others is no part of the work.
    last = of_last(spec, model) if mode == "prefill" or (mode == "decode" and spec.decode is None) else None
    timed = compiled_spec(last or spec, compile if mode != "generate" else False)
    model.train(mode == "train")
    inputs = spec.batch(batch_size, seq_len + (mode == "decode"), device=device, seed=seed)
    told: dict[str, str] = {}
    prepare: Callable[[], object] | None = None
    prepare_alone: Callable[[], object] | None = None
    notes: Callable[[], tuple[str, ...]] = tuple
    counted = True
    optimizer: torch.optim.Optimizer | None = None
    each_token: Callable[[OnToken], None] | None = None
    tokens = batch_size * seq_len
    match mode:
        case "forward":
            call = _forward(timed, model, inputs)
        case "train":
            optimizer, raised = _optimizer(spec, model)
            call = _train(timed, model, inputs, optimizer)
            told |= raised
            notes = partial(weight_notes, model)
        case "prefill":
            call = _prefill(timed, model, inputs)
            told["prefill"] = (
                "into an empty cache" if spec.decode else f"a forward pass: {missing_cache(spec)}"
            ) + ("" if last else "; logits of all positions")
        case "decode":
            call, rewound, alike = _decode(spec, timed, model, inputs)
            if rewound is not None:
                prepare, prepare_alone = rewound.rewind, rewound.rewind_alone
            notes = tuple if alike else partial(tuple, [_GOES_ON])
            counted = alike and spec.decode is not None
            tokens = batch_size
            told["decode"] = _how_decoded(spec, rewound is not None)
        case _:
            stream = token_stream(spec, model, loop, compiled=bool(compile))
            each_token = _each_token(stream, inputs, new_tokens)
            call = partial(each_token, _ignored)
            tokens = batch_size * new_tokens
            told["generate"] = stream.told
    if compile and mode != "generate":
        told["compile"] = compile_now(call)
    return Workload(
        f"{spec.name} {mode}",
        call,
        device,
        tokens,
        lambda: execution(model) | told,
        prepare,
        model,
        mode,
        batch_size,
        seq_len,
        new_tokens if mode == "generate" else 0,
        each_token,
        counted,
        recomputed_by(model) if mode == "train" else "none",
        ("last" if last else "all") if mode == "prefill" else None,
        prepare_alone,
        partial(held_bytes, model, optimizer),
        notes,
    )


def check_shape(
    *,
    mode: str = "forward",
    batch_size: int = 1,
    seq_len: int = 1,
    new_tokens: int = 1,
    dtype: str | None = None,
    compile: bool | str = False,  # noqa: A002
    loop: str = "common",
    seed: int = 0,
) -> None:
    """Refuse what `model_workload` would refuse whatever the model, without building anything.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    check_choice("mode", mode, MODES)
    check_sizes(batch_size=batch_size, seq_len=seq_len, new_tokens=new_tokens)
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    if not isinstance(compile, bool):
        require(compile in COMPILE_MODES, "compile", compile, f"True, False, {', '.join(COMPILE_MODES)}")
    check_choice("loop", loop, LOOPS)
    sound = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63
    require(sound, "seed", seed, "an integer from 0 to 2**63 - 1")
    if mode == "generate" and compile:
        # The common loop grows by a token at each step, which would be compiled anew.
        require(loop == "own", "loop", loop, "'own', where mode is 'generate' and compile is on")
        require(compile is True, "compile", compile, "True or False, where mode is 'generate'")


def _check_continues(spec: ModelSpec, mode: str, seq_len: int, n_new: int) -> None:
    """Refuse to continue what has no next token, or no room for it."""
    if mode in _CONTINUES:
        require(spec.causal is not False, "mode", mode, f"'forward', 'train': {spec.name} is not causal")
    if mode == "generate":
        others = ", ".join(repr(other) for other in MODES if other != "generate")
        require(spec.inputs == "tokens", "mode", mode, f"{others}: {spec.name} takes vectors, not tokens")
    if n_new and spec.max_length is not None and seq_len + n_new > spec.max_length:
        raise ValueError(
            f"seq_len: got {seq_len}, and {n_new} more to come; {spec.name} takes at most {spec.max_length} "
            "positions"
        )


def _forward(spec: ModelSpec, model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            spec.logits(model, inputs)

    return forward


def _train(
    spec: ModelSpec, model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    def train() -> None:
        spec.loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return train


def _optimizer(spec: ModelSpec, model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, str]]:
    """That of the spec, and what was changed of it, for people.

    In float16 the 1e-8 of AdamW is 0, as is the mean of small squares: weights would be NaN after a step.
    What is added instead is the gradient whose square just gets lost in that mean, so that no step is longer
    than one of a gradient that does not.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    require(bool(trainable), "model", spec.name, "in mode 'train', a model with a parameter that trains")
    optimizer = spec.optimizer(trainable)
    told = {}
    if spec.optimizer is _DEFAULT_OPTIMIZER:
        for group in optimizer.param_groups:
            least = max(_smallest(p.dtype) for p in group["params"])
            lost = (least / (1 - group["betas"][1])) ** 0.5
            if lost > group["eps"]:
                told["optimizer"] = f"AdamW with eps={lost:.2g}, as the dtype has no {group['eps']:g}"
                group["eps"] = lost
    return optimizer, told


def _smallest(dtype: torch.dtype) -> float:
    """Above 0; there is nothing between."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def _prefill(spec: ModelSpec, model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    decode = spec.decode
    if decode is None:
        return _forward(spec, model, inputs)
    inputs, make_cache = _cast(spec, model, inputs), cache_maker(model)

    def prefill() -> None:
        with torch.no_grad():
            decode(model, inputs, make_cache(*inputs.shape[:2]))

    return prefill


def _decode(
    spec: ModelSpec, timed: ModelSpec, model: nn.Module, inputs: Tensor
) -> tuple[Callable[[], None], RewoundCache | None, bool]:
    """A call as `timed` makes it, the cache to put back, and whether each call then does the same.

    All but the last input are in the cache.
    """
    decode, timed_decode = spec.decode, timed.decode
    if decode is None or timed_decode is None:
        return _forward(timed, model, inputs), None, True
    inputs = _cast(spec, model, inputs)
    # Contiguous before the clock starts: the calls would copy them otherwise.
    context, last = inputs[:, :-1].contiguous(), inputs[:, -1:].contiguous()

    def step(cache: Any) -> None:
        with torch.no_grad():
            timed_decode(model, last, cache)

    @torch.no_grad()
    def fill() -> Any:
        return decode(model, context, empty_cache(model, *inputs.shape[:2]))[1]

    found: list[Tensor] = []

    @torch.no_grad()
    def look(cache: Any) -> None:
        found.append(logits_of(decode(model, last, cache)[0]).clone())

    kept = RewoundCache(fill, spec.name)
    changed = is_changed_by(look, kept.take())
    look(kept.take())
    first, second = found
    alike = torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
    if not changed:
        kept.rewind_alone()
        cache = kept.take()
        return (lambda: step(cache)), None, alike
    return (lambda: step(kept.take())), kept, alike


def _how_decoded(spec: ModelSpec, rewinds: bool) -> str:
    if spec.decode is None:
        return f"{ALL_AGAIN}: {missing_cache(spec)}"
    return "with a cache" + (", restored from a copy" if rewinds else "")


def _each_token(stream: TokenStream, prompt: Tensor, new_tokens: int) -> Callable[[OnToken], None]:
    def generate(on_token: OnToken) -> None:
        stream.run(prompt, new_tokens, on_token)

    return generate


def _ignored(token_B: Tensor) -> None:
    """Of a generation that is timed as a whole."""


def _cast(spec: ModelSpec, model: nn.Module, inputs: Tensor) -> Tensor:
    """Vectors in the dtype of the weights; ids as they are."""
    if spec.inputs == "tokens":
        return inputs
    return inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))
