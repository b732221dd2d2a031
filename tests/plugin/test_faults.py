"""Faults in what a test has itself: a loop, processes, a folder."""

import pytest

LOOP = """
import torch
from torch import nn

def train(inject, loader, folder=None, steps=5):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with inject((model, optimizer)) as injection:
        for step, x in enumerate(injection.loader(loader)):
            loss = model(x).square().mean()
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None:
                (folder / f"step-{step}").write_bytes(bytes([1] * 100))
    return injection.fired, seen

def in_process(inject, folder):
    return train(inject, torch.ones(5, 2, 4), folder)

def of_rank(inject):
    from torch import distributed
    fired, seen = in_process(inject, None)
    total = torch.tensor(1.0)
    distributed.all_reduce(total)
    return total.item(), fired

def raises(inject):
    raise KeyError("nobody trains")
"""


@pytest.fixture
def written(pytester, run):
    """Run a test file of these lines."""
    pytester.makepyfile(loop=LOOP)

    def written(body, *arguments):
        pytester.makepyfile(test_it=f"import loop, pytest, torch\nONES = torch.ones(5, 2, 4)\n{body}")
        return run(*arguments)

    return written


@pytest.mark.parametrize(
    "marker, steps",
    [
        ("nan_injection(step=2, target='gradient')", [2]),
        ("nan_injection(step=2, target='batch')", [2]),
        ("corrupt_sample(step=1, duration=2)", [1, 2]),
        ("bit_flip(step=3)", [3]),
        ("disk_full(step=3, folder='kept', duration=9)", None),
        ("bit_rot(step=3)", [3]),
    ],
)
def test_a_loop_of_ones_own(written, report, marker, steps):
    saves = "tmp_path" if "disk" in marker or "rot" in marker else "None"
    act = "with pytest.raises(OSError, match='No space'): loop.train(inject_faults, ONES, tmp_path / 'kept')"
    if steps is not None:
        act = f"assert loop.train(inject_faults, ONES, {saves})[0] == {steps}"
    result = written(
        f"@pytest.mark.{marker}\n"
        f"def test_it(inject_faults, tmp_path):\n    (tmp_path / 'kept').mkdir()\n    {act}",
        "--stackwise-report=out.json",
    )
    result.assert_outcomes(passed=1)
    (record,) = report()["stability"]
    assert (record["verdict"], record["model"], record["fired"]) == ("caught", "Sequential", steps or [3])
    assert record["faults"][0].startswith(marker.partition("(")[0])


def test_loader_and_worker(written):
    result = written(
        """
from stackwise.stability.faults import UnreadableSampleError
from torch.utils.data import DataLoader

@pytest.mark.unreadable_sample(step=2)
def test_sample(inject_faults):
    with pytest.raises(UnreadableSampleError): loop.train(inject_faults, ONES)

@pytest.mark.worker_death(step=2)
def test_worker(inject_faults):
    with pytest.raises(RuntimeError, match="worker"):
        loop.train(inject_faults, DataLoader(torch.ones(40, 4), batch_size=4, num_workers=1))
"""
    )
    result.assert_outcomes(passed=2)


def test_sigterm(written, run_apart):
    result = written(
        """
import signal

@pytest.mark.process_signal(step=2)
def test_handled(inject_faults):
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    try:
        assert loop.train(inject_faults, ONES)[0] == [2]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [1]

@pytest.mark.process_signal(step=2)
def test_not_handled(inject_faults): loop.train(inject_faults, ONES)

@pytest.mark.process_signal(step=2, kind="SIGKILL")
def test_killed(inject_faults): loop.train(inject_faults, ONES)

def test_as_before(): assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["SIGTERM: nothing handles it*"])
    result.stdout.fnmatch_lines(["E *it would end the process of the tests; wanted run_processes"])


def test_killed_in_a_save(written, report):
    result = written(
        """
@pytest.mark.nan_injection(step=1)
@pytest.mark.process_signal(step=3, kind="SIGKILL", moment="save", operation=1)
def test_it(run_processes, tmp_path):
    [child] = run_processes(loop.in_process, tmp_path)
    assert (child.exit_code, child.value, child.error) == (-9, None, "")
    assert (child.fired, child.acted) == ((1, 3), (0, 1))
    assert (tmp_path / "step-2").stat().st_size == 100
    assert (tmp_path / "step-3").stat().st_size == 0
""",
        "--stackwise-report=out.json",
    )
    result.assert_outcomes(passed=1)
    assert [(r["verdict"], r["fired"]) for r in report()["stability"]] == [("caught", [1, 3])]


def test_each_fault_has_to_act(written):
    result = written(
        """
@pytest.mark.nan_injection(step=1)
@pytest.mark.nan_injection(step=99, target="loss")
def test_it(run_processes, tmp_path): run_processes(loop.in_process, tmp_path)
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E *TargetNotReachedError: nan_injection(step=99, target='loss'): did not act; process 0 raised: *"]
    )


