"""Graph replay: a workload captured as a CUDA graph, a metric of its own.

A replay launches everything at once, so that Python and launches cost nothing. A model that is slow for their
sake is fast in a replay, which is why the one time never stands in for the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from stackwise.benchmark.workload import Workload, check_workload
from stackwise.support.arguments import check_sizes

__all__ = ["graph_replay"]

_SUFFIX = "CUDA graph replay"


def graph_replay(workload: Workload, *, warmup_calls: int = 3) -> Workload:
    """The workload whose call replays what one call of `workload` launches, under a name that says so.

    The call must always launch the same on the same memory, must not wait for the device, and an optimizer in
    it must be made for it (`capturable=True`). What it computes is counted in `workload.call`, since a replay
    shows none of it; the peak of its memory is not told, since a replay asks the allocator for nothing.

    Args:
        workload: on a CUDA device.
        warmup_calls: on a side stream before the capture, so that nothing is loaded or chosen inside it.

    Raises:
        ValueError: a workload on another device, fewer than three calls, or a call that cannot be captured:
            what torch says of it is the cause. Nor can one that puts something back before each call, since a
            replay goes on where the capture did.
        TypeError: no workload.
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
        each_token=None,  # a replay has no moment for each token
    )
