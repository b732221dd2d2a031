"""Masking: what is hidden and nothing else, and losses whose expectation is known in closed form."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stackwise.config.training import ObjectiveConfig
from stackwise.model import create_rack_from_specs
from stackwise.training.masking import EARLIEST, masked_share
from stackwise.training.objective import Objective
from tests.synchronization import synchronization_fails

VOCAB, MASK = 11, 4
KINDS = ["masked_token", "mask_diffusion"]
SCHEDULES = ["linear", "cosine"]
ONE_ROW = {"input_ids": torch.tensor([[0, 1, 2, 3, 5, 6]])}


def objective(kind="masked_token", vocab_size=VOCAB, mask_token_id=MASK, **settings):
    return Objective(ObjectiveConfig(kind=kind, mask_token_id=mask_token_id, **settings), vocab_size)


def tokens(shape, vocab_size=VOCAB, mask=MASK, seed=0):
    """Even draws of every token but the mask."""
    drawn = torch.randint(vocab_size - 1, shape, generator=torch.Generator().manual_seed(seed))
    return drawn + (drawn >= mask)


@st.composite
def batches(draw):
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    batch = {"input_ids": tokens(shape, seed=draw(st.integers(0, 1000)))}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        batch["attention_mask"] = torch.randint(2, shape, generator=generator)
    if draw(st.booleans()):
        ignored = torch.rand(shape, generator=generator) < 0.4
        batch["labels"] = batch["input_ids"].masked_fill(ignored, -100)
    if draw(st.booleans()):
        batch["document_ids"] = torch.randint(3, shape, generator=generator).sort(1).values
    return batch


objectives = st.one_of(
    st.builds(objective, mask_fraction=st.floats(0.01, 1.0)),
    st.builds(objective, st.just("mask_diffusion"), noise_schedule=st.sampled_from(SCHEDULES)),
)

noises = st.tuples(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 64))


def maskable(batch):
    labels, real = batch.get("labels", batch["input_ids"]), batch.get("attention_mask")
    return (labels != -100) & (torch.ones_like(labels) if real is None else real).bool()


class TestHidden:
    @given(objectives, batches(), noises)
    def test_predicted_positions_show_the_mask_and_no_others(self, objective, batch, noise):
        targets = objective.targets(batch, noise)
        predicted, open_positions = targets.labels != -100, maskable(batch)
        assert (targets.input_ids[predicted] == MASK).all()
        assert targets.input_ids[~predicted].equal(batch["input_ids"][~predicted])
        assert targets.labels[predicted].equal(batch["input_ids"][predicted])
        assert not (predicted & ~open_positions).any()
        assert targets.input_ids.dtype == targets.labels.dtype == torch.int64
        assert targets.count.dtype == torch.float32 and targets.count.shape == ()
        for key in ("attention_mask", "document_ids"):
            assert getattr(targets, key) is batch.get(key)
        if objective.config.kind == "masked_token":
            assert targets.weights is None and targets.count == predicted.sum()
            assert predicted.any(1).equal(open_positions.any(1))
        else:
            assert targets.count == open_positions.sum()
            assert targets.weights.dtype == torch.float32
            assert (targets.weights[predicted] > 0).all() and (targets.weights[~predicted] == 0).all()
            assert (targets.weights <= 1.001 / EARLIEST).all()

    @given(objectives, batches(), noises)
    def test_another_token_at_a_hidden_place_changes_no_input(self, objective, batch, noise):
        first = objective.targets(batch, noise)
        predicted = first.labels != -100
        others = torch.where(predicted, tokens(predicted.shape, seed=77), batch["input_ids"])
        changed = dict(batch, input_ids=others)
        if "labels" in batch:
            changed["labels"] = torch.where(predicted, others, batch["labels"])
        second = objective.targets(changed, noise)
        assert second.input_ids.equal(first.input_ids)
        assert (second.labels != -100).equal(predicted)
        assert second.labels[predicted].equal(others[predicted])

    @given(objectives, batches(), noises)
    def test_a_function_of_its_integers(self, objective, batch, noise):
        before = {key: value.clone() for key, value in batch.items()}
        state = torch.get_rng_state()
        first = objective.targets(batch, noise)
        torch.rand(3)
        second = objective.targets(batch, noise)
        assert first.input_ids.equal(second.input_ids) and first.labels.equal(second.labels)
        assert all(batch[key].equal(before[key]) for key in before)
        torch.set_rng_state(state)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_callers_random_state_stays(self, kind):
        before = torch.get_rng_state()
        objective(kind).targets(ONE_ROW, (0,))
        assert torch.get_rng_state().equal(before)

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_integer_counts(self, kind):
        batch = {"input_ids": tokens((8, 64))}
        noises = [
            (0, 0, 0),
            (1, 0, 0),
            (0, 1, 0),
            (0, 0, 1),
            (0, 0),
            (2**32, 0, 0),
            (0, 2**32, 0),
            (-1, 0, 0),
        ]
        seen = {tuple(objective(kind).targets(batch, noise).input_ids.flatten().tolist()) for noise in noises}
        assert len(seen) == len(noises)

    @pytest.mark.parametrize("kind", KINDS)
    def test_labels_of_another_kind(self, kind):
        """What is asked for where a token is hidden is its label, whatever the token was."""
        labels = tokens((4, 50), seed=9)
        targets = objective(kind).targets({"input_ids": tokens((4, 50)), "labels": labels}, (0,))
        predicted = targets.labels != -100
        assert predicted.any() and targets.labels[predicted].equal(labels[predicted])

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_same_on_a_gpu_without_waiting(self, kind):
        batch = {"input_ids": tokens((8, 64)), "attention_mask": torch.ones(8, 64, dtype=torch.long)}
        there = {key: value.cuda() for key, value in batch.items()}
        here = objective(kind).targets(batch, (1, 2))
        with synchronization_fails():
            on_gpu = objective(kind).targets(there, (1, 2))
        assert on_gpu.input_ids.cpu().equal(here.input_ids) and on_gpu.labels.cpu().equal(here.labels)


class TestMaskedToken:
    ROWS = 40_000

    def chosen(self, length, fraction, **settings):
        batch = {"input_ids": tokens((self.ROWS, length))}
        targets = objective(mask_fraction=fraction, **settings).targets(batch, (0,))
        return batch["input_ids"], targets, targets.labels != -100

    @pytest.mark.parametrize(
        "length, fraction, expected",
        [(7, 0.15, 0.15), (40, 0.15, 0.15), (9, 1.0, 1.0), (8, 0.5, 0.5), (4, 0.15, 1 / 4), (1, 0.15, 1.0)],
    )
    def test_share(self, length, fraction, expected):
        """Every position with the same probability; the number in a row is rounded up or down."""
        _, _, chosen = self.chosen(length, fraction)
        error = 5 * math.sqrt(expected * (1 - expected) / self.ROWS)
        assert (chosen.double().mean(0) - expected).abs().max() <= error
        numbers = set(chosen.sum(1).tolist())
        assert numbers <= {max(1, math.floor(length * fraction)), max(1, math.ceil(length * fraction))}

    def test_pairs_are_chosen_evenly(self):
        """Of 5 tokens 2: each pair as often as any other."""
        _, _, chosen = self.chosen(5, 0.4)
        counts = torch.bincount((chosen.long() * 2 ** torch.arange(5)).sum(1)).double()
        counts = counts[counts > 0]
        assert len(counts) == math.comb(5, 2)
        assert ((counts / self.ROWS - 0.1).abs() <= 5 * math.sqrt(0.09 / self.ROWS)).all()

    def test_random_and_same(self):
        ids, targets, chosen = self.chosen(10, 0.5, random_fraction=0.3, same_fraction=0.2)
        n, shown, was = int(chosen.sum()), targets.input_ids[chosen], ids[chosen]
        assert targets.input_ids[~chosen].equal(ids[~chosen])
        # A random token may be the old one: one of VOCAB - 1.
        for share, expected in [
            ((shown == MASK).double().mean(), 0.5),
            ((shown == was).double().mean(), 0.2 + 0.3 / (VOCAB - 1)),
        ]:
            assert share.item() == pytest.approx(expected, abs=5 * math.sqrt(0.25 / n))

    def test_random_tokens_are_even_and_never_the_mask(self):
        _, targets, chosen = self.chosen(4, 1.0, random_fraction=1.0)
        share = torch.bincount(targets.input_ids.flatten(), minlength=VOCAB).double() / chosen.numel()
        assert chosen.all() and share[MASK] == 0
        others = torch.arange(VOCAB) != MASK
        assert (share[others] - 1 / (VOCAB - 1)).abs().max() <= 5 * math.sqrt(0.1 / chosen.numel())

    def test_ideal_predictor_of_even_tokens(self):
        """It says 1/V everywhere, so that the mean loss is ln V whatever is hidden."""
        logits = torch.full((6, 9, VOCAB), 0.7)
        made = objective()
        targets = made.targets({"input_ids": tokens((6, 9))}, (3,))
        total = made.total(nn.Identity(), nn.Identity(), logits, targets)
        assert (total / targets.count).item() == pytest.approx(math.log(VOCAB), rel=1e-6)

    def test_ideal_predictor_of_independent_tokens(self):
        """Its mean loss is the entropy."""
        p = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
        ids = torch.multinomial(p.expand(2000, 4), 30, True, generator=torch.Generator().manual_seed(0))
        made = objective(vocab_size=5)
        targets = made.targets({"input_ids": ids}, (3,))
        logits = torch.cat([p.log(), torch.tensor([-50.0])]).float().expand(2000, 30, 5)
        loss = made.total(nn.Identity(), nn.Identity(), logits, targets) / targets.count
        error = 5 * math.sqrt(float((p * p.log() ** 2).sum() - (p * p.log()).sum() ** 2) / targets.count)
        assert loss.item() == pytest.approx(float(-(p * p.log()).sum()), abs=error)


class TestSchedule:
    NODES, WEIGHTS = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(200))

    def integral(self, schedule, function):
        """Over time, of weight times function(share): the last step, then Gauss-Legendre on a log scale."""
        last = masked_share(torch.zeros(1, dtype=torch.float64), schedule)
        low = math.log(EARLIEST)
        time = ((self.NODES + 1) / 2 * -low + low).exp()
        share, weight = masked_share(time, schedule)
        rest = (self.WEIGHTS / 2 * -low * time * weight * function(share)).sum()
        return float(EARLIEST * last[1] * function(last[0]) + rest)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_weight_is_the_logarithmic_derivative(self, schedule):
        time = torch.linspace(EARLIEST, 0.9999, 997, dtype=torch.float64)[1:-1]
        step = 1e-6
        share, weight = masked_share(time, schedule)
        shares = [masked_share(time + d, schedule)[0].log() for d in (step, -step)]
        torch.testing.assert_close(weight, (shares[0] - shares[1]) / (2 * step), rtol=1e-5, atol=1e-7)
        assert (share > 0).all() and (share <= 1).all() and (share.diff() > 0).all()

    def test_shares(self):
        time = torch.tensor([0.25, 0.5, 0.9], dtype=torch.float64)
        assert masked_share(time, "linear")[0].equal(time)
        wanted = torch.cos(torch.pi / 2 * (1 - time))
        torch.testing.assert_close(masked_share(time, "cosine")[0], wanted)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_no_weight_exceeds_that_of_the_last_step(self, schedule):
        time = torch.linspace(0, 1, 5001, dtype=torch.float64)[:-1]
        assert masked_share(time, schedule)[1].max() <= 1 / EARLIEST

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_uniform_predictor(self, schedule):
        """Of each token ln V is paid exactly once: the weighted share integrates to 1."""
        assert self.integral(schedule, lambda share: share) == pytest.approx(1.0, abs=1e-12)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_exact_bound(self, schedule, seed):
        """By enumeration of sequences and masks: polynomials in the share, integrated in closed form."""
        joint = random_joint(seed)
        losses = loss_by_number(joint)
        low = float(masked_share(torch.zeros((), dtype=torch.float64), schedule)[0])
        power, wanted = np.polynomial.Polynomial([0.0, 1.0]), 0.0
        for n, loss in losses.items():
            shared = power ** (n - 1) * (1 - power) ** (LENGTH - n)  # over the share: dm / m
            primitive = shared.integ()
            wanted += loss * (primitive(1.0) - primitive(low) + (shared * power)(low))

        def expected(share):
            return sum(loss * share**n * (1 - share) ** (LENGTH - n) for n, loss in losses.items())

        bound = self.integral(schedule, expected)
        assert bound == pytest.approx(wanted, rel=1e-10)
        # The ideal predictor's bound is the entropy, save for what the last step costs.
        entropy = float(-(joint * joint.log()).sum())
        assert entropy <= bound <= entropy + low * LENGTH * math.log(2)
        assert bound == pytest.approx(entropy, rel=1e-3)


LENGTH = 3  # of sequences of two tokens, which are not independent


def random_joint(seed):
    drawn = torch.rand(2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 3
    return drawn / drawn.sum()


def conditional(joint, shown, position):
    """p(token at `position` | shown), with None for what is hidden."""
    index = tuple(slice(None) if token is None else token for token in shown)
    rest = joint[index]
    axis = sum(token is None for token in shown[:position])
    rest = rest.movedim(axis, 0).reshape(2, -1).sum(1)
    return rest / rest.sum()


def loss_by_number(joint):
    """Per number of hidden tokens: the expected loss of the ideal predictor, summed over which are hidden."""
    losses = dict.fromkeys(range(1, LENGTH + 1), 0.0)
    for hidden in itertools.product([False, True], repeat=LENGTH):
        for sequence in itertools.product([0, 1], repeat=LENGTH):
            shown = [None if h else token for h, token in zip(hidden, sequence, strict=True)]
            for position in range(LENGTH):
                if hidden[position]:
                    p = conditional(joint, shown, position)[sequence[position]]
                    losses[sum(hidden)] -= float(joint[sequence] * p.log())
    return losses


class TestDiffusion:
    @pytest.mark.parametrize("batch_size", [1, 2, 7, 8])
    def test_times_cover_the_unit_interval(self, batch_size):
        """Read back from the weights: rows lie 1/B apart."""
        batch = {"input_ids": tokens((batch_size, 400))}
        for step in range(5):
            targets = objective("mask_diffusion").targets(batch, (0, step))
            time = 1 / targets.weights.max(1).values.double()
            assert (time % (1 / batch_size)).std(correction=0) < 1e-6 or (time <= 2 * EARLIEST).any()
            hidden = (targets.labels != -100).double().mean(1)
            assert ((hidden - time).abs() <= 5 * (time * (1 - time) / 400).sqrt() + 1e-9).all()

    def test_every_row_sees_every_time(self):
        batch = {"input_ids": tokens((4, 100))}
        made = objective("mask_diffusion")
        weights = [made.targets(batch, (step,)).weights.max(1).values for step in range(400)]
        time = torch.stack([1 / w[2] for w in weights if w[2] > 0]).sort().values
        assert (time - torch.linspace(0, 1, len(time))).abs().max() < 1.6 / math.sqrt(400)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_uniform_predictor(self, schedule):
        made = objective("mask_diffusion", noise_schedule=schedule)
        batch = {"input_ids": tokens((64, 32))}
        logits = torch.zeros(64, 32, VOCAB)
        losses = []
        for step in range(200):
            targets = made.targets(batch, (step,))
            losses.append(float(made.total(nn.Identity(), nn.Identity(), logits, targets) / targets.count))
        error = 4 * np.std(losses) / math.sqrt(len(losses))
        assert np.mean(losses) == pytest.approx(math.log(VOCAB), abs=error)
        assert error < 0.05 * math.log(VOCAB)

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_ideal_predictor_of_dependent_tokens(self, schedule):
        """The mean of the sampled loss is the entropy of the sequence, by its length."""
        joint, mask = random_joint(1), 2
        made = objective("mask_diffusion", 3, mask, noise_schedule=schedule)
        table = torch.full((3, 3, 3, LENGTH, 3), -50.0)
        for shown in itertools.product([0, 1, None], repeat=LENGTH):
            place = tuple(mask if token is None else token for token in shown)
            for position in range(LENGTH):
                if shown[position] is None:
                    table[place][position, :2] = conditional(joint, shown, position).log().float()
        sequences = torch.tensor(list(itertools.product([0, 1], repeat=LENGTH)))
        losses = []
        for step in range(100):
            drawn = torch.multinomial(
                joint.flatten(), 512, True, generator=torch.Generator().manual_seed(step)
            )
            targets = made.targets({"input_ids": sequences[drawn]}, (step,))
            logits = table[targets.input_ids.unbind(1)]
            losses.append(float(made.total(nn.Identity(), nn.Identity(), logits, targets) / targets.count))
        error = 4 * np.std(losses) / math.sqrt(len(losses))
        entropy = float(-(joint * joint.log()).sum()) / LENGTH
        assert np.mean(losses) == pytest.approx(entropy, abs=error)
        assert error < 0.1 * entropy

    def test_prompts_are_neither_hidden_nor_counted(self):
        """Labels of -100 at the prompt: what is counted is the answer."""
        ids = tokens((3, 20))
        labels = ids.clone()
        labels[:, :8] = -100
        targets = objective("mask_diffusion").targets({"input_ids": ids, "labels": labels}, (0,))
        assert targets.input_ids[:, :8].equal(ids[:, :8]) and targets.count == 3 * 12


class TestLeak:
    """A Rack that sees both sides learns nothing from independent tokens: the answer is hidden from it."""

    @pytest.mark.parametrize("settings, learns", [({}, False), ({"same_fraction": 1.0}, True)])
    def test_independent_tokens(self, settings, learns):
        torch.manual_seed(0)
        block = {"d_model": 32, "d_ff": 64, "n_heads": 2, "attention_mode": "bidirectional"}
        rack = create_rack_from_specs(8, 32, [{"n_blocks": 1, "block_spec": block}])
        made = objective(vocab_size=8, mask_fraction=0.4, **settings)
        made.check(rack)
        optimizer = torch.optim.AdamW(rack.parameters(), lr=3e-3)
        losses = []
        for step in range(100):
            targets = made.targets({"input_ids": tokens((16, 12), 8, seed=step)}, (step,))
            total = made.total(rack.final_norm, rack.lm_head, rack.hidden(targets.input_ids), targets)
            (total / targets.count).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total.detach() / targets.count))
        end = np.mean(losses[-20:])
        # Seven tokens occur: the mask is none of them.
        assert (end < 1.0) if learns else (end > math.log(7) - 0.1)


class TestRefused:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_mask_among_the_tokens(self, kind):
        ids = tokens((2, 6))
        ids[1, 3] = MASK
        with pytest.raises(ValueError, match=r"input_ids: got mask_token_id=4 in row 1 at position 3"):
            objective(kind).targets({"input_ids": ids}, (0,))

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_mask_among_the_labels(self, kind):
        labels = tokens((2, 6))
        labels[0, 2] = MASK
        with pytest.raises(ValueError, match=r"labels: got mask_token_id=4 in row 0 at position 2"):
            objective(kind).targets({"input_ids": tokens((2, 6)), "labels": labels}, (0,))

    @pytest.mark.parametrize("kind", KINDS)
    def test_padding_may_be_anything(self, kind):
        ids, real = tokens((2, 6)), torch.ones(2, 6, dtype=torch.long)
        ids[1, 3], real[1, 3] = MASK, 0
        targets = objective(kind).targets({"input_ids": ids, "attention_mask": real}, (0,))
        assert targets.labels[1, 3] == -100
