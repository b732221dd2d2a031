"""Every file of examples/ trains as it says, at small sizes; and no key of a configuration is left untold."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stackwise.cli import main
from stackwise.cli.keys import configuration_pages
from stackwise.config import StackWiseConfig
from stackwise.data.shards import write_shards
from stackwise.data.text import documentation_pages
from tests.forked import HANG_SECONDS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples").glob("*.yaml"))
SMALL = {
    "model.d_model": 32,
    "model.d_ff": 48,
    "model.n_heads": 2,
    "model.n_kv_heads": 1,
    "training.batch_size": 2,
    "training.seq_len": 32,
    "training.device": "cpu",
    "training.schedule.warmup_steps": 1,
}
# What else is smaller for one file.
SMALLER = {
    "bf16_weights": {"training.compile": "false", "training.recompute.kind": "none"},
    "task": {"model.n_kv_heads": 2, "training.batch_size": 16},
    "telemetry": {"training.log_interval": 3},
    "growth": {"training.max_steps": 8},
}
UNITS = {
    "stackwise": ["stack 0", "stack 1", "stack 2", "stack 3", "all together"],
    "blockwise": [f"stack {stack} block {block}" for stack in range(2) for block in range(4)],
    "blockwise_suffix": [f"stack {i // 3} block {i % 3}" for i in range(6)],
    "right_to_left": ["stack 2", "stack 1", "stack 0"],
    "mask_diffusion": ["stack 0", "stack 1"],
}
MEASURES = {"masked_token": "masked byte", "token_shards": "token", "task": "token"}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(capsys):
    """What training prints, with keys over those of a file."""

    def run(name, **overrides):
        settings = SMALL | {"training.max_steps": 6, "data.validation_fraction": 0.003}
        settings |= SMALLER.get(name, {}) | overrides
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        code = main(["train", str(ROOT / f"examples/{name}.yaml"), "--progress", "off", *arguments])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        return printed.out

    return run


def losses(out):
    final = re.search(r"loss (\d+\.\d+), validation (\d+\.\d+) nats per ([\w ]+)$", out, re.MULTILINE)
    return float(final[1]), float(final[2]), final[3]


def rows(out):
    """Of the table of units: name, and its numbers."""
    found = re.findall(r"^│ (.+?) │ +([\d,]+) │ +(\d+) │ +(\S+) │ +(\S+) │ +(\S+) │$", out, re.MULTILINE)
    return {name.strip(): numbers for name, *numbers in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_trains(path, train, workplace, monkeypatch):
    name = path.stem
    config = StackWiseConfig.from_yaml(path)
    if name == "token_shards":
        pages = [list(page.encode()) for page in documentation_pages()]
        write_shards(workplace / config.data.dataset_path, pages, vocab_size=256)
    if name in ("ddp", "fsdp"):
        # As torchrun says it to a process that is alone.
        for key, value in {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
        }.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("MASTER_PORT", "0")
    out = train(name, **({"training.scope.polish_steps": 2} if name == "stackwise" else {}))
    assert out.startswith(f"{config.training.training_architecture}: ")
    assert f", {config.training.objective.kind}, {config.training.precision}\n" in out
    final, validation, measure = losses(out)
    assert math.isfinite(final) and math.isfinite(validation)
    # The first loss is within 0.1 nat of a uniform guess, and a few steps do not make it much worse.
    assert 0.0 < validation < math.log(config.model.vocab_size) + 0.3
    assert measure == MEASURES.get(name, "byte")
    table = rows(out)
    assert list(table) == UNITS.get(name, [])
    for parameters, batches, mean, last, _ in table.values():
        assert int(parameters.replace(",", "")) > 0 and 2 <= int(batches) <= 6
        assert all(0.0 < float(loss) < math.log(config.model.vocab_size) + 0.5 for loss in (mean, last))


def test_every_file_is_read_and_has_its_line():
    assert FILES
    for path in FILES:
        text = path.read_text()
        assert f"train examples/{path.name}" in text, path
        assert StackWiseConfig.from_yaml(path) != StackWiseConfig()


class TestTask:
    def test_loss_falls(self, train):
        small = {"model.vocab_size": 8, "training.seq_len": 16, "training.max_steps": 150}
        final, validation, _ = losses(train("task", **small))
        # The best is 0, and to have learned nothing is ln 8.
        assert final < math.log(8) / 2 and validation < math.log(8) / 2

    @pytest.mark.parametrize("task", ["shift", "induction", "markov"])
    def test_others(self, train, task):
        final, _, measure = losses(train("task", **{"data.task": task}))
        assert math.isfinite(final) and measure == "token"


class TestRecompute:
    def test_losses_are_the_same(self, train):
        kinds = ["none", "full", "every_nth", "selective", "by_name"]
        names = {"training.recompute.names": '["*.feedforward"]'}
        printed = [
            train("recompute", **({"training.recompute.kind": kind} | (names if kind == "by_name" else {})))
            for kind in kinds
        ]
        assert len({losses(out) for out in printed}) == 1


class TestTelemetry:
    def test_a_line_for_each_step_with_norms(self, train, workplace):
        out = train("telemetry")
        assert "build/examples/telemetry.jsonl" in out and "build/examples/events" in out
        lines = [
            json.loads(line)
            for line in (workplace / "build/examples/telemetry.jsonl").read_text().splitlines()
        ]
        steps = [line for line in lines if "loss" in line]
        assert [line["step"] for line in steps] == list(range(6))
        for line in steps:
            norms = line["parameter_norms"].values()
            assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4)
        assert list((workplace / "build/examples/events").glob("events.out.tfevents.*"))


class TestCheckpoint:
    def test_is_where_the_file_says(self, train, workplace):
        assert "saved in build/examples/rackwise" in train("rackwise")
        assert (workplace / "build/examples/rackwise/step-6/model.safetensors").exists()


class TestMemory:
    def test_files_of_blocks_and_no_rest_of_the_prefix(self, train, workplace):
        train("blockwise")
        assert len(list((workplace / "build/examples/blocks").glob("block-*.safetensors"))) == 8
        assert list((workplace / "build/examples/prefix").iterdir()) == []


@pytest.mark.slow
class TestAsItStands:
    """What the small sizes leave out."""

    def test_compiled(self, train):
        asked = {"training.compile": "true", "training.recompute.kind": "budget"}
        out = train("bf16_weights", **asked, **{"model.architecture.n_stacks": 1})
        assert math.isfinite(losses(out)[0])

    @pytest.mark.parametrize("name", ["ddp", "fsdp"])
    def test_under_torchrun_the_first_process_prints(self, name):
        settings = SMALL | {"training.max_steps": 4, "data.validation_fraction": 0.01}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        command += ["-m", "stackwise.cli", "train", str(ROOT / f"examples/{name}.yaml")]
        command += [f"--{key}={value}" for key, value in settings.items()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"^rackwise: ", done.stdout, re.MULTILINE)) == 1
        assert len(re.findall(r"nats per byte", done.stdout)) == 1


class TestEveryKey:
    def test_pages_are_generated(self):
        for name, text in configuration_pages().items():
            assert (ROOT / "docs/reference" / name).read_text() == text

    def test_pages_have_every_field(self):
        # The fields come from the defaults, the pages from the schema.
        page = "".join(configuration_pages().values())
        for path in leaves(StackWiseConfig().to_dict()):
            section, _, name = path.rpartition(".")
            part = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
            if path.endswith((".latent", ".kernel", ".rope_scaling", ".per_stack", ".guard")):
                assert f"## {path}" in page
            else:
                assert part and f"| `{name}` |" in part[1], path


def leaves(tree, path=""):
    for key, value in tree.items():
        here = f"{path}.{key}".lstrip(".")
        yield from leaves(value, here) if isinstance(value, dict) and value else [here]


@pytest.mark.parametrize("missing", ["transformers", "lm_eval", "matplotlib"])
def test_an_architecture_beside_a_llama_says_first_what_is_missing(missing, monkeypatch):
    """Not when all is trained."""
    spec = importlib.util.spec_from_file_location("compare", ROOT / "examples" / "compare_with_llama.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare", example)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "find_spec", lambda name: None if name == missing else spec)
    monkeypatch.setattr(example, "documentation_pages", pytest.fail)
    monkeypatch.setattr(sys, "argv", ["compare_with_llama.py"])
    with pytest.raises(
        SystemExit, match=rf"{missing} not found: pip install 'stackwise\[hf,quality,report\]'"
    ):
        example.main()
    assert example.Settings().output == Path("build/comparison")


@pytest.mark.slow
def test_an_architecture_beside_a_llama(workplace):
    """It trains both, and writes one table of speed and quality."""
    command = [sys.executable, str(ROOT / "examples" / "compare_with_llama.py"), "--output", "out"]
    command += ["--steps", "4", "--seq-len", "32", "--questions", "6"]
    subprocess.run(command, check=True, cwd=workplace, capture_output=True, timeout=HANG_SECONDS)
    table = json.loads((workplace / "out" / "comparison.json").read_text())
    assert {(row["architecture"], row["task"]) for row in table["quality"]} == {
        (name, task) for name in ("llama", "own") for task in ("endings", "unseen pages")
    }
    assert all(row["speed_up"] for row in table["speed"]["rows"])
    assert {path.suffix for path in (workplace / "out").iterdir()} == {".md", ".csv", ".json", ".svg"}
