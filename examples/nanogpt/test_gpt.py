"""Stability test and benchmark of the GPT."""

import pytest
from model import gpt


@pytest.mark.nan_injection(step=5, target="activation:blocks.1.attn")
def test_nan_is_located(stability_run):
    run = stability_run(gpt, steps=10)
    assert run.alarm_steps == [5]
    assert run.alarms[0].where == "blocks.1.attn (forward)"


@pytest.mark.throughput(batch_size=4, seq_len=64)
def test_speed(throughput):
    throughput(gpt, mode="train")
