"""The next-token loss: against a loop in float64, with padding, and with nothing to predict."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.model import create_rack_from_specs, create_simple_rack
from stackwise.training import ArchitectureTrainer
from stackwise.training.objective import next_token_loss, require_causal

VOCAB = 13
# Per kind of padding: the attention mask of rows of 6 tokens.
PADDINGS = {
    "right": [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]],
    "inside": [[1, 1, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0]],
    "a whole row": [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]],
    "none": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
}
# Per Rack: which Stacks are bidirectional.
SEEING = [([True], "[0]"), ([False, True], "[1]"), ([True, False, True], "[0, 2]")]


class Table(nn.Module):
    """Logits that depend on the token before alone, and on nothing else."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator))
        self.seen = None

    def forward(self, input_ids, attention_mask=None):
        self.seen = (input_ids, attention_mask)
        return self.logits[input_ids]


def loop_in_float64(table, ids, keep=None, labels=None):
    """Mean of -log softmax over the predicted tokens; a token counts where both its sides are real."""
    labels = ids if labels is None else labels
    total, count = 0.0, 0
    for b in range(len(ids)):
        for t in range(ids.shape[1] - 1):
            if labels[b, t + 1] == -100 or (keep is not None and not (keep[b][t] and keep[b][t + 1])):
                continue
            row = [float(x) for x in table.logits[ids[b, t]].detach().double()]
            total += math.log(sum(math.exp(x) for x in row)) - row[labels[b, t + 1]]
            count += 1
    return total / max(1, count)


def rack_of(**changes):
    return create_simple_rack(1, 2, 16, 32, 2, VOCAB, **changes).train()


def ids_of(seed=0, shape=(2, 6)):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = next_token_loss(model, batch)
    loss.backward()
    return loss.detach(), [weight.grad.clone() for weight in model.parameters()]


class TestLoss:
    @given(st.integers(1, 4), st.integers(2, 9), st.integers(0, 10_000))
    def test_loop(self, batch_size, n_tokens, seed):
        table, ids = Table(seed), ids_of(seed, (batch_size, n_tokens))
        loss = next_token_loss(table, {"input_ids": ids})
        assert loss.item() == pytest.approx(loop_in_float64(table, ids), rel=1e-5)

    @given(st.data())
    def test_loop_with_labels(self, data):
        table, ids = Table(), ids_of(data.draw(st.integers(0, 10_000)), (3, 7))
        row = st.lists(st.integers(0, VOCAB - 1) | st.just(-100), min_size=7, max_size=7)
        labels = torch.tensor([data.draw(row) for _ in range(3)])
        loss = next_token_loss(table, {"input_ids": ids, "labels": labels})
        assert loss.item() == pytest.approx(loop_in_float64(table, ids, labels=labels), rel=1e-5, abs=1e-7)

    def test_float32_scalar(self):
        table = Table().bfloat16()
        loss = next_token_loss(table, {"input_ids": ids_of()})
        assert loss.shape == () and loss.dtype == torch.float32
        assert loss.item() == pytest.approx(loop_in_float64(table, ids_of()), rel=1e-5)

    def test_the_last_token_is_not_seen(self):
        table, ids = Table(), ids_of()
        mask = torch.ones_like(ids)
        next_token_loss(table, {"input_ids": ids, "attention_mask": mask})
        assert table.seen[0].equal(ids[:, :-1]) and table.seen[1].shape == (2, 5)

    def test_batch_is_left_alone(self):
        batch = {
            "input_ids": ids_of(),
            "labels": ids_of(1),
            "attention_mask": torch.tensor(PADDINGS["right"]),
        }
        before = {key: value.clone() for key, value in batch.items()}
        next_token_loss(Table(), batch)
        assert batch.keys() == before.keys()
        assert all(batch[key].equal(before[key]) for key in before)

    def test_first_loss_of_a_rack(self):
        loss = next_token_loss(rack_of(), {"input_ids": ids_of(shape=(8, 33))})
        assert loss.item() == pytest.approx(math.log(VOCAB), abs=0.05)


class TestPadding:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
    @pytest.mark.parametrize("mask", PADDINGS.values(), ids=PADDINGS)
    def test_loop(self, mask, dtype):
        table, ids = Table(), ids_of()
        batch = {"input_ids": ids, "attention_mask": torch.tensor(mask).to(dtype)}
        assert next_token_loss(table, batch).item() == pytest.approx(
            loop_in_float64(table, ids, mask), rel=1e-5
        )

    @pytest.mark.parametrize("mask", PADDINGS.values(), ids=PADDINGS)
    def test_neither_seen_nor_predicted(self, mask):
        rack, keep = rack_of(), torch.tensor(mask)
        results = [
            loss_and_gradients(
                rack, {"input_ids": torch.where(keep == 1, ids_of(), filler), "attention_mask": keep}
            )
            for filler in (0, VOCAB - 1)
        ]
        assert results[0][0].item() == pytest.approx(results[1][0].item(), abs=1e-6)
        for one, other in zip(results[0][1], results[1][1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)

    def test_right_padding_is_a_shorter_row(self):
        rack, ids = rack_of(), ids_of(shape=(1, 6))
        padded = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}
        shorter = next_token_loss(rack, {"input_ids": ids[:, :4]})
        assert next_token_loss(rack, padded).item() == pytest.approx(shorter.item(), rel=1e-5)

    @pytest.mark.parametrize("use_rope", [True, False])
    def test_left_padding_is_a_shorter_row(self, use_rope):
        """Rotary positions are relative, so that where a row starts makes no difference."""
        rack, ids = rack_of(use_rope=use_rope), ids_of(shape=(1, 6))
        padded = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
        shorter = next_token_loss(rack, {"input_ids": ids[:, 2:]})
        assert next_token_loss(rack, padded).item() == pytest.approx(shorter.item(), rel=1e-5)

    def test_labels_and_padding_together(self):
        table, ids, mask = Table(), ids_of(), PADDINGS["right"]
        labels = ids.clone()
        labels[0, 1] = -100
        batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.tensor(mask)}
        assert next_token_loss(table, batch).item() == pytest.approx(
            loop_in_float64(table, ids, mask, labels), rel=1e-5
        )


