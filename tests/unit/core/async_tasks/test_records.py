"""The journal of a task: what it tells, and that garbage is told from it."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.answers.records import Kind, record, records_in
from dynamo_local.core.async_tasks.records import (
    Call,
    TaskHead,
    TaskResult,
    begun,
    called,
    ended,
    failure,
    started,
    task_in,
)
from dynamo_local.core.errors import DecodeError

HEAD = TaskHead(task="task_" + "0" * 32, model="chat", path="/v1/completions", priority=100, created_at=1)
calls = st.lists(st.builds(Call, st.text(max_size=9), st.booleans(), st.booleans(), st.integers(0, 10)), max_size=3)


@given(
    body=st.binary(max_size=50),
    is_started=st.booleans(),
    result=st.none() | st.builds(TaskResult, st.integers(100, 599), st.binary(max_size=50), st.integers(0, 10)),
    made=calls,
    url=st.sampled_from(("", "http://r/")),
)
def test_a_journal_tells_what_was_written(
    body: bytes, is_started: bool, result: TaskResult | None, made: list[Call], url: str
) -> None:
    head = TaskHead(task=HEAD.task, model="m", path="/x", priority=-1, created_at=2, callback_url=url)
    data = begun(head, body) + (started() if is_started else b"")
    if result is not None:
        # The first result is the result.
        data += ended(result) + ended(failure(500, "another", 3))
    task = task_in(records_in(data + b"".join(map(called, made))))
    assert (task.head, task.body, task.is_started, task.result, task.calls) == (
        head,
        body,
        is_started,
        result,
        tuple(made),
    )
    expected = "STARTED" if is_started else "PENDING"
    if result is not None:
        expected = "SUCCESS" if result.status < 400 else "FAILURE"
    assert task.status == expected
    assert (task.callback is None) == (url == "")
    assert task.has_ended == (result is not None and (not url or (bool(made) and made[-1].is_last)))
    json.dumps(task.shown())


@given(st.binary(max_size=200), st.sampled_from((Kind.BEGUN, Kind.RESULT, Kind.CALLED)))
def test_garbage_raises_decode_error_alone(garbage: bytes, kind: Kind) -> None:
    whole = b"" if kind is Kind.BEGUN else begun(HEAD, b"{}")
    with suppress(DecodeError):
        task_in(records_in(whole + record(kind, garbage)))
    with pytest.raises(DecodeError):
        task_in(records_in(garbage))


def test_the_message_of_a_failure_is_its_traceback() -> None:
    task = task_in(records_in(begun(HEAD, b"{}") + ended(failure(404, "no such model", 5))))
    assert task.shown() == {
        "task_id": HEAD.task,
        "status": "FAILURE",
        "result": None,
        "traceback": "no such model",
        "status_code": 404,
    }
