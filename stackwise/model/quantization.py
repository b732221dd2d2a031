"""Quantization: the weights of one Stack in int8, int4 or fp8, for inference.

Shapes: I inputs of a layer, O outputs of a layer, N a slice of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.model.latent import LatentAttention
from stackwise.model.linear import Linear
from stackwise.model.parameter_group import Optimizers, ParameterGroups
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack
from stackwise.support.arguments import check_choice, check_sizes, require
from stackwise.support.mode import evaluating

__all__ = ["QuantizationReport", "QuantizedDtype", "QuantizedLinear", "plain_tensors", "quantize_stack"]

QuantizedDtype = Literal["int8", "int4", "fp8"]
_GROUP_SIZES = (32, 64, 128, 256)
_SLICE = 256


@dataclass(frozen=True)
class QuantizationReport:
    """Result of quantizing a Stack.

    Attributes:
        stack_id: name of the Stack.
        dtype: "int8", "int4" or "fp8".
        arithmetic: description of a layer's arithmetic.
        bytes_before: size of all parameters and buffers of the Stack in memory, in bytes.
        bytes_after: size after quantization, with scales, zero points and padding.
        weight_error: per layer |quantised - original| / |original|, Frobenius norms, of the matrix that the
            layer applies, in the dtype of its output.
        left_out: reason for each layer that was not quantised.
        logits_error_max: largest difference of a logit divided by the largest logit; None without
            `sample_ids`.
        logits_error_rms: root mean square of the difference divided by that of the logits; None without
            `sample_ids`.
    """

    stack_id: int
    dtype: QuantizedDtype
    arithmetic: str
    bytes_before: int
    bytes_after: int
    weight_error: dict[str, float]
    left_out: dict[str, str]
    logits_error_max: float | None
    logits_error_rms: float | None


class QuantizedLinear(Linear):
    """Linear layer with a quantised weight, which cannot be trained.

    Args:
        weight: weight of a torchao tensor class, shape (O, I).
        bias: (O,) or None.
        passes_gradients: True if its kernel has a derivative for the input.
    """

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, *, passes_gradients: bool) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)
        self.passes_gradients = passes_gradients

    @property
    def takes_float32(self) -> bool:  # noqa: D102
        return _is_int8_by_row(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O).

        Raises:
            ValueError: with gradients enabled: the weight was unfrozen, or the input needs a gradient that
                its kernel does not have. For int4 and fp8 also an input with another dtype than the weight:
                a cast of the Rack does not change the weight.
        """
        if torch.is_grad_enabled():
            # Otherwise torchao returns no gradient, or raises an internal error.
            frozen = not self.weight.requires_grad
            require(frozen, "quantised weight", "requires_grad=True", "frozen: call freeze() of its Stack")
            passes = self.passes_gradients or not x.requires_grad
            require(
                passes, "quantised layer", "an input that requires grad", "int8 or fp8, or torch.no_grad()"
            )
        if self.takes_float32 and self.is_single(x):
            return self.single(x, self.weight.qdata, self.weight.scale.flatten())  # type: ignore[attr-defined]
        if not torch.is_autocast_enabled(x.device.type):
            if x.dtype != self.weight.dtype and not _is_int8_by_row(self.weight):
                raise ValueError(
                    f"input of a quantised layer: got {x.dtype}; allowed: {self.weight.dtype}, that of the "
                    "weight, since int4 and fp8 do not follow a cast: cast the Rack, then quantise"
                )
            return F.linear(x, self.weight, self.bias)
        # Autocast does not cast inputs of unknown kernels, such as int4's.
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{super().extra_repr()}, weight={type(self.weight.data).__name__}"


def _is_int8_by_row(weight: Tensor) -> bool:
    """Return True if a torchao tensor is int8 with one scale per row, which can be applied separately."""
    qdata, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if not isinstance(qdata, Tensor) or not isinstance(scale, Tensor):
        return False
    return qdata.dtype == torch.int8 and scale.numel() == weight.shape[0]


