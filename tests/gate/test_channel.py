"""Messages between the gate and a side."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.gate.side.channel import Channel, ChannelClosedError


@pytest.fixture
def ends():
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


@given(
    st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.floats(allow_nan=False)), max_size=5)
)
def test_what_is_sent_arrives_in_its_order(messages):
    one, other = map(Channel, socket.socketpair())
    try:
        for message in messages:
            one.send(message)
        assert [other.receive(1.0) for _ in messages] == messages
        assert other.receive(0.0) is None
    finally:
        one.close()
        other.close()


def test_a_message_in_pieces():
    near, far = socket.socketpair()
    channel = Channel(far)
    try:
        near.sendall(b'{"calls"')
        assert channel.receive(0.01) is None
        near.sendall(b': 3}\n{"mem')
        assert channel.receive(1.0) == {"calls": 3}
        assert channel.receive(0.0) is None
        near.sendall(b'ory": true}\n')
        assert channel.receive(1.0) == {"memory": True}
    finally:
        near.close()
        channel.close()


def test_long_messages(ends):
    one, other = ends
    one.send({"detail": "x" * 100_000})
    assert other.receive(5.0) == {"detail": "x" * 100_000}


def test_the_other_end_is_gone(ends):
    one, other = ends
    other.close()
    with pytest.raises(ChannelClosedError):
        one.receive()
    with pytest.raises(ChannelClosedError):
        one.send({"x": "y" * 10_000_000})
