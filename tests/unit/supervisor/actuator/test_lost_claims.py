"""A statefile that was damaged is written anew as it was a second ago: a claim that is younger is lost."""

from __future__ import annotations

import itertools

import pytest

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.planning.actions import Action, AddWorker, DeviceLimits, RemoveWorker, Restart
from tests.unit.supervisor.actuator.fake_ports import FakePorts, blueprint

WORKER = "dynamo_VllmWorker"


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
