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

from subject.work import make

made = functools.cache(make)
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
