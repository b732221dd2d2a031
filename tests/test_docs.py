"""What README and docs/ say is what the code does."""

import gc
import importlib
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import stackwise
import stackwise.checks.check as check_module
from bench import detection_table, peer_table, quality_table, stability_table, training_table
from bench.gate import table as gate_table
from bench.prototype import table as prototype_table
from pytest_stackwise import markers
from stackwise import ModelSpec, StackWiseConfig, check_model, measure, stability_run
from stackwise.benchmark import model_workload
from stackwise.checkpoint import EXIT_CODE
from stackwise.checks import known_checks
from stackwise.checks.check import OTHER_NAMES, select_checks
from stackwise.checks.variations import known_variations
from stackwise.cli import Command, history, main
from stackwise.config import ModelConfig
from stackwise.gate.result import EXIT_INCONCLUSIVE, EXIT_NOTHING
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
# Their blocks are parts of launch scripts, or generated; other tests are about them.
NOT_RUN = {"docs/reference/cluster.md", "docs/background/zoo.md"}
FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
EXAMPLES = [
    pytest.param(
        code,
        id=f"{page}-{number}",
        marks=pytest.mark.filterwarnings("ignore:.*(LeafSpec|many workers)"),  # Lightning's own
    )
    for page in PAGES
    if page not in NOT_RUN
    for number, (language, code) in enumerate(FENCE.findall((ROOT / page).read_text()))
    if language == "python"
]
# The models of the README, one that is broken, and what stands in the place of a function.
README = (ROOT / "README.md").read_text()
MODELS = re.search(r"```python\n(# mypackage/models\.py\n.*?)```", README, re.DOTALL)[1]
MODELS += """
from torch import nn


def tiny_encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)


MODULE = tiny_llama()
CONFIGURATION = MODULE.config
"""


@pytest.fixture(autouse=True)
def _set_aside():
    """What earlier examples imported is no garbage: those that measure memory would look through it."""
    gc.freeze()


@pytest.fixture(scope="session")
def _imported():
    # A nested run forgets what it imported first, and none of these bears a second import.
    for library in ("datasets", "sqlalchemy.dialects.postgresql", "optuna", "transformers.trainer"):
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
        assert outcomes.keys() <= {"passed", "skipped", "xfailed"}
    else:
        exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_zero_code_line_of_the_readme(package):
    result = package.runpytest("--stackwise-model=mypackage.models:tiny_llama", "-p", "no:xdist")
    outcomes = result.parseoutcomes()
    assert outcomes.keys() <= {"passed", "skipped"}
    assert sum(outcomes.values()) == 1 + len(select_checks())
    assert outcomes["passed"] > len(select_checks()) / 2


@pytest.mark.parametrize("name", ["MODULE", "CONFIGURATION"])
def test_what_the_readme_puts_in_the_place_of_a_function(package, name):
    arguments = [f"--stackwise-model=mypackage.models:{name}", "--stackwise-checks=causality"]
    package.runpytest(*arguments, "-p", "no:xdist").assert_outcomes(passed=2)


def test_first_result_of_the_readme_is_what_is_printed(package, capsys):
    [shown] = re.findall(r"```console\n(\$ stackwise check [^`]*FAIL.*?)```", README, re.DOTALL)
    command, _, output = shown.partition("\n")
    assert main(command.split()[2:]) == 1
    assert _without_layout(output) in _without_layout(capsys.readouterr().out)


def test_failure_of_a_page_is_what_is_printed(package):
    page = "docs/reference/checks.md"
    blocks = [text for language, text in FENCE.findall((ROOT / page).read_text()) if language == "text"]
    [shown] = [text for text in blocks if "causality failed" in text]
    options = ["--stackwise-model=mypackage.models:leaky_llama", "--stackwise-checks=causality"]
    printed = _without_layout(package.runpytest(*options, "-p", "no:xdist").stdout.str())
    for part in shown.replace("tiny_llama", "leaky_llama").split("\n\n"):
        assert _without_layout(part) in printed


def _without_layout(text):
    """Nor with numbers, and with what fills a line up to the width of the terminal."""
    return re.sub(r"[\d.]+", "N", " ".join(re.sub("_{3,}", "", text).split()))


def test_configuration_of_the_page_is_the_default(tmp_path):
    for language, text in FENCE.findall((ROOT / "docs/reference/rack.md").read_text()):
        if language == "yaml":
            (tmp_path / "run.yaml").write_text(text)
            assert StackWiseConfig.from_yaml(tmp_path / "run.yaml") == StackWiseConfig()
            written = {line.split(":")[0].strip() for line in text.splitlines()}
            assert written >= set(_leaves(StackWiseConfig().model.to_dict()))