@pytest.mark.slow
def test_ranks(written, report):
    result = written(
        """
@pytest.mark.slow_rank(step=1, rank=1, seconds=0.2)
def test_slow(run_processes):
    zero, one = run_processes(loop.of_rank, n=2)
    assert (zero.value, one.value) == ((2.0, []), (2.0, [1]))

@pytest.mark.dead_rank(step=1, rank=1)
def test_dead(run_processes):
    zero, one = run_processes(loop.of_rank, n=2, timeout=60)
    assert (one.exit_code, one.fired, zero.exit_code) == (-9, (1,), 1)
    assert zero.error

def test_no_faults(run_processes, tmp_path):
    [child] = run_processes(loop.in_process, tmp_path)
    assert child.exit_code == 0 and len(child.value[1]) == 5

@pytest.mark.dead_rank(step=9)
def test_not_reached(run_processes): run_processes(loop.raises, n=2)
""",
        "--stackwise-report=out.json",
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["E *TargetNotReachedError: dead_rank(step=9): did not act; process 0 raised: KeyError: 'nobody*"]
    )
    verdicts = {r["test"].rpartition("::")[2]: (r["verdict"], r["fired"]) for r in report()["stability"]}
    assert verdicts["test_dead"] == ("caught", [1])
    assert verdicts["test_not_reached"] == ("not recovered", [])


def test_storage(written, report):
    result = written(
        """
@pytest.mark.disk_full(after=10)
def test_full(broken_storage, tmp_path):
    with pytest.raises(OSError, match="No space"), broken_storage():
        (tmp_path / "a").write_bytes(bytes(100))
    assert (tmp_path / "a").stat().st_size == 10
    (tmp_path / "b").write_bytes(bytes(100))

@pytest.mark.short_write(after=10, folder="below", target="*.bin")
def test_short(broken_storage, tmp_path):
    (tmp_path / "below").mkdir()
    with broken_storage() as hits:
        for name in ("above.bin", "below/a.bin", "below/a.txt"):
            (tmp_path / name).write_bytes(bytes(100))
    sizes = [(tmp_path / name).stat().st_size for name in ("above.bin", "below/a.bin", "below/a.txt")]
    assert sizes == [100, 10, 100]
    assert [fault.name for fault in hits.acted] == ["short_write"]

@pytest.mark.bit_rot(seed=1)
def test_rot(broken_storage, tmp_path):
    with broken_storage() as hits:
        (tmp_path / "a").write_bytes(bytes(100))
        assert not hits.rotten
    [(path, byte)] = hits.rotten
    assert path == tmp_path / "a" and path.read_bytes()[byte] != 0
    assert sum(value != 0 for value in path.read_bytes()) == 1

@pytest.mark.disk_full(after=1000)
def test_enough_room(broken_storage, tmp_path):
    with broken_storage(): (tmp_path / "a").write_bytes(bytes(100))
""",
        "--stackwise-report=out.json",
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["E *TargetNotReachedError: disk_full(*): did not act: nothing was written *"]
    )
    assert [record["verdict"] for record in report()["stability"]] == ["caught"] * 3 + ["not recovered"]


@pytest.mark.parametrize(
    "fixture, marker, wanted",
    [
        ("inject_faults", "nan_injection(step=1)", "inject_faults"),
        ("run_processes", "dead_rank(step=1)", "run_processes"),
        ("broken_storage", "disk_full()", "broken_storage"),
        ("stability_run, inject_faults", "bit_flip(step=1)", "stability_run or inject_faults"),
    ],
)
def test_faults_that_nothing_was_broken_by(written, fixture, marker, wanted):
    result = written(f"@pytest.mark.{marker}\ndef test_it({fixture}): pass")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"the test declares faults but never called {wanted}"])


def test_function_that_no_process_can_have(written):
    result = written(
        "@pytest.mark.dead_rank(step=1)\ndef test_it(run_processes): run_processes(lambda inject: None)"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *ValueError: function: got '<lambda>'; allowed: a function at the top *"])


def test_names_of_the_markers_are_those_of_the_faults(pytestconfig):
    from stackwise.stability.faults import KNOWN_FAULTS

    lines = pytestconfig.getini("markers")
    known = {line.split(":")[0].split("(")[0] for line in lines}
    assert known >= set(KNOWN_FAULTS)
