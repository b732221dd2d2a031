"""Observation: size of a model's output and entropy of its attention, without an effect on the training.

Shapes: B batch, T positions, t queries at one time, S keys, C model width, H query heads, K key/value heads,
G = H/K, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.model.attention import Attention
from stackwise.model.kernel import KernelAttention
from stackwise.model.latent import LatentAttention
from stackwise.model.layout import Layout
from stackwise.stability.buffers import Buffers
from stackwise.stability.telemetry.attention_logit import are_attention_scores
from stackwise.support.mode import evaluating
from stackwise.support.random_state import keep_random_states

__all__ = ["Observation", "RowStatistics", "observe"]

_SCORES_AT_ONCE = 2**24
_MASKED = 5e3  # distance below the row maximum from which a key is masked by a constant


@dataclass(frozen=True)
class Observation:
    """State of a model at one moment of its training.

    Attributes:
        logit_max: largest absolute value of the output.
        attention_entropy: by module, entropy of the attention weights divided by the logarithm of the number
            of visible keys. It is the mean over batch, heads and all queries with at least two visible keys.
            1 is uniform attention, 0 is attention to one key.
        attention_logit_max: by module, largest input of its softmax for a visible key, after scaling and soft
            cap.
        notes: values that could not be observed, with reasons.
    """

    logit_max: float
    attention_entropy: dict[str, float]
    attention_logit_max: dict[str, float]
    notes: tuple[str, ...] = ()


class RowStatistics:
    """Entropy and largest score of attention rows, accumulated on their device in parts."""

    def __init__(self, device: torch.device) -> None:
        self.entropy, self.rows = torch.zeros(2, dtype=torch.float64, device=device)
        self.largest = torch.full((), -math.inf, device=device)

    def add(self, scores: Tensor, visible: Tensor) -> None:
        """Add rows.

        Args:
            scores: (..., T, S), input of a softmax over S; -inf for a weight of zero.
            visible: bool, broadcastable to `scores`. Hidden entries are ignored.
        """
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        visible = visible.expand_as(wide)
        masked = wide.masked_fill(~visible, -math.inf)
        log_total = masked.logsumexp(-1, keepdim=True)
        log_weights = masked - log_total
        weights = log_weights.exp()
        # The product for a weight of zero is 0, but -inf times 0 is NaN.
        entropy = -(weights * log_weights.masked_fill(weights == 0, 0.0)).sum(-1)
        count = visible.sum(-1)
        several = (count > 1) & log_total.squeeze(-1).isfinite()
        share = entropy / count.clamp(min=2).to(entropy.dtype).log()
        self.entropy = self.entropy + torch.where(several, share, 0.0).double().sum()
        self.rows = self.rows + several.sum()
        self.largest = torch.maximum(self.largest, masked.amax().float())


def observe(
    model: nn.Module, call: Callable[[], Tensor], *, device: torch.device | str = "cpu"
) -> Observation:
    """Run one forward pass in eval mode without gradients, and observe output and attention.

    Modes, random states and buffers are restored, so that training continues bit-identically.

    The attention of a Rack is computed a second time, in parts of the queries, from its own queries, keys and
    mask. For kernel attention with positive features, the weights are those of the kernel, and the scores are
    their logarithms, for which no maximum is reported. If a model has such modules, only these are observed.

    In other models, every softmax over keys is observed when it runs, and attributed to its innermost module:
    that of torch's `scaled_dot_product_attention` (its "math" path is used during the observation), that of
    `nn.MultiheadAttention`, or an explicit one. Fused kernels of other libraries are not observed.

    Args:
        model: model with the observed modules.
        call: function that runs the model and returns its output, or the largest absolute value of each part
            of it.
        device: device with random states to restore, in addition to the CPU.
    """
    device = torch.device(device)
    buffers = Buffers(model)
    buffers.keep()
    own = {name: m for name, m in model.named_modules() if isinstance(m, Attention | LatentAttention)}
    watch: _RackWatch | _SoftmaxWatch = _RackWatch(own) if own else _SoftmaxWatch(model)
    try:
        with torch.no_grad(), keep_random_states(), evaluating(model), watch.watching():
            output = call()
            largest = output.detach().abs().amax().float()
    finally:
        buffers.restore()
    names = list(watch.seen)
    statistics = [watch.seen[name] for name in names]
    values = [largest.double()]
    for each in statistics:
        values += [each.entropy / each.rows, each.largest.double()]
    logit_max, *of_modules = torch.stack([value.to(largest.device) for value in values]).tolist()
    entropies = dict(zip(names, of_modules[::2], strict=True))
    maxima = dict(zip(names, of_modules[1::2], strict=True))
    return Observation(
        logit_max,
        {name: entropy for name, entropy in entropies.items() if not math.isnan(entropy)},
        {
            name: value
            for name, value in maxima.items()
            if name not in watch.without_logits and value != -math.inf
        },
        watch.notes(),
    )


class _RackWatch:
    """Observation of a Rack's attention, computed from the inputs of each module."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self.seen: dict[str, RowStatistics] = {}
        self.without_logits = {name for name, m in modules.items() if isinstance(m, KernelAttention)}
        self._signed = [
            name
            for name, m in modules.items()
            if isinstance(m, KernelAttention) and not m.feature_map.is_positive
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._modules.items():
                if name not in self._signed:
                    stack.callback(module.register_forward_pre_hook(self._hook(name)).remove)
            yield

    def notes(self) -> tuple[str, ...]:
        if not self._signed:
            return ()
        what = "random Fourier features have weights below 0, and so no entropy"
        return (f"attention_entropy: not of {', '.join(self._signed)}: {what}",)

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def look(module: nn.Module, given: tuple[Any, ...]) -> None:
            x_BTC, layout = given[0], given[1]
            statistics = self.seen.setdefault(name, RowStatistics(x_BTC.device))
            assert isinstance(module, Attention | LatentAttention)
            _take(module, x_BTC, layout, statistics)

        return look


def _take(
    module: Attention | LatentAttention, x_BTC: Tensor, layout: Layout, statistics: RowStatistics
) -> None:
    """Add the rows of a module's attention, in parts of the queries."""
    if isinstance(module, LatentAttention):
        q_BHTD = torch.cat(module._queries(x_BTC, layout), dim=-1)
        k_BKTD, _ = module._expand(module._latent(x_BTC, layout))
    else:
        q_BHTD, k_BKTD, _ = module.project(x_BTC, layout)
    window = None if isinstance(module, KernelAttention) else module.sliding_window
    mask = layout.mask(causal=module.causal, window=window)
    B, H, T, D = q_BHTD.shape
    K = k_BKTD.shape[1]
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    with torch.autocast(x_BTC.device.type, enabled=False):
        if isinstance(module, KernelAttention):
            features = module.feature_map(k_BKTD)
            k_BKTD, log_scale_BKT = features.value_BKTM, features.log_scale_BKT
        rows = max(1, _SCORES_AT_ONCE // (B * H * T))
        for start in range(0, T, rows):
            part = slice(start, min(start + rows, T))
            q_BKGtD = q_BHTD[:, :, part].to(wide).reshape(B, K, H // K, -1, D)
            if isinstance(module, KernelAttention):
                q_BKGtD = module.feature_map(q_BKGtD).value_BKTM
            scores = q_BKGtD @ k_BKTD.to(wide)[:, :, None].transpose(-1, -2)
            if isinstance(module, KernelAttention):
                scores = scores.log() + log_scale_BKT[:, :, None, None]
            else:
                scores = scores * D**-0.5
                if module.softcap is not None:
                    scores = module.softcap * (scores / module.softcap).tanh()
            scores_BHtS = scores.flatten(1, 2)
            visible = mask.visible(part, slice(None))
            if visible is None:
                visible = torch.ones((), dtype=torch.bool, device=scores.device)
            statistics.add(scores_BHtS, visible)


class _SoftmaxWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observation of every softmax over keys, attributed to the module that is running."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._names: list[str] = []
        self.seen: dict[str, RowStatistics] = {}
        self.without_logits: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        fast = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._leaving, always_call=True).remove)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
            stack.enter_context(self)
            yield

    def notes(self) -> tuple[str, ...]:
        if self.seen:
            return ()
        return ("attention_entropy: no softmax over keys was seen",)

    def _entering(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def enter(_module: nn.Module, _given: tuple[Any, ...]) -> None:
            self._names.append(name)

        return enter

    def _leaving(self, _module: nn.Module, _given: Any, _output: Any) -> None:
        self._names.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("_softmax", "_safe_softmax"):
            scores, axis = args[0], args[1]
            if are_attention_scores(scores, axis):
                name = self._names[-1] if self._names else ""
                self._take(self.seen.setdefault(name, RowStatistics(scores.device)), scores)
        return output

    def _take(self, statistics: RowStatistics, scores: Tensor) -> None:
        flat = scores.flatten(0, -2)
        rows = max(1, _SCORES_AT_ONCE // flat.shape[-1])
        for part in torch.split(flat, rows):
            visible = part > part.amax(-1, keepdim=True) - _MASKED
            statistics.add(part, visible)