def quantize_stack(
    rack: Rack,
    index: int,
    dtype: QuantizedDtype = "int8",
    sample_ids: Tensor | None = None,
    *,
    group_size: int = 32,
    optimizer: Optimizers = None,
) -> QuantizationReport:
    """Quantise the linear weights of one Stack with torchao, and freeze the Stack.

    Norms, biases, embedding and head are unchanged. Parameters that other Stacks share continue to train
    there; a shared matrix is quantised only for this Stack. Activations are not quantised. int8 and fp8
    (e4m3) have one scale per output. They are converted back at each call: they save memory, and time only if
    reading weights is the bottleneck. int4 has a scale and a zero point per `group_size` inputs, and its own
    kernels: on the CPU for weights in bfloat16, float16 or float32 (slow in float32), on CUDA with compute
    capability 8.0 or higher for bfloat16.

    Gradients pass through int8 and fp8 to the layers below the Stack; training the Stack itself raises
    ValueError. The format is tested first, and nothing changes if it does not work.

    Args:
        rack: changed in place.
        index: index of the Stack.
        dtype: "int8", "int4" or "fp8".
        sample_ids: integer (B, T), to measure the error of the logits; None: not measured.
        group_size: inputs per scale of int4: 32, 64, 128 or 256.
        optimizer: optimizers of the Rack, one or several. The Stack's own parameters and their state are
            removed from them.

    Raises:
        ValueError: an index out of range, a Stack that is already quantised or has no suitable layer, a
            dtype that this hardware or the dtype of the weights does not support (with the reason), or a
            dtype other than int8 with `MasterAdamW`.
        ImportError: torchao is not installed; the extra `stackwise[quant]` installs it.
    """
    check_sizes(minimum=0, index=index)
    require(index < len(rack.stacks), "index", index, f"0 to {len(rack.stacks) - 1}")
    check_choice("dtype", dtype, get_args(QuantizedDtype))
    require(group_size in _GROUP_SIZES, "group_size", group_size, ", ".join(map(str, _GROUP_SIZES)))
    stack = rack.get_stack(index)
    done = any(isinstance(module, QuantizedLinear) for module in stack.modules())
    require(not done, "index", index, "a Stack that is not quantised yet")
    if sample_ids is not None:
        seen = tuple(sample_ids.shape)
        require(sample_ids.numel() > 0, "sample_ids", seen, "at least one row of one token")
    groups = ParameterGroups(rack, optimizer)
    allowed = "int8 beside masters, which make the Rack float32 to save and evaluate it"
    require(dtype == "int8" or not groups.keeps_masters, "dtype", dtype, allowed)

    layers = {name: module for name, module in stack.named_modules() if isinstance(module, nn.Linear)}
    left_out = dict(_unfit(stack, layers, dtype, group_size))
    fit = {name: layer for name, layer in layers.items() if name not in left_out}
    require(bool(fit), "dtype", dtype, f"one that fits; as it is: {left_out}")
    config = _config(dtype, rack.embedding.weight.device, group_size)
    before = None if sample_ids is None else _logits(rack, sample_ids)
    quantised = {name: _quantise(layer, dtype, config) for name, layer in fit.items()}
    bytes_before = _bytes(stack)
    _replace(rack, stack, {name: layer for name, (layer, _) in quantised.items()}, groups)
    error_max = error_rms = None
    if sample_ids is not None and before is not None:
        difference = _logits(rack, sample_ids) - before
        error_max = (difference.abs().max() / before.abs().max()).item()
        error_rms = (difference.square().mean().sqrt() / before.square().mean().sqrt()).item()
    return QuantizationReport(
        stack_id=stack.stack_id,
        dtype=dtype,
        arithmetic="int4 as packed"
        if dtype == "int4"
        else "converted at each call to the dtype of the input",
        bytes_before=bytes_before,
        bytes_after=_bytes(stack),
        weight_error={name: error for name, (_, error) in quantised.items()},
        left_out=left_out,
        logits_error_max=error_max,
        logits_error_rms=error_rms,
    )


def _unfit(
    stack: Stack, layers: dict[str, nn.Linear], dtype: QuantizedDtype, group_size: int
) -> Iterator[tuple[str, str]]:
    """Yield layers that cannot be quantised, with the reason."""
    read_directly = {m.kv_up for m in stack.modules() if isinstance(m, LatentAttention)}
    for name, layer in layers.items():
        if layer in read_directly:
            yield name, "decoding reads its weight itself, as it is absorbed into queries and output"
        elif dtype == "fp8" and not layer.weight.any(1).all():
            yield name, "a row of zeros, for which its scale would be 0 / 0"
        elif dtype == "int4" and layer.in_features % group_size:
            yield name, f"in_features={layer.in_features} is no multiple of group_size={group_size}"
        elif dtype == "int4" and layer.weight.device.type == "cpu" and layer.out_features % 16:
            yield name, f"out_features={layer.out_features} is no multiple of 16, which the CPU kernel needs"


