"""Positions: an unknown order, ignored positions, untrained rows and absolute rotations are found."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stackwise.subject.spec import ModelSpec
from tests.zoo.forward import one_row_of_positions_for_all_tokens
from tests.zoo.gpt import GPT, Encoder, Placed, encoder, gpt, placed, spec_of


class Unordered(Encoder):
    """Bag of words: no rotation, and each position sees all."""

    before = after = 100

    def rotate(self, x, positions):
        return x


class OneLayerUnordered(GPT):
    n_layers = 1

    def rotate(self, x, positions):
        return x


class Alone(GPT):
    """No position reads another."""

    def visible(self, T, past, keep, documents):
        return torch.eye(T, dtype=torch.bool)[None, None]


@pytest.mark.parametrize("make", [gpt, placed, encoder])
def test_order_of_inputs_changes_the_output(subjects, make):
    assert subjects.ask(make(), "token_order").status == "passed"


@pytest.mark.parametrize("build, causal", [(Unordered, False), (OneLayerUnordered, True)])
def test_unknown_order_is_a_warning(subjects, build, causal):
    spec = spec_of(build, causal=causal, decode=None, labelled_loss=None, window=None)
    result = subjects.ask(spec, "token_order")
    assert result.status == "warned"
    assert "positionless=True" in result.advice


def test_one_row_of_positions_for_all_tokens_fails(subjects):
    result = subjects.ask(one_row_of_positions_for_all_tokens(), "token_order")
    assert (result.status, result.where) == ("failed", "wpe.weight"), result


class Axial(GPT):
    """Positions as rows and columns of blocks of 64."""

    def __init__(self):
        super().__init__()
        self.pos_row, self.pos_column = nn.Embedding(64, self.width), nn.Embedding(64, self.width)

    def embed(self, input_ids):
        places = torch.arange(input_ids.shape[1])
        return super().embed(input_ids) + self.pos_row(places // 64) + self.pos_column(places % 64)

    def rotate(self, x, positions):
        return x


def test_row_of_blocks_beside_other_positions_passes(subjects):
    spec = spec_of(Axial, decode=None, masked=None, packed=None)
    assert subjects.ask(spec, "token_order").status == "passed"


class PooledFrames(nn.Module):
    """Vectors with sinusoids -> mean of the outputs of attention."""

    has_row_for_each = True

    def __init__(self):
        super().__init__()
        self.projection, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        angles = torch.arange(65)[:, None] * 10000 ** (-torch.arange(8) / 8)
        self.register_buffer("pe", torch.cat((angles.sin(), angles.cos()), dim=1)[None])

    def forward(self, frames):
        n = frames.shape[1]
        x = self.projection(frames) + (self.pe[:, :n] if self.has_row_for_each else self.pe[:, n])
        return self.head(x + self.attention(x, x, x)[0]).mean(1)


def test_one_position_for_all_frames_fails(subjects):
    facts = {"inputs": "vectors", "width": 6, "per_position": False, "causal": False, "max_length": 64}
    buggy = type("OnePosition", (PooledFrames,), {"has_row_for_each": False})
    result = subjects.ask(ModelSpec.of(buggy, **facts), "token_order")
    assert (result.status, "pe" in result.where) == ("failed", True)
    assert subjects.ask(ModelSpec.of(PooledFrames, **facts), "token_order").status == "passed"


class SetOfPoints(nn.Module):
    """Attention over points, without an order, with tensors that are named like positions."""

    def __init__(self, name, part):
        super().__init__()
        self.projection, self.head = nn.Linear(6, 16), nn.Linear(16, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.part = name
        setattr(self, name, part)

    def forward(self, points):
        x, part = self.projection(points), getattr(self, self.part)
        if isinstance(part, nn.Linear):
            x = x + part(points)
        elif isinstance(part, nn.GRUCell):
            x = part(x.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        queries = part.expand(len(points), -1, -1) if isinstance(part, nn.Parameter) else x
        return self.head(queries + self.attention(queries, x, x)[0]).mean(1)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("query_pos", lambda: nn.Parameter(torch.randn(100, 16))),
        ("pos_mlp", lambda: nn.Linear(6, 16)),
        ("pos_cell", lambda: nn.GRUCell(16, 16)),
    ],
)
def test_order_of_a_set_of_vectors_is_not_asked(subjects, name, make):
    spec = ModelSpec.of(
        lambda: SetOfPoints(name, make()), inputs="vectors", width=6, per_position=False, causal=False
    )
    assert subjects.ask(spec, "token_order").status == "not applicable"


def test_order_of_images_is_not_asked(subjects):
    class ViT(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.head = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 10)
            self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 16, 32))
            self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

        def forward(self, images):
            x = self.patch(images).flatten(2).mT + self.pos_embed
            return self.head(self.encoder(x).mean(1))

    assert subjects.ask(ModelSpec.of(ViT), "token_order").status == "not applicable"


def test_order_of_a_model_that_refuses_other_inputs_is_not_asked(subjects):
    class Separated(GPT):
        def embed(self, input_ids):
            if not (input_ids[:, -2] == 7).all():
                raise IndexError("no separator")
            return super().embed(input_ids)

    def batch(batch_size, seq_len, generator):
        ids = torch.randint(8, 30, (batch_size, seq_len), generator=generator)
        ids[:, -2] = 7
        return ids

    spec = spec_of(Separated, make_batch=batch)
    assert subjects.ask(spec, "token_order").status == "not applicable"
    assert subjects.ask(spec, "token_effect").status == "not applicable"


def test_order_needs_inputs_with_an_effect(subjects):
    assert subjects.ask(spec_of(Alone), "token_order").status == "not applicable"
    assert subjects.ask(spec_of(positionless=True), "token_order").status == "not applicable"


class RotaryFrequencies(nn.Module):
    def __init__(self, head_dim):
        super().__init__()
        half = torch.arange(0, head_dim, 2) / head_dim
        self.register_buffer("inv_freq", 10000.0**-half, persistent=False)


class Rotary(GPT):
    """Takes position_ids, and rotates queries and keys."""

    def __init__(self):
        super().__init__()
        self.rotary = RotaryFrequencies(self.head_dim)

    def forward(self, input_ids, *args, position_ids=None, **kwargs):
        self.given = position_ids
        return super().forward(input_ids, *args, **kwargs)

    def positions(self, *arguments):
        return super().positions(*arguments) if self.given is None else self.given

    def attend(self, layer, x, positions, visible, cache):
        self.rotations = 0
        return super().attend(layer, x, positions, visible, cache)

    def rotate(self, x, positions):
        self.rotations += 1  # queries come first
        return super().rotate(x, positions)


class QueriesOnly(Rotary):
    def rotate(self, x, positions):
        return x if self.rotations else super().rotate(x, positions)


class KeysOnly(Rotary):
    def rotate(self, x, positions):
        rotated = super().rotate(x, positions)
        return rotated if self.rotations == 2 else x


class ValuesToo(Rotary):
    def split(self, x):
        heads = super().split(x)
        positions = torch.arange(x.shape[1]).expand(x.shape[:2]) if self.given is None else self.given
        return GPT.rotate(self, heads, positions) if self.rotations == 2 else heads


class Sinusoids(Placed):
    """Adds absolute sinusoids, whose frequencies have the usual name of rotary ones."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** -torch.arange(0, 1, 2 / self.width), persistent=False)

    def forward(self, input_ids, *args, position_ids=None, **kwargs):
        self.given = position_ids
        return super().forward(input_ids, *args, **kwargs)

    def embed(self, input_ids):
        T = input_ids.shape[1]
        positions = torch.arange(T).expand(input_ids.shape) if self.given is None else self.given
        angles = positions[..., None] * self.inv_freq
        return GPT.embed(self, input_ids) + torch.cat((angles.sin(), angles.cos()), dim=-1)


