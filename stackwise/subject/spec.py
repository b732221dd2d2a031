"""ModelSpec: description of a model under test.

Shapes: B batch, T positions, V vocabulary, C width of a model that takes vectors.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stackwise.subject.call_form import ContiguousCall, unwrapped
from stackwise.subject.encoder_decoder import Decoder, is_encoder_decoder
from stackwise.subject.facts import Facts
from stackwise.subject.generation import GenerateCall
from stackwise.subject.hf_model import HFModel, hf_factory
from stackwise.subject.inference import infer
from stackwise.subject.inference.inputs import made_batch
from stackwise.subject.output import cast, logits_of
from stackwise.subject.rotary import RotaryClaim
from stackwise.support.arguments import (
    check_choice,
    check_fields,
    check_flags,
    check_functions,
    check_number,
    check_sizes,
    check_texts,
    require,
)
from stackwise.support.global_settings import kept_settings
from stackwise.support.random_state import seeded

__all__ = ["FactoryError", "ModelSpec", "ToReference"]

Factory = Callable[[], nn.Module]
State = dict[str, Tensor]
ToReference = Mapping[str, str | Callable[[State], Tensor]] | Callable[[State], Mapping[str, Tensor]]
MakeBatch = Callable[[int, int, torch.Generator], Tensor]
# Attributes that call the model. Each gets contiguous tensors.
_CALLS = ("forward", "masked", "packed", "decode", "loss", "labelled_loss", "auxiliary_loss")
_NAMES = ("unused", "frozen", "assumed")
_TRAINER_HINT = "; a training loop is checked with TrainerSpec.of, check_trainer or --stackwise-trainer"
_CONVERSION = "a function, None, or a dict {name in the reference: name in the model, or a function}"
_REFERENCE = "a function that builds a model, a ModelSpec or None"
# Packages whose exceptions mean that a download failed.
_NETWORK = {"httpcore", "httpx", "requests", "urllib", "urllib3"}


class FactoryError(ValueError):
    """A factory raised an exception, which is the cause, or returned a model that cannot run."""


# Named functions, because a lambda cannot be pickled.
def _called(model: nn.Module, inputs: Tensor) -> Any:
    return model(inputs)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class ModelSpec:
    """Description of a model under test: construction, calls and claims.

    A claim is a property that you declare, such as `causal=True`. Checks test it.
    `ModelSpec.of(factory)` infers the attributes from the model. Declare the others by keyword:
    `ModelSpec.of(factory, causal=False)`. Functions that call the model get contiguous tensors, as from a
    data loader.

    Attributes:
        build: builds a new model. It is called with a fixed seed.
        name: name in test ids and reports.
        inputs: "tokens" (integer ids (B, T)) or "vectors" (float (B, T, C)).
        width: vocabulary size of tokens, or C of vectors.
        per_position: True if the output has one entry per position, (B, T, ...). False: one per row (B, ...),
            such as the classes of an image. Checks of positions then do not apply.
        causal: True if no output may depend on a later input. None: no claim.
        trained: True if the weights are trained, so that checks of the initialisation do not apply.
        max_length: longest sequence of the model. None: no known limit.
        forward: (model, inputs) -> output, which is a tensor or has `logits`.
        make_batch: (batch_size, seq_len, generator) -> inputs on the CPU. None: random inputs.
        loss: (model, inputs) -> scalar. None:

            - causal tokens: cross-entropy of the next token;
            - other tokens: cross-entropy of the token itself;
            - vectors, an output per row, or fewer outputs than tokens: mean square of the output minus
              sin(0), sin(1), ..., a target for each channel.
        optimizer: list of parameters -> optimizer, for short training runs.
        masked: (model, inputs, keep (B, T) bool) -> output of a batch with padding. None: no padding mask.
        padding_sides: sides on which padding is allowed: "right", "left", both or none.
        packed: (model, inputs, documents (B, T) integer) -> output of rows of several documents, whose
            positions restart. None: no packing.
        decode: (model, inputs, cache or None) -> (output, cache): call with new tokens and the cache of the
            earlier ones. A fourth argument keep (B, S), for all tokens so far, enables checks of padded
            prompts. None: no cache.
        generate: (model, prompts, **options) -> new tokens of each row, as a list of ids (N,) or ids (B, N).
            `prompts` is a list of ids (T,). The parameters of the function are its options: `max_new_tokens`,
            and any of `temperature`, `top_k`, `top_p`, `stop`, `seed` and `num_samples`. None: no generation.
        cache_problem: reason why no `decode` was found, although the model can generate or seems to have a
            cache. "": no problem.
        labelled_loss: (model, inputs, labels) -> scalar, the model's own loss. `labels` (B, T) are not
            shifted, and -100 is ignored. None: no own loss.
        auxiliary_loss: (model, inputs, keep or None) -> scalar, such as the loss of routers. None: none.
        visible: inputs -> bool (T, T) or (B, T, T), True if position t may see position s, in models that are
            neither causal nor bidirectional, such as prefix models. None: no claim.
        window: W: each layer reads its own position and the W - 1 before it; if not causal, also the W - 1
            after it. Or a pair (before, after). "full": each layer reads all positions that causality allows;
            `ModelSpec.of(model, window=None)` declares the same. None: no claim.
        tied: True if the head is the weight of the embedding. None: no claim.
        rotary: the RotaryClaim of each layer, or a tuple if layers differ. None in a tuple: some layers have
            no rotary embedding. (): no claim.
        facts: constants that the author or the configuration states, such as the attention scale. See Facts.
        positionless: True if the model is equivariant to permutations of its positions.
        at_width: factor -> a model of that many times the width, for a width-independent (muP)
            parametrisation. None: no claim.
        reference: builds a trusted model with the same results, or is the ModelSpec of one. If its parameter
            names differ, it is called in its own way, which is inferred. None: no reference.
        to_reference: conversion of weights: {name in the reference: name in the model, or a function of the
            model's state dict}, or a function from the model's state dict to that of the reference. None: the
            names are equal, or differ by a common prefix.
        never_waits: True if no forward or backward pass makes the host wait for the device, as in a CUDA
            graph. None: no claim.
        unused: prefixes of the names of parameters that get no gradient.
        frozen: prefixes of the names of parameters with requires_grad=False.
        assumed: names of the attributes that stackwise guessed.
        tolerance: largest rounding difference, relative to the variation of the output, for models that
            cannot run in float64.
        seq_len: T of the checks.
        notes: inferred and assumed facts, in one line.
    """

    build: Factory
    name: str
    inputs: Literal["tokens", "vectors"]
    width: int
    per_position: bool = True
    causal: bool | None = None
    trained: bool = False
    max_length: int | None = None
    forward: Callable[[nn.Module, Tensor], Any] = _called
    make_batch: MakeBatch | None = None
    loss: Callable[[nn.Module, Tensor], Tensor] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = _adamw
    masked: Callable[[nn.Module, Tensor, Tensor], Any] | None = None
    padding_sides: tuple[Literal["right", "left"], ...] = ("right",)
    packed: Callable[[nn.Module, Tensor, Tensor], Any] | None = None
    decode: Callable[[nn.Module, Tensor, Any], tuple[Any, Any]] | None = None
    generate: Callable[..., Any] | None = None
    cache_problem: str = ""
    labelled_loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    auxiliary_loss: Callable[[nn.Module, Tensor, Tensor | None], Tensor] | None = None
    visible: Callable[[Tensor], Tensor] | None = None
    window: int | tuple[int, int] | Literal["full"] | None = None
    tied: bool | None = None
    rotary: tuple[RotaryClaim | None, ...] = ()
    facts: Facts = field(default_factory=Facts)
    positionless: bool = False
    at_width: Callable[[int], nn.Module] | None = None
    reference: Factory | ModelSpec | None = None
    to_reference: ToReference | None = None
    never_waits: bool | None = None
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    tolerance: float = 1e-5
    seq_len: int = 16
    notes: str = ""

    @classmethod
    def of(cls, subject: Any, **declared: Any) -> ModelSpec:
        """Return the spec of a model, inferred by building and calling it.

        A factory is called twice. If both models share weights, as with `lambda: model`, each use gets a copy
        of the first one, so that the caller's model is not changed.

        Args:
            subject: a module (copied for each use), a transformers or litgpt configuration (with random
                weights), a ModelSpec (copied with the declared attributes), or a function that returns one of
                these.
            **declared: attributes of ModelSpec that replace the inferred ones.

        Raises:
            FactoryError: `subject` raised, or its weights cannot be used: on the meta device, lazy, or
                created in inference_mode.
            InferenceError: no call of the model gave an output. The message lists the calls.
            TypeError: `subject` is or returns something else, or needs arguments, or a declared attribute is
                unknown.
            ValueError: a declared attribute has an invalid value.
        """
        check_fields(cls.__name__, declared, (field.name for field in fields(cls)))
        _check_values(declared)
        if declared.get("window", 0) is None:
            declared["window"] = "full"
        if declared.get("visible") is not None:
            declared = {"causal": None, **declared}  # causality is not assumed then
        is_factory = callable(subject) and not isinstance(subject, nn.Module)
        made = _made(subject) if is_factory else subject
        name = getattr(subject, "__name__", "<lambda>") if is_factory else "<lambda>"
        name = type(made).__name__ if name == "<lambda>" else name
        if (build := _builder(made)) is not None:
            return cls.of(build, **{"name": name, **declared})
        if isinstance(made, nn.Module):
            _refuse_unready(made, name)
            return cls._inferred(subject, made, {"name": name, **declared})
        if not isinstance(made, ModelSpec):
            raise TypeError(
                f"model: got {type(made).__name__}; wanted an nn.Module, a ModelSpec, a configuration of "
                "transformers or litgpt, or a function without arguments that returns one of these"
                + "; for 'file.py:NAME', use `stackwise check`" * isinstance(made, str)
                + _TRAINER_HINT * hasattr(made, "model")
            )
        if not declared:
            return made
        if "facts" in declared:
            declared = {**declared, "facts": declared["facts"].filled_from(made.facts)}
        assumed = tuple(name for name in made.assumed if name not in declared)
        return replace(made, **{"assumed": assumed, **declared})

    @classmethod
    def _inferred(cls, subject: Any, made: nn.Module, declared: dict[str, Any]) -> ModelSpec:
        """Return the spec of a module, which is `subject` or was built by it."""
        is_factory = subject is not made
        build, model = _apart(subject, made) if is_factory else _copies(made)
        notes = [*subject.notes] if isinstance(subject, HFModel) else []
        if is_encoder_decoder(made) and declared.keys().isdisjoint(_CALLS[:4]):
            build, model = partial(_decoder, build), Decoder(model)
            declared = _of_decoder(declared)
            notes.append("called as a decoder, while the encoder reads a fixed text")
        elif is_factory and build is not subject:
            notes.append("its models share tensors, so each is a copy")
        with seeded(0), kept_settings():  # a compiled model is unwrapped, so that no trial is compiled
            inferred = infer(unwrapped(model).eval(), declared)
        inferred["notes"] = "; ".join([inferred["notes"], *notes])
        if "facts" in declared:
            declared = {**declared, "facts": declared["facts"].filled_from(inferred["facts"])}
        return cls(**({"build": build} | inferred | declared))

    def __post_init__(self) -> None:
        _check_values(vars(self))
        for name in _CALLS:
            function = getattr(self, name)
            if function is not None and not isinstance(function, ContiguousCall):
                object.__setattr__(self, name, ContiguousCall(function))
        if self.generate is not None and not isinstance(self.generate, GenerateCall):
            object.__setattr__(self, "generate", GenerateCall(self.generate))
        for name in ("padding_sides", *_NAMES):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.rotary, RotaryClaim):
            object.__setattr__(self, "rotary", (self.rotary,))

    @cached_property
    def n_parameters(self) -> int:
        """Number of parameters. The first access builds a model. 0 if `build` returns no module."""
        with seeded(0):
            model = self.build()
        return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0

    def create(self, device: torch.device | str = "cpu", seed: int = 0) -> nn.Module:
        """Return a new model on `device`, built with `seed`. The caller's random state does not change."""
        with seeded(seed, device):
            model = self.build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{self.name}: build() returned {type(model).__name__}; wanted an nn.Module")
        return model.to(device)

    def batch(
        self, batch_size: int, seq_len: int, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> Tensor:
        """Return inputs on `device`, ids (B, T) or vectors (B, T, C), which depend only on `seed`.

        Raises:
            ValueError: `seq_len` is beyond what the model takes.
        """
        if self.max_length is not None and seq_len > self.max_length:
            raise ValueError(f"seq_len: got {seq_len}; {self.name} takes at most {self.max_length} positions")
        generator = torch.Generator().manual_seed(seed)
        if self.make_batch is not None:
            inputs = made_batch(self.make_batch, batch_size, seq_len, generator)
        elif self.inputs == "tokens":
            inputs = torch.randint(self.width, (batch_size, seq_len), generator=generator)
        else:
            inputs = torch.randn(batch_size, seq_len, self.width, generator=generator)
        return inputs.to(device).contiguous()

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the logits (B, T, ...), or (B, ...) per row. Vectors are cast to the dtype of the model."""
        return logits_of(self.forward(model, cast(inputs, model)))

    def loss_of(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the scalar that a training step minimises."""
        if self.loss is not None:
            return self.loss(model, inputs)
        output = self.logits(model, inputs)
        if self.inputs == "vectors" or not self.per_position or output.shape[-1] < self.width:
            # At a target of 0, a model whose last layer starts at 0 would get no gradient at all.
            target = torch.arange(output.shape[-1], device=output.device).sin()
            return (output.float() - target).square().mean()
        labels = inputs
        if self.causal:
            output, labels = output[:, :-1], inputs[:, 1:]
        return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten().long())


def _is_rotary(value: Any) -> bool:
    claims = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, RotaryClaim) or (each is None and len(claims) > 1) for each in claims)