def _config(dtype: QuantizedDtype, device: torch.device, group_size: int) -> Any:
    """Return the configuration of torchao, without its changes to global compiler settings."""
    try:
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise ImportError(
            f"quantization needs torchao >= 0.18: pip install 'stackwise[quant]' ({error})"
        ) from error
    match dtype:
        case "int8":
            return Int8WeightOnlyConfig(set_inductor_config=False)
        case "fp8":
            return Float8WeightOnlyConfig(set_inductor_config=False)
        case "int4" if device.type == "cpu":
            return PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)
        case "int4":
            return Int4WeightOnlyConfig(
                group_size=group_size, int4_packing_format="tile_packed_to_4d", set_inductor_config=False
            )


def _quantise(layer: nn.Linear, dtype: QuantizedDtype, config: Any) -> tuple[QuantizedLinear, float]:
    """Return the quantised layer and its error."""
    from torchao.quantization import quantize_

    twin = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    twin.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
    try:
        quantize_(twin, config)
        quantised = QuantizedLinear(twin.weight.detach(), layer.bias, passes_gradients=dtype != "int4")
        return quantised, _error(quantised, layer)
    except Exception as error:  # any failure means that the format does not work here
        place = f"{layer.weight.dtype} weights on {layer.weight.device.type}"
        raise ValueError(f"dtype: got {dtype!r}; does not work for {place}: {error}") from error


def _replace(rack: Rack, stack: Stack, layers: dict[str, QuantizedLinear], groups: ParameterGroups) -> None:
    """Replace layers of a Stack and freeze it, except for parameters that other parts of the Rack train."""
    own_modules = set(stack.modules())
    others = [module for module in rack.modules() if module not in own_modules]
    shared = {id(p) for module in others for p in module.parameters(recurse=False)}
    own = {id(p): p for p in stack.parameters() if id(p) not in shared}
    trained = [p for p in stack.parameters() if id(p) in shared and p.requires_grad]
    groups.drop(own.values())
    for name, layer in layers.items():
        stack.set_submodule(name, layer)
    stack.freeze()
    for parameter in trained:
        parameter.requires_grad_(True)
    groups.adopt(p for p in stack.parameters() if id(p) in own)


@torch.no_grad()
def _error(quantised: QuantizedLinear, layer: nn.Linear) -> float:
    """Return the error of the matrix that the layer applies, so that the kernel's error is included.

    The error is relative to the original matrix, or absolute if that is zero.
    """
    weight_OI = layer.weight.detach()
    difference, size = weight_OI.new_zeros((), dtype=torch.float64), weight_OI.double().norm()
    with torch.autocast(weight_OI.device.type, enabled=False):
        for start in range(0, layer.in_features, _SLICE):
            part = slice(start, min(start + _SLICE, layer.in_features))
            one_NI = torch.zeros(
                part.stop - start, layer.in_features, dtype=weight_OI.dtype, device=weight_OI.device
            )
            one_NI[:, part].fill_diagonal_(1)
            applied_ON = F.linear(one_NI, quantised.weight).T
            difference += (applied_ON.double() - weight_OI[:, part].double()).square().sum()
    error = (difference.sqrt() / (size if size > 0 else 1.0)).item()
    require(math.isfinite(error), "error of the weights", error, "a finite one")
    return error


@torch.no_grad()
def _logits(rack: Rack, sample_ids: Tensor) -> Tensor:
    with evaluating(rack):
        logits_BTV: Tensor = rack(sample_ids)
    return logits_BTV.double()


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a quantised tensor consists of. A plain tensor yields itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_tensors(getattr(tensor, name))


def _bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, shared memory once."""
    tensors = (*module.parameters(), *module.buffers())
    plain = [inner for tensor in tensors for inner in plain_tensors(tensor)]
    return sum({inner.data_ptr(): inner.nbytes for inner in plain}.values())
