"""Scoring: log-probabilities as summed by hand in float64, whatever the batch and whatever is read once."""

import random

import pytest
import torch
from torch import nn

from stackwise import ModelSpec
from stackwise.quality import LanguageModel, Scorer, TokenRequest, loglikelihoods
from stackwise.quality import scoring as scoring_module
from tests.quality.conftest import tiny_llama

OPTIONS = [{}, {"reuse": False}, {"batch_size": 1}, {"batch_size": 3}, {"batch_size": 500}]


def requests_of(seed=0, examples=120):
    """Questions after the same examples, with choices; and some that share nothing."""
    rng = random.Random(seed)

    def ids(n):
        return tuple(rng.randrange(256) for _ in range(n))

    shown, found = ids(examples), []
    for _ in range(6):
        question = shown + ids(rng.randrange(9, 24))
        found += [TokenRequest(question, ids(rng.randrange(1, 7))) for _ in range(4)]
    found += [TokenRequest(ids(1), ids(30)), TokenRequest(ids(50), ids(1)), found[0]]
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["llama", "rack"])
def test_as_by_hand(kind, options, request, by_hand):
    model, asked = request.getfixturevalue(kind), requests_of()
    scorer = Scorer(model, **options)
    scores = scorer.score_tokens(asked)
    for score, one in zip(scores, asked, strict=True):
        total, greedy = by_hand(model, one)
        assert score.log_probability == pytest.approx(total, abs=1e-4, rel=1e-5)
        assert score.is_greedy == greedy
        assert (score.tokens, score.cut) == (len(one.continuation), 0)
    reads_once = scorer.model.reuse_note == "what several sequences begin with is read once"
    assert reads_once == options.get("reuse", True)


@pytest.mark.parametrize("kind", ["llama", "rack"])
def test_neither_batches_nor_prefixes_change_a_score(kind, request):
    model, asked = request.getfixturevalue(kind), requests_of(1)
    found = [
        [score.log_probability / score.tokens for score in Scorer(model, **options).score_tokens(asked)]
        for options in OPTIONS
    ]
    for other in found[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(found[0]), rtol=0, atol=1e-5)


def test_progress_counts_the_scored_tokens_of_all_requests(llama):
    seen, asked = [], requests_of()
    Scorer(llama, batch_size=4, on_progress=lambda *counts: seen.append(counts)).score_tokens(asked)
    total = sum(len(request.continuation) for request in asked)
    assert len(seen) > 1 and seen == sorted(seen)
    assert {counts[1] for counts in seen} == {total} and seen[-1][0] == total