class PaddedSinusoids(Placed):
    """A table of absolute sinusoids whose first row is zero, as that of a padding id."""

    def __init__(self):
        super().__init__()
        half = 100.0 ** -torch.arange(0, 1, 2 / self.width)
        angles = torch.outer(torch.arange(64.0), half)
        table = torch.cat((angles.sin(), angles.cos()), dim=-1)
        table[0] = 0
        self.register_buffer("table", table, persistent=False)

    def embed(self, input_ids):
        return GPT.embed(self, input_ids) + self.table[1 : input_ids.shape[1] + 1]


class PropertyHead(nn.Module):
    """Its name contains "rope"."""

    def forward(self, positions):
        return positions


class SinusoidsBesideAProperty(Sinusoids):
    def __init__(self):
        super().__init__()
        self.property = PropertyHead()
        self.frequency = self._buffers.pop("inv_freq")

    @property
    def inv_freq(self):
        return self.frequency


class PackedByGaps(Rotary):
    """Without a mask, a gap of the positions starts a new document, as in transformers. No rotation."""

    def forward(self, input_ids, *args, attention_mask=None, position_ids=None, **kwargs):
        return super().forward(input_ids, attention_mask, *args, position_ids=position_ids, **kwargs)

    def visible(self, T, past, keep, documents):
        if self.given is not None and keep is None:
            documents = (self.given.diff(prepend=self.given[:, :1] - 1) != 1).cumsum(1)
        return super().visible(T, past, keep, documents)

    def rotate(self, x, positions):
        return x


