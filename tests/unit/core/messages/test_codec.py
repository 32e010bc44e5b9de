"""decode(encode(m)) == m for every message; whatever else arrives raises DecodeError and nothing but it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.messages.presence import LeaseRevoked
from dynamo_local.core.messages.routing import Assignment
from dynamo_local.core.messages.work import Cancel, Submit, TokenBatch, Work
from tests.unit.core.messages.messages_strategies import BY_KIND, any_message

kinds = st.sampled_from(list(BY_KIND))


def test_what_is_generated_is_every_message_by_its_receivers_type() -> None:
    assert {Work, Assignment, TokenBatch, LeaseRevoked} <= set(BY_KIND)
    assert len(BY_KIND) >= 36
    assert not {Submit, Cancel} & set(BY_KIND)


@given(any_message)
def test_a_message_survives_the_bus(kind_and_message: tuple[Any, Any]) -> None:
    kind, message = kind_and_message
    assert codec.decode(codec.encode(message), kind) == message


@given(kinds, st.binary(max_size=200))
def test_random_bytes_raise_only_decode_error(kind: Any, data: bytes) -> None:
    with pytest.raises(DecodeError):
        codec.decode(data, kind)


@given(any_message, st.data())
def test_a_truncated_message_raises_decode_error(kind_and_message: tuple[Any, Any], data: st.DataObject) -> None:
    kind, message = kind_and_message
    encoded = codec.encode(message)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(DecodeError):
        codec.decode(encoded[:cut], kind)


@given(any_message, st.data())
def test_a_damaged_message_is_a_message_or_a_decode_error(
    kind_and_message: tuple[Any, Any], data: st.DataObject
) -> None:
    kind, message = kind_and_message
    encoded = bytearray(codec.encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.decode(bytes(encoded), kind)
    except DecodeError:
        return


@pytest.mark.parametrize("version", [0, codec.VERSION - 1, codec.VERSION + 1, 2**40])
@pytest.mark.parametrize("message", [LeaseRevoked(lease="a"), TokenBatch("w", 1, ()), Cancel(requests=())])
def test_another_version_is_refused(message: Any, version: int) -> None:
    kind: Any = Work if isinstance(message, Cancel) else type(message)
    with pytest.raises(DecodeError, match=f"version {version}"):
        codec.decode(msgspec.msgpack.encode((version, message)), kind)


def test_another_version_is_refused_whatever_its_messages_look_like() -> None:
    with pytest.raises(DecodeError, match="version 99"):
        codec.decode(msgspec.msgpack.encode((99, {"anything": 1})), Assignment)


def test_a_message_without_an_envelope_is_refused() -> None:
    with pytest.raises(DecodeError, match="not a LeaseRevoked"):
        codec.decode(msgspec.msgpack.encode(LeaseRevoked(lease="a")), LeaseRevoked)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x81\xa6worker" + b"\xdb\xff\xff\xff\xff", id="string longer than memory"),
        pytest.param(b"\x82\xa4type\xa6cancel\xa8requests\xdd\xff\xff\xff\xff", id="array longer than memory"),
        pytest.param(b"\x82\xa4type\xa6submit\xa8sampling" + b"\x91" * 100_000, id="nested without end"),
        pytest.param(b"\x81\xa4type\xa5other", id="unknown tag"),
    ],
)
def test_hostile_bytes_raise_decode_error(data: bytes) -> None:
    for kind in (Work, Assignment, TokenBatch):
        for hostile in (data, b"\x92" + msgspec.msgpack.encode(codec.VERSION) + data):
            with pytest.raises(DecodeError):
                codec.decode(hostile, kind)


def test_an_unknown_field_is_passed_over() -> None:
    data = msgspec.msgpack.encode((codec.VERSION, {"worker": "w", "news": 1}))
    assert codec.decode(data, Assignment) == Assignment(worker="w")


def test_sampling_parameters_are_carried_unread() -> None:
    submit = Submit("r", 1, "f", [1], msgspec.Raw(msgspec.msgpack.encode({"anything": [1, 2]})))
    decoded: Work = codec.decode(codec.encode(submit), Work)
    assert isinstance(decoded, Submit)
    assert msgspec.msgpack.decode(decoded.sampling) == {"anything": [1, 2]}
