"""Tests of a trained Rack, as users write them: checks, faults, lengths and throughput."""

from dataclasses import replace

import pytest
import torch

from pytest_stackwise import parametrize_with_checks
from stackwise import ModelSpec
from stackwise.data.create import documentation_text
from stackwise.model.attention import Attention
from stackwise.model.layout import Layout
from stackwise.training import latest_checkpoint, load_rack

TEXT = torch.frombuffer(bytearray(documentation_text().encode()), dtype=torch.uint8)


def trained_rack():
    return load_rack(latest_checkpoint("build/demo/rack"))


class ForgetfulAttention(Attention):
    """Attention with a bug: each new token gets position 0, also if it follows tokens in a cache."""

    def project(self, x_BTC, layout):
        return super().project(x_BTC, Layout(x_BTC))


def rack_with_a_bug():
    """Return a Rack with a bug that loss and gradients do not show, because training uses no cache."""
    rack = trained_rack()
    rack.stacks[1].blocks[0].attention.__class__ = ForgetfulAttention
    return rack


def text_batch(batch_size, seq_len, generator):
    starts = torch.randint(len(TEXT) - seq_len, (batch_size, 1), generator=generator)
    return TEXT[starts + torch.arange(seq_len)].long()


def adamw(parameters):
    # A trained model with a fresh optimizer and no warm-up needs a small learning rate.
    return torch.optim.AdamW(parameters, lr=1e-4)


SPEC = ModelSpec.of(trained_rack, name="rack", trained=True, make_batch=text_batch, optimizer=adamw)
BROKEN = replace(SPEC, build=rack_with_a_bug, name="rack_with_a_bug")


@parametrize_with_checks([SPEC])
def test_rack(spec, check):
    check(spec)


@parametrize_with_checks(
    [BROKEN], checks=["cache_decoding"], expected_failures={"cache_decoding": "the bug of the demo"}
)
def test_bug_is_found(spec, check):
    check(spec)


@pytest.mark.nan_injection(step=8, target="activation:stacks.1.blocks.0.attention")
def test_nan_is_caught_at_its_step_and_place(stability_run):
    run = stability_run(SPEC, steps=16)
    assert run.alarm_steps == [8]
    assert run.alarms[0].where == "stacks.1.blocks.0.attention (forward)"
    assert run.recovered


@pytest.mark.gradient_explosion(step=8, factor=10)
def test_explosion_is_caught_at_its_step(stability_run):
    run = stability_run(SPEC, steps=16)
    assert run.alarm_steps == [8]
    assert run.recovered


@pytest.mark.seq_lengths(64, 512)
def test_stable_at_length(stability_run):
    assert stability_run(SPEC, steps=6, batch_size=4).verdict == "stable"


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.throughput(batch_size=8, seq_len=256)
def test_throughput(throughput, mode):
    throughput(SPEC, mode=mode)
