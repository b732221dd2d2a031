"""Alone: does nothing but the main thread of this process compute?"""

import json

import pytest

from tests.forked import printed

# In a process of its own: tests that ran before in this one have left threads, and processes that wait.
PROGRAM = """
import json, subprocess, sys, threading, time
from stackwise.gate.side.subject import Alone

def compute():
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass

def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

def answer_after(work):
    alone = Alone()
    work()
    return alone.holds()

def answer_of_a_thread():
    answers = []
    in_thread(lambda: answers.append(Alone().holds()))
    return answers[0]

child = [sys.executable, "-c", "sum(range(2_000_000))"]
answers = {
    "main thread computes": answer_after(compute),
    "nothing computes": answer_after(lambda: None),
    "main thread sleeps": answer_after(lambda: time.sleep(0.02)),
    "thread computes": answer_after(lambda: in_thread(compute)),
    "main thread computes after a thread": answer_after(compute),
    "child process computes": answer_after(lambda: subprocess.run(child, check=True)),
    "main thread computes after a child process": answer_after(compute),
    "another thread asks": answer_of_a_thread(),
}
waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
answers["child process waits"] = answer_after(lambda: None)
waiting.communicate(b"\\n")
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers():
    """Answers of `Alone` by what happened meanwhile."""
    return json.loads(printed(PROGRAM))


@pytest.mark.parametrize(
    ("meanwhile", "alone"),
    [
        ("main thread computes", True),
        ("nothing computes", True),
        ("main thread sleeps", True),
        ("thread computes", False),
        ("main thread computes after a thread", True),
        ("child process computes", False),
        ("main thread computes after a child process", True),
        ("child process waits", False),
        ("another thread asks", False),
    ],
)
def test_alone(answers, meanwhile, alone):
    assert answers[meanwhile] is alone
