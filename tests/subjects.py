"""Sound models that tests drive, each from a function without arguments; mutants live beside their tests."""

import math
import types
import warnings

import torch
from torch import nn

from stackwise.checks import check_model
from stackwise.model import create_simple_rack
from stackwise.subject.spec import ModelSpec


def ask(model, name, **arguments):
    [result] = check_model(model, checks=[name], **arguments)
    return result


def reads(model, inputs, position, token):
    """How strongly output `position` of row 0 depends on input `token`, by its gradient."""
    entered = []

    def keep(module, arguments, output):
        entered.append(output.detach().requires_grad_())
        return entered[-1]

    if inputs.is_floating_point():
        entered.append(inputs.detach().clone().requires_grad_())
        handle, inputs = None, entered[0]
    else:
        embedding = next(
            m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings > int(inputs.max())
        )
        handle = embedding.register_forward_hook(keep)
    try:
        output = model(inputs)
    finally:
        if handle:
            handle.remove()
    output = getattr(output, "logits", output)
    weights = torch.linspace(-1, 1, output.shape[-1])
    [gradient] = torch.autograd.grad((output[0, position] * weights).sum(), entered[0])
    return gradient[0, token].abs().max().item()


class TinyLM(nn.Module):
    """A causal transformer written out by hand: a mutant overrides the one method that it breaks."""

    def __init__(self, vocab_size=29, d_model=16, n_heads=2, n_layers=2, max_len=64):
        super().__init__()
        self.n_heads = n_heads
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.places = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(d_model),
                    "qkv": nn.Linear(d_model, 3 * d_model),
                    "out": nn.Linear(d_model, d_model),
                    "mlp": nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, d_model), nn.GELU()),
                }
            )
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        # torch's default would give a first loss at the edge of what initial_loss calls usual.
        nn.init.normal_(self.head.weight, std=0.05)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(self.place_ids(ids.shape[1]))
        for layer in self.layers:
            x = x + self.attend(layer, layer["norm"](x))
            x = self.mix(x + layer["mlp"](x))
        return self.head(self.norm(x))

    def attend(self, layer, x):
        q, k, v = (self.split(y) for y in layer["qkv"](x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.visible(x.shape[1]), -torch.inf)
        return layer["out"]((self.weigh(scores) @ v).transpose(1, 2).flatten(2))

    def split(self, x):
        return x.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)

    def visible(self, seq_len):
        return torch.ones(seq_len, seq_len, dtype=torch.bool).tril()

    def place_ids(self, seq_len):
        return torch.arange(seq_len)

    def weigh(self, scores):
        return scores.softmax(dim=-1)

    def mix(self, x):
        return x


class GRULM(nn.Module):
    def __init__(self, vocab_size=50, d_model=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.recurrence = nn.GRU(d_model, d_model, batch_first=True)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids):
        return self.head(self.recurrence(self.embedding(ids))[0])


class ConvLM(nn.Module):
    padding = (2, 0)

    def __init__(self, vocab_size=50, d_model=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.convolution = nn.Conv1d(d_model, d_model, 3)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, ids):
        x = nn.functional.pad(self.embedding(ids).transpose(1, 2), self.padding)
        return self.head(self.convolution(x).relu().transpose(1, 2))


class Keeping(nn.Module):
    """Raises `error` where it is asked for fewer logits."""

    def __init__(self, error):
        super().__init__()
        self.embedding, self.head, self.error = nn.Embedding(31, 8), nn.Linear(8, 31), error

    def forward(self, ids, logits_to_keep=0):
        if logits_to_keep:
            raise self.error
        return self.head(self.embedding(ids))


def tiny():
    return TinyLM()


def rack(**changes):
    sizes = {
        "n_stacks": 2,
        "blocks_per_stack": 2,
        "d_model": 32,
        "d_ff": 48,
        "n_heads": 4,
        "vocab_size": 61,
    }
    return create_simple_rack(**sizes | changes)


def window_rack():
    return rack(sliding_window=5)


def grouped_rack():
    return rack(n_kv_heads=2)


def layernorm_rack():
    return rack(norm="layernorm", tie_embeddings=False)


def dropout_rack():
    return rack(dropout=0.1)


def bidirectional_rack():
    return rack(attention_mode="bidirectional")


def _sizes():
    return {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_sizes(), num_key_value_heads=2))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
        )
    )


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_sizes()))


def x_transformers():
    with warnings.catch_warnings():
        # It scripts a function at import, which torch has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        import x_transformers
    return x_transformers


def x_decoder():
    x = x_transformers()
    return x.TransformerWrapper(
        num_tokens=80, max_seq_len=64, attn_layers=x.Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    )


def x_encoder():
    x = x_transformers()
    return x.TransformerWrapper(
        num_tokens=80, max_seq_len=64, attn_layers=x.Encoder(dim=32, depth=2, heads=4)
    )


def gru():
    return GRULM()


def conv():
    return ConvLM()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def causal_encoder():
    """Vectors to vectors, with a claim of causality."""

    def forward(model, inputs):
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], dtype=inputs.dtype)
        return model(inputs, mask=mask, is_causal=True)

    return ModelSpec.of(encoder, name="causal_encoder", causal=True, forward=forward)


def wrapped(wrap):
    """A factory of a tiny model whose output is `wrap(logits)`."""

    class Wrapped(TinyLM):
        def forward(self, ids):
            return wrap(super().forward(ids))

    return Wrapped


in_dict = wrapped(lambda logits: {"logits": logits, "loss": None})
in_tuple = wrapped(lambda logits: (logits, "cache"))
in_object = wrapped(lambda logits: types.SimpleNamespace(logits=logits, loss=None))
