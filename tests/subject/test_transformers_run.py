"""TransformersRun: steps, data, evaluation and checkpoints equal those of the Trainer itself."""

import json
from dataclasses import fields

import pytest
import torch
from torch.nn.functional import cross_entropy

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.subject.transformers_run import TransformersRun

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

N_ROWS = 10


def rows(n=N_ROWS):
    ids = torch.randint(61, (n, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def batches_of(size, n=N_ROWS):
    ids = torch.stack([row["input_ids"] for row in rows(n)])
    return [{"input_ids": part, "labels": part} for part in ids.split(size)]


def llama(dropout=0.0):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=61, **sizes, num_key_value_heads=2, attention_dropout=dropout
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def trainer_of(tmp_path):
    def make(kind=transformers.Trainer, dataset=None, dropout=0.0, **arguments):
        defaults = {"num_train_epochs": 3, "learning_rate": 1e-2, "per_device_train_batch_size": 4}
        defaults |= {"report_to": [], "disable_tqdm": True, "use_cpu": True}
        return kind(
            model=llama(dropout),
            args=transformers.TrainingArguments(str(tmp_path / "own"), **defaults | arguments),
            train_dataset=rows() if dataset is None else dataset or None,
            eval_dataset=rows(),
        )

    return make


def run_of(trainer_of, seed=0, **arguments):
    return TrainerSpec.of(lambda: trainer_of(**arguments)).create(seed=seed)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def results_of(trainer_of, *families, **arguments):
    spec = TrainerSpec.of(lambda: trainer_of(**arguments))
    return {result.check: result for result in check_trainer(spec, checks=families, suite="full")}


# Subjects


def test_trainer_is_described(trainer_of):
    spec = TrainerSpec.of(lambda: trainer_of(), name="llama")
    assert (spec.name, spec.vocab_size, spec.max_norm) == ("llama", 61, 1.0)


def test_trainer_that_is_built_already_is_refused(trainer_of):
    with pytest.raises(TypeError, match=r"got a Trainer that is built already; .*lambda: Trainer\(\.\.\.\)"):
        TrainerSpec.of(trainer_of())


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        ({}, []),
        ({"dataset": []}, ["epoch", "position"]),
        ({"gradient_accumulation_steps": 2}, ["position"]),
        ({"ignore_data_skip": True}, ["position"]),
        ({"save_only_model": True}, ["save", "load", "checkpoint", "latest"]),
        ({"label_names": []}, ["evaluate"]),
    ],
    ids=str,
)
def test_unsupported_members_are_absent(trainer_of, arguments, absent):
    run = run_of(trainer_of, **arguments)
    names = ("epoch", "position", "save", "load", "checkpoint", "latest", "evaluate", "accumulate", "loss")
    assert [name for name in names if getattr(run, name, None) is None] == absent


# Steps and data


def test_accumulation_is_that_of_the_trainer(trainer_of):
    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    run = run_of(trainer_of, max_steps=2)
    trainer = trainer_of(InOrder, rows(8), **arguments)
    trainer.model.load_state_dict(run.model.state_dict())
    trainer.train()
    batches = batches_of(2, 8)
    run.accumulate(batches[:2])
    run.accumulate(batches[2:])
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p, trainer.model.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_epochs_and_positions_are_those_of_a_training(trainer_of):
    seen = []

    class Noting(transformers.Trainer):
        def training_step(self, model, inputs, *rest):
            seen.append(inputs["input_ids"].clone())
            return super().training_step(model, inputs, *rest)

    torch.manual_seed(0)
    reference = trainer_of(Noting, dropout=0.1)
    torch.manual_seed(0)
    run = TransformersRun(trainer_of(dropout=0.1))
    assert same(weights(run.model), weights(reference.model))
    torch.manual_seed(42)  # the seed of the Trainer, with which a training starts
    reference.train()
    torch.manual_seed(42)
    order = [batch["input_ids"] for number in range(3) for batch in run.epoch(number)]
    assert all(torch.equal(a, b) for a, b in zip(order, seen, strict=True))
    places = []
    for number in range(3):
        for batch in run.epoch(number):
            places.append(run.position())
            run.step(batch)
    assert places == [(number, index) for number in range(3) for index in range(3)]


def test_data_without_a_length_has_no_position(trainer_of):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from rows()

    run = run_of(trainer_of, dataset=Endless(), max_steps=7)
    assert run.position is None
    assert sum(len(batch["input_ids"]) for batch in run.epoch(0)) == N_ROWS


def test_schedule_counts_updates(trainer_of):
    run = run_of(trainer_of, gradient_accumulation_steps=2)
    assert run.scheduler.lr_lambdas[0](3) == pytest.approx(0.5)  # half of 3 epochs of 2 updates


def test_scheduler_of_a_metric_is_not_stepped(trainer_of):
    run = run_of(trainer_of, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch")
    run.step(batches_of(1)[0])
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize("norm", [0.0, -1.0])
def test_norm_of_zero_or_less_does_not_clip(trainer_of, norm):
    spec = TrainerSpec.of(lambda: trainer_of(max_grad_norm=norm))
    assert spec.max_norm is None
    run = spec.create()
    run.step(spec.batch())
    assert run.grad_norm is None


def test_activations_are_recomputed_if_configured(trainer_of):
    names = {each.name for each in fields(transformers.TrainingArguments)}
    switch = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    plain, run = run_of(trainer_of), run_of(trainer_of, **{switch: True})
    calls = []
    for each in (plain, run):
        layer = each.model.model.layers[0].self_attn
        layer.register_forward_pre_hook(lambda *_, each=each: calls.append(each))
        each.step(batches_of(1)[0])
    assert (calls.count(plain), calls.count(run)) == (1, 2)
    assert same(weights(plain.model), weights(run.model))


# Evaluation


def test_evaluation_is_that_of_the_trainer(trainer_of):
    run = run_of(trainer_of, per_device_eval_batch_size=5, dropout=0.1)
    wanted = run.trainer.evaluate(rows())["eval_loss"]
    assert run.evaluate(batches_of(5)) == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match="the batches have no loss; wanted labels in each"):
        run.evaluate([{"input_ids": batches_of(5)[0]["input_ids"]}])


