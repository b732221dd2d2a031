"""peft#2646 (huggingface/peft): with prompt tuning, the new classifier of a model is not trained.

For sequence classification the head is added to `modules_to_save`. Configurations of prompt learning lack
that attribute, so this is skipped, and the random head stays frozen and is not saved.
https://github.com/huggingface/peft/pull/2646
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


@dataclass
class PromptTuningConfig:
    """Configuration; the one with the bug has no attribute `modules_to_save`."""

    num_virtual_tokens: int = 4


@dataclass
class SavingPromptTuningConfig(PromptTuningConfig):
    """Configuration with modules that are trained and saved as a whole."""

    modules_to_save: tuple[str, ...] = ()


@dataclass
class SequenceClassifierOutput:
    """Loss (with labels) and logits (batch, classes)."""

    loss: Tensor | None
    logits: Tensor


class BertLayer(nn.Module):
    """Post-norm encoder layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.dense = (nn.Linear(dim, dim) for _ in range(4))
        self.intermediate, self.output = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm1, self.norm2 = (nn.LayerNorm(dim, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """`keep` (batch, time) is 0 for padding."""
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep.bool()[:, None, None])
        x = self.norm1(x + self.dense(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.output(F.gelu(self.intermediate(x))))


class BertForSequenceClassification(nn.Module):
    """Pretrained encoder with a new classifier of its first token."""

    def __init__(self, vocab_size: int = 64, dim: int = 32, num_labels: int = 3) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(dim, 4) for _ in range(2))
        self.pooler = nn.Linear(dim, dim)
        self.classifier = nn.Linear(dim, num_labels)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        x = self.norm(inputs_embeds + self.position_embeddings(positions))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.classifier(self.pooler(x[:, 0]).tanh())


class PeftModelForSequenceClassification(nn.Module):
    """Frozen model with a trained prompt of virtual tokens before the text."""

    def __init__(self, model: BertForSequenceClassification, peft_config: PromptTuningConfig) -> None:
        super().__init__()
        self.base_model, count = model.requires_grad_(False), peft_config.num_virtual_tokens
        self.prompt_encoder = nn.Embedding(count, model.word_embeddings.embedding_dim)
        if hasattr(peft_config, "modules_to_save"):
            peft_config.modules_to_save += ("classifier", "score")
        self.modules_to_save = getattr(peft_config, "modules_to_save", ())
        for name, module in model.named_children():
            module.requires_grad_(name in self.modules_to_save)

    def get_peft_model_state_dict(self) -> dict[str, Tensor]:
        """Return what is saved: the prompt and the modules to save."""
        saved = ("prompt_encoder.", *(f"base_model.{name}." for name in self.modules_to_save))
        return {key: value for key, value in self.state_dict().items() if key.startswith(saved)}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Classify rows; `attention_mask` is 0 for padding, on the right."""
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.dtype)
        prompts = self.prompt_encoder.weight.expand(len(input_ids), -1, -1)
        inputs_embeds = torch.cat((prompts, self.base_model.word_embeddings(input_ids)), dim=1)
        logits = self.base_model(inputs_embeds, F.pad(keep, (prompts.shape[1], 0), value=1))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss, logits)


def buggy() -> nn.Module:
    """Only the prompt is trained."""
    return PeftModelForSequenceClassification(BertForSequenceClassification(), PromptTuningConfig())


def healthy() -> nn.Module:
    """The prompt and the classifier are trained."""
    return PeftModelForSequenceClassification(BertForSequenceClassification(), SavingPromptTuningConfig())


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a classifier of rows, and the pretrained parts that stay frozen."""
    parts = ("word_embeddings", "position_embeddings", "norm", "layers", "pooler")
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=64,
        max_length=60,
        per_position=False,
        masked=lambda model, ids, keep: model(ids, attention_mask=keep).logits,
        loss=lambda model, ids: model(ids, labels=ids[:, 0] % 3).loss,
        frozen=tuple(f"base_model.{part}" for part in parts),
    )


def observe(model: nn.Module) -> Tensor:
    """Gradient of the classifier that is missing in a training step."""
    ids, classifier = torch.tensor([[5, 9, 11, 2], [31, 44, 17, 60]]), model.base_model.classifier
    model(ids, labels=torch.tensor([0, 2])).loss.backward()
    got = torch.zeros_like(classifier.weight) if classifier.weight.grad is None else classifier.weight.grad
    model.zero_grad()
    weight = classifier.weight.detach().clone().requires_grad_()
    arguments = {"input_ids": ids, "labels": torch.tensor([0, 2])}
    loss = torch.func.functional_call(model, {"base_model.classifier.weight": weight}, (), arguments).loss
    return torch.autograd.grad(loss, weight)[0] - got
