"""HarnessModel: adapter of a language model for lm-evaluation-harness. Importing it requires lm_eval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from stackwise.quality.continuation import Sampling, continue_texts
from stackwise.quality.request import TokenRequest
from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import require

__all__ = ["ALLOWED_OPTIONS", "HarnessModel", "new_tokens", "refused_options", "rolling_windows"]

# Defaults of the harness if a model or a task does not set them.
_MAX_LENGTH, _MAX_NEW_TOKENS = 2048, 256
_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OPTIONS = ("until", "do_sample", "temperature", "top_k", "top_p", *_NEW_TOKENS)
# Options of tasks with the values that have no effect.
_WITHOUT_EFFECT = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "diversity_penalty": (0,),
    "no_repeat_ngram_size": (0,),
    "min_p": (0,),
    "typical_p": (1,),
    "early_stopping": (False,),
    "use_cache": (True, False),
}


ALLOWED_OPTIONS = f"{', '.join(_OPTIONS)}; and what has no effect, such as num_beams: 1"


def refused_options(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of generation that would have an effect and are not supported."""
    return {
        key: value
        for key, value in asked.items()
        if key not in _OPTIONS and value is not None and value not in _WITHOUT_EFFECT.get(key, ())
    }


def new_tokens(asked: Mapping[str, Any]) -> int:
    """Return the maximum number of new tokens that a task requests."""
    counts = [asked[key] for key in _NEW_TOKENS if asked.get(key) is not None]
    return int(counts[0]) if counts else _MAX_NEW_TOKENS


class HarnessModel(LM):  # type: ignore[misc]  # lm_eval has no types
    """Model and tokenizer that answer every kind of request of the harness's tasks.

    `lm_eval.simple_evaluate(model=HarnessModel(model, tokenizer), tasks=[...])`.

    Args:
        model: a `Scorer`, or the `model` of a `Scorer`.
        tokenizer: tokenizer of the `Scorer`.
        **options: options of `Scorer`.

    Raises:
        ValueError, TypeError: errors of `Scorer`, or no tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        super().__init__()
        if isinstance(model, Scorer):
            for key, given in {"tokenizer": tokenizer, **options}.items():
                require(given is None, key, given, "what the Scorer was given")
        self.scorer = model if isinstance(model, Scorer) else Scorer(model, tokenizer, **options)
        self.tokenizer = self.scorer.texts.inner

    @property
    def max_length(self) -> int:
        """Maximum length of a sequence. If the model names no limit, it is the default of the harness."""
        return self.scorer.model.max_length or _MAX_LENGTH

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, used by the harness in the names of cached requests."""
        return self.scorer.texts.name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation in the format of the tokenizer's template.

        Raises:
            ValueError: the tokenizer has no template.
        """
        template = getattr(self.tokenizer, "apply_chat_template", None)
        require(callable(template), "tokenizer", self.scorer.texts.name, "one with a chat template")
        assert callable(template)
        text: str = template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and True if it is the greedy one."""
        scores = self.scorer.score([request.args for request in requests])
        answers = [(score.log_probability, score.is_greedy) for score in scores]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability of each text, read in windows.

        The first window follows the tokens that the tokenizer prepends or, if there are none, the prefix
        token (`TextTokenizer.encode_whole`). They are read but not scored, even if the text itself begins
        with them, because no model is trained to predict them. This is like the harness's model `hf` with
        `add_bos_token=False`.
        """
        windows: list[TokenRequest] = []
        parts = []
        for (text,) in (request.args for request in requests):
            before, ids = self.scorer.texts.encode_whole(text)
            start = len(windows)
            windows += rolling_windows(ids, before, self.max_length, self.scorer.window_context)
            parts.append(slice(start, len(windows)))
        scores = self.scorer.score_tokens(windows)
        totals = [math.fsum(score.log_probability for score in scores[part]) for part in parts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the text that the model generates after each context, until a stop sequence."""
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        written = [""] * len(requests)
        for places in alike.values():
            contexts = [requests[i].args[0] for i in places]
            for i, text in zip(places, self._generate(contexts, requests[places[0]].args[1]), strict=True):
                written[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return written

    def _generate(self, contexts: list[str], asked: Mapping[str, Any]) -> list[str]:
        """Return the generated texts with the options of a task.

        Raises:
            ValueError: an option is not supported.
        """
        refused = refused_options(asked)
        require(not refused, "generation_kwargs", refused, ALLOWED_OPTIONS)
        until = asked.get("until") or []
        temperature = asked.get("temperature")
        draws = asked.get("do_sample", bool(temperature))
        sampling = Sampling(
            (1.0 if temperature is None else float(temperature)) if draws else 0.0,
            (asked.get("top_k") or None) if draws else None,
            float(asked.get("top_p") or 1.0) if draws else 1.0,
        )
        return continue_texts(
            self.scorer,
            contexts,
            max_new_tokens=new_tokens(asked),
            until=[until] if isinstance(until, str) else until,
            sampling=sampling,
        )


def rolling_windows(
    ids: Sequence[int], before: Sequence[int], max_length: int, context: int = 1
) -> Iterator[TokenRequest]:
    """Yield the windows of a text that a model can read. Each token is predicted exactly once.

    The first window follows `before`, and has the maximum length. Each later window has `context` tokens
    before its predicted ones, and the last window as many as fit. With 1, windows hardly overlap, as in the
    harness. With `max_length`, each token except the first ones has the maximum context, but needs a separate
    pass.

    Args:
        ids: ids of the text.
        before: ids before the text, at least one.
        max_length: maximum number of positions, at least the length of `before`.
        context: number of context tokens, 1 to `max_length`.

    Raises:
        ValueError: `context` is too long, or `before` is too long.
    """
    require(context <= max_length, "window_context", context, f"1 to {max_length}, as the model reads")
    n = len(before)
    require(n <= max_length, "max_length", max_length, f"at least {n}, the tokens before a text")
    whole = (*before, *ids)
    end = min(max_length - n + 1, len(ids))
    if end:
        yield TokenRequest(whole[:n], whole[n : end + n])
    step = max_length - context + 1
    while end < len(ids):
        start, end = end, min(end + step, len(ids))
        # An index in `whole` is n higher than in `ids`. The last token is predicted, but never read.
        first = max(0, end + n - 1 - max_length)
        yield TokenRequest(whole[first : start + n], whole[start + n : end + n])
