"""Bugs of generation: cache, rows, stop tokens, sampling and state."""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.subject.generation import GenerateCall
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, Placed, spec_of
from tests.zoo.mutant import mutant

PAD = 0


class Engine:
    """Generation with a cache for prompts of any lengths, which are padded on the left."""

    def __call__(
        self,
        model,
        prompts,
        *,
        max_new_tokens,
        temperature=0.0,
        top_k=None,
        top_p=1.0,
        stop=(),
        seed=0,
    ):
        self.stop, self.options = stop, (temperature, top_k, top_p)
        self.generator = torch.Generator().manual_seed(self.seed_of(seed))
        ids, keep = self.pad(prompts)
        logits, cache = self.prefill(model, ids, keep)
        ended, columns = torch.zeros(len(ids), dtype=torch.bool), []
        for step in range(self.count(max_new_tokens)):
            token = self.draw(logits, step)
            token = self.fill(token, ended)
            columns.append(token)
            ended = self.end(ended, token)
            if ended.all():
                break
            keep = torch.cat((keep, keep.new_ones(len(ids), 1)), dim=1)
            logits, cache = self.decode(model, token[:, None], cache, keep)
        return torch.stack(columns, dim=1)

    def seed_of(self, seed):
        return seed

    def count(self, max_new_tokens):
        return max_new_tokens

    def pad(self, prompts) -> tuple[Tensor, Tensor]:
        length = max(map(len, prompts))
        ids = torch.full((len(prompts), length), PAD)
        keep = torch.zeros(len(prompts), length, dtype=torch.bool)
        for number, prompt in enumerate(prompts):
            ids[number, length - len(prompt) :] = prompt
            keep[number, length - len(prompt) :] = True
        return ids, keep

    def prefill(self, model, ids, keep):
        output = model(ids, attention_mask=keep, use_cache=True)
        return output.logits[:, -1], output.cache

    def decode(self, model, ids, cache, keep):
        output = model(ids, attention_mask=keep, cache=cache, use_cache=True)
        return output.logits[:, -1], output.cache

    def draw(self, logits, step):
        temperature, top_k, top_p = self.options
        if temperature == 0:
            return logits.argmax(-1)
        return self.multinomial(self.filter(logits, temperature, top_k, top_p), step)

    def filter(self, logits, temperature, top_k, top_p):
        """Return probabilities (B, V)."""
        logits = logits / temperature
        if top_k is not None:
            logits = self.keep_top_k(logits, top_k)
        p = logits.softmax(-1)
        return self.keep_top_p(p, top_p) if top_p < 1 else p

    def keep_top_k(self, logits, k):
        return logits.masked_fill(logits < logits.topk(k).values[:, -1:], -torch.inf)

    def keep_top_p(self, p, top_p):
        ordered, order = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        return p.masked_fill(torch.empty_like(p).scatter(1, order, before) >= top_p, 0.0)

    def multinomial(self, p, step):
        return torch.multinomial(p, 1, generator=self.generator)[:, 0]

    def fill(self, token, ended):
        return token.masked_fill(ended, PAD)

    def end(self, ended, token):
        return ended | torch.isin(token, torch.tensor(self.stop, dtype=torch.long))


class Samples(Engine):
    """Engine for samples of one prompt: the prompt is read once, and its cache is expanded to all rows."""

    def __call__(self, model, prompts, *, max_new_tokens, num_samples=1, temperature=0.0, top_k=None, seed=0):
        self.num_samples = num_samples
        options = {"temperature": temperature, "top_k": top_k, "seed": seed}
        return super().__call__(model, prompts, max_new_tokens=max_new_tokens, **options)

    def pad(self, prompts):
        return prompts[0].expand(self.num_samples, -1), torch.ones(self.num_samples, len(prompts[0])).bool()

    def prefill(self, model, ids, keep):
        logits, cache = super().prefill(model, ids[:1], keep[:1])
        return logits.expand(len(ids), -1), self.expand(cache, len(ids))

    def expand(self, cache, n):
        return [tuple(tensor.expand(n, -1, -1, -1) for tensor in layer) for layer in cache]