def longrope(first=64, **more):
    """A tiny Phi-3 whose positions have other angles in rows of more than `first` tokens."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": first}
    config = Phi3Config(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=first,
        rope_parameters=rope,
        pad_token_id=0,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.2,
    )
    return Phi3ForCausalLM(config).eval()


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_as_by_hand_where_angles_depend_on_the_longest_row(options, by_hand):
    rng = random.Random(0)
    shown = tuple(rng.randrange(256) for _ in range(50))
    # Rows on both sides of 64 tokens, and at it, that begin alike.
    asked = [TokenRequest(shown, tuple(rng.randrange(256) for _ in range(n))) for n in (3, 14, 15, 16, 80)]
    model = longrope()
    scorer = Scorer(model, **options)
    for score, one in zip(scorer.score_tokens(asked), asked, strict=True):
        assert score.log_probability == pytest.approx(by_hand(model, one)[0], abs=1e-4, rel=1e-5)
    if options.get("reuse", True):
        wanted = "what several sequences begin with is read once, in those of at most 64 tokens"
        assert scorer.model.reuse_note == wanted
    moved = by_hand(model, asked[3])[0] - by_hand(longrope(first=65), asked[3])[0]
    assert abs(moved) > 0.1  # the other angles are seen


def test_dynamic_rope_limits_max_length_to_the_unscaled_range():
    from transformers import LlamaForCausalLM

    config = tiny_llama(max_length=64).config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = LlamaForCausalLM(config)
    assert LanguageModel(ModelSpec.of(lambda: model, max_length=256)).max_length == 64


def test_greedy_continuations_are_seen(llama):
    with torch.no_grad():
        ids = torch.tensor([[1, 2, 3]])
        for _ in range(3):
            ids = torch.cat((ids, llama(ids).logits[:, -1:].argmax(-1)), dim=1)
    best = tuple(ids[0, 3:].tolist())
    other = (*best[:2], (best[2] + 1) % 258)
    scores = Scorer(llama).score_tokens([TokenRequest((1, 2, 3), end) for end in (best, other)])
    assert [score.is_greedy for score in scores] == [True, False]


def test_what_is_shared_is_read_once(llama):
    asked = requests_of()
    scorers = [Scorer(llama, reuse=reuse, batch_size=8) for reuse in (True, False)]
    for scorer in scorers:
        scorer.score_tokens(asked)
    distinct = {one.context + one.continuation[:-1] for one in asked}
    assert scorers[1].tokens_read >= sum(map(len, distinct))
    assert scorers[0].tokens_read < scorers[1].tokens_read / 3


def test_ends_of_one_beginning_are_read_in_one_row(llama):
    rng = random.Random(0)
    contexts = [tuple(rng.randrange(256) for _ in range(n)) for n in (31, 21, 26)]
    asked = [TokenRequest(context, (9,) * n) for context in contexts for n in (3, 5, 2, 4)]
    scorer = Scorer(llama, batch_size=8)
    scorer.score_tokens(asked)
    # As far as the shortest but for its last token; then what is left of each, and its ends behind it.
    assert scorer.model.packs_ends(32) and scorer.tokens_read == 3 * 20 + 3 * (10 + 3 + 5 + 2 + 4)


def test_ends_that_would_be_too_wide_are_read_apart(llama, by_hand):
    shown = tuple(range(20))
    asked = [TokenRequest(shown, (9, end, *range(60))) for end in range(20)]
    scorer = Scorer(llama, batch_size=4)
    scores = scorer.score_tokens(asked)
    assert scorer.tokens_read == 19 + 20 * 62
    assert scores[7].log_probability == pytest.approx(by_hand(llama, asked[7])[0], rel=1e-5)


def test_a_model_that_takes_no_mask_of_pairs_reads_ends_apart(by_hand):
    class Deaf(nn.Module):
        """Takes a mask and looks at none."""

        def __init__(self):
            super().__init__()
            self.inner = tiny_llama()
            self.config = self.inner.config

        def forward(
            self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False
        ):
            return self.inner(
                input_ids, position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache
            )

    torch.manual_seed(0)
    model, asked = Deaf().eval(), requests_of(2)
    scorer = Scorer(model)
    scores = scorer.score_tokens(asked)
    assert scorer.model.cache_rows is not None and not scorer.model.packs_ends(64)
    for score, one in zip(scores, asked, strict=True):
        assert score.log_probability == pytest.approx(by_hand(model, one)[0], abs=1e-4, rel=1e-5)


def test_a_window_is_not_taken_for_a_mask(by_hand):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=258, num_key_value_heads=2, sliding_window=600, **sizes)
    model = MistralForCausalLM(config).eval()
    rng = random.Random(0)
    shown = tuple(rng.randrange(256) for _ in range(700))
    asked = [TokenRequest(shown, (end, 5, 6)) for end in range(3)]
    scorer = Scorer(model)
    scores = scorer.score_tokens(asked)
    # Within the window it is one mask of pairs as good as another.
    assert scorer.model.packs_ends(500) and not scorer.model.packs_ends(702)
    for score, one in zip(scores, asked, strict=True):
        assert score.log_probability == pytest.approx(by_hand(model, one)[0], abs=1e-4, rel=1e-5)


def test_a_window_of_places_is_seen_in_rows_that_are_as_long(by_hand):
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=258,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=32,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model, rng = GPTNeoForCausalLM(config).eval(), random.Random(0)
    shown = tuple(rng.randrange(256) for _ in range(40))
    asked = [TokenRequest(shown, tuple(rng.randrange(256) for _ in range(9))) for _ in range(4)]
    scorer = Scorer(model)
    scores = scorer.score_tokens(asked)
    assert scorer.model.cache_rows is not None and not scorer.model.packs_ends(75)
    for score, one in zip(scores, asked, strict=True):
        assert score.log_probability == pytest.approx(by_hand(model, one)[0], abs=1e-4, rel=1e-5)


def test_a_state_that_goes_on_from_end_to_end_is_seen_below_rounding():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    config = Lfm2Config(vocab_size=258, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **layers)
    model = LanguageModel(Lfm2ForCausalLM(config).to(torch.bfloat16).eval())
    assert not model.packs_ends(64)


def test_choices_that_are_read_alike_are_read_once(llama):
    asked = [TokenRequest((1, 2, 3), (letter,)) for letter in (4, 5, 6, 7)]
    scorer = Scorer(llama)
    scorer.score_tokens(asked)
    assert scorer.tokens_read == 3


def test_long_contexts_are_cut(llama, by_hand):
    rng = random.Random(0)
    whole = TokenRequest(tuple(rng.randrange(256) for _ in range(400)), (1, 2, 3))
    [score] = Scorer(llama).score_tokens([whole])
    assert score.cut == 400 + 3 - (256 + 1)
    kept = TokenRequest(whole.context[score.cut :], whole.continuation)
    assert score.log_probability == pytest.approx(by_hand(llama, kept)[0], abs=1e-4)
    [shorter] = Scorer(llama, max_length=10).score_tokens([whole])
    assert shorter.cut == 400 + 3 - 11
    with pytest.raises(ValueError, match="continuation: got '3 tokens'; allowed: at most 2"):
        Scorer(llama, max_length=2).score_tokens([whole])


def test_a_model_that_keeps_no_cache(subjects, by_hand):
    torch.manual_seed(0)
    model = subjects.TinyLM(max_len=200)
    asked = [TokenRequest(tuple(range(20)), (1, end)) for end in range(4)]
    scorer = Scorer(model)
    scores = scorer.score_tokens(asked)
    for score, one in zip(scores, asked, strict=True):
        assert score.log_probability == pytest.approx(by_hand(model, one)[0], abs=1e-5)
    assert scorer.model.reuse_note == "the model keeps no cache"


class WrongCache(nn.Module):
    """What it says with a cache is something else."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        x = self.embedding(input_ids)
        # A sum over all tokens so far, in which those of the cache count double.
        total = x.cumsum(1) + (0 if past_key_values is None else 2 * past_key_values[:, None])
        output = type("Output", (), {})()
        output.logits, output.past_key_values = self.head(total), total[:, -1] if use_cache else None
        return output


