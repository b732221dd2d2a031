"""Options: each on the command line and in the configuration file; nonsense stops the run by name."""

import pytest

from pytest_stackwise import options

CHECKED = """
import models
from pytest_stackwise import parametrize_with_checks
@parametrize_with_checks([models.plain], checks=["determinism"])
def test_model(spec, check): check(spec)
"""
ORDINARY = "import pathlib\ndef test_ordinary(): pathlib.Path('ran').touch()"


def ini(pytester, **values):
    lines = "\n".join(f"{key} = {value}" for key, value in values.items())
    pytester.makeini(f"[pytest]\n{lines}\n")


def refused(result, *texts):
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *"])
    for text in texts:
        assert text in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


@pytest.mark.parametrize("value", ["tpu", "mps", "cuda:x", "cuda", "cuda:1"])
def test_device_that_is_not_there(pytester, run, value):
    pytester.makepyfile(ORDINARY)
    refused(run(f"--stackwise-device={value}"), "--stackwise-device", repr(value))
    ini(pytester, stackwise_device=value)
    refused(run(), repr(value))
    assert not (pytester.path / "ran").exists()


def test_device_on_the_command_line_wins(pytester, run, driven):
    pytester.makepyfile(CHECKED)
    ini(pytester, stackwise_device="cuda")
    run("--stackwise-device=cpu").assert_outcomes(passed=1)
    assert {device for device, _ in driven} == {"cpu"}


def test_every_device_name_that_is_accepted_works(pytester, run):
    pytester.makepyfile(CHECKED)
    result = run("--stackwise-device=auto")
    if result.ret == pytest.ExitCode.USAGE_ERROR:
        refused(result, "'auto'")
    else:
        result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "values", "seed"),
    [
        ([], {}, 0),
        (["--stackwise-seed=7"], {}, 7),
        ([], {"stackwise_seed": 5}, 5),
        (["--stackwise-seed=7"], {"stackwise_seed": 5}, 7),
        (["--stackwise-seed=0"], {"stackwise_seed": 5}, 0),
    ],
    ids=["default", "option", "ini", "option wins", "zero wins"],
)
def test_seed(pytester, run, driven, arguments, values, seed):
    pytester.makepyfile(CHECKED)
    if values:
        ini(pytester, **values)
    run(*arguments).assert_outcomes(passed=1)
    assert {made for _, made in driven} == {seed}


@pytest.mark.parametrize("value", ["-1", "x", "1.5"])
@pytest.mark.parametrize("place", ["option", "ini"])
def test_seed_that_is_none(pytester, run, value, place):
    pytester.makepyfile(CHECKED)
    if place == "ini":
        ini(pytester, stackwise_seed=value)
        result = run()
    else:
        result = run(f"--stackwise-seed={value}")
    refused(result, "seed", value)


@pytest.mark.parametrize("value", ["x.txt", "folder/x.htm"])
def test_report_of_another_ending(pytester, run, value):
    pytester.makepyfile(ORDINARY)
    refused(run(f"--stackwise-report={value}"), value, ".md, .json")
    ini(pytester, stackwise_report=value)
    refused(run(), value, ".md, .json")
    assert not (pytester.path / "ran").exists()


def test_report_on_the_command_line_wins(pytester, folder, run):
    pytester.makepyfile(CHECKED)
    ini(pytester, stackwise_report="ini.json")
    run().assert_outcomes(passed=1)
    assert (folder / "ini.json").exists()
    run("--stackwise-report=option.json").assert_outcomes(passed=1)
    assert (folder / "option.json").exists()


def test_report_that_cannot_be_written_is_named_in_one_line(pytester, folder, run):
    pytester.makepyfile(CHECKED)
    (folder / "file").write_text("")
    result = run("--stackwise-report=file/out.json")
    assert result.ret != 0
    text = result.stdout.str() + result.stderr.str()
    assert "file/out.json" in text
    assert "pluggy/" not in text