class Beams(Engine):
    """Beam search with a cache for prompts of one length."""

    def __call__(self, model, prompts, *, max_new_tokens, num_beams=1):
        ids = torch.stack(prompts).repeat_interleave(num_beams, dim=0)
        keep = torch.ones_like(ids).bool()
        logits, cache = self.prefill(model, ids, keep)
        scores = torch.full((len(prompts), num_beams), -torch.inf)
        scores[:, 0] = 0.0  # the beams of a prompt are equal at first
        tokens = ids[:, :0]
        for _ in range(max_new_tokens):
            scores, chosen, token = self.choose(scores, logits.log_softmax(-1))
            tokens = torch.cat((tokens[self.order_of(chosen)], token.flatten()[:, None]), dim=1)
            cache = self.reorder(cache, self.order_of(chosen))
            keep = torch.cat((keep, keep[:, :1]), dim=1)
            logits, cache = self.decode(model, token.flatten()[:, None], cache, keep)
        return tokens[::num_beams]

    def choose(self, scores, log_p):
        """Return scores, the beam of each one and its next token, (B, K) each."""
        B, K = scores.shape
        total = self.add(scores[..., None], log_p.unflatten(0, (B, K))).flatten(1)
        scores, index = total.topk(K)
        return scores, index // log_p.shape[-1], index % log_p.shape[-1]

    def add(self, scores, log_p):
        return scores + log_p

    def order_of(self, chosen):
        return (chosen + torch.arange(len(chosen))[:, None] * chosen.shape[1]).flatten()

    def reorder(self, cache, order):
        return [tuple(tensor[order] for tensor in layer) for layer in cache]


def engine(build: type[Engine] = Engine, model: type[GPT] = GPT) -> ModelSpec:
    """The clean twin: a GPT with its engine."""
    return spec_of(model, generate=build())


def samples(build: type[Engine] = Samples) -> ModelSpec:
    """The clean twin that draws samples of one prompt."""
    return spec_of(GPT, generate=build())


def beams(build: type[Engine] = Beams) -> ModelSpec:
    """The clean twin with beam search."""
    return spec_of(GPT, generate=GenerateCall(build(), one_length=True))


def placed_engine(build: type[Engine] = Engine) -> ModelSpec:
    """The clean twin with learned positions."""
    return spec_of(Placed, generate=build(), max_length=64)


def _prompts(spec):
    return [row[:length] for row, length in zip(spec.batch(3, 7, seed=1), (5, 7, 3), strict=True)]


@torch.no_grad()
def _new(spec, prompts, **options):
    model = spec.create().eval()
    for p in model.parameters():
        p.mul_(3.0)  # new weights hardly depend on the cache
    return spec.generate(model, prompts, **{"max_new_tokens": 6, **options})


def greedy(spec: ModelSpec):
    """Greedy tokens of three prompts, each alone."""
    return [_new(spec, [prompt])[0] for prompt in _prompts(spec)]


def in_batch(spec: ModelSpec):
    """Greedy tokens of three prompts of different lengths in a batch."""
    return _new(spec, _prompts(spec))


def searched(spec: ModelSpec):
    """Tokens of a beam search for three prompts of one length."""
    return _new(spec, [prompt[-3:] for prompt in _prompts(spec)], num_beams=3)


def stopped(spec: ModelSpec):
    """Greedy tokens with two stop tokens, of which one is in a prompt."""
    prompts = [prompt[-3:] for prompt in _prompts(spec)]
    rows = _new(spec, prompts)
    prompts[1][0] = rows[0][1]
    return _new(spec, prompts, stop=(rows[2][-1], rows[0][1], rows[2][0]))


def drawn(spec: ModelSpec, **options):
    """Drawn tokens of 64 rows with the same prompt."""
    prompts, more = [_prompts(spec)[0]], {}
    if "num_samples" in spec.generate.options:
        more["num_samples"] = 64
    else:
        prompts *= 64
    return _new(spec, prompts, **{"temperature": 0.5, **more, **options})


def drawn_from_top_k(spec: ModelSpec):
    """Drawn tokens of the three most likely ones."""
    return drawn(spec, top_k=3)


def drawn_from_top_p(spec: ModelSpec):
    """Drawn tokens with a part of the probability."""
    return drawn(spec, top_p=0.5, temperature=1.0)


def drawn_from_top_p_of_top_k(spec: ModelSpec):
    """Drawn tokens with a part of the probability of the three most likely ones."""
    return drawn(spec, top_k=3, top_p=0.5, temperature=1.0)


