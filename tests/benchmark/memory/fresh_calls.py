"""What tests have fresh processes do."""

import os
import sys
import time
from pathlib import Path

import torch


def nothing():
    return lambda: None


def hold(numel, ever=0):
    """A call that holds `numel` numbers; its set-up has held `ever`."""
    torch.ones(ever)
    return lambda: torch.ones(numel)


def threads(file):
    def call():
        Path(file).write_text(f"{torch.get_num_threads()} {os.getpid()} {'pytest' in sys.modules}")

    return call


def fails(where):
    if where == "setting up":
        raise KeyError("no such weights")
    return lambda: {}["no such batch"]


def no_function():
    return 3


def a_model():
    return torch.nn.Linear(2, 2)


def sleeps(file):
    def call():
        if os.fork() == 0:
            Path(file).write_text(str(os.getpid()))
        time.sleep(3600)

    return call


def leaves(status):
    print("a last word")
    sys.stdout.flush()
    return lambda: os._exit(status)


def killed():
    return lambda: os.kill(os.getpid(), 9)
