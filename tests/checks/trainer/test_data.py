"""Data: order, coverage, randomness and place of what a run is trained on."""

import pytest
import torch
from torch.utils.data import DataLoader

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from tests.zoo.data import Masking, OwnOrder, Reading, SeededOrder
from tests.zoo.loop import Loop, loop, loop_spec_of

OF_EPOCHS = ["data_repeats", "epoch_order", "epoch_coverage", "worker_randomness"]


def ask(subject, check, **declared):
    [result] = check_trainer(TrainerSpec.of(subject, **declared), checks=[check])
    return result


@pytest.mark.parametrize("build", [Loop, Reading, SeededOrder, OwnOrder])
@pytest.mark.parametrize("check", [*OF_EPOCHS, "batch_rows"])
def test_sound(build, check):
    result = ask(loop_spec_of(build), check)
    assert result.status == "passed" and result.value <= result.limit, result


@pytest.mark.parametrize("check", OF_EPOCHS)
def test_what_it_needs(check):
    result = ask(loop_spec_of(type("Bare", (Loop,), {"epoch": None})), check)
    assert result.status == "not applicable" and result.meaning.startswith("needs epoch(number)")


def test_the_same_order_each_epoch():
    class Fixed(Loop):
        def order(self, number):
            return list(range(self.n_rows))

    # A fixed order may be meant: without a claim and without a seed in it this is no failure.
    assert ask(loop_spec_of(Fixed), "epoch_order").status == "warned"
    assert ask(loop_spec_of(type("Claims", (Fixed,), {"shuffles": True})), "epoch_order").status == "failed"
    assert ask(loop_spec_of(type("Denies", (Fixed,), {"shuffles": False})), "epoch_order").status == "passed"


def test_a_loader_that_shuffles_from_the_global_generator():
    class Loading(Reading):
        def epoch(self, number):
            torch.manual_seed(number)
            yield from DataLoader(list(self.rows()), self.batch_size, shuffle=True, collate_fn=self.collate)

    for check in OF_EPOCHS:
        assert ask(loop_spec_of(Loading), check).status == "passed", check


def test_an_incomplete_batch_may_be_left_out_or_filled():
    class Dropping(Reading):
        n_examples = 26

        def rows(self):
            return super().rows().repeat(2, 1)[:26] + torch.arange(26)[:, None] % 3

        def order(self, number):
            order = torch.randperm(26, generator=torch.Generator().manual_seed(number)).tolist()
            return order[:24]

    class Filling(Dropping):
        def order(self, number):
            order = torch.randperm(26, generator=torch.Generator().manual_seed(number)).tolist()
            return order + order[:2]

        def advance(self):
            self.n_rows = 28
            super().advance()

    for build in (Dropping, Filling):
        result = ask(loop_spec_of(build), "epoch_coverage")
        assert result.status == "passed", result


def test_rows_that_occur_twice_by_right():
    class Doubled(Reading):
        def rows(self):
            return super().rows()[torch.arange(self.n_rows) // 2]

    assert ask(loop_spec_of(Doubled), "epoch_coverage").status == "passed"
    # Without the claim it is unusual.
    result = ask(loop_spec_of(type("Silent", (Doubled,), {"n_examples": None})), "epoch_coverage")
    assert (result.status, result.value) == ("warned", 2.0)


def test_rows_that_are_cut_anew_cannot_be_counted():
    result = ask(loop_spec_of(type("Silent", (Masking,), {"n_examples": None})), "epoch_coverage")
    assert result.status == "not applicable" and "that two epochs have in common" in result.meaning


def test_missing_rows():
    class Missing(Reading):
        def order(self, number):
            return super().order(number)[:12]

        def advance(self):
            self.n_rows = 12
            super().advance()

    result = ask(loop_spec_of(Missing), "epoch_coverage")
    assert (result.status, result.value, result.limit) == ("failed", 12.0, 3.0)
    assert result.where == "epoch 0: 12 rows of 24 examples"


@pytest.mark.parametrize("n_workers", [2, 3])
def test_workers_that_draw_the_same(n_workers):
    sound = type("Sound", (Masking,), {"n_workers": n_workers})
    assert ask(loop_spec_of(sound), "worker_randomness").status == "passed"
    mutant = type("Mutant", (sound,), {"seed_of": lambda self, worker, epoch: epoch})
    masks = [batch["labels"] == -100 for batch in mutant().epoch(0)]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[n_workers])
    result = ask(loop_spec_of(mutant), "worker_randomness")
    assert result.status == "failed" and result.where == "labels == -100 of batches 0 and 1 of epoch 0"
    # Batches 0 and 1 and so on agree: every pair of each group of workers.
    assert result.value == 6 // n_workers * n_workers * (n_workers - 1) / 2


def test_what_all_batches_have_in_common_is_no_random_draw():
    class Numbered(Loop):
        def collate(self, rows):
            batch = super().collate(rows)
            places = torch.arange(self.seq_len).expand(len(rows), -1)
            return batch | {"rows": torch.arange(4)[:, None] + 0 * places, "places": places}

        def targets(self, batch):
            batch.pop("rows"), batch.pop("places")
            return super().targets(batch)

    assert ask(loop_spec_of(Numbered), "worker_randomness").status == "passed"


def test_rows_of_parts():
    def ids(batch_size, seq_len, generator):
        return torch.randint(61, (batch_size, seq_len), generator=generator)

    def images(batch_size, seq_len, generator):
        tokens = ids(batch_size, seq_len, generator)
        return {"input_ids": tokens, "pixels": torch.randn(3 * batch_size, 2, 2, generator=generator)}

    def positions(batch_size, seq_len, generator):
        tokens = ids(batch_size, seq_len, generator)
        return {"input_ids": tokens, "position_ids": torch.arange(seq_len)[None]}

    def packed(batch_size, seq_len, generator):
        return {"input_ids": ids(batch_size, seq_len, generator).view(1, -1)}

    def collapsed(batch_size, seq_len, generator):
        return ids(batch_size, seq_len, generator)[:1]

    answers = {
        f: ask(loop(), "batch_rows", make_batch=f) for f in (ids, images, positions, packed, collapsed)
    }
    assert answers[ids].status == answers[packed].status == "passed"
    # An example may have several images, and all rows may share their positions.
    assert answers[images].status == answers[positions].status == "passed"
    assert (answers[collapsed].status, answers[collapsed].where) == ("failed", "batch (1, 16)")
