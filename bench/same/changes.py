"""Changes: intended differences between the base revision and the current tree, each with its reason."""

from __future__ import annotations

from stackwise.checks.check import known_checks

__all__ = ["CHANGES", "RENAMES"]

# Old name -> new name, as whole parts of an observation's name: checks, markers, options, public names.
RENAMES: dict[str, str] = {}

# Pattern of "group/name/key" (as in fnmatch) -> reason why its value differs.
CHANGES: dict[str, str] = {
    "*/notes": "notes are in plain words",
    "healthy/x-transformers/*/initial_loss": "54efec2 does not seed models that a library builds at once",
    "guard/*/stopped": "alarms are in plain words",
    "names/commands/train": "training.guard is a GuardPolicy; training.watch_logits and training.bundle_dir",
    "healthy/*roberta is_decoder/cache_padding": "its positions do not start at 0: padding on the right",
    "healthy/transformers/camembert is_decoder/cache_padding": "as for roberta",
    "healthy/transformers/dots3_note_text/*": "32 index heads instead of 2, so that no scores are equal",
    "healthy/transformers/hy_v4/*": "32 index heads instead of 2, so that no scores are equal",
    "names/public/stackwise.checks.compare": "new: repeats a composition of equivalent ways",
    "names/public/stackwise.checks.variations.*": "new package",
    "names/public/stackwise.config.Guard*": "GuardPolicy is the configuration section",
    "names/public/stackwise.inference.*": "inference is a part of stackwise.subject",
    "names/public/stackwise.subject.*": "inference is a part of stackwise.subject",
}
# Checks that the base does not have.
for _check in known_checks().values():
    if _check.family in ("equivalence", "sensitivity"):
        for _group in ("healthy", "zoo"):
            CHANGES[f"{_group}/*/{_check.name}"] = "new checks: equivalent ways to ask, effect of each token"
