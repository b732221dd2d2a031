"""Memory as tests: limits of the peak, and steps that leave something behind."""

import gc
from xml.etree import ElementTree as ET

import pytest
import torch

from pytest_stackwise import records
from pytest_stackwise.memory import MemoryLimitError, loads_of, require_within
from stackwise.benchmark.memory import fresh_process
from stackwise.benchmark.memory.fresh_process import FreshPeak
from stackwise.benchmark.memory.peak import PeakMemory, peak_memory_bytes

needs_reset = pytest.mark.skipif(
    peak_memory_bytes(lambda: None, torch.device("cpu")) is None,
    reason="this kernel does not reset the high-water mark",
)
FEW = "steps=8, warmup=2"
MB = 1_000_000


@pytest.fixture(autouse=True, scope="module")
def _frozen_again():
    """Tests of other files rely on few objects to collect."""
    yield
    gc.freeze()


def properties(path):
    """Of each test in a JUnit file: {name: {property: value}}."""
    return {
        case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")}
        for case in ET.parse(path).getroot().iter("testcase")
    }


def refused(result, *texts):
    assert result.ret == pytest.ExitCode.INTERRUPTED
    (line,) = [line for line in result.outlines if line.startswith("test_it.py::test_marked")]
    for text in texts:
        assert text in line


@pytest.mark.parametrize("name", ["max_memory", "min_tokens_per_second", "no_memory_growth"])
def test_marker_is_listed(run, name):
    run("--markers", "--strict-markers").stdout.fnmatch_lines([f"@pytest.mark.{name}(*"])


@pytest.mark.parametrize(
    ("marker", "fixture", "texts"),
    [
        ("max_memory", "tmp_path", ["max_memory()", "allowed: a size such as '2 GiB', alone"]),
        ("max_memory()", "tmp_path", ["max_memory()"]),
        ("max_memory(limit='2 GiB')", "tmp_path", ["max_memory(limit='2 GiB')"]),
        ("max_memory('2 GiB', '3 GiB')", "tmp_path", ["max_memory('2 GiB', '3 GiB')"]),
        (
            "max_memory('2 gigs')",
            "tmp_path",
            ["max_memory: limit: got '2 gigs'", "KiB, MiB, GiB, TiB"],
        ),
        ("max_memory(2.5)", "throughput", ["marker max_memory: limit: got 2.5"]),
        ("min_tokens_per_second", "throughput", ["min_tokens_per_second()", "a number of tokens per second"]),
        ("min_tokens_per_second(0)", "throughput", ["rate: got 0; allowed: a finite number > 0"]),
        ("min_tokens_per_second('9')", "throughput", ["rate: got '9'"]),
        ("min_tokens_per_second(float('inf'))", "throughput", ["rate: got inf"]),
        ("no_memory_growth(7)", "no_memory_growth", ["no_memory_growth takes keyword arguments only"]),
        ("no_memory_growth(steps=7)", "no_memory_growth", ["steps: got 7; allowed: an integer >= 8"]),
        ("no_memory_growth(warmup=-1)", "no_memory_growth", ["warmup: got -1; allowed: an integer >= 1"]),
        ("no_memory_growth(tolerance='1 KB')", "no_memory_growth", ["tolerance: got '1 KB'", "KiB"]),
        ("no_memory_growth(tolerance=0)", "no_memory_growth", ["tolerance: got 0"]),
        ("no_memory_growth(limit=1)", "no_memory_growth", ["no_memory_growth", "'limit'"]),
        ("min_tokens_per_second(9)", "tmp_path", ["the test does not use throughput"]),
        ("no_memory_growth()", "throughput", ["the test does not use no_memory_growth"]),
    ],
)
def test_bad_markers_stop_the_run(pytester, folder, run, marker, fixture, texts):
    pytester.makepyfile(
        test_it=f"""
        import pathlib, pytest
        @pytest.mark.{marker}
        def test_marked({fixture}): pathlib.Path("ran").touch()
        """
    )
    refused(run(), *texts)
    assert not (folder / "ran").exists()


