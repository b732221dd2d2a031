"""Whether the main thread alone computes."""

import subprocess
import sys
import threading
import time

import pytest

from stackwise.gate.side.alone import Alone

pytestmark = pytest.mark.usefixtures("childless")


def spin(seconds=0.05):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def in_thread():
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()


def in_process():
    subprocess.run([sys.executable, "-c", "sum(range(2_000_000))"], check=True)


@pytest.mark.parametrize("work", [spin, lambda: None, lambda: time.sleep(0.02)])
def test_alone(work):
    alone = Alone()
    work()
    assert alone.holds()


@pytest.mark.parametrize("work", [in_thread, in_process])
def test_not_alone(work):
    alone = Alone()
    work()
    assert not alone.holds()
    later = Alone()
    spin()
    assert later.holds()


def test_a_process_that_waits():
    alone = Alone()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not alone.holds()
    finally:
        child.communicate(b"\n")


def test_another_thread_knows_nothing_of_it():
    said = []
    thread = threading.Thread(target=lambda: said.append(Alone().holds()))
    thread.start()
    thread.join()
    assert said == [False]
