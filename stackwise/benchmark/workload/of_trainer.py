"""A training step of anybody's loop as a workload."""

from __future__ import annotations

import torch

from stackwise.benchmark.workload.model_facts import execution, weight_notes
from stackwise.benchmark.workload.of_model import check_shape
from stackwise.benchmark.workload.workload import Workload
from stackwise.subject.trainer_spec import TrainerSpec

__all__ = ["trainer_workload"]


def trainer_workload(
    spec: TrainerSpec,
    *,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """A training step of anybody's loop, on one batch and wherever the loop has put its model.

    Of a model on several devices the batch is where its first parameter is. A clock waits for that device,
    and the step itself for the others, as part of its time.

    Args:
        spec: the training step.
        batch_size: B; None: the spec's.
        seq_len: T; None: the spec's.
        seed: of weights and batch.

    Raises:
        ValueError: sizes that are no positive integers, a seed that is none, a loop on another device than a
            CPU or CUDA.
    """
    batch_size = spec.batch_size if batch_size is None else batch_size
    seq_len = spec.seq_len if seq_len is None else seq_len
    check_shape(batch_size=batch_size, seq_len=seq_len, seed=seed)
    run = spec.create(seed=seed)
    devices = list(dict.fromkeys(p.device for p in run.model.parameters())) or [torch.device("cpu")]
    device, beside = devices[0], [other for other in devices[1:] if other.type == "cuda"]
    batch = spec.batch(batch_size, seq_len, device=device, seed=seed)

    def step() -> object:
        result = run.step(batch)
        for other in beside:
            torch.cuda.synchronize(other)
        return result

    return Workload(
        f"{spec.name} step",
        step,
        device,
        batch_size * seq_len,
        lambda: execution(run.model),
        None,
        run.model,
        "train",
        batch_size,
        seq_len,
        counted=False,
        recompute=None,
        notes=lambda: weight_notes(run.model),
    )
