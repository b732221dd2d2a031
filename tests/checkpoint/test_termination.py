"""Termination: two signals are noted, the third acts; a run that was ended goes on bit for bit."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from stackwise.checkpoint import EXIT_CODE, CheckpointManager, Termination
from tests.forked import HANG_SECONDS

SCRIPT = """
import sys, torch
from stackwise.checkpoint import EXIT_CODE, CheckpointManager, Termination

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
objects = {"model": model, "optimizer": optimizer}
manager = CheckpointManager(sys.argv[1])
found = manager.restore(objects)
step = 0 if found is None else found.step
with Termination() as termination:
    while step < 50:
        model(torch.randn(3, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 20 and sys.argv[2:] == ["waits"]:
            print("now", flush=True)
            sys.stdin.readline()
        if termination.requested:
            manager.save(step, objects)
            manager.close()
            sys.exit(EXIT_CODE)
manager.save(step, objects)
"""


def ended(directory, number):
    """What comes of a run that gets a signal in its 20th step."""
    command = [sys.executable, "-c", SCRIPT, str(directory), "waits"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(number)
        _, errors = process.communicate("\n", timeout=HANG_SECONDS)
    return process.returncode, errors


@pytest.mark.slow  # beside the same of `stackwise train`, in tests/training
def test_a_run_saves_and_exits_and_goes_on(tmp_path, monkeypatch):
    assert ended(tmp_path / "ended", signal.SIGTERM) == (EXIT_CODE, "")
    assert EXIT_CODE == os.EX_TEMPFAIL
    manager = CheckpointManager(tmp_path / "ended")
    assert manager.steps() == [20]
    weights = []
    for name in ("ended", "whole"):
        monkeypatch.setattr(sys, "argv", ["", str(tmp_path / name)])
        exec(compile(SCRIPT, "script", "exec"), {})
        model = torch.nn.Linear(2, 2)
        CheckpointManager(tmp_path / name).restore({"model": model}, 50)
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_flag_and_handlers():
    before = signal.getsignal(signal.SIGTERM)
    with Termination() as termination:
        assert not termination.requested and not termination.requested_anywhere()
        assert termination.signal is None
        signal.raise_signal(signal.SIGTERM)
        assert termination.requested and termination.requested_anywhere()
        assert termination.signal is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    with termination:
        assert not termination.requested


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt: it is ignored in what a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_third_signal_acts_as_usual():
    """The second may be the same request once more, by torchrun."""
    # Raised in this thread: of two that another thread has not handed on yet one is lost.
    with pytest.raises(KeyboardInterrupt), Termination() as termination:  # noqa: PT012
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert termination.signal is signal.SIGTERM
        signal.raise_signal(signal.SIGINT)
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("usual"))
    try:
        with Termination((signal.SIGTERM,)):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert heard == []
            signal.raise_signal(signal.SIGTERM)
            assert heard == ["usual"]
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("interruptible")
def test_second_interrupt_acts_as_usual(capfd):
    with pytest.raises(KeyboardInterrupt), Termination() as termination:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        assert termination.requested
        signal.raise_signal(signal.SIGTERM)
        assert "Press Ctrl-C again" in capfd.readouterr().err
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    "signals, code",
    [([], 0), ([signal.SIGTERM], 75), ([signal.SIGINT], 130), ([signal.SIGTERM, signal.SIGINT], 75)],
)
def test_exit_code_names_the_first_signal(signals, code):
    with Termination() as termination:
        for number in signals:
            signal.raise_signal(number)
    assert termination.exit_code == code


def test_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Termination() as termination:
            signal.raise_signal(signal.SIGINT)
        assert not termination.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


TORCHRUN = """
import os, sys, time
from pathlib import Path
from torch import distributed
from stackwise.checkpoint import EXIT_CODE, CheckpointManager, Termination

distributed.init_process_group("gloo")
rank, folder = distributed.get_rank(), Path(sys.argv[1])


def slowly(path):
    (folder / "saving").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    path.write_text("x")


with Termination() as termination, CheckpointManager(folder / "run") as manager:
    found = manager.restore({"own": (own := {})})
    for step in range(1 if found is None else found.step, 100000):
        own["step"] = step
        if step == 20:
            (folder / f"pid-{rank}").write_text(str(os.getpid()))
            time.sleep(0.05 * rank)
        if termination.requested_anywhere():
            manager.save(step, {"own": own}, files={"x": slowly})
            manager.close()
            (folder / f"ended-{rank}").write_text(str(step))
            sys.exit(EXIT_CODE)
        time.sleep(0.001)
"""


def until(condition, process):
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow
def test_torchrun_and_its_processes_are_both_asked(tmp_path):
    """Every process hears of it twice, the second time while it saves, and the checkpoint is whole."""
    (tmp_path / "script.py").write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [*command, str(tmp_path / "script.py"), str(tmp_path)], env=environment, stdout=file, stderr=file
        )
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    until(lambda: all(path.exists() and path.read_text() for path in pids), process)
    for path in pids:
        os.kill(int(path.read_text()), signal.SIGTERM)
    until((tmp_path / "saving").exists, process)
    process.send_signal(signal.SIGTERM)  # which passes it on, and says so
    until(lambda: said.read_text().count("closing signal SIGTERM") == 2, process)
    (tmp_path / "go").touch()
    assert process.wait(timeout=HANG_SECONDS) != 0
    ended = [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)]
    assert ended[0] == ended[1], said.read_text()
    manager = CheckpointManager(tmp_path / "run")
    assert manager.steps() == [int(ended[0])]
    manager.verify(int(ended[0]))


def wait_in(connection):
    connection.send("here")
    while True:  # a signal that arrives just before a sleep is handled only after it
        time.sleep(0.01)


def half_a_second(x):
    time.sleep(0.5)
    return x


def in_a_pool():
    """Exit code: whether the work of a pool was finished after a signal to all processes of its group."""
    os.setpgid(0, 0)
    signal.alarm(HANG_SECONDS)
    with Termination() as termination:
        pool = multiprocessing.get_context("fork").Pool(2)
        found = pool.map_async(half_a_second, range(4))
        time.sleep(0.2)
        os.killpg(0, signal.SIGTERM)
        assert found.get() == [0, 1, 2, 3]
        assert termination.requested
        pool.map_async(half_a_second, range(1000))
        time.sleep(0.2)
        pool.terminate()  # the second that they hear
        pool.join()
    os._exit(0)


def asked_alone():
    """Exit code: whether a forked process ends by one signal behind the `with` in which this one had one."""
    os.setpgid(0, 0)
    signal.alarm(HANG_SECONDS)
    context = multiprocessing.get_context("fork")
    with Termination():
        ours, theirs = context.Pipe()
        process = context.Process(target=wait_in, args=(theirs,))
        process.start()
        assert ours.recv() == "here"
        signal.raise_signal(signal.SIGTERM)
    process.terminate()
    process.join()
    os._exit(0)


@pytest.mark.parametrize("target", [in_a_pool, asked_alone])
def test_forked_processes_where_their_parent_was_asked_too(target):
    """As by a scheduler, which signals all processes: the loop may wait for what they make."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join(HANG_SECONDS)
    code = process.exitcode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert code == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_forked_process_ends_as_usual(interrupted):
    """As `Process.terminate()` and `Pool` ask for it; Ctrl-C is for all processes of a terminal."""
    context = multiprocessing.get_context("fork")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Termination() as termination:
            ours, theirs = context.Pipe()
            process = context.Process(target=wait_in, args=(theirs,))
            process.start()
            assert ours.recv() == "here"
            if interrupted:
                os.kill(process.pid, signal.SIGINT)
            process.terminate()
            process.join(HANG_SECONDS)
            code = process.exitcode
            process.kill()
            assert code == -signal.SIGTERM
            assert not termination.requested
    finally:
        signal.signal(signal.SIGTERM, before)


def test_only_the_main_thread_hears():
    errors = []

    def enter():
        try:
            Termination().__enter__()
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == [
        "Termination: got 'another thread'; allowed: the main thread, which alone hears signals"
    ]
    with pytest.raises(ValueError, match=r"^signals: got"):
        Termination(())


def test_the_room_is_not_imported_with_the_package():
    code = "import sys, stackwise; assert not {'torch', 'stackwise.checkpoint'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
