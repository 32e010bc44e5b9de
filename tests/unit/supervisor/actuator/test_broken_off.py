"""Whatever change is broken off between whichever two steps: one look finishes it. So it is where its claim is lost: a
statefile that was damaged is written anew as it was a second ago."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.names import MAIN, endpoint_of
from dynamo_local.core.planning.actions import Action, AddWorker, DeviceLimits, RemoveWorker, Restart, SwitchRole
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.actuator.commands import plan_drain
from state.statefile.model import decode, encode
from state.statefile.transitions import set_role, taken
from tests.unit.supervisor.actuator.fake_ports import (
    READY_S,
    FakePorts,
    Killed,
    Start,
    blueprint,
    revision_of,
    template,
)

NO_LIMIT = DeviceLimits()
WORKER, SECOND = "dynamo_VllmWorker", "dynamo_VllmWorker_1"
ADD = AddWorker("decode", "VllmWorker")
ADD_TO_CHAT = AddWorker("decode", "VllmWorker", "chat@1")

Work = Callable[[LocalActuator], Awaitable[object]]


class Server(FakePorts):
    """A frontend, a router and two workers run, and two of an endpoint's revision. Roles change as they are asked."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.plan = blueprint(slots).with_revision([template("VllmWorker", "decode", 1, "chat@1")])
        for service, role, *devices in (("Frontend", "frontend"), ("Router", "router"), ("VllmWorker", "decode", 0)):
            self.running(str(service), str(role), *map(int, devices))
        asyncio.run(self.actuator(self.plan).apply(ADD, NO_LIMIT))
        asyncio.run(self.actuator(self.plan, "chat").apply_all([ADD_TO_CHAT] * 2, NO_LIMIT))
        self.checks.append(self.check)

    def check(self) -> None:
        """Holds at every step: nothing runs on what it has not claimed, and the statefile can be read."""
        for name, process in self.processes.items():
            assert self.state.components[name].devices == process.devices
            assert self.held.issuperset(process.devices)
        assert decode(encode(self.state)) == self.state

    def check_finished(self) -> None:
        """Nothing is held without a process, nothing runs without a claim, and no change is under way."""
        self.check()
        held = {name for name, component in self.state.components.items() if component.holds}
        assert held == self.processes.keys() == self.watchers.keys()
        assert [name for name, c in self.state.components.items() if c.phase is not None] == []
        # What is not claimed any more, the server lets go of at its next look, if nobody has asked for it.
        assert self.held.issuperset(taken(self.state))

    def number(self, endpoint: str = MAIN) -> int:
        """The workers of an endpoint that run."""
        mine = [name for name in self.processes if endpoint_of(revision_of(name)) == (endpoint or MAIN)]
        return sum("Worker" in name for name in mine)

    async def changed(self, within_s: float) -> None:
        await super().changed(max(within_s, READY_S / 3))

    async def change_role(self, watcher: str, role: str) -> None:
        self.step()
        lease = self.processes[watcher].lease
        assert lease is not None
        self.state = set_role(self.state, watcher, lease, role)
        self.step()


def applied(*changes: Action) -> Work:
    async def work(actuator: LocalActuator) -> None:
        for change in changes:
            await actuator.apply(change, NO_LIMIT)

    return work


def together(*changes: Action) -> Work:
    return lambda actuator: actuator.apply_all(changes, NO_LIMIT)


def drained(fake: Server) -> Work:
    return applied(*plan_drain(fake.state, fake.plan, WORKER, even_the_last=False))


KINDS: dict[str, tuple[str, int, Callable[[Server], Work], set[int]]] = {
    "add": (MAIN, 8, lambda _: applied(ADD), {2, 3}),
    "remove": (MAIN, 8, lambda _: applied(RemoveWorker(SECOND, "decode")), {1, 2}),
    "drain": (MAIN, 8, drained, {1, 2}),
    "restart by another": (MAIN, 8, lambda _: applied(Restart(WORKER, "decode")), {2}),
    "restart in place": (MAIN, 4, lambda _: applied(Restart(WORKER, "decode")), {2}),
    "restart of another service": ("", 8, lambda _: applied(Restart("dynamo_Router", "router")), {2}),
    "role": (MAIN, 8, lambda _: applied(SwitchRole(WORKER, "decode", "prefill")), {2}),
    "side by side": (
        *("chat", 8),
        lambda _: together(ADD_TO_CHAT, RemoveWorker("dynamo_chat@1_VllmWorker", "decode"), ADD_TO_CHAT),
        {1, 2, 3},
    ),
    "end of a revision": ("chat", 8, lambda _: lambda actuator: actuator.end_revision("chat@1"), {0, 1, 2}),
}
"""By kind of change: the endpoint, devices, the work, and the numbers of workers that it may leave."""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "cancelled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_look_finishes_what_started_well(kind: str, is_killed: bool) -> None:
    endpoint, slots, work_on, may_leave = KINDS[kind]
    numbers = {fake.number(endpoint) for fake in broken_off(work_on, endpoint, slots, is_killed=is_killed)}
    assert numbers <= may_leave
    assert len(numbers) > 1 or len(may_leave) == 1, "it was broken off too early each time, or too late"


