"""Generation: new tokens compared with plain calls of the model, which use no cache.

Shapes: B rows, T positions, N new tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from scipy.special import chdtrc
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.probe.call import REFUSALS, dtype_of, real_inputs, reason_of, refusals
from stackwise.checks.probe.difference import NOT_REPEATED, repeats
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject
from stackwise.subject.capability import padding_id
from stackwise.subject.encoder_decoder import Decoder
from stackwise.subject.generation import GenerateCall, transformers_calls
from stackwise.support.random_state import seeded

_N_NEW, _LENGTHS, _LEAST_IDS = 8, (5, 2, 7, 3), 8
_N_BEAMS, _N_BEAM_STEPS = 4, 6
# Largest and smallest number of rows in a sampling check, and largest size of the logits of a call.
_MANY, _FEW, _BYTES = 256, 128, 2**25
# Limit of -log10 of the p-value of a sample. A correct engine exceeds it in two samples once in 1e8 runs.
_SURPRISE = 4.0
_EXPECTED = 32.0  # expected draws in a cell of the chi-square statistic
_CERTAIN = math.log(1e9)
_Rows = list[list[int]]


class _Engine:
    """Model under test with its generate function, and a model of equal weights for plain calls.

    Weights with a small standard deviation are scaled up. Otherwise a new model repeats the last token, and
    errors in its positions or its cache have no effect.
    """

    def __init__(self, subject: Subject) -> None:
        call = subject.spec.generate
        assert isinstance(call, GenerateCall)
        self.subject, self.call = subject, call
        self.plain, self.model = subject.model(), subject.model()
        if not subject.spec.trained:
            _scale_up(self.plain)
            if bool(self.logits(self.prompts([4])[0][None]).isfinite().any()):
                _scale_up(self.model)
            else:
                self.plain = subject.model()
        embeddings = (each for each in self.plain.modules() if isinstance(each, nn.Embedding))
        # The mask and the positions of some models depend on these ids, or a row ends at them.
        padding = {padding_id(self.plain), *(each.padding_idx for each in embeddings)}
        self.reserved = (padding - {None}) | {*call.may_end}
        self.n_at_once = _MANY
        self.tolerance = max(1e-3, 16 * torch.finfo(dtype_of(self.plain)).eps)
        if self.logits(self.prompts([4])[0][None]).shape[1] > _n_ids(self.plain, subject.spec.width):
            raise NotImplementedError("needs as many logits as ids: generation may exclude the others")

    def prompts(self, lengths: Sequence[int], shift: int = 0) -> list[Tensor]:
        """Return random prompts (T,) of these lengths."""
        ids = real_inputs(self.subject, len(lengths), max(lengths), shift=shift, model=self.plain)
        return [row[:length].clone() for row, length in zip(ids, lengths, strict=True)]

    def logits(self, *parts: Tensor) -> Tensor:
        """Return the plain logits (B, V) after the last position of ids (B, T), which may have two parts."""
        return self.subject.logits(self.plain, torch.cat(parts, dim=1))[:, -1].double()

    @torch.no_grad()
    def generate(self, prompts: list[Tensor], n: int = _N_NEW, seed: int = 0, **options: Any) -> _Rows:
        """Return the new tokens of each row. The global generators get the same seed."""
        options = {"temperature": 0.0, "top_k": None, "top_p": 1.0, "max_new_tokens": n} | options
        options |= {"seed": seed} if "seed" in self.call.options else {}
        with seeded(self.subject.seed + seed, self.subject.device):
            return self.call(self.model, prompts, **options)

    def difference(self, prompts: list[Tensor], advice: str, **options: Any) -> CheckResult | None:
        """Return a failure if greedy rows differ from plain calls, otherwise None."""
        rows = self.generate(prompts, **options)
        stop = options.get("stop", self.call.end_tokens)
        for number, row in enumerate(rows):
            prompt = prompts[number % len(prompts)]
            if problem := self._problem(prompt, row, stop, options.get("n", _N_NEW)):
                return self.subject.failed(
                    where=f"row {number} of {len(rows)}, a prompt of {len(prompt)} tokens",
                    meaning=f"Greedy generation differs from plain calls: {problem}.",
                    advice=advice,
                )
        return None

    def _problem(self, prompt: Tensor, row: list[int], stop: Sequence[int], n: int) -> str:
        """Return the difference between a row and the most likely tokens of plain calls, or ""."""
        count = next((place + 1 for place, token in enumerate(row) if token in stop), len(row))
        row, rest = row[:count], row[count:]
        if count > n or (count < n and not stop):
            hint = ". Declare stop= if the model has an end token" if count < n else ""
            return f"{count} new tokens, but max_new_tokens is {n}{hint}"
        if len(set(rest)) > 1:
            return f"tokens {rest} follow the stop token {row[-1]}"
        # A list may omit the stop token.
        omitted = [[*stop]] if count < n and stop and not {*row[-1:]} & {*stop} else []
        for step, chosen in enumerate([*([token] for token in row), *omitted]):
            if self.reserved & {*row[:step]}:
                break
            logits = self.logits(prompt[None], prompt.new_tensor(row[:step])[None])[0]
            logits[[*self.reserved - {*chosen}]] = -torch.inf  # generation may exclude these ids
            gap = float(logits.max() - logits[chosen].max())
            if not gap <= self.tolerance * float(logits.max() - logits.median()):
                found = f"token {chosen[0]}" if step < count else "the end of the row"
                return f"{found} at step {step}, but the most likely token is {int(logits.argmax())}"
        return ""

    def samples(self, prompt: Tensor, seed: int = 0, **options: Any) -> _Rows:
        """Return two drawn tokens for each of many rows with the same prompt."""
        n_bytes = self.subject.logits(self.plain, prompt[None]).nbytes
        self.n_at_once = min(max(_BYTES // n_bytes, 1), _MANY)
        if "num_samples" in self.call.options:
            return self.generate([prompt], 2, seed, num_samples=max(self.n_at_once, _FEW), **options)
        calls = range(math.ceil(_FEW / self.n_at_once))
        return [
            row
            for number in calls
            for row in self.generate([prompt] * self.n_at_once, 2, seed + 1009 * number, **options)
        ]

    def drawn(self, prompt: Tensor, rows: _Rows, step: int) -> tuple[Tensor, Tensor]:
        """Return the tokens (B, step + 1) of the rows that reach a step, and the plain logits (B, V) there.

        Rows that ended at this step or earlier are excluded: see `without_ends`.
        """
        ends = {*self.call.end_tokens}
        kept = [row[: step + 1] for row in rows if len(row) > step and not ends & {*row[: step + 1]}]
        kept = [row for row in kept if not self.reserved & {*row[:step]}]
        if len(kept) < _FEW // 2:
            raise NotImplementedError(f"needs rows that do not end before token {step + 1}")
        tokens = prompt.new_tensor(kept)
        parts = torch.split(tokens[:, :step], self.n_at_once)
        return tokens, torch.cat([self.logits(prompt.expand(len(part), -1), part) for part in parts])

    def without_ends(self, p: Tensor) -> Tensor:
        """Return probabilities (B, V) of the tokens of rows that do not end."""
        p = p.clone()
        p[:, [*self.call.end_tokens]] = 0.0
        return p / p.sum(1, keepdim=True)


def _n_ids(model: nn.Module, width: int) -> int:
    """Return the size of the vocabulary that a model states, at most the width of the logits."""
    owners: list[Any] = [model, *(getattr(model, name, None) for name in ("config", "cfg", "args"))]
    stated = [getattr(owner, "vocab_size", None) for owner in owners]
    return min([width, *(size for size in stated if type(size) is int and size > 0)])


@torch.no_grad()
def _scale_up(model: nn.Module) -> None:
    """Scale each matrix with small weights to a variance of one over the size of its rows."""
    for p in model.parameters():
        if p.ndim > 1 and p.is_floating_point() and p.numel() > 1:
            std, target = float(p.float().std()), p[0].numel() ** -0.5
            p.mul_(target / std if 0 < std < target else 1.0)


def _of_engine(question: Callable[[_Engine], CheckResult | None]) -> Callable[[Subject], CheckResult]:
    """Return the check of a question about generation. It is not applicable to some models."""

    @wraps(question)
    def examine(subject: Subject) -> CheckResult:
        spec, length = subject.spec, max(_LENGTHS) + _N_NEW
        if spec.generate is None:
            model, reason = subject.model(), ""
            if isinstance(model, Decoder):
                reason = " The model is an encoder-decoder."
            elif hasattr(model, "generate"):
                reason = " The model has a method generate of an unknown form."
            needed = "needs generate: (model, prompts, **options) -> new tokens of each row."
            return subject.not_applicable(needed + reason)
        is_short = spec.max_length is not None and spec.max_length < length
        if spec.inputs != "tokens" or not spec.causal or spec.width < _LEAST_IDS or is_short:
            needed = f"needs a causal model with at least {_LEAST_IDS} token ids and {length} positions"
            return subject.not_applicable(needed)
        try:
            result = question(_Engine(subject)) or subject.passed()
        except NotImplementedError as error:
            return subject.not_applicable(str(error))
        return result if result.ok or repeats(subject) else subject.not_applicable(NOT_REPEATED)

    return examine


@check
@_of_engine
def generation_greedy(engine: _Engine) -> CheckResult | None:
    """Does greedy generation choose the most likely token of a plain call, up to max_new_tokens?"""
    advice = "Look for wrong positions after the prompt, and for a token that is passed twice or not at all."
    for shift, (length, n) in enumerate([(5, _N_NEW), (2, _N_NEW), (7, _N_NEW), (3, 1)]):
        if failure := engine.difference(engine.prompts([length], shift), advice, n=n):
            return failure
    return None


@check
@_of_engine
def generation_rows(engine: _Engine) -> CheckResult | None:
    """Does each row of a batch get the continuation of its own prompt, also if lengths differ?"""
    advice = "Look for padding that is visible or counted as a position, and for a cache that rows share."
    if "num_samples" in engine.call.options:
        return engine.difference(engine.prompts([5]), advice, num_samples=3)
    return engine.difference(engine.prompts([5] * 4 if engine.call.one_length else _LENGTHS), advice)


@check
@_of_engine
def generation_inputs(engine: _Engine) -> CheckResult | None:
    """Does generate() of transformers return the same tokens for embeddings, a cache and prompt lookup?"""
    [prompt] = engine.prompts([4])
    prompts, used = [prompt.repeat(2)], []
    for name, call in transformers_calls(engine.call).items():
        engine.call = call
        advice = f"Look at the position ids, the mask and the cache in a call with {name}."
        try:
            failure = engine.difference(prompts, advice)
        except AttributeError:
            continue
        except refusals():  # the model does not support it
            continue
        if failure is not None:
            return replace(failure, where=f"{failure.where}, {name}")
        used.append(name)
    if not used:
        raise NotImplementedError("needs generate() of transformers, with inputs_embeds or a cache")
    return engine.subject.passed(meaning=f"compared: {', '.join(used)}")


@check
@_of_engine
def generation_stop(engine: _Engine) -> CheckResult | None:
    """Does a stop token end its own row at once, and no other row?"""
    prompts = engine.prompts([5] * (1 if "num_samples" in engine.call.options else 4))
    rows = engine.generate(prompts, stop=())
    if min(map(len, rows)) < _N_NEW:
        raise NotImplementedError("needs rows with max_new_tokens tokens if stop is empty")
    prompts[len(rows) // 2][0] = rows[0][2]  # a stop token in a prompt must not end the row
    advice = "A row ends at its own first new stop token. In a tensor, only one padding id may follow."
    for stop in ((rows[-1][5], rows[0][2]), (rows[0][0],)):
        if failure := engine.difference(prompts, advice, stop=stop):
            return failure
    return None


@check
@_of_engine
def generation_beams(engine: _Engine) -> CheckResult | None:
    """Does beam search return the sequence that a search with plain calls finds?"""
    if "num_beams" not in engine.call.options:
        raise NotImplementedError("needs a generate function with the parameter num_beams")
    prompts = engine.prompts([5] * 8)
    try:
        rows = engine.generate(prompts, _N_BEAM_STEPS, num_beams=_N_BEAMS)
    except REFUSALS as error:
        raise NotImplementedError(f"needs num_beams={_N_BEAMS}, which raises {reason_of(error)}") from error
    n_compared = 0
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        best, gap = _beam_search(engine, prompt)
        if gap <= engine.tolerance or engine.reserved & {*row, *best}:
            continue  # rounding decides, or ids with another meaning
        n_compared += 1
        if row != best:
            return engine.subject.failed(
                where=f"row {number} of {len(rows)}, {_N_BEAMS} beams",
                meaning=f"Beam search returns {row}, but a search with plain calls finds {best}.",
                advice="Reorder the cache and the ids by the chosen beams, with the offset of each row, and "
                "add the log-probabilities of all steps.",
            )
    if not n_compared:
        raise NotImplementedError("needs beams whose scores differ")
    return None


def _beam_search(engine: _Engine, prompt: Tensor) -> tuple[list[int], float]:
    """Return the best new tokens, and the smallest gap between the scores of a chosen and a dropped beam."""
    rows: _Rows = [[]]
    scores, gap = torch.zeros(1, 1, dtype=torch.float64), math.inf
    for _ in range(_N_BEAM_STEPS):
        tokens = prompt.new_tensor(rows).reshape(len(rows), -1)
        logits = engine.logits(prompt.expand(len(rows), -1), tokens)
        found, order = (scores + logits.log_softmax(1).cpu()).flatten().sort(descending=True)
        gap = min(gap, float(found[_N_BEAMS - 1] - found[_N_BEAMS]), float(found[0] - found[1]))
        scores, chosen = found[:_N_BEAMS, None], order[:_N_BEAMS].tolist()
        rows = [[*rows[i // logits.shape[1]], i % logits.shape[1]] for i in chosen]
    return rows[0], gap


@check
@_of_engine
def sampling_distribution(engine: _Engine) -> CheckResult | None:
    """Do drawn tokens have the probabilities of the plain logits, with temperature, top_k and top_p?"""
    [prompt], [other] = engine.prompts([5]), engine.prompts([5], shift=1)
    value = 0.0
    requests = _requests(engine.logits(prompt[None])[0])
    if "temperature" not in engine.call.options:
        raise NotImplementedError("needs a generate function with the parameter temperature")
    for request in (each for each in requests if each.keys() <= engine.call.options.keys()):
        surprise, where = _surprise(engine, prompt, 0, request)
        if surprise > _SURPRISE:
            surprise, where = min((surprise, where), _surprise(engine, other, 1, request))
        value = max(value, min(surprise, 999.0))
        if surprise > _SURPRISE:
            return engine.subject.failed(
                value,
                _SURPRISE,
                where=", ".join([*(f"{key}={size:.3g}" for key, size in request.items()), where]),
                meaning="Drawn tokens do not have the probabilities of the plain logits. The measured value "
                "is -log10 of the p-value of the sample.",
                advice="Divide logits by the temperature before the softmax. top_k allows k tokens. top_p "
                "includes the token that crosses p. Compare the first token with later ones.",
            )
    return engine.subject.passed(value, _SURPRISE)


def _requests(logits: Tensor) -> list[dict[str, Any]]:
    """Return options for which the allowed tokens are clearly more likely than the next one.

    Engines differ in the order of temperature and top_p, so these are not combined. They also differ in the
    order of top_k and top_p: top_p is the share of all tokens, or of the k most likely ones.
    """
    ordered = logits.sort(descending=True).values[:_LEAST_IDS]
    k = 2 + int((ordered[1:-1] - ordered[2:]).argmax())
    p = logits.softmax(-1).sort(descending=True).values
    top_p = float(p[:2].sum() + p[2] / 2)
    sums = torch.cat([p[:k].cumsum(0), p[:k].cumsum(0) / p[:k].sum()])
    of_k = max((float(x) for x in torch.linspace(0.5, 0.95, 10)), key=lambda x: float((sums - x).abs().min()))
    # The most likely token is e^1.5 times as likely as the last allowed one.
    uneven = max(float(ordered[0] - ordered[k - 1]) / 1.5, 0.05)
    return [
        {"temperature": 0.5},
        {"temperature": 1.5, "top_k": k},
        {"temperature": uneven, "top_k": k},
        {"temperature": 1.0, "top_p": top_p},
        {"temperature": 1.0, "top_k": k, "top_p": of_k},
    ]


def _surprise(engine: _Engine, prompt: Tensor, seed: int, request: dict[str, Any]) -> tuple[float, str]:
    """Return the larger -log10 of the p-values of both tokens of a sample, and the place of this token."""
    rows, found = engine.samples(prompt, seed, **request), []
    conventions = (False, True) if {"top_k", "top_p"} <= request.keys() else (False,)
    for step in range(2):
        tokens, logits = engine.drawn(prompt, rows, step)
        # Generation may exclude ids such as that of padding.
        without = logits.index_fill(1, tokens.new_tensor([*engine.reserved]), -torch.inf)
        values = (
            _surprise_of(engine, tokens, each, of_all=of_all, **request)
            for each in (logits, without)
            for of_all in conventions
        )
        found.append((min(values), f"token {step + 1} of {len(tokens)} rows"))
    return max(found)


def _surprise_of(engine: _Engine, tokens: Tensor, logits: Tensor, **request: Any) -> float:
    """Return -log10 of the p-value of the last tokens (B, T), if these are the logits (B, V) before them."""
    p, is_allowed = _reference(logits, engine.tolerance, **request)
    if not is_allowed.gather(1, tokens[:, -1:]).all():
        return math.inf
    return _chi_square(engine.without_ends(p).sum(0), torch.bincount(tokens[:, -1], minlength=p.shape[1]))


def _reference(
    logits: Tensor,
    tolerance: float,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    of_all: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the probabilities (B, V), and a mask (B, V) of the tokens that are allowed up to rounding.

    With `of_all`, top_p is the share of all tokens, otherwise of the top k.
    """
    near = tolerance * (logits.amax(1, keepdim=True) - logits.median(1, keepdim=True).values)
    least = logits.topk(top_k).values[:, -1:] if top_k else -torch.inf
    is_top = logits >= least
    p = ((logits if of_all else logits.masked_fill(~is_top, -torch.inf)) / temperature).softmax(1)
    ordered, order = p.sort(dim=1, descending=True)
    before = torch.empty_like(p).scatter(1, order, ordered.cumsum(1) - ordered)
    is_allowed = (logits >= least - near) & logits.isfinite() & (before < top_p + tolerance)
    p = p * (before < top_p) * is_top
    return p / p.sum(1, keepdim=True), is_allowed