# Names of attributes, the condition for a value, and the allowed values.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("build", "forward", "optimizer"), callable, "a function"),
    (("reference",), lambda x: x is None or callable(x) or isinstance(x, ModelSpec), _REFERENCE),
    (("to_reference",), lambda x: x is None or callable(x) or isinstance(x, Mapping), _CONVERSION),
    (("name", "notes", "cache_problem"), lambda x: isinstance(x, str), "a string"),
    (("rotary",), _is_rotary, "a RotaryClaim, or a tuple"),
    (("facts",), lambda x: isinstance(x, Facts), "Facts"),
)


def _check_values(given: Mapping[str, Any]) -> None:
    """Require valid values of the attributes of a ModelSpec that are given."""

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    for names, is_valid, allowed in _RULES:
        for name, value in some(*names).items():
            require(is_valid(value), name, value, allowed)
    if isinstance(given.get("reference"), nn.Module):
        require(False, "reference", type(given["reference"]).__name__, _REFERENCE)
    check_functions(**some(*_CALLS, "generate", "make_batch", "visible", "at_width"))
    for name, value in some("inputs").items():
        check_choice(name, value, ("tokens", "vectors"))
    check_sizes(**some("width", "seq_len"))
    check_sizes(**{name: size for name, size in some("max_length").items() if size is not None})
    check_flags(**some("per_position", "trained", "positionless"))
    check_flags(optional=True, **some("causal", "tied", "never_waits"))
    check_texts(("right", "left"), **some("padding_sides"))
    check_texts(**some(*_NAMES))
    for name, value in some("tolerance").items():
        check_number(name, value, "a finite number > 0", lambda limit: limit > 0)
    window = given.get("window")
    reach = window if isinstance(window, tuple | list) and len(window) == 2 else (window,)
    least = 0 if len(reach) == 2 else 1
    has_sizes = all(type(size) is int and size >= least for size in reach)
    allowed = "an integer >= 1, a pair (before, after) of integers >= 0, 'full' or None"
    require(window in (None, "full") or has_sizes, "window", window, allowed)


