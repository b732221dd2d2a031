"""Interop: load and save Racks as folders of weights, in the format of Hugging Face or of StackWise.

Nothing in this module needs transformers or unpickles data. `hf_family.py` describes the families of
transformers; `weight_folder.py` reads and writes the files.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.config import BlockConfig
from stackwise.model.block import Block
from stackwise.model.embedding import BoundedEmbedding
from stackwise.model.hf_family import HfFamily, family_for, family_named
from stackwise.model.norm import create_norm
from stackwise.model.rack import Rack
from stackwise.model.stack import Stack
from stackwise.model.weight_folder import FLOATS, check_tensors, read_config, read_weights, write_folder
from stackwise.support.arguments import check_choice, check_sizes, require

__all__ = ["load_pretrained", "modules_of", "save_pretrained"]

MODEL_TYPE, FORMAT_VERSION = "stackwise", 1
_TIED_COPY = "lm_head.weight"
# Old files contain the rotary frequencies of each layer, which config.json defines as well.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# Keys of config.json that do not affect the Rack, and are stored so that saving can write them.
_KEPT = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
_RACK_KEYS = {"vocab_size", "d_model", "tie_embeddings", "max_seq_len", "embedding_bound", "final_norm"}
_OWN_KEYS = {"model_type", "format_version", *_RACK_KEYS, "stacks", "frozen", "hf_origin"}


def load_pretrained(
    source: str | os.PathLike[str] | nn.Module,
    *,
    n_stacks: int | None = None,
    dtype: torch.dtype | None = None,
) -> Rack:
    """Load a Rack from a folder, or convert a loaded transformers model. The Rack is in eval mode.

    Args:
        source: folder with config.json and safetensors, in one file or sharded, from `save_pretrained` or
            of a Llama, Mistral, Qwen2, Qwen3 or OLMo 2 model; or such a model, which is copied.
        n_stacks: number of Stacks over which the layers of a transformers model are distributed evenly;
            None: one.
        dtype: dtype of the weights; None: unchanged.

    Raises:
        ValueError: pickled weights; a damaged file; a missing, unexpected or misshapen tensor; a value in
            config.json that a Rack does not support; a loaded model of a class outside its family.
    """
    if dtype is not None:
        require(dtype in FLOATS, "dtype", dtype, f"None, {', '.join(map(str, FLOATS))}")
    if isinstance(source, str | os.PathLike):
        folder = Path(source)
        where, config = str(folder), read_config(folder)
        if config.get("model_type") == MODEL_TYPE:
            require(n_stacks is None, "n_stacks", n_stacks, f"None: {folder} says which Stacks it has")
            return _load_own(config, read_weights(folder), where, dtype)
        family = family_named(config.get("model_type"), where)
        weights = read_weights(folder)
    else:
        where = type(source).__name__
        live = getattr(source, "config", None)
        known = isinstance(source, nn.Module) and hasattr(live, "to_dict")
        require(known, "source", where, "a folder, or a live transformers model")
        assert isinstance(source, nn.Module) and live is not None
        config = {**live.to_dict(), **_class_of(source)}
        family = family_named(config.get("model_type"), where)
        weights = dict(source.state_dict())
    rack = _load_hf(family, config, weights, where, n_stacks, dtype)
    _warn_of_dropout(config.get("attention_dropout"), f"read from {where} as dropout")
    return rack


def save_pretrained(
    rack: Rack,
    path: str | os.PathLike[str],
    format: str = "hf",  # noqa: A002  # name of the file format
    *,
    model_type: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> Path:
    """Write config.json and safetensors into a folder, atomically.

    Args:
        rack: Rack on any device.
        path: folder. It must be empty or not exist, unless `overwrite`.
        format: "hf", which transformers loads; "stackwise", which supports every Rack, and stores its Stacks
            and frozen parameters.
        model_type: family for "hf"; None: the family that the Rack was loaded from, otherwise the first
            that fits.
        max_shard_bytes: larger weights are split into files of at most this size, with an index.
        overwrite: replace an earlier save. It is removed only after the new one is complete.

    Returns:
        The folder.

    Raises:
        ValueError: no family fits the Rack; weights that are not plain tensors; a folder that is not empty,
            or has files that a save does not write.
        OSError: the disk returned an error; an earlier save is unchanged.
    """
    check_choice("format", format, ("hf", "stackwise"))
    require(model_type is None or format == "hf", "model_type", model_type, "None, with format='stackwise'")
    path = Path(path)
    state = rack.state_dict()
    tied = rack.lm_head.weight is rack.embedding.weight
    require(tied == rack.tie_embeddings, "tie_embeddings", rack.tie_embeddings, f"{tied}, as the weights are")
    if rack.tie_embeddings:
        del state[_TIED_COPY]
    origin = rack.hf_origin
    if format == "stackwise":
        config = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION, **_describe(rack)}
        config["frozen"] = [name for name, p in rack.named_parameters() if not p.requires_grad]
        config["hf_origin"] = origin
        _check_twin(rack, _build(config, str(path)), state)
        weights = state
    else:
        family = family_for(rack, model_type, origin.get("model_type"))
        config = {**family.config_of(rack), **{k: v for k, v in origin.items() if k != "model_type"}}
        description = family.describe(config, str(path))
        _spread(description, rack.blocks_per_stack)
        _check_twin(rack, _build(description, str(path)), state)
        _warn_of_dropout(config["attention_dropout"], "written as attention_dropout")
        weights = {
            theirs: piece
            for ours, parts in family.correspondence(rack).items()
            for theirs, piece in zip(parts, state[ours].split(list(parts.values())), strict=True)
        }
    return write_folder(path, config, weights, max_shard_bytes=max_shard_bytes, overwrite=overwrite)


def _class_of(model: nn.Module) -> dict[str, Any]:
    """Return config.json's keys for the actual class of a model, which its configuration may not name."""
    kind = type(model)
    theirs = kind.__module__.partition(".")[0] == "transformers"
    return {
        "architectures": [kind.__name__ if theirs else f"{kind.__module__}.{kind.__qualname__}"],
        "auto_map": None,
    }


