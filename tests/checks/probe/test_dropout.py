"""Without dropout: whichever way torch is asked for it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from stackwise.checks.probe.dropout import WithoutDropout

# (B, T, D)
INPUT = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def attention(x, **options):
    made = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    return lambda: made(x, x, x)[0]


def recurrent(kind, **options):
    made = kind(8, 8, 2, batch_first=True, **options)
    return lambda: made(INPUT)[0]


def layer(p):
    made = nn.TransformerEncoderLayer(8, 2, 8, p, batch_first=True)
    return lambda: made(INPUT)


def packed(p):
    made = nn.LSTM(8, 8, 2, dropout=p, batch_first=True)
    return lambda: made(pack_padded_sequence(INPUT, [3, 2], batch_first=True))[0].data


WAYS = {
    "module": lambda p: lambda: nn.Dropout(p)(INPUT),
    "function": lambda p: lambda: F.dropout(INPUT, p),
    "alpha": lambda p: lambda: nn.AlphaDropout(p)(INPUT),
    "channels": lambda p: lambda: F.dropout1d(INPUT, p),
    "native": lambda p: lambda: torch.native_dropout(INPUT, p, True)[0],
    "native by name": lambda p: lambda: torch.native_dropout(INPUT, p, train=True)[0],
    "sdpa": lambda p: lambda: F.scaled_dot_product_attention(INPUT, INPUT, INPUT, dropout_p=p),
    "sdpa by place": lambda p: lambda: F.scaled_dot_product_attention(INPUT, INPUT, INPUT, None, p),
    "attention": lambda p: attention(INPUT, dropout=p),
    "layer": layer,
    "lstm": lambda p: recurrent(nn.LSTM, dropout=p),
    "gru": lambda p: recurrent(nn.GRU, dropout=p),
    "rnn": lambda p: recurrent(nn.RNN, dropout=p),
    "relu rnn": lambda p: recurrent(nn.RNN, dropout=p, nonlinearity="relu"),
    "packed": packed,
}


def test_recomputation_in_the_backward_pass():
    linear, last = nn.Linear(8, 8), nn.Linear(8, 8)

    def layer(x, p):
        return last(F.dropout(linear(x).square(), p, training=True))

    def gradient(p):
        linear.zero_grad()
        output = checkpoint(layer, INPUT, p, use_reentrant=False)
        output.square().sum().backward()
        return linear.weight.grad.clone()

    expected = gradient(0.0)
    with WithoutDropout():
        assert torch.equal(gradient(0.5), expected)


@pytest.mark.parametrize("name", WAYS)
def test_each_way(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropping = WAYS[name](0.5)
        torch.manual_seed(0)
        plain = WAYS[name](0.0)
        assert not torch.equal(dropping(), dropping())
        with WithoutDropout():
            got = dropping()
        torch.testing.assert_close(got, plain(), rtol=1e-6, atol=1e-6)
