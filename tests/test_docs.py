"""What README and docs/ say is what the code does."""

import importlib
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

import stackwise.checks.check as check_module
from bench import detection_table, peer_table, quality_table, stability_table, training_table
from bench.prototype import table as prototype_table
from pytest_stackwise import markers
from stackwise import ModelSpec, StackWiseConfig, check_model, measure, stability_run
from stackwise.benchmark import model_workload
from stackwise.checks import known_checks
from stackwise.checks.check import select_checks
from stackwise.config import ModelConfig

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += [f"docs/{name}.md" for name in ("checks", "plugin", "rack", "attention", "initialization")]
PAGES += [f"docs/{name}.md" for name in ("generation", "surgery", "interop", "training", "configuration")]
PAGES += [
    f"docs/{name}.md" for name in ("objectives", "optimizer", "data", "recompute", "telemetry", "memory")
]
PAGES += [f"docs/{name}.md" for name in ("checkpoints", "faults", "guard", "guard-adapters", "locating")]
PAGES += [f"docs/{name}.md" for name in ("measuring", "memory-tests", "utilization", "gate", "history")]
PAGES += ["docs/quality.md"]
PAGES += ["docs/prototype.md", "docs/length-sweep.md", "docs/search.md"]
FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(
        code,
        id=f"{page}-{number}",
        marks=pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers)"),  # Lightning's own
    )
    for page in PAGES
    for number, (language, code) in enumerate(FENCE.findall((ROOT / page).read_text()))
    if language == "python"
]
MODELS = """
from torch import nn

def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ))

def leaky_llama():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model

def tiny_encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
"""


@pytest.fixture(scope="session")
def _imported():
    # A nested run forgets what it imported first, and none of these bears a second import.
    for library in ("datasets", "sqlalchemy", "optuna"):
        importlib.import_module(library)
    models = {}
    exec(MODELS, models)
    spec = ModelSpec.of(models["tiny_llama"])
    check_model(spec)
    stability_run(spec, steps=1)
    measure(model_workload(spec, "train", batch_size=1, seq_len=4), min_seconds=0.0, warmup_seconds=0.0)


@pytest.fixture
def package(pytester, _imported, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.mkpydir("mypackage").joinpath("models.py").write_text(MODELS)
    pytester.syspathinsert()
    return pytester


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code, package, monkeypatch):
    monkeypatch.setattr(check_module, "_registry", dict(check_module._registry))
    if "def test_" in code:
        package.makepyfile(test_example=code)
        result = package.runpytest("-p", "no:cacheprovider", "-p", "no:xdist")
        outcomes = result.parseoutcomes()
        assert outcomes.get("passed", 0) > 0
        assert outcomes.keys() <= {"passed", "skipped"}
    else:
        exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_zero_code_line_of_the_readme(package):
    result = package.runpytest("--stackwise-model=mypackage.models:tiny_llama", "-p", "no:xdist")
    outcomes = result.parseoutcomes()
    assert outcomes.keys() <= {"passed", "skipped"}
    assert sum(outcomes.values()) == 1 + len(select_checks())
    assert outcomes["passed"] > len(select_checks()) / 2


def test_message_of_the_readme_is_the_message(package):
    shown = re.search(r"```text\n(tiny_llama: causality.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[
        1
    ]
    options = ["--stackwise-model=mypackage.models:leaky_llama", "--stackwise-checks=causality"]
    result = package.runpytest(*options, "-p", "no:xdist")
    printed = [re.sub(r"[\d.]+", "N", line) for line in result.outlines]
    for line in shown.replace("tiny_llama", "leaky_llama").splitlines():
        assert re.sub(r"[\d.]+", "N", line) in printed


def test_configuration_of_the_page_is_the_default(tmp_path):
    for language, text in FENCE.findall((ROOT / "docs/rack.md").read_text()):
        if language == "yaml":
            (tmp_path / "run.yaml").write_text(text)
            assert StackWiseConfig.from_yaml(tmp_path / "run.yaml") == StackWiseConfig()
            written = {line.split(":")[0].strip() for line in text.splitlines()}
            assert written >= set(_leaves(StackWiseConfig().model.to_dict()))


def test_sections_that_are_null_are_shown_with_their_defaults():
    page = re.sub(r"\n +# ", " ", (ROOT / "docs/rack.md").read_text())
    for name, given in [
        ("latent", {}),
        ("kernel", {}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ]:
        shown = yaml.safe_load(re.search(rf"^  {name}: null .*?(\{{.*?\}})", page, re.MULTILINE)[1])
        kinds = get_args(ModelConfig.model_fields[name].annotation)
        assert given | shown == kinds[0].from_dict(given).to_dict(), name


def test_page_of_checks_lists_every_check():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs/checks.md").read_text(), re.MULTILINE)
    assert dict(rows) == {name: check.summary for name, check in known_checks().items()}


def test_page_of_the_plugin_lists_every_option_and_marker(pytestconfig):
    page = (ROOT / "docs/plugin.md").read_text()
    group = pytestconfig._parser.getgroup("stackwise")
    options = {name for option in group.options for name in option.names()}
    assert options >= {"--gpu", "--stackwise-seed", "--stackwise-against"}
    for option in options:
        assert re.search(rf"`{option}[=`]", page), option
    lines = [line for line in markers._HELP.splitlines() if line]
    for marker in (re.match(r"\w+", line)[0] for line in lines):
        assert re.search(rf"^\|.*`{marker}\b.*\|", page, re.MULTILINE), marker


def test_table_of_speed_is_what_was_measured():
    assert peer_table.table(peer_table.recorded()) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "tables, page",
    [
        (tables, page)
        for tables in (detection_table, training_table, stability_table, quality_table, prototype_table)
        for page in tables.MARKS
    ],
)
def test_tables_are_what_was_measured(tables, page):
    assert tables.written(page) == (ROOT / page).read_text()


def test_links_lead_somewhere():
    for page in [*PAGES, "docs/cluster.md", "docs/design.md", "docs/log.md", "docs/zoo.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), (page, target)


def _leaves(tree):
    for key, value in tree.items():
        yield from _leaves(value) if isinstance(value, dict) else [key]
