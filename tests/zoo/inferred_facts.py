"""Models of transformers that ignore a key of their configuration, and follow it in the twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from stackwise.subject.facts import facts_in
from stackwise.subject.spec import ModelSpec
from stackwise.support.random_state import seeded
from tests.zoo.declared_facts import STATED
from tests.zoo.mutant import mutant

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TYPES = ["sliding_attention", "full_attention"]
BASES: dict[str, dict[str, Any]] = {
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "layer_types": TYPES},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.25},
    "llama": {"num_key_value_heads": 2},
    "gpt2": {"n_positions": 64},
    "roberta": {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 64},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 24},
    "xglm": {"d_model": 32, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2},
    "gpt_bigcode": {"multi_query": False, "n_positions": 64},
    "mistral": {"num_key_value_heads": 2},
    "qwen2": {
        "num_key_value_heads": 2,
        "sliding_window": 6,
        "use_sliding_window": True,
        "layer_types": TYPES,
    },
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "layer_types": TYPES},
    "cohere2": {"num_key_value_heads": 2, "sliding_window": 6, "layer_types": TYPES},
    "phi": {"num_key_value_heads": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "camembert": {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 64},
    "xlm-roberta": {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 64},
    "data2vec-text": {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 64},
    "granitemoe": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
}
# (type of model, fact, key that differs from the one of the built model, its value)
CHANGED: list[tuple[str, str, str, Any]] = [
    ("gemma2", "attention_scale", "query_pre_attn_scalar", 32),
    ("gemma2", "attention_cap", "attn_logit_softcapping", 30.0),
    ("gemma2", "logit_cap", "final_logit_softcapping", 20.0),
    ("gemma2", "windows", "layer_types", TYPES[::-1]),
    ("gemma2", "windows", "sliding_window", 7),
    ("granite", "attention_scale", "attention_multiplier", 0.125),
    ("granite", "embedding_scale", "embedding_multiplier", 12.0),
    ("granite", "residual_scale", "residual_multiplier", 0.2),
    ("granite", "logit_scale", "logits_scaling", 8.0),
    ("gpt2", "attention_scale", "scale_attn_weights", False),
    ("gpt2", "attention_scale", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2", "embedding_dropout", "embd_pdrop", 0.2),
    ("gpt2", "attention_dropout", "attn_pdrop", 0.0),
    ("gpt2", "residual_dropout", "resid_pdrop", 0.05),
    ("gpt2", "norm_eps", "layer_norm_epsilon", 1e-6),
    ("llama", "norm_eps", "rms_norm_eps", 1e-5),
    ("llama", "key_heads", "num_key_value_heads", 1),
    ("llama", "attention_dropout", "attention_dropout", 0.1),
    ("llama", "initial_std", "initializer_range", 0.03),
    ("gpt_neox", "residual_dropout", "hidden_dropout", 0.3),
    ("cohere", "logit_scale", "logit_scale", 0.5),
    ("mixtral", "experts_per_token", "num_experts_per_tok", 1),
    ("mixtral", "router_loss", "router_aux_loss_coef", 0.02),
    ("qwen3_moe", "routing_sum", "norm_topk_prob", True),
    ("xglm", "embedding_scale", "scale_embedding", True),
    ("xglm", "residual_dropout", "dropout", 0.3),
    ("gpt_bigcode", "key_heads", "multi_query", True),
    ("mistral", "key_heads", "num_key_value_heads", 4),
    ("mistral", "norm_eps", "rms_norm_eps", 1e-5),
    ("mistral", "initial_std", "initializer_range", 0.05),
    ("qwen2", "windows", "sliding_window", 8),
    ("qwen2", "norm_eps", "rms_norm_eps", 1e-5),
    ("gemma3_text", "norm_eps", "rms_norm_eps", 1e-5),
    ("gemma3_text", "windows", "layer_types", TYPES[::-1]),
    ("gemma3_text", "attention_scale", "query_pre_attn_scalar", 64),
    ("cohere2", "windows", "sliding_window", 5),
    ("cohere2", "logit_scale", "logit_scale", 0.25),
    ("phi", "embedding_dropout", "embd_pdrop", 0.1),
    ("phi", "residual_dropout", "resid_pdrop", 0.2),
    ("phi", "norm_eps", "layer_norm_eps", 1e-3),
    ("roberta", "position_offset", "pad_token_id", 3),
    ("camembert", "position_offset", "pad_token_id", 0),
    ("xlm-roberta", "position_offset", "pad_token_id", 2),
    ("data2vec-text", "position_offset", "pad_token_id", 3),
    ("roberta", "attention_dropout", "attention_probs_dropout_prob", 0.3),
    ("granitemoe", "embedding_scale", "embedding_multiplier", 8.0),
    ("granitemoe", "residual_scale", "residual_multiplier", 0.25),
    ("granitemoe", "logit_scale", "logits_scaling", 4.0),
    ("olmoe", "routing_sum", "norm_topk_prob", True),
    ("olmoe", "experts_per_token", "num_experts_per_tok", 3),
    ("olmoe", "router_loss", "router_aux_loss_coef", 0.05),
]
# (type of model, what is ignored, parameters of its rotary embedding)
SCALED = {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
ROTARY: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "theta", {"rope_type": "default", "rope_theta": 500000.0}),
    ("llama", "linear_scaling", {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    (
        "llama",
        "llama3_scaling",
        SCALED | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    ("llama", "yarn_scaling", SCALED | {"rope_type": "yarn", "factor": 4.0}),
    ("mistral", "theta", {"rope_type": "default", "rope_theta": 1000000.0}),
    ("qwen2", "linear_scaling", {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    ("cohere", "theta", {"rope_type": "default", "rope_theta": 8000000.0}),
    ("gemma2", "theta", {"rope_type": "default", "rope_theta": 100000.0}),
    ("phi", "rotated_part", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}),
    (
        "gpt_neox",
        "rotated_part",
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
]


def factory(kind: str, **changed: Any) -> Callable[[], Any]:
    import transformers

    settings = {**SIZES, **BASES.get(kind, {}), **changed}
    if kind == "xglm":
        settings = {"scale_embedding": False, **settings}
        del settings["hidden_size"]
    config = transformers.AutoConfig.for_model(kind, **settings)
    return lambda: transformers.AutoModelForCausalLM.from_config(config)


def rotary_factory(kind: str, parameters: dict[str, Any], *, ignored: bool) -> Callable[[], Any]:
    """Return a factory of a model with these rotary parameters, set too late if they are ignored."""

    def build() -> Any:
        model = factory(kind)() if ignored else factory(kind, rope_parameters=parameters)()
        model.config.rope_parameters = dict(parameters)
        return model

    return build


def spec_with(build: Callable[[], Any], stated: Callable[[], Any]) -> ModelSpec:
    """Return the spec of a model with the facts of another one."""
    more: dict[str, Any] = {"max_length": 60, "facts": facts_in(stated())[0]}
    if getattr(build().config, "router_aux_loss_coef", None):
        return ModelSpec.of(build, **more)
    return ModelSpec(build, "model", "tokens", SIZES["vocab_size"], causal=True, **more)


def numbers(spec: ModelSpec) -> list[Any]:
    """Weights. With larger weights, which make caps visible: logits in eval and train mode, and the loss."""
    model, inputs = spec.create().eval(), spec.batch(2, 12)
    found = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data *= 20
    found.append(spec.logits(model, inputs))
    if spec.labelled_loss is not None:
        model.config.output_router_logits = True
        found.append(spec.labelled_loss(model, inputs, inputs))
    with seeded(0):
        found.append(spec.logits(model.train(), inputs))
    return [each.detach() for each in found]


def enter_all() -> None:
    for kind, fact, key, value in CHANGED:

        def twin(kind: str = kind, changed: Any = {key: value}) -> ModelSpec:  # noqa: B006
            return spec_with(factory(kind, **changed), factory(kind, **changed))

        def make(kind: str = kind, changed: Any = {key: value}) -> ModelSpec:  # noqa: B006
            return spec_with(factory(kind), factory(kind, **changed))

        twin.__name__ = f"{kind}_{key}"
        make.__name__ = f"{kind}_ignores_{key}"
        make.__doc__ = f"{key} of the configuration has no effect."
        family = STATED[fact][0]
        mutant("inferred facts", twin=twin, family=family, source="classic", observable=numbers)(make)
    for kind, part, parameters in ROTARY:

        def twin(kind: str = kind, parameters: dict[str, Any] = parameters) -> ModelSpec:
            return ModelSpec.of(rotary_factory(kind, parameters, ignored=False), max_length=60)

        def make(kind: str = kind, parameters: dict[str, Any] = parameters) -> ModelSpec:
            return ModelSpec.of(rotary_factory(kind, parameters, ignored=True), max_length=60)

        twin.__name__ = f"{kind}_rotary_{part}"
        make.__name__ = f"{kind}_ignores_rotary_{part}"
        make.__doc__ = (
            f"The rotary embedding ignores rope_parameters of the configuration: {part.replace('_', ' ')}."
        )
        mutant("inferred facts", twin=twin, family="rotary", source="classic", observable=numbers)(make)


enter_all()


def llama_of_configuration() -> ModelSpec:
    return ModelSpec.of(factory("llama"), max_length=60)


class Exchanged(nn.Module):
    """Returns sin and cos in place of cos and sin."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.rotary(*args, **kwargs)[::-1]


@mutant("inferred facts", twin=llama_of_configuration, family="rotary", source="classic", observable=numbers)
def llama_exchanges_cos_and_sin() -> ModelSpec:
    """Queries and keys are rotated in the other direction."""

    def build() -> Any:
        model = factory("llama")()
        model.model.rotary_emb = Exchanged(model.model.rotary_emb)
        return model

    return ModelSpec.of(build, max_length=60)
