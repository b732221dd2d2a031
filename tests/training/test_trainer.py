"""The training loop: against a loop written out by hand, bit for bit by seed, sound when a step is not."""

import copy
import io
import math
from functools import partialmethod

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils.data import DataLoader

from stackwise.config import ConfigError
from stackwise.data import TokenWindows, create_data
from stackwise.stability.telemetry import StepBuffer, StepRecord
from stackwise.training import (
    ArchitectureTrainer,
    NonFiniteStepError,
    RackCheckpoints,
    load_rack,
)
from stackwise.training.progress import TrainingProgress
from stackwise.training.result import TrainingResult
from stackwise.training.throughput import ThroughputMeter
from tests.late_copies import late_copies
from tests.synchronization import synchronization_allowed, synchronization_fails

RESULT_KEYS = {
    "training_architecture",
    "n_stacks",
    "blocks_per_stack",
    "num_stacks",
    "parameters",
    "trainable_parameters",
    "num_batches",
    "avg_loss",
    "final_loss",
    "training_history",
    "seconds",
    "tokens_per_second",
    "records",
}
ASKED_FOR = {"alarms", "skipped_steps", "results", "polish", "total_stacks", "total_blocks", "validation"}
# Hand-written steps: settings, and the learning rate of each of the four steps.
BY_HAND = {
    "plain": ({}, [1e-2] * 4),
    "schedule": ({"schedule": {"kind": "linear", "warmup_steps": 2}}, [0.5e-2, 1e-2, 1e-2, 0.0]),
    "clipped": ({"grad_clip": 0.05}, [1e-2] * 4),
    "not clipped": ({"grad_clip": None}, [1e-2] * 4),
    "other AdamW": (
        {"optimizer": {"lr": 1e-2, "betas": [0.5, 0.6], "eps": 1e-3, "weight_decay": 0.9}},
        [1e-2] * 4,
    ),
}


def weights_of(rack):
    return {name: weight.detach().clone() for name, weight in rack.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def changed(rack, before):
    return {name for name, weight in rack.state_dict().items() if not weight.equal(before[name])}


def losses_of(result):
    return [record.loss for record in result["records"]]


def loss_by_hand(rack, ids):
    return F.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture
def run(make_config, make_rack, make_batches):
    """Train a fresh small Rack; the result and the Rack."""

    def train(settings=None, model=None, dataloader=None, prepare=None):
        config = make_config(model=model or {}, training=settings or {})
        rack = make_rack(config)
        if prepare:
            prepare(rack)
        batches = make_batches(config) if dataloader is None else dataloader
        return ArchitectureTrainer(config).train_architecture(rack, batches), rack

    return train


class TestAgainstAHandWrittenLoop:
    @pytest.mark.parametrize("settings, rates", BY_HAND.values(), ids=BY_HAND)
    def test_steps(self, make_config, make_rack, make_batches, settings, rates):
        config = make_config(training=settings)
        rack, twin, batches = make_rack(config), make_rack(config), make_batches(config)
        records = ArchitectureTrainer(config).train_architecture(rack, batches)["records"]

        optimizer_settings = config.training.optimizer
        decayed = [w for n, w in twin.named_parameters() if w.ndim == 2 and n != "embedding.weight"]
        spared = [w for n, w in twin.named_parameters() if w.ndim == 1 or n == "embedding.weight"]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optimizer_settings.weight_decay}, {"params": spared}],
            weight_decay=0.0,
            betas=tuple(optimizer_settings.betas),
            eps=optimizer_settings.eps,
            fused=False,
            foreach=False,
        )
        for record, ids, lr in zip(records, batches, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = loss_by_hand(twin, ids)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), config.training.grad_clip or math.inf)
            optimizer.step()
            assert record.loss == pytest.approx(loss.item(), abs=1e-6)
            assert record.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            assert record.lr == pytest.approx(lr, abs=1e-12)
        for name, weight in rack.state_dict().items():
            torch.testing.assert_close(weight, twin.state_dict()[name], rtol=0, atol=1e-6)

    def test_clipping_was_at_work(self, run):
        result, _ = run({"grad_clip": 0.05})
        assert min(record.grad_norm for record in result["records"]) > 0.05

    def test_gradients_from_before_do_not_count(self, run):
        """A caller who looked at gradients first trains the same model."""

        def look(rack):
            rack(torch.arange(6).view(1, 6)).square().sum().backward()

        clean, rack = run()
        looked_at, other = run(prepare=look)
        assert losses_of(clean) == losses_of(looked_at)
        assert same(weights_of(rack), weights_of(other))

    def test_eval_mode_from_before_does_not_count(self, run):
        _, rack = run(model={"dropout": 0.3})
        _, other = run(model={"dropout": 0.3}, prepare=lambda rack: rack.eval())
        assert same(weights_of(rack), weights_of(other))


