"""What disturbs a measurement: the same again, in bursts or phases, and gone afterwards."""

import itertools
import subprocess
import sys

import pytest

from bench.gate import noise as noise_module
from bench.gate.noise import KINDS, noise, spans
from tests.forked import HANG_SECONDS


def first(kind, seed, thread, count=400):
    return list(itertools.islice(spans(kind, seed, thread), count))


@pytest.mark.parametrize(("kind", "shortest", "longest"), [("bursts", 0.02, 0.5), ("phases", 15.0, 50.0)])
def test_lengths_of_work_and_pauses(kind, shortest, longest):
    found = first(kind, 3, 0)
    works = [span.end - span.start for span in found]
    pauses = [later.start - earlier.end for earlier, later in itertools.pairwise(found)]
    for lengths in (works, pauses):
        assert shortest <= min(lengths) and max(lengths) <= longest
    assert sum(works) / (sum(works) + sum(pauses)) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_the_same_again(kind):
    assert first(kind, 5, 1) == first(kind, 5, 1)
    assert first(kind, 5, 1) != first(kind, 6, 1)


def test_phases_are_of_all_threads_and_bursts_of_each():
    assert first("phases", 5, 0) == first("phases", 5, 1)
    assert first("bursts", 5, 0) != first("bursts", 5, 1)


def test_half_of_the_seeds_begin_with_a_pause():
    begins = [first("phases", seed, 0, 1)[0].start == 0.0 for seed in range(200)]
    assert 70 < sum(begins) < 130


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="got 'storm'; allowed: bursts, phases"):
        first("storm", 0, 0)


def test_it_ends_with_its_block(monkeypatch):
    started = []
    plain = subprocess.Popen

    def popen(*arguments, **options):
        started.append(plain(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(noise_module.subprocess, "Popen", popen)
    with noise("bursts", 0):
        [process] = started
        assert process.poll() is None
    assert process.returncode == 0


def test_it_ends_where_the_block_fails(monkeypatch):
    ended = []
    plain = subprocess.Popen.wait

    def wait(process, timeout=None):
        ended.append(plain(process, timeout))
        return ended[-1]

    monkeypatch.setattr(subprocess.Popen, "wait", wait)

    def fail():
        with noise("bursts", 0):
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert ended == [0]


def test_an_idle_machine_has_none(monkeypatch):
    monkeypatch.setattr(noise_module.subprocess, "Popen", None)
    with noise("idle", 0):
        pass


def test_it_ends_when_who_started_it_is_gone():
    """By the pipe, which the system closes whatever became of its owner."""
    program = (
        "import subprocess, sys, os\n"
        "command = [sys.executable, '-m', 'bench.gate.noise', 'bursts', '0']\n"
        "process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "process.stdout.readline()\n"
        "print(process.pid, flush=True)\n"
        "os._exit(9)"
    )
    # The noise holds the pipe of errors, too: `run` comes back only when it has ended.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )
    assert done.returncode == 9
    assert done.stdout.strip().isdigit()
