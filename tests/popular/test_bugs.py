"""Public bugs of popular projects, rebuilt in the models of this folder: the right check fails."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec, check_model, check_trainer
from tests.popular import nanochat, nanogpt, vit

# nanoGPT


class NonCausalAttention(nanogpt.CausalSelfAttention):
    """The fused kernel without is_causal."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class NonCausalGPT(nanogpt.GPT):
    attention = NonCausalAttention


def non_causal():
    return NonCausalGPT(nanogpt.GPTConfig())


class LossOfReshapedLogits(nanogpt.GPT):
    """Targets are transposed before they are flattened."""

    def loss(self, logits, targets):
        return super().loss(logits, targets.t().reshape(targets.shape))


def transposed_targets():
    return LossOfReshapedLogits(nanogpt.GPTConfig())


class UntiedGPT(nanogpt.GPT):
    """The head gets a copy of the embedding, so that both train apart."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(self.transformer.wte.weight.detach().clone())


def untied():
    return ModelSpec.of(lambda: UntiedGPT(nanogpt.GPTConfig()), tied=True)


class UndividedLoss(nanogpt.Loop):
    """The loss is not divided by the number of micro-batches."""

    def micro_loss(self, batch, n_batches):
        return self.loss(batch)


class WarmupFromZero(nanogpt.Loop):
    """The warm-up of the first versions: it / warmup_iters."""

    @classmethod
    def get_lr(cls, it):
        return super().get_lr(it) if it >= cls.warmup_iters else cls.learning_rate * it / cls.warmup_iters


class ClippedBeforeUnscale(nanogpt.HalfLoop):
    """Gradients are clipped while they are scaled."""

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)


class ResumedWithoutOptimizer(nanogpt.Loop):
    """Resume loads the weights alone."""

    def load(self, folder):
        fresh = self.optimizer.state_dict()
        super().load(folder)
        self.optimizer.load_state_dict(fresh)


class EvaluatedWithDropout(nanogpt.Loop):
    """estimate_loss without eval()."""

    @torch.no_grad()
    def evaluate(self, batches):
        return torch.stack([self.loss(batch) for batch in batches]).mean().item()


# nanochat


class PositionsFromZero(nanochat.GPT):
    """Rotary embeddings start at 0 in each call, also after cached positions."""

    def rotary(self, start, end):
        return super().rotary(0, end - start)


class TopLeftMask(nanochat.CausalSelfAttention):
    """is_causal=True with a cache: the mask starts at the first key instead of ending at the last."""

    def mask(self, T, S, window, device):
        aligned = super().mask(T, T, window, device)
        return F.pad(aligned, (0, S - T)) if T > 1 else super().mask(T, S, window, device)


class TopLeftGPT(nanochat.GPT):
    attention = TopLeftMask


class PreviousEmbeddingLost(nanochat.GPT):
    """The engine's copy of the prompt's cache lacks the last embedding of the prompt."""

    def smear(self, x, kv_cache):
        if kv_cache is not None:
            kv_cache.prev_embedding = None
        return super().smear(x, kv_cache)


def cached(kind, **settings):
    def build():
        model = kind(nanochat.GPTConfig(**settings))
        model.init_weights()
        return model

    return ModelSpec.of(build, decode=nanochat.decode)


class ForgottenScalars(nanochat.Loop):
    """The parameters of the smear are in no group."""

    def create_optimizers(self):
        adamw, muon = super().create_optimizers()
        del adamw.param_groups[-1]
        return [adamw, muon]


class MuonNeverSteps(nanochat.Loop):
    def update(self):
        self.optimizer[0].step()


class SecondOptimizerNotResumed(nanochat.Loop):
    def load(self, folder):
        fresh = self.optimizer[1].state_dict()
        super().load(folder)
        self.optimizer[1].load_state_dict(fresh)


class MuonAtFullRate(nanochat.Loop):
    """The schedule reaches the first optimizer only."""

    def set_schedule(self, it):
        for group in self.optimizer[0].param_groups:
            group["lr"] = group["initial_lr"] * self.get_lr_multiplier(it)


# ViT


class AlwaysDropout(nn.Dropout):
    """F.dropout without `training=`."""

    def forward(self, x):
        return F.dropout(x, self.p)


class RandomInEval(vit.ViT):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.dropout = AlwaysDropout(0.1)


class BatchStatistics(vit.ViT):
    """Batch norm of the stem uses the batch in eval mode too."""

    def stem(self, dim):
        layers = super().stem(dim)
        layers[1] = nn.BatchNorm2d(dim // 2, track_running_stats=False)
        return layers


class MixedImages(vit.ViT):
    """Patches of different images are mixed by a view."""

    def patches(self, img):
        x = self.patch_embed(img).flatten(2)
        return x.permute(2, 0, 1).reshape(x.size(0), x.size(2), x.size(1))


class EvaluatedOnMixtures(vit.Loop):
    """The loss of the evaluation is that of training, with mixup."""

    @torch.no_grad()
    def evaluate(self, batches):
        self.model.eval()
        total = sum(float(self.loss(batch)) for batch in batches)
        self.model.train()
        return total / len(batches)


class StaysInEval(vit.Loop):
    def evaluate(self, batches):
        found = super().evaluate(batches)
        self.model.eval()
        return found


class SchedulerFirst(vit.Loop):
    def update(self):
        self.scheduler.step()
        self.optimizer.step()


def image_classifier(kind, **settings):
    return vit.classifier(lambda: kind(**settings))


@pytest.mark.parametrize(
    ("subject", "check"),
    [
        (non_causal, "causality"),
        (transposed_targets, "loss_formula"),
        (untied, "tying"),
        (lambda: cached(PositionsFromZero), "cache_decoding"),
        (lambda: cached(TopLeftGPT, smear=False), "cache_decoding"),
        (lambda: cached(PreviousEmbeddingLost), "cache_decoding"),
        (lambda: image_classifier(RandomInEval), "determinism"),
        (lambda: image_classifier(BatchStatistics, convolutional_stem=True), "batch_invariance"),
        (lambda: image_classifier(MixedImages), "batch_invariance"),
    ],
    ids=[
        "nanogpt-non-causal",
        "nanogpt-transposed-targets",
        "nanogpt-untied",
        "nanochat-positions-from-zero",
        "nanochat-top-left-mask",
        "nanochat-previous-embedding-lost",
        "vit-random-in-eval",
        "vit-batch-statistics",
        "vit-mixed-images",
    ],
)
def test_model_with_bug_fails(few_compositions, subject, check):
    [result] = check_model(subject, checks=[check])

    assert result.status == "failed", result


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("trainer", "loop", "check"),
    [
        (nanogpt.trainer, UndividedLoss, "accumulated_gradient"),
        (nanogpt.trainer, ClippedBeforeUnscale, "loss_scale"),
        (nanogpt.trainer, ResumedWithoutOptimizer, "interrupted_run"),
        (nanogpt.trainer, EvaluatedWithDropout, "evaluation_exact"),
        (nanochat.trainer, ForgottenScalars, "parameters_change"),
        (nanochat.trainer, MuonNeverSteps, "parameters_change"),
        (nanochat.trainer, SecondOptimizerNotResumed, "interrupted_run"),
        (nanochat.trainer, MuonAtFullRate, "learning_rate"),
        (vit.trainer, EvaluatedOnMixtures, "evaluation_exact"),
        (vit.trainer, StaysInEval, "undisturbed_run"),
        (vit.trainer, SchedulerFirst, "scheduler_order"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_loop_with_bug_fails(trainer, loop, check):
    [result] = check_trainer(trainer(loop), checks=[check])

    assert result.status == "failed", result


def test_first_learning_rate_of_zero_warns():
    [result] = check_trainer(nanogpt.trainer(WarmupFromZero), checks=["scheduler_order"])

    assert result.status == "warned"