class Compatible(GPT):
    """Has no positions, and takes the argument."""

    def forward(self, input_ids, *args, position_ids=None, **kwargs):
        return super().forward(input_ids, *args, **kwargs)


class Ignored(Rotary):
    def positions(self, *arguments):
        return GPT.positions(self, *arguments)


class RotaryAngles(RotaryFrequencies):
    def forward(self, length, positions=None, keep=None):
        positions = torch.arange(length) if positions is None else positions
        return positions[:, None] * self.inv_freq


class Computed(GPT):
    """A module counts positions from 0, and computes the angles."""

    def __init__(self):
        super().__init__()
        self.rotary = RotaryAngles(self.head_dim)

    def angles(self, n):
        return self.rotary(n)

    def rotate(self, x, positions):
        angles = self.angles(x.shape[2])
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


class ComputedOfPositions(Computed):
    """Calls the method with positions, as x-transformers does."""

    def angles(self, n):
        return self.rotary.forward(n, positions=torch.arange(n))


class ComputedInPairs(Computed):
    """Keys are rotated in interleaved pairs, and queries in halves."""

    def rotate(self, x, positions):
        if x.shape[1] == self.n_heads:
            return super().rotate(x, positions)
        pairs = x.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
        rotated = super().rotate(pairs, positions)
        return rotated.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)


class ComputedByMasks(Computed):
    def angles(self, n):
        return self.rotary(n, torch.arange(n), keep=torch.ones(1, n, dtype=torch.bool))


class ComputedOfLengths(Computed):
    """Takes even lengths only."""

    def embed(self, input_ids):
        if input_ids.shape[1] % 2:
            raise ValueError("an odd length")
        return super().embed(input_ids)


