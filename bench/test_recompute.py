"""Recomputation: a forward and a backward pass with each kind of it."""

import pytest
import torch

from bench.racks import rack_of, sizes
from bench.recompute import KINDS
from stackwise.benchmark.workload import callable_workload
from stackwise.config import RecomputeConfig
from stackwise.training.objective import next_token_loss
from stackwise.training.recompute import recomputing

SIZES = sizes([{"batch_size": 2, "seq_len": 512}], [{"batch_size": 4, "seq_len": 4096}])


@pytest.mark.benchmark(group="recompute")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_recompute(throughput, shape, size, kind):
    device = torch.device("cuda" if shape.d_model > 1024 else "cpu")
    spec = rack_of(shape)
    rack = spec.create(device, 0).train()
    batch = {
        "input_ids": torch.randint(shape.vocab_size, (size["batch_size"], size["seq_len"] + 1)).to(device)
    }
    config = RecomputeConfig.from_dict(KINDS[kind])

    def both_ways():
        with recomputing(rack, config):
            next_token_loss(rack, batch).backward()
        rack.zero_grad()

    tokens = size["batch_size"] * size["seq_len"]
    throughput(callable_workload(both_ways, name=kind, device=device, tokens=tokens), min_seconds=2.0)