class TestNothingToPredict:
    @pytest.mark.parametrize(
        "batch",
        [
            {"labels": torch.full((2, 6), -100)},
            {"attention_mask": torch.zeros(2, 6, dtype=torch.long)},
            {"attention_mask": torch.tensor([[1, 0, 0, 0, 0, 0]] * 2)},
            {"input_ids": torch.zeros(2, 1, dtype=torch.long)},
        ],
        ids=["labels", "all padding", "one real token", "one token"],
    )
    def test_zero(self, batch):
        loss, gradients = loss_and_gradients(rack_of(), {"input_ids": ids_of(), **batch})
        assert loss.item() == 0.0
        assert all(gradient.count_nonzero() == 0 for gradient in gradients)


class TestLabelLeak:
    """What a model reads of i.i.d. tokens it can only have from the label."""

    V, STEPS = 8, 150

    def train(self, causal):
        torch.manual_seed(0)
        rack = create_simple_rack(1, 2, 32, 64, 2, self.V)
        for i in range(2):
            rack.get_stack(0).get_block(i).attention.causal = causal
        optimizer = torch.optim.AdamW(rack.parameters(), lr=3e-3)
        losses = []
        for _ in range(self.STEPS):
            loss = next_token_loss(rack, self.fresh())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            return losses, next_token_loss(rack, self.fresh(64)).item()

    def fresh(self, batch_size=16):
        return {"input_ids": torch.randint(self.V, (batch_size, 13))}

    def test_causal_learns_nothing(self):
        losses, fresh = self.train(causal=True)
        assert fresh > math.log(self.V) - 0.1
        assert min(losses) > math.log(self.V) - 0.15

    def test_bidirectional_reads_the_answer(self):
        _, fresh = self.train(causal=False)
        assert fresh < 0.5 * math.log(self.V)

    def test_trainer_learns_nothing(self, make_config, make_rack, make_batches):
        config = make_config(
            model={"vocab_size": self.V},
            training={
                "max_steps": self.STEPS,
                "batch_size": 8,
                "log_interval": 50,
                "optimizer": {"lr": 3e-3},
            },
        )
        rack = make_rack(config)
        trainer = ArchitectureTrainer(config)
        result = trainer.train_architecture(rack, make_batches(config, self.STEPS))
        assert result["final_loss"] > math.log(self.V) - 0.1
        assert trainer.evaluate(rack, make_batches(config, 16, seed=1)) > math.log(self.V) - 0.1


class TestRefused:
    @staticmethod
    def rack(seeing):
        specs = [
            {
                "n_blocks": 2,
                "block_spec": {
                    "d_model": 16,
                    "d_ff": 32,
                    "n_heads": 2,
                    "attention_mode": "bidirectional" if sees else "causal",
                },
            }
            for sees in seeing
        ]
        return create_rack_from_specs(VOCAB, 16, specs)

    @pytest.mark.parametrize("seeing, named", SEEING)
    def test_require_causal(self, seeing, named):
        with pytest.raises(ValueError, match="bidirectional") as refusal:
            require_causal(self.rack(seeing))
        assert f"stacks {named}" in str(refusal.value)

    @pytest.mark.parametrize("seeing, named", SEEING)
    def test_trainer(self, make_config, seeing, named):
        rack = self.rack(seeing)
        before = {name: weight.clone() for name, weight in rack.state_dict().items()}
        with pytest.raises(ValueError, match="bidirectional") as refusal:
            ArchitectureTrainer(make_config()).train_architecture(rack, [ids_of()])
        assert f"stacks {named}" in str(refusal.value)
        assert all(weight.equal(before[name]) for name, weight in rack.state_dict().items())

    def test_one_block_behind_the_configuration(self, make_config, make_rack, make_batches):
        config = make_config()
        rack = make_rack(config)
        rack.get_stack(1).get_block(0).attention.causal = False
        with pytest.raises(ValueError, match=r"stacks \[1\] are bidirectional"):
            ArchitectureTrainer(config).train_architecture(rack, make_batches(config))

    def test_causal_passes(self):
        require_causal(self.rack([False, False]))