def _load_own(
    config: Mapping[str, Any], weights: dict[str, Tensor], where: str, dtype: torch.dtype | None
) -> Rack:
    version = config.get("format_version")
    require(version == FORMAT_VERSION, f"{where}: format_version", version, str(FORMAT_VERSION))
    require(config.keys() == _OWN_KEYS, f"{where}: config.json", sorted(config), ", ".join(sorted(_OWN_KEYS)))
    rack = _build(config, where)
    parameters = dict(rack.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in config["frozen"])
    check_tensors(where, weights, _shapes(rack))
    rack.hf_origin = config["hf_origin"]
    # Frequencies of kernel attention are at least float32, as in a Rack that is cast.
    wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
    kept = {n: _joined([weights.pop(n)], dtype if n in parameters else wide) for n in list(weights)}
    return _filled(rack, kept)


def _load_hf(
    family: HfFamily,
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    where: str,
    n_stacks: int | None,
    dtype: torch.dtype | None,
) -> Rack:
    description = family.describe(config, where)
    if n_stacks is not None:
        check_sizes(n_stacks=n_stacks)
        n_layers = len(description["stacks"][0]["blocks"])
        require(n_layers % n_stacks == 0, "n_stacks", n_stacks, f"a divisor of the {n_layers} layers")
        _spread(description, [n_layers // n_stacks] * n_stacks)
    rack = _build(description, where)
    names = family.correspondence(rack)
    shapes = _shapes(rack)
    for name in filter(_DERIVED.fullmatch, list(weights)):
        del weights[name]
    copy = weights.pop(_TIED_COPY, None) if rack.tie_embeddings else None
    check_tensors(
        where,
        weights,
        {t: (rows, *shapes[ours][1:]) for ours, parts in names.items() for t, rows in parts.items()},
    )
    if copy is not None:
        embedding = weights["model.embed_tokens.weight"]
        same = copy.dtype == embedding.dtype and torch.equal(copy, embedding)
        require(same, f"{where}: tie_word_embeddings", True, f"false, since {_TIED_COPY} is another matrix")
    dtypes = sorted({str(tensor.dtype) for tensor in weights.values()})
    if len(dtypes) > 1 and dtype is None:
        raise ValueError(f"{where}: got weights of {' and '.join(dtypes)}; allowed: one dtype, or dtype=")
    rack.hf_origin = {key: config[key] for key in _KEPT if key in config}
    # Each tensor is freed after it is copied, and the mapping of a file with its last tensor.
    copied = {ours: _joined([weights.pop(t) for t in parts], dtype) for ours, parts in names.items()}
    return _filled(rack, copied)


def _joined(parts: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Return a copy, which never shares memory with the file or another model."""
    if len(parts) == 1:
        return parts[0].to(dtype, copy=True, memory_format=torch.contiguous_format)
    return torch.cat([part.to(dtype) for part in parts])


def _filled(rack: Rack, weights: dict[str, Tensor]) -> Rack:
    if rack.tie_embeddings:
        weights[_TIED_COPY] = weights["embedding.weight"]
    rack.load_state_dict(weights, assign=True)
    if rack.tie_embeddings:  # the assignment has created two parameters
        rack.lm_head.weight = rack.embedding.weight
    assert not any(tensor.is_meta for tensor in (*rack.parameters(), *rack.buffers()))
    return rack.eval()


def _shapes(rack: Rack) -> dict[str, torch.Size]:
    """Return the shape of every stored tensor; a tied weight once."""
    shapes = {name: tensor.shape for name, tensor in rack.state_dict().items()}
    if rack.tie_embeddings:
        del shapes[_TIED_COPY]
    return shapes


def _describe(rack: Rack) -> dict[str, Any]:
    """Return the description that `_build` needs, as plain values."""
    norm = rack.final_norm
    return {
        "vocab_size": rack.vocab_size,
        "d_model": rack.d_model,
        "tie_embeddings": rack.tie_embeddings,
        "max_seq_len": rack.max_seq_len,
        "embedding_bound": rack.embedding.bound if isinstance(rack.embedding, BoundedEmbedding) else None,
        "final_norm": {"kind": "rmsnorm" if isinstance(norm, nn.RMSNorm) else "layernorm", "eps": norm.eps},
        "stacks": [
            {"stack_id": stack.stack_id, "blocks": [block.config.to_dict() for block in stack.get_blocks()]}
            for stack in rack.get_stacks()
        ],
    }


def _spread(description: dict[str, Any], sizes: Iterable[int]) -> None:
    """Distribute the Blocks of the described Stack over Stacks of these sizes."""
    blocks = iter(description["stacks"][0]["blocks"])
    description["stacks"] = [
        {"stack_id": i, "blocks": list(islice(blocks, size))} for i, size in enumerate(sizes)
    ]


def _build(description: Mapping[str, Any], where: str) -> Rack:
    """Return a Rack without data, on the meta device. It draws no random numbers."""
    tied, norm = description["tie_embeddings"], description["final_norm"]
    try:
        check_choice(f"{where}: final_norm", norm["kind"], ("rmsnorm", "layernorm"))
        with torch.device("meta"):
            stacks = [_stack(where, stack) for stack in description["stacks"]]
            vocab_size, d_model = description["vocab_size"], description["d_model"]
            rack = Rack(stacks, vocab_size, d_model, tied, description["max_seq_len"])
            rack.final_norm = create_norm(norm["kind"], d_model, float(norm["eps"]))
            if description["embedding_bound"] is not None:
                rack.embedding = BoundedEmbedding(vocab_size, d_model, description["embedding_bound"])
                if tied:
                    rack.lm_head.weight = rack.embedding.weight
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}: no description of a Rack: {error}") from None
    return rack


def _stack(where: str, description: Mapping[str, Any]) -> Stack:
    configs = [BlockConfig.from_dict(block, source=where) for block in description["blocks"]]
    return Stack([Block(**config.to_dict()) for config in configs], description["stack_id"])


def _check_twin(rack: Rack, twin: Rack, state: Mapping[str, Tensor]) -> None:
    """Raise if a Rack cannot be restored, because its modules or weights differ from its configuration."""
    ours, theirs = modules_of(rack), modules_of(twin)
    for name in theirs | ours:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"rack: {name} is {ours.get(name, 'missing')}; allowed: {theirs.get(name, 'nothing')}, "
                "as configured"
            )
    check_tensors("rack", state, _shapes(twin))
    shared = sorted(dict(twin.named_parameters()).keys() - dict(rack.named_parameters()).keys())
    require(not shared, "rack", shared, "no weight in two places, but for a tied head")


def modules_of(rack: Rack) -> dict[str, str]:
    """Return class and settings of each module in words, by its name."""
    return {
        name: f"{type(module).__name__}({module.extra_repr()})"
        for name, module in rack.named_modules()
        if name
    }


def _warn_of_dropout(dropout: object, what: str) -> None:
    if dropout:
        warnings.warn(
            f"dropout={dropout} is {what}: in training, a Rack drops from the output of each branch too, "
            "transformers from the attention weights only",
            stacklevel=4,
        )
