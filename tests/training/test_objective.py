"""The next-token loss against a loop in float64, with padding and documents; and the Objective."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from stackwise.config.training import ObjectiveConfig
from stackwise.model import create_rack_from_specs, create_simple_rack
from stackwise.training import ArchitectureTrainer
from stackwise.training.objective import (
    Objective,
    Targets,
    next_token_loss,
    next_token_total,
    require_causal,
)
from stackwise.training.targets import next_token_targets

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


class TestDocuments:
    IDS = torch.tensor([[5, 5, 5, 2, 2, 9], [1, 3, 3, 3, 3, 3]])  # runs of 3, 2, 1 and of 1, 5
    LENGTHS = ((3, 2, 1), (1, 5))

    def test_each_as_if_alone(self):
        """A packed row has the loss of its documents, each in a row of its own."""
        rack, ids = rack_of(), ids_of()
        batch = {"input_ids": ids, "document_ids": self.IDS}
        alone = [
            next_token_total(rack, {"input_ids": document[None]})
            for row, lengths in zip(ids, self.LENGTHS, strict=True)
            for document in row.split(lengths)
        ]
        total, count = next_token_total(rack, batch)
        assert count == sum(n for _, n in alone) == 2 + 1 + 0 + 0 + 4
        assert total.item() == pytest.approx(sum(x.item() for x, _ in alone), rel=1e-5)

    def test_first_token_of_a_document_is_no_label(self):
        targets = Objective(ObjectiveConfig(), VOCAB).targets(
            {"input_ids": ids_of(), "document_ids": self.IDS}, (0,)
        )
        crossing = torch.tensor([[0, 0, 1, 0, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)
        assert (targets.labels == -100).equal(crossing)
        assert targets.document_ids.equal(self.IDS[:, :-1])

    def test_documents_and_padding_together(self):
        mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
        batch = {"input_ids": ids_of(), "document_ids": self.IDS, "attention_mask": mask}
        targets = Objective(ObjectiveConfig(), VOCAB).targets(batch, (0,))
        predicted = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 1, 1, 0]], dtype=torch.bool)
        assert (targets.labels != -100).equal(predicted) and targets.count == 5


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


def bidirectional_rack(*seeing):
    return TestRefused.rack(seeing or (True,))


MASKED = [{"kind": "masked_token", "mask_token_id": 4}, {"kind": "mask_diffusion", "mask_token_id": 4}]
ALL = [{}, *MASKED]


def name(settings):
    return settings.get("kind", "next_token")


class TestObjective:
    @pytest.mark.parametrize("settings", ALL, ids=name)
    def test_row_length(self, settings):
        """A row of it is what the model sees, `seq_len` tokens."""
        objective = Objective(ObjectiveConfig(**settings), VOCAB)
        ids = torch.zeros(2, objective.row_length(7), dtype=torch.long)
        targets = objective.targets({"input_ids": ids}, (0,))
        assert targets.input_ids.shape == targets.labels.shape == (2, 7)

    @given(st.data())
    def test_next_token_is_the_loss_of_the_page(self, data):
        table, ids = Table(), ids_of(data.draw(st.integers(0, 1000)), (3, 7))
        keep = data.draw(
            st.lists(st.lists(st.integers(0, 1), min_size=7, max_size=7), min_size=3, max_size=3)
        )
        batch = {"input_ids": ids, "attention_mask": torch.tensor(keep)}
        objective = Objective(ObjectiveConfig(), VOCAB)
        targets = objective.targets(batch, (0,))
        total = objective.total(nn.Identity(), nn.Identity(), table(targets.input_ids), targets)
        assert (total / targets.count.clamp(min=1)).item() == pytest.approx(
            loop_in_float64(table, ids, keep), rel=1e-5, abs=1e-7
        )

    @pytest.mark.parametrize("settings", ALL, ids=name)
    @pytest.mark.parametrize("z_loss", [0.0, 0.2])
    @pytest.mark.parametrize("chunk", [None, 5])
    def test_total(self, settings, z_loss, chunk):
        """Weight by weight in float64, with the gradients of all three parts."""
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(5, VOCAB, (3, 9), generator=generator)
        objective = Objective(ObjectiveConfig(**settings, z_loss=z_loss, logits_chunk=chunk), VOCAB)
        targets = objective.targets({"input_ids": ids}, (1,))
        norm, head = nn.RMSNorm(16), nn.Linear(16, VOCAB, bias=False)
        hidden = torch.randn(*targets.input_ids.shape, 16, generator=generator).requires_grad_()
        leaves = (hidden, norm.weight, head.weight)
        total = objective.total(norm, head, hidden, targets)
        assert total.shape == () and total.dtype == torch.float32

        wide = hidden.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
        log_z = (logits := normed * norm.weight.double() @ head.weight.double().T).logsumexp(-1)
        taken = logits.gather(2, targets.labels.clamp(min=0)[..., None]).squeeze(2)
        factor = (targets.labels != -100).double()
        factor = factor if targets.weights is None else factor * targets.weights
        wanted = (factor * (log_z - taken + z_loss * log_z**2)).sum()
        assert wanted > 0 and total.item() == pytest.approx(wanted.item(), rel=1e-5)
        for one, other in zip(
            torch.autograd.grad(total, leaves), torch.autograd.grad(wanted, leaves), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))

    def test_plain_path_is_that_of_torch_bit_for_bit(self):
        rack, ids = rack_of(), ids_of(shape=(4, 9))
        objective = Objective(ObjectiveConfig(), VOCAB)
        targets = objective.targets({"input_ids": ids}, (0,))
        total = objective.total(rack.final_norm, rack.lm_head, rack.hidden(targets.input_ids), targets)
        logits = rack(ids[:, :-1])
        assert total.equal(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))

    @pytest.mark.parametrize("settings", ALL, ids=name)
    def test_targets_are_a_tree_of_tensors(self, settings):
        targets = Objective(ObjectiveConfig(**settings), VOCAB).targets(
            {"input_ids": torch.full((2, 5), 7), "document_ids": torch.zeros(2, 5, dtype=torch.long)}, (0,)
        )
        leaves, structure = tree_flatten(targets)
        tensors = [value for value in vars(targets).values() if value is not None]
        assert {id(leaf) for leaf in leaves if leaf is not None} == {id(tensor) for tensor in tensors}
        again = tree_unflatten(leaves, structure)
        assert all(getattr(again, key) is value for key, value in vars(targets).items())
        moved = targets.to("meta", non_blocking=True)
        assert isinstance(moved, Targets) and moved.attention_mask is None
        assert all(value is None or value.is_meta for value in vars(moved).values())

    @pytest.mark.parametrize("settings", ALL, ids=name)
    @pytest.mark.parametrize("key", ["labels", "attention_mask", "document_ids"])
    def test_shapes_must_agree(self, settings, key):
        batch = {"input_ids": torch.full((2, 5), 7), key: torch.ones(2, 4, dtype=torch.long)}
        with pytest.raises(ValueError, match=rf"{key}: got \(2, 4\); allowed: \(2, 5\)"):
            Objective(ObjectiveConfig(**settings), VOCAB).targets(batch, (0,))
        with pytest.raises(ValueError, match=r"input_ids: got \(5,\); allowed: a shape"):
            Objective(ObjectiveConfig(**settings), VOCAB).targets({"input_ids": torch.zeros(5)}, (0,))

    @pytest.mark.parametrize("seeing, named", [([False], "[0]"), ([True, False], "[1]")])
    @pytest.mark.parametrize("settings", MASKED, ids=name)
    def test_masks_need_both_sides(self, settings, seeing, named):
        objective = Objective(ObjectiveConfig(**settings), VOCAB)
        with pytest.raises(ValueError, match="are causal; kind=") as refusal:
            objective.check(bidirectional_rack(*seeing))
        assert f"stacks {named}" in str(refusal.value)
        objective.check(bidirectional_rack(True, True))

    def test_one_causal_block_is_enough(self):
        rack = bidirectional_rack(True, True)
        rack.get_stack(1).get_block(0).attention.causal = True
        with pytest.raises(ValueError, match=r"stacks \[1\] are causal"):
            Objective(ObjectiveConfig(**MASKED[0]), VOCAB).check(rack)

    def test_next_token_needs_one_side(self):
        objective = Objective(ObjectiveConfig(), VOCAB)
        objective.check(bidirectional_rack(False))
        with pytest.raises(ValueError, match=r"stacks \[0\] are bidirectional"):
            objective.check(bidirectional_rack(True))

    @pytest.mark.parametrize("kind", ["masked_token", "mask_diffusion"])
    def test_the_mask_is_in_the_vocabulary(self, kind):
        objective = Objective(ObjectiveConfig(kind=kind, mask_token_id=VOCAB), VOCAB)
        with pytest.raises(ValueError, match="mask_token_id: got 13; allowed: 0 to 12"):
            objective.check(bidirectional_rack(True))

    def test_another_vocabulary(self):
        with pytest.raises(ValueError, match="vocab_size: got 13; allowed: 14"):
            Objective(ObjectiveConfig(), VOCAB + 1).check(rack_of())

    def test_head_with_a_bias_is_refused_in_chunks(self):
        objective = Objective(ObjectiveConfig(logits_chunk=4), VOCAB)
        targets = objective.targets({"input_ids": ids_of()}, (0,))
        with pytest.raises(ValueError, match="logits_chunk: got a head with a bias"):
            objective.total(nn.Identity(), nn.Linear(8, VOCAB), torch.zeros(2, 5, 8), targets)

    @pytest.mark.parametrize("settings", [{}, MASKED[1]], ids=name)
    @pytest.mark.parametrize("chunk", [None, 5])
    def test_one_graph(self, settings, chunk):
        objective = Objective(ObjectiveConfig(**settings, z_loss=0.1, logits_chunk=chunk), VOCAB)
        targets = objective.targets({"input_ids": torch.full((3, 9), 7)}, (1,))
        norm, head = nn.RMSNorm(16), nn.Linear(16, VOCAB, bias=False)
        hidden = torch.randn(*targets.input_ids.shape, 16, requires_grad=True)
        compiled = torch.compile(objective.total, backend="aot_eager", fullgraph=True, dynamic=False)
        totals = [function(norm, head, hidden, targets) for function in (objective.total, compiled)]
        gradients = [torch.autograd.grad(total, (hidden, norm.weight, head.weight)) for total in totals]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_next_token_loss_of_a_batch_is_one_graph():
    model, batch = rack_of(), {"input_ids": ids_of(), "labels": ids_of()}
    compiled = torch.compile(next_token_loss, backend="eager", fullgraph=True)
    assert compiled(model, batch).item() == pytest.approx(next_token_loss(model, batch).item(), rel=1e-5)


def test_parts_of_a_batch_that_nobody_reads_are_refused():
    ids = torch.randint(7, (2, 5))
    with pytest.raises(ValueError, match=r"batch: got \['lables'\]; allowed: input_ids, labels"):
        next_token_targets({"input_ids": ids, "lables": ids})
    with pytest.raises(ValueError, match=r"input_ids: got torch\.float32; allowed: integers"):
        next_token_targets({"input_ids": ids.float()})
    with pytest.raises(ValueError, match=r"labels: got torch\.bool; allowed: integers"):
        next_token_targets({"input_ids": ids, "labels": ids > 3})
    with pytest.raises(ValueError, match=r"input_ids: got 'list'; allowed: a tensor"):
        next_token_targets({"input_ids": [[1, 2, 3]]})


@pytest.mark.parametrize("value", [7, -1, 1000])
@pytest.mark.parametrize("position", [0, 4])
def test_what_is_no_token_of_the_vocabulary(value, position):
    """Named by its place in the batch, whether the model is to see it or only to predict it."""
    objective, ids = Objective(ObjectiveConfig(), 7), torch.randint(7, (2, 5))
    wrong = ids.clone()
    wrong[1, position] = value
    told = f"got {value} in row 1 at position {position}; allowed: 0 to 6, with vocab_size=7"
    with pytest.raises(ValueError, match=f"input_ids: {told}"):
        objective.targets({"input_ids": wrong}, ())
    if position:
        with pytest.raises(ValueError, match=f"labels: {told}"):
            objective.targets({"input_ids": ids, "labels": wrong}, ())
        mask = torch.ones_like(ids)
        mask[1, position] = 0
        objective.targets({"input_ids": ids, "labels": wrong, "attention_mask": mask}, ())
    masked = ObjectiveConfig(kind="masked_token", mask_token_id=6, mask_fraction=1.0)
    ids = ids.clamp(max=5)
    with pytest.raises(ValueError, match=f"labels: {told}"):
        Objective(masked, 7).targets({"input_ids": ids, "labels": wrong.where(wrong != 6, 5)}, (0,))


def test_what_is_not_predicted_is_no_token():
    objective = Objective(ObjectiveConfig(), 7)
    targets = objective.targets(
        {"input_ids": torch.randint(7, (2, 5)), "labels": torch.full((2, 5), -100)}, ()
    )
    assert targets.count == 0
    assert objective.targets({"input_ids": torch.zeros(0, 5, dtype=torch.long)}, ()).count == 0