@pytest.mark.parametrize("start", ["dies", "hangs"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("remove", "drain", "role")])
def test_a_look_finishes_what_does_not_start(kind: str, start: Start) -> None:
    endpoint, slots, work_on, _ = KINDS[kind]
    for _ in broken_off(work_on, endpoint, slots, start=start):
        pass


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "cancelled"])
def test_what_the_look_itself_was_finishing_is_finished_by_the_next(is_killed: bool) -> None:
    for first in range(1, 40, 6):
        for fake in broken_off(KINDS["restart by another"][2], MAIN, 8, first=first, is_killed=is_killed):
            assert fake.number() == 2


def test_a_revision_that_was_broken_off_ends_at_last() -> None:
    for fake in broken_off(KINDS["end of a revision"][2], "chat", 8):
        asyncio.run(fake.actuator(fake.plan, "chat").end_revision("chat@1"))
        assert not [n for n in (*fake.state.components, *fake.watchers, *fake.processes) if "chat@1" in n]


def test_starts_that_are_broken_off_leave_those_that_are_ready() -> None:
    def work_on(_: Server) -> Work:
        async def work(actuator: LocalActuator) -> None:
            await actuator.break_off("chat@1")

        return work

    def left_starting(fake: Server) -> None:
        fake.start = "hangs"
        assert is_broken_off(fake, fake.actuator(fake.plan, "chat").apply(ADD_TO_CHAT, NO_LIMIT), 30, is_killed=True)
        fake.start = "well"

    for fake in broken_off(work_on, "chat", 8, before=left_starting):
        assert fake.number("chat") in (2, 3)


def broken_off(
    work_on: Callable[[Server], Work],
    endpoint: str,
    slots: int,
    *,
    is_killed: bool = True,
    start: Start = "well",
    first: int | None = None,
    before: Callable[[Server], None] = lambda _: None,
) -> Any:
    """Servers of which the work was broken off, each after one step more, and one look has finished what was left.
    `first`: the step after which the first look is broken off, too."""
    for steps in itertools.count():
        fake = Server(slots)
        before(fake)
        fake.start = start
        work = work_on(fake)(fake.actuator(fake.plan, endpoint))
        is_done = not is_broken_off(fake, work, steps, is_killed=is_killed)
        if first is not None:
            is_broken_off(fake, fake.actuator(fake.plan, endpoint).reconcile(), first, is_killed=is_killed)
        asyncio.run(fake.actuator(fake.plan, endpoint).reconcile())
        fake.check_finished()
        assert asyncio.run(fake.actuator(fake.plan, endpoint).reconcile()) == ()
        yield fake
        if is_done:
            assert steps > 2
            return


def is_broken_off(fake: Server, work: Awaitable[object], steps: int, *, is_killed: bool) -> bool:
    """Do the work until it has taken so many steps. Returns whether it had not come to its end by then."""
    left = iter(range(steps))

    async def until() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def look() -> None:
            if next(left, None) is None:
                loop.call_soon(task.cancel)

        fake.checks += [] if is_killed else [look]
        await task

    fake.dies_after = steps if is_killed else None
    try:
        asyncio.run(until())
    except (Killed, asyncio.CancelledError):
        return True
    finally:
        fake.dies_after = None
        del fake.checks[1:]
    return False


@pytest.mark.parametrize("action", [AddWorker("decode"), RemoveWorker(WORKER, "decode"), Restart(WORKER, "decode")])
async def test_a_change_whose_claim_is_lost_fails_and_what_it_has_started_is_ended(action: Action) -> None:
    for step in itertools.count():
        fake = FakePorts()
        fake.running("VllmWorker", "decode", 0)
        before, steps = fake.state, itertools.count()

        def forget(step: int = step, fake: FakePorts = fake, before: object = before) -> None:
            if next(steps) == step:  # noqa: B023
                fake.state = before  # type: ignore[assignment]

        fake.checks.append(forget)
        actuator = fake.actuator(blueprint())
        try:
            outcome = await actuator.apply(action, DeviceLimits())
        except DynamoError:
            pass
        else:
            if next(steps) < step:
                assert outcome.done
                return
        fake.checks.clear()
        await actuator.reconcile()
        held = {name for name, component in fake.state.components.items() if component.holds}
        assert held == fake.processes.keys() == fake.watchers.keys()