def after_other_calls(spec: ModelSpec):
    """Two calls with the same prompt and seed, with another call between them; then modes and settings."""
    model, (one, two, _) = spec.create().eval(), _prompts(spec)
    options = {"max_new_tokens": 4, "temperature": 1.0, "seed": 0}
    with torch.enable_grad():
        rows = [spec.generate(model, [prompt] * 8, **options) for prompt in (one, two, one)]
        spec.generate(model.train(), [one], **options)
        return rows[0] == rows[2], model.training, torch.is_grad_enabled()


def two_seeds(spec: ModelSpec):
    """Drawn tokens with two seeds."""
    return drawn(spec, seed=1) == drawn(spec, seed=2)


def _bug(id, observable, twin=engine, source="classic"):  # noqa: A002
    return mutant(id, twin=twin, family="generation", source=source, observable=observable)


# Positions and cache


@_bug("generate-cache", greedy)
def last_token_of_the_prompt_is_passed_twice():
    """The first decoding step passes the prompt's last token again."""

    class Mutant(Engine):
        def pad(self, prompts):
            return super().pad([torch.cat((prompt, prompt[-1:])) for prompt in prompts])

    return engine(Mutant)


class Moved(Placed):
    """Learned positions that an engine can change."""

    move = None

    def place(self, input_ids, past, keep, documents):
        if self.move is None:
            return super().place(input_ids, past, keep, documents)
        return self.move(super().place(input_ids, past, keep, documents), past)


def moved(move) -> ModelSpec:
    """A model whose engine passes `move(positions, past)` in place of the positions."""

    class Mutant(Engine):
        def prefill(self, model, ids, keep):
            model.move = move
            return super().prefill(model, ids, keep)

    return spec_of(Moved, generate=Mutant(), max_length=64)


@_bug("generate-cache", greedy, twin=placed_engine)
def position_after_the_prompt_is_skipped():
    """The positions of all new tokens are too large by one."""
    return moved(lambda positions, past: positions + 1 if past else positions)


@_bug("generate-cache", greedy, twin=placed_engine)
def position_of_the_last_prompt_token_is_used_again():
    """The positions of all new tokens are too small by one."""
    return moved(lambda positions, past: positions - 1 if past else positions)


@_bug("generate-cache", greedy, twin=placed_engine)
def positions_start_again_after_the_prompt():
    """All new tokens have position 0."""
    return moved(lambda positions, past: positions * 0 if past else positions)


@_bug("generate-cache", greedy)
def cache_is_not_extended():
    """Each step uses the cache of the prompt, without the tokens after it."""

    class Mutant(Engine):
        def prefill(self, model, ids, keep):
            logits, self.cache = super().prefill(model, ids, keep)
            return logits, self.cache

        def decode(self, model, ids, cache, keep):
            length = self.cache[0][0].shape[2]
            keep = torch.cat((keep[:, :length], keep[:, -1:]), dim=1)
            return super().decode(model, ids, self.cache, keep)

    return engine(Mutant)


@_bug("generate-cache", greedy)
def prompt_without_its_first_token():
    """The first token of the prompt is removed."""

    class Mutant(Engine):
        def pad(self, prompts):
            return super().pad([prompt[1:] for prompt in prompts])

    return engine(Mutant)


@_bug("generate-length", greedy)
def one_token_too_many():
    """max_new_tokens does not count the first new token."""

    class Mutant(Engine):
        def count(self, max_new_tokens):
            return max_new_tokens + 1

    return engine(Mutant)


@_bug("generate-length", greedy)
def one_token_too_few():
    """The last token is not returned."""

    class Mutant(Engine):
        def count(self, max_new_tokens):
            return max(max_new_tokens - 1, 1)

    return engine(Mutant)


# Rows


@_bug("generate-rows", in_batch)
def padding_is_visible():
    """The mask is not passed, so padding on the left is visible."""

    class Mutant(Engine):
        def prefill(self, model, ids, keep):
            return super().prefill(model, ids, torch.ones_like(keep))

        def decode(self, model, ids, cache, keep):
            return super().decode(model, ids, cache, torch.ones_like(keep))

    return engine(Mutant)