def test_a_cache_that_says_something_else_is_not_used(by_hand):
    torch.manual_seed(0)
    model = WrongCache()
    asked = [TokenRequest(tuple(range(20)), (1, end)) for end in range(4)]
    scorer = Scorer(model)
    scores = scorer.score_tokens(asked)
    assert scorer.model.reuse_note == "its cache is not used: ValueError: other logits than without it"
    for score, one in zip(scores, asked, strict=True):
        ids = torch.tensor([[*one.context, *one.continuation[:-1]]])
        log_p = model(ids).logits[0].log_softmax(-1)
        assert score.log_probability == pytest.approx(
            (log_p[19, 1] + log_p[20, one.continuation[1]]).item(), abs=1e-5
        )


def test_a_model_that_reads_ahead_is_refused(subjects):
    class Ahead(subjects.TinyLM):
        def visible(self, seq_len):
            return torch.ones(seq_len, seq_len, dtype=torch.bool)

    with pytest.raises(ValueError, match="its outputs depend on later tokens"):
        LanguageModel(Ahead())
    with pytest.raises(ValueError, match="causal: got False; allowed: True"):
        LanguageModel(ModelSpec.of(Ahead, causal=False))
    with pytest.raises(ValueError, match="inputs: got 'vectors'; allowed: 'tokens'"):
        LanguageModel(nn.Linear(4, 4))