class TestSeed:
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_same_seed(self, run, precision):
        settings, model = {"seed": 3, "precision": precision}, {"dropout": 0.2}
        first, rack = run(settings, model)
        torch.manual_seed(12345)
        second, twin = run(settings, model)
        assert losses_of(first) == losses_of(second)
        assert same(weights_of(rack), weights_of(twin))

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_other_seed(self, run, precision):
        first, rack = run({"seed": 3, "precision": precision}, {"dropout": 0.2})
        second, twin = run({"seed": 4, "precision": precision}, {"dropout": 0.2})
        assert losses_of(first) != losses_of(second)
        assert not same(weights_of(rack), weights_of(twin))

    def test_whatever_the_callers_random_state(self, make_config, make_rack, make_batches):
        config = make_config(model={"dropout": 0.2})
        results = []
        for state in (1, 2):
            rack = make_rack(config)
            torch.manual_seed(state)
            ArchitectureTrainer(config).train_architecture(rack, make_batches(config))
            results.append(weights_of(rack))
        assert same(*results)

    def test_shuffling_dataloader(self, make_config, make_rack, make_batches):
        config = make_config(training={"max_steps": 6})
        rows = torch.cat(make_batches(config, 6))
        results = []
        for state in (1, 2):
            rack = make_rack(config)
            torch.manual_seed(state)
            loader = DataLoader(rows, batch_size=2, shuffle=True)
            results.append(losses_of(ArchitectureTrainer(config).train_architecture(rack, loader)))
        assert results[0] == results[1]

    def test_random_state_is_left_alone(self, make_config, make_rack, make_batches):
        config = make_config(model={"dropout": 0.2})
        rack, batches = make_rack(config), make_batches(config)
        before = torch.get_rng_state()
        ArchitectureTrainer(config).train_architecture(rack, batches)
        assert torch.get_rng_state().equal(before)

    def test_random_state_after_a_failure(self, make_config, make_rack):
        config = make_config()
        rack = make_rack(config)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="no batch"):
            ArchitectureTrainer(config).train_architecture(rack, [])
        assert torch.get_rng_state().equal(before)


class TestLearning:
    def test_loss_falls_on_english(self, make_config, make_rack):
        config = make_config(
            model={"vocab_size": 256, "d_model": 32, "d_ff": 64, "tie_embeddings": False},
            training={
                "batch_size": 8,
                "seq_len": 32,
                "max_steps": 60,
                "log_interval": 10,
                "schedule": {"kind": "cosine", "warmup_steps": 5},
            },
        )
        rack = make_rack(config)
        training, _ = create_data(config)
        result = ArchitectureTrainer(config).train_architecture(rack, training)
        assert losses_of(result)[0] == pytest.approx(math.log(256), abs=0.1)
        assert result["final_loss"] < 3.4

    def test_a_tied_head_begins_with_what_repeats(self, make_config, make_rack):
        """The head that is the embedding expects each token once more, and in English some do repeat.

        A token's normed embedding times itself is std * d_model; all other logits are near 0.
        """
        config = make_config(
            model={"vocab_size": 256, "d_model": 32, "d_ff": 64},
            training={"batch_size": 8, "seq_len": 32, "max_steps": 1},
        )
        for ids in [batch["input_ids"] for batch, _ in zip(create_data(config)[0], range(5), strict=False)]:
            rack = make_rack(config)
            own_logit = 32 * rack.embedding.weight.std().item()
            result = ArchitectureTrainer(config).train_architecture(rack, [ids])
            repeats = (ids[:, 1:] == ids[:, :-1]).double().mean().item()
            assert losses_of(result)[0] == pytest.approx(math.log(256) - own_logit * repeats, abs=0.05)

    def test_one_batch_is_learned_by_heart(self, run, make_config, make_batches):
        result, _ = run({"max_steps": 80}, dataloader=make_batches(make_config(), 1))
        assert result["final_loss"] < 0.3

    @pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
    def test_precision(self, run, precision, dtype):
        seen = set()

        def watch(rack):
            rack.get_stack(0).get_block(0).feedforward.register_forward_hook(
                lambda _module, _inputs, output: seen.add(output.dtype)
            )

        result, rack = run({"precision": precision}, prepare=watch)
        assert seen == {dtype}
        assert {weight.dtype for weight in rack.parameters()} == {torch.float32}
        assert all(math.isfinite(loss) for loss in losses_of(result))