class GatedQueriesOnly(Rotary):
    """The second layer rotates queries only, behind a gate that is closed in a new model."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(self.width))

    def attend(self, layer, x, *args):
        self.is_second = layer is self.layers[1]
        y, cache = super().attend(layer, x, *args)
        return (y * self.gate if self.is_second else y), cache

    def rotate(self, x, positions):
        return x if self.is_second and self.rotations else super().rotate(x, positions)


class NormAfterRotation(Rotary):
    """A norm with weights follows the rotation, as in HunYuan."""

    def __init__(self):
        super().__init__()
        self.rotated = nn.RMSNorm(self.head_dim)

    def rotate(self, x, positions):
        return self.rotated(super().rotate(x, positions))


class Tabled(GPT):
    """Rotates by tables of cos and sin."""

    paired = False

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        for name, table in self.tables(angles.cos(), angles.sin()).items():
            self.register_buffer(name, table, persistent=False)

    def tables(self, cos, sin):
        return {"cos": cos, "sin": sin}

    def rotate(self, x, positions):
        T = x.shape[2]
        cos, sin = self.cos[:T], self.sin[:T]
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


class TabledQueries(Tabled):
    def rotate(self, x, positions):
        return super().rotate(x, positions) if x.shape[1] == self.n_heads else x


class TabledPairs(Tabled):
    def tables(self, cos, sin):
        return {"table": torch.stack((cos, sin), dim=-1)}

    def rotate(self, x, positions):
        self.cos, self.sin = self.table.unbind(-1)
        return super().rotate(x, positions)


class TabledFromOne(Tabled):
    """Reads the tables from the second row on."""

    def rotate(self, x, positions):
        cos, sin = (table[1 : x.shape[2] + 1] for table in (self.cos, self.sin))
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


class TabledNarrow(Tabled):
    def tables(self, cos, sin):
        return {"cos": cos.bfloat16().float(), "sin": sin.bfloat16().float()}


class TabledUnread(Tabled):
    def rotate(self, x, positions):
        return GPT.rotate(self, x, positions)


@pytest.mark.parametrize(
    "build, status",
    [
        (Rotary, "passed"),
        (QueriesOnly, "failed"),
        (KeysOnly, "failed"),
        (ValuesToo, "failed"),
        (NormAfterRotation, "warned"),
        (Computed, "passed"),
        (ComputedOfPositions, "passed"),
        (ComputedInPairs, "failed"),
        (Tabled, "passed"),
        (TabledPairs, "passed"),
        (TabledFromOne, "passed"),
        (TabledNarrow, "passed"),
        (Sinusoids, "warned"),
        (PaddedSinusoids, "not applicable"),
        (SinusoidsBesideAProperty, "not applicable"),
        (ComputedOfLengths, "not applicable"),
        (ComputedByMasks, "passed"),
        (GatedQueriesOnly, "failed"),
        (PackedByGaps, "not applicable"),
        (TabledQueries, "failed"),
        (TabledUnread, "not applicable"),
        (GPT, "not applicable"),
        (Placed, "not applicable"),
    ],
)
def test_rotary_positions_are_relative(subjects, build, status):
    result = subjects.ask(spec_of(build), "rotary_shift")
    assert result.status == status, result
    if status == "failed":
        assert result.value > 0.05


class RotaryAlong(nn.Module):
    """Rotates (B, T, H, D) by the index along a dimension."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.weights = dim, None

    def forward(self, x, positions=None):
        count = torch.arange(x.shape[self.dim]) if positions is None else positions
        angles = count[:, None] * 10000.0 ** -(torch.arange(4) / 4)
        cos, sin = (t if self.weights is None else t @ self.weights for t in (angles.cos(), angles.sin()))
        shape = [1, x.shape[1], 1, 4] if self.dim == 1 else [1, 1, x.shape[2], 4]
        cos, sin = cos.view(shape).to(x), sin.view(shape).to(x)
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


class RotaryLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv, self.out, self.rotary = nn.Linear(32, 96), nn.Linear(32, 32), RotaryAlong(dim)

    def forward(self, x, positions=None):
        q, k, v = (each.unflatten(-1, (4, 8)) for each in self.qkv(x).chunk(3, dim=-1))
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Layered(nn.Module):
    """Decoder with layers that are modules, and rotary positions."""

    dim = 1

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.ModuleList(RotaryLayer(self.dim) for _ in range(2))

    def forward(self, input_ids, position_ids=None):
        return self.run(input_ids, None if position_ids is None else position_ids[0])

    def run(self, input_ids, positions):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(x)


class CountsPositions(Layered):
    """Takes position_ids, and counts positions itself."""

    def run(self, input_ids, positions):
        return super().run(input_ids, None)


class RotatesHeads(Layered):
    """The angles follow the heads, not the positions."""

    dim = 2

    def forward(self, input_ids):
        return self.run(input_ids, None)


class MixesFrequencies(Layered):
    """Fourier features of several frequencies (FoPE), which are no rotation."""

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.rotary.weights = nn.Parameter(torch.eye(4) + 0.3 * torch.randn(4, 4))


def test_mixed_frequencies_are_no_rotation(subjects):
    assert subjects.ask(ModelSpec.of(MixesFrequencies), "rotary_shift").status == "warned"
    assert subjects.ask(ModelSpec.of(Layered), "rotary_shift").status == "passed"


@pytest.mark.parametrize(
    "build, status", [(Layered, "passed"), (CountsPositions, "failed"), (RotatesHeads, "failed")]
)
def test_rotary_positions_have_an_effect(subjects, build, status):
    assert subjects.ask(ModelSpec.of(build), "position_effect").status == status


@pytest.mark.parametrize("is_named", [True, False])
def test_positions_of_a_declared_call_are_not_replaced(subjects, is_named):
    def forward(model, ids):
        positions = torch.arange(ids.shape[1])[None] + 50
        return model(ids, position_ids=positions) if is_named else model(ids, positions)

    spec = ModelSpec.of(Layered, forward=forward, causal=True)

    for check in ("position_effect", "rotary_shift"):
        assert subjects.ask(spec, check).status == "passed"
    assert subjects.ask(spec, "unexpected_exceptions").status == "passed"
    for check in ("positions", "shifted_positions"):
        result = subjects.ask(spec, check)
        assert result.meaning == "needs a parameter position_ids that forward= does not pass"


