"""What an engine would open to others without authentication is refused: a port, a publisher."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.kv import network
from dynamo_local.engine.kv.network import check_events_config, other_users, why_port_forbidden


def user(name: str, uid: int, shell: str = "/bin/bash") -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", "/", shell))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets who may log in, and whose processes there are."""

    def be(known: list[pwd.struct_passwd], owners: list[int], me: int = 1000) -> None:
        monkeypatch.setattr(pwd, "getpwall", lambda: known)
        monkeypatch.setattr(network, "_owners", lambda _: iter(owners))
        monkeypatch.setattr(os, "geteuid", lambda: me)

    return be


SYSTEM = [user("root", 0), user("daemon", 1, "/usr/sbin/nologin"), user("nobody", 65534, "/bin/sh"), user("me", 1000)]


def test_root_services_and_oneself_are_no_others(machine: Any) -> None:
    machine([*SYSTEM, user("postgres", 110), user("backup", 1005, "/bin/false")], [0, 1, 110, 65534, 1000])
    assert other_users() == []


@pytest.mark.parametrize("me", [0, 1000])
def test_who_can_log_in_or_has_a_process_is_one(machine: Any, me: int) -> None:
    """Users need not be in the table: a directory service need not list them."""
    machine([*SYSTEM, user("anna", 1001)], [1002], me)
    assert other_users() == sorted({"1002", "anna", *(["me"] if me == 0 else [])})


def test_the_owners_of_processes_are_found() -> None:
    owners = list(network._owners(Path("/proc").iterdir()))
    assert os.geteuid() in owners


def test_a_gpu_lends_no_kv_beside_others_unless_they_are_trusted() -> None:
    why = why_port_forbidden(["anna", "ben", "carl", "dora"], trusted=False)
    assert why is not None
    assert "(anna, ben, carl)" in why
    assert "trust-local-users" in why
    assert why_port_forbidden(["anna"], trusted=True) is None
    assert why_port_forbidden([], trusted=False) is None


def config(endpoint: str, replay: str | None = None, *, publisher: str = "zmq", on: bool = True) -> SimpleNamespace:
    return SimpleNamespace(enable_kv_cache_events=on, publisher=publisher, endpoint=endpoint, replay_endpoint=replay)


@pytest.mark.parametrize(
    "refused",
    [
        config("tcp://*:5557"),
        config("tcp://0.0.0.0:5557"),
        config("tcp://[::]:5557"),
        config("ipc:///private/events", "tcp://*:5558"),
    ],
)
def test_events_are_not_published_to_everybody(refused: SimpleNamespace) -> None:
    with pytest.raises(EngineError, match="whoever reaches this machine"):
        check_events_config(refused)


@pytest.mark.parametrize(
    "taken",
    [
        None,
        config("tcp://*:5557", on=False),
        config("tcp://*:5557", publisher="null"),
        config("ipc:///private/events", "ipc:///private/replay"),
        config("tcp://127.0.0.1:5557"),
    ],
)
def test_a_subscriber_of_the_user_s_own_gets_them(taken: SimpleNamespace | None) -> None:
    check_events_config(taken)
