"""ModelSpec: what is under test, and how to drive it from outside.

Shapes: B batch, T positions, V vocabulary, C width of a model that takes vectors.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.argument import check_choice, check_number, check_sizes, require
from stackwise.seed import seeded

__all__ = ["InferenceError", "ModelSpec", "logits_of"]

Factory = Callable[[], nn.Module]
MakeBatch = Callable[[int, int, torch.Generator], Tensor]

_TRIAL_LENGTHS = (16, 8, 4)


class InferenceError(ValueError):
    """A model's way of being called could not be inferred and has to be declared."""


@dataclass(frozen=True)
class ModelSpec:
    """A model under test: how to build it, what goes in, what it claims.

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
        optimizer: parameters -> optimizer, for short training runs.
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
    forward: Callable[[nn.Module, Tensor], Any] = lambda model, inputs: model(inputs)
    make_batch: MakeBatch | None = None
    loss: Callable[[nn.Module, Tensor], Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: (
        torch.optim.AdamW(parameters, lr=1e-3)
    )
    tolerance: float = 1e-5
    seq_len: int = 16
    notes: str = ""

    @classmethod
    def of(cls, subject: Any, **declared: Any) -> ModelSpec:
        """Describe `subject` by building it once and trying it.

        Args:
            subject: a function that returns a module (or a ModelSpec), a module (copied for each
                use), or a ModelSpec.
            **declared: attributes of ModelSpec that are not to be inferred.

        Raises:
            InferenceError: no way of calling the model was found; the message says what was tried.
            TypeError: `subject` is, or returns, something else.
        """
        if isinstance(subject, nn.Module):
            return cls._infer(lambda: copy.deepcopy(subject), subject, type(subject).__name__, declared)
        if callable(subject):
            with seeded(0):
                made = subject()
            if isinstance(made, nn.Module):
                name = getattr(subject, "__name__", "<lambda>")
                name = type(made).__name__ if name == "<lambda>" else name
                return cls._infer(subject, made, name, declared)
            subject = made
        if not isinstance(subject, ModelSpec):
            raise TypeError(
                f"model: got {type(subject).__name__}; wanted a function that takes no arguments and returns "
                "an nn.Module or a ModelSpec, an nn.Module, or a ModelSpec"
            )
        return replace(subject, **declared) if declared else subject

    @classmethod
    def _infer(cls, build: Factory, model: nn.Module, name: str, declared: dict[str, Any]) -> ModelSpec:
        """What is declared wins; only the rest is inferred, from a copy of `model`."""
        model = copy.deepcopy(model).eval()
        inferred: dict[str, Any] = {"build": build, "name": name, "max_length": _length_limit(model)}
        notes = []
        if "forward" not in declared and _is_sequence_first(model):
            inferred["forward"] = _transposed_call
            notes.append("batch_first=False: called with positions first")
        with seeded(0):
            inferred |= _try_calls(model, inferred | declared)
        known = inferred | declared
        notes.append(f"takes {known['inputs']} of width {known['width']}")
        if "causal" not in declared:
            inferred["causal"], reason = _claimed_causality(model, known["inputs"])
            notes.append(reason)
        if known["max_length"] is not None:
            notes.append(f"at most {known['max_length']} positions")
        return cls(**{"notes": "; ".join(notes)} | inferred | declared)

    def __post_init__(self) -> None:
        check_choice("inputs", self.inputs, ("tokens", "vectors"))
        check_sizes(width=self.width, seq_len=self.seq_len)
        if self.max_length is not None:
            check_sizes(max_length=self.max_length)
        check_number("tolerance", self.tolerance, "a finite number > 0", lambda limit: limit > 0)
        require(callable(self.build), "build", self.build, "a function that takes no arguments")

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
        return inputs.to(device)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """The model's output on `inputs`: (B, T, anything). Vectors are cast to the model's own dtype."""
        return logits_of(self.forward(model, _cast(inputs, model)))

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

    def with_(self, **changes: Any) -> Self:
        """A copy with some attributes changed."""
        return replace(self, **changes)


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: itself, `.logits`, `["logits"]`, or the first of a tuple.

    Raises:
        TypeError: none of these is a tensor.
    """
    found = output
    if not isinstance(found, Tensor):
        if hasattr(output, "logits"):
            found = output.logits
        elif isinstance(output, Mapping):
            found = output.get("logits")
        elif isinstance(output, tuple | list) and output:
            found = output[0]
    if not isinstance(found, Tensor):
        raise TypeError(
            f"output: got {type(output).__name__}; wanted a tensor, or logits in an object or dict"
        )
    return found