def _made(factory: Callable[..., Any], *, again: bool = False) -> Any:
    """Return the result of a user's factory. Every exception in it becomes a FactoryError."""
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # none to see
        signature = inspect.Signature()
    try:
        signature.bind()
    except TypeError as error:
        raise TypeError(f"model: {name}: {error}; wanted a function that takes no arguments") from None
    try:
        with seeded(0):
            return factory()
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit and pytest's Skipped are no Exceptions
        message = f"model: {name} raised {type(error).__name__}: {' '.join(str(error).split())}"
        if again:
            message += " (on its second call; each check builds a new model)"
        if _is_of_the_network(error):
            message += " (it tried to download something: build from a local configuration or local weights)"
        raise FactoryError(message) from error


def _apart(factory: Callable[..., Any], made: nn.Module) -> tuple[Factory, nn.Module]:
    """Return a factory of models without shared tensors, and a model for trials."""
    kept = copy.deepcopy(made)  # copied first: the second call may change shared tensors
    second = _made(factory, again=True)
    if not isinstance(second, nn.Module):
        got = type(second).__name__
        raise TypeError(f"model: called again, the function returned {got}; wanted a model at each call")
    if not _places(made.parameters()).isdisjoint(_places(second.parameters())):
        return _copies(kept)
    if not _places(made.buffers()).isdisjoint(_places(second.buffers())):  # tables shared by all models
        return lambda: copy.deepcopy(factory()), kept
    return factory, kept


