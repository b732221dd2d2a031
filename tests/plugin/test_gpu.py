"""The option `--gpu`: what needs a GPU is skipped by name, or the run stops; it is never green."""

import pytest
import torch

ORDINARY = "import pathlib\ndef test_ordinary(): pathlib.Path('ran').touch()"
MARKED = """
import pathlib, pytest
@pytest.mark.gpu
def test_marked(): pathlib.Path("ran").touch()
def test_ordinary(): pass
"""
OWN_OPTION = """
def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="ours")
"""
OWN_DEST = """
def pytest_addoption(parser):
    parser.getgroup("ours").addoption("--gpu", dest="with_gpu", action="store_true", default=False)
"""


@pytest.fixture
def cuda(monkeypatch, _machine_without_gpu):
    """A machine that says it has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        "stackwise.support.random_state._cuda_devices_in_use", list
    )  # it has no state to ask for


def refused(result):
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --gpu: this machine has no CUDA device*"])


def test_marked_test_is_skipped_with_the_reason(pytester, folder, run):
    pytester.makepyfile(MARKED)
    result = run("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*needs a GPU: run with --gpu"])
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("source", [MARKED, ORDINARY], ids=["marked", "ordinary"])
def test_no_test_runs_where_there_is_no_gpu(pytester, folder, run, source):
    pytester.makepyfile(source)
    refused(run("--gpu"))
    assert not (folder / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("source", [MARKED, ORDINARY], ids=["marked", "ordinary"])
def test_no_worker_runs_a_test_where_there_is_no_gpu(pytester, folder, run_apart, source):
    pytester.makepyfile(source)
    refused(run_apart("--gpu", "-n", "2"))
    assert not (folder / "ran").exists()


def test_cpu_as_the_device_does_not_stand_in(pytester, run):
    pytester.makepyfile(MARKED)
    refused(run("--gpu", "--stackwise-device=cpu"))


def test_option_in_addopts(pytester, run):
    pytester.makepyfile(ORDINARY)
    pytester.makeini("[pytest]\naddopts = --gpu")
    refused(run())


def test_marked_test_runs_where_there_is_one(pytester, folder, run, cuda):
    pytester.makepyfile(MARKED)
    run("--gpu").assert_outcomes(passed=2)
    assert (folder / "ran").exists()


def test_models_go_to_the_gpu_unless_a_device_is_named(pytester, folder, run, cuda, monkeypatch):
    from stackwise import ModelSpec

    asked, create = [], ModelSpec.create

    def recording(self, device="cpu", seed=0):
        asked.append(str(device))
        return create(self, "cpu", seed)

    monkeypatch.setattr(ModelSpec, "create", recording)
    pytester.makepyfile("import models\ndef test_it(stability_run): stability_run(models.plain, steps=1)")
    run("--gpu")
    assert set(asked) == {"cuda"}
    asked.clear()
    run("--gpu", "--stackwise-device=cuda:0")
    assert set(asked) == {"cuda:0"}
    asked.clear()
    run("--gpu", "--stackwise-device=cpu")  # torch may yet look for the GPU that is not there
    assert set(asked) == {"cpu"}


def test_gpu_and_its_device_are_told_apart(pytester, folder, run, cuda):
    pytester.makepyfile(MARKED)
    run("--stackwise-device=cuda").assert_outcomes(passed=1, skipped=1)


@pytest.mark.parametrize("conftest", [OWN_OPTION, OWN_DEST], ids=["plain", "dest"])
@pytest.mark.parametrize("place", [".", "tests"], ids=["root", "subfolder"])
class TestOptionOfAConftest:
    def write(self, folder, place, conftest):
        at = folder / place
        at.mkdir(exist_ok=True)
        (at / "conftest.py").write_text(conftest)
        (at / "test_it.py").write_text(MARKED)

    def test_without_it_marked_tests_are_skipped(self, folder, run, conftest, place):
        self.write(folder, place, conftest)
        run().assert_outcomes(passed=1, skipped=1)

    def test_with_it_the_run_stops_without_a_gpu(self, folder, run, conftest, place):
        self.write(folder, place, conftest)
        refused(run("--gpu"))

    def test_with_it_marked_tests_run(self, folder, run, cuda, conftest, place):
        self.write(folder, place, conftest)
        run("--gpu").assert_outcomes(passed=2)


def test_option_of_a_conftest_keeps_its_own_help(pytester, run):
    pytester.makeconftest(OWN_OPTION)
    result = run("--help")
    assert result.ret == 0
    lines = [line.split() for line in result.outlines if line.startswith("  --gpu")]
    assert lines == [["--gpu", "ours"]]


def test_conftest_that_is_found_late(folder, run):
    deep = folder / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "conftest.py").write_text(OWN_OPTION)
    (deep / "test_it.py").write_text(MARKED)
    run("a").assert_outcomes(passed=1, skipped=1)
    refused(run("--gpu", "a"))


def test_plugin_named_by_hand(pytester, run_apart, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(MARKED)
    run_apart("-p", "pytest_stackwise.plugin").assert_outcomes(passed=1, skipped=1)


@pytest.mark.slow
def test_option_of_a_plugin_named_by_hand(pytester, run_apart, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(MARKED)
    refused(run_apart("-p", "pytest_stackwise.plugin", "--gpu"))


@pytest.mark.gpu
def test_everything_on_a_real_gpu(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest, torch
        @pytest.mark.gpu
        @pytest.mark.gradient_explosion(step=6)
        def test_stability(stability_run):
            assert stability_run(models.rack).verdict == "caught"
        @pytest.mark.gpu
        @pytest.mark.throughput(mode="train", batch_size=2, seq_len=8)
        def test_speed(throughput):
            throughput(models.rack, **models.QUICK)
        """
    )
    run("--gpu", "--stackwise-model=models:rack", "--stackwise-report=out.json").assert_outcomes(passed=9)
    assert report()["throughput"][0]["device"] == "cuda"
    assert report()["throughput"][0]["peak_memory_bytes"] > 0


@pytest.mark.parametrize("arguments", [(), ("--gpu", "2")])
def test_option_of_another_meaning_is_left_alone(pytester, run, arguments):
    pytester.makeconftest(
        """
        def pytest_addoption(parser):
            parser.addoption("--gpu", type=int, default=-1)
        """
    )
    pytester.makepyfile(MARKED)
    run(*arguments).assert_outcomes(passed=1, skipped=1)
