"""Workloads: what is timed. One call is a forward pass, a training step, a prefill, a token or a text.

Shapes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stackwise.argument import check_choice, check_sizes, require
from stackwise.benchmark.cache_rewind import RewoundCache, is_changed_by
from stackwise.benchmark.flops.closed_form import Recompute
from stackwise.benchmark.flops.counted import count_flops
from stackwise.benchmark.flops.measured_peak import measured_peak
from stackwise.benchmark.flops.peak_rate import PeakRate, multiplies_in_tf32, published_peak
from stackwise.benchmark.flops.roofline import Roofline, decode_floor
from stackwise.benchmark.flops.shape_reader import weights_dtype
from stackwise.benchmark.flops.utilization import Utilization, utilization
from stackwise.benchmark.token_stream import (
    ALL_AGAIN,
    LOOPS,
    OnToken,
    TokenStream,
    empty_cache,
    of_last,
    token_stream,
)
from stackwise.call_form import unwrapped
from stackwise.device import resolve_device
from stackwise.inference import logits_of
from stackwise.spec import ModelSpec
from stackwise.trainer_spec import TrainerSpec

__all__ = [
    "COMPILE_MODES",
    "DTYPES",
    "MODES",
    "PEAKS",
    "Workload",
    "callable_workload",
    "check_shape",
    "check_workload",
    "model_workload",
    "ready_model",
    "trainer_workload",
]

MODES = ("forward", "train", "prefill", "decode", "generate")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
PEAKS = ("published", "measured")
_ALMOST_ALL = 0.99
_GOES_ON = (
    "the same step gives other logits when it is made again: the model keeps more than the cache that it "
    "hands on, so that the context grows from call to call, or is not deterministic"
)
_COUNTED = ("forward", "train", "prefill", "decode")
_CONTINUES = ("prefill", "decode", "generate")
_DEFAULT_OPTIMIZER = next(each.default for each in fields(ModelSpec) if each.name == "optimizer")


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Attributes:
        name: in reports.
        call: does the work once.
        device: where it runs.
        tokens: how many one call handles; 0 where that means nothing.
        execution: asked after a call, how the work was done: the kernels that were chosen, say.
        prepare: puts back what a call has changed. Called before each call and outside of its time; a call
            that was not prepared prepares itself. None: a call changes nothing that the next one sees, or,
            of "train", goes on where the last one was.
        model: what is called, for those who count its work; None: not known.
        mode: one of MODES; None: something else.
        batch_size: rows; 0: not known.
        seq_len: positions in each, of decode those that the cache holds; 0: not known.
        new_tokens: of generate, how many follow in each row; else 0.
        each_token: of generate, the call, which hands each column of tokens to its argument as soon as it is
            there; else None.
        counted: whether a call computes what closed forms tell of its mode. Not where all tokens are computed
            again for each new one, nor in a loop of others, which may accumulate, freeze or cast.
        recompute: of train, what the backward pass computes a second time: "none", or "blocks", every layer;
            None: not known.
        logits: of prefill, whether the head is computed for "all" positions or for the "last" one of each
            row; None: as is usual in its mode.
        prepare_alone: in place of `prepare`, before a call whose memory is looked at: nothing is held then to
            put back later. None: as `prepare`.
        held_bytes: what a call cannot do without: weights and buffers, and in training gradients and the
            optimizer's state. Asked after a call.
        notes: asked after the calls, what a reader must know of them.

    Raises:
        ValueError: a device that no clock waits for.
    """

    name: str
    call: Callable[[], object]
    device: torch.device
    tokens: int = 0
    execution: Callable[[], dict[str, str]] = dict
    prepare: Callable[[], object] | None = None
    model: nn.Module | None = None
    mode: str | None = None
    batch_size: int = 0
    seq_len: int = 0
    new_tokens: int = 0
    each_token: Callable[[OnToken], None] | None = None
    counted: bool = True
    recompute: Recompute | None = "none"
    logits: Literal["all", "last"] | None = None
    prepare_alone: Callable[[], object] | None = None
    held_bytes: Callable[[], int] = int
    notes: Callable[[], tuple[str, ...]] = tuple

    def __post_init__(self) -> None:
        allowed = "cpu, cuda, cuda:N, which are waited for"
        require(self.device.type in ("cpu", "cuda"), "device", str(self.device), allowed)

    def utilization(self, seconds: float, peak: str = "published") -> Utilization | None:
        """What part of its device's best rates a call of `seconds` uses; None of work of unknown size.

        The rate is that of the dtype in which most products are, as seen in one more call.

        Args:
            seconds: of a call.
            peak: "published" by the maker of the device, which nobody does for a CPU, or "measured" here,
                which takes seconds the first time.

        Raises:
            ValueError: another peak, or no positive seconds.
        """
        check_choice("peak", peak, PEAKS)
        if self.model is None or self.mode not in _COUNTED or not self.counted:
            return None
        products, known = self._peak(self.model, peak)
        used = utilization(
            self.model,
            mode=str(self.mode),
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            seconds=seconds,
            peak=known,
            dtype=products.dtype,
            tf32=multiplies_in_tf32(self.device),
            logits=self.logits,
            recompute=self.recompute or "none",
        )
        if products.notes:
            used = replace(used, notes=(*used.notes, *products.notes))
        if self.recompute is not None:
            return used
        return replace(used, hfu=None, notes=(*used.notes, "what the backward pass recomputes is not known"))

    def floor(self, peak: str = "published") -> Roofline | None:
        """The least time that decoding a token can take on the device; None of other work, or unknown sizes.

        Args:
            peak: as in `utilization`.

        Raises:
            ValueError: another peak.
        """
        check_choice("peak", peak, PEAKS)
        if self.model is None or self.mode != "decode" or not self.counted:
            return None
        products, known = self._peak(self.model, peak)
        return decode_floor(
            self.model,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            peak=known,
            dtype=products.dtype,
            tf32=multiplies_in_tf32(self.device),
        )

    def _peak(self, model: nn.Module, peak: str) -> tuple[_Products, PeakRate | None]:
        """What a call multiplies in, and what its device could do at best."""
        if peak == "measured":
            return self._products, measured_peak(self.device, self._products.dtype)
        known = published_peak(self.device)
        return self._products if known else _Products(weights_dtype(model)), known

    @cached_property
    def _products(self) -> _Products:
        """What a call multiplies in, seen in one more: weights do not tell what autocast makes of them."""
        assert self.model is not None
        by_dtype = count_flops(self.call).by_dtype
        if not by_dtype:  # sums of products, which are in the dtype of the weights
            return _Products(weights_dtype(self.model))
        dtype, flops = next(iter(by_dtype.items()))
        share = flops / sum(by_dtype.values())
        name = str(dtype).removeprefix("torch.")
        others = f"{1 - share:.0%} of the products are not in {name}, whose peak rate this is of"
        return _Products(dtype, (others,) if share < _ALMOST_ALL else ())


