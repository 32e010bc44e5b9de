from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.bus.rpc import (
    Alive,
    Begin,
    Control,
    Credit,
    End,
    Frame,
    Hangup,
    NotTaken,
    Reply,
    Taken,
)
from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError

seqs = st.integers(0, 2**63 - 1)
frames = st.one_of(
    st.builds(Taken),
    st.builds(NotTaken, st.text()),
    st.builds(Reply, seqs, st.binary()),
    st.builds(End, seqs, st.none() | st.text()),
    st.builds(Alive, seqs),
)
controls = st.builds(Credit, seqs) | st.builds(Hangup)


@given(frames, controls, st.builds(Begin, st.text(), st.text(), st.binary()))
def test_messages_survive_the_wire(frame: Any, control: Any, begin: Begin) -> None:
    assert codec.decode(codec.encode(frame), Frame) == frame
    assert codec.decode(codec.encode(control), Control) == control
    assert codec.decode(codec.encode(begin), Begin) == begin


@given(st.binary())
def test_garbage_raises_decode_errors_only(data: bytes) -> None:
    for kind in (Frame, Control, Begin):
        with pytest.raises(DecodeError):
            codec.decode(data, kind)


@given(frames)
def test_frames_are_no_controls(frame: Any) -> None:
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(frame), Control)