def test_evaluation_in_another_dtype_keeps_the_weights(trainer_of):
    run = run_of(trainer_of, bf16_full_eval=True)
    run.evaluate(batches_of(1, 2))
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


# Checkpoints


def test_checkpoint_has_the_files_of_the_trainer(trainer_of, tmp_path):
    trainer_of(save_strategy="steps", save_steps=2, max_steps=4).train()
    own = tmp_path / "own" / "checkpoint-2"
    run = run_of(trainer_of, max_steps=4)
    path = run.checkpoint(tmp_path / "ours", 2)
    assert path == tmp_path / "ours" / "checkpoint-2"
    assert {each.name for each in path.iterdir()} == {each.name for each in own.iterdir()}
    assert json.loads((path / "trainer_state.json").read_text())["global_step"] == 2
    assert (run.trainer.state.global_step, run.trainer.args.output_dir) == (0, str(tmp_path / "own"))


def test_trainer_resumes_from_a_run(trainer_of, tmp_path):
    run = run_of(trainer_of, max_steps=5)
    batches = [batch for number in range(2) for batch in run.epoch(number)][:5]
    for batch in batches[:4]:  # into the second epoch
        run.step(batch)
    run.save(tmp_path / "saved")
    run.step(batches[4])
    trainer = trainer_of(max_steps=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-4"))
    assert same(weights(trainer.model), weights(run.model))


def test_run_resumes_from_a_trainer(trainer_of, tmp_path):
    trainer = trainer_of(save_strategy="steps", save_steps=4, max_steps=5, dropout=0.1)
    trainer.train()
    run = run_of(trainer_of, seed=1, max_steps=5, dropout=0.1)
    run.load(tmp_path / "own" / "checkpoint-4")
    assert run.position() == (1, 1)
    run.step(list(run.epoch(1))[1])
    assert run.position() == (1, 2)
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p, trainer.model.get_parameter(name))


def test_run_resumes_from_a_run(trainer_of, tmp_path):
    run, other = run_of(trainer_of), run_of(trainer_of, seed=1)
    first, second = batches_of(4)[:2]
    run.step(first)
    run.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    for each in (run, other):
        each.step(second)
    assert same(weights(run.model), weights(other.model))


def test_latest_checkpoint_has_the_largest_number(trainer_of, tmp_path):
    run = run_of(trainer_of, save_total_limit=2)
    for step in (90, 100, 1000):
        run.checkpoint(tmp_path, step)
    names = sorted(each.name for each in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-100", "checkpoint-1000"]
    assert run.latest(tmp_path) == tmp_path / "checkpoint-1000"
    (tmp_path / "empty").mkdir()
    assert run.latest(tmp_path / "empty") is None


# Checks


def test_healthy_trainer_passes(trainer_of):
    families = ["step", "optimizer", "clipping", "accumulation", "schedule", "evaluation"]
    results = results_of(trainer_of, *families, "checkpoint", "data", "sequence", dropout=0.1)
    averaged = {"evaluation_exact"}  # `averages_batches` turns these into warnings
    assert {name for name, result in results.items() if not result.ok} <= averaged
    wanted = """parameters_change fresh_gradients clipped_norm weight_decay_groups scheduler_order
        scheduler_per_update accumulated_gradient accumulation_ragged interrupted_run undisturbed_run
        newest_checkpoint data_repeats epoch_order epoch_coverage batch_rows"""
    passed = {name for name, result in results.items() if result.status == "passed"}
    assert passed >= set(wanted.split()) and not passed & averaged
    assert results["damaged_checkpoint"].status == "passed"


class ShufflesGlobally(transformers.Trainer):
    """The order comes from the global random generator, so it changes after a resume."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(
            self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator
        )


class MissesTheHead(transformers.Trainer):
    def create_optimizer(self, *_):
        held = [p for name, p in self.model.named_parameters() if "lm_head" not in name]
        self.optimizer = torch.optim.AdamW(held, lr=1e-3)
        return self.optimizer


class MeanOfEach(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, {"loss": loss}) if return_outputs else loss


class NoScheduler(transformers.Trainer):
    def _load_optimizer_and_scheduler(self, checkpoint):
        self.optimizer.load_state_dict(torch.load(f"{checkpoint}/optimizer.pt"))


@pytest.mark.parametrize(
    ("kind", "families", "wanted"),
    [
        (ShufflesGlobally, ["sequence"], {"interrupted_run"}),
        (MissesTheHead, ["optimizer", "step"], {"parameters_change"}),
        (MeanOfEach, ["accumulation"], {"accumulated_gradient", "accumulation_ragged"}),
        (NoScheduler, ["sequence"], {"interrupted_run"}),
    ],
    ids=["order", "head", "mean", "scheduler"],
)
def test_trainer_with_a_bug_is_caught(trainer_of, kind, families, wanted):
    results = results_of(trainer_of, *families, kind=kind)
    assert {name for name, result in results.items() if result.status == "failed"} >= wanted
