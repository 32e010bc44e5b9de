"""State that one engine cannot rebuild counts as lost, whichever worker a request goes to."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core.request.recovery import Survival
from dynamo_local.core.subjects import Subjects
from tests.integration.fleet_of_fakes import FakeFrontend, request, until
from tests.integration.migration.migration_fakes import ENGINE, FakeMigrationTarget

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("rebuilt", "why_not"), [((), None), (("seed",), "the state of seed would be lost"), (("other",), None)]
)
async def test_such_a_request_is_neither_moved_nor_continued(
    frontend: FakeFrontend, bus: Bus, subjects: Subjects, rebuilt: tuple[str, ...], why_not: str | None
) -> None:
    forgetful, other = (FakeMigrationTarget(bus, subjects, lease) for lease in ("a", "b"))
    forgetful.engine = msgspec.structs.replace(ENGINE, forgotten=("seed",))
    await forgetful.start()
    await other.start()
    await frontend.knows(forgetful, other)
    await frontend.dispatcher.submit(request("r1", survival=Survival(rebuilt=rebuilt)))
    live = frontend.dispatcher.table.requests["r1"]
    await until(lambda: live.log.worker is not None)
    holder, elsewhere = (other, forgetful) if live.log.worker == other.lease else (forgetful, other)
    work = await holder.submitted()
    await holder.send(work, 0, 10)
    await frontend.output()
    assert frontend.dispatcher.migrations.why_not(live) == why_not
    await holder.send(work, 1, finish="error", error="broken", failed=True)
    if why_not is None:
        assert (await elsewhere.submitted()).position == 1
    else:
        assert "the state of seed" in ((await frontend.output()).error or "")
