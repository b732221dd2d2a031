"""TransformersRun: each thing that it offers is what the Trainer itself does."""

import json
from dataclasses import fields

import pytest
import torch

from stackwise.checks import check_trainer
from stackwise.subject.trainer_spec import TrainerSpec
from stackwise.subject.transformers_run import TransformersRun

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

N_ROWS = 10


def rows(n=N_ROWS):
    ids = torch.randint(61, (n, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def llama(dropout=0.0):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=dropout,
        )
    )


@pytest.fixture
def trainer_of(tmp_path):
    def make(kind=transformers.Trainer, dataset=None, dropout=0.0, **arguments):
        arguments = {
            "num_train_epochs": 3,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 4,
            "report_to": [],
            "disable_tqdm": True,
            **arguments,
        }
        return kind(
            model=llama(dropout),
            args=transformers.TrainingArguments(output_dir=str(tmp_path / "own"), use_cpu=True, **arguments),
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


def results_of(spec, *families):
    return {result.check: result for result in check_trainer(spec, checks=families, suite="full")}


def test_its_epochs_are_those_of_a_whole_training(trainer_of):
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
    torch.manual_seed(42)  # as a training, which begins with the seed of the Trainer
    reference.train()
    torch.manual_seed(42)
    places = []
    for number in range(3):
        order = [batch["input_ids"] for batch in run.epoch(number)]
        start = 3 * number
        assert all(torch.equal(a, b) for a, b in zip(order, seen[start : start + 3], strict=True))
    for number in range(3):
        for batch in run.epoch(number):
            places.append(run.position())
            run.step(batch)
    assert places == [(number, index) for number in range(3) for index in range(3)]


def test_checkpoints_are_those_that_the_trainer_writes(trainer_of, tmp_path):
    trainer = trainer_of(save_strategy="steps", save_steps=2, max_steps=4)
    trainer.train()
    own = tmp_path / "own" / "checkpoint-2"
    run = run_of(trainer_of, max_steps=4)
    path = run.checkpoint(tmp_path / "ours", 2)
    assert path == tmp_path / "ours" / "checkpoint-2"
    assert {each.name for each in path.iterdir()} == {each.name for each in own.iterdir()}
    assert json.loads((path / "trainer_state.json").read_text())["global_step"] == 2
    assert (run.trainer.state.global_step, run.trainer.args.output_dir) == (0, str(tmp_path / "own"))


def test_a_trainer_resumes_from_what_a_run_saved(trainer_of, tmp_path):
    run = run_of(trainer_of, max_steps=5)
    batches = [batch for number in range(2) for batch in run.epoch(number)][:5]
    for batch in batches[:4]:  # into the second epoch
        run.step(batch)
    run.save(tmp_path / "saved")
    run.step(batches[4])
    trainer = trainer_of(max_steps=5)
    trainer.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-4"))
    assert same(weights(trainer.model), weights(run.model))


def test_a_run_resumes_from_what_a_trainer_saved(trainer_of, tmp_path):
    trainer = trainer_of(save_strategy="steps", save_steps=4, max_steps=5, dropout=0.1)
    trainer.train()
    run = run_of(trainer_of, seed=1, max_steps=5, dropout=0.1)
    run.load(tmp_path / "own" / "checkpoint-4")
    assert run.position() == (1, 1)
    run.step(list(run.epoch(1))[1])
    assert run.position() == (1, 2)
    for name, p in run.model.named_parameters():
        torch.testing.assert_close(p, dict(trainer.model.named_parameters())[name])


def test_the_newest_by_number_is_found_and_the_oldest_removed(trainer_of, tmp_path):
    run = run_of(trainer_of, save_total_limit=2)
    for step in (90, 100, 1000):
        run.checkpoint(tmp_path, step)
    assert sorted(each.name for each in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-100",
        "checkpoint-1000",
    ]
    assert run.latest(tmp_path) == tmp_path / "checkpoint-1000"
    (tmp_path / "empty").mkdir()
    assert run.latest(tmp_path / "empty") is None


def test_evaluation_is_that_of_the_trainer(trainer_of):
    run = run_of(trainer_of, per_device_eval_batch_size=5, dropout=0.1)
    wanted = run.trainer.evaluate(rows())["eval_loss"]
    ids = torch.stack([row["input_ids"] for row in rows()])
    batches = [{"input_ids": part, "labels": part} for part in ids.split(5)]
    assert run.evaluate(batches) == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(ValueError, match="the batches have no loss; wanted labels in each"):
        run.evaluate([{"input_ids": ids}])


def test_weights_keep_their_dtype_when_they_are_evaluated_in_another(trainer_of):
    run = run_of(trainer_of, bf16_full_eval=True)
    run.evaluate([{"input_ids": row["input_ids"][None], "labels": row["labels"][None]} for row in rows(2)])
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "arguments, absent",
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
def test_what_it_lacks_is_absent(trainer_of, arguments, absent):
    run = run_of(trainer_of, **arguments)
    names = ("epoch", "position", "save", "load", "checkpoint", "latest", "evaluate", "accumulate", "loss")
    assert [name for name in names if getattr(run, name, None) is None] == absent


def test_data_without_a_length(trainer_of):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from rows()

    run = run_of(trainer_of, dataset=Endless(), max_steps=7)
    assert run.position is None
    assert sum(len(batch["input_ids"]) for batch in run.epoch(0)) == N_ROWS
    plan = run_of(trainer_of, gradient_accumulation_steps=2)
    assert plan.scheduler.lr_lambdas[0](3) == pytest.approx(0.5)  # half of 3 epochs of 2 updates


def test_what_is_sound_passes(trainer_of):
    results = results_of(TrainerSpec.of(lambda: trainer_of(dropout=0.1)), "checkpoint", "data")
    assert {name for name, result in results.items() if not result.ok} == set()
    assert {name for name, result in results.items() if result.status == "passed"} == {
        "checkpoint_round_trip",
        "resume",
        "saving_disturbs_nothing",
        "newest_checkpoint",
        "data_repeats",
        "epoch_order",
        "epoch_coverage",
        "data_resumes",
        "batch_rows",
    }
    # It loads a checkpoint that lacks its optimizer without a word.
    assert results["damaged_checkpoint"].status == "warned"


def failed_of(trainer_of, kind, *families):
    results = results_of(TrainerSpec.of(lambda: trainer_of(kind)), *families)
    return {name for name, result in results.items() if result.status == "failed"}


def test_an_order_from_the_global_generator_is_another_after_a_resume(trainer_of):
    class Shuffling(transformers.Trainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(
                self.train_dataset, batch_size=4, shuffle=True, collate_fn=self.data_collator
            )

    assert failed_of(trainer_of, Shuffling, "checkpoint", "data") >= {"resume", "data_resumes"}


def test_a_subclass_with_a_bug_is_caught(trainer_of):
    class MissesTheHead(transformers.Trainer):
        def create_optimizer(self, *_):
            held = [p for name, p in self.model.named_parameters() if "lm_head" not in name]
            self.optimizer = torch.optim.AdamW(held, lr=1e-3)
            return self.optimizer

    class MeanOfEach(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            logits = model(input_ids=inputs["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
            )
            return (loss, {"loss": loss}) if return_outputs else loss

    class NoScheduler(transformers.Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint):
            self.optimizer.load_state_dict(torch.load(f"{checkpoint}/optimizer.pt"))

    assert failed_of(trainer_of, MissesTheHead, "optimizer", "step") >= {
        "optimizer_coverage",
        "parameters_change",
    }
    assert failed_of(trainer_of, MeanOfEach, "accumulation") >= {
        "accumulated_gradient",
        "accumulation_ragged",
    }
    assert failed_of(trainer_of, NoScheduler, "checkpoint") >= {"checkpoint_round_trip", "resume"}


def test_activations_are_recomputed_where_it_would(trainer_of):
    names = {each.name for each in fields(transformers.TrainingArguments)}
    switch = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    plain, run = run_of(trainer_of), run_of(trainer_of, **{switch: True})
    calls = []
    for each in (plain, run):
        layer = each.model.model.layers[0].self_attn
        layer.register_forward_pre_hook(lambda *_, each=each: calls.append(each))
        batch = {name: value[None] for name, value in rows(1)[0].items()}
        each.step(batch)
    assert (calls.count(plain), calls.count(run)) == (1, 2)
    assert same(weights(plain.model), weights(run.model))


def test_a_scheduler_that_waits_for_a_metric_is_not_stepped(trainer_of):
    run = run_of(trainer_of, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch")
    run.step({"input_ids": rows(1)[0]["input_ids"][None], "labels": rows(1)[0]["labels"][None]})
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


def test_a_norm_of_zero_or_less_does_not_clip(trainer_of):
    for norm in (0.0, -1.0):
        spec = TrainerSpec.of(lambda norm=norm: trainer_of(max_grad_norm=norm))
        assert spec.max_norm is None
        run = spec.create()
        run.step(spec.batch())
        assert run.grad_norm is None
