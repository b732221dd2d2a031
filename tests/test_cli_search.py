"""`stackwise search`: what is printed, which files there are, how it ends, and that it goes on."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from stackwise.cli import main
from stackwise.cli.search import Search
from stackwise.config import StackWiseConfig
from stackwise.prototype.search import SearchResult, Space
from tests.forked import HANG_SECONDS

ROOT = Path(__file__).parent.parent
SPACE = """
base:
  model:
    vocab_size: 16
    d_model: 16
    d_ff: 32
    n_heads: 2
    n_kv_heads: 1
    architecture: {n_stacks: 1, blocks_per_stack: 1}
  training: {batch_size: 2, seq_len: 8, precision: fp32, device: cpu, optimizer: {lr: 1e-2}}
  data: {task: copy, validation_fraction: 0.0}
space:
  model.n_heads: {low: 1, high: 8}
  n_layers: {low: 1, high: 4}
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def search(*arguments):
    return main(["search", *map(str, arguments)])


def test_a_search_and_its_files(workplace, capsys):
    asked = ["space.yaml", "--sampler", "random", "--steps", 3]
    assert search(*asked, "--budget", 2) == 0
    printed = capsys.readouterr()
    assert re.match(r"search-\w+: 2 trials, 2 succeeded\n  best score -", printed.out)
    assert printed.out.count("| success |") == 2
    told = printed.err.splitlines()
    assert len(told) == 2 and re.match(r"trial 0: score -\d\S* \(model.n_heads=\d", told[0])
    assert search(*asked, "--budget", 3, "--output", "out", "--progress", "off") == 0
    printed = capsys.readouterr()
    assert ": 3 trials, 3 succeeded" in printed.out and printed.err == ""
    names = ["trials.md", "trials.csv", "search.json", "report.html", "best.yaml", "front.svg"]
    assert re.findall(r"written: out/(.*)", printed.out) == names
    plain = json.loads((workplace / "out/search.json").read_text())
    best = next(trial for trial in plain["trials"] if trial["number"] == plain["best"])
    assert StackWiseConfig.from_yaml(workplace / "out/best.yaml").to_dict() == best["config"]
    assert search("--show") == 0
    assert ": 3 trials, 3 succeeded" in capsys.readouterr().out


def test_without_matplotlib_a_search_ends_without_its_plot(workplace, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    asked = ["space.yaml", "--sampler", "random", "--steps", 2, "--budget", 1, "--output", "out"]
    assert search(*asked) == 0
    printed = capsys.readouterr().out
    assert "no front.svg: it needs matplotlib: pip install 'stackwise[report]'" in printed
    assert (workplace / "out/best.yaml").is_file() and not (workplace / "out/front.svg").exists()


def test_files_are_written_before_anything_is_shown(workplace, monkeypatch):
    def closed(self):
        raise BrokenPipeError

    assert search("space.yaml", "--sampler", "random", "--steps", 2, "--budget", 1) == 0
    monkeypatch.setattr(SearchResult, "__str__", closed)
    with pytest.raises(BrokenPipeError):
        Search(show=True, output=Path("out")).run()
    assert (workplace / "out/best.yaml").is_file()


def test_several_objectives_and_a_database(capsys):
    asked = ["space.yaml", "--budget", 2, "--steps", 2, "--storage", "sqlite:///search.db"]
    assert search(*asked, "--objective", "loss", "parameters", "--sampler", "nsga2", "--name", "both") == 0
    assert re.match(r"both: 2 trials", capsys.readouterr().out)
    assert search("--show", "--storage", "sqlite:///search.db", "--name", "both") == 0


def test_nothing_that_succeeds_is_told_by_the_exit_code(workplace, capsys):
    (workplace / "space.yaml").write_text(SPACE.replace("lr: 1e-2", "lr: 1e30"))
    assert search("space.yaml", "--budget", 1, "--steps", 9) == 1
    printed = capsys.readouterr()
    assert "nan: nan at step" in printed.out
    assert printed.err.endswith("stackwise: none of 1 trials succeeded\n")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "FILE: got None; allowed: a YAML file, or --show"),
        (["none.yaml"], "none.yaml"),
        (["space.yaml", "--objective", "speed"], "objective: got 'speed'"),
        (["space.yaml", "--pruner", "wilcoxon"], "seeds: got 1; allowed: 5 or more"),
        (["--show"], "search.db'; allowed: a database that is there"),
        (["bad.yaml"], "bad.yaml: space.n_layer: unknown key; did you mean 'n_layers'?"),
    ],
    ids=["none", "file", "objective", "seeds", "show", "space"],
)
def test_errors_are_told_in_a_line(arguments, said, workplace, capsys):
    (workplace / "bad.yaml").write_text("space: {n_layer: [1]}\n")
    assert search(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and printed.err.startswith("stackwise: ")


def test_the_example_is_a_space():
    path = ROOT / "examples/search/space.yaml"
    space = Space.from_yaml(path)
    assert space.budget.target == 400_000
    assert f"stackwise search {path.relative_to(ROOT)}" in path.read_text()


def test_interrupt_says_how_to_go_on(monkeypatch, capsys):
    from stackwise.prototype.prototype import ArchitecturePrototype

    def interrupted(self, *arguments, **options):
        raise KeyboardInterrupt

    asked = ["space.yaml", "--budget", 2, "--steps", 2, "--objective", "loss", "--small-factor", 1]
    with monkeypatch.context() as patch:
        patch.setattr(ArchitecturePrototype, "run", interrupted)
        assert search(*asked) == 130
    told = capsys.readouterr().err
    command = re.search(r"To go on: stackwise (.*)\n", told)[1]
    assert command == "search space.yaml --budget 2 --objective loss --steps 2"
    assert main(command.split()) == 0
    assert ": 2 trials, 2 succeeded" in capsys.readouterr().out


def test_a_password_is_not_repeated():
    asked = Search(Path("space.yaml"), storage="postgresql://me:secret@host/studies")
    assert asked._command() == "stackwise search space.yaml --storage 'postgresql://me:***@host/studies'"


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_leaves_a_search_that_goes_on(workplace, jobs):
    asked = ["space.yaml", "--budget", "6", "--steps", "150", "--jobs", str(jobs), "--sampler", "random"]
    command = [sys.executable, "-W", "error", "-m", "stackwise.cli", "search", *asked]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # What is begun in the background of a shell inherits that it takes no notice of Ctrl-C.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        line = process.stderr.readline()
        assert line.startswith("trial "), line + process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    assert "To go on: stackwise search space.yaml --budget 6" in err
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    assert ": 6 trials, 6 succeeded" in done.stdout
    assert 1 <= len(re.findall("^trial", done.stderr, re.MULTILINE)) <= 5
