"""Data loader: order of epochs, also after a resume, and `set_epoch` of all parts of a loader."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from stackwise.support.dataloader import iterate_epoch, set_loader_epoch


def orders(loader, set_epoch, n=3):
    found = []
    for number in range(n):
        torch.manual_seed(0)
        found.append(torch.cat(list(iterate_epoch(loader, number, set_epoch))).tolist())
    return found


def test_an_order_from_the_global_generator_goes_on_from_epoch_to_epoch():
    loader = DataLoader(range(10), batch_size=2, shuffle=True)
    torch.manual_seed(0)
    wanted = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert orders(loader, lambda _: None) == wanted
    assert wanted[0] != wanted[1] != wanted[2]


def test_what_shuffles_is_told_the_epoch():
    sampler = DistributedSampler(range(10), num_replicas=1, rank=0)
    loader = DataLoader(range(10), batch_size=2, sampler=sampler)
    found = orders(loader, sampler.set_epoch)
    assert len({tuple(order) for order in found}) == 3
    assert found == orders(loader, sampler.set_epoch)


class Told(torch.utils.data.Dataset):
    """Keeps the epoch that it is told."""

    epoch = None

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i

    def set_epoch(self, epoch):
        self.epoch = epoch


class Streamed(Told, IterableDataset):
    def __iter__(self):
        return iter(range(self.epoch, self.epoch + 3))


def shuffled(dataset):
    return DistributedSampler(dataset, num_replicas=1, rank=0)


class ToldBatches(BatchSampler):
    def __iter__(self):
        return iter([[self.epoch]])

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(10), batch_size=2, sampler=shuffled(range(10))),
        DataLoader(range(10), batch_sampler=BatchSampler(shuffled(range(10)), 2, drop_last=False)),
        DataLoader(range(10), batch_sampler=ToldBatches(range(10), 2, drop_last=False)),
        DataLoader(Told(), batch_size=2, sampler=shuffled(range(10))),
        DataLoader(Streamed(), batch_size=None),
    ],
    ids=["sampler", "sampler of batches", "batch sampler", "sampler beside a dataset", "stream"],
)
def test_all_that_shuffles_is_told(loader):
    found = []
    for epoch in (0, 1, 0):
        set_loader_epoch(loader, epoch)
        found.append([torch.as_tensor(batch).tolist() for batch in loader])
    assert found[0] == found[2] != found[1]
    assert getattr(loader.dataset, "epoch", 0) == 0


def test_a_loader_of_its_own_is_told_and_one_that_asks_for_nothing_is_not():
    loader = Told()
    set_loader_epoch(loader, 3)
    assert loader.epoch == 3
    set_loader_epoch([torch.zeros(1)], 3)
