"""ModelSpec: what is under test, and how to drive it from outside.

Shapes: B batch, T positions, V vocabulary, C width of a model that takes vectors.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stackwise.subject.call_form import ContiguousCall, unwrapped
from stackwise.subject.inference import cast, infer, logits_of
from stackwise.support.arguments import check_choice, check_number, check_sizes, require
from stackwise.support.random_state import seeded

__all__ = ["FactoryError", "ModelSpec"]

Factory = Callable[[], nn.Module]
MakeBatch = Callable[[int, int, torch.Generator], Tensor]
# Attributes that call the model. Each gets contiguous tensors.
_CALLS = ("forward", "masked", "packed", "decode", "loss", "labelled_loss", "auxiliary_loss")
_TRAINER_HINT = "; a training loop is checked with TrainerSpec.of, check_trainer or --stackwise-trainer"
# Packages whose exceptions mean that a download failed.
_NETWORK = {"httpcore", "httpx", "requests", "urllib", "urllib3"}


class FactoryError(ValueError):
    """A factory raised, which is the cause, or what it returned is no model that can be run."""


# Named, so that a spec can be sent to a process.
def _called(model: nn.Module, inputs: Tensor) -> Any:
    return model(inputs)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class ModelSpec:
    """A model under test: how to build it, what goes in, what it claims.

    Functions that call the model get contiguous tensors, as a data loader gives them (`ContiguousCall`).

    `ModelSpec.of(factory)` fills in what can be seen from outside; whatever it cannot see is
    declared by keyword: `ModelSpec.of(factory, causal=False)`.

    Attributes:
        build: makes a fresh model; called under a fixed seed.
        name: in test ids and reports.
        inputs: "tokens" (integer ids (B, T)) or "vectors" (float (B, T, C)).
        width: V for tokens, C for vectors.
        causal: whether no output may depend on a later input; None: nothing is claimed.
        trained: the weights are trained, so that checks of the initialisation do not apply.
        max_length: the longest sequence that the model takes; None: no limit known.
        forward: (model, inputs) -> output; a tensor, or something with `logits`.
        make_batch: (batch_size, seq_len, generator) -> inputs on the CPU; None: random ones.
        loss: (model, inputs) -> scalar; None: next-token cross-entropy for causal tokens,
            cross-entropy with the input itself for other tokens, mean square of the output for
            vectors and for models with fewer outputs than tokens.
        optimizer: list of parameters -> optimizer, for short training runs.
        masked: (model, inputs, keep (B, T) bool) -> output, of a batch with padding; None: it takes no mask.
        padding_sides: where padding may be: "right", "left", both or neither.
        packed: (model, inputs, documents (B, T) integer) -> output, of rows of several documents, whose
            positions restart; None: it packs none.
        decode: (model, inputs, cache or None) -> (output, cache), of tokens that follow those in a cache;
            one that takes a fourth argument, keep (B, S) of all tokens so far, can be asked about padding on
            the left; None: it keeps none.
        cache_problem: why no `decode` was found, though the model can generate or seems to have a cache; "":
            it was found or declared, or nothing suggests that there is one.
        labelled_loss: (model, inputs, labels (B, T), not shifted, -100 ignored) -> scalar, the model's own
            loss; None: it has none.
        auxiliary_loss: (model, inputs, keep or None) -> scalar, as of routers; None: it has none.
        window: how many positions each layer sees, its own included (where not causal, as many ahead); or
            a pair, how many before its own and how many after it; None: nothing is claimed.
        tied: whether the head is the embedding's own weight; None: nothing is claimed.
        positionless: whether the model claims to be equivariant to permutations of its positions.
        at_width: factor -> a model so many times as wide, for models that claim a width-independent (muP)
            parametrisation; None: nothing is claimed.
        reference: makes a model with the same parameter names that computes the same; None: there is none.
        never_waits: whether a forward and backward pass claims never to make the host wait for the device,
            as one captured in a CUDA graph has to; None: nothing is claimed.
        unused: names of parameters that need no gradient, as prefixes.
        frozen: names of parameters that are meant not to train, as prefixes.
        assumed: names of the attributes above that are neither declared nor seen, but the usual case.
        tolerance: largest difference, relative to how far the output varies, that counts as rounding
            where a model cannot be run in float64.
        seq_len: T of the checks.
        notes: what was inferred or assumed, in one line.
    """

    build: Factory
    name: str
    inputs: Literal["tokens", "vectors"]
    width: int
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
    cache_problem: str = ""
    labelled_loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None
    auxiliary_loss: Callable[[nn.Module, Tensor, Tensor | None], Tensor] | None = None
    window: int | tuple[int, int] | None = None
    tied: bool | None = None
    positionless: bool = False
    at_width: Callable[[int], nn.Module] | None = None
    reference: Factory | None = None
    never_waits: bool | None = None
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    tolerance: float = 1e-5
    seq_len: int = 16
    notes: str = ""

    @classmethod
    def of(cls, subject: Any, **declared: Any) -> ModelSpec:
        """Describe `subject` by building it and trying it.

        A factory is called twice: where the models share weights, as those of `lambda: model` do, each use
        gets a copy, so that nothing is done to the caller's.

        Args:
            subject: a function that returns a module (or a ModelSpec), a module (copied for each
                use), a transformers or litgpt configuration (random weights are made of it), or a
                ModelSpec (of which a copy with the declared attributes is made).
            **declared: attributes of ModelSpec that are not to be inferred.

        Raises:
            FactoryError: `subject` raised, or its weights cannot be run: on the meta device, lazy, or made
                under inference_mode.
            InferenceError: no way of calling the model was found; the message says what was tried.
            TypeError: `subject` is, or returns, something else, or needs arguments.
        """
        if (build := _builder(subject)) is not None:
            return cls.of(build, **{"name": type(subject).__name__, **declared})
        if isinstance(subject, nn.Module):
            name = type(subject).__name__
            _refuse_unready(subject, name)
            return cls._infer(lambda: copy.deepcopy(subject), copy.deepcopy(subject), name, declared)
        if callable(subject):
            made = _made(subject)
            if isinstance(made, nn.Module):
                name = getattr(subject, "__name__", "<lambda>")
                name = type(made).__name__ if name == "<lambda>" else name
                _refuse_unready(made, name)
                build, model = _apart(subject, made)
                spec = cls._infer(build, model, name, declared)
                notes = "; ".join(getattr(subject, "notes", ()))  # of a model by name
                if notes and "notes" not in declared:
                    spec = replace(spec, notes=f"{spec.notes}; {notes}")
                if build is subject or "notes" in declared:
                    return spec
                return replace(spec, notes=f"{spec.notes}; its models share tensors, so each is a copy")
            subject = made
        if not isinstance(subject, ModelSpec):
            raise TypeError(
                f"model: got {type(subject).__name__}; wanted a function that takes no arguments and returns "
                "an nn.Module or a ModelSpec, an nn.Module, a transformers or litgpt configuration, or a "
                "ModelSpec" + _TRAINER_HINT * hasattr(subject, "model")
            )
        if not declared:
            return subject
        assumed = tuple(name for name in subject.assumed if name not in declared)
        return replace(subject, **{"assumed": assumed, **declared})

    @classmethod
    def _infer(cls, build: Factory, model: nn.Module, name: str, declared: dict[str, Any]) -> ModelSpec:
        """What is declared wins; only the rest is inferred, from `model`, which is of no other use.

        Of a compiled model that is what was compiled: how it can be called shows there, and no trial is
        compiled.
        """
        with seeded(0):
            inferred = infer(unwrapped(model).eval(), {"name": name, **declared})
        attributes: dict[str, Any] = {"build": build, "name": name} | inferred | declared
        return cls(**attributes)

    def __post_init__(self) -> None:
        check_choice("inputs", self.inputs, ("tokens", "vectors"))
        check_sizes(width=self.width, seq_len=self.seq_len)
        if self.max_length is not None:
            check_sizes(max_length=self.max_length)
        check_number("tolerance", self.tolerance, "a finite number > 0", lambda limit: limit > 0)
        require(callable(self.build), "build", self.build, "a function that takes no arguments")
        for name in _CALLS:
            function = getattr(self, name)
            if function is not None:
                require(callable(function), name, function, "a function (model, inputs, ...)")
                object.__setattr__(self, name, ContiguousCall.of(function))

    @cached_property
    def n_parameters(self) -> int:
        """Number of parameters of the model, which is built once to count them. 0: it is no model."""
        with seeded(0):
            model = self.build()
        return sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0

    def create(self, device: torch.device | str = "cpu", seed: int = 0) -> nn.Module:
        """A fresh model on `device`, built under `seed`. The caller's random state is untouched."""
        with seeded(seed, device):
            model = self.build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{self.name}: build() returned {type(model).__name__}; wanted an nn.Module")
        return model.to(device)

    def batch(
        self, batch_size: int, seq_len: int, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> Tensor:
        """Inputs on `device`: (B, T) ids or (B, T, C) vectors, a function of `seed` alone.

        Raises:
            ValueError: `seq_len` is beyond what the model takes.
        """
        if self.max_length is not None and seq_len > self.max_length:
            raise ValueError(f"seq_len: got {seq_len}; {self.name} takes at most {self.max_length} positions")
        generator = torch.Generator().manual_seed(seed)
        if self.make_batch is not None:
            inputs = self.make_batch(batch_size, seq_len, generator)
        elif self.inputs == "tokens":
            inputs = torch.randint(self.width, (batch_size, seq_len), generator=generator)
        else:
            inputs = torch.randn(batch_size, seq_len, self.width, generator=generator)
        return inputs.to(device).contiguous()

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The model's output on `inputs`: (B, T, anything). Vectors are cast to the model's own dtype."""
        return logits_of(self.forward(model, cast(inputs, model)))

    def loss_of(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The scalar that a training step minimises."""
        if self.loss is not None:
            return self.loss(model, inputs)
        output = self.logits(model, inputs)
        if self.inputs == "vectors" or output.shape[-1] < self.width:
            return output.float().square().mean()
        labels = inputs
        if self.causal:
            output, labels = output[:, :-1], inputs[:, 1:]
        return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten().long())