@_bug("generate-rows", in_batch)
def padding_is_visible_after_the_prompt():
    """The mask is passed with the prompt, but not with the new tokens."""

    class Mutant(Engine):
        def decode(self, model, ids, cache, keep):
            return super().decode(model, ids, cache, torch.ones_like(keep))

    return engine(Mutant)


@_bug("generate-rows", in_batch, twin=placed_engine)
def padding_is_counted_as_a_position():
    """Padding on the left is counted in the positions of tokens."""
    return moved(lambda positions, past: torch.arange(past, past + positions.shape[1]).expand_as(positions))


@_bug("generate-rows", in_batch)
def prompts_are_padded_on_the_right():
    """Shorter prompts are padded on the right, so their new tokens follow padding."""

    class Mutant(Engine):
        def pad(self, prompts):
            ids, keep = super().pad(prompts)
            shifts = (~keep).sum(1).tolist()
            pairs = [(ids[i].roll(-n), keep[i].roll(-n)) for i, n in enumerate(shifts)]
            return tuple(torch.stack(each) for each in zip(*pairs, strict=True))

    return engine(Mutant)


@_bug("generate-rows", in_batch)
def long_prompts_are_cut():
    """All prompts are cut to the length of the shortest one."""

    class Mutant(Engine):
        def pad(self, prompts):
            shortest = min(map(len, prompts))
            return super().pad([prompt[-shortest:] for prompt in prompts])

    return engine(Mutant)


def two_rows(spec: ModelSpec):
    """Greedy tokens of two samples."""
    return _new(spec, _prompts(spec)[:1], num_samples=2)


@_bug("generate-rows", two_rows, twin=samples)
def cache_is_expanded_with_zeros():
    """The cache of all samples but the first one is empty."""

    class Mutant(Samples):
        def expand(self, cache, n):
            first = torch.eye(n)[0].view(n, 1, 1, 1)
            return [tuple(tensor * first for tensor in layer) for layer in cache]

    return samples(Mutant)


# Stop tokens


@_bug("generate-stop", stopped)
def one_ended_row_ends_all_rows():
    """Generation of all rows ends with the first row that ends."""

    class Mutant(Engine):
        def end(self, ended, token):
            return super().end(ended, token).any().expand_as(ended)

    return engine(Mutant)


@_bug("generate-stop", stopped)
def ended_rows_go_on():
    """Tokens continue to change after the stop token of their row."""

    class Mutant(Engine):
        def fill(self, token, ended):
            return token

    return engine(Mutant)


@_bug("generate-stop", stopped)
def only_the_first_stop_token_counts():
    """Of several stop tokens, only the first one ends a row."""

    class Mutant(Engine):
        def end(self, ended, token):
            return ended | (token == self.stop[0] if self.stop else False)

    return engine(Mutant)


@_bug("generate-stop", stopped)
def first_token_is_not_compared_with_the_stop_tokens():
    """A row whose first new token is a stop token continues."""

    class Mutant(Engine):
        def draw(self, logits, step):
            self.step = step
            return super().draw(logits, step)

        def end(self, ended, token):
            return super().end(ended, token) if self.step else ended

    return engine(Mutant)


@_bug("generate-stop", stopped)
def stop_token_in_the_prompt_ends_the_row():
    """The prompt is searched for stop tokens too."""

    class Mutant(Engine):
        def pad(self, prompts):
            self.prompts = prompts
            return super().pad(prompts)

        def end(self, ended, token):
            stop = torch.tensor(self.stop, dtype=torch.long)
            in_prompt = torch.stack([torch.isin(prompt, stop).any() for prompt in self.prompts])
            return super().end(ended, token) | in_prompt

    return engine(Mutant)


@_bug("generate-stop", stopped)
def ended_row_is_not_remembered():
    """A row that ended continues in the next step."""

    class Mutant(Engine):
        def end(self, ended, token):
            return super().end(ended & False, token)

    return engine(Mutant)


# Distribution


@_bug("generate-temperature", drawn)
def logits_are_multiplied_by_the_temperature():
    """The logits are multiplied by the temperature instead of divided by it."""

    class Mutant(Engine):
        def filter(self, logits, temperature, top_k, top_p):
            return super().filter(logits, 1 / temperature, top_k, top_p)

    return engine(Mutant)


