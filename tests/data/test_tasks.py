"""Tasks: what can be predicted is labelled, and the best loss is what the best predictor reaches."""

import math
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.data.tasks import (
    CopyTask,
    InductionTask,
    MarkovTask,
    ShiftTask,
    TaskBatches,
    create_task,
)

KINDS = ["copy", "shift", "induction", "markov"]


def rows_of(task, n=50, **settings):
    batch = task.rows(0, range(n), **settings)
    return batch["input_ids"], batch["labels"]


def certain(kind, tokens, t, vocab_size, lag):
    """What the rule of a task, written out, says of token t from the tokens before it; None: nothing."""
    before = tokens[:t]
    if kind == "copy":
        half = (len(tokens) + 1) // 2
        return before[t - half] if t >= half else None
    if kind == "shift":
        return before[t - lag] if t >= lag else None
    # An induction head: what followed the last token, where that was a key seen before.
    last = before[-1] if before else None
    if last is None or last >= vocab_size // 2 or last not in before[:-1]:
        return None
    return before[before.index(last) + 1]


@pytest.mark.parametrize("kind", ["copy", "shift", "induction"])
@pytest.mark.parametrize("vocab_size, row_length", [(2, 4), (7, 9), (64, 33), (1000, 32)])
def test_labels_are_on_what_is_certain_and_the_best_loss_is_zero(kind, vocab_size, row_length):
    task = create_task(kind, vocab_size, row_length, seed=3)
    assert task.best_loss == 0.0
    input_ids, labels = rows_of(task)
    assert input_ids.shape == labels.shape == (50, row_length)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert input_ids.min() >= 0 and input_ids.max() < vocab_size
    n_labels = 0
    for tokens, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
        for t in range(row_length):
            predicted = certain(kind, tokens, t, vocab_size, min(4, row_length - 1))
            assert label[t] == (-100 if predicted is None else tokens[t])
            assert predicted in (None, tokens[t])
            n_labels += predicted is not None
    assert n_labels > 0


@pytest.mark.parametrize("kind", ["copy", "shift"])
def test_what_is_not_labelled_is_uniform(kind):
    task = create_task(kind, 5, 8)
    input_ids, labels = rows_of(task, 4000)
    free = input_ids[labels == -100]
    frequency = torch.bincount(free, minlength=5) / len(free)
    assert (frequency - 0.2).abs().max() < 5 * math.sqrt(0.16 / len(free))


def test_keys_of_induction_are_in_one_pair_each():
    input_ids, labels = rows_of(InductionTask(20, 40))
    for tokens, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
        first = label.index(next(value for value in label if value != -100)) - 1
        keys, values = tokens[:first:2], tokens[1:first:2]
        assert len(set(keys)) == len(keys) and max(keys) < 10 <= min(values)
        assert len(values) == 10


def test_a_question_may_be_about_any_pair():
    input_ids, _ = rows_of(InductionTask(8, 12), 400)
    places = Counter(tokens[:6:2].index(tokens[6]) for tokens in input_ids.tolist())
    assert set(places) == {0, 1, 2} and min(places.values()) > 90


class TestMarkov:
    @pytest.mark.parametrize("seed", range(3))
    def test_entropy_rate_by_enumeration(self, seed):
        """All rows of 5 tokens with their probability; the best predictor says the row of the matrix."""
        task = MarkovTask(3, 5, seed=seed)
        total = mass = 0.0
        for states in product(range(3), repeat=5):
            steps = list(pairwise(states))
            probability = task.stationary_S[states[0]] * math.prod(task.transition_SS[step] for step in steps)
            mass += probability
            total += probability * sum(-math.log(task.transition_SS[step]) for step in steps) / 4
        assert mass == pytest.approx(1.0, abs=1e-12)
        assert task.best_loss == pytest.approx(total, rel=1e-12)
        assert 0 < task.best_loss < math.log(3)

    def test_chain(self):
        task = MarkovTask(50, 9, seed=4)
        assert task.n_states == 32 and task.transition_SS.shape == (32, 32)
        assert (task.transition_SS > 0).all()
        np.testing.assert_allclose(task.transition_SS.sum(1), 1.0, rtol=1e-14)
        # By the power method, which solves no equations.
        power = np.linalg.matrix_power(task.transition_SS, 2000)
        np.testing.assert_allclose(task.stationary_S, power[0], rtol=1e-10)

    def test_rows_are_of_this_chain(self):
        """Frequencies of pairs at each place, within five standard deviations."""
        task = MarkovTask(10, 4, seed=1, n_states=3)
        input_ids, labels = rows_of(task, 6000)
        assert input_ids.max() == 2
        assert (labels[:, 0] == -100).all() and labels[:, 1:].equal(input_ids[:, 1:])
        joint = task.stationary_S[:, None] * task.transition_SS
        for t in range(3):
            seen = np.zeros((3, 3))
            np.add.at(seen, (input_ids[:, t].numpy(), input_ids[:, t + 1].numpy()), 1 / 6000)
            assert (abs(seen - joint) < 5 * np.sqrt(joint * (1 - joint) / 6000)).all()

    def test_best_predictor_reaches_the_loss_on_rows(self):
        task = MarkovTask(8, 65, seed=2)
        input_ids, labels = rows_of(task, 300)
        logits = torch.from_numpy(task.transition_SS).log()[input_ids[:, :-1]]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        assert loss.item() == pytest.approx(task.best_loss, abs=0.02)

    def test_states(self):
        assert MarkovTask(5, 4).n_states == 5
        for wrong in (1, 6):
            with pytest.raises(ValueError, match=f"n_states: got {wrong}"):
                MarkovTask(5, 4, n_states=wrong)