def _made(factory: Callable[..., Any], *, again: bool = False) -> Any:
    """What a user's factory returns; whatever goes wrong in it is one clear error."""
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
            message += " (the second time that it was called; each question wants a fresh model)"
        if _is_of_the_network(error):
            message += " (it wants the network: build from a local configuration or local weights)"
        raise FactoryError(message) from error


def _apart(factory: Callable[..., Any], made: nn.Module) -> tuple[Factory, nn.Module]:
    """A factory of models that share nothing, and a model to try; `made` is what `factory` gave first."""
    kept = copy.deepcopy(made)  # before the second call, which may change what both hold
    second = _made(factory, again=True)
    if not isinstance(second, nn.Module):
        got = type(second).__name__
        raise TypeError(f"model: called again, the function returned {got}; wanted a model at each call")
    if not _places(made.parameters()).isdisjoint(_places(second.parameters())):
        return lambda: copy.deepcopy(kept), copy.deepcopy(kept)
    if not _places(made.buffers()).isdisjoint(_places(second.buffers())):  # tables that are made once
        return lambda: copy.deepcopy(factory()), kept
    return factory, kept


def _places(tensors: Iterable[Tensor]) -> set[int]:
    """Which tensors these are, and where in memory."""
    places = set[int]()
    for tensor in tensors:
        places.add(id(tensor))
        with suppress(RuntimeError):  # some kinds of tensors have no memory of their own
            places.add(tensor.untyped_storage().data_ptr())
    return places - {0}


def _refuse_unready(model: nn.Module, name: str) -> None:
    """Refuse a model whose weights have no values, or none that can be trained.

    Raises:
        FactoryError: naming the first of them.
    """
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            problem = "has no shape yet; wanted a model that was called once, so that lazy layers are made"
        elif tensor.is_meta:
            problem = "is on the meta device; wanted values: to_empty() and an initialisation, or a load"
        elif tensor.is_inference():
            problem = "was made under torch.inference_mode(), for good; wanted torch.no_grad(), or neither"
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
    """What makes a model of another library's configuration; None: it is none."""
    library = type(subject).__module__.partition(".")[0]
    if hasattr(subject, "model_type") and hasattr(subject, "to_diff_dict"):
        from transformers import AutoModelForCausalLM

        return lambda: AutoModelForCausalLM.from_config(copy.deepcopy(subject))  # type: ignore[no-untyped-call]
    if library == "litgpt" and type(subject).__name__ == "Config":
        from litgpt.model import GPT

        return lambda: GPT(copy.deepcopy(subject))
    return None
