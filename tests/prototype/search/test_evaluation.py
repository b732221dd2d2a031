"""What a search is told is what the prototype's run says."""

import math

import optuna
import pytest
import torch

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.prototype import ArchitecturePrototype, create_small_variant
from stackwise.prototype.search import (
    PrototypeEvaluation,
    TrialOutcome,
    load_search,
    search_architecture_space,
    trainable,
)
from stackwise.prototype.search.trainable import check_trains
from stackwise.training.memory_planner import plan_memory

BASE = {
    "model": {
        "vocab_size": 16,
        "d_model": 16,
        "d_ff": 32,
        "n_heads": 2,
        "n_kv_heads": 1,
        "architecture": {"n_stacks": 1, "blocks_per_stack": 2},
    },
    "training": {
        "batch_size": 2,
        "seq_len": 8,
        "precision": "fp32",
        "device": "cpu",
        "optimizer": {"lr": 1e-2},
    },
    "data": {"task": "copy", "validation_fraction": 0.0},
}


def ignore(done, loss):
    pass


def test_is_the_run():
    config, heard = StackWiseConfig.from_dict(BASE), []
    outcome = PrototypeEvaluation(12)(config, 5, lambda done, loss: heard.append((done, loss)))
    run = ArchitecturePrototype(config, seed=5).run(12)
    assert (outcome.status, outcome.loss) == (run.status, run.final_loss)
    assert heard == [((step + 1) / 12, loss) for step, loss in enumerate(run.losses)]
    assert outcome.peak_bytes == plan_memory(config, device="cpu").peak
    assert outcome.tokens_per_second > 0


def test_validation_goes_before():
    config = StackWiseConfig.from_dict(BASE | {"data": {"task": "copy", "validation_fraction": 0.05}})
    outcome = PrototypeEvaluation(4)(config, 0, ignore)
    run = ArchitecturePrototype(config, seed=0).run(4)
    assert outcome.loss == run.validation_loss != run.final_loss


def test_nan_is_an_outcome():
    training = BASE["training"] | {"optimizer": {"lr": 1e30}, "grad_clip": None}
    config = StackWiseConfig.from_dict(BASE | {"training": training})
    outcome = PrototypeEvaluation(20)(config, 0, ignore)
    assert (outcome.status, outcome.loss) == ("nan", math.inf)
    assert outcome.reason.startswith("nan at step ")


def test_pruning_ends_the_run():
    def prune(done, loss):
        if done >= 0.5:
            raise optuna.TrialPruned

    with pytest.raises(optuna.TrialPruned):
        PrototypeEvaluation(20)(StackWiseConfig.from_dict(BASE), 0, prune)


def test_a_search_that_trains(tmp_path):
    space = {
        "base": BASE,
        "space": {"model.n_heads": [4, 8], "training.optimizer.lr": [1e-2, 1e30], "n_layers": [4, 8]},
    }
    result = search_architecture_space(
        space,
        6,
        objective=("loss", "tokens_per_second", "peak_bytes"),
        sampler="random",
        steps=6,
        small_factor=2,
        storage=tmp_path / "j",
    )
    assert len(result.trials) == 6
    for trial in result.trials:
        assert (trial.status == "success") == (trial.values["training.optimizer.lr"] == 1e-2)
        small = create_small_variant(trial.config, 2).config
        assert trial.peak_bytes == plan_memory(small, device="cpu").peak
        assert trial.seconds > 0
    assert {trial.status for trial in result.trials} == {"success", "nan"}
    assert any("6 steps: a verdict" in note for note in result.notes)
    assert result.definition["device"] == "cpu"


def test_what_cannot_be_trained_is_refused_before():
    space = {
        "base": BASE | {"training": BASE["training"] | {"training_architecture": "stackwise"}},
        "space": {"n_layers": [1, 2]},
    }
    with pytest.raises(ValueError, match=r"training\.training_architecture: got 'stackwise'"):
        search_architecture_space(space, 2, storage="memory")


@pytest.mark.parametrize(
    "base, space, said",
    [
        (
            {"model": {"initialization": "mup", "mup_base_width": 16}},
            {"model.head_dim": [8, 12]},
            "space.model.head_dim: got 12; base_width: got 16; allowed: a width whose share of n_heads=2",
        ),
        (
            {},
            {"model.attention_mode": ["causal", "bidirectional"]},
            "space.model.attention_mode: got 'bidirectional'; ",
        ),
        (
            {},
            {"training.training_architecture": ["rackwise", "blockwise"]},
            "space.training.training_architecture: got 'blockwise'; training.training_architecture: got",
        ),
        (
            {},
            {"training.precision": ["fp32", "fp16"]},
            "space.training.precision: got 'fp16'; training.precision: got 'fp16'; ",
        ),
        (
            {
                "model": {"architecture": {"n_stacks": 2}},
                "training": {"optimizer": {"per_stack": {1: {"lr": 1.0}}}},
            },
            {"n_layers": [2, 3]},
            "space.n_layers: got 3; training.optimizer.per_stack: got 1; allowed: 0 to 0",
        ),
    ],
    ids=["base", "mode", "scope", "precision", "stacks"],
)
def test_a_value_that_cannot_be_trained_is_refused_before(base, space, said):
    merged = {section: keys | base.get(section, {}) for section, keys in BASE.items()}
    turned = {key: choices[::-1] for key, choices in space.items()}
    for each in (space, turned):
        with pytest.raises(ConfigError) as caught:
            search_architecture_space({"base": merged, "space": each}, 2, storage="memory")
        [problem] = caught.value.problems
        assert problem.startswith(said)