def test_readers_of_markers(pytester, folder):
    from pytest_stackwise import markers

    items = pytester.getitems(
        """
        import pytest
        pytestmark = pytest.mark.max_memory("1 GiB")
        @pytest.mark.max_memory("2 MB")
        @pytest.mark.min_tokens_per_second(1500)
        def test_all(throughput): pass
        @pytest.mark.no_memory_growth(steps=9, tolerance="2 KiB")
        def test_module(no_memory_growth): pass
        """
    )
    first, second = items
    assert (markers.max_memory_of(first), markers.max_memory_of(second)) == (2_000_000, 2**30)
    assert (markers.min_tokens_per_second_of(first), markers.min_tokens_per_second_of(second)) == (
        1500.0,
        None,
    )
    assert markers.no_memory_growth_of(first) == {}
    assert markers.no_memory_growth_of(second) == {"steps": 9, "tolerance": 2048}


@needs_reset
def test_limit_of_a_whole_test(pytester, folder, run):
    pytester.makepyfile(
        test_it="""
        import pytest, torch
        @pytest.mark.max_memory("1 TiB")
        def test_within(): torch.ones(1000)
        @pytest.mark.max_memory("10 MB")
        def test_beyond(): torch.ones(1000)
        @pytest.mark.max_memory("10 MB")
        def test_fails_by_itself(): raise KeyError("first")
        @pytest.mark.max_memory("10 MB")
        def test_skips_itself(): pytest.skip("not here")
        @pytest.mark.xfail(strict=True)
        @pytest.mark.max_memory("10 MB")
        def test_known(): pass
        def test_free(): pass
        """
    )
    result = run("--junitxml=out.xml", "-rs")
    result.assert_outcomes(passed=2, failed=2, skipped=1, xfailed=1)
    told = "max_memory: * (* bytes) were in use by this process at the peak, * of that before *; "
    result.stdout.fnmatch_lines([f"{told}allowed: 9.537 MiB (10000000 bytes)"])
    result.stdout.fnmatch_lines(["E *KeyError: 'first'"])
    found = properties(folder / "out.xml")
    assert int(found["test_within"]["stackwise.peak_memory_bytes"]) > 10_000_000
    assert int(found["test_beyond"]["stackwise.peak_memory_bytes"]) > 10_000_000
    assert "stackwise.peak_memory_bytes" not in found["test_free"]


@needs_reset
def test_limit_sees_what_the_test_held_for_a_moment(pytester, folder, run):
    # What the process holds is known only then, and the plugin reads the marker after it.
    pytester.makeconftest(
        """
        import pytest, torch
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(item):
            from stackwise.benchmark.memory.peak import peak_memory_bytes
            if item.get_closest_marker("max_memory") is None:
                size = peak_memory_bytes(lambda: None, torch.device("cpu")) + 100_000_000
                item.add_marker(pytest.mark.max_memory(size))
            return (yield)
        """
    )
    pytester.makepyfile(
        test_it="""
        import torch
        from stackwise.benchmark.memory.peak import peak_memory_bytes
        def test_large(): torch.ones(50_000_000)
        def test_small(): torch.ones(5_000_000)
        def test_measured_within():
            torch.ones(50_000_000)
            peak_memory_bytes(lambda: None, torch.device("cpu"))
        """
    )
    result = run("-v")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*::test_large FAILED*", "*::test_small PASSED*", "*::test_measured_within FAILED*"]
    )


@needs_reset
def test_limit_of_one_call(pytester, folder, run):
    pytester.makepyfile(
        test_it="""
        import pytest, torch
        def test_unmarked(peak_memory):
            peak = peak_memory(lambda: torch.ones(25_000_000))
            assert 80_000_000 < peak.added < 120_000_000
            assert peak.in_use == peak.resident
        @pytest.mark.max_memory("1 TiB")
        def test_within(peak_memory):
            torch.ones(10)
            assert peak_memory(lambda: None).in_use > 0
        @pytest.mark.max_memory("10 MB")
        def test_beyond(peak_memory): peak_memory(lambda: None)
        @pytest.mark.max_memory("10 MB")
        def test_forgets(peak_memory): pass
        """
    )
    result = run()
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["E *MemoryLimitError: max_memory: *allowed: 9.537 MiB (10000000 bytes)"])
    result.stdout.fnmatch_lines(["the test is marked max_memory but never called peak_memory"])
    assert "in require_within" not in result.stdout.str()


