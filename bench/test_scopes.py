"""Scopes: whole short runs of our trainer, in which each unit has four steps on the same batches."""

import pytest
import torch

from bench.racks import sizes
from stackwise import ArchitectureTrainer, StackWiseConfig, create_rack_from_config
from stackwise.benchmark.workload import callable_workload

SIZES = sizes([{"batch_size": 2, "seq_len": 256}], [{"batch_size": 8, "seq_len": 2048}])
STEPS, N_STACKS = 4, 2


@pytest.mark.benchmark(group="scopes")
@pytest.mark.parametrize("scope", ["rackwise", "stackwise", "blockwise"])
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_scope(throughput, shape, size, scope):
    device = "cuda" if shape.d_model > 1024 else "cpu"
    per_stack = shape.n_layers // N_STACKS
    config = StackWiseConfig.from_dict(
        {
            "model": {
                "vocab_size": shape.vocab_size,
                "d_model": shape.d_model,
                "d_ff": shape.d_ff,
                "n_heads": shape.n_heads,
                "n_kv_heads": shape.n_kv_heads,
                "attention_type": "gqa",
                "architecture": {"n_stacks": N_STACKS, "blocks_per_stack": per_stack},
            },
            "training": {
                "training_architecture": scope,
                "max_steps": STEPS,
                "device": device,
                "precision": "bf16",
                **size,
            },
        }
    )
    torch.manual_seed(0)
    batches = list(torch.randint(shape.vocab_size, (STEPS, size["batch_size"], size["seq_len"] + 1)))
    rack = create_rack_from_config(config)
    units = {"rackwise": 1, "stackwise": N_STACKS, "blockwise": shape.n_layers}[scope]
    tokens = units * STEPS * size["batch_size"] * size["seq_len"]

    def run():
        ArchitectureTrainer(config, progress=False).train_architecture(rack, batches)

    workload = callable_workload(run, name=scope, device=device, tokens=tokens)
    throughput(workload, min_seconds=3.0, warmup_seconds=5.0)