@_bug("generate-temperature", drawn)
def softmax_before_the_temperature():
    """Probabilities, not logits, are divided by the temperature."""

    class Mutant(Engine):
        def filter(self, logits, temperature, top_k, top_p):
            return super().filter(logits.softmax(-1), temperature, top_k, top_p)

    return engine(Mutant)


@_bug("generate-temperature", drawn)
def temperature_of_the_first_token_only():
    """Later tokens are drawn with a temperature of one."""

    class Mutant(Engine):
        def draw(self, logits, step):
            if step and self.options[0]:
                self.options = (1.0, *self.options[1:])
            return super().draw(logits, step)

    return engine(Mutant)


@_bug("generate-temperature", drawn)
def temperature_is_applied_twice():
    """The logits are divided by the square of the temperature."""

    class Mutant(Engine):
        def filter(self, logits, temperature, top_k, top_p):
            return super().filter(logits / temperature, temperature, top_k, top_p)

    return engine(Mutant)


@_bug("generate-temperature", drawn)
def first_token_is_greedy():
    """The first token is the most likely one, and the others are drawn."""

    class Mutant(Engine):
        def multinomial(self, p, step):
            return super().multinomial(p, step) if step else p.argmax(-1)

    return engine(Mutant)


@_bug("generate-top-p", drawn_from_top_p_of_top_k, source="ml-explore/mlx-lm#388")
def top_p_of_a_top_k_that_is_not_normalised():
    """Less likely tokens are removed up to a share of 1 - p, although the top k has a share below 1."""

    class Mutant(Engine):
        def filter(self, logits, temperature, top_k, top_p):
            if top_k is None or top_p == 1:
                return super().filter(logits, temperature, top_k, top_p)
            p = (logits / temperature).softmax(-1)
            p = p.masked_fill(self.keep_top_k(logits, top_k).isinf(), 0.0)
            ordered, order = p.sort(dim=-1)
            removed = torch.empty_like(p).scatter(1, order, ordered.cumsum(-1)) <= 1 - top_p
            return p.masked_fill(removed, 0.0) + 1e-9

    return engine(Mutant)


@_bug("generate-top-k", drawn_from_top_k)
def top_k_has_one_token_too_many():
    """The threshold is the logit after the k-th largest one."""

    class Mutant(Engine):
        def keep_top_k(self, logits, k):
            return super().keep_top_k(logits, k + 1)

    return engine(Mutant)


@_bug("generate-top-k", drawn_from_top_k)
def top_k_has_one_token_too_few():
    """The k-th token is removed."""

    class Mutant(Engine):
        def keep_top_k(self, logits, k):
            return super().keep_top_k(logits, k - 1)

    return engine(Mutant)


@_bug("generate-top-k", drawn_from_top_k)
def top_k_of_the_first_row():
    """The threshold of the first row is used for all rows."""

    class Mutant(Engine):
        def keep_top_k(self, logits, k):
            least = logits[:1].topk(k).values[:, -1:].minimum(logits.amax(-1, keepdim=True))
            return logits.masked_fill(logits < least, -torch.inf)

    return engine(Mutant)


@_bug("generate-top-p", drawn_from_top_p)
def top_p_without_the_crossing_token():
    """The token whose probability crosses top_p is removed."""

    class Mutant(Engine):
        def keep_top_p(self, p, top_p):
            ordered, order = p.sort(dim=-1, descending=True)
            removed = torch.empty_like(p).scatter(1, order, ordered.cumsum(-1)) > top_p
            removed[p == p.amax(-1, keepdim=True)] = False
            return p.masked_fill(removed, 0.0)

    return engine(Mutant)


@_bug("generate-top-p", drawn_from_top_p)
def top_p_in_the_order_of_the_sorted_tokens():
    """The mask of the sorted tokens is not reordered by token id before it is applied."""

    class Mutant(Engine):
        def keep_top_p(self, p, top_p):
            ordered, _ = p.sort(dim=-1, descending=True)
            return p.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)

    return engine(Mutant)


@_bug("generate-top-p", drawn_from_top_p)
def top_p_is_ignored():
    """Tokens are drawn from all of the vocabulary."""

    class Mutant(Engine):
        def keep_top_p(self, p, top_p):
            return p

    return engine(Mutant)


# Independence


