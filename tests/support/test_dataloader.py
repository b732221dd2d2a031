"""Data loader: order of epochs, also after a resume, and `set_epoch` of all parts of a loader."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from stackwise.support.dataloader import iterate_epoch, set_loader_epoch


class Numbers(Dataset):
    """Ten numbers, and the epoch that was set last."""

    epoch = None

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i

    def set_epoch(self, epoch):
        self.epoch = epoch


class Stream(Numbers, IterableDataset):
    def __iter__(self):
        return iter(range(self.epoch, self.epoch + 3))


class EpochBatches(BatchSampler):
    def __iter__(self):
        return iter([[self.epoch]])

    def set_epoch(self, epoch):
        self.epoch = epoch


def shuffled(dataset):
    return DistributedSampler(dataset, num_replicas=1, rank=0)


def orders(loader, set_epoch):
    """Return the order of each of three epochs, each started alone."""
    found = []
    for number in range(3):
        torch.manual_seed(0)
        found.append(torch.cat(list(iterate_epoch(loader, number, set_epoch))).tolist())
    return found


def test_epoch_has_the_global_generators_order_of_an_uninterrupted_run():
    loader = DataLoader(range(10), batch_size=2, shuffle=True)
    torch.manual_seed(0)
    expected = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert orders(loader, lambda _: None) == expected
    assert expected[0] != expected[1] != expected[2]


def test_epoch_has_the_order_of_a_sampler_with_epochs():
    sampler = shuffled(range(10))
    loader = DataLoader(range(10), batch_size=2, sampler=sampler)
    found = orders(loader, sampler.set_epoch)
    assert len({tuple(order) for order in found}) == 3
    assert found == orders(loader, sampler.set_epoch)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(10), batch_size=2, sampler=shuffled(range(10))),
        DataLoader(range(10), batch_sampler=BatchSampler(shuffled(range(10)), 2, drop_last=False)),
        DataLoader(range(10), batch_sampler=EpochBatches(range(10), 2, drop_last=False)),
        DataLoader(Numbers(), batch_size=2, sampler=shuffled(range(10))),
        DataLoader(Stream(), batch_size=None),
    ],
    ids=["sampler", "sampler of batches", "batch sampler", "sampler and dataset", "stream"],
)
def test_set_epoch_reaches_all_parts_of_a_loader(loader):
    found = []
    for epoch in (0, 1, 0):
        set_loader_epoch(loader, epoch)
        found.append([torch.as_tensor(batch).tolist() for batch in loader])
    assert found[0] == found[2] != found[1]
    assert getattr(loader.dataset, "epoch", 0) == 0


def test_set_epoch_reaches_a_loader_of_another_class():
    loader = Numbers()
    set_loader_epoch(loader, 3)
    assert loader.epoch == 3
    set_loader_epoch([torch.zeros(1)], 3)  # a list has no epoch
