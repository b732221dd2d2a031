"""Workload of a training step of a user-defined training loop."""

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
    """Return a workload of a user-defined training step on one batch, on the devices that the loop uses.

    If the model is on several devices, the batch is on the device of its first parameter. The clock waits for
    that device. The step waits for the other devices, as part of its time.

    Args:
        spec: training step.
        batch_size: B. None: the batch size of the spec.
        seq_len: T. None: the length of the spec.
        seed: seed of weights and batch.

    Raises:
        ValueError: sizes that are not positive integers, an invalid seed, or a device that is neither a CPU
            nor a CUDA device.
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
