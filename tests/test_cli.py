"""The command line: exit codes, what is printed where, and errors in one line."""

import json
import math
import re
import shlex
import subprocess
import sys
import textwrap
from importlib import metadata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stackwise
from stackwise.checks.check import select_checks
from stackwise.cli import main
from stackwise.cli.keys import configuration_keys
from stackwise.cli.overrides import load_configuration, split_overrides
from stackwise.config import StackWiseConfig
from stackwise.config.yaml import dump_yaml, load_yaml
from stackwise.report import Report
from stackwise.training import RackCheckpoints
from stackwise.training.memory_planner import plan_memory

# Without surrogates, of which JSON makes two escapes and YAML two characters, and without NUL.
TEXT = st.text(st.characters(min_codepoint=1, max_codepoint=0xD7FF))
MODELS = """
    import torch
    from torch import nn
    from stackwise import ModelSpec
    from stackwise.model import create_simple_rack

    def good():
        return create_simple_rack(1, 2, 16, 32, 2, 11)

    class Leaky(nn.Module):
        # The output at position 3 reads token 5.
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11)

        def forward(self, ids):
            x = self.embedding(ids)
            shifted = torch.zeros_like(x)
            if ids.shape[1] > 5:
                shifted[:, 3] = x[:, 5]
            return self.head(x + shifted)

    def leaky():
        return Leaky()

    def spec():
        return ModelSpec.of(Leaky, causal=False, name="declared")

    def telling():
        print("built under seed", "x" * torch.initial_seed())
        return good()

    def memoryless():
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    def vectors():
        return nn.Linear(4, 4)

    def nothing():
        return 3

    def puzzling():
        class Puzzle(nn.Module):
            def forward(self, a, b, c):
                return a
        return Puzzle()

    def broken():
        raise RuntimeError("no such weights")

    def telegraphic():
        raise ValueError("one\\ntwo")

    def needy(width):
        return good()

    class Loop:
        zeroes = True

        def __init__(self):
            self.model = good()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def step(self, batch):
            logits, targets = self.model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            if self.zeroes:
                self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    class Piling(Loop):
        zeroes = False

    def loop_spec():
        from stackwise.subject.trainer_spec import TrainerSpec
        return TrainerSpec.of(Loop, name="declared loop")

    declared_loop = loop_spec()

    class Unembedded(Loop):
        def __init__(self):
            super().__init__()
            self.model = nn.Linear(2, 2)

    class Lit(Leaky):
        def training_step(self, batch, index):
            logits = self(batch["input_ids"])[:, :-1]
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Formless(nn.Module):
        # As a Lightning module without forward.
        def __init__(self):
            super().__init__()
            self.net = good()

        def training_step(self, batch, index):
            logits = self.net(batch["input_ids"])[:, :-1]
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with torch.random.fork_rng():
        formless, shared = Formless(), Leaky()

    def returns_shared():
        return shared

    def never():
        raise AssertionError("built")
"""
REVISED = """
    from torch import nn

    class Scaled(nn.Linear):
        def forward(self, x):
            return {factor} * super().forward(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.hidden, self.head = nn.Embedding(13, 8), Scaled(8, 8), nn.Linear(8, 13)

        def forward(self, ids):
            return self.head(self.hidden(self.embedding(ids)).tanh())

    build = Model
"""
# Not every check, of which there are many.
CORE = ("determinism", "causality", "finiteness", "initial_loss")
# Per target that cannot be loaded: what the line on standard error must contain.
UNLOADABLE = [
    ("cli_models.py:nowhere", ["cli_models.py", "nowhere", "good", "leaky"]),
    ("missing.py:good", ["missing.py"]),
    ("no.such.module:good", ["no.such.module"]),
    ("stackwise.model:nowhere", ["stackwise.model", "nowhere"]),
    ("cli_models.py", ["MODULE:FACTORY"]),
    ("cli_models.py:", ["MODULE:FACTORY"]),
    (":good", ["MODULE:FACTORY"]),
    ("cli_syntax.py:good", ["cli_syntax.py", "SyntaxError"]),
    ("cli_models.py:nothing", ["int", "nn.Module", "TrainerSpec"]),
    ("cli_skipped.py:good", ["cannot import cli_skipped.py: Skipped: not here"]),
    ("cli_models.py:telegraphic", ["telegraphic raised ValueError: one two"]),
    ("cli_models.py:broken", ["no such weights"]),
    ("cli_models.py:needy", ["width"]),
    ("cli_models.py:Unembedded", ["nn.Embedding"]),
]
CONFIG = """
    model:
      vocab_size: 256
      d_model: 16
      n_heads: 2
      n_kv_heads: 1
      d_ff: 24
      architecture: {n_stacks: 2, blocks_per_stack: 1}
    training:
      batch_size: 2
      seq_len: 8
      max_steps: 3
      device: cpu
      precision: fp32
      checkpoint_dir: runs
      optimizer: {lr: 1e-2}
      schedule: {warmup_steps: 1}
    data:
      dataset_path: text.txt
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch, few_compositions):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("stackwise.support.progress._FIRST", math.inf)  # no progress on a slow machine
    (tmp_path / "cli_models.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "cli_syntax.py").write_text("def good(:\n")
    (tmp_path / "cli_skipped.py").write_text(
        "import pytest\npytest.skip('not here', allow_module_level=True)\n"
    )
    (tmp_path / "run.yaml").write_text(textwrap.dedent(CONFIG))
    (tmp_path / "text.txt").write_bytes(b"So we beat on, boats against the current. " * 20)
    yield tmp_path
    for name in ("cli_models", "cli_syntax", "cli_skipped"):
        sys.modules.pop(name, None)


@pytest.fixture
def call(capsys):
    """Exit code, standard output and standard error of one command."""

    def run(*arguments):
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class TestCheck:
    def test_good(self, call):
        code, out, err = call("check", "cli_models.py:good", "-v", "--checks", *CORE)
        assert code == 0 and err == ""
        assert "PASS" in out and "FAIL" not in out and "ERROR" not in out
        assert re.search(r"PASS +causality", out) and "verdict: PASS" in out
        assert "takes token ids, vocabulary 11" in out

    def test_leak(self, call):
        code, out, err = call("check", "cli_models.py:leaky", "--checks", *CORE)
        assert code == 1 and err == ""
        assert re.search(r"FAIL +causality  measured .*\n.*\n +where: row 0, position \d", out)
        assert "verdict: FAIL (checks: 1 failed" in out and "test" not in out

    def test_absolute_path(self, call, workplace):
        assert call("check", f"{workplace}/cli_models.py:good", "--checks", "causality")[0] == 0

    def test_module(self, call):
        code, out, _ = call("check", "cli_models:good", "--checks", "causality")
        assert code == 0 and "PASS" in out

    def test_declared_spec(self, call):
        code, out, _ = call("check", "cli_models.py:spec", "-v", "--checks", "causality")
        assert code == 5 and "declared" in out and re.search(r"n/a +causality", out)

    def test_vectors(self, call):
        code, out, _ = call("check", "cli_models.py:vectors", "--checks", "causality")
        assert code == 5 and "takes vectors of width 4" in out

    def test_reference_from_another_checkout(self, call, workplace):
        now, before = workplace / "now", workplace / "before"
        for folder, factor in ((now, 1.5), (before, 1.0)):
            folder.mkdir()
            (folder / "revised.py").write_text(textwrap.dedent(REVISED.format(factor=factor)))
        code, out, _ = call(
            "check",
            f"{now}/revised.py:build",
            "--reference",
            f"{before}/revised.py:build",
            "--checks",
            "parity",
        )
        assert code == 1
        assert re.search(r"FAIL +reference_output", out) and "hidden" in out
        same = ("check", f"{now}/revised.py:build", "--reference", f"{now}/revised.py:build")
        code, out, _ = call(*same, "-v", "--checks", "parity")
        assert code == 0 and re.search(r"PASS +reference_output", out)

    def test_reference_of_a_training_step(self, call):
        code, _, err = call("check", "cli_models.py:formless", "--reference", "cli_models.py:good")
        assert code == 2 and "reference" in err and "training step" in err

    def test_some_checks(self, call):
        _, out, _ = call("check", "cli_models.py:good", "-v", "--checks", "causality", "finite_gradients")
        shown = re.findall(r"^  (?:PASS|FAIL|WARN|ERROR|n/a|XFAIL) +(\w+)", out, flags=re.M)
        assert set(shown) <= {"causality", "finite_gradients"} and "causality" in shown

    def test_seed(self, call):
        for seed, other in ((3, 5), (5, 3)):
            _, out, _ = call(
                "check", "cli_models.py:telling", "-v", "--seed", str(seed), "--checks", "causality"
            )
            assert f"seed {'x' * seed}\n" in out and f"seed {'x' * other}\n" not in out

    def test_random_state_is_left_alone(self, call):
        before = torch.get_rng_state()
        call("check", "cli_models.py:good", "--checks", "causality")
        assert torch.get_rng_state().equal(before)


class TestVerdict:
    """Exit codes and output of a run that warns, and of one in which nothing applies."""

    WARNS = ("check", "cli_models.py:memoryless", "--checks", "token_effect", "determinism")

    @pytest.mark.parametrize(
        "options, code, verdict",
        [((), 0, "WARN"), (("--strict",), 1, "FAIL"), (("--strict", "-q"), 1, "FAIL")],
    )
    def test_a_warning_fails_only_if_strict(self, call, options, code, verdict):
        found, out, _ = call(*self.WARNS, *options)
        assert found == code and f"verdict: {verdict} (checks:" in out

    def test_strict_passes_a_model_without_findings(self, call):
        code, out, _ = call("check", "cli_models.py:good", "--strict", "--checks", *CORE)
        assert code == 0 and "verdict: PASS" in out

    @pytest.mark.parametrize("factory, verdict", [("spec", "EMPTY"), ("good", "PASS")])
    def test_a_run_in_which_nothing_applies_is_no_pass(self, call, factory, verdict):
        code, out, _ = call("check", f"cli_models.py:{factory}", "--checks", "causality")
        assert (code, f"verdict: {verdict}" in out) == ({"EMPTY": 5, "PASS": 0}[verdict], True)

    @pytest.mark.parametrize(
        "options, passes, warns, described",
        [((), False, True, True), (("-q",), False, True, False), (("-v",), True, True, True)],
    )
    def test_lines_by_verbosity(self, call, options, passes, warns, described):
        _, out, _ = call(*self.WARNS, *options)
        assert (re.search(r"PASS +determinism", out) is not None) == passes
        assert (re.search(r"WARN +token_effect .*This is correct if", out, re.DOTALL) is not None) == warns
        assert ("takes token ids" in out) == described
        assert out.splitlines()[-1] == "verdict: WARN (checks: 1 warned, 1 passed)"

    def test_quiet_and_verbose_are_refused_together(self, call):
        code, _, err = call(*self.WARNS, "-q", "-v")
        assert code == 2 and "--quiet and --verbose" in err

    def test_report_files_have_everything(self, call, workplace):
        assert call(*self.WARNS, "-q", "--report", "out")[0] == 0
        stored = json.loads((workplace / "out.json").read_text())
        assert (stored["verdict"], len(stored["checks"])) == ("WARN", 2)
        page = (workplace / "out.md").read_text()
        assert "**verdict: WARN" in page and "| PASS | determinism |" in page

    def test_output_of_the_model_is_hidden(self, call):
        _, out, err = call("check", "cli_models.py:telling", "--checks", "causality")
        assert "built under seed" not in out + err
        assert re.search(
            r"^\(\d+ lines printed by the model .* are hidden; -v shows them\)$", out, re.MULTILINE
        )

    def test_output_of_the_model_is_shown_once_with_v(self, call):
        _, out, err = call("check", "cli_models.py:telling", "-v", "--checks", "determinism", "--seed", "0")
        assert out.count("built under seed") == 1 and "repeated lines are not shown" in err

    def test_last_line_is_the_verdict_with_the_path_of_the_report(self, call):
        _, out, _ = call("check", "cli_models.py:good", "--checks", "causality", "--report", "found.md")
        assert out.splitlines()[-1] == "verdict: PASS (checks: 1 passed), report: found.md"


class TestClaims:
    """What the command line says of the model."""

    def test_no_causal(self, call):
        code, out, _ = call("check", "cli_models.py:leaky", "-v", "--no-causal", "--checks", "causality")
        assert code == 5 and re.search(r"n/a +causality", out) and "assumed" not in out

    @pytest.mark.parametrize("factory, status", [("vectors", "PASS"), ("spec", "FAIL")])
    def test_causal(self, call, factory, status):
        code, out, _ = call("check", f"cli_models.py:{factory}", "--causal", "-v", "--checks", "causality")
        assert code == (status == "FAIL") and re.search(rf"{status} +causality", out)

    def test_a_failure_says_that_it_was_assumed(self, call):
        _, assumed, _ = call("check", "cli_models.py:leaky", "--checks", "causality")
        _, claimed, _ = call("check", "cli_models.py:leaky", "--causal", "--checks", "causality")
        told = "Causality was assumed: for an encoder, declare causal=False"
        assert told in " ".join(assumed.split())
        assert told not in " ".join(claimed.split()) and "FAIL" in claimed

    def test_both(self, call):
        code, out, err = call("check", "cli_models.py:never", "--causal", "--no-causal")
        assert code == 2 and out == "" and "--causal and --no-causal" in err

    @pytest.mark.parametrize("factory", ["Loop", "declared_loop", "Formless"])
    def test_of_a_training_step(self, call, factory):
        code, _, err = call("check", f"cli_models.py:{factory}", "--no-causal")
        assert code == 2 and "--no-causal" in err and "training step" in err


class TestSharedModel:
    def test_is_left_alone(self, call):
        code, _, _ = call("check", "cli_models.py:returns_shared", "--checks", "causality", "gradient_exact")
        shared = sys.modules["cli_models"].shared
        assert code == 1 and {p.dtype for p in shared.parameters()} == {torch.float32}


class TestCheckSelection:
    """Which checks are asked; that they decide rightly is tested with each of them."""

    @pytest.fixture(autouse=True)
    def _asked(self, monkeypatch):
        import stackwise.checks.run
        from stackwise.checks.result import CheckResult

        self.asked = []

        def answer(check, spec, **arguments):
            self.asked.append(check.name)
            return CheckResult(check.name, spec.name, "passed", 0.0, 0.0)

        monkeypatch.setattr(stackwise.checks.run.Check, "run", answer)

    @pytest.mark.parametrize("suite", ["fast", "full"])
    @pytest.mark.parametrize("factory, asks", [("good", "model"), ("Loop", "trainer")])
    def test_suite(self, call, suite, factory, asks):
        assert call("check", f"cli_models.py:{factory}", "--suite", suite)[0] == 0
        assert self.asked == [check.name for check in select_checks(suite=suite, asks=asks)]

    def test_fast_is_the_default(self, call):
        call("check", "cli_models.py:good")
        assert self.asked == [check.name for check in select_checks()]

    @pytest.mark.parametrize(
        "names", [("finiteness", "causality"), ("finiteness,causality",), ("finiteness,", "causality")]
    )
    def test_names_and_families(self, call, names):
        assert call("check", "cli_models.py:good", "--checks", *names)[0] == 0
        assert self.asked == [check.name for check in select_checks(["finiteness", "causality"])]

    def test_named_check_of_the_full_suite(self, call):
        (name, *_) = [check.name for check in select_checks(suite="full") if check.suite == "full"]
        call("check", "cli_models.py:good", "--checks", name)
        assert self.asked == [name]


class TestCheckTrainer:
    @pytest.mark.parametrize("factory", ["Loop", "loop_spec", "declared_loop", "Lit", "Formless", "formless"])
    def test_sound(self, call, factory):
        code, out, err = call("check", f"cli_models.py:{factory}", "-v", "--checks", "fresh_gradients")
        assert code == 0 and err == ""
        assert re.search(r"PASS +fresh_gradients", out)

    def test_gradients_that_pile_up(self, call):
        code, out, _ = call("check", "cli_models.py:Piling", "--checks", "fresh_gradients")
        assert code == 1 and re.search(r"FAIL +fresh_gradients", out)

    def test_exception_inside_a_check_is_its_error_and_the_rest_go_on(self, call, monkeypatch):
        from stackwise.checks.trainer_subject import TrainerSubject

        def broken(self, *args, **named):
            raise KeyError("no data")

        monkeypatch.setattr(TrainerSubject, "batch", broken)
        names = ("fresh_gradients", "strided_updates")
        code, out, _ = call("check", "cli_models.py:Loop", "--checks", *names)
        assert code == 1
        assert re.search(r"ERROR fresh_gradients\n.*KeyError", out)
        assert re.search(r"^  ERROR strided_updates$", out, re.M)

    def test_unknown_check_of_a_training_step(self, call):
        code, _, err = call("check", "cli_models.py:Loop", "--checks", "causality")
        assert code == 2 and "causality" in err and "fresh_gradients" in err

    @pytest.mark.parametrize("target", ["cli_models.py:Loop", "cli_models.py:declared_loop"])
    def test_other_processes_know_the_factory(self, call, workplace, monkeypatch, target):
        import stackwise.checks

        seen = []
        monkeypatch.setattr(stackwise.checks, "check_trainer", lambda spec, **_: seen.append(spec) or [])
        call("check", target)
        assert seen[0].factory == f"{workplace}/{target}"

    def test_seed_reaches_the_training_step(self, call, monkeypatch):
        import stackwise.checks

        seen = []
        monkeypatch.setattr(stackwise.checks, "check_trainer", lambda spec, **a: seen.append(a) or [])
        call("check", "cli_models.py:Loop", "--seed", "5", "--suite", "full")
        assert (seen[0]["seed"], seen[0]["suite"], seen[0]["checks"]) == (5, "full", None)


class TestCheckReport:
    @pytest.mark.parametrize("factory, verdict", [("good", "PASS"), ("leaky", "FAIL")])
    def test_json(self, call, workplace, factory, verdict):
        code, _, _ = call(
            "check", f"cli_models.py:{factory}", "--report", "out/report.json", "--checks", *CORE
        )
        stored = json.loads((workplace / "out" / "report.json").read_text())
        assert code == (verdict == "FAIL") and stored["verdict"] == verdict
        (row,) = [row for row in stored["checks"] if row["check"] == "causality"]
        assert row["status"] == {"PASS": "passed", "FAIL": "failed"}[verdict]
        assert stored["environment"]["torch"] == torch.__version__
        assert Report.from_json(workplace / "out" / "report.json").verdict == verdict

    def test_markdown(self, call, workplace):
        call("check", "cli_models.py:leaky", "--report", "report.md", "--checks", *CORE)
        text = (workplace / "report.md").read_text()
        assert text.startswith("# ") and "The output changes if" in text
        assert "## Failed checks" in text and "leaky::causality" in text

    def test_html(self, call, workplace):
        options = ["--report", "report.html", "--seed", "3", "--causal"]
        call("check", "cli_models.py:leaky", *options, "--checks", *CORE)
        text = (workplace / "report.html").read_text()
        assert text.index("FAIL") < text.index("The output changes if") < text.rindex("Passed checks")
        command = "stackwise check cli_models.py:leaky --checks causality --seed 3 --device cpu --causal"
        assert f"<code>{command}</code>" in text

    def test_command_of_a_finding_finds_it_again(self, call, workplace):
        call("check", "cli_models.py:leaky", "--report", "report.json", "--checks", *CORE)
        commands = json.loads((workplace / "report.json").read_text())["commands"]
        _, *arguments = shlex.split(commands["leaky::causality"])
        code, out, _ = call(*arguments)
        assert code == 1 and "causality" in out

    def test_nothing_is_written_unasked(self, call, workplace):
        before = {path.name for path in workplace.iterdir()}
        call("check", "cli_models.py:good", "--checks", "causality")
        assert {path.name for path in workplace.iterdir()} - {"__pycache__"} == before

    def test_other_ending(self, call):
        code, _, err = call("check", "cli_models.py:good", "--checks", "causality", "--report", "report.txt")
        assert code == 2 and "'report.txt'" in err and ".md, .json" in err


class TestCheckRefused:
    @pytest.mark.parametrize("target, parts", UNLOADABLE)
    def test_target(self, call, target, parts):
        code, out, err = call("check", target)
        assert code == 2 and out == ""
        assert err.startswith("stackwise: ") and err.count("\n") == 1
        assert [part for part in parts if part not in err] == []

    def test_model_that_cannot_be_called(self, call):
        code, _, err = call("check", "cli_models.py:puzzling")
        assert code == 2 and "puzzling" in err and "inputs=" in err

    def test_unknown_check(self, call):
        code, _, err = call("check", "cli_models.py:good", "--checks", "cauzality")
        assert code == 2 and "cauzality" in err and "causality" in err and err.count("\n") == 1

    @pytest.mark.parametrize("names", [("cauzality",), ("causality,cauzality",), ("cauzality", "step")])
    def test_unknown_check_is_refused_before_anything_is_built(self, call, names):
        code, out, err = call("check", "cli_models.py:never", "--checks", *names)
        assert code == 2 and out == ""
        assert err.startswith(
            "stackwise: checks: unknown cauzality; did you mean causality or causality_modes?; families: "
        )
        for name in ("causality", "padding", "clipping"):  # families of models and of training steps
            assert re.search(rf"\b{name}\b", err)

    @pytest.mark.parametrize(
        "factory, name, told",
        [
            ("good", "step", "step: for training steps only"),
            ("Loop", "causality", "causality: for models only"),
        ],
    )
    def test_check_of_the_other_kind(self, call, factory, name, told):
        code, _, err = call("check", f"cli_models.py:{factory}", "--checks", name)
        assert code == 2 and told in err and "unknown" not in err

    @pytest.mark.parametrize("device", ["tpu", "cuda:99", "cuda:x"])
    def test_device(self, call, device):
        code, _, err = call("check", "cli_models.py:good", "--device", device)
        assert code == 2 and f"device: got '{device}'" in err and err.count("\n") == 1

    @pytest.mark.parametrize(
        "arguments",
        [[], ["check"], ["train", "a", "b"], ["nothing"], ["check", "a:b", "--seed", "x"], ["train", "-z"]],
    )
    def test_usage(self, call, arguments, capsys):
        with pytest.raises(SystemExit) as leaving:
            call(*arguments)
        assert leaving.value.code == 2

    @pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["train", "--help"]])
    def test_help(self, call, arguments, capsys):
        with pytest.raises(SystemExit) as leaving:
            call(*arguments)
        assert leaving.value.code == 0 and "stackwise" in capsys.readouterr().out

    def test_version(self, call):
        assert call("--version") == (0, f"stackwise {stackwise.__version__}\n", "")

    def test_version_is_that_of_the_package_and_needs_no_torch(self):
        code = "import sys, stackwise; print(stackwise.__version__, 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [metadata.version("stackwise"), "False"]


HOSTILE_JSON = {
    "deep": b"[" * 100_000,
    "digits": b'{"version": ' + b"9" * 5000 + b"}",
    "bytes": b"\xff\xfe\0",
    "number": b"5",
    "list": b"[1]",
    "object": b"{}",
    "empty": b"",
}
READERS = {
    "gate": ["gate", "FILE.json", "FILE.json"],
    "history add": ["history", "add", "FILE.json", "--store", "h.db"],
    "history judge": ["history", "judge", "FILE.json", "--store", "h.db"],
    "history list": ["history", "list", "--store", "FILE.json"],
    "replay": ["replay", "folder", "cli_models.py:good"],
    "task": ["quality", "cli_models.py:good", "--tokenizer", "byte", "--tasks", "FILE.jsonl"],
    "tokenizer": ["quality", "cli_models.py:good", "--tokenizer", "FILE.json", "--tasks", "text.jsonl"],
    "model": ["quality", "folder", "--tokenizer", "byte", "--tasks", "text.jsonl"],
    "problems": ["quality", "cli_models.py:good", "--tokenizer", "byte", "--human-eval", "FILE.jsonl"],
    "compressed": ["quality", "cli_models.py:good", "--tokenizer", "byte", "--human-eval", "FILE.gz"],
    "train": ["train", "FILE.json"],
    "search": ["search", "FILE.json"],
    "search storage": ["search", "--show", "--storage", "FILE.json"],
}


class TestHostileFiles:
    """Whatever a file has in it, a command ends with code 2 and one line that names the problem."""

    @pytest.mark.parametrize("content", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
    @pytest.mark.parametrize("command", READERS.values(), ids=READERS)
    def test_content_is_refused_in_one_line(self, call, workplace, command, content):
        (workplace / "folder").mkdir()
        (workplace / "text.jsonl").write_text('{"text": "words"}\n')
        for name in ("FILE.json", "FILE.jsonl", "FILE.gz", "folder/bundle.json", "folder/config.json"):
            (workplace / name).write_bytes(content)
        more = ["--execute-generated-code"] if "--human-eval" in command else []
        if content in (b"", b"{}") and command[0] == "train":
            return  # an empty configuration is the default one
        code, _, err = call(*command, *more)
        assert (code, err.count("\n")) == (2, 1), err
        assert err.startswith("stackwise: ") and len(err) < 500

    @pytest.mark.parametrize(
        "arguments, part",
        [
            (["train", "--training.max_steps", "9" * 5000], "number of more than 300 characters"),
            (["train", "--training.max_steps", "1e999"], "training.max_steps (command line): got inf"),
            (["train", "--model.architecture.n_stacks", "9" * 15], "less than or equal to 10000"),
            (["gate", "a.json", "b.json", "--limits", f"time={'9' * 5000}%"], "above 0% and at most"),
            (
                ["gate", "a.json", "b.json", "--limits", f"floor={'9' * 400}s"],
                "allowed: a string such as '50us'",
            ),
        ],
    )
    def test_number_is_refused_in_one_line(self, call, arguments, part):
        code, _, err = call(*arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert part in err and len(err) < 1200


class TestTrain:
    def test_runs(self, call, workplace):
        code, out, err = call("train", "run.yaml", "--progress", "off")
        assert code == 0 and err == ""
        assert re.search(
            r"^3 steps, [\d,]+ tokens/s, loss \d\.\d{4}, validation \d\.\d{4} nats per byte$", out, re.M
        )
        assert "saved in runs" in out
        manager = RackCheckpoints(workplace / "runs", StackWiseConfig.from_yaml("run.yaml"))
        assert manager.steps() == [3]

    def test_report(self, call, workplace):
        code, out, _ = call("train", "run.yaml", "--report", "out/train")
        assert code == 0 and "report: out/train.html" in out
        stored = json.loads((workplace / "out" / "train.json").read_text())
        assert [record["step"] for record in stored["training"]["records"]] == [0, 1, 2]
        assert stored["verdict"] == "PASS"
        assert "Loss and gradient norm" in (workplace / "out" / "train.html").read_text()

    def test_without_checkpoints_and_validation(self, call, workplace):
        config = StackWiseConfig.from_yaml("run.yaml")
        config.training.checkpoint_dir, config.data.validation_fraction = None, 0.0
        config.to_yaml("run.yaml")
        code, out, _ = call("train", "run.yaml")
        assert code == 0 and "saved" not in out and "validation" not in out
        assert not (workplace / "runs").exists()

    @pytest.mark.parametrize("on_disk", [False, True])
    def test_freed_memory_is_kept_unless_blocks_are_on_disk(self, call, workplace, monkeypatch, on_disk):
        asked, scope = [], ["--training.training_architecture=blockwise"]
        if on_disk:
            scope += ["--training.scope.offload=disk", "--training.scope.offload_dir=blocks"]
        monkeypatch.setattr("stackwise.support.device.keep_freed_memory", asked.append)
        code, _, _ = call("train", "run.yaml", *scope)
        assert code == 0 and asked == [not on_disk]
        assert (workplace / "blocks").exists() == on_disk

    def test_progress(self, call, monkeypatch):
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        _, out, err = call("train", "run.yaml")
        assert "training 3/3" in err and "training 3/3" not in out

    def test_interrupted(self, call, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("stackwise.training.loop.TrainingLoop.run", interrupt)
        assert call("train", "run.yaml") == (130, "", "stackwise: interrupted\n")

    def test_same_weights_again(self, call, workplace):
        saved = []
        for state in (1, 2):
            torch.manual_seed(state)
            call("train", "run.yaml")
            saved.append((workplace / "runs" / "step-3" / "model.safetensors").read_bytes())
        assert saved[0] == saved[1]


class TestTrainRefused:
    def test_every_problem_of_the_file(self, call, workplace):
        (workplace / "run.yaml").write_text(
            "model: {d_model: 0, n_head: 4}\ntraining: {precision: fp17, max_steps: none}\nextra: 1\n"
        )
        code, out, err = call("train", "run.yaml")
        assert code == 2 and out == ""
        assert err.startswith("stackwise: run.yaml: 5 problems\n")
        problems = ["model.d_model", "model.n_head", "'n_heads'", "precision", "fp17", "max_steps", "extra"]
        assert [part for part in problems if part not in err] == []

    def test_no_yaml(self, call, workplace):
        (workplace / "run.yaml").write_text("model: [")
        code, _, err = call("train", "run.yaml")
        assert code == 2 and "run.yaml" in err and "Traceback" not in err

    def test_missing_file(self, call):
        code, _, err = call("train", "nowhere.yaml")
        assert code == 2 and "nowhere.yaml" in err and err.count("\n") == 1

    @pytest.mark.parametrize(
        "line, replacement, part",
        [
            ("dataset_path: text.txt", "dataset_path: nowhere.txt", "nowhere.txt"),
            ("vocab_size: 256", "vocab_size: 100", "model.vocab_size"),
            ("device: cpu", "device: 'cuda:99'", "cuda:99"),
            ("d_model: 16", "d_model: 16\n  attention_mode: bidirectional", "attention_mode"),
            ("seq_len: 8", "seq_len: 5000", "tokens"),
            ("lr: 1e-2", "lr: 1e+30", "step 1"),
        ],
    )
    def test_one_line(self, call, workplace, line, replacement, part):
        text = (workplace / "run.yaml").read_text()
        assert line in text
        (workplace / "run.yaml").write_text(text.replace(line, replacement))
        code, _, err = call("train", "run.yaml", "--progress", "off")
        assert code == 2 and part in err
        assert err.startswith("stackwise: ") and err.count("\n") == 1


@pytest.fixture
def printed(call):
    """The configuration that `--print-config` prints of these arguments."""

    def read(*arguments):
        code, out, err = call("train", *arguments, "--print-config")
        assert (code, err) == (0, "")
        return StackWiseConfig.from_dict(load_yaml(out.encode()))

    return read


class TestKeysOnTheCommandLine:
    def test_precedence(self, printed):
        assert printed().training.max_steps == StackWiseConfig().training.max_steps
        assert printed("run.yaml").training.max_steps == 3
        assert printed("run.yaml", "--training.max_steps", "7").training.max_steps == 7

    def test_only_what_is_given_changes(self, printed):
        config = StackWiseConfig.from_yaml("run.yaml")
        found = printed("run.yaml", "--training.optimizer.weight_decay", "0.3", "--model.d_ff=40")
        config.training.optimizer.weight_decay, config.model.d_ff = 0.3, 40
        assert found == config

    def test_before_the_file_and_without_one(self, printed):
        key = ("--training.max_steps", "7")
        assert printed(*key, "run.yaml") == printed("run.yaml", *key)
        assert printed(*key).to_dict() == StackWiseConfig.from_dict({"training": {"max_steps": 7}}).to_dict()

    @pytest.mark.parametrize(
        "key, text, value",
        [
            ("training.optimizer.lr", "3e-4", 3e-4),
            ("training.optimizer.lr", "1E-2", 1e-2),
            ("training.optimizer.lr", "1", 1.0),
            ("training.grad_clip", "null", None),
            ("training.grad_clip", "~", None),
            ("training.compile", "true", True),
            ("training.seed", "010", 10),
            ("training.optimizer.betas", "[0.8, 0.99]", [0.8, 0.99]),
            ("model.sliding_window", "[4, null]", [4, None]),
            ("model.sliding_window", "4", 4),
            ("training.device", "cuda:1", "cuda:1"),
            ("training.checkpoint_dir", '"1e5"', "1e5"),
            ("training.checkpoint_dir", '""', ""),
            ("training.checkpoint_dir", "a=b", "a=b"),
            ("data.dataset_path", "some file.txt", "some file.txt"),
        ],
    )
    @pytest.mark.parametrize("form", ["apart", "equals"])
    def test_values(self, printed, key, text, value, form):
        found = printed(*([f"--{key}", text] if form == "apart" else [f"--{key}={text}"]))
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value and type(found) is type(value)

    def test_list_of_texts(self, printed):
        kind = ("--training.recompute.kind", "by_name")
        found = printed(*kind, "--training.recompute.names", '["*.attention", a]')
        assert found.training.recompute.names == ["*.attention", "a"]

    def test_another_kind_puts_the_files_keys_for_its_own_away(self, printed, workplace):
        recompute = {"kind": "budget", "budget": 0.25}
        training = {
            "compile": True,
            "recompute": recompute,
            "schedule": {"kind": "wsd", "decay_fraction": 0.5},
        }
        (workplace / "kinds.yaml").write_text(json.dumps({"training": training}))
        found = printed("kinds.yaml", "--training.recompute.kind", "none").training
        assert (found.recompute.kind, found.recompute.budget) == ("none", 0.5)
        assert found.schedule.decay_fraction == 0.5
        found = printed("kinds.yaml", "--training.recompute.kind=every_nth", "--training.recompute.every=3")
        assert (found.training.recompute.kind, found.training.recompute.every) == ("every_nth", 3)
        assert printed("kinds.yaml", "--training.recompute.kind=budget").training.recompute.budget == 0.25

    def test_a_key_of_another_kind_on_the_command_line_is_refused(self, call, workplace):
        status, _, error = call("train", "--training.recompute.kind=none", "--training.recompute.every=3")
        assert status == 2 and "training.recompute.every (command line): got 3" in error
        assert "has an effect only with kind='every_nth'; now kind='none'" in error

    def test_section_that_is_null(self, printed):
        kernel = printed(
            "--model.attention_type", "kernel", "--model.n_kv_heads=null", "--model.kernel.n_features=8"
        )
        assert kernel.model.kernel.n_features == 8

    def test_index_of_a_stack(self, printed):
        found = printed(
            "--training.optimizer.per_stack.1.lr", "1e-3", "--training.optimizer.per_stack.0.lr=2e-3"
        )
        assert {i: own.lr for i, own in found.training.optimizer.per_stack.items()} == {1: 1e-3, 0: 2e-3}

    def test_whole_section(self, printed):
        found = printed("run.yaml", "--training.optimizer", "{kind: muon, lr: 0.5}").training.optimizer
        assert (found.kind, found.lr) == ("muon", 0.5)

    def test_trains_by_them(self, call, workplace):
        code, out, err = call(
            "train",
            "run.yaml",
            "--progress=off",
            "--training.max_steps",
            "2",
            "--training.checkpoint_dir=other",
        )
        assert code == 0 and err == "" and "\n2 steps, " in out
        assert (workplace / "other" / "step-2").is_dir() and not (workplace / "runs").exists()

    @given(
        st.fixed_dictionaries(
            {},
            optional={
                "training.optimizer.lr": st.floats(1e-12, 1e3),
                "training.seed": st.integers(0, 2**63 - 1),
                "training.grad_clip": st.none() | st.floats(1e-300, 1e300),
                "training.compile": st.booleans(),
                "training.precision": st.sampled_from(["fp32", "bf16", "fp16"]),
                "training.checkpoint_dir": st.none() | TEXT,
                "training.telemetry.jsonl": st.none() | TEXT,
                "training.optimizer.betas": st.lists(st.floats(0.0, 0.999), min_size=2, max_size=2),
                "training.optimizer.per_stack.3.lr": st.floats(1e-9, 1.0),
                "data.dataset_path": st.none() | TEXT,
            },
        )
    )
    def test_any_value_arrives_and_is_written_as_it_is(self, values):
        arguments = [f"--{key}={json.dumps(value)}" for key, value in values.items()]  # JSON is YAML
        others, overrides = split_overrides(["train", *arguments])
        assert others == ["train"]
        found = load_configuration(None, overrides)
        for key, value in values.items():
            there = found
            for part in key.split("."):
                there = there[int(part)] if part.isdecimal() else getattr(there, part)
            assert there == value, key
        assert StackWiseConfig.from_dict(load_yaml(dump_yaml(found.to_dict()).encode())) == found

    def test_printed_configuration_is_a_file(self, printed, call, workplace):
        keys = [
            "--training.optimizer.lr=1e-5",
            "--training.optimizer.per_stack.1.lr=1e-4",
            "--training.grad_clip=~",
        ]
        found = printed("run.yaml", *keys)
        (workplace / "again.yaml").write_text(call("train", "run.yaml", *keys, "--print-config")[1])
        assert printed("again.yaml") == found


class TestKeysRefused:
    @pytest.mark.parametrize(
        "arguments, parts",
        [
            (
                ["--training.optimizer.lrr", "1"],
                ["training.optimizer.lrr (command line): unknown key; did you mean 'lr'?"],
            ),
            (
                ["--training.optimizer.per_stack.0.lrr", "1"],
                ["training.optimizer.per_stack.0.lrr (command line): unknown key; did you mean 'lr'?"],
            ),
            (["--trainig.seed", "1"], ["trainig (command line): unknown key; did you mean 'training'?"]),
            (["--training.lr", "1"], ["training.lr (command line)", "did you mean 'training.optimizer.lr'"]),
            (["--lr", "1"], ["--lr (command line): unknown option", "--training.optimizer.lr"]),
            (["--max-steps", "1"], ["--max-steps", "did you mean --training.max_steps?"]),
            (["--progres", "on"], ["--progres ", "did you mean --progress?"]),
            (
                ["--training.seed", "x"],
                ["training.seed (command line): got 'x' (str); allowed: a valid integer"],
            ),
            (
                ["--training.seed", "-1"],
                ["training.seed (command line): got -1 (int)", "greater than or equal to 0"],
            ),
            (
                ["--training.optimizer.lr=-3e-4"],
                ["training.optimizer.lr (command line): got -0.0003 (float)"],
            ),
            (["--training.compile", "maybe"], ["training.compile (command line): got 'maybe'"]),
            (["--training.precision", "bf17"], ["training.precision (command line): got 'bf17'", "'bf16'"]),
            (
                ["--training.seed"],
                ["training.seed (command line): got no value; allowed: --training.seed=VALUE"],
            ),
            (["--training.seed="], ["training.seed (command line): got no value"]),
            (["--training.compile", "--model.d_ff", "8"], ["training.compile (command line): got no value"]),
            (
                ["--training.recompute.names", "[*.a]"],
                ["training.recompute.names (command line): got '[*.a]'", "YAML"],
            ),
            (["--training.seed.x", "1"], ["training.seed (command line): got {'x': 1} (dict)"]),
            (["--training", "3"], ["training (command line): got 3 (int); allowed: "]),
            (["--training.optimizer", "3"], ["training.optimizer (command line): got 3 (int)"]),
            (["--training.seed", "1", "--training.seed", "1"], ["training.seed (command line): given twice"]),
            (
                ["--training.schedule", "{}", "--training.schedule.kind", "wsd"],
                ["training.schedule.kind (command line): given beside training.schedule"],
            ),
            (
                ["--training.schedule.kind", "wsd", "--training.schedule={}"],
                ["training.schedule (command line): given beside training.schedule.kind"],
            ),
            # What is refused is a key that nobody gave, because of one that was given.
            (["--model.n_heads", "1", "--model.d_model", "8"], ["model.n_kv_heads (default): got 2 (int)"]),
        ],
        ids=lambda value: " ".join(value) if str(value[0]).startswith("--") else "told",
    )
    def test_says_key_value_and_what_is_allowed(self, call, arguments, parts):
        code, out, err = call("train", *arguments)
        assert (
            code == 2 and out == "" and err.startswith("stackwise: command line: ") and err.count("\n") == 1
        )
        assert [part for part in parts if part not in err] == []

    def test_all_problems_and_where_each_is_from(self, call, workplace):
        (workplace / "run.yaml").write_text("model: {d_model: 0}\ntraining: {precision: fp17, sede: 1}\n")
        code, _, err = call(
            "train",
            "run.yaml",
            "--training.max_steps",
            "none",
            "--data.shuffle",
            "--data.tsk=copy",
            "--lr",
            "1",
        )
        assert code == 2 and err.startswith("stackwise: run.yaml and command line: 7 problems\n")
        for start in (
            "model.d_model (run.yaml): got 0 (int)",
            "training.precision (run.yaml): got 'fp17' (str)",
            "training.sede (run.yaml): unknown key; did you mean 'seed'?",
            "training.max_steps (command line): got 'none' (str)",
            "data.shuffle (command line): got no value",
            "data.tsk (command line): unknown key; did you mean 'task'?",
            "--lr (command line): unknown option; did you mean --training.optimizer.lr",
        ):
            assert f"\n  {start}" in err, start

    def test_key_that_goes_into_a_value_of_the_file(self, call, workplace):
        (workplace / "run.yaml").write_text("training: {seed: 5}\nmodel: 3\n")
        _, _, err = call("train", "run.yaml", "--training.seed.x", "1", "--model.d_ff", "8")
        assert "training.seed.x (command line): the file has 5 for seed, which holds no keys" in err
        assert (
            "model.d_ff (command line): the file has 3 for model" in err and "model (run.yaml): got 3" in err
        )

    def test_a_key_of_the_command_line_mends_the_file(self, printed, workplace):
        (workplace / "run.yaml").write_text("training: {seed: x}\n")
        assert printed("run.yaml", "--training.seed", "4").training.seed == 4

    @pytest.mark.parametrize("text", ["- 1", "model: [", "a: 1\na: 2"])
    def test_file_that_is_none(self, call, workplace, text):
        (workplace / "run.yaml").write_text(text)
        code, _, err = call("train", "run.yaml", "--training.seed", "4")
        assert code == 2 and err.startswith("stackwise: run.yaml: ") and err.count("\n") == 1

    def test_missing_file(self, call):
        code, _, err = call("train", "nowhere.yaml", "--training.seed", "4")
        assert code == 2 and "nowhere.yaml" in err and err.count("\n") == 1


class TestTrainHelp:
    def test_lists_every_key_and_does_not_import_torch(self):
        code = "import sys; from stackwise.cli import main\n"
        code += "try: main(['train', '--help'])\nexcept SystemExit: print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.endswith("\nFalse\n")
        told = re.findall(r"^  --([\w.]+): (.+)\n      (\S.+)$", done.stdout, re.MULTILINE)
        assert [key for key, *_ in told] == list(configuration_keys())
        known = {key: rest for key, *rest in told}
        assert known["training.optimizer.lr"] == [
            "number > 0; default 0.0001",
            "Learning rate at the peak of the schedule",
        ]
        assert known["training.grad_clip"][0] == "number > 0 | null; default 1.0"
        assert known["training.optimizer.betas"][0] == "list of 2 (number >= 0 and < 1); default [0.9, 0.95]"
        assert known["training.precision"][0] == "fp32 | bf16 | bf16_weights | fp16 | float8; default bf16"
        assert known["model.rope_scaling.rope_type"][0] == "linear | llama3; no default"

    def test_defaults_are_those_of_the_configuration(self):
        for path, key in configuration_keys().items():
            found = StackWiseConfig()
            for part in path.split("."):
                found = getattr(found, part, None)
            if found is not None:
                assert load_yaml(key.default.encode()) == found, path


class TestOutput:
    def test_units(self, call):
        _, out, _ = call(
            "train",
            "run.yaml",
            "--training.training_architecture=stackwise",
            "--training.scope.polish_steps",
            "1",
        )
        assert re.match(r"stackwise: stacks of 1 \+ 1 blocks, [\d,]+ parameters, next_token, fp32\n", out)
        for name, batches in (("stack 0", 2), ("stack 1", 2), ("all together", 1)):
            assert re.search(rf"│ {name} +│ +[\d,]+ │ +{batches} │ +\d\.\d{{4}} │ +\d\.\d{{4}} │", out), name
        assert "\n5 steps, " in out

    def test_steps_are_updates(self, call):
        assert "\n3 steps, " in call("train", "run.yaml", "--training.accumulation_steps", "2")[1]

    def test_masked(self, call):
        keys = ("--model.attention_mode=bidirectional", "--model.vocab_size=257")
        keys += ("--training.objective.kind=masked_token", "--training.objective.mask_token_id=256")
        assert re.search(
            r"validation \S+ nats per masked byte$", call("train", "run.yaml", *keys)[1], re.MULTILINE
        )

    def test_task(self, call):
        keys = ("--data.dataset_path=null", "--data.task=shift")
        assert re.search(r"validation \S+ nats per token$", call("train", "run.yaml", *keys)[1], re.MULTILINE)

    def test_one_process_alone_with_a_strategy(self, call):
        code, out, err = call("train", "run.yaml", "--training.distributed.strategy", "ddp")
        assert code == 2 and out == "" and "training.distributed.strategy" in err and "torchrun" in err

    def test_other_processes_print_no_configuration(self, call, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        assert call("train", "run.yaml", "--print-config") == (0, "", "")

    def test_plan(self, call, workplace, monkeypatch):
        monkeypatch.setattr("stackwise.model.create_rack_from_config", None)  # what training would call
        keys = ("--training.training_architecture", "blockwise", "--training.device=cpu")
        code, out, err = call("train", "run.yaml", "--plan", *keys)
        assert (code, err) == (0, "") and "stack 0 block 0" in out and "on the device" in out
        assert "fits" not in out  # of a CPU nobody knows
        assert {path.name for path in workplace.iterdir() if path.suffix not in (".py", ".yaml", ".txt")} <= {
            "__pycache__"
        }
        assert call("train", "run.yaml", "--plan", "--training.precision=float8")[0] == 2

    def test_plan_says_whether_it_fits(self, call, monkeypatch):
        there = type("Properties", (), {"total_memory": 10**9})
        planned = plan_memory(StackWiseConfig(), device="cpu")
        monkeypatch.setattr("stackwise.training.memory_planner.plan_memory", lambda *_, **__: planned)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: there)
        line = call("train", "run.yaml", "--plan", "--training.device=cuda")[1].splitlines()[-1]
        assert line.startswith("fits: ") and line.endswith("1.0 GB on cuda")
        there.total_memory = planned.peak - 1
        line = call("train", "run.yaml", "--plan", "--training.device=cuda")[1].splitlines()[-1]
        assert line.startswith("does not fit: ")
