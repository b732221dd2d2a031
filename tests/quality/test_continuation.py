"""Continuations: what a model writes, row by row as it would alone, and where it ends."""

import pytest
import torch

from stackwise.data.tokenizer import ByteTokenizer
from stackwise.quality import Sampling, Scorer, continue_texts
from tests.quality.test_scoring import WrongCache, longrope

CONTEXTS = ["Hello", "A rather longer context", "", "x"]


def greedy(model, ids, count):
    """By reading everything again for each token."""
    ids, new = torch.tensor([ids]), []
    with torch.no_grad():
        for _ in range(count):
            output = model(ids)
            token = getattr(output, "logits", output)[0, -1].argmax()
            new.append(token.item())
            ids = torch.cat((ids, token[None, None]), dim=1)
    return new


@pytest.mark.parametrize("options", [{}, {"reuse": False}], ids=str)
def test_texts_that_cross_where_angles_change(options, byte_tokenizer):
    model, contexts = longrope(first=24), ["x" * 20, "y" * 30, "z"]
    written = continue_texts(Scorer(model, byte_tokenizer, **options), contexts, max_new_tokens=30)
    for context, text in zip(contexts, written, strict=True):
        assert text == byte_tokenizer.decode(until_end(greedy(model, list(context.encode()), 30)))


def test_a_cache_that_says_something_else_is_not_written_with(byte_tokenizer):
    torch.manual_seed(0)
    model = WrongCache()
    model.embedding, model.head = torch.nn.Embedding(258, 8), torch.nn.Linear(8, 258)
    scorer = Scorer(model, byte_tokenizer, max_length=64)
    written = continue_texts(scorer, CONTEXTS, max_new_tokens=12)
    for context, text in zip(CONTEXTS, written, strict=True):
        ids = until_end(greedy(model, list(context.encode()) or [256], 12))
        assert text == byte_tokenizer.decode(ids)
    assert scorer.model.reuse_note == "its cache is not used: ValueError: other logits than without it"


def until_end(ids):
    return ids[: ids.index(257)] if 257 in ids else ids


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}, {"reuse": False}, {"batch_size": 3}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "rack"])
def test_as_one_by_one(kind, options, request, byte_tokenizer):
    model = request.getfixturevalue(kind)
    written = continue_texts(Scorer(model, byte_tokenizer, **options), CONTEXTS, max_new_tokens=9)
    for context, text in zip(CONTEXTS, written, strict=True):
        ids = until_end(greedy(model, list(context.encode()) or [256], 9))
        assert text == byte_tokenizer.decode(ids)


class Spelling(torch.nn.Module):
    """What follows each byte is the next one; after "z" the text ends."""

    def __init__(self):
        super().__init__()
        self.next = torch.nn.Embedding(258, 258)
        with torch.no_grad():
            table = torch.zeros(258, 258)
            table[torch.arange(257), torch.arange(1, 258)] = 9.0
            table[ord("z")] = torch.zeros(258).index_fill(0, torch.tensor([257]), 9.0)
            self.next.weight.copy_(table)

    def forward(self, ids):
        return self.next(ids)


def test_where_a_text_ends(byte_tokenizer):
    scorer = Scorer(Spelling(), byte_tokenizer)
    contexts = ["a", "vw", "x"]
    assert continue_texts(scorer, contexts, max_new_tokens=4) == ["bcde", "xyz", "yz"]
    assert continue_texts(scorer, contexts, max_new_tokens=4, until=["e", "yz"]) == ["bcd", "x", ""]
    assert continue_texts(scorer, contexts, max_new_tokens=4, until=["", "cd"]) == ["b", "xyz", "yz"]
    assert continue_texts(scorer, [], max_new_tokens=4) == []


def test_end_tokens_come_from_tokenizer_and_model_unless_specified(byte_tokenizer):
    model = Spelling()
    model.generation_config = type("Config", (), {"eos_token_id": [ord("x"), ord("e")]})()
    contexts = ["a", "v", "y"]
    assert continue_texts(Scorer(model, byte_tokenizer), contexts, max_new_tokens=5) == ["bcd", "w", "z"]
    scorer = Scorer(model, byte_tokenizer, eos_token_id=[ord("c"), ord("w")])
    assert continue_texts(scorer, ["a", "v", "x"], max_new_tokens=2) == ["b", "", "yz"]
    assert Scorer(model, byte_tokenizer, eos_token_id=5).eos_token_ids == {5}
    with pytest.raises(ValueError, match="eos_token_id: got -1; allowed: an integer >= 0"):
        Scorer(model, byte_tokenizer, eos_token_id=[-1])