class TestResult:
    def test_keys(self, run):
        result, _ = run()
        assert set(result) == RESULT_KEYS == TrainingResult.__annotations__.keys() - ASKED_FOR

    def test_values(self, run):
        model = {"architecture": {"n_stacks": 3, "blocks_per_stack": 2}}
        result, _ = run({"max_steps": 7, "log_interval": 3}, model, prepare=lambda r: r.get_stack(0).freeze())
        # Per block: two norms, the projections of two query, one key and one value head of size 8 and
        # of the output, three feed-forward matrices; then the final norm and the tied embedding.
        block = 2 * 16 + 16 * 32 + 16 * 16 + 3 * 16 * 32
        assert result["parameters"] == 6 * block + 16 + 23 * 16
        assert result["trainable_parameters"] == 4 * block + 16 + 23 * 16
        assert result["training_architecture"] == "rackwise"
        assert result["n_stacks"] == result["num_stacks"] == 3
        assert result["blocks_per_stack"] == [2, 2, 2]
        assert result["num_batches"] == len(result["records"]) == 7
        losses = losses_of(result)
        assert result["avg_loss"] == pytest.approx(sum(losses) / 7)
        assert result["final_loss"] == pytest.approx(sum(losses[-3:]) / 3)
        assert result["tokens_per_second"] * result["seconds"] == pytest.approx(7 * 2 * 8)

    @pytest.mark.parametrize("log_interval", [1, 3, 10])
    def test_one_record_per_step(self, run, log_interval):
        result, _ = run({"max_steps": 10, "log_interval": log_interval})
        records = result["records"]
        assert [record.step for record in records] == list(range(10))
        assert all(isinstance(record, StepRecord) and not record.skipped for record in records)
        assert losses_of(result) == losses_of(run({"max_steps": 10, "log_interval": 4})[0])

    def test_learning_rates(self, run):
        settings = {
            "max_steps": 9,
            "schedule": {"kind": "cosine", "warmup_steps": 4, "min_lr": 2e-3},
        }
        rates = [record.lr for record in run(settings)[0]["records"]]
        cosine = [2e-3 + 8e-3 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
        assert rates == pytest.approx([0.25e-2, 0.5e-2, 0.75e-2, 1e-2, *cosine])

    @pytest.mark.parametrize("max_steps, peak", [(1, 0), (9, 0), (10, 0), (25, 1), (40, 3)])
    def test_warm_up_that_is_not_given_is_a_tenth(self, make_config, max_steps, peak):
        schedule = {"kind": "linear", "warmup_steps": None}
        trainer = ArchitectureTrainer(make_config(training={"max_steps": max_steps, "schedule": schedule}))
        rates = [trainer.learning_rate(step) for step in range(max_steps)]
        if max_steps > 1:
            assert rates[peak] == max(rates) == 1e-2
        assert rates[:peak] == pytest.approx([1e-2 * (step + 1) / (peak + 1) for step in range(peak)])

    @pytest.mark.parametrize("total_steps, peak", [(100, 9), (75, 6), (25, 1), (9, 0)])
    def test_a_part_of_the_steps_has_its_share_of_the_warm_up(self, make_config, total_steps, peak):
        schedule = {"kind": "linear", "warmup_steps": 10}
        trainer = ArchitectureTrainer(make_config(training={"max_steps": 100, "schedule": schedule}))
        rates = [trainer.learning_rate(step, total_steps) for step in range(total_steps)]
        assert rates[peak] == max(rates) == 1e-2 and 1e-2 not in rates[:peak]

    def test_epochs(self, run, make_config, make_batches):
        result, _ = run({"max_steps": 8}, dataloader=make_batches(make_config(), 3))
        losses = losses_of(result)
        means = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, sum(losses[6:]) / 2]
        assert [entry["epoch"] for entry in result["training_history"]] == [0, 1, 2]
        assert [entry["loss"] for entry in result["training_history"]] == pytest.approx(means)

    def test_one_epoch_is_enough(self, run, make_config, make_batches):
        result, _ = run({"max_steps": 3}, dataloader=make_batches(make_config(), 3))
        assert [entry["epoch"] for entry in result["training_history"]] == [0]

    def test_no_batch_too_many_is_taken(self, run, make_config, make_batches):
        batches = iter(make_batches(make_config(), 6))
        run({"max_steps": 4}, dataloader=batches)
        assert len(list(batches)) == 2


