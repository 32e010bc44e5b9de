"""A process that is heard first while it is being ended for a restart in place."""

from __future__ import annotations

from dynamo_local.core.planning.actions import DeviceLimits, Restart
from dynamo_local.supervisor.circus.client import STOPPED
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from tests.unit.state.builders import with_process
from tests.unit.supervisor.actuator.fake_ports import FakePorts, blueprint


class LatePorts(FakePorts):
    """The old process announces itself at the last moment, and is killed."""

    async def end(self, name: str, deadline_s: float) -> None:
        del self.processes[name]
        self.watchers[name] = STOPPED
        self.state = with_process(self.state, name, "late", 4242)

    async def add(self, plan: WatcherPlan) -> None:
        assert self.state.components[plan.name].lease is None
        await super().add(plan)

    def is_ready(self, lease: str) -> bool:
        return lease == "late" or super().is_ready(lease)


async def test_the_old_one_is_not_taken_for_the_new_one() -> None:
    fake = LatePorts()
    fake.running("VllmWorker", "decode", 0)
    change = Restart("dynamo_VllmWorker", "decode", even_the_last=True)
    outcome = await fake.actuator(blueprint(slots=1)).apply(change, DeviceLimits())
    assert outcome.done, outcome
    component = fake.state.components["dynamo_VllmWorker"]
    assert (component.lease, component.phase) == (fake.processes["dynamo_VllmWorker"].lease, None)