def test_a_special_token_ends_a_text_by_its_name():
    """As chat formats do; it is left out of the decoded text, in which `until` is looked for."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0} | {chr(i): i for i in range(33, 127)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["d"])
    scorer = Scorer(Spelling(), tokenizer, prefix_token_id=0)
    assert continue_texts(scorer, ["a"], max_new_tokens=4) == ["bce"]
    assert continue_texts(scorer, ["a", "c"], max_new_tokens=4, until=["d"]) == ["bc", ""]
    # Of no token by itself: nothing ends at what the tokenizer does not know.
    assert continue_texts(scorer, ["a"], max_new_tokens=4, until=["\n"]) == ["bce"]


def test_ids_beyond_gaps_of_a_vocabulary_are_written():
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 5, "c": 200, "[UNK]": 1}, unk_token="[UNK]")

    class Third(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.next = torch.nn.Embedding(258, 258)
            with torch.no_grad():
                self.next.weight.zero_()[:, 200] = 9.0
                self.next.weight[:, 257] = 10.0  # no id of the tokenizer

        def forward(self, ids):
            return self.next(ids)

    scorer = Scorer(Third(), tokenizers.Tokenizer(model), prefix_token_id=0)
    assert scorer.texts.vocab_size == 201
    assert continue_texts(scorer, ["a"], max_new_tokens=3) == ["c c c"]


def test_logits_that_are_no_numbers_are_an_error(byte_tokenizer):
    class Broken(Spelling):
        def forward(self, ids):
            return super().forward(ids).masked_fill((ids == ord("d"))[..., None], torch.nan)

    scorer = Scorer(Broken(), byte_tokenizer)
    # What a row computes behind its end is not looked at.
    assert continue_texts(scorer, ["a", "x"], max_new_tokens=3) == ["bcd", "yz"]
    with pytest.raises(ValueError, match="logits of Broken: got 'NaN'; allowed: numbers"):
        continue_texts(scorer, ["a", "x"], max_new_tokens=4)


def test_a_context_is_cut_where_there_is_no_room(byte_tokenizer):
    seen = []

    class Watching(Spelling):
        max_seq_len = 16

        def forward(self, ids):
            seen.append(ids.shape[1])
            return super().forward(ids)

    scorer = Scorer(Watching(), byte_tokenizer)
    seen.clear()
    assert continue_texts(scorer, ["x" * 30 + "a"], max_new_tokens=4) == ["bcde"]
    assert seen == [12, 13, 14, 15]
    with pytest.raises(ValueError, match="max_new_tokens: got 16; allowed: below 16"):
        continue_texts(scorer, ["a"], max_new_tokens=16)


def test_draws_have_the_wanted_probabilities():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4)

    def shares(**options):
        torch.manual_seed(0)
        return (Sampling(**options)(logits).bincount(minlength=4) / len(logits)).tolist()

    assert shares() == [1, 0, 0, 0]
    assert shares(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.015)
    half = [p**2 / (0.25 + 0.09 + 0.0225 + 0.0025) for p in (0.5, 0.3, 0.15, 0.05)]
    assert shares(temperature=0.5) == pytest.approx(half, abs=0.015)
    assert shares(temperature=1.0, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.015)
    # 0.5 + 0.3 does not reach 0.85: the third, which crosses it, is drawn too.
    assert shares(temperature=1.0, top_p=0.85) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.015)


def test_a_seed_gives_the_same_texts_and_leaves_the_callers_draws_alone(llama, byte_tokenizer):
    scorer = Scorer(llama, byte_tokenizer)
    state = torch.random.get_rng_state()
    drawn = [
        continue_texts(scorer, CONTEXTS, max_new_tokens=8, sampling=Sampling(1.0, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("option, value", [("temperature", -1.0), ("top_p", 0.0), ("top_k", 0)], ids=str)
def test_options_out_of_range(option, value):
    with pytest.raises(ValueError, match=f"{option}: got {value}"):
        Sampling(**{option: value})


def test_a_number_draws_what_its_share_is():
    logits = torch.tensor([0.0, 0.5, 0.3, 0.0, 0.2]).log()
    uniform = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = Sampling(1.0)(logits.expand(20_000, 5), uniform).bincount(minlength=5) / 20_000
    assert drawn.tolist() == pytest.approx([0, 0.5, 0.3, 0, 0.2], abs=1e-4)
    ends = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert Sampling(1.0, top_k=2)(logits.expand(2, 5), ends).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 5e-324])
def test_a_tiny_temperature_draws_the_most_likely(temperature):
    logits = torch.tensor([[5.0, 1.0, 0.0, 2.0], [-torch.inf, 1.0, 3.0, 2.0]])
    uniform = torch.tensor([0.3, 0.9], dtype=torch.float64)
    assert Sampling(temperature)(logits, uniform).tolist() == [0, 2]
    assert Sampling(temperature, top_p=0.9, top_k=3)(logits).tolist() == [0, 2]


@pytest.mark.parametrize("kind", ["llama", "rack"])
def test_with_seeds_of_their_own_texts_depend_on_no_others(kind, request, byte_tokenizer):
    model, seeds = request.getfixturevalue(kind), [5, 6, 7, 8]
    sampling = Sampling(1.0, top_p=0.95)

    def write(contexts, seeds, **options):
        scorer = Scorer(model, byte_tokenizer, **options)
        return continue_texts(scorer, contexts, max_new_tokens=8, sampling=sampling, seeds=seeds)

    together = write(CONTEXTS, seeds)
    assert together == write(CONTEXTS, seeds, batch_size=1) == write(CONTEXTS, seeds, batch_size=3)
    assert together[::-1] == write(CONTEXTS[::-1], seeds[::-1])
    assert write(["x"] * 3, [1, 1, 2])[0] == write(["x"] * 3, [3, 1, 2])[1]
    assert len(set(write(["x"] * 3, [1, 2, 3]))) == 3
    with pytest.raises(ValueError, match="seeds: got 1; allowed: one for each of 4 contexts"):
        write(CONTEXTS, [1])


class Stripping(ByteTokenizer):
    """As that of Llama 2: a space at the beginning is taken for the mark of a word, and left out."""

    def decode(self, ids):
        return super().decode(ids).removeprefix(" ")


@pytest.mark.parametrize(("joined", "text"), [(False, '!"#'), (True, ' !"#')])
def test_a_space_at_the_beginning_is_kept_where_it_is_joined(joined, text):
    scorer = Scorer(Spelling(), Stripping(["bos", "eos"]))
    for context in ("\x1f", " b\x1f", "a" * 40 + "\x1f"):
        assert continue_texts(scorer, [context], max_new_tokens=4, joined=joined) == [text]
    # An end is looked for in what is kept.
    assert continue_texts(scorer, ["\x1f"], max_new_tokens=4, until=["#"], joined=True) == [' !"']
