"""What tests of quality share: tiny models, tokenizers, and log-probabilities summed by hand."""

import copy

import pytest
import torch

from stackwise.data.tokenizer import ByteTokenizer
from stackwise.model import create_simple_rack

VOCAB = 258


@pytest.fixture(scope="session")
def byte_tokenizer():
    return ByteTokenizer(["bos", "eos"])


def tiny_llama(max_length=256, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def tiny_rack(**settings):
    torch.manual_seed(0)
    return create_simple_rack(2, 1, d_model=32, d_ff=64, n_heads=4, vocab_size=VOCAB, **settings).eval()


@pytest.fixture(scope="session")
def llama():
    return tiny_llama()


@pytest.fixture(scope="session")
def rack():
    return tiny_rack()


@pytest.fixture(scope="session")
def by_hand():
    """(model, request) -> log-probability and whether it is greedy, in float64, one sequence at a time."""
    doubled = {}

    @torch.no_grad()
    def score(model, request):
        if id(model) not in doubled:
            doubled[id(model)] = (model, copy.deepcopy(model).double().eval())
        ids = torch.tensor([[*request.context, *request.continuation]])
        output = doubled[id(model)][1](ids[:, :-1])
        log_p = getattr(output, "logits", output)[0].log_softmax(-1)
        positions = range(len(request.context) - 1, ids.shape[1] - 1)
        tokens = ids[0, len(request.context) :].tolist()
        total = sum(log_p[p, t].item() for p, t in zip(positions, tokens, strict=True))
        return total, all(int(log_p[p].argmax()) == t for p, t in zip(positions, tokens, strict=True))

    return score


@pytest.fixture(scope="session")
def hf_tokenizer():
    """Of transformers, trained on a page of text, which puts a token before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from stackwise.data.text import documentation_pages

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(documentation_pages()[:3], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