class TestRows:
    @pytest.mark.parametrize("kind", KINDS)
    @given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.integers(0, 5))
    def test_a_row_is_its_number_s(self, kind, indices, epoch):
        """Whatever rows are made beside it."""
        task = create_task(kind, 11, 12, seed=1)
        together = create_task(kind, 11, 12, seed=1).rows(epoch, indices)
        for row, index in enumerate(indices):
            alone = task.rows(epoch, [index])
            assert alone["input_ids"][0].equal(together["input_ids"][row])
            assert alone["labels"][0].equal(together["labels"][row])

    @pytest.mark.parametrize("kind", KINDS)
    def test_numbers_differ_in_everything(self, kind):
        rows = []
        for seed, stream, epoch, index in product(range(2), repeat=4):
            batch = create_task(kind, 64, 40, seed=seed).rows(epoch, [index], stream=stream)
            rows.append(tuple(batch["input_ids"][0].tolist()))
        assert len(set(rows)) == 16

    @pytest.mark.parametrize("make", [CopyTask, ShiftTask, InductionTask, MarkovTask])
    def test_too_small(self, make):
        with pytest.raises(ValueError, match="vocab_size: got 1"):
            make(1, 16)
        with pytest.raises(ValueError, match="row_length: got 1"):
            make(16, 1)

    def test_lag(self):
        input_ids, labels = rows_of(ShiftTask(9, 10, lag=7))
        assert input_ids[:, 7:].equal(input_ids[:, :3]) and (labels[:, :7] == -100).all()
        for wrong in (0, 10):
            with pytest.raises(ValueError, match=f"lag: got {wrong}"):
                ShiftTask(9, 10, lag=wrong)


class TestBatches:
    def test_epochs(self):
        data = TaskBatches(CopyTask(50, 8), 3, 4)
        first, second = list(data), list(data)
        assert len(data) == len(first) == len(second) == 4
        rows = torch.cat([batch["input_ids"] for batch in first + second])
        assert len(rows.unique(dim=0)) == 24
        data.set_epoch(0)
        again = torch.cat([batch["input_ids"] for batch in data])
        assert again.equal(rows[:12])

    def test_fixed(self):
        data = TaskBatches(CopyTask(50, 8), 3, 4, fixed=True)
        for one, other in zip(list(data), list(data), strict=True):
            assert one["input_ids"].equal(other["input_ids"])

    def test_without_end(self):
        data = TaskBatches(CopyTask(50, 8), 3)
        batches = [batch["input_ids"] for batch, _ in zip(data, range(100), strict=False)]
        assert len(torch.cat(batches).unique(dim=0)) == 300
        with pytest.raises(TypeError, match="no end"):
            len(data)

    def test_ranks_share_the_rows_of_one_process(self):
        def batches(batch_size, **settings):
            return list(TaskBatches(MarkovTask(9, 8), batch_size, 3, **settings))

        for i, whole in enumerate(batches(6)):
            parts = [batches(2, rank=rank, world_size=3)[i]["input_ids"] for rank in range(3)]
            assert torch.cat(parts).equal(whole["input_ids"])

    def test_state_of_another_task_is_refused(self):
        state = TaskBatches(CopyTask(50, 8), 3, 4).state_dict()
        for task in (ShiftTask(50, 8), CopyTask(51, 8), CopyTask(50, 8, seed=1)):
            with pytest.raises(ValueError, match=r"state: .*(task|vocab_size|seed)="):
                TaskBatches(task, 3, 4).load_state_dict(state)
