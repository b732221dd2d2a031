"""Rotary: the frequencies of a rotary position embedding, as a model or its configuration claims them.

Sources: RoFormer (arXiv:2104.09864), position interpolation (arXiv:2306.15595), YaRN (arXiv:2309.00071),
LongRoPE (arXiv:2402.13753), and the scaling of Llama 3.1 (arXiv:2407.21783).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import check_choice, check_number, check_sizes, require

__all__ = ["RotaryClaim", "rotary_by_layer", "rotary_in", "rotary_source"]

_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
# Key in rope_adjustments of litgpt -> scaling
_KINDS_OF_LITGPT = {"low_freq_factor": "llama3", "beta_fast": "yarn", "factor": "linear"}
# Names of settings of models in which some attention has no rotary embedding.
_MIXED = re.compile("no_?rope|nope|layer.*type|block.*type|hybrid|encoder_decoder")


@dataclass(frozen=True)
class RotaryClaim:
    """Claim: queries and keys are rotated by angles that grow with the position.

    Attributes:
        theta: base of the frequencies.
        dim: number of elements of each head that are rotated. None: all.
        kind: scaling of the frequencies: "default" (none), "linear", "llama3", "yarn" or "longrope".
        factor: length of a scaled context, relative to the original one.
        original_length: original length of the context, for "llama3" and "yarn". For "longrope", the length
            up to which `factors` are used.
        low, high: for "llama3", factors of the lowest and highest wavelength between which frequencies are
            interpolated. For "yarn", numbers of rotations in the original context (beta_slow and beta_fast).
        factors: for "longrope", the divisor of each frequency in a short context.
        attention_factor: factor of rotated queries and keys, such as mscale of "yarn". None: 1, or no claim
            for "yarn" and "longrope".
        layout: "halves" (element i is rotated with i + dim / 2), "interleaved" (with its neighbour), or None.
    """

    theta: float = 10000.0
    dim: int | None = None
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 8192
    low: float = 1.0
    high: float = 4.0
    factors: tuple[float, ...] = ()
    attention_factor: float | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "low", "high", "attention_factor"):
            if name == "attention_factor" and self.attention_factor is None:
                continue
            check_number(name, getattr(self, name), "a finite number > 0", lambda number: number > 0)
        check_choice("kind", self.kind, _KINDS)
        is_long = self.kind == "longrope"
        allowed = 'a number for each frequency of "longrope"' if is_long else "()"
        require(bool(self.factors) == is_long, "factors", self.factors, allowed)
        for number in self.factors:
            check_number("factors", number, "finite numbers > 0", lambda number: number > 0)
        if self.layout is not None:
            check_choice("layout", self.layout, ("halves", "interleaved"))
        require(
            self.kind != "default" or self.factor == 1, "factor", self.factor, "1, or another kind of scaling"
        )
        require(self.kind != "yarn" or self.theta > 1, "theta", self.theta, 'a number > 1 for "yarn"')
        check_sizes(original_length=self.original_length)
        require(
            self.dim is None or (type(self.dim) is int and self.dim > 0 and self.dim % 2 == 0),
            "dim",
            self.dim,
            "an even integer > 0, or None",
        )

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the angle per position of each pair of elements, in float64 and descending order."""
        dim = self.dim or head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        plain = self.theta**-exponents
        scaled = plain / self.factor
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return scaled
        if self.kind == "longrope":
            return plain / torch.tensor(self.factors, dtype=torch.float64)
        if self.kind == "llama3":
            # Number of rotations in the original context.
            rotations = self.original_length * plain / (2 * math.pi)
            share = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
            return share * plain + (1 - share) * scaled
        first, last = (self._place(rotations, dim) for rotations in (self.high, self.low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)
        share = 1 - ramp.clamp(0, 1)
        return share * plain + (1 - share) * scaled

    def score_factor(self, head_dim: int) -> float | None:
        """Return the factor of products of queries and keys of the same size in all elements.

        None: unknown.
        """
        if self.attention_factor is None and self.kind in ("yarn", "longrope"):
            return None
        share = min((self.dim or head_dim) / head_dim, 1.0)
        return 1 + share * ((self.attention_factor or 1.0) ** 2 - 1)

    def _place(self, rotations: float, dim: int) -> float:
        """Return the number of the pair that makes so many rotations in the original context."""
        wavelength = self.original_length / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(self.theta))

    def __str__(self) -> str:
        parts = [f"theta {self.theta:g}"]
        parts += [self.layout] if self.layout is not None else []
        parts += [f"{self.dim} elements"] if self.dim is not None else []
        parts += [f"{self.kind} scaling by {self.factor:g}"] if self.kind != "default" else []
        return ", ".join(parts)


def rotary_in(config: Any) -> tuple[RotaryClaim | None, ...]:
    """Return the rotary embeddings that a configuration of transformers or litgpt states.

    (): none, or unknown ones.

    (claim, None): some layers may have no rotary embedding.
    """
    if _is_of_litgpt(config):
        return tuple(dict.fromkeys(_layers_of_litgpt(config)))
    stated = getattr(config, "rope_parameters", None)
    if not isinstance(stated, Mapping):
        return ()
    # Layers of different types may have different embeddings.
    by_type = stated if all(isinstance(each, Mapping) for each in stated.values()) else {"": stated}
    found = [_stated(each, _of_type(name, config)) for name, each in by_type.items()]
    if None in found:
        return ()
    is_mixed = any(
        _MIXED.search(name) and value and not (isinstance(value, list) and len(set(map(str, value))) == 1)
        for name, value in vars(config).items()
    )
    return (*dict.fromkeys(found), *((None,) if is_mixed and len(set(found)) == 1 else ()))