def test_models_of_both_places_are_checked_once_each(pytester, run):
    ini(pytester, stackwise_model="\n  models:plain\n  models:conv")
    result = run("--stackwise-model=models:conv", "--stackwise-model=models:rack", "--collect-only", "-q")
    names = [line.partition("::")[0] for line in result.outlines if "::model" in line]
    assert names == [f"stackwise[models:{name}]" for name in ("plain", "conv", "rack")]


@pytest.mark.parametrize("value", ["true", "1", "yes"])
def test_gpu_in_the_ini_file(pytester, run, value):
    pytester.makepyfile("def test_ordinary(): pass")
    ini(pytester, stackwise_gpu=value)
    refused(run(), "--gpu", "CUDA")


def test_gpu_switched_off_in_the_ini_file(pytester, run):
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_it(): pass")
    ini(pytester, stackwise_gpu="false")
    run().assert_outcomes(skipped=1)


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="new in pytest 9")
def test_options_in_native_toml(pytester, folder, run, report, driven):
    (folder / "pyproject.toml").write_text(
        "[tool.pytest]\nstackwise_gpu = false\nstackwise_device = 'cpu'\nstackwise_seed = '3'\n"
        "stackwise_model = ['models:conv']\nstackwise_report = 'out'\nstackwise_strict = true\n"
    )
    run().assert_outcomes(passed=7)
    assert driven[0] == ("cpu", 3)
    assert (folder / "out.md").exists()
    assert report()["verdict"] == "PASS"


def test_paths_in_the_ini_file_start_where_it_lies(pytester, folder, run, monkeypatch):
    ini(pytester, stackwise_model="factories.py:plain")
    (folder / "factories.py").write_text((folder / "models.py").read_text())
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    run("-k", "determinism").assert_outcomes(passed=1, deselected=6)


@pytest.mark.parametrize(
    ("option", "value", "texts"),
    [
        ("checks", "causality,cazuality", ["cazuality", "known checks and families", "causality"]),
        ("checks", ",", ["no name"]),
        ("suite", "slow", ["'slow'", "'fast', 'full'"]),
    ],
)
@pytest.mark.parametrize("place", ["option", "ini"])
def test_unknown_choice_stops_the_run(pytester, run, every_check, option, value, texts, place):
    pytester.makepyfile(ORDINARY)
    if place == "ini":
        ini(pytester, **{f"stackwise_{option}": value, "stackwise_model": "models:plain"})
        result = run()
    else:
        result = run(f"--stackwise-{option}={value}")
    refused(result, f"--stackwise-{option}", *texts)
    assert not (pytester.path / "ran").exists()


def test_unknown_check_in_the_ini_file_is_found_where_checks_are_asked(pytester, run, every_check):
    pytester.makepyfile(CHECKED)
    ini(pytester, stackwise_checks="cazuality")
    result = run()
    assert result.ret not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "cazuality" in result.stdout.str()


def test_choice_on_the_command_line_wins(pytester, run, every_check):
    pytester.makepyfile(CHECKED)
    ini(pytester, stackwise_checks="causality", stackwise_suite="full")
    run("--stackwise-checks=determinism", "--stackwise-suite=fast").assert_outcomes(passed=1)


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="[tool.pytest] is new in pytest 9")
@pytest.mark.parametrize("quote", ["", '"'], ids=["numbers", "texts"])
def test_tables_of_pyproject_may_have_numbers(pytester, every_check, quote):
    numbers = {"gate_seconds": 60, "gate_timeout": 9.5, "seed": 3}
    lines = [f"stackwise_{name} = {quote}{value}{quote}" for name, value in numbers.items()]
    text = "\n".join(["[tool.pytest]", *lines, 'stackwise_checks = ["causality", "loss"]'])
    pytester.makepyprojecttoml(text)
    config = pytester.parseconfig("--stackwise-against=base")
    found = options.gate(config)
    assert (found.seconds, found.timeout, options.seed(config)) == (60.0, 9.5, 3)
    assert options.check_names(config) == ("causality", "loss")
