"""Graph replay: a workload captured as a CUDA graph, which is a separate metric.

A replay launches all kernels at once, without the cost of Python and of single launches. A model that is slow
because of these costs is fast in a replay. The two times are therefore not interchangeable.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from stackwise.benchmark.workload import Workload, check_workload
from stackwise.support.arguments import check_sizes

__all__ = ["graph_replay"]

_SUFFIX = "CUDA graph replay"


def graph_replay(workload: Workload, *, warmup_calls: int = 3) -> Workload:
    """Return a workload that replays the kernels of one call of `workload`, and mention it in its name.

    The call must always launch the same kernels on the same memory and must not wait for the device. An
    optimizer in it needs `capturable=True`. FLOPs are counted in `workload.call`, because a replay does not
    show its operations. The peak memory is unknown, because a replay requests no memory from the allocator.

    Args:
        workload: workload on a CUDA device.
        warmup_calls: number of calls on a side stream before the capture, so that no library is loaded and no
            kernel is selected during the capture.

    Raises:
        ValueError: a workload on another device, fewer than three warm-up calls, or a call that cannot be
            captured, with the error of torch as the cause. A workload with `prepare` is also refused, because
            a replay continues from the state of the capture.
        TypeError: not a workload.
    """
    check_workload(workload)
    device = workload.device
    if device.type != "cuda":
        raise ValueError(
            f"graph_replay: got the workload {workload.name!r} on {device}; allowed: one on a CUDA device, "
            "since a CUDA graph is captured"
        )
    check_sizes(3, warmup_calls=warmup_calls)
    if workload.prepare is not None:
        raise ValueError(
            f"graph_replay: got the workload {workload.name!r}, which puts something back before each call; "
            "allowed: one whose calls change nothing that the next one sees"
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        main = torch.cuda.current_stream(device)
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(warmup_calls):
                workload.call()
        main.wait_stream(side)
        try:
            with torch.cuda.graph(graph):
                workload.call()
        except RuntimeError as error:
            raise ValueError(
                f"graph_replay: {workload.name!r} cannot be captured as a CUDA graph: {error}"
            ) from error
    return replace(
        workload,
        name=f"{workload.name}, {_SUFFIX}",
        call=graph.replay,
        replays=workload.call,
        execution=lambda: {**workload.execution(), "launch": _SUFFIX},
        each_token=None,  # a replay has no time for each token
    )