def test_sections_that_are_null_are_shown_with_their_defaults():
    page = re.sub(r"\n +# ", " ", (ROOT / "docs/reference/rack.md").read_text())
    for name, given in [
        ("latent", {}),
        ("kernel", {}),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ]:
        shown = yaml.safe_load(re.search(rf"^  {name}: null .*?(\{{.*?\}})", page, re.MULTILINE)[1])
        kinds = get_args(ModelConfig.model_fields[name].annotation)
        assert given | shown == kinds[0].from_dict(given).to_dict(), name


@pytest.mark.parametrize("asks", ["model", "trainer"])
def test_page_of_checks_lists_every_check(asks):
    text = (ROOT / f"docs/reference/{asks}-checks.md").read_text()
    table = re.search(rf"<!-- checks of a {asks} -->(.*?)<!-- end -->", text, re.DOTALL)[1]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (\w+)(, full)? \|$", table, re.MULTILINE)
    assert sorted(rows) == sorted(
        (name, check.summary, check.family, ", full" * (check.suite == "full"))
        for name, check in known_checks().items()
        if check.asks == asks
    )


def test_page_of_equivalent_calls_lists_every_variation():
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \|",
        _section("docs/reference/equivalent-calls.md", "Variations"),
        re.MULTILINE,
    )
    assert rows == [(each.name, each.check or each.name) for each in known_variations().values()]


@pytest.mark.parametrize(("page", "asks"), [("equivalent-calls", "model"), ("trainer-checks", "trainer")])
def test_page_lists_every_earlier_name(page, asks):
    section = _section(f"docs/reference/{page}.md", "Earlier names")
    checks = {check.name for check in select_checks(suite="full", asks=asks)}
    wanted = {old: new for old, new in OTHER_NAMES.items() if new in checks}
    assert dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", section, re.MULTILINE)) == wanted


def test_page_of_the_plugin_lists_every_option_and_marker(pytestconfig):
    page = (ROOT / "docs/reference/plugin.md").read_text()
    group = pytestconfig._parser.getgroup("stackwise")
    options = {name for option in group.options for name in option.names()}
    assert options >= {"--gpu", "--stackwise-seed", "--stackwise-against"}
    for option in options:
        assert re.search(rf"`{option}[=`]", page), option
    lines = [line for line in markers._HELP.splitlines() if line]
    for marker in (re.match(r"\w+", line)[0] for line in lines):
        assert re.search(rf"^\|.*`{marker}\b.*\|", page, re.MULTILINE), marker


def test_table_of_speed_is_what_was_measured():
    assert peer_table.table(peer_table.recorded()) in README


@pytest.mark.parametrize(
    "tables, page",
    [
        (tables, page)
        for tables in (
            detection_table,
            training_table,
            stability_table,
            quality_table,
            prototype_table,
            gate_table,
        )
        for page in tables.MARKS
    ],
)
def test_tables_are_what_was_measured(tables, page):
    assert tables.written(page) == (ROOT / page).read_text()


def test_page_of_the_plugin_lists_every_fixture(package):
    page = (ROOT / "docs/reference/plugin.md").read_text()
    printed = package.runpytest("--fixtures", "-p", "no:xdist").stdout.str()
    ours = set(re.findall(r"^(\w+) -- .*\bpytest_stackwise/\w+\.py:\d+$", printed, re.MULTILINE))
    assert ours >= {"stability_run", "throughput", "peak_memory", "no_memory_growth", "quality", "seq_len"}
    for name in ours - {"stackwise_clock"}:  # which is for `throughput` alone
        assert re.search(rf"^\*\*`{name}[(`]", page, re.MULTILINE), name


@pytest.mark.parametrize(("kind", "page"), [(ModelSpec, "spec"), (TrainerSpec, "trainer-spec")])
def test_page_of_specs_lists_every_field(kind, page):
    rows = re.findall(r"^\| `(\w+)` \|", _section(f"docs/reference/{page}.md", "Fields"), re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in fields(kind))


def test_page_of_specs_lists_every_member_of_a_run():
    section = _section("docs/reference/trainer-spec.md", "TrainingRun")
    rows = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    told = re.findall(r"^ *- (`.*?):", TrainingRun.__doc__, re.MULTILINE)
    assert listed == {"model", "optimizer", "step"} | {
        n for each in told for n in re.findall(r"`(\w+)", each)
    }


def test_page_of_the_command_lists_every_command_and_option():
    kinds = [get_args(command)[0] for command in get_args(Command)]
    assert len(kinds) == 7
    for kind in kinds:
        section = _section("docs/reference/cli.md", kind.__name__.lower())
        assert (
            f"[`{kind.__name__.lower()}`](#{kind.__name__.lower()})"
            in (ROOT / "docs/reference/cli.md").read_text()
        )
        if kind is not history.History:
            _require_options(kind, section)
    section = _section("docs/reference/cli.md", "history")
    for action in get_args(history.Action):
        kind = get_args(action)[0]
        [row] = re.findall(rf"^\| `{kind.__name__.lower()}\b.*$", section, re.MULTILINE)
        _require_options(kind, f"{row} `--store`")