@dataclass(frozen=True)
class _Products:
    """The dtype of most products of a call, and what a reader must know of the others."""

    dtype: torch.dtype
    notes: tuple[str, ...] = ()


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
    model, _ = ready_model(spec, device=device, dtype=dtype, seed=seed)
    # Where one token follows, the head of all others is no part of the work.
    last = of_last(spec, model) if mode == "prefill" or (mode == "decode" and spec.decode is None) else None
    spec_ = _compiled_spec(last or spec, compile if mode != "generate" else False)
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
            call = _forward(spec_, model, inputs)
        case "train":
            optimizer, raised = _optimizer(spec, model)
            call = _train(spec_, model, inputs, optimizer)
            told |= raised
            notes = partial(_notes, model)
        case "prefill":
            call = _prefill(spec_, model, inputs)
            told["prefill"] = (
                "into an empty cache" if spec.decode else "a forward pass: the model keeps no cache"
            ) + ("" if last else "; logits of all positions")
        case "decode":
            call, rewound, alike = _decode(spec, spec_, model, inputs)
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
        told["compile"] = _compile_now(call)
    return Workload(
        f"{spec.name} {mode}",
        call,
        device,
        tokens,
        lambda: _execution(model) | told,
        prepare,
        model,
        mode,
        batch_size,
        seq_len,
        new_tokens if mode == "generate" else 0,
        each_token,
        counted,
        _recomputed_by(model) if mode == "train" else "none",
        ("last" if last else "all") if mode == "prefill" else None,
        prepare_alone,
        partial(_held_bytes, model, optimizer),
        notes,
    )