def test_where_nothing_can_be_trained_the_first_values_are_named():
    space = {"training.precision": ["fp16"], "n_layers": [1, 2]}
    with pytest.raises(ConfigError) as caught:
        search_architecture_space({"base": BASE, "space": space}, 2, storage="memory")
    [problem] = caught.value.problems
    assert problem.startswith("space: got training.precision='fp16', n_layers=1; training.precision: got")


@pytest.mark.parametrize("kinds", [["adamw", "muon"], ["muon", "adamw"]])
def test_what_only_some_combinations_forbid_is_the_error_of_a_trial(kinds):
    space = {"training.precision": ["bf16_weights", "fp32"], "training.optimizer.kind": kinds}
    asked = {"steps": 1, "objective": "loss", "sampler": "random", "storage": "memory"}
    result = search_architecture_space({"base": BASE, "space": space}, 4, **asked)
    for trial in result.trials:
        forbidden = tuple(trial.values.values()) == ("bf16_weights", "muon")
        assert (trial.status == "error") == forbidden


def test_refused_search_creates_no_storage(tmp_path):
    space = {"base": BASE, "space": {"training.precision": ["fp32", "fp16"], "n_layers": [1, 2]}}
    with pytest.raises(ConfigError, match="got 'fp16'"):
        search_architecture_space(space, 2, storage=tmp_path / "new", **ASKED)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_can_be_trained_is_not(kind):
    state = torch.get_rng_state()
    training = BASE["training"] | {"optimizer": {"kind": kind}}
    check_trains(StackWiseConfig.from_dict(BASE | {"training": training}), None)
    narrow = BASE["training"] | {"precision": "bf16_weights"}
    check_trains(StackWiseConfig.from_dict(BASE | {"training": narrow}), "cpu")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "space, device, said",
    [
        ({"training.seed": [1, 2, 3]}, None, "space.training.seed: no trial reads it: it is that of `seeds`"),
        ({"training.max_steps": [10, 100]}, None, "space.training.max_steps: no trial reads it"),
        ({"training.log_interval": [1, 2]}, None, "space.training.log_interval: no trial reads it: nothing"),
        ({"training.telemetry.parameter_norms": [True, False]}, None, "nothing is logged; allowed: keys"),
        (
            {"training.device": ["cpu", "auto"]},
            "cpu",
            "space.training.device: no trial reads it: it is device",
        ),
    ],
)
def test_a_key_that_no_trial_reads_is_refused(space, device, said):
    with pytest.raises(ConfigError) as caught:
        search_architecture_space({"space": space}, 2, storage="memory", device=device)
    [problem] = caught.value.problems
    assert said in problem


def test_an_evaluation_of_ones_own_may_read_any_key():
    def evaluate(config, seed, report):
        return TrialOutcome("success", float(config.training.seed))

    space = {"space": {"training.seed": [1, 2, 3]}}
    result = search_architecture_space(space, 3, objective="loss", evaluate=evaluate, storage="memory")
    assert result.best.config.training.seed == 1


ASKED = {"steps": 1, "objective": "loss", "sampler": "random"}


class TestData:
    """They are made once before the first trial: what cannot be read is no result."""

    def base(self, path=None, **model):
        data = {"task": None, "dataset_path": path, "validation_fraction": 0.0}
        return BASE | {"data": data, "model": BASE["model"] | {"vocab_size": 256} | model}

    def test_a_file_that_is_not_there_ends_the_search_and_no_study_is_begun(self, tmp_path):
        path = tmp_path / "text.txt"
        space = {"base": self.base(str(path)), "space": {"n_layers": [1, 2]}}
        with pytest.raises(FileNotFoundError):
            search_architecture_space(space, 2, storage=tmp_path / "j", **ASKED)
        assert not (tmp_path / "j").exists()
        path.write_text("a text that is long enough for some rows " * 50)
        result = search_architecture_space(space, 2, storage=tmp_path / "j", **ASKED)
        assert len(result.succeeded) == 2
        path.unlink()
        with pytest.raises(FileNotFoundError):
            search_architecture_space(space, 3, storage=tmp_path / "j", **ASKED)
        assert load_search(tmp_path / "j").trials == result.trials

    def test_a_vocabulary_too_small_is_refused_by_its_key(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text("a text that is long enough for some rows " * 50)
        space = {"base": self.base(str(path)), "space": {"model.vocab_size": [256, 64], "n_layers": [1, 2]}}
        with pytest.raises(ConfigError) as caught:
            search_architecture_space(space, 2, storage="memory", **ASKED)
        [problem] = caught.value.problems
        assert problem.startswith("space.model.vocab_size: got 64; ")
        none = {"base": self.base(str(path), vocab_size=64), "space": {"n_layers": [1, 2]}}
        with pytest.raises(ConfigError, match="space: got n_layers=1; "):
            search_architecture_space(none, 2, storage="memory", **ASKED)

    def test_they_are_made_once_for_all_that_have_the_same(self, monkeypatch):
        made = []
        monkeypatch.setattr(trainable, "create_data", made.append)
        space = {"base": BASE, "space": {"n_layers": [1, 2], "training.batch_size": [2, 4]}}
        search_architecture_space(space, 1, storage="memory", **ASKED)
        assert sorted(config.training.batch_size for config in made) == [2, 4]


@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_losses_with_a_penalty_in_them_are_told(fraction):
    base = BASE | {"data": {"task": "copy", "validation_fraction": fraction}}
    space = {"base": base, "space": {"training.objective.z_loss": [0.0, 1e-2]}}
    result = search_architecture_space(space, 2, storage="memory", steps=1, objective="loss")
    assert any("have z_loss in them" in note for note in result.notes) == (fraction == 0.0)