def test_limit_of_a_process_of_its_own(pytester, folder, run, monkeypatch):
    asked = []

    def fresh_peak_memory(factory, *arguments, device, seconds):
        asked.append((factory, arguments, device, seconds))
        return FreshPeak(PeakMemory(resident=400 * MB, before=1 * MB, resident_before=1 * MB), 500 * MB)

    monkeypatch.setattr(fresh_process, "fresh_peak_memory", fresh_peak_memory)
    pytester.makepyfile(
        test_it="""
        import pytest
        @pytest.mark.max_memory("200 MB")
        def test_beyond(peak_memory): peak_memory.fresh("calls:hold", 7, seconds=30)
        @pytest.mark.max_memory("500 MB")
        def test_within(peak_memory): assert peak_memory.fresh("calls:hold").in_use == 400_000_000
        """,
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["E *MemoryLimitError: max_memory: 381.5 MiB (400000000 bytes) were in use *"]
    )
    assert asked == [("calls:hold", (7,), "cpu", 30), ("calls:hold", (), "cpu", 120.0)]


@pytest.mark.slow
@needs_reset
def test_limit_of_a_fresh_process(pytester, folder, run):
    pytester.makepyfile(
        calls="import torch\ndef hold(numel): return lambda: torch.ones(numel)\n",
        test_it="""
        import calls, pytest, torch
        @pytest.mark.max_memory("200 MB")
        def test_fresh(peak_memory): peak_memory.fresh(calls.hold, 100_000_000)
        """,
    )
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *MemoryLimitError: max_memory: * at the peak, * of that before *"])


@pytest.mark.parametrize(
    ("peak", "loads"),
    [
        # On the CPU the process as a whole.
        (PeakMemory(resident=900 * MB, before=1, resident_before=300 * MB), {"by this process": 900 * MB}),
        # Tensors on the GPU, and what the call added on the host: not the process, CUDA's libraries in it.
        (
            PeakMemory(40 * MB, 60 * MB, 0, 5000 * MB, 10 * MB, 4900 * MB, 80 * MB),
            {"by tensors on cuda": 40 * MB, "more in the memory of the host": 20 * MB},
        ),
        # Where the GPU has nothing of it, the test works on the CPU, whatever was asked for.
        (PeakMemory(0, 0, 0, 900 * MB, 0, 300 * MB, 0), {"by this process": 900 * MB}),
        (PeakMemory(40 * MB, 60 * MB, 0, None, 10 * MB), {"by tensors on cuda": 40 * MB}),
        (PeakMemory(0, 0, 0, None, 0), {"by tensors on cuda": 0}),
        (PeakMemory(), {}),
    ],
    ids=["cpu", "gpu", "cpu under --gpu", "gpu alone is told", "nothing on the gpu", "nothing told"],
)
def test_what_of_a_peak_is_judged(peak, loads):
    assert {load.where: load.peak for load in loads_of(peak, "cuda")} == loads


@pytest.mark.parametrize(
    ("peak", "texts"),
    [
        (
            PeakMemory(40 * MB, 60 * MB, 0, 5000 * MB, 10 * MB, 4900 * MB, 80 * MB),
            ["(40000000 bytes) were in use by tensors on cuda at the peak, 9.537 MiB of that before"],
        ),
        (
            PeakMemory(5 * MB, 60 * MB, 0, 5000 * MB, 1 * MB, 4900 * MB, 0),
            ["95.37 MiB (100000000 bytes) were in use more in the memory of the host at the peak"],
        ),
        (
            PeakMemory(40 * MB, 60 * MB, 0, 5000 * MB, 10 * MB, 4900 * MB, 0),
            ["by tensors on cuda at the peak", "more in the memory of the host at the peak"],
        ),
    ],
    ids=["device", "host", "both"],
)
def test_a_limit_says_which_was_over(pytester, peak, texts):
    [item] = pytester.getitems("import pytest\n@pytest.mark.max_memory('30 MB')\ndef test_it(): pass")
    records.reset(item)
    with pytest.raises(MemoryLimitError) as error:
        require_within(item, loads_of(peak, "cuda"))
    assert str(error.value).startswith("max_memory: ")
    assert str(error.value).endswith("; allowed: 28.61 MiB (30000000 bytes)")
    assert all(text in str(error.value) for text in texts)
    assert str(error.value).count(" were in use ") == len(texts)