@_bug("generate-draws", drawn, twin=samples, source="karpathy/nanochat#38")
def first_token_is_shared_by_all_samples():
    """The first token is drawn once, and expanded to all samples."""

    class Mutant(Samples):
        def multinomial(self, p, step):
            return super().multinomial(p, step) if step else super().multinomial(p[:1], step).expand(len(p))

    return samples(Mutant)


class InverseCDF(Engine):
    """Draws by uniform numbers."""

    def multinomial(self, p, step):
        u = torch.rand(len(p), 1, generator=self.generator)
        return self.inverse(p, u)

    def inverse(self, p, u):
        return (p.cumsum(-1) < u * p.sum(-1, keepdim=True)).sum(-1).clamp(max=p.shape[1] - 1)


def inverse_cdf() -> ModelSpec:
    """The clean twin that draws by uniform numbers."""
    return engine(InverseCDF)


@_bug("generate-draws", drawn, twin=inverse_cdf)
def one_uniform_number_for_all_rows():
    """All rows use the same uniform number in each step."""

    class Mutant(InverseCDF):
        def inverse(self, p, u):
            return super().inverse(p, u[:1])

    return engine(Mutant)


@_bug("generate-draws", drawn)
def generator_is_seeded_in_each_step():
    """Each step draws the same random numbers."""

    class Mutant(Engine):
        def multinomial(self, p, step):
            self.generator.manual_seed(5)
            return super().multinomial(p, step)

    return engine(Mutant)


@_bug("generate-draws", two_seeds)
def seed_is_ignored():
    """Every call draws the same tokens, whatever the seed is."""

    class Mutant(Engine):
        def seed_of(self, seed):
            return 0

    return engine(Mutant)


# State


@_bug("generate-state", after_other_calls)
def generator_is_seeded_once():
    """Only the first call seeds the generator, so the seeds of later calls have no effect."""

    class Mutant(Engine):
        def seed_of(self, seed):
            self.calls = getattr(self, "calls", -1) + 1
            return seed + self.calls

    return engine(Mutant)


@_bug("generate-state", after_other_calls)
def model_stays_in_eval_mode():
    """The model is in eval mode after generation."""

    class Mutant(Engine):
        def prefill(self, model, ids, keep):
            return super().prefill(model.eval(), ids, keep)

    return engine(Mutant)


@_bug("generate-state", after_other_calls)
def cache_of_the_previous_call_is_used():
    """The keys of the previous call stay in the cache."""

    class Mutant(Engine):
        def prefill(self, model, ids, keep):
            logits, cache = super().prefill(model, ids, keep)
            old, self.old = getattr(self, "old", None), cache
            if old is not None and old[0][0].shape[0] == len(ids):
                n = min(old[0][0].shape[2], cache[0][0].shape[2], 2)
                pairs = [zip(x, y, strict=True) for x, y in zip(old, cache, strict=True)]
                cache = [
                    tuple(torch.cat((x[:, :, :n], y[:, :, n:]), dim=2) for x, y in pair) for pair in pairs
                ]
            return logits, cache

    return engine(Mutant)


@_bug("generate-state", after_other_calls)
def gradients_stay_off():
    """Generation calls set_grad_enabled(False), and does not restore the setting."""

    class Mutant(Engine):
        def prefill(self, model, ids, keep):
            torch.set_grad_enabled(False)
            return super().prefill(model, ids, keep)

    return engine(Mutant)


# Beam search


@_bug("generate-beams", searched, twin=beams)
def cache_is_not_reordered():
    """Each beam continues with the cache of the beam that had its place."""

    class Mutant(Beams):
        def reorder(self, cache, order):
            return cache

    return beams(Mutant)


@_bug("generate-beams", searched, twin=beams)
def beams_of_all_rows_come_from_the_first_row():
    """The index of a chosen beam has no offset for its row."""

    class Mutant(Beams):
        def order_of(self, chosen):
            return chosen.flatten()

    return beams(Mutant)


@_bug("generate-beams", searched, twin=beams)
def scores_of_earlier_tokens_are_lost():
    """Beams are chosen by the probability of their last token."""

    class Mutant(Beams):
        def add(self, scores, log_p):
            return log_p.where(scores.isfinite(), -torch.inf)

    return beams(Mutant)
