"""Calls of Ray that nobody waits for any more, and its groups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from dynamo_local.core.errors import SupervisorError
from dynamo_local.ray import groups
from dynamo_local.ray.cluster import Notebook, RayCluster
from dynamo_local.ray.groups import Groups
from dynamo_local.ray.placing import GPU, Group


class SlowGroups:
    """Ray's head is away until `back` is set."""

    def __init__(self) -> None:
        self.back = threading.Event()
        self.begun: list[str] = []

    def release(self, name: str) -> None:
        self.begun.append(name)
        self.back.wait()


@pytest.fixture
def slow() -> Iterator[SlowGroups]:
    found = SlowGroups()
    yield found
    found.back.set()


async def test_a_call_that_was_given_up_ends_before_the_next_of_its_name_begins(
    slow: SlowGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayCluster._call, "__kwdefaults__", {"within_s": 0.05})
    cluster = RayCluster(cast(Groups, slow), Notebook("far"))
    for _ in range(3):
        with pytest.raises(SupervisorError, match=r"Ray has not answered within 0\.05 s: release w"):
            await cluster.release("w")
    with pytest.raises(SupervisorError):
        await cluster.release("v")
    assert slow.begun == ["w", "v"]
    monkeypatch.setattr(RayCluster._call, "__kwdefaults__", {"within_s": 60.0})
    slow.back.set()
    await asyncio.gather(cluster.release("w"), cluster.release("v"))
    assert sorted(slow.begun) == ["v", "v", "w", "w"]


def test_gpus_of_a_group_are_not_those_of_an_earlier_one_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Keeper:
        """An actor: its ids are its number."""

        def __init__(self, _: type) -> None:
            self.devices = SimpleNamespace(remote=lambda: [str(len(asked))])

        def options(self, name: str, **_: Any) -> Keeper:
            asked.append(name)
            return self

        def remote(self) -> Keeper:
            return self

    monkeypatch.setattr(ray, "remote", Keeper)
    monkeypatch.setattr(ray, "get", lambda ids, timeout: ids)
    monkeypatch.setattr(groups, "_handle", lambda group: group)
    monkeypatch.setattr(groups, "PlacementGroupSchedulingStrategy", lambda group, _: group)
    found = Groups("far")
    first, second = (Group("dynamo/far/w", "n1", {GPU: 1}, key=key) for key in ("11", "22"))
    assert found._ids(first) == (1,)
    assert found._ids(first) == (1,)
    # Another thread had the first one in its hands when it was removed.
    assert found._ids(second) == (2,)
    assert asked == ["dynamo/far/w/11", "dynamo/far/w/22"]


def test_nodes_that_cannot_be_told_are_an_error_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise ConnectionError("the head is away")

    monkeypatch.setattr(groups, "_nodes", away)
    with pytest.raises(SupervisorError, match="Ray cannot tell its nodes: the head is away"):
        Groups("far").nodes()
