"""Zero code: `--stackwise-model` checks a model in a folder that need not have a test."""

import warnings
from xml.etree import ElementTree as ET

import pytest

CHECKS = ["determinism", "batch_invariance", "causality", "finite_gradients", "finite_logits", "initial_loss"]
ITEMS = ["model", *CHECKS]
LIBRARIES = """
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    ))

def unmasked_llama():
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model

def decoder():
    from x_transformers import Decoder, TransformerWrapper
    layers = Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, rotary_pos_emb=True)
    return TransformerWrapper(num_tokens=31, max_seq_len=32, attn_layers=layers)
"""


@pytest.fixture(scope="session")
def _libraries():
    """As with torch: imported before a nested run does, they stay imported after it."""
    namespace = {}
    exec(LIBRARIES, namespace)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        namespace["llama"]()
        namespace["decoder"]()


@pytest.fixture
def libraries(folder, _libraries):
    (folder / "libraries.py").write_text(LIBRARIES)


def outcomes(folder, name="out.xml"):
    """Name of each test -> passed, failed, skipped or error."""
    found = {}
    for case in ET.parse(folder / name).getroot().iter("testcase"):
        verdicts = [child.tag for child in case if child.tag in ("failure", "skipped", "error")]
        found[f"{case.get('classname')}::{case.get('name')}"] = verdicts[0] if verdicts else "passed"
    return found


@pytest.mark.parametrize("factory", ["libraries:llama", "libraries:decoder", "models:conv"])
def test_sound_model_passes_without_any_test(libraries, run, report, factory):
    result = run(f"--stackwise-model={factory}", "--stackwise-report=out.json", "-v")
    result.assert_outcomes(passed=7)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"*{factory}?::{name} PASSED*" for name in ITEMS])
    assert [record["check"] for record in report()["checks"]] == CHECKS
    assert report()["verdict"] == "PASS"


def test_questions_that_do_not_apply_are_skipped(run):
    result = run("--stackwise-model=models:vectors", "-rs")
    result.assert_outcomes(passed=5, skipped=2)
    result.stdout.fnmatch_lines_random(
        ["SKIPPED*causality does not apply*", "SKIPPED*initial_loss does not*"]
    )


