"""`dynamo task`: what the store has, without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynamo_local.cli.jobs import task
from dynamo_local.core.async_tasks.records import TaskHead, TaskResult
from state.async_tasks.store import TaskStore, new_task_id
from state.paths import StatePaths


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskStore:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    return TaskStore(StatePaths(tmp_path, "n"))


def order(store: TaskStore, owner: str, at: float) -> str:
    head = TaskHead(
        task=new_task_id(at),
        model="chat",
        path="/v1/completions",
        priority=100,
        created_at=int(at),
        callback_url="http://user.example/secret?x=1",
        callback_auth="Basic c2VjcmV0",
    )
    store.create(owner, head, b'{"prompt": "private"}')
    return head.task


def run(*arguments: str) -> str:
    result = CliRunner().invoke(task, arguments, standalone_mode=False)
    assert result.exception is None, result.exception
    return result.output


def test_tasks_are_listed_and_shown_without_what_is_their_owners(store: TaskStore) -> None:
    old, new = order(store, "alice#1", 1000.0), order(store, "", 2000.0)
    listed = json.loads(run("list", "--json"))
    assert [(each["task_id"], each["owner"], each["status"]) for each in listed] == [
        (new, "-", "PENDING"),
        (old, "alice", "PENDING"),
    ]
    taken = store.take("alice#1", old)
    assert taken is not None
    taken.record(TaskResult(200, b'"private"', 1001))
    taken.end()
    assert old not in run("list")
    assert old in run("list", "--all")
    shown = run("show", old) + run("show", old, "--json") + run("list", "--all", "--json")
    assert "status 200, 9 bytes" in shown
    assert not any(secret in shown for secret in ("private", "c2VjcmV0", "x=1"))


def test_a_task_is_cancelled_by_whoever_has_it_next(store: TaskStore) -> None:
    name = order(store, "alice#1", 1000.0)
    assert run("cancel", name) == f"{name} is being cancelled\n"
    assert store.look().cancelled == {name}


def test_each_owner_has_a_secret_that_stays(store: TaskStore) -> None:
    order(store, "", 1000.0)
    mine = run("secret")
    assert mine.startswith("whsec_")
    assert run("secret") == mine
    assert json.loads(run("secret", "api-key-file", "--json"))["secret"] != mine.strip()
    result = CliRunner().invoke(task, ["secret", "nobody"], standalone_mode=False)
    assert "there is no key 'nobody'" in str(result.exception)
