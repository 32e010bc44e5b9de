"""Encodings of JSON: read as Python's reader reads them, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.control.operations import fields_of
from dynamo_local.core.answers.requests import asking_fields
from dynamo_local.core.async_tasks import callbacks
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.json_text import as_line, as_utf8, boolean, whole_number
from dynamo_local.core.stored import batches

DOORS: Mapping[str, Callable[[bytes], Any]] = {
    "batches": lambda body: batches.order_of(body, "batch_1", "alice", 1000.0),
    "tasks": lambda body: callbacks.order_of(body, "chat"),
    "answers that are kept": asking_fields,
    "the control API": fields_of,
}
ORDER: Mapping[str, Any] = {
    "batches": {"input_file_id": "\u00e9", "endpoint": "/v1/completions", "completion_window": "24h"},
    "tasks": {"args": {"prompt": "\u00e9"}},
}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(content=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers(), max_size=3))
def test_every_encoding_of_json_becomes_utf_8(encoding: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, ensure_ascii=False)
    assert as_utf8(text.encode(encoding)) == text.encode()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("door", DOORS)
def test_every_door_reads_every_encoding(door: str, encoding: str) -> None:
    text = json.dumps(ORDER.get(door, {"background": True, "input": "\u00e9"}), ensure_ascii=False)
    read = DOORS[door](text.encode())
    assert not isinstance(read, Refusal | None)
    assert DOORS[door](text.encode(encoding)) == read


@pytest.mark.parametrize("door", ["batches", "tasks"])
def test_bytes_that_are_no_text_are_told(door: str) -> None:
    for body in (b"\xff\xfe{", b'{"\xff": 1}', b"\0\0\0", b""):
        with pytest.raises(ConfigError, match="cannot be read"):
            DOORS[door](body)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_python_reads_them_or_refused(body: bytes) -> None:
    try:
        text = as_utf8(body)
    except UnicodeDecodeError:
        return
    assert text == body or text.decode() == body.decode(json.detect_encoding(body))


VALUES = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from([[], {}, [True], 10**400, 1e300])
)
WORDS = st.sampled_from(
    ["true", "YES", "On", "t", "1", "FALSE", "no", "oFF", "f", "0", " true", "2", "", "T\u0131", "1.0"]
)


def read(kind: Any, value: Any) -> Any:
    """The value as pydantic takes it; None: it takes none."""
    try:
        return pydantic.TypeAdapter(kind | None).validate_python(value)
    except pydantic.ValidationError:
        return None


@given(VALUES | WORDS | st.text(max_size=5))
def test_a_boolean_is_what_pydantic_takes_for_one(value: Any) -> None:
    assert boolean(value) is read(bool, value)


@given(
    VALUES
    | st.from_regex(r"\A[ \n]?[+-]?[0-9]{1,3}(\.0{1,3})?[ \t]?\Z")
    | st.sampled_from(["", "x", "1.5", "0x1", "1e2"])
)
def test_a_whole_number_is_what_pydantic_takes_for_one(value: Any) -> None:
    found = whole_number(value)
    # Beyond 64 bits, pydantic takes integers and no floats.
    assert found == read(int, value) or (isinstance(value, float) and abs(value) >= 2**63)
    assert found is None or isinstance(found, int)


@given(st.text())
def test_a_line_is_whole_for_every_reader(text: str) -> None:
    line = as_line(msgspec.json.encode({"text": text}))
    assert json.loads(line) == {"text": text}
    assert (len(line.splitlines()), len(line.decode().splitlines())) == (1, 1)


def test_every_character_that_ends_a_line_is_escaped() -> None:
    text = "".join(map(chr, range(0x10000)[:0xD800])) + "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n"
    assert len(as_line(msgspec.json.encode(text)).decode().splitlines()) == 1