@pytest.mark.parametrize(
    "build, status, where",
    [
        (Rotary, "passed", ""),
        (Tabled, "passed", ""),
        (Ignored, "warned", "position_ids"),
        (PackedByGaps, "warned", "position_ids"),
        (TabledUnread, "warned", "tables of cos and sin"),
        (Compatible, "not applicable", ""),
        (GPT, "not applicable", ""),
    ],
)
def test_positions_have_an_effect(subjects, build, status, where):
    result = subjects.ask(spec_of(build), "position_effect")
    assert (result.status, result.where) == (status, where)


class FirstRowIsPadding(Placed):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(64, self.width, padding_idx=0)


class FromOne(Placed):
    def place(self, *arguments):
        return super().place(*arguments) + 1


class FromOneClamped(Placed):
    def place(self, *arguments):
        return (super().place(*arguments) + 1).clamp(max=63)


class FromMinusOne(Placed):
    def place(self, *arguments):
        return (super().place(*arguments) - 1) % 64


class Reserved(FromOne):
    """Two rows are reserved, as in RoBERTa; the second one is that of padding."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(64, self.width, padding_idx=0)


class Enlarged(FromOne):
    """A row is added to the table, as in OPT."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(65, self.width)


@pytest.mark.parametrize(
    "build, status, part",
    [
        (Placed, "passed", "places.weight"),
        (Reserved, "passed", "places.weight"),
        (Enlarged, "passed", "places.weight"),
        (FirstRowIsPadding, "failed", "row 0"),
        (FromOne, "failed", "places.weight"),
        (FromOneClamped, "failed", "places.weight"),
        (FromMinusOne, "warned", "rows 0, 1"),
        (GPT, "not applicable", ""),
    ],
)
def test_each_position_has_its_row(subjects, build, status, part):
    result = subjects.ask(spec_of(build, max_length=64), "position_table")
    assert result.status == status, result
    assert part in result.where


@pytest.mark.parametrize("build, status", [(Placed, "passed"), (FromOne, "warned")])
def test_unread_rows_without_a_known_length(subjects, build, status):
    assert subjects.ask(spec_of(build), "position_table").status == status


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gru", "conv", "x_decoder"])
def test_positions_of_third_party_models(subjects, name):
    spec = ModelSpec.of(getattr(subjects, name))
    for check in ("token_order", "position_effect", "rotary_shift", "position_table"):
        assert subjects.ask(spec, check).status in ("passed", "not applicable"), check


def test_table_of_distances_has_no_positions(subjects):
    class FromForty(Placed):
        def place(self, *arguments):
            return super().place(*arguments) + 40

        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(104, self.width)

    assert subjects.ask(spec_of(FromForty, max_length=None), "position_table").status == "passed"


def test_many_unused_rows_need_few_calls(subjects, monkeypatch):
    class Large(FromMinusOne):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(4096, self.width)

        def place(self, *arguments):
            return (Placed.place(self, *arguments) - 1) % 4096

    calls = []
    forward = Large.forward
    monkeypatch.setattr(Large, "forward", lambda *args, **named: calls.append(1) or forward(*args, **named))
    assert subjects.ask(spec_of(Large, max_length=64), "position_table").status == "warned"
    assert len(calls) < 100


class SinOnTheWrongSide(CountsPositions):
    """Keys are rotated in the other direction. The setting says that positions are rotary."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(rotary_dim=8)
        for layer in self.layers:
            layer.rotary = None

    def run(self, input_ids, positions):
        positions = torch.arange(input_ids.shape[1]) if positions is None else positions
        angles = positions[:, None] * 10000.0 ** -(torch.arange(16) / 16)
        x = self.embedding(input_ids)
        q, k = x, self.head.weight[input_ids % 61]
        q, k = (
            torch.cat((a * c - b * s, b * c + a * s), dim=-1)
            for (a, b), c, s in (
                (q.chunk(2, dim=-1), angles.cos().to(x), angles.sin().to(x)),
                (k.chunk(2, dim=-1), angles.cos().to(x), -angles.sin().to(x)),
            )
        )
        y = nn.functional.scaled_dot_product_attention(q, k, x, is_causal=True)
        return self.head(x + y)


def test_setting_claims_rotary_positions(subjects):
    assert subjects.ask(ModelSpec.of(SinOnTheWrongSide), "rotary_shift").status == "failed"


class LayersWithoutPositions(Layered):
    """A first group of rotary layers, and a larger one of layers without positions."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 32, 0.0, batch_first=True) for _ in range(3)
        )

    def run(self, input_ids, positions):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for layer in self.others:
            x = layer(x, src_mask=mask)
        return self.head(x)