def rotary_source(config: Any) -> str:
    """Return the key of the configuration that states the rotary embeddings, and a description of each."""
    key = "rope_base" if _is_of_litgpt(config) else "rope_parameters"
    return f"config.{key}: " + " or ".join(str(claim) for claim in rotary_in(config) if claim is not None)


def rotary_by_layer(config: Any) -> tuple[RotaryClaim, ...]:
    """Return the rotary embedding of each layer whose type has one of its own."""
    if _is_of_litgpt(config):
        return _layers_of_litgpt(config)
    types, stated = getattr(config, "layer_types", None) or (), config.rope_parameters
    found = [
        _stated(stated[each], _of_type(each, config))
        for each in types
        if isinstance(stated.get(each), Mapping)
    ]
    return tuple(claim for claim in found if claim is not None)


def _is_of_litgpt(config: Any) -> bool:
    return hasattr(config, "rope_base") and hasattr(config, "rotary_percentage")


def _layers_of_litgpt(config: Any) -> tuple[RotaryClaim, ...]:
    """Return the rotary embedding of each layer, or () if one of them is unknown."""
    keys = (
        "rope_condense_ratio",
        "rope_adjustments",
        "rope_local_base_freq",
        "rope_indices",
        "qk_rope_head_dim",
    )
    condensed, adjusted, local, chosen, rotated = (getattr(config, key, None) for key in keys)
    adjusted = adjusted or {}
    kind = next((kind for key, kind in _KINDS_OF_LITGPT.items() if key in adjusted), "default")
    plain = {"partial_rotary_factor": config.rotary_percentage}
    if condensed not in (None, 1):
        plain |= {"rope_type": "linear", "factor": condensed}
        if kind != "default":
            return ()
    scaled = plain | ({"rope_type": kind, **adjusted} if kind != "default" else {})
    scaled["original_max_position_embeddings"] = adjusted.get("original_max_seq_len")
    if not {"mscale", "mscale_all_dim"} & adjusted.keys():
        scaled["attention_factor"] = 1.0
    sizes = SimpleNamespace(head_dim=config.head_size, qk_rope_head_dim=rotated)
    stated = (scaled | {"rope_theta": config.rope_base}, plain | {"rope_theta": local})
    claims = [_stated(each, sizes) for each in stated]
    found = [claims[index] for index in (chosen or (0,) * config.n_layer)[: config.n_layer]]
    return tuple(claim for claim in found if claim is not None) if None not in found else ()


def _of_type(name: str, config: Any) -> Any:
    """Return the configuration of the layers of a type. It may state another head size."""
    layers, types = getattr(config, "per_layer_config", None), getattr(config, "layer_types", None) or ()
    return layers[types.index(name)] if layers and name in types else config


def _stated(parameters: Mapping[str, Any], config: Any) -> RotaryClaim | None:
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta")
    if kind not in _KINDS or not isinstance(theta, int | float):
        return None
    dim = _rotated_dim(parameters, config)
    if not dim or dim % 2 or (kind == "yarn" and parameters.get("truncate", True) is not True):
        return None
    scaling = {} if kind == "default" else _scaling(kind, parameters, config)
    return RotaryClaim(theta=float(theta), dim=dim, kind=kind, **scaling)


def _scaling(kind: str, parameters: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the arguments of a claim with scaled frequencies."""
    get = parameters.get
    original: Any = get("original_max_position_embeddings")
    factor: Any = get("factor") or (original and config.max_position_embeddings / original)
    scaling = {"factor": float(factor)} | ({} if kind == "linear" else {"original_length": original})
    match kind:
        case "llama3":
            scaling |= {"low": parameters["low_freq_factor"], "high": parameters["high_freq_factor"]}
        case "yarn":
            scaling |= {"low": get("beta_slow") or 1.0, "high": get("beta_fast") or 32.0}
            scale, of_all = get("mscale"), get("mscale_all_dim")
            mscale = _mscale(factor, scale) / _mscale(factor, of_all) if scale and of_all else _mscale(factor)
            scaling["attention_factor"] = get("attention_factor") or mscale
        case "longrope":
            own = get("short_mscale") or get("attention_factor")
            scaling["factors"] = tuple(map(float, parameters["short_factor"]))
            scaling["attention_factor"] = own or math.sqrt(
                1 + math.log(max(factor, 1.0)) / math.log(original)
            )
    return scaling


def _rotated_dim(parameters: Mapping[str, Any], config: Any) -> int | None:
    """Return the number of rotated channels of a head, or None if the configuration does not state it."""
    dim: int | None = getattr(config, "qk_rope_head_dim", None)
    if dim is not None:
        return dim
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and isinstance(getattr(config, "hidden_size", None), int):
        head_dim = config.hidden_size // getattr(config, "num_attention_heads", 1)
    return None if head_dim is None else int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def _mscale(factor: float, scale: float = 1.0) -> float:
    """Return the attention factor of YaRN."""
    return 0.1 * scale * math.log(max(factor, 1.0)) + 1.0
