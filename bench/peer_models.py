"""The same Llama shape, built by each library that people would pick instead.

Each builder returns a module and a function (module, ids (B, T)) -> logits (B, T, V).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from torch import Tensor, nn

from stackwise import create_simple_rack

Built = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]


@dataclass(frozen=True)
class Shape:
    """Of a Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases, nothing tied."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int = 8192
    batch_size: int = 1
    seq_len: int = 256

    @property
    def name(self) -> str:
        return f"d{self.d_model} L{self.n_layers} {self.batch_size}x{self.seq_len}"

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


def rack(shape: Shape) -> Built:
    model = create_simple_rack(
        1,
        shape.n_layers,
        d_model=shape.d_model,
        d_ff=shape.d_ff,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        vocab_size=shape.vocab_size,
        tie_embeddings=False,
    )
    return model, lambda module, ids: module(ids)


def transformers(shape: Shape) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=max(1024, shape.seq_len),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config), lambda module, ids: module(ids, use_cache=False).logits


def litgpt(shape: Shape) -> Built:
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        name="peer",
        block_size=max(1024, shape.seq_len),
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        n_query_groups=shape.n_kv_heads,
        n_embd=shape.d_model,
        head_size=shape.head_dim,
        intermediate_size=shape.d_ff,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    model.max_seq_length = shape.seq_len
    return model, lambda module, ids: module(ids)


def x_transformers(shape: Shape) -> Built:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.d_model,
        depth=shape.n_layers,
        heads=shape.n_heads,
        attn_kv_heads=shape.n_kv_heads,
        attn_dim_head=shape.head_dim,
        attn_flash=True,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=shape.d_ff / shape.d_model,
    )
    model = TransformerWrapper(
        num_tokens=shape.vocab_size,
        max_seq_len=max(1024, shape.seq_len),
        attn_layers=layers,
        use_abs_pos_emb=False,
        tie_embedding=False,
    )
    return model, lambda module, ids: module(ids)


PEERS: dict[str, Callable[[Shape], Built]] = {
    "transformers": transformers,
    "litgpt": litgpt,
    "x-transformers": x_transformers,
}


def versions() -> dict[str, str]:
    return {name: version(name) for name in PEERS}