def _chi_square(expected: Tensor, observed: Tensor) -> float:
    """Return -log10 of the p-value of counts (V,). Tokens with few expected draws share a cell."""
    expected, order = expected.sort(descending=True)
    n_cells = max(int(expected.sum() / _EXPECTED), 1)
    cell = ((expected.cumsum(0) - expected) / _EXPECTED).long().clamp(max=n_cells - 1)
    mean, count = (torch.bincount(cell, each.double()) for each in (expected, observed[order]))
    statistic = ((count - mean).square() / mean)[mean > 0].sum()
    p = float(chdtrc(int((mean > 0).sum()) - 1, float(statistic)))
    return -math.log10(p) if p else math.inf


@check
@_of_engine
def sampling_independence(engine: _Engine) -> CheckResult | None:
    """Are the draws of different rows, steps and seeds independent?"""
    [prompt] = engine.prompts([5])
    rows, again = (engine.samples(prompt, seed, temperature=1.0) for seed in range(2))
    for step in range(2):
        tokens, logits = engine.drawn(prompt, rows, step)
        p, last = engine.without_ends(logits.softmax(1)), tokens[:, -1]
        order = tokens[:, 0].argsort(stable=True) if step else torch.arange(len(tokens))
        half = len(order) // 2
        for one, two in (
            (order[: 2 * half : 2], order[1 : 2 * half : 2]),
            (order[:half], order[half : 2 * half]),
        ):
            same = (tokens[one, :step] == tokens[two, :step]).all(1)
            if _exceeds((last[one] == last[two])[same], p[one].square().sum(1)[same]):
                return engine.subject.failed(
                    where=f"token {step + 1} of {len(tokens)} rows",
                    meaning="Rows with equal prompts draw equal tokens.",
                    advice="Expand the logits to all rows before the draw, not the drawn token after it.",
                )
    if _exceeds(tokens[:, 0] == last, p.gather(1, tokens[:, :1])[:, 0]):
        return engine.subject.failed(
            where="tokens 1 and 2",
            meaning="The draws of two steps depend on each other.",
            advice="Look for a generator that is seeded again in each step.",
        )
    if rows == again and bool((tokens != tokens[0]).any()):
        return engine.subject.failed_unless(
            None if "seed" in engine.call.options else "the engine has a fixed seed",
            meaning="Two calls with different seeds draw the same tokens.",
            advice="Pass the seed to the generator, and declare it as a parameter of generate.",
        )
    return None