@needs_reset
def test_all_of_it_is_in_the_report(pytester, folder, run, report):
    pytester.makepyfile(
        test_it=f"""
        import pytest, torch
        kept = []
        @pytest.mark.max_memory("1 TiB")
        def test_within(): pass
        @pytest.mark.xfail(strict=True)
        @pytest.mark.max_memory("10 MB")
        def test_beyond(peak_memory): peak_memory(lambda: None)
        def test_read(peak_memory): peak_memory(lambda: None)
        @pytest.mark.xfail(strict=True)
        def test_grows(no_memory_growth): no_memory_growth(lambda: kept.append(torch.ones(25_000)), {FEW})
        """
    )
    result = run("--stackwise-report=out")
    result.assert_outcomes(passed=2, xfailed=2)
    rows = {row["test"].partition("::")[2]: row for row in report()["memory"]}
    assert {name: (row["kind"], row["verdict"]) for name, row in rows.items()} == {
        "test_within": ("peak", "within"),
        "test_beyond": ("peak", "beyond"),
        "test_read": ("peak", "read"),
        "test_grows": ("growth", "grows"),
    }
    assert rows["test_beyond"]["limit"] == 10 * MB
    assert rows["test_beyond"]["peaks"]["by this process"] > 10 * MB
    assert rows["test_grows"]["tensors_per_step"] == 1.0
    # Nobody minds: the tests are expected to fail. But it was found out.
    assert report()["verdict"] == "WARN"
    result.stdout.fnmatch_lines(
        [
            "memory",
            "  within *::test_within  *iB by this process, at most 1 TiB",
            "  beyond *::test_beyond  *iB by this process, at most 9.537 MiB",
            "  read *::test_read  *iB by this process",
            "  grows *::test_grows  * bytes a step over 8 steps",
            " *1 tensors more a step are alive",
            "verdict: WARN (memory: 1 within, 1 beyond, 1 read, 1 grows)",
        ]
    )
    page = (folder / "out.md").read_text()
    assert "## Memory" in page
    assert "1 tensors more a step are alive" in page