class TestNonFinite:
    BAD = 3

    def nan_forward(self, times):
        """Logits that are NaN from step BAD on, for so many steps."""

        def prepare(rack):
            calls = iter(range(10**6))

            def hook(_module, _inputs, logits):
                return logits * math.nan if self.BAD <= next(calls) < self.BAD + times else logits

            rack.lm_head.register_forward_hook(hook)

        return prepare

    def infinite_gradient(self, times):
        """A finite loss whose gradient is not."""

        def prepare(rack):
            calls = iter(range(10**6))

            def hook(gradient):
                return gradient * math.inf if self.BAD <= next(calls) < self.BAD + times else gradient

            rack.get_stack(0).get_block(0).feedforward.gate.weight.register_hook(hook)

        return prepare

    @pytest.mark.parametrize("fault", ["nan_forward", "infinite_gradient"])
    @pytest.mark.parametrize("grad_clip", [1.0, None])
    @pytest.mark.parametrize("log_interval, times", [(1, 1), (1, 99), (4, 99), (10, 99)])
    def test_weights_are_those_before(self, run, fault, grad_clip, log_interval, times):
        settings = {"max_steps": 10, "log_interval": log_interval, "grad_clip": grad_clip}
        _, sound = run({**settings, "max_steps": self.BAD}, {"dropout": 0.1})
        kept = []

        def prepare(rack):
            kept.append(rack)
            getattr(self, fault)(times)(rack)

        with pytest.raises(NonFiniteStepError, match=f"step {self.BAD}:") as failure:
            run(settings, {"dropout": 0.1}, prepare=prepare)
        record = failure.value.record
        assert record.step == self.BAD and record.skipped
        assert math.isnan(record.loss) == (fault == "nan_forward") and not math.isfinite(record.grad_norm)
        assert same(weights_of(kept[0]), weights_of(sound))

    def test_in_the_first_step(self, run, make_rack, make_config):
        kept = []

        def prepare(rack):
            kept.append(rack)
            rack.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * math.inf)

        with pytest.raises(NonFiniteStepError, match="step 0:"):
            run({"log_interval": 4}, prepare=prepare)
        assert same(weights_of(kept[0]), weights_of(make_rack(make_config())))

    def test_a_passing_fault_between_two_looks(self, run):
        """Steps after it were made before anybody looked; what they leave is finite."""
        kept = []

        def prepare(rack):
            kept.append(rack)
            self.nan_forward(1)(rack)

        with pytest.raises(NonFiniteStepError) as failure:
            run({"max_steps": 10, "log_interval": 10}, prepare=prepare)
        assert failure.value.record.step == self.BAD
        assert all(weight.isfinite().all() for weight in kept[0].parameters())

    def test_nothing_broken_is_saved(self, run, tmp_path):
        settings = {"max_steps": 10, "log_interval": 10, "save_interval": 2, "checkpoint_dir": str(tmp_path)}
        _, sound = run({"max_steps": 2})
        with pytest.raises(NonFiniteStepError):
            run(settings, prepare=self.nan_forward(1))
        assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
        assert same(weights_of(load_rack(tmp_path / "step-2")), weights_of(sound))

    def test_divergence(self, run):
        with pytest.raises(NonFiniteStepError):
            run({"max_steps": 10, "optimizer": {"lr": 1e30}})

    def test_is_an_arithmetic_error(self):
        assert issubclass(NonFiniteStepError, ArithmeticError)


class TestFrozen:
    def test_stack(self, run, make_config, make_rack):
        before = weights_of(make_rack(make_config()))
        _, rack = run(prepare=lambda rack: rack.get_stack(0).freeze())
        expected = {name for name in before if not name.startswith("stacks.0.")}
        assert changed(rack, before) == expected

    def test_up_projection(self, run, make_config, make_rack):
        model = {"freeze_up_proj": True}
        before = weights_of(make_rack(make_config(model=model)))
        _, rack = run(model=model)
        assert changed(rack, before) == {name for name in before if "feedforward.up" not in name}

    def test_embedding_with_a_tied_head(self, run, make_config, make_rack):
        before = weights_of(make_rack(make_config()))
        _, rack = run(prepare=lambda rack: rack.embedding.requires_grad_(False))
        assert changed(rack, before) == {n for n in before if not n.startswith(("embedding", "lm_head"))}

    def test_everything(self, run):
        with pytest.raises(ValueError, match="every parameter is frozen"):
            run(prepare=lambda rack: rack.freeze())


