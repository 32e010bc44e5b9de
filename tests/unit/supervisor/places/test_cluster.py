"""The owner of a namespace in a cluster: claims, takeovers, letting go."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping

import pytest

from dynamo_local.bus.jetstream.owner_record import RevisionError
from dynamo_local.core.errors import NamespaceBusyError, UsageError
from dynamo_local.core.process.ownership import Owner, Record
from dynamo_local.supervisor.places.cluster import check_environment, connect
from dynamo_local.supervisor.server.ownership import ClusterRecord, Ownership
from tests.memory_cluster import MemoryCluster
from tests.unit.supervisor.recording import RecordingReport

FIRST, SECOND = Owner("1", "here", "first-host", 0.2), Owner("2", "there", "second-host", 0.2)


class SlowCluster(MemoryCluster):
    """Lets others be faster."""

    async def notes(self) -> Mapping[str, bytes]:
        found = await super().notes()
        await asyncio.sleep(0)
        return found


def cluster() -> SlowCluster:
    return SlowCluster({})


async def test_each_change_replaces_one_revision() -> None:
    nodes = cluster()
    record = ClusterRecord(nodes)
    assert await record.read() == Record(0, None)
    assert await record.replace(0, FIRST) == 1
    assert await record.replace(1, FIRST) == 2
    assert await record.read() == Record(2, FIRST)
    assert len(nodes.left) == 1
    for former in (0, 1):
        with pytest.raises(RevisionError):
            await record.replace(former, SECOND)
    assert await record.read() == Record(2, FIRST)
    assert len(nodes.left) == 1
    await record.replace(2, None)
    assert await record.read() == Record(3, None)


async def test_of_two_that_replace_one_revision_one_fails() -> None:
    record = ClusterRecord(cluster())
    outcomes = await asyncio.gather(*(record.replace(0, one) for one in (FIRST, SECOND)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(RevisionError) == 1


async def test_a_second_head_is_refused_while_the_first_one_beats_and_takes_over_when_it_is_silent() -> None:
    record, report = ClusterRecord(cluster()), RecordingReport()
    first, second = (
        Ownership("far", one, report, where="in this cluster", renew_every_s=0.02) for one in (FIRST, SECOND)
    )
    await first.confirm(record)
    keeping = asyncio.create_task(first.keep(record))
    with pytest.raises(NamespaceBusyError, match="far in this cluster belongs to a server on first-host"):
        await second.confirm(record)
    keeping.cancel()
    await second.confirm(record)
    with pytest.raises(NamespaceBusyError, match="second-host"):
        await first.confirm(record)
    # The next server of the same place does not wait.
    await Ownership("far", Owner("3", "there", "second-host", 3600.0), report).confirm(record)


async def test_who_has_let_go_does_not_take_it_again() -> None:
    record, report = ClusterRecord(cluster()), RecordingReport()
    first = Ownership("far", FIRST, report, renew_every_s=0.0)
    await first.confirm(record)
    keeping = asyncio.create_task(first.keep(record))
    await asyncio.sleep(0)
    await first.release(record)
    for _ in range(20):
        await asyncio.sleep(0)
    keeping.cancel()
    assert (await record.read()).owner is None


# Clusters by name: each is imported only where it is used.


def test_a_server_on_this_machine_imports_nothing_of_a_cluster() -> None:
    program = (
        "import dynamo_local.cli.serve_output, dynamo_local.supervisor.server.server, sys\n"
        "import dynamo_local.supervisor.server.nodes, dynamo_local.supervisor.node.server\n"
        "print([name for name in sys.modules if name == 'ray' or name.startswith(('ray.', 'dynamo_local.ray'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_unknown_environments_are_refused() -> None:
    assert [check_environment(name) for name in ("local", "ray", "a.b:C")] == ["local", "ray", "a.b:C"]
    with pytest.raises(UsageError, match="there are: local, ray; or MODULE:CLASS"):
        check_environment("kubernetes")


@pytest.mark.parametrize("name", ["no.such.module:Cluster", "json:Cluster"])
async def test_what_cannot_be_imported_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(UsageError, match=f"environment {name} cannot be used"):
        await connect(name, "dynamo", None)