def test_missing_mask_is_found_and_named(libraries, run, report):
    result = run("--stackwise-model=libraries:unmasked_llama", "-rf", "--stackwise-report=out.json")
    result.assert_outcomes(passed=6, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines(
        [
            r"_+ stackwise\[libraries:unmasked_llama\]::causality _+",
            r"unmasked_llama: causality failed: measured \S+, limit \S+",
            r"  row \d+, position \d+, first difference: \S+",
            r"FAILED stackwise\[libraries:unmasked_llama\]::causality",
        ]
    )
    assert "pytest_stackwise/" not in result.stdout.str()
    assert report()["verdict"] == "FAIL"
    assert report()["failed_tests"] == ["stackwise[libraries:unmasked_llama]::causality"]


def test_several_models(run):
    result = run("--stackwise-model=models:conv", "--stackwise-model=models:leaky", "-v")
    result.assert_outcomes(passed=13, failed=1)
    result.stdout.fnmatch_lines(["*models:conv?::causality PASSED*", "*models:leaky?::causality FAILED*"])


def test_file_as_the_module(folder, run):
    (folder / "below").mkdir()
    (folder / "below" / "zoo.py").write_text("from models import *")
    result = run("--stackwise-model=below/zoo.py:plain", "-v")
    result.assert_outcomes(passed=7)
    result.stdout.fnmatch_lines(["*below/zoo.py:plain?::causality PASSED*"])


@pytest.mark.parametrize("attribute", ["Plain", "ready", "declared", "Zoo.small"])
def test_what_a_name_may_stand_for(folder, run, attribute):
    (folder / "zoo.py").write_text(
        "from models import *\n"
        "from stackwise import ModelSpec\n"
        "ready = Plain()\n"
        "def declared(): return ModelSpec.of(plain, seq_len=4)\n"
        "class Zoo: small = Plain\n"
    )
    run(f"--stackwise-model=zoo:{attribute}").assert_outcomes(passed=7)


def test_models_of_the_ini_file(pytester, run):
    pytester.makeini("[pytest]\nstackwise_model =\n    models:plain\n    models:vectors\n")
    run().assert_outcomes(passed=12, skipped=2)


def test_ordinary_tests_beside(pytester, run):
    pytester.makepyfile("def test_one(): pass\ndef test_two(): assert 0")
    result = run("--stackwise-model=models:plain")
    result.assert_outcomes(passed=8, failed=1)


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        (["-k", "causality"], {"passed": 1, "deselected": 7}),
        (["-k", "models and not model"], {"deselected": 8}),
        (["-k", "finite"], {"passed": 2, "deselected": 6}),
        (["-k", "test_one"], {"passed": 1, "deselected": 7}),
        (["-m", "stability"], {"deselected": 8}),
        (["-m", "not stability"], {"passed": 8}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_selection(pytester, run, arguments, counts):
    pytester.makepyfile("def test_one(): pass")
    run("--stackwise-model=models:plain", *arguments).assert_outcomes(**counts)


def test_only_what_failed_runs_again(pytester, folder):
    arguments = ("--stackwise-model=models:leaky", "-o", "cache_dir=cache")
    pytester.runpytest_inprocess(*arguments).assert_outcomes(passed=6, failed=1)
    pytester.runpytest_inprocess(*arguments, "--lf").assert_outcomes(failed=1, deselected=6)


def test_skip_by_a_conftest(pytester, run):
    pytester.makeconftest(
        """
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items: item.add_marker(pytest.mark.skip(reason="not today"))
        """
    )
    run("--stackwise-model=models:plain").assert_outcomes(skipped=7)


def test_benchmark_only_skips_checks(run):
    run("--stackwise-model=models:plain", "--benchmark-only").assert_outcomes(skipped=7)


@pytest.mark.parametrize(
    ("target", "texts"),
    [
        ("nothing:tiny", ["nothing:tiny", "cannot import nothing", "ModuleNotFoundError"]),
        ("nothing.py:tiny", ["nothing.py:tiny", "cannot import nothing.py", "FileNotFoundError"]),
        ("models:tiny", ["models has no tiny", "plain", "conv"]),
        ("models", ["'models'", "MODULE:FACTORY"]),
        ("models:", ["'models:'", "MODULE:FACTORY"]),
        (":plain", ["':plain'", "MODULE:FACTORY"]),
        ("raising:tiny", ["raising:tiny", "ZeroDivisionError"]),
        ("syntax:tiny", ["syntax:tiny", "SyntaxError"]),
        ("exiting:tiny", ["exiting:tiny", "exiting"]),
    ],
)
def test_target_that_is_not_there_stops_the_run(pytester, folder, run, target, texts):
    pytester.makepyfile(
        test_ordinary="import pathlib\ndef test_it(): pathlib.Path('ran').touch()",
        raising="1 / 0",
        syntax="def (",
        exiting="import sys; sys.exit(0)",
    )
    result = run(f"--stackwise-model={target}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line.startswith("ERROR: --stackwise-model: ")]
    for text in texts:
        assert text in line
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("broken", "RuntimeError: the weights are gone"),
        ("number", "got int"),
        ("needy", "width"),
        ("offline", "Connection refused"),
        ("Shapeless", "Shapeless: no call gives an output"),
    ],
)
class TestFactoryThatCannotBeDriven:
    @pytest.fixture(autouse=True)
    def _shapeless(self, folder):
        with (folder / "models.py").open("a") as file:
            file.write("\nclass Shapeless(Plain):\n    def forward(self, ids, other): return ids\n")

    def test_is_one_failure_and_the_rest_are_skipped(self, folder, run, factory, text):
        result = run(f"--stackwise-model=models:{factory}", "-rs", "--junitxml=out.xml")
        result.assert_outcomes(failed=1, skipped=6)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert text in result.stdout.str()
        result.stdout.fnmatch_lines(["SKIPPED*the model cannot be driven: *; see ::model"])
        # pytest before 9.2 writes an empty class name in front.
        failed = [name for name, verdict in outcomes(folder).items() if verdict == "failure"]
        assert [name.removeprefix("::") for name in failed] == [f"stackwise[models:{factory}]::model"]

    def test_is_told_without_the_frames_of_pytest(self, run, factory, text):
        result = run(f"--stackwise-model=models:{factory}")
        assert text in result.stdout.str()
        assert "pluggy/" not in result.stdout.str()
        assert "_pytest/" not in result.stdout.str()

    def test_is_never_green(self, run, factory, text):
        result = run(f"--stackwise-model=models:{factory}", "-k", "causality")
        assert result.ret == pytest.ExitCode.TESTS_FAILED

    def test_leaves_other_models_and_tests_alone(self, pytester, run, factory, text):
        pytester.makepyfile("def test_it(): pass")
        result = run(f"--stackwise-model=models:{factory}", "--stackwise-model=models:plain")
        result.assert_outcomes(passed=8, failed=1, skipped=6)


def test_exception_inside_a_check_is_its_failure_and_the_rest_go_on(folder, run):
    result = run("--stackwise-model=models:eval_only", "--junitxml=out.xml")
    result.assert_outcomes(passed=5, failed=2)
    failed = {name.rpartition("::")[2] for name, verdict in outcomes(folder).items() if verdict == "failure"}
    assert failed == {"finite_gradients", "finite_logits"}
    result.stdout.fnmatch_lines(["*raise KeyError*only in eval mode*"])
    assert "pluggy/" not in result.stdout.str()
    assert "_pytest/" not in result.stdout.str()


def test_model_is_inferred_once(folder, run):
    (folder / "counted.py").write_text(
        "import models, pathlib\n"
        "from stackwise import ModelSpec\n"
        "def tiny():\n"
        "    with pathlib.Path('calls').open('a') as file: file.write('x')\n"
        "    return ModelSpec.of(models.plain)\n"
    )
    run("--stackwise-model=counted:tiny").assert_outcomes(passed=7)
    assert (folder / "calls").read_text() == "x"


def test_device_and_seed_reach_the_check(run, driven):
    run("--stackwise-model=models:plain", "--stackwise-seed=4", "-k", "determinism").assert_outcomes(
        passed=1, deselected=6
    )
    assert set(driven) == {("cpu", 4)}


def test_junit_has_the_measured_values(folder, run):
    run("--stackwise-model=models:leaky", "--junitxml=out.xml").assert_outcomes(passed=6, failed=1)
    found = outcomes(folder)
    assert [verdict for name, verdict in found.items() if name.endswith("causality")] == ["failure"]
    properties = ET.parse(folder / "out.xml").getroot().iter("property")
    values = {p.get("name"): float(p.get("value")) for p in properties}
    assert values.keys() == {f"stackwise.{name}{end}" for name in CHECKS for end in ("", ".limit")}
    assert values["stackwise.causality"] > 1e-5 > values["stackwise.causality.limit"]


def test_models_of_one_name_are_told_apart(folder, run, report):
    (folder / "other.py").write_text("import models\ndef plain(): return models.conv()\n")
    result = run(
        "--stackwise-model=models:plain", "--stackwise-model=other:plain", "--stackwise-report=out.json"
    )
    result.assert_outcomes(passed=14)
    assert len({record["model"] for record in report()["checks"]}) == 2


@pytest.mark.parametrize("module", ["test_both", pytest.param("test_both.py", marks=pytest.mark.slow)])
def test_test_file_as_module_keeps_its_assertions(pytester, run_apart, module):
    pytester.makepyfile(
        test_both="""
        import models
        def factory(): return models.Plain()
        def test_it(): assert {"left": 1} == {"left": 2}
        """
    )
    result = run_apart(f"--stackwise-model={module}:factory", "-k", "test_it")
    result.assert_outcomes(failed=1, deselected=7)
    result.stdout.fnmatch_lines(["E *assert {'left': 1} == {'left': 2}*"])


def asked_of(result):
    """What the items of a collection ask, in order."""
    return [line.partition("::")[2] for line in result.outlines if line.startswith("stackwise[")]


@pytest.mark.parametrize("names", ["causality", "finiteness , causality", "causality_far,\tdeterminism"])
@pytest.mark.parametrize("place", ["option", "ini"])
def test_checks_that_are_named(pytester, run, every_check, place, names):
    from stackwise.checks.check import select_checks

    if place == "ini":
        pytester.makeini(f"[pytest]\nstackwise_checks = {names}\n")
    options = [f"--stackwise-checks={names}"] if place == "option" else []
    result = run("--stackwise-model=models:plain", "--collect-only", "-q", *options)
    wanted = select_checks([name.strip() for name in names.split(",")])
    assert asked_of(result) == ["model", *(c.name for c in wanted)]


@pytest.mark.parametrize("place", ["option", "ini"])
def test_suite_of_zero_code_checks(pytester, run, every_check, place):
    from stackwise.checks.check import select_checks

    if place == "ini":
        pytester.makeini("[pytest]\nstackwise_suite = full\n")
    options = ["--stackwise-suite=full"] if place == "option" else []
    result = run("--stackwise-model=models:plain", "--collect-only", "-q", *options)
    assert asked_of(result) == ["model", *(c.name for c in select_checks(suite="full"))]
    assert asked_of(run("--stackwise-model=models:plain", "--collect-only", "-q", "--stackwise-suite=fast"))[
        1:
    ] == [c.name for c in select_checks()]


class TestTrainer:
    @pytest.fixture(autouse=True)
    def _all(self, every_check):
        pass

    def test_step_is_checked_without_code(self, run, report):
        result = run(
            "--stackwise-trainer=models:loop",
            "--stackwise-checks=fresh_gradients,parameters_change",
            "--stackwise-report=out.json",
            "-v",
        )
        result.assert_outcomes(passed=3)
        result.stdout.fnmatch_lines(["*models:loop?::trainer PASSED*", "*::fresh_gradients PASSED*"])
        assert [r["status"] for r in report()["checks"]] == ["passed", "passed"]

    def test_step_that_is_wrong_is_told_from_a_sound_one(self, run):
        result = run(
            "--stackwise-trainer=models:loop",
            "--stackwise-trainer=models:piling",
            "--stackwise-checks=fresh_gradients",
            "-rf",
        )
        result.assert_outcomes(passed=3, failed=1)
        result.stdout.fnmatch_lines(["FAILED stackwise[[]models:piling]::fresh_gradients*"])

    def test_ini_file_beside_a_model(self, pytester, run):
        pytester.makeini("[pytest]\nstackwise_trainer =\n    models:loop\nstackwise_model = models:plain\n")
        result = run("--stackwise-checks=determinism,fresh_gradients", "-v")
        result.assert_outcomes(passed=4)
        result.stdout.fnmatch_lines(["*plain?::determinism PASSED*", "*loop?::fresh_gradients PASSED*"])

    @pytest.mark.parametrize(
        ("factory", "text"),
        [("broken", "the weights are gone"), ("number", "got int"), ("needy", "width"), ("plain", "Plain")],
    )
    def test_bad_factory_is_one_failure(self, run, factory, text):
        result = run(f"--stackwise-trainer=models:{factory}", "--stackwise-checks=step", "-rs")
        counts = result.parseoutcomes()
        assert (counts["failed"], counts.get("passed", 0)) == (1, 0)
        assert counts["skipped"] >= 1
        assert text in result.stdout.str()
        result.stdout.fnmatch_lines(["SKIPPED*the trainer cannot be driven: *; see ::trainer"])

    def test_target_that_is_not_there_stops_the_run(self, run):
        result = run("--stackwise-trainer=models:tiny")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert any(line.startswith("ERROR: --stackwise-trainer: models:tiny") for line in result.errlines)

    @pytest.mark.parametrize("target", ["models.py:loop", "models:loop", "models:loop_spec"])
    def test_factory_is_known_to_other_processes(self, folder, run, monkeypatch, target):
        from stackwise.checks.check import known_checks
        from stackwise.subject.trainer_spec import TrainerSpec

        seen = []
        before = TrainerSpec.create
        monkeypatch.setattr(
            TrainerSpec, "create", lambda self, *args: seen.append(self.factory) or before(self, *args)
        )
        assert known_checks()["fresh_gradients"].asks == "trainer"
        run(f"--stackwise-trainer={target}", "--stackwise-checks=fresh_gradients").assert_outcomes(passed=2)
        module = f"{folder}/models.py" if ".py" in target else "models"
        assert set(seen) == {f"{module}:{target.rpartition(':')[2]}"}

    def test_nothing_to_ask_is_no_pass(self, run):
        result = run("--stackwise-trainer=models:loop", "--stackwise-checks=causality")
        assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_bad_factory_is_asked_once(folder, run):
    (folder / "counted.py").write_text(
        "import pathlib\n"
        "def tiny():\n"
        "    with pathlib.Path('calls').open('a') as file: file.write('x')\n"
        "    raise OSError('no such weights')\n"
    )
    result = run("--stackwise-model=counted:tiny")
    result.assert_outcomes(failed=1, skipped=6)
    assert (folder / "calls").read_text() == "x"
    result.stdout.fnmatch_lines(["*OSError: no such weights*", "  */counted.py:4 in tiny"])
