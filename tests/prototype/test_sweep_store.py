"""The file of a sweep's runs: what is whole is read, what was cut off is not."""

import hashlib
import json
import math
from dataclasses import replace

import pytest

from stackwise.config import StackWiseConfig
from stackwise.prototype.sweep_run import PlannedRun, SweepRun, SweepStore

CONFIG = StackWiseConfig.from_dict({"training": {"precision": "fp32"}})
PLAN = PlannedRun(CONFIG, 2, 0.01, 1, 10)
RUN = SweepRun(2, 0.01, 1, 2.25, 5.5, "success", None, 0.5)
FAILED = SweepRun(2, 0.1, 1, math.inf, 5.5, "nan", 3, 0.25)
FAILED_PLAN = replace(PLAN, learning_rate=0.1)


def test_what_is_kept_is_read_again(tmp_path):
    store = SweepStore(tmp_path / "runs" / "sweep.jsonl")
    assert store.read() == {}
    store.keep(PLAN, RUN)
    store.keep(FAILED_PLAN, FAILED)
    assert SweepStore(store.path).read() == {PLAN.key: RUN, FAILED_PLAN.key: FAILED}
    assert len(store.path.read_text().splitlines()) == 2


@pytest.mark.parametrize("behind", [1, 2, 20, 60])
def test_a_line_that_was_cut_off_is_not_read_and_the_next_one_is_whole(tmp_path, behind):
    store = SweepStore(tmp_path / "sweep.jsonl")
    store.keep(PLAN, RUN)
    store.keep(FAILED_PLAN, FAILED)
    content = store.path.read_bytes()
    store.path.write_bytes(content[:-behind])
    # Only the end of the line is missing where one byte is.
    kept = {PLAN.key: RUN} | ({FAILED_PLAN.key: FAILED} if behind == 1 else {})
    assert store.read() == kept
    store.keep(FAILED_PLAN, FAILED)
    assert store.read() == {PLAN.key: RUN, FAILED_PLAN.key: FAILED}


def test_a_line_cut_within_a_character_is_not_read(tmp_path):
    store = SweepStore(tmp_path / "sweep.jsonl")
    store.keep(PLAN, RUN)
    with store.path.open("ab") as file:
        file.write('{"key": "ü'.encode()[:-1])
    assert store.read() == {PLAN.key: RUN}


def test_of_two_lines_with_one_key_the_later_counts(tmp_path):
    store = SweepStore(tmp_path / "sweep.jsonl")
    store.keep(PLAN, RUN)
    store.keep(PLAN, replace(RUN, loss=2.0))
    assert store.read()[PLAN.key].loss == 2.0


def changed(section, **keys):
    values = CONFIG.to_dict()
    values[section] |= keys
    return StackWiseConfig.from_dict(values)


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, width=4),
        replace(PLAN, learning_rate=0.02),
        replace(PLAN, learning_rate=0.01 + 1e-12),
        replace(PLAN, seed=2),
        replace(PLAN, steps=11),
        replace(PLAN, options={"batch_size": 2}),
        replace(PLAN, subject=changed("model", qk_norm="head")),
        replace(PLAN, subject=changed("training", grad_clip=0.5)),
        replace(PLAN, subject=changed("data", task="copy")),
    ],
    ids=["width", "learning rate", "nearly", "seed", "steps", "options", "model", "training", "data"],
)
def test_runs_that_may_differ_have_keys_that_differ(other):
    assert other.key != PLAN.key


def test_a_rate_that_a_configuration_says_is_told_once():
    """Keys of stored sweeps, whose rates may have more than six digits, stay what they were."""
    rate = 2.0**-9
    plan = PlannedRun(changed("training", optimizer={"lr": rate}), 2, rate, 1, 10, False)
    told = {"subject": plan.subject.to_dict(), "steps": 10}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    assert plan.key == f"width 2, learning rate 0.00195312, seed 1; {digest}"


def test_equal_plans_have_equal_keys():
    again = PlannedRun(StackWiseConfig.from_dict(CONFIG.to_dict()), 2, 0.01, 1, 10)
    assert again.key == PLAN.key
    given = replace(PLAN, options={"data": [1, 2]})
    assert given.key == replace(PLAN, options={"data": [3]}).key  # without a name data is known by nothing
    named = [replace(given, data_name=name).key for name in ("one", "two")]
    assert len({given.key, *named}) == 3
