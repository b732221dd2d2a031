"""epoch_of: the orders that epochs of one training would have."""

import torch
from torch.utils.data import DataLoader, DistributedSampler

from stackwise.loader_epoch import epoch_of


def orders(loader, set_epoch, n=3):
    found = []
    for number in range(n):
        torch.manual_seed(0)
        found.append(torch.cat(list(epoch_of(loader, number, set_epoch))).tolist())
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
