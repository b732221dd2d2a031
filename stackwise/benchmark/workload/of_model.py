"""Workloads of a model: a forward pass, a training step, a prefill, a token or a generation.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.benchmark.cache_rewind import RewoundCache, is_changed_by
from stackwise.benchmark.token_stream import (
    ALL_AGAIN,
    LOOPS,
    cache_maker,
    empty_cache,
    missing_cache,
    of_last,
    token_stream,
)
from stackwise.benchmark.workload.model_facts import execution, held_bytes, recomputed_by, weight_notes
from stackwise.benchmark.workload.workload import Workload
from stackwise.subject.inference import logits_of
from stackwise.subject.spec import ModelSpec
from stackwise.support.arguments import check_choice, check_sizes, require
from stackwise.support.device import resolve_device

__all__ = ["DTYPES", "MODES", "check_shape", "model_workload"]

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
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
    """Return a workload of a model. Its inputs are random and the same in each call.

    Each call starts from the same state, except in training.

    - "forward": logits of all B x T positions, in eval mode without gradients.
    - "train": forward and backward pass and the update of `spec.optimizer`. Each call continues from the
      weights of the previous call. If weights are not finite afterwards, the notes report it. In the default
      optimizer of a spec, `eps` is raised to a value that the dtype can represent.
    - "prefill": a prompt of T tokens into an empty cache, and the logits of its last position. If the model
      cannot compute only these, it computes the logits of all T, and `execution` reports it.
    - "decode": one more token per row, at a context of T tokens. The cache is restored before each call,
      outside of the measured time. A model without a cache recomputes all T + 1 positions. If a model stores
      state that cannot be restored, `notes` report it.
    - "generate": a prompt of T tokens, then `new_tokens` greedy tokens, from an empty cache.

    Args:
        spec: model; anything that `ModelSpec.of` accepts.
        mode: one of the modes above.
        batch_size: B.
        seq_len: T.
        new_tokens: number of new tokens per row, for "generate".
        device: device to run on: "auto", "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16", "float16" or "float64", for weights and inputs. None: unchanged.
        compile: compile the model for these shapes; a string is the mode of torch.compile. The first call,
            which compiles, takes place in this function.
        loop: loop of "generate": "common", the same loop for all models, or "own", the loop of the model; see
            `token_stream`.
        seed: seed of weights and inputs.

    Raises:
        ValueError: invalid mode, dtype, loop or compile mode; sizes that are not positive integers or too
            large for the model; an invalid seed; a device that this machine does not have; a continuation
            with a model that has no next token, because it is not causal or takes vectors; training without a
            trainable weight.
        FactoryError, InferenceError, TypeError: as in `ModelSpec.of`.
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
    # If only the next token is needed, the head of all other positions is not part of the work.
    last = of_last(spec, model) if mode == "prefill" or (mode == "decode" and spec.decode is None) else None
    compiled = False if mode == "generate" else compile  # token_stream compiles a generation
    timed = _compiled_spec(last or spec, compiled)
    model.train(mode == "train")
    inputs = spec.batch(batch_size, seq_len + (mode == "decode"), device=device, seed=seed)
    told: dict[str, str] = {}
    tokens = {"decode": batch_size, "generate": batch_size * new_tokens}.get(mode, batch_size * seq_len)
    optimizer: torch.optim.Optimizer | None = None
    own: dict[str, Any] = {}  # fields of the workload that only this mode sets
    match mode:
        case "forward":
            call = _forward(timed, model, inputs)
        case "train":
            optimizer, told = _optimizer(spec, model)
            call = _train(timed, model, inputs, optimizer)
            own = {"recompute": recomputed_by(model), "notes": partial(weight_notes, model)}
        case "prefill":
            call = _prefill(timed, model, inputs)
            told["prefill"] = _how_prefilled(spec) + ("" if last else "; logits of all positions")
            own = {"logits": "last" if last else "all"}
        case "decode":
            call, own = _decode(spec, timed, model, inputs)
            told["decode"] = _how_decoded(spec, "prepare" in own)
        case _:
            stream = token_stream(spec, model, loop, compiled=bool(compile))
            call = partial(stream.run, inputs, new_tokens, _ignored)
            own = {"each_token": partial(stream.run, inputs, new_tokens), "new_tokens": new_tokens}
            told["generate"] = stream.told
    if compiled:
        told["compile"] = _compile_now(call)
    return Workload(
        f"{spec.name} {mode}",
        call,
        device,
        tokens,
        lambda: execution(model) | told,
        model=model,
        mode=mode,
        batch_size=batch_size,
        seq_len=seq_len,
        held_bytes=partial(held_bytes, model, optimizer),
        **own,
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
    """Raise ValueError for arguments that `model_workload` refuses for every model. No model is built.

    Raises:
        ValueError: the message names the argument, its value and the allowed values.
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
        # The input of the common loop grows by a token at each step, and each length would be compiled
        # separately.
        require(loop == "own", "loop", loop, "'own', where mode is 'generate' and compile is on")
        require(compile is True, "compile", compile, "True or False, where mode is 'generate'")


def _check_continues(spec: ModelSpec, mode: str, seq_len: int, n_new: int) -> None:
    """Raise ValueError if the model has no next token, or no room for the new tokens."""
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
    """Return the optimizer of the spec, and a description of its changed settings.

    In float16, the 1e-8 of AdamW is 0, and so is the mean of small squared gradients. Weights would be NaN
    after a step. `eps` is therefore raised to the size of a gradient that is just lost in that mean by its
    square. No step is then longer than that of a gradient that is not lost.
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
    """Return the smallest positive number of a dtype."""
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
) -> tuple[Callable[[], None], dict[str, Any]]:
    """Return a call of `timed`, and fields of the workload: how to restore the cache, and if this works.

    The cache contains all inputs except the last position.
    """
    decode, timed_decode = spec.decode, timed.decode
    if decode is None or timed_decode is None:
        return _forward(timed, model, inputs), {"counted": False}
    inputs = _cast(spec, model, inputs)
    # Copy before the measurement. Each call would otherwise copy them to make them contiguous.
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
    own = {"counted": alike, "notes": tuple if alike else partial(tuple, [_GOES_ON])}
    if not changed:
        kept.rewind_alone()
        return partial(step, kept.take()), own
    return (lambda: step(kept.take())), own | {"prepare": kept.rewind, "prepare_alone": kept.rewind_alone}