def _exceeds(equal: Tensor, p: Tensor) -> bool:
    """Return True if events of probability p are too frequent to be independent (Hoeffding's bound)."""
    n = len(equal)
    return n > 0 and float(equal.double().mean() - p.mean()) > math.sqrt(_CERTAIN / (2 * n))


@check
@_of_engine
def generation_state(engine: _Engine) -> CheckResult | None:
    """Does generation leave later calls, the model and global settings unchanged?"""
    prompts, model = engine.prompts([5]), engine.model
    advice = "Start each call with an empty cache and a new generator."
    draws: dict[str, Any] = {"seed": 3, "temperature": 1.0}
    draws = draws if draws.keys() <= engine.call.options.keys() else {}
    first = engine.generate(prompts, **draws)
    engine.generate(engine.prompts([7], shift=1))
    if draws and first != engine.generate(prompts, **draws):
        return engine.subject.failed(
            meaning="The same prompt and the same seed give other tokens after another call.", advice=advice
        )
    if failure := engine.difference(prompts, advice):
        return failure
    with suppress(*REFUSALS):  # a model that contains a cache may need other arguments
        later = engine.subject.logits(model.eval(), prompts[0][None])[:, -1].double()
        plain = engine.logits(prompts[0][None])
        if (later - plain).abs().max() > engine.tolerance * (plain.max() - plain.median()):
            return engine.subject.failed(
                meaning="After generation, a plain call of the model gives other outputs.",
                advice="Remove the cache and all other state of a generation from the model after the call.",
            )
    for is_train, is_part_train, correct_if in (
        (True, True, None),
        (False, False, "callers choose the mode after generation"),
        (True, False, "no part of the model is in eval mode during training"),
    ):
        next(model.train(is_train).children(), model).train(is_part_train)
        if changed := _changed_by_generation(engine, prompts):
            return engine.subject.failed_unless(
                correct_if,
                where=listed(changed),
                meaning="A call of generate changes the model or global settings.",
                advice="Restore the mode of each module and all settings after the call.",
            )
    return None


def _changed_by_generation(engine: _Engine, prompts: list[Tensor]) -> list[str]:
    """Return the names of the parts of the state that a call changes."""
    with torch.enable_grad(), suppress(*REFUSALS):  # a model may refuse to generate in train mode
        before = _state(engine.model)
        engine.call(engine.model, prompts, max_new_tokens=2, temperature=0.0)
        after = _state(engine.model)
        return [name for name in before if before[name] != after[name]]
    return []


def _state(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model and the global settings that a call must not change."""
    return {
        "train and eval mode": [each.training for each in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "weights": [p.double().sum().item() for p in model.parameters()],
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
    }