def test_where_nothing_tells_the_peak_a_limit_is_not_green(pytester, folder, run, monkeypatch):
    from stackwise.benchmark.memory import peak as memory

    monkeypatch.setattr(memory, "_CLEAR_REFS", folder / "no" / "such" / "folder")
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.max_memory("1 TiB")
        def test_whole(): pass
        @pytest.mark.max_memory("1 TiB")
        def test_call(peak_memory): peak_memory(lambda: None)
        """
    )
    result = run("-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED*max_memory: this system does not tell*"])


def test_steps_that_keep_and_steps_that_do_not(pytester, folder, run):
    pytester.makepyfile(
        test_it=f"""
        import gc, pytest, torch
        kept = []
        @pytest.fixture(autouse=True)
        def _small_heap(): gc.freeze()  # what there is already would be collected for each of them
        @pytest.mark.no_memory_growth({FEW})
        def test_sound(no_memory_growth):
            growth = no_memory_growth(lambda: torch.ones(1000))
            assert (growth.steps, growth.warmup, growth.verdict) == (8, 2, "flat")
        @pytest.mark.no_memory_growth({FEW})
        def test_leak(no_memory_growth):
            no_memory_growth(lambda: kept.append(torch.ones(25_000)))
        @pytest.mark.no_memory_growth({FEW}, tolerance="1 MiB")
        def test_call_wins(no_memory_growth):
            growth = no_memory_growth(lambda: None, steps=9, tolerance=5)
            assert (growth.steps, growth.warmup, growth.tolerance) == (9, 2, 5)
        def test_unmarked(no_memory_growth):
            no_memory_growth(lambda: kept.append(torch.ones(25_000)), {FEW})
        @pytest.mark.no_memory_growth
        def test_forgets(no_memory_growth): pass
        @pytest.mark.xfail(strict=True)
        def test_known(no_memory_growth):
            no_memory_growth(lambda: kept.append(torch.ones(25_000)), {FEW})
        """
    )
    result = run("-v", "--junitxml=out.xml")
    result.assert_outcomes(passed=2, failed=3, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "E *MemoryGrowthError: memory grows over 8 steps, after 2 of warm-up",
            "E *1 tensors more a step are alive",
            "E *torch.Tensor: +1 a step, 97.66 KiB",
            "E *test_it.py:*: *kept.append(torch.ones(25_000))*",
        ]
    )
    result.stdout.fnmatch_lines(["the test is marked no_memory_growth but never called no_memory_growth"])
    assert "growth_trial.py" not in result.stdout.str()
    assert int(properties(folder / "out.xml")["test_leak"]["stackwise.bytes_per_step"]) > 90_000


def test_a_training_step_that_is_described(pytester, folder, run):
    pytester.makepyfile(
        test_it=f"""
        import gc, models, pytest
        @pytest.fixture(autouse=True)
        def _small_heap(): gc.freeze()
        class Keeping(models.Loop):
            def __init__(self):
                super().__init__()
                self.losses = []
            def step(self, batch):
                loss = super().step(batch)
                self.losses.append(loss)
                return loss
        @pytest.mark.no_memory_growth({FEW})
        @pytest.mark.parametrize("kind", [models.Loop, Keeping], ids=["sound", "keeping"])
        def test_it(no_memory_growth, kind):
            from stackwise import TrainerSpec
            no_memory_growth(TrainerSpec.of(kind, batch_size=2))
        """
    )
    result = run("-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*[[]sound] PASSED*", "*[[]keeping] FAILED*"])


@pytest.mark.gpu
def test_limits_on_a_gpu(pytester, run_apart):  # tensors of other tests would count
    pytester.makepyfile(
        f"""
        import pytest, torch
        @pytest.mark.max_memory("50 MB")
        def test_within(): torch.ones(5_000_000, device="cuda")
        @pytest.mark.max_memory("50 MB")
        def test_beyond(): torch.ones(50_000_000, device="cuda")
        @pytest.mark.no_memory_growth({FEW})
        def test_flat(no_memory_growth): no_memory_growth(lambda: torch.ones(1000, device="cuda"))
        """
    )
    run_apart("--gpu").assert_outcomes(passed=2, failed=1)


def test_models_are_refused_by_name(pytester, folder, run):
    pytester.makepyfile(
        """
        import models
        from stackwise import ModelSpec
        def test_class(no_memory_growth): no_memory_growth(models.Plain)
        def test_factory(no_memory_growth): no_memory_growth(lambda: models.Plain())
        def test_model(no_memory_growth): no_memory_growth(models.Plain())
        def test_spec(no_memory_growth): no_memory_growth(ModelSpec.of(models.plain))
        def test_peak(peak_memory): peak_memory(models.Plain())
        def generator(): yield models.Plain()
        def test_unstarted(no_memory_growth): no_memory_growth(generator)
        def test_unstarted_peak(peak_memory): peak_memory(generator)
        """
    )
    result = run()
    result.assert_outcomes(failed=7)
    wanted = "wanted a function that makes one step, or a TrainerSpec"
    result.stdout.fnmatch_lines(
        [
            f"E *TypeError: step: got Plain, a class of nn.Module; {wanted}",
            f"E *TypeError: step: its first call returned Plain(), an nn.Module; {wanted}",
            f"E *TypeError: step: got Plain(), an nn.Module; {wanted}",
            f"E *TypeError: step: got ModelSpec; {wanted}",
            "E *TypeError: call: got Plain(), an nn.Module; wanted a function that makes one call",
            "E *TypeError: step: got a function that returns a generator, which has not run; *",
            "E *TypeError: call: got a function that returns a generator, which has not run; *",
        ]
    )


@needs_reset
def test_the_message_of_a_whole_test_is_told_once(pytester, folder, run):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.max_memory("10 MB")
        def test_beyond(): pass
        """
    )
    result = run("-rN")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert text.count("were in use by this process at the peak") == 1
    assert "During handling" not in text
