"""Changes: intended differences between the base revision and the current tree, each with its reason.

The present list is for the base c1b02b3.
"""

from __future__ import annotations

from stackwise.checks.check import OTHER_NAMES, known_checks

__all__ = ["CHANGES", "RENAMES"]

# Old name -> new name, as whole parts of an observation's name: checks, markers, options, public names.
RENAMES: dict[str, str] = {}

# Pattern of "group/name/key" (as in fnmatch) -> reason why its value differs.
CHANGES: dict[str, str] = {
    "*/notes": "packed documents, tied heads and padding on the left are found in more models",
    "names/public/stackwise.checks.*": "single checks became variations of the engine",
}
_ENGINE = {
    **dict.fromkeys(OTHER_NAMES, "the engine asks this, under another name"),
    **dict.fromkeys(
        ("attention_backend", "batch", "cache_parts", "documents", "later_tokens", "padded_rows"),
        "the variation reports under the name of the single check that it replaces",
    ),
    **dict.fromkeys(
        (
            "backend_gradients",
            "batch_invariance",
            "cache_decoding",
            "packing_alone",
            "causality",
            "padding_amount",
        ),
        "a single check became a variation of the engine",
    ),
}
for _check in known_checks().values():
    if _check.asks == "model" and _check.family in ("equivalence", "sensitivity", "state", "modes"):
        _ENGINE.setdefault(_check.name, "new checks and variations")
for _name in ("cache_call", "cache_independence", "encoder_padding", "half_precision", "padding_empty_row"):
    _ENGINE.setdefault(_name, "a single check became a variation of the engine, or is new")
for _name, _reason in _ENGINE.items():
    for _group in ("healthy", "zoo"):
        CHANGES[f"{_group}/*/{_name}"] = _reason
