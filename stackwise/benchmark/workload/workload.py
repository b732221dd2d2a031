"""Workload: something to time, and how well it uses its device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from stackwise.benchmark.flops.closed_form import Recompute
from stackwise.benchmark.flops.measured_peak import measured_peak
from stackwise.benchmark.flops.peak_rate import PeakRate, multiplies_in_tf32, published_peak
from stackwise.benchmark.flops.products import Products, products_of
from stackwise.benchmark.flops.roofline import Roofline, decode_floor
from stackwise.benchmark.flops.shape_reader import weights_dtype
from stackwise.benchmark.flops.utilization import Utilization, utilization
from stackwise.benchmark.token_stream import OnToken
from stackwise.support.arguments import check_choice, check_sizes, require
from stackwise.support.device import resolve_device

__all__ = ["PEAKS", "Workload", "callable_workload", "check_workload"]

PEAKS = ("published", "measured")
_COUNTED = ("forward", "train", "prefill", "decode")


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
            None: not known. "none" is not believed where a call is seen to do so.
        logits: of prefill, whether the head is computed for "all" positions or for the "last" one of each
            row; None: as is usual in its mode.
        prepare_alone: in place of `prepare`, before a call whose memory is looked at: nothing is held then to
            put back later. None: as `prepare`.
        held_bytes: what a call cannot do without: weights and buffers, and in training gradients and the
            optimizer's state. Asked after a call.
        notes: asked after the calls, what a reader must know of them.
        replays: the call that `call` does again without Python, as a CUDA graph does: its operations are
            counted in this one, and nobody sees its memory. None: `call` does its own work.

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
    replays: Callable[[], object] | None = None

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
        if self.mode != "train" or self.recompute == "blocks":
            return used
        if self.recompute == "none" and (used.hfu is None or products.recomputes is False):
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

    def _peak(self, model: nn.Module, peak: str) -> tuple[Products, PeakRate | None]:
        """What a call multiplies in, and what its device could do at best."""
        if peak == "measured":
            return self._products, measured_peak(self.device, self._products.dtype)
        known = published_peak(self.device)
        return self._products if known else Products(weights_dtype(model)), known

    @cached_property
    def _products(self) -> Products:
        assert self.model is not None
        return products_of(self.replays or self.call, self.model)


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
