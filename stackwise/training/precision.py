"""Precision: compute dtype of a training step. Trained weights are always stored in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import get_args

import torch
from torch import nn

from stackwise.config import Precision
from stackwise.model.block import Block
from stackwise.model.linear import Linear
from stackwise.model.quantization import QuantizedLinear
from stackwise.support.arguments import check_choice, require

__all__ = [
    "autocast",
    "check_precision",
    "check_weights",
    "compute_dtype",
    "float8_layers",
    "frozen_precision",
]

_KEY = "training.precision"
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "bf16_weights": torch.bfloat16,
    "fp16": torch.float16,
    "float8": torch.bfloat16,
}
# Further dtypes of frozen weights, in addition to float32. Autocast supports operands of any dtype.
_NARROW = {"fp32": (), "bf16_weights": (torch.bfloat16,)}
_ANY_NARROW = (torch.bfloat16, torch.float16)
_FLOAT8_CAPABILITY = (8, 9)
_FLOAT8_MULTIPLE = 16  # both sizes of a matrix have to be multiples of it, for the hardware's kernels


def check_precision(precision: str, device: torch.device) -> None:
    """Raise if `device` does not support the precision.

    Raises:
        ValueError: "fp16" on a device other than CUDA, or "float8" on a device other than CUDA with compute
            capability 8.9.
        ImportError: "float8" without torchao, which the extra `stackwise[quant]` installs.
    """
    check_choice(_KEY, precision, get_args(Precision))
    refusals = {name: _refusal(name, device) for name in get_args(Precision)}
    if reason := refusals[precision]:
        allowed = ", ".join(repr(name) for name, refused in refusals.items() if not refused)
        raise ValueError(f"{_KEY}: got {precision!r}; {reason}; allowed on {device.type}: {allowed}")
    if precision == "float8":
        _require_torchao()


def check_weights(model: nn.Module, precision: str) -> None:
    """Raise if weights are not float32. Frozen weights may have a dtype that `precision` supports.

    Raises:
        ValueError: names the first such weight.
    """
    frozen = (torch.float32, *_NARROW.get(precision, _ANY_NARROW))
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):  # converts its inputs
            continue
        for name, p in module.named_parameters(prefix=path, recurse=False):
            known = (torch.float32,) if p.requires_grad else frozen
            state = "trains" if p.requires_grad else "is frozen"
            allowed = f"{' or '.join(map(str, known))} of what {state}, with {_KEY}={precision!r}"
            require(p.dtype in known, f"dtype of {name}", p.dtype, allowed)


def _refusal(precision: str, device: torch.device) -> str:
    """Return the reason if this hardware does not support the precision, otherwise an empty string."""
    match precision:
        case "fp16" if device.type != "cuda":
            return "it needs CUDA"
        case "float8":
            wanted = "it needs CUDA of compute capability {}.{}".format(*_FLOAT8_CAPABILITY)
            if device.type != "cuda":
                return wanted
            major, minor = torch.cuda.get_device_capability(device)
            return "" if (major, minor) >= _FLOAT8_CAPABILITY else f"{wanted}, and this has {major}.{minor}"
    return ""


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of matrix products. "float8" multiplies float8 operands into bfloat16."""
    check_choice(_KEY, precision, _DTYPES)
    return _DTYPES[precision]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass: autocast for "bf16", "fp16" and "float8", otherwise none.

    bfloat16 has the exponent range of float32, so its loss needs no scale; "fp16" needs one
    (`create_loss_scale`).
    """
    dtype = compute_dtype(precision)
    if precision in ("fp32", "bf16_weights"):
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def frozen_precision(precision: str) -> str:
    """Return the precision for float32 weights without training: autocast instead of bfloat16 weights."""
    return "bf16" if precision == "bf16_weights" else precision


@contextmanager
def float8_layers(module: nn.Module, *, emulate: bool = False) -> Iterator[list[str]]:
    """Replace the Blocks' linear layers by float8 layers of torchao in this context.

    Inputs, weights and gradients have one scale per tensor: e4m3 in the forward pass, e5m2 in the backward
    pass (Micikevicius et al. 2022, arXiv:2209.05433). Parameters and their names do not change: float32
    weights are rounded when they are used. Layers with a size that is not a multiple of 16 are not replaced,
    nor are embedding and head. It is faster only with `compile`, which fuses scaling and rounding.

    Enter the context before parameters are sharded.

    Args:
        module: module with Blocks; changed in place.
        emulate: round to float8 and multiply in the dtype of the input; for any device.

    Yields:
        Names of the replaced layers.

    Raises:
        ValueError: no layer has suitable sizes.
        ImportError: torchao is not installed.
    """
    _require_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    places = {
        layer: (parent, child)
        for block in module.modules()
        if isinstance(block, Block)
        for parent in block.modules()
        for child, layer in parent.named_children()
        if _fits(layer)
    }
    names = [name for name, layer in module.named_modules() if layer in places]
    allowed = f"another, as no linear layer of a Block has sizes that are multiples of {_FLOAT8_MULTIPLE}"
    require(bool(places), _KEY, "float8", allowed)
    # If the number of tokens is not a multiple of 16, it is padded with zeros.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(module, module_filter_fn=lambda layer, _: layer in places, config=config)
    try:
        yield names
    finally:
        for layer, (parent, child) in places.items():
            converted = getattr(parent, child)
            layer.weight, layer.bias = converted.weight, converted.bias
            setattr(parent, child, layer)


def _fits(layer: nn.Module) -> bool:
    # Other kinds of linear layers, such as quantised ones, have their own matrix product.
    if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, Linear):
        return False
    return layer.in_features % _FLOAT8_MULTIPLE == 0 == layer.out_features % _FLOAT8_MULTIPLE


def _require_torchao() -> None:
    if find_spec("torchao") is None:
        raise ImportError(f"{_KEY} 'float8' needs torchao >= 0.18: pip install 'stackwise[quant]'")