@torch.no_grad()
def _try_calls(model: nn.Module, known: dict[str, Any]) -> dict[str, Any]:
    """Find how the model can be called: kind of input, width, and a length that works."""
    forward = known.get("forward", ModelSpec.forward)
    tried: list[str] = []

    def attempt(inputs: Tensor) -> Tensor | None:
        device = next((p.device for p in model.parameters()), inputs.device)
        try:
            output = logits_of(forward(model, _cast(inputs.to(device), model)))
        except Exception as error:  # any failure is an answer: this is not how it is called
            tried.append(f"{_describe(inputs)}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
            return None
        if output.ndim == 3 and output.shape[:2] == inputs.shape[:2] and output.is_floating_point():
            return output
        tried.append(f"{_describe(inputs)}: output of shape {tuple(output.shape)}")
        return None

    kinds = (known["inputs"],) if "inputs" in known else ("tokens", "vectors")
    limit = known["max_length"] or max(_TRIAL_LENGTHS)
    lengths = (known["seq_len"],) if "seq_len" in known else tuple(t for t in _TRIAL_LENGTHS if t <= limit)
    for seq_len in lengths or (limit,):
        if "tokens" in kinds:
            accepted = []
            for vocab_size in (known["width"],) if "width" in known else _vocabulary_candidates(model):
                output = attempt(torch.randint(vocab_size, (2, seq_len)))
                if output is not None and output.shape[-1] == vocab_size:
                    return {"inputs": "tokens", "width": vocab_size, "seq_len": seq_len}
                if output is not None:
                    accepted.append(vocab_size)
            if accepted:
                return {"inputs": "tokens", "width": min(accepted), "seq_len": seq_len}
        if "vectors" in kinds:
            for width in (known["width"],) if "width" in known else _width_candidates(model):
                if attempt(torch.randn(2, seq_len, width)) is not None:
                    return {"inputs": "vectors", "width": width, "seq_len": seq_len}
    raise InferenceError(
        f"{known['name']}: no call was found that gives (batch, positions, width). Declare inputs=, width= "
        "and forward= in ModelSpec.of(factory, ...). Tried:\n  "
        + "\n  ".join(dict.fromkeys(tried) or ["nothing: no layers seen"])
    )


def _cast(inputs: Tensor, model: nn.Module) -> Tensor:
    if not inputs.is_floating_point():
        return inputs
    return inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))


def _is_sequence_first(model: nn.Module) -> bool:
    """Whether this is one of torch's own layers in torch's own default order, (positions, batch, width)."""
    match model:
        case nn.RNNBase() | nn.MultiheadAttention():
            return not model.batch_first
        case nn.TransformerEncoder():
            return _is_sequence_first(model.layers[0])
        case nn.TransformerEncoderLayer():
            return not model.self_attn.batch_first
    return False


def _transposed_call(model: nn.Module, inputs: Tensor) -> Tensor:
    return logits_of(model(inputs.transpose(0, 1))).transpose(0, 1)


def _describe(inputs: Tensor) -> str:
    kind = "vectors" if inputs.is_floating_point() else "ids"
    return f"{kind} {tuple(inputs.shape)}"


def _vocabulary_candidates(model: nn.Module) -> list[int]:
    config = getattr(model, "config", None)
    named = [getattr(config, "vocab_size", None)] + [
        getattr(model, n, None) for n in ("vocab_size", "num_tokens")
    ]
    seen = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    # From the smallest, so that ids are tried beyond an embedding only where no other way is left: on
    # CUDA an index out of range ruins the process.
    return sorted({v for v in (*named, *seen) if isinstance(v, int) and v > 0})


def _width_candidates(model: nn.Module) -> list[int]:
    widths: list[Any] = [getattr(model, name, None) for name in ("d_model", "dim", "hidden_size")]
    for module in model.modules():
        match module:
            case nn.LayerNorm() | nn.RMSNorm():
                widths.append(module.normalized_shape[-1])
            case nn.Linear():
                widths.append(module.in_features)
            case nn.MultiheadAttention():
                widths.append(module.embed_dim)
    return list(dict.fromkeys(w for w in widths if isinstance(w, int) and w > 0))


def _claimed_causality(model: nn.Module, inputs: str) -> tuple[bool | None, str]:
    """What the model says of itself; a next-token model by its shape is assumed to be causal."""
    layers = getattr(model, "attn_layers", None)
    for owner in (model, layers):
        for name in ("is_causal", "causal"):
            claim = getattr(owner, name, None)
            if isinstance(claim, bool):
                return claim, f"says {name}={claim}"
    can_generate = getattr(model, "can_generate", None)
    if inspect.ismethod(can_generate) and isinstance(answer := can_generate(), bool):
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return None, "no claim about causality: its encoder sees everything"
        flags = [m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)]
        if answer and flags and not any(flags) and "CausalLM" not in type(model).__name__:
            return False, "not causal: none of its attention says so"
        return answer, "causal, since it can generate" if answer else "not causal: it cannot generate"
    if inputs == "tokens":
        return True, "assumed causal (say causal=False if not)"
    return None, "no claim about causality (say causal=True to check it)"


def _length_limit(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for owner, name in ((config, "max_position_embeddings"), (model, "max_seq_len"), (model, "max_length")):
        limit = getattr(owner, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None
