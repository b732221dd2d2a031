"""Progress: a line for each trial, or one line that lives."""

import io

from stackwise.config import StackWiseConfig
from stackwise.prototype.search import SearchTrial
from stackwise.prototype.search.progress import SearchProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def trials():
    config = StackWiseConfig()
    yield SearchTrial(0, {"n_layers": 3}, config, "success", loss=2.5)
    yield SearchTrial(1, {"n_layers": 4}, config, "nan", "nan at step 7")
    yield SearchTrial(4, {"n_layers": 5}, config, "success", loss=3.25)


def told(out, **options):
    with SearchProgress(9, ["loss"], out=out, **options) as progress:
        for trial in trials():
            progress.tell(trial)
    return out.getvalue()


def test_lines():
    assert told(io.StringIO()).splitlines() == [
        "trial 0: loss 2.5 (n_layers=3), best loss 2.5",
        "trial 1: nan: nan at step 7 (n_layers=4), best loss 2.5",
        "trial 4: loss 3.25 (n_layers=5), best loss 2.5",
    ]
    assert told(io.StringIO(), shown=False) == ""


def test_long_search_shows_the_remaining_time():
    seconds = iter([0.0, 4.0, 12.0, 300.0])
    lines = told(io.StringIO(), clock=lambda: next(seconds)).splitlines()
    assert lines[0].endswith("best loss 2.5")
    assert lines[1].endswith("best loss 2.5, about 42 s left")
    assert lines[2].endswith("best loss 2.5, about 10 min left")


def test_a_terminal_has_one_line():
    text = told(Terminal())
    assert "3 trials done here, of 9 in all, best loss 2.5" in text
    assert "n_layers" not in text
