"""`dynamo queue` and `dynamo config` against a real NATS server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.live_settings import create_settings
from dynamo_local.bus.jetstream.prefill_queue import PrefillConsumer, PrefillQueue, create_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.cli.main import run
from dynamo_local.core.live_settings import SETTINGS
from dynamo_local.core.messages.endpoints import Board, BoardRevision
from dynamo_local.core.messages.work import PrefillJob, QueueLength
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from state.files import make_run_directory
from state.locks import ServerLock
from state.paths import StatePaths
from tests.integration.asked_server import answering
from tests.integration.disaggregation.serve_prefill import CONFIGURED_SIZE, prefill_launch

pytestmark = pytest.mark.integration

LENGTH, SIZE = "max-local-prefill-length", "max-prefill-queue-size"

On = Callable[[Callable[[Bus], Awaitable[None]]], None]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    error: str


@dataclass(frozen=True)
class Cli:
    capsys: pytest.CaptureFixture[str]
    namespace: str

    def __call__(self, *arguments: str) -> Outcome:
        code = run([*arguments, f"--namespace={self.namespace}"])
        captured = self.capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    def refused(self, *arguments: str, code: int = 2) -> str:
        """The one line of error."""
        outcome = self(*arguments)
        assert (outcome.code, outcome.out) == (code, "")
        assert outcome.error.startswith("error: ")
        assert outcome.error.count("\n") == 1
        return outcome.error


@pytest.fixture
def paths(tmp_path: Path, subjects: Subjects, monkeypatch: pytest.MonkeyPatch) -> StatePaths:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    return StatePaths(tmp_path, subjects.namespace)


@pytest.fixture
def cli(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys, paths.namespace)


@pytest.fixture
def server(paths: StatePaths, nats_address: BusAddress) -> Iterator[None]:
    """All that a running server has for these commands, but the queue and the settings."""
    with ServerLock(paths):
        make_run_directory(paths)
        paths.graph_file.write_bytes(prefill_launch(paths.namespace, None).graph.to_json())
        board = Board(revisions=(BoardRevision(FIRST_OF_MAIN, takes_requests=True, served_names=("m",)),))
        paths.board_file.write_bytes(msgspec.json.encode(board))
        with answering(paths, nats_address):
            yield


@pytest.fixture
def on_bus(nats_address: BusAddress, server: None) -> On:
    """Does something on the bus. (Commands have event loops of their own.)"""

    def on(use: Callable[[Bus], Awaitable[None]]) -> None:
        async def connected() -> None:
            bus = await Bus.connect(nats_address, name="test")
            await use(bus)
            await bus.close()

        asyncio.run(connected())

    return on


@pytest.fixture
def queued(on_bus: On, subjects: Subjects) -> tuple[PrefillJob, PrefillJob]:
    """A queue with two jobs; the first, which has expired, is in hand."""
    jobs = (
        PrefillJob("job-1", "request-1", "front", 1234, -1.0),
        PrefillJob("job-2", "request-2", "front", 5678, 600.0),
    )

    async def fill(bus: Bus) -> None:
        await create_prefill_queue(bus, subjects)
        for job in jobs:
            await PrefillQueue(bus, subjects).publish(job)
        assert len(await PrefillConsumer(bus, subjects).take(1, 5)) == 1

    on_bus(fill)
    return jobs


# dynamo queue


def test_jobs_are_shown(cli: Cli, queued: object) -> None:
    lines = cli("queue", "ls").out.splitlines()
    assert lines[0] == "1 waiting, 1 in hand"
    first, second = (line.split() for line in lines[2:])
    assert first[:4] == ["request-1", "1234", "in", "hand"]
    assert first[-3:] == ["expired", "front", "job-1"]
    assert second[:3] == ["request-2", "5678", "waiting"]
    assert cli("queue", "ls", "-n", "1").out.splitlines()[-1] == "and 1 more"


def test_jobs_are_shown_as_json(cli: Cli, queued: object) -> None:
    view = json.loads(cli("queue", "ls", "--json").out)
    assert (view["waiting"], view["in_hand"]) == (1, 1)
    first, second = view["jobs"]
    assert (first["request_id"], first["tokens"], first["state"]) == ("request-1", 1234, "in hand")
    assert first["expires_in_s"] < 0 < second["expires_in_s"] < 600
    assert second["state"] == "waiting"
    assert 0 <= second["age_s"] < 600


def test_looking_at_a_queue_does_not_change_it(cli: Cli, queued: object, on_bus: On, subjects: Subjects) -> None:
    for _ in range(2):
        cli("queue", "ls")

    async def check(bus: Bus) -> None:
        assert await PrefillQueue(bus, subjects).length() == QueueLength(1, 1)

    on_bus(check)


def test_what_is_no_job_is_shown_too(cli: Cli, queued: object, on_bus: On, subjects: Subjects) -> None:
    async def spoil(bus: Bus) -> None:
        await bus.request(subjects.prefill_jobs("normal"), b"nonsense", timeout_s=5)

    on_bus(spoil)
    assert "(not a job)" in cli("queue", "ls").out
    assert json.loads(cli("queue", "ls", "--json").out)["jobs"][-1]["job"] is None


def test_a_purge_asks_first(cli: Cli, queued: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    assert cli("queue", "purge").code != 0
    assert json.loads(cli("queue", "ls", "--json").out)["waiting"] == 1
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "y")
    assert cli("queue", "purge").out.splitlines()[-1] == "dropped 2 jobs"
    assert cli("queue", "ls").out == "0 waiting, 0 in hand\n"


def test_a_purge_need_not_ask(cli: Cli, queued: object) -> None:
    assert cli("queue", "purge", "--yes").out == "dropped 2 jobs\n"
    assert cli("queue", "purge", "-y").out == "dropped 0 jobs\n"


@pytest.mark.parametrize("command", [["queue", "ls"], ["queue", "ls", "--json"], ["queue", "purge"]])
def test_without_a_queue_that_is_said_and_none_is_created(
    cli: Cli, server: None, on_bus: On, subjects: Subjects, command: list[str]
) -> None:
    for _ in range(2):
        assert "has no prefill queue" in cli.refused(*command)


@pytest.mark.parametrize(
    "command", [["queue", "ls"], ["queue", "purge", "--yes"], ["config", "get"], ["config", "set", SIZE, "1"]]
)
def test_without_a_server_that_is_said(cli: Cli, command: list[str]) -> None:
    assert f"no server runs in namespace {cli.namespace}" in cli.refused(*command)


@pytest.mark.parametrize("command", [["queue", "ls"], ["config", "get"], ["config", "set", SIZE, "1"]])
def test_a_bus_that_is_away_is_a_failure(
    cli: Cli, paths: StatePaths, nats_address: BusAddress, command: list[str]
) -> None:
    with ServerLock(paths):
        make_run_directory(paths)
        with answering(paths, nats_address, hears=False):
            assert "the bus does not answer; NATS may be starting" in cli.refused(*command, code=1)


def test_a_server_that_is_only_starting_is_a_failure(cli: Cli, paths: StatePaths) -> None:
    with ServerLock(paths):
        assert "only starting; `dynamo wait`" in cli.refused("queue", "ls", code=1)


# dynamo config


@pytest.fixture
def settings(on_bus: On, subjects: Subjects) -> None:
    async def create(bus: Bus) -> None:
        await create_settings(bus, subjects)

    on_bus(create)


def test_a_value_tells_where_it_comes_from(cli: Cli, settings: None) -> None:
    assert cli("config", "get", LENGTH).out == f"{SETTINGS[LENGTH].default} (default)\n"
    assert cli("config", "get", SIZE).out == f"{CONFIGURED_SIZE} (configuration)\n"
    assert cli("config", "set", SIZE, "17").out == f"{SIZE} is 17 now\n"
    assert cli("config", "set", LENGTH, "0").code == 0
    assert cli("config", "get", SIZE).out == "17 (set)\n"
    assert cli("config", "get", LENGTH).out == "0 (set)\n"


def test_all_settings_are_shown(cli: Cli, settings: None) -> None:
    cli("config", "set", LENGTH, "3")
    rows = json.loads(cli("config", "get", "--json").out)
    assert {row["key"]: (row["value"], row["source"]) for row in rows} == {
        **{name: (known.default, "default") for name, known in SETTINGS.items()},
        LENGTH: (3, "set"),
        SIZE: (CONFIGURED_SIZE, "configuration"),
    }
    assert {line.split()[0] for line in cli("config", "get").out.splitlines()[1:]} == set(SETTINGS)
    assert [row["key"] for row in json.loads(cli("config", "get", SIZE, "--json").out)] == [SIZE]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["get", "seed"], f"there are {LENGTH}, {SIZE}"),
        (["set", "seed", "1"], f"there are {LENGTH}, {SIZE}"),
        (["set", SIZE, "-1"], "a whole number from 0 to"),
        (["set", SIZE, "many"], "a whole number from 0 to"),
        (["set", SIZE], "VALUE is missing"),
    ],
)
def test_what_is_not_allowed_is_refused_and_not_written(
    cli: Cli, settings: None, arguments: list[str], error: str
) -> None:
    assert error in cli.refused("config", *arguments)
    assert "set" not in {row["source"] for row in json.loads(cli("config", "get", "--json").out)}


def test_a_server_without_live_settings_shows_those_that_hold(cli: Cli, server: None) -> None:
    assert cli("config", "get", SIZE).out == f"{CONFIGURED_SIZE} (configuration)\n"
    assert "has no live settings" in cli.refused("config", "set", SIZE, "1")
