"""Where a run may write its records."""

import pytest

from stackwise.config.training import TelemetryConfig
from stackwise.training.record_log import check_places


def test_places(tmp_path):
    """Empty or new, or of the run that goes on."""
    file, folder = tmp_path / "run.jsonl", tmp_path / "events"
    places = TelemetryConfig(jsonl=str(file), tensorboard=str(folder))
    check_places(places, resumes=False)
    file.touch()
    folder.mkdir()
    (folder / "of another run").mkdir()
    check_places(places, resumes=False)
    file.write_text("{}\n")
    with pytest.raises(ValueError, match=r"training\.telemetry\.jsonl: got .*run\.jsonl'; .* no lines yet"):
        check_places(places, resumes=False)
    (folder / "events.out.tfevents.0").touch()
    with pytest.raises(ValueError, match=r"training\.telemetry\.tensorboard: got .*no events yet"):
        check_places(TelemetryConfig(tensorboard=str(folder)), resumes=False)
    check_places(places, resumes=True)


@pytest.mark.parametrize("resumes", [True, False])
def test_no_places(tmp_path, resumes):
    file = tmp_path / "run.jsonl"
    file.touch()
    with pytest.raises(ValueError, match=r"training\.telemetry\.jsonl: got .*; allowed: a file"):
        check_places(TelemetryConfig(jsonl=str(tmp_path)), resumes=resumes)
    with pytest.raises(ValueError, match=r"training\.telemetry\.tensorboard: got .*; allowed: a folder"):
        check_places(TelemetryConfig(tensorboard=str(file)), resumes=resumes)
