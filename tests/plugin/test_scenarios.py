"""The three scenarios: examples/pytest are the files of the page, pass, and fail where they should."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/pytest").glob("test_*.py"))
# How many cases pass, and what those that are broken say.
SOUND = {"test_gradient_explosion": 4, "test_length_sweep": 4, "test_nan_injection": 3}
BROKEN = {
    "test_gradient_explosion": [
        "*RecoveryFailedError: Loop under gradient_explosion(step=8, factor=1000)*: not recovered",
        "*a broken step has moved the training: from step 8 on its weights are off *",
        "*loss of step 12: *; allowed 4 steps after the fault: 0.05 apart; it never agrees until the end",
    ],
    "test_length_sweep": ["*'T=64: largest logit *, of T=8 *; allowed 4 times as much'*"],
    "test_nan_injection": [
        "*RecoveryFailedError: Loop under nan_injection(step=5, target='activation:1')*: not recovered",
        "*at the end weights or buffers are not finite",
    ],
}


def test_page_includes_the_files():
    page = (ROOT / "docs/reference/scenarios.md").read_text()
    included = re.findall(r"^```\{literalinclude\} \.\./\.\./(.*)$", page, re.MULTILINE)
    assert sorted(included) == [path.relative_to(ROOT).as_posix() for path in FILES]
    assert "(scenarios.md)" in (ROOT / "docs/reference/plugin.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sound_cases_pass_and_broken_ones_fail(pytester, run, path):
    pytester.makepyfile(**{path.stem: path.read_text()})
    run("--strict-markers", "-W", "error").assert_outcomes(passed=SOUND[path.stem], xfailed=1)
    result = run("--runxfail")
    result.assert_outcomes(passed=SOUND[path.stem], failed=1)
    result.stdout.fnmatch_lines(BROKEN[path.stem])
