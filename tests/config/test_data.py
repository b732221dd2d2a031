"""Settings of the data: a text or a task, not both."""

import pytest

from stackwise.config import ConfigError, DataConfig
from tests.config.keys import problems

BOTH = "task: got 'copy' (str); set either task or dataset_path, not both"


@pytest.mark.parametrize("mapping", [{}, {"dataset_path": "a.txt"}, {"task": "copy"}])
def test_one_source_is_accepted(mapping):
    assert DataConfig.from_dict(mapping).to_dict() == DataConfig().to_dict() | mapping


def test_task_and_text_are_refused():
    assert problems(DataConfig, {"dataset_path": "a.txt", "task": "copy"}) == [BOTH]


def test_text_is_not_assigned_to_data_with_a_task():
    data = DataConfig(task="copy")
    with pytest.raises(ConfigError) as caught:
        data.dataset_path = "a.txt"
    assert caught.value.problems == [BOTH]
    assert data == DataConfig(task="copy")