def test_a_module_is_used_as_it_is_and_left_in_its_mode(subjects):
    model = subjects.TinyLM()
    model.train()
    model.norm.eval()
    scorer = Scorer(model)
    scorer.score_tokens([TokenRequest((1,), (2,))])
    assert scorer.model.model is model
    assert model.training and not model.norm.training
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_off(subjects):
    torch.manual_seed(0)
    inner = subjects.TinyLM()
    model = nn.Sequential(inner, nn.Dropout(0.5)).train()
    asked = [TokenRequest((1, 2, 3), (4, 5))]
    assert Scorer(model).score_tokens(asked) == Scorer(inner.eval()).score_tokens(asked)


def test_a_factory_is_called_once(subjects):
    made = []

    def build():
        made.append(subjects.TinyLM())
        return made[-1]

    assert Scorer(build).model.model is made[0] and len(made) == 1


def test_few_logits_are_widened_at_once(llama, monkeypatch):
    asked = requests_of(2)
    whole = Scorer(llama).score_tokens(asked)
    monkeypatch.setattr(scoring_module, "_WIDENED", 3 * 258)
    parts = Scorer(llama).score_tokens(asked)
    assert [one.is_greedy for one in whole] == [one.is_greedy for one in parts]
    for one, two in zip(whole, parts, strict=True):
        assert one.log_probability == pytest.approx(two.log_probability, abs=1e-6)


def test_texts(llama, byte_tokenizer, by_hand):
    [score] = loglikelihoods(llama, byte_tokenizer, [("ab ", "cd")])
    wanted, _ = by_hand(llama, TokenRequest((97, 98), (32, 99, 100)))
    assert score.log_probability == pytest.approx(wanted, abs=1e-5)
    assert loglikelihoods(llama, byte_tokenizer, []) == []


class Overflowing(nn.Module):
    """Gives NaN once it has read three 7s."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids).masked_fill(((ids == 7).cumsum(-1) == 3)[..., None], torch.nan)


def test_what_is_no_number_is_an_error_and_no_score(subjects):
    scorer = Scorer(Overflowing(subjects.TinyLM()))
    sound, broken = TokenRequest((1, 2), (3, 4)), TokenRequest((7, 7, 7), (3, 4))
    assert scorer.score_tokens([sound])[0].log_probability < 0
    message = "log-probabilities of Overflowing: got 'NaN for 2 of 3 requests'; allowed: numbers"
    with pytest.raises(ValueError, match=message):
        scorer.score_tokens([broken, sound, TokenRequest((7, 7, 7), (5,))])


def test_an_impossible_continuation_is_a_score(subjects):
    class Never(subjects.TinyLM):
        def forward(self, ids):
            logits = super().forward(ids)
            return logits.index_fill(-1, torch.tensor([3]), -torch.inf)

    [score] = Scorer(Never()).score_tokens([TokenRequest((1, 2), (3,))])
    assert score.log_probability == -float("inf")


def test_errors_name_what_is_wrong(llama):
    with pytest.raises(ValueError, match="token id: got 258; allowed: 0 to 257, the vocabulary of Llama"):
        Scorer(llama).score_tokens([TokenRequest((1,), (258,))])
    with pytest.raises(ValueError, match="tokenizer: got None"):
        Scorer(llama).score([("a", "b")])
    with pytest.raises(ValueError, match="batch_size: got 0"):
        Scorer(llama, batch_size=0)
    with pytest.raises(ValueError, match="max_length: got 4; allowed: what the LanguageModel was given"):
        Scorer(LanguageModel(llama), max_length=4)
    with pytest.raises(ValueError, match="context: got"):
        TokenRequest((), (1,))
