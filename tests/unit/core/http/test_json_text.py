"""Encodings of JSON: read as Python's reader reads them, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.http.json_text import as_utf8

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(content=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers(), max_size=3))
def test_every_encoding_of_json_becomes_utf_8(encoding: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, ensure_ascii=False)
    assert as_utf8(text.encode(encoding)) == text.encode()


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_python_reads_them_or_refused(body: bytes) -> None:
    try:
        text = as_utf8(body)
    except UnicodeDecodeError:
        return
    assert text == body or text.decode() == body.decode(json.detect_encoding(body))
