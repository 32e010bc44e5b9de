"""The client's reading of streamed answers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.client import Answer, ChunkedBody

EVENTS = [b'data: {"choices":[{"text":"a"}]}', b"data: x", b"data: [DONE]"]


def chunked(body: bytes, cuts: list[int]) -> bytes:
    """The body in chunks that end at the cuts."""
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    chunks = [body[start:end] for start, end in itertools.pairwise(edges)]
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@given(st.lists(st.integers(0, 200), max_size=6), st.lists(st.integers(0, 300), max_size=8))
def test_events_are_whole_however_they_are_cut(chunk_cuts: list[int], packet_cuts: list[int]) -> None:
    wire = chunked(b"".join(event + b"\n\n" for event in EVENTS), chunk_cuts)
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in packet_cuts)})
    body = ChunkedBody()
    found = [event for start, end in itertools.pairwise(edges) for event in body.feed(wire[start:end])]
    assert found == EVENTS
    assert body.complete


def test_bytes_that_are_no_chunk_are_an_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        ChunkedBody().feed(b"not a size\r\n")


def test_tokens_of_a_time_are_a_share_of_all() -> None:
    answer = Answer(0.0, times=[1.0, 2.0, 3.0, 4.0], tokens=8)
    assert answer.tokens_between(2.0, 4.0) == 4.0
    assert Answer(0.0).tokens_between(0.0, 1.0) == 0.0
    assert answer.ttft_s == 1.0


def test_the_text_of_kept_events() -> None:
    assert Answer(0.0, events=[b'data: {"choices":[{"text":"a"}]}', b'data: {"choices":[{"text":"b"}]}']).text() == "ab"


def test_the_tokens_of_kept_events() -> None:
    events = [b'data: {"choices":[{"text":"a","token_ids":[1,2]}]}', b'data: {"choices":[{"text":"b"}]}']
    assert Answer(0.0, events=events).token_ids() == [1, 2]