def _require_options(kind, text):
    for field in fields(kind):
        shown = rf"`--{field.name.replace('_', '-')}[` ]"
        if "Positional" in field.type:
            named = re.search(r"metavar=\W*(\w+)", field.type)
            shown = named[1] if named else field.name.upper()
        assert re.search(shown, text), (kind.__name__, field.name)


def test_page_of_the_command_lists_the_exit_codes():
    rows = re.findall(r"^\| (\d+) \|", _section("docs/reference/cli.md", "Exit codes"), re.MULTILINE)
    assert [int(row) for row in rows] == [0, 1, 2, EXIT_NOTHING, EXIT_INCONCLUSIVE, EXIT_CODE, 130]


def test_readme_says_what_is_needed_and_what_extras_give():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    paragraph = README.split("\nExtras: ")[1].split("\n\n")[0]
    extras = re.findall(r"`(\w+)`\s\(", paragraph)
    assert sorted(extras) == sorted(project["optional-dependencies"].keys() - {"dev", "docs"})
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    [(low, below)] = re.findall(r"torch>=(2\.\d+),<2\.(\d+)", " ".join(project["dependencies"]))
    assert f"torch {low} to 2.{int(below) - 1}" in README
    for page in PAGES:
        named = ",".join(re.findall(r"stackwise\[([\w,]+)\]", _prose(page))).split(",")
        assert set(named) <= {*extras, "extra", ""}, page


def test_page_of_compatibility_states_the_bounds_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [Requirement(each) for each in project["dependencies"]]
    required += [Requirement(each) for extra in project["optional-dependencies"].values() for each in extra]
    allowed = {canonicalize_name(each.name): each.specifier for each in required}
    rows = re.findall(
        r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| `(\S+)` \|$",
        (ROOT / "docs/reference/compatibility.md").read_text(),
        re.MULTILINE,
    )
    assert {"torch", "transformers", "pytest", "pytest-benchmark", "lightning"} <= {row[0] for row in rows}
    assert {"accelerate", "optuna", "lm-eval"} <= {row[0] for row in rows}
    for name, lowest, newest, stated in rows:
        bounds = allowed[canonicalize_name(name)]
        assert SpecifierSet(stated) == bounds, name
        assert lowest in bounds and newest in bounds, name
        [bound] = [each.version for each in bounds if each.operator == ">="]
        assert f"{lowest}.".startswith(f"{bound}."), name


def test_extras_end_at_a_major_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = {"mypy", "pre-commit", "ruff", "types-pyyaml", "stackwise", "pytest-benchmark", "pytest-xdist"}
    for extra, needed in project["optional-dependencies"].items():
        for each in map(Requirement, needed):
            ends = [spec.version for spec in each.specifier if spec.operator == "<"]
            assert canonicalize_name(each.name) in tools or (ends and "." not in ends[0]), (extra, str(each))


def test_names_of_the_library_are_in_a_page():
    text = README + "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert [name for name in stackwise.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_links_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        page = str(path.relative_to(ROOT))
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", _prose(page)):
            found = (path.parent / target).resolve() if target else path
            assert found.exists(), (page, target)
            if anchor:
                assert anchor in _anchors(found), (page, target, anchor)


def test_paths_in_contributing_exist():
    named = re.findall(r"`([\w./-]+)`", _prose("CONTRIBUTING.md"))
    paths = [name for name in named if "/" in name and not name.startswith(".venv")]
    assert len(paths) > 5
    for path in paths:
        assert (ROOT / path).exists(), path


def test_every_page_is_in_the_toctree_of_its_folder():
    for index in (ROOT / "docs").rglob("index.md"):
        blocks = re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(), re.DOTALL)
        listed = {line for block in blocks for line in block.splitlines() if line and line[0] != ":"}
        pages = {path.stem for path in index.parent.glob("*.md")} - {"index"}
        parts = {f"{path.parent.name}/index" for path in index.parent.glob("*/index.md")}
        assert listed == pages | parts, index


def _prose(page):
    """A page without its blocks of code."""
    return FENCE.sub("", (ROOT / page).read_text())


def _section(page, heading):
    """What stands under a heading, up to the next one of any level."""
    text = (ROOT / page).read_text()
    return re.search(rf"^##+ {heading}\n(.*?)(?=^##+ |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def _anchors(path):
    """What a forge makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _prose(str(path.relative_to(ROOT))), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _leaves(tree):
    for key, value in tree.items():
        yield from _leaves(value) if isinstance(value, dict) else [key]
