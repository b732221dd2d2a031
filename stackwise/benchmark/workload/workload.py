"""Workload: a call to be timed, and the utilization of its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from stackwise.benchmark.flops.closed_form import Recompute
from stackwise.benchmark.flops.counted import count_flops
from stackwise.benchmark.flops.measured_peak import measured_peak
from stackwise.benchmark.flops.peak_rate import PeakRate, multiplies_in_tf32, published_peak
from stackwise.benchmark.flops.roofline import Roofline, decode_floor
from stackwise.benchmark.flops.shape_reader import weights_dtype
from stackwise.benchmark.flops.utilization import Utilization, utilization
from stackwise.benchmark.token_stream import OnToken
from stackwise.support.arguments import check_choice, check_sizes, require
from stackwise.support.device import resolve_device

__all__ = ["PEAKS", "Workload", "callable_workload", "check_workload"]

PEAKS = ("published", "measured")
_ALMOST_ALL = 0.99  # share of the products
_COUNTED = ("forward", "train", "prefill", "decode")


@dataclass(frozen=True)
class Workload:
    """Call to be timed.

    Attributes:
        name: name in reports.
        call: function that does the work once.
        device: device that the call runs on.
        tokens: number of tokens per call. 0: not applicable.
        execution: function that describes the execution, such as the selected kernels. It is called after
            `call`.
        prepare: function that restores the state that a call changes. It is called before each call, outside
            of the measured time. If it is not called, `call` restores the state itself. None: calls do not
            affect each other, or, in training, each call continues from the previous one.
        model: model that is called, from which the work is computed. None: unknown.
        mode: one of MODES. None: other work.
        batch_size: number of rows. 0: unknown.
        seq_len: positions per row; for "decode", positions in the cache. 0: unknown.
        new_tokens: number of new tokens per row for "generate", 0 otherwise.
        each_token: for "generate", the call with a callback that receives each column of tokens as soon as it
            is available. None otherwise.
        counted: True if a call does the work that the closed forms state for its mode. False if all tokens
            are recomputed for each new one, and for a user-defined loop, which may accumulate, freeze or
            cast.
        recompute: layers that the backward pass of a training step recomputes: "none" or "blocks" (every
            layer). None: unknown. "none" has no effect if a call is observed to recompute.
        logits: for "prefill", the positions for which the head is computed: "all", or "last" for the last
            position of each row. None: the default of the mode.
        prepare_alone: function that replaces `prepare` before a call whose memory is measured. It stores no
            copy for a later restore. None: same as `prepare`.
        held_bytes: function that returns the minimum memory of a call: weights and buffers, and in training
            gradients and optimizer state. It is called after `call`.
        notes: function that returns notes for the reader of the results. It is called after the measurement.
        replays: call that `call` repeats without Python, as a CUDA graph does. Operations are counted in this
            call, and the peak memory is unknown. None: `call` is not a replay.

    Raises:
        ValueError: a device that no clock can wait for.
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
    replays: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        allowed = "cpu, cuda, cuda:N, which are waited for"
        require(self.device.type in ("cpu", "cuda"), "device", str(self.device), allowed)

    def utilization(self, seconds: float, peak: str = "published") -> Utilization | None:
        """Return the share of its device's peak rates that a call of `seconds` uses. None: unknown work.

        The peak is that of the most frequent dtype of the matrix products in an additional call.

        Args:
            seconds: duration of a call.
            peak: "published" by the manufacturer, which does not exist for a CPU, or "measured" on this
                machine, which takes seconds the first time.

        Raises:
            ValueError: invalid peak, or seconds that are not positive.
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
        if self.mode != "train" or self.recompute == "blocks":
            return used
        if self.recompute == "none" and (used.hfu is None or products.recomputes is False):
            return used
        return replace(used, hfu=None, notes=(*used.notes, "what the backward pass recomputes is not known"))

    def floor(self, peak: str = "published") -> Roofline | None:
        """Return the minimum time of decoding a token on the device. None: other work, or unknown sizes.

        Args:
            peak: as in `utilization`.

        Raises:
            ValueError: invalid peak.
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
        """Return the products of a call with their dtype, and the peak rates of the device."""
        if peak == "measured":
            return self._products, measured_peak(self.device, self._products.dtype)
        known = published_peak(self.device)
        return self._products if known else _Products(weights_dtype(model)), known

    @cached_property
    def _products(self) -> _Products:
        assert self.model is not None
        return _products_of(self.replays or self.call, self.model)


def callable_workload(
    call: Callable[[], object],
    *,
    name: str | None = None,
    device: torch.device | str = "cpu",
    tokens: int = 0,
    prepare: Callable[[], object] | None = None,
) -> Workload:
    """Return a workload of any callable.

    Args:
        call: function that does the work once.
        name: name in reports. None: the name of the function.
        device: device that the call runs on: "auto", "cpu", "cuda" or "cuda:N". The clock waits for it before
            and after a call.
        tokens: number of tokens per call. 0: not applicable.
        prepare: function that is called before each call, outside of the measured time.

    Raises:
        ValueError: `call` is not callable, `tokens` is below 0, or this machine does not have the device.
    """
    require(callable(call), "call", call, "a function that takes no arguments")
    require(prepare is None or callable(prepare), "prepare", prepare, "a function without arguments, or None")
    check_sizes(minimum=0, tokens=tokens)
    own = getattr(call, "__name__", type(call).__name__)
    return Workload(name or own, call, resolve_device(str(device)), tokens, dict, prepare)


def check_workload(workload: Any, key: str = "workload") -> None:
    """Raise TypeError for an object that is not a workload, such as a model.

    Raises:
        TypeError: the message names the argument, its type and the expected type.
    """
    if not isinstance(workload, Workload):
        got = f"the class {workload.__name__}" if isinstance(workload, type) else type(workload).__name__
        raise TypeError(
            f"{key}: got {got}; wanted a Workload, as of model_workload(model, mode, batch_size=, seq_len=), "
            "trainer_workload or callable_workload"
        )


@dataclass(frozen=True)
class _Products:
    """Properties of the matrix products of a call.

    Attributes:
        dtype: most frequent dtype of the products.
        notes: notes for the reader about other products.
        recomputes: True if a backward pass repeats products. None: unknown.
    """

    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    recomputes: bool | None = None


def _products_of(call: Callable[[], object], model: nn.Module) -> _Products:
    """Return the products of one more call. Without counted products, use the dtype of the weights.

    The call has been measured, so it is correct. If it cannot run under a counter, a note reports it.
    """
    try:
        counted = count_flops(call)
    except Exception as error:  # any error of torch's counter for an unknown operation
        dtype = weights_dtype(model)
        why = f"the products could not be counted ({type(error).__name__})"
        return _Products(dtype, (f"{why}: the peak rate is that of the weights, {_dtype_name(dtype)}",))
    recomputes = counted.recomputed > 0
    if not counted.by_dtype:
        return _Products(weights_dtype(model), (), recomputes)
    dtype, flops = next(iter(counted.by_dtype.items()))
    share = flops / sum(counted.by_dtype.values())
    others = f"{1 - share:.0%} of the products are not in {_dtype_name(dtype)}, whose peak rate this is of"
    return _Products(dtype, (others,) if share < _ALMOST_ALL else (), recomputes)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