def trainer_workload(
    spec: TrainerSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """A training step of anybody's loop, on one batch and wherever the loop has put its model.

    Args:
        spec: the training step.
        batch_size: B; None: the spec's.
        seq_len: T; None: the spec's.
        seed: of weights and batch.

    Raises:
        ValueError: sizes that are no positive integers, a seed that is none, a loop on another device than a
            CPU or CUDA.
    """
    batch_size = spec.batch_size if batch_size is None else batch_size
    seq_len = spec.seq_len if seq_len is None else seq_len
    check_shape(batch_size=batch_size, seq_len=seq_len, seed=seed)
    run = spec.create(seed=seed)
    device = next((p.device for p in run.model.parameters()), torch.device("cpu"))
    batch = spec.batch(batch_size, seq_len, device=device, seed=seed)
    return Workload(
        f"{spec.name} step",
        lambda: run.step(batch),
        device,
        batch_size * seq_len,
        lambda: _execution(run.model),
        None,
        run.model,
        "train",
        batch_size,
        seq_len,
        counted=False,
        recompute=None,
        notes=lambda: _notes(run.model),
    )


def callable_workload(
    call: Callable[[], object],
    *,
    name: str | None = None,
    device: torch.device | str = "cpu",
    tokens: int = 0,
    prepare: Callable[[], object] | None = None,
) -> Workload:
    """Anything that can be called.

    Args:
        call: does the work once.
        name: in reports; None: its own.
        device: where it runs, which is waited for on both sides of a call: "auto", "cpu", "cuda" or "cuda:N".
        tokens: how many one call handles; 0: that means nothing here.
        prepare: called before each call, outside of its time.

    Raises:
        ValueError: what cannot be called, tokens below 0, or a device that this machine does not have.
    """
    require(callable(call), "call", call, "a function that takes no arguments")
    require(prepare is None or callable(prepare), "prepare", prepare, "a function without arguments, or None")
    check_sizes(minimum=0, tokens=tokens)
    own = getattr(call, "__name__", type(call).__name__)
    return Workload(name or own, call, resolve_device(str(device)), tokens, dict, prepare)


def check_workload(workload: Any, key: str = "workload") -> None:
    """Refuse what is no workload: a model, say, of which nobody has said what it is to do.

    Raises:
        TypeError: naming the argument, what it is and what is wanted.
    """
    if not isinstance(workload, Workload):
        got = f"the class {workload.__name__}" if isinstance(workload, type) else type(workload).__name__
        raise TypeError(
            f"{key}: got {got}; wanted a Workload, as of model_workload(model, mode, batch_size=, seq_len=), "
            "trainer_workload or callable_workload"
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


def ready_model(
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: str | None = None,
    compile: bool | str = False,  # noqa: A002
    seed: int = 0,
) -> tuple[nn.Module, ModelSpec]:
    """A model in eval mode, and the spec that drives it: compiled, if that was asked for."""
    model = spec.create(device, seed).eval()
    if dtype is not None:
        model = model.to(DTYPES[dtype])
    return model, _compiled_spec(spec, compile)


def _compiled_spec(spec: ModelSpec, compile: bool | str) -> ModelSpec:  # noqa: A002
    """The spec whose calls are compiled, if that was asked for."""
    if not compile:
        return spec
    mode = None if compile is True else str(compile)

    def own(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return None if function is None else _compiled(function, mode)

    return replace(spec, forward=_compiled(spec.forward, mode), decode=own(spec.decode), loss=own(spec.loss))


def _compiled(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
    """`function` compiled for fixed shapes, apart from whatever else was compiled of it.

    The compiler keeps few graphs for each code object and runs what is beyond them as it is, without a
    word; so each workload has a code object of its own.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, mode=mode)
    return compiled


def _compile_now(call: Callable[[], object]) -> str:
    """Make the call that compiles, and say what came of it: a compiler may be off without a word."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    call()
    count = counters["stats"]["unique_graphs"] - before
    return f"{count} graph{'' if count == 1 else 's'}" if count else "asked for, but no graph was captured"


def _forward(spec: ModelSpec, model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            spec.logits(model, inputs)

    return forward


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


def _train(
    spec: ModelSpec, model: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    def train() -> None:
        spec.loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return train


def _prefill(spec: ModelSpec, model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    decode = spec.decode
    if decode is None:
        return _forward(spec, model, inputs)
    inputs = _cast(spec, model, inputs)

    def prefill() -> None:
        with torch.no_grad():
            decode(model, inputs, empty_cache(model, *inputs.shape[:2]))

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
    context, last = inputs[:, :-1], inputs[:, -1:]

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
        return ALL_AGAIN
    return "with a cache" + (", put back from a copy" if rewinds else "")


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


def _held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Of weights and buffers; with an optimizer also of gradients and of what it keeps.

    No more than there are: what a subclass of tensors has in memory, as a quantised weight, need not be what
    its shape and dtype say, and does not count.
    """
    weights = list(model.parameters())
    held: list[Any] = [*weights, *model.buffers()]
    if optimizer is not None:
        held += [p for p in weights if p.requires_grad]  # of the size of its gradient
        held += [value for state in optimizer.state.values() for value in state.values()]
    return sum(each.nbytes for each in held if type(each) in (Tensor, nn.Parameter))


def _notes(model: nn.Module) -> tuple[str, ...]:
    """Whether a model that was trained still has weights to train."""
    broken = list(_not_finite(model))
    if not broken:
        return ()
    more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
    return (f"weights are not finite: {broken[0]}{more}; what was timed is no training",)


def _not_finite(model: nn.Module) -> Iterator[str]:
    """Names of floating-point parameters with an infinity or a NaN."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not bool(torch.isfinite(parameter.detach()).all()):
            yield name


def _recomputed_by(model: nn.Module) -> Recompute | None:
    """What the backward pass of a model computes again: nothing, every layer, or what nobody tells.

    Models of transformers have a switch on each layer. Whoever replaces the `forward` of a module, as
    recomputation from outside does, may compute anything.
    """
    modules = list(unwrapped(model).modules())
    layers = [module for module in modules if hasattr(type(module), "gradient_checkpointing")]
    switched = [bool(module.gradient_checkpointing) for module in layers]
    if any(switched):
        return "blocks" if all(switched) else None
    return None if any("forward" in vars(module) for module in modules) else "none"


def _execution(model: nn.Module) -> dict[str, str]:
    """What a model says of its last call: its own `execution()`, or the attention of a transformers model."""
    model = unwrapped(model)
    tell = getattr(model, "execution", None)
    if callable(tell):
        return dict(tell())
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return {} if attention is None else {"attention": str(attention)}
