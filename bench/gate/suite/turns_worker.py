"""One side, for the ablations: makes calls when it is told to, and says how long one took.

It is told of `name` and `calls` in lines of JSON, prepares the name the first time, and answers with
`seconds`.
"""

import functools
import gc
import json
import os
import socket
import time
from collections.abc import Callable

from subject.work import make


@functools.cache
def made(name: str) -> Callable[[], object]:
    """A call; what it was made of is left out of each collection, which takes 60 ms behind torch's import."""
    call = make(name)
    gc.freeze()
    return call


gc.disable()
with socket.socket(fileno=int(os.environ["STACKWISE_GATE_CHANNEL"])) as end, end.makefile("rw") as channel:
    for line in channel:
        told = json.loads(line)
        call, calls = made(told["name"]), range(told["calls"])
        start = time.perf_counter()
        for _ in calls:
            call()
        print(json.dumps({"seconds": (time.perf_counter() - start) / len(calls)}), file=channel, flush=True)
        gc.collect()
