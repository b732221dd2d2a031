"""HarnessModel: adapter of a language model for lm-evaluation-harness. Importing it requires lm_eval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from stackwise.quality.continuation import Sampling, continue_texts
from stackwise.quality.perplexity import rolling_windows
from stackwise.quality.request import TokenRequest
from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import require

__all__ = ["ALLOWED_OPTIONS", "HarnessModel", "new_tokens", "refused_options"]

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


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
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
        self.batch_size = self.scorer.batch_size
        self._device = self.scorer.model.device

    @property
    def eot_token_id(self) -> int | None:
        """End token. None: no token."""
        return self.scorer.texts.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that is used as an empty context.

        Raises:
            ValueError: the tokenizer has none.
        """
        return self.scorer.texts.needed_prefix()

    @property
    def max_length(self) -> int:
        """Maximum length of a sequence. If the model names no limit, it is the default of the harness."""
        return self.scorer.model.max_length or _MAX_LENGTH

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, used by the harness in the names of cached requests."""
        return self.scorer.texts.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, by default with the tokens that the tokenizer prepends."""
        return self.scorer.texts.encode(string, begins=add_special_tokens is not False)

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

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [TokenRequest(tuple(request[1]), tuple(request[2])) for request in requests]
        answers = [(score.log_probability, score.is_greedy) for score in self.scorer.score_tokens(asked)]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """Return the log-probability of each text, read in windows.

        Like in the harness, the tokens that the tokenizer prepends are scored as tokens of the text.
        """
        windows: list[TokenRequest] = []
        parts = []
        for (text,) in (request.args for request in requests):
            start = len(windows)
            windows += rolling_windows(self.tok_encode(text), [self.prefix_token_id], self.max_length)
            parts.append(slice(start, len(windows)))
        scores = self.scorer.score_tokens(windows)
        totals = [sum(score.log_probability for score in scores[part]) for part in parts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Return the text that the model generates after each context, until a stop sequence."""
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        written: dict[int, str] = {}
        for places in alike.values():
            write = self._writer(requests[places[0]].args[1])
            written.update(zip(places, write([requests[i].args[0] for i in places]), strict=True))
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, written[i])
        return [written[i] for i in range(len(requests))]

    def _writer(self, asked: dict[str, Any]) -> Callable[[list[str]], list[str]]:
        """Return a function that generates texts with the options of a task.

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

        def write(contexts: list[str]) -> list[str]:
            return continue_texts(
                self.scorer,
                contexts,
                max_new_tokens=new_tokens(asked),
                until=[until] if isinstance(until, str) else until,
                sampling=sampling,
            )

        return write
