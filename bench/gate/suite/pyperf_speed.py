"""The same calls for pyperf."""

import pyperf
from subject.effect import NAMES
from subject.work import make


def when_called(name):
    # What a worker process of another benchmark does not need is not made in it.
    call = None

    def lazily():
        nonlocal call
        if call is None:
            call = make(name)
        return call()

    return lazily


if __name__ == "__main__":
    runner = pyperf.Runner()
    for each in NAMES:
        runner.bench_func(each, when_called(each))