class TestDataloader:
    def test_forms_agree(self, run, make_config, make_batches):
        batches = make_batches(make_config())
        forms = [
            batches,
            tuple(batches),
            [{"input_ids": ids} for ids in batches],
            [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in batches],
            DataLoader(torch.cat(batches), batch_size=2),
            DataLoader([{"input_ids": row} for row in torch.cat(batches)], batch_size=2),
        ]
        losses = [losses_of(run(dataloader=form)[0]) for form in forms]
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], abs=1e-5)

    def test_labels_and_padding_count(self, run, make_config, make_rack, make_batches):
        ids = make_batches(make_config(), 1)[0]
        mask, labels = torch.ones_like(ids), ids.clone()
        mask[:, 6:], labels[:, 1:3] = 0, -100
        rack = make_rack(make_config())
        logits = rack(ids[:, :-1])[:, 2:5]
        expected = F.cross_entropy(logits.flatten(0, 1), ids[:, 3:6].flatten()).item()
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        assert losses_of(run({"max_steps": 1}, dataloader=[batch])[0]) == pytest.approx([expected], rel=1e-5)

    def test_a_step_that_predicts_nothing_is_in_no_mean(self, run, make_config, make_batches):
        """With a learning rate of nothing every other step has the same loss."""
        still = {"max_steps": 5, "optimizer": {"lr": 1e-30}}
        ids = make_batches(make_config(), 1)[0]
        empty = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
        result, _ = run(still, dataloader=[empty, {"input_ids": ids}])
        losses = losses_of(result)
        assert [math.isnan(loss) for loss in losses] == [True, False] * 2 + [True]
        assert [record.skipped for record in result["records"]] == [False] * 5
        assert result["avg_loss"] == losses[1] == pytest.approx(math.log(23), abs=0.2)
        assert result["training_history"][:2] == [{"epoch": n, "loss": losses[1]} for n in (0, 1)]
        assert math.isnan(result["final_loss"]) and math.isnan(result["training_history"][2]["loss"])

    @pytest.mark.parametrize("max_steps, seen", [(3, 3), (20, 16)])
    @pytest.mark.parametrize("shape", [(2, 9), (2, 1), (0, 9)])
    def test_nothing_to_predict(self, run, shape, max_steps, seen):
        ids = torch.zeros(shape, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
        message = f"dataloader: steps with something to predict: got 0; allowed: at least one in {seen}: "
        with pytest.raises(ValueError, match=message):
            run({"max_steps": max_steps}, dataloader=[batch])

    @pytest.mark.parametrize("empty", [[], (), iter([])], ids=["list", "tuple", "iterator"])
    def test_empty(self, run, empty):
        with pytest.raises(ValueError, match="dataloader: got no batch"):
            run(dataloader=empty)

    def test_used_up(self, run, make_config, make_batches):
        with pytest.raises(ValueError, match="dataloader: got no batch in a later epoch"):
            run(dataloader=iter(make_batches(make_config(), 2)))

    @pytest.mark.parametrize(
        "batch, name", [((torch.zeros(2, 9).long(),) * 2, "tuple"), ({"ids": 1}, "dict")]
    )
    def test_other_batches(self, run, batch, name):
        with pytest.raises(ValueError, match=f"dataloader: got a batch of {name}; allowed: .*input_ids"):
            run(dataloader=[batch])

    def test_batches_are_left_alone(self, run, make_config, make_batches):
        batches = [{"input_ids": ids} for ids in make_batches(make_config())]
        before = copy.deepcopy(batches)
        run(dataloader=batches)
        assert all(
            one["input_ids"].equal(other["input_ids"]) for one, other in zip(batches, before, strict=True)
        )


class TestCheckpoints:
    @pytest.mark.parametrize(
        "max_steps, save_interval, saved",
        [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 100, [3]), (6, 1, [4, 5, 6])],
    )
    def test_when(self, run, make_config, tmp_path, max_steps, save_interval, saved):
        settings = {"max_steps": max_steps, "save_interval": save_interval, "checkpoint_dir": str(tmp_path)}
        _, rack = run(settings)
        manager = RackCheckpoints(tmp_path, make_config())
        assert manager.steps() == saved
        assert same(weights_of(load_rack(manager.latest())), weights_of(rack))
        for step in saved[:-1]:
            _, shorter = run({"max_steps": step})
            assert same(weights_of(load_rack(tmp_path / f"step-{step}")), weights_of(shorter))

    def test_training_is_the_same_with_them(self, run, tmp_path):
        settings = {"log_interval": 3, "save_interval": 2, "checkpoint_dir": str(tmp_path)}
        with_them, without = run(settings, {"dropout": 0.2}), run({}, {"dropout": 0.2})
        assert losses_of(with_them[0]) == losses_of(without[0])
        assert same(weights_of(with_them[1]), weights_of(without[1]))

    def test_none(self, run, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run({})
        assert list(tmp_path.iterdir()) == []

    def test_undescribed_rack_is_refused_before_training(
        self, make_config, make_rack, make_batches, tmp_path
    ):
        config = make_config(training={"checkpoint_dir": str(tmp_path / "runs")})
        rack = make_rack(make_config(model={"d_ff": 40}))
        before = weights_of(rack)
        with pytest.raises(ValueError, match=r"checkpoint_dir: .*feedforward"):
            ArchitectureTrainer(config).train_architecture(rack, make_batches(config))
        assert not changed(rack, before) and not (tmp_path / "runs").exists()


class TestEvaluate:
    def test_mean_over_batches(self, make_config, make_rack, make_batches):
        config = make_config(model={"dropout": 0.4})
        rack, batches = make_rack(config), make_batches(config, 5)
        loss = ArchitectureTrainer(config).evaluate(rack, batches)
        with torch.no_grad():
            expected = sum(loss_by_hand(rack.eval(), ids).item() for ids in batches) / 5
        assert loss == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("training", [True, False])
    def test_mode_is_put_back(self, make_config, make_rack, make_batches, training):
        config = make_config()
        rack = make_rack(config).train(training)
        ArchitectureTrainer(config).evaluate(rack, make_batches(config))
        assert all(module.training == training for module in rack.modules())
        with pytest.raises(ValueError, match="dataloader"):
            ArchitectureTrainer(config).evaluate(rack, ["no batch"])
        assert all(module.training == training for module in rack.modules())

    def test_leaves_no_trace(self, make_config, make_rack, make_batches):
        config = make_config(model={"dropout": 0.4})
        rack, batches = make_rack(config), make_batches(config)
        before, state = weights_of(rack), torch.get_rng_state()
        trainer = ArchitectureTrainer(config)
        assert trainer.evaluate(rack, batches) == trainer.evaluate(rack, batches)
        assert not changed(rack, before) and all(weight.grad is None for weight in rack.parameters())
        assert torch.get_rng_state().equal(state)

    def test_no_batch(self, make_config, make_rack):
        assert math.isnan(ArchitectureTrainer(make_config()).evaluate(make_rack(make_config()), []))

    def test_training_pays(self, run, make_config, make_batches):
        config = make_config()
        batches = make_batches(config, 1)
        result, rack = run({"max_steps": 40}, dataloader=batches)
        assert ArchitectureTrainer(config).evaluate(rack, batches) < losses_of(result)[0] / 2


class TestRefused:
    def test_a_compiled_rack(self, make_config, make_rack, make_batches):
        """What trains are parts of a Rack, under their names in it."""
        config = make_config()
        trainer, rack = ArchitectureTrainer(config), torch.compile(make_rack(config))
        message = r"rack: got 'OptimizedModule'; allowed: .*training\.compile"
        with pytest.raises(ValueError, match=message):
            trainer.train_architecture(rack, make_batches(config))
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(rack, make_batches(config))

    @pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
    def test_where_nothing_has_a_gradient(self, run, without):
        with without(), pytest.raises(ValueError, match=r"is_grad_enabled\(\): got False; .*no_grad"):
            run({})

    def test_a_token_that_the_vocabulary_does_not_have(self, run):
        with pytest.raises(ValueError, match="input_ids: got 400 in row 0 at position 0; allowed: 0 to 22"):
            run(dataloader=[torch.full((2, 9), 400)])

    @pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:3"])
    def test_device_that_is_not_there(self, make_config, monkeypatch, name):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(ValueError, match=f"device: got '{name}'; allowed: cpu, because"):
            ArchitectureTrainer(make_config(training={"device": name}))

    def test_device_that_is_chosen(self, make_config, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert ArchitectureTrainer(make_config(training={"device": "auto"})).device == torch.device("cpu")

    def test_configuration_that_contradicts_itself(self, make_config):
        config = make_config()
        config.training.schedule.kind = "cosine"
        config.training.schedule.min_lr = 1.0
        with pytest.raises(ConfigError, match="min_lr"):
            ArchitectureTrainer(config)


class TestLogs:
    def test_of_one_s_own(self, make_config, make_rack, make_batches):
        """Gets all records and figures, run after run, and is not closed."""
        written = []

        class Log:
            def write(self, records, figures=None, alarms=()):
                written.append((list(records), dict(figures), list(alarms)))

        config = make_config(training={"log_interval": 3, "max_steps": 4})
        trainer = ArchitectureTrainer(config, logs=[Log()])
        for _ in range(2):
            result = trainer.train_architecture(make_rack(config), make_batches(config))
            records = [record for arrived, _, _ in written for record in arrived]
            assert records == result["records"]
            assert written[-1][1]["total_tokens"] == sum(record.tokens for record in records)
            written.clear()


class TestProgress:
    @staticmethod
    def record(step):
        return StepRecord(step=step, loss=1.2345, grad_norm=0.678, lr=1e-3, skipped=False)

    def lines(self, quiet_seconds):
        console = Console(file=io.StringIO(), force_terminal=False, width=200)
        with TrainingProgress(4, console=console, quiet_seconds=quiet_seconds) as progress:
            for step in range(4):
                progress.write([self.record(step)], {"tokens_per_second": 100.0})
        return console.file.getvalue()

    def test_plain_lines(self):
        lines = self.lines(quiet_seconds=0.0).splitlines()
        assert [line.split()[:2] for line in lines] == [["training", f"{done}/4"] for done in (1, 2, 3, 4)]
        assert all("loss 1.234" in line and "grad norm 0.68" in line and "tokens/s" in line for line in lines)

    def test_seldom(self):
        assert [line.split()[1] for line in self.lines(quiet_seconds=1e9).splitlines()] == ["4/4"]

    def test_no_control_characters(self):
        assert self.lines(quiet_seconds=0.0).replace("\n", "").isprintable()

    @pytest.fixture
    def terminal(self, monkeypatch):
        monkeypatch.setenv("TERM", "xterm-256color")
        return Console(file=io.StringIO(), force_terminal=True, width=120)

    def test_live_bar(self, terminal):
        with TrainingProgress(4, console=terminal) as progress:
            for step in range(4):
                progress.write([self.record(step)], {"tokens_per_second": 100.0})
        shown = terminal.file.getvalue()
        assert "━" in shown and "4/4" in shown and "loss 1.234" in shown and "tokens/s" in shown
        assert "\x1b[?25l" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")

    def test_cursor_comes_back_after_a_failure(self, terminal):
        def fail():
            with TrainingProgress(4, console=terminal):
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fail()
        shown = terminal.file.getvalue()
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")

    @pytest.mark.parametrize("progress, shown", [(True, True), (False, False), (None, False)])
    def test_of_the_trainer(self, make_config, make_rack, make_batches, monkeypatch, capsys, progress, shown):
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        config = make_config(training={"log_interval": 3})
        trainer = ArchitectureTrainer(config, progress=progress)
        trainer.train_architecture(make_rack(config), make_batches(config))
        captured = capsys.readouterr()
        assert ("training 4/4" in captured.err) == shown
        assert captured.out == ""

    def test_every_token_counts_once(self, make_config, make_rack, make_batches):
        config = make_config()
        rack = make_rack(config).eval()
        [ids] = make_batches(config, 1)
        few = ids.clone()
        few[:, 3:] = -100
        batches = [{"input_ids": ids}, {"input_ids": ids, "labels": few}]
        with torch.no_grad():
            log_probability = rack(ids[:, :-1]).double().log_softmax(-1)
        nats = -log_probability.gather(-1, ids[:, 1:, None])[..., 0]
        expected = (nats.sum() + nats[:, :2].sum()) / (nats.numel() + nats[:, :2].numel())
        assert ArchitectureTrainer(config).evaluate(rack, batches) == pytest.approx(expected.item(), rel=1e-5)

    def test_bidirectional_rack_is_refused(self, make_config, make_rack, make_batches):
        config = make_config(model={"attention_mode": "bidirectional"})
        with pytest.raises(ValueError, match="bidirectional"):
            ArchitectureTrainer(config).evaluate(make_rack(config), make_batches(config))


def test_one_loader_used_twice_gives_the_same_weights(make_config, make_rack):
    config = make_config(training={"max_steps": 5})
    windows = TokenWindows(torch.arange(200) % 23, batch_size=2, seq_len=8, seed=3)
    racks = [make_rack(config) for _ in range(2)]
    for rack in racks:
        ArchitectureTrainer(config).train_architecture(rack, windows)
    for first, second in zip(racks[0].parameters(), racks[1].parameters(), strict=True):
        assert torch.equal(first, second)


def test_folder_of_another_run_is_refused(make_config, make_rack, make_batches, tmp_path):
    config = make_config(training={"checkpoint_dir": str(tmp_path), "save_interval": 4})
    ArchitectureTrainer(config).train_architecture(make_rack(config), make_batches(config))
    rack = make_rack(config)
    before = weights_of(rack)
    with pytest.raises(ValueError, match=r"checkpoint_dir: .* holds checkpoints of steps \[4\]"):
        ArchitectureTrainer(config).train_architecture(rack, make_batches(config))
    assert not changed(rack, before)


def test_run_of_one_step_moves(make_config, make_rack, make_batches):
    config = make_config(training={"max_steps": 1, "schedule": {"kind": "cosine", "warmup_steps": None}})
    rack = make_rack(config)
    before = weights_of(rack)
    ArchitectureTrainer(config).train_architecture(rack, make_batches(config))
    assert changed(rack, before)


@pytest.mark.parametrize("log_interval", [1, 3])
def test_only_steps_of_the_interval_before_are_waited_for(
    make_config, make_rack, make_batches, monkeypatch, log_interval
):
    config = make_config(training={"max_steps": 12, "log_interval": log_interval})
    waits = late_copies(monkeypatch)
    result = ArchitectureTrainer(config).train_architecture(make_rack(config), make_batches(config))
    assert waits == [log_interval] * (12 // log_interval - 1) + [0]  # the last is that of the end
    assert [record.step for record in result["records"]] == list(range(12))
    assert all(math.isfinite(record.loss) for record in result["records"])


@pytest.mark.parametrize("arrive", [True, False])
def test_rates_are_of_the_time_in_which_steps_were_made(
    make_config, make_rack, make_batches, monkeypatch, arrive
):
    """Where the loader is slow, and where the device is, which then has made the steps only just now."""
    config = make_config(training={"max_steps": 30, "log_interval": 10})
    late_copies(monkeypatch, arrive=arrive)
    seconds, told = [0.0], []
    monkeypatch.setattr(
        ThroughputMeter, "__init__", partialmethod(ThroughputMeter.__init__, clock=lambda: seconds[0])
    )

    class Loader(list):
        def __iter__(self):
            for batch in list.__iter__(self):
                seconds[0] += 1.0
                yield batch

    class Log:
        def write(self, records, figures, alarms):
            told.append((figures["tokens_per_second"], figures["mean_tokens_per_second"]))
            assert figures["data_wait_share"] == 1.0

    trainer = ArchitectureTrainer(config, logs=[Log()])
    result = trainer.train_architecture(make_rack(config), Loader(make_batches(config)))
    tokens = result["records"][0].tokens
    first = tokens if arrive else tokens * 10 / 20  # ten of the twenty steps that the host has seen
    assert told[0] == (first, first) and told[-1] == (tokens, tokens)


@pytest.mark.gpu
def test_no_step_waits_for_the_device(make_config, make_rack, make_batches, monkeypatch):
    config = make_config(training={"device": "cuda", "precision": "bf16", "max_steps": 6, "log_interval": 3})
    trainer, rack, batches = ArchitectureTrainer(config), make_rack(config), make_batches(config)
    trainer.train_architecture(rack, batches)  # what is set up once may wait
    drain = StepBuffer.drain

    def allowed_to_wait(self):
        with synchronization_allowed():
            return drain(self)

    monkeypatch.setattr(StepBuffer, "drain", allowed_to_wait)
    with synchronization_fails():
        result = trainer.train_architecture(rack, batches)
    assert len(result["records"]) == 6