def _decoder(build: Callable[..., nn.Module], *factor: float) -> nn.Module:
    return Decoder(build(*factor))


def _of_decoder(declared: dict[str, Any]) -> dict[str, Any]:
    """Return declared fields of an encoder-decoder as those of its decoder."""
    changed: dict[str, Any] = {}
    for name in ("reference", "at_width"):
        if callable(declared.get(name)):
            changed[name] = partial(_decoder, declared[name])
    for name in _CALLS[4:]:  # losses; a declared call means that the model is not called as a decoder
        if declared.get(name) is not None:
            changed[name] = partial(_of_inner_model, declared[name])
    for name in ("unused", "frozen"):
        changed[name] = tuple(f"model.{each}" for each in declared.get(name, ()))
    return {**declared, **changed}


def _of_inner_model(function: Callable[..., Any], decoder: Decoder, *args: Any) -> Any:
    """Call a declared function with the encoder-decoder itself."""
    return function(decoder.model, *args)


def _copies(model: nn.Module) -> tuple[Factory, nn.Module]:
    """Return a factory of copies of a model, and a copy for trials."""
    return lambda: copy.deepcopy(model), copy.deepcopy(model)


def _places(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids and memory addresses of the tensors of a model."""
    places = set[int]()
    for tensor in tensors:
        places.add(id(tensor))
        with suppress(RuntimeError):  # some kinds of tensors have no memory of their own
            places.add(tensor.untyped_storage().data_ptr())
    return places - {0}


def _refuse_unready(model: nn.Module, name: str) -> None:
    """Raise if weights have no values, or cannot be trained.

    Raises:
        FactoryError: naming the first of them.
    """
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            problem = "has no shape yet; wanted a model that was called once, so that lazy layers are made"
        elif tensor.is_meta:
            problem = "is on the meta device; wanted values: to_empty() and an initialisation, or a load"
        elif tensor.is_inference():
            problem = (
                "was created in inference_mode and cannot be trained; wanted torch.no_grad(), or neither"
            )
        else:
            continue
        raise FactoryError(f"model: {name}: {key} {problem}")


def _is_of_the_network(error: BaseException | None) -> bool:
    while error is not None:
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, ConnectionError) or library in _NETWORK:
            return True
        if library == "huggingface_hub" and isinstance(error, OSError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _builder(subject: Any) -> Factory | None:
    """Return the factory for a configuration of another library, or None."""
    library = type(subject).__module__.partition(".")[0]
    if hasattr(subject, "model_type") and hasattr(subject, "to_diff_dict"):
        return hf_factory(subject)
    if library == "litgpt" and type(subject).__name__ == "Config":
        from litgpt.model import GPT

        return lambda: GPT(copy.deepcopy(subject))
    return None