class AddedTables(nn.Module):
    """Absolute positions: tables of cos and sin are added to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        angles = torch.arange(64)[:, None] * 1000.0 ** -(torch.arange(16) / 16)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, input_ids):
        n = input_ids.shape[1]
        x = self.embedding(input_ids) + torch.cat((self.cos[:n], self.sin[:n]), dim=-1)
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


@pytest.mark.parametrize(
    "build, shift", [(LayersWithoutPositions, "passed"), (AddedTables, "not applicable")]
)
def test_positions_of_some_layers_or_of_the_inputs_are_no_mistake(subjects, build, shift):
    assert subjects.ask(ModelSpec.of(build), "position_effect").status == "passed"
    assert subjects.ask(ModelSpec.of(build), "rotary_shift").status == shift


def test_name_of_a_setting_that_contains_rope_by_chance(subjects):
    class Configured(PaddedSinusoids):
        config = SimpleNamespace(property_dim=4, dropemb=0.1)

    assert subjects.ask(spec_of(Configured), "rotary_shift").status == "not applicable"


class Buckets(nn.Module):
    """Causal attention with a bias of each distance. Large distances share a row."""

    halves = False

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.relative_attention_bias = nn.Embedding(16, 1)

    def forward(self, ids):
        x, T = self.embedding(ids), ids.shape[1]
        distance = torch.arange(T)[:, None] - torch.arange(T)
        n = 8 if self.halves else 16
        bucket = distance.clamp(0, n - 1)
        scores = x @ x.mT + self.relative_attention_bias(bucket)[..., 0]
        return self.head(x + scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ x)


class HalfOfTheBuckets(Buckets):
    halves = True


class Window(nn.Module):
    """Image of 4 x 4 pixels, with a bias of each offset. A wrong stride lets offsets share a row."""

    stride = 7

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 16), nn.Linear(16, 5)
        self.relative_position_bias_table = nn.Parameter(torch.randn(49, 1))

    def forward(self, images):
        x = self.inner(images.flatten(2).mT)
        rows, columns = (
            place.flatten() for place in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        )
        scores = x @ x.mT + self.relative_position_bias_table[self.offsets(rows, columns)][..., 0]
        return self.head(x + scores.softmax(-1) @ x).mean(1)

    def offsets(self, rows, columns):
        return self.stride * (rows[:, None] - rows + 3) + columns[:, None] - columns + 3


class WindowOfWrongStride(Window):
    stride = 5


class WindowOfLargerImages(Window):
    """Its table is for images of 6 x 6 pixels."""

    def __init__(self):
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.randn(121, 1))

    def offsets(self, rows, columns):
        return 11 * (rows[:, None] - rows + 5) + columns[:, None] - columns + 5


def of_images(build):
    def make_batch(batch_size, _length, generator):
        return torch.randn(batch_size, 3, 4, 4, generator=generator)

    return ModelSpec.of(build, make_batch=make_batch, per_position=False)


@pytest.mark.parametrize(
    ("spec", "status", "unread"),
    [
        (lambda: ModelSpec.of(Buckets, causal=True), "passed", None),
        (lambda: ModelSpec.of(HalfOfTheBuckets, causal=True), "warned", 8),
        # A longer input may read more rows.
        (lambda: ModelSpec.of(Buckets, causal=True, max_length=16), "not applicable", None),
        (lambda: of_images(Window), "passed", None),
        (lambda: of_images(WindowOfWrongStride), "failed", 12),
        (lambda: of_images(WindowOfLargerImages), "warned", 72),
        (lambda: ModelSpec.of(Rotary, causal=True), "not applicable", None),
    ],
)
def test_rows_of_a_relative_table_that_are_never_read(subjects, spec, status, unread):
    result = subjects.ask(spec(), "relative_table")
    assert (result.status, result.value) == (status, unread)