def _how_prefilled(spec: ModelSpec) -> str:
    return "into an empty cache" if spec.decode else f"a forward pass: {missing_cache(spec)}"


def _how_decoded(spec: ModelSpec, rewinds: bool) -> str:
    if spec.decode is None:
        return f"{ALL_AGAIN}: {missing_cache(spec)}"
    return "with a cache" + (", restored from a copy" if rewinds else "")


def _ignored(token_B: Tensor) -> None:
    """Ignore the tokens of a generation that is timed as one call."""


def _cast(spec: ModelSpec, model: nn.Module, inputs: Tensor) -> Tensor:
    """Return vectors in the dtype of the weights, and token ids unchanged."""
    if spec.inputs == "tokens":
        return inputs
    return inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))


def _compiled_spec(spec: ModelSpec, compile: bool | str) -> ModelSpec:  # noqa: A002
    """Return the spec with compiled calls if `compile` is set."""
    if not compile:
        return spec
    mode = None if compile is True else str(compile)

    def own(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return None if function is None else _compiled(function, mode)

    return replace(spec, forward=_compiled(spec.forward, mode), decode=own(spec.decode), loss=own(spec.loss))


def _compile_now(call: Callable[[], object]) -> str:
    """Make the call that compiles, and return the number of graphs.

    The compiler may be off without a message.
    """
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    call()
    count = counters["stats"]["unique_graphs"] - before
    return f"{count} graph{'' if count == 1 else 's'}" if count else "asked for, but no graph was captured"


def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    """Return `function` compiled for fixed shapes, independent of other compilations of it.

    The compiler stores a limited number of graphs per code object and runs further ones uncompiled, without a
    message. Each workload therefore has its own code object.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, mode=mode)
    return compiled
