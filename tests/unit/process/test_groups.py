"""Killing a process group whose members fork while they are listed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dynamo_local.process import groups


def test_a_child_that_one_look_has_missed_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that was forked after the listing had passed it, by a parent that was gone before the listing came to
    it."""
    looks: Iterator[tuple[int, ...]] = iter([(10,), (), (11,), (), ()])
    killed: list[int] = []
    monkeypatch.setattr(groups, "members", lambda _: next(looks))
    monkeypatch.setattr("os.kill", lambda pid, _: killed.append(pid))
    groups.kill_group(10)
    assert killed == [10, 11]
