"""One side, for the ablations: makes calls when it is told to, and says how long one took.

It reads lines "NAME CALLS", prepares NAME the first time it is asked for, and answers each with seconds.
"""

import functools
import gc
import sys
import time

from subject.work import make

made = functools.cache(make)
gc.disable()
for line in sys.stdin:
    name, calls = line.split()
    call = made(name)
    start = time.perf_counter()
    for _ in range(int(calls)):
        call()
    print((time.perf_counter() - start) / int(calls), flush=True)
    gc.collect()
