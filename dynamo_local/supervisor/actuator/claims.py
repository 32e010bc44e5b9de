"""What becomes of the statefile when processes are added, removed and restarted, and whether they may be. Pure.

Whatever cannot be done raises UsageError, and nothing has changed then.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from dynamo_local.core.errors import DeviceError, UsageError
from dynamo_local.core.planning.actions import AddWorker, DeviceLimits, RemoveWorker, Restart
from dynamo_local.supervisor.server.blueprint import Blueprint, is_worker
from dynamo_local.supervisor.server.plan import ServiceTemplate, WatcherPlan, plan_watcher
from state.devices import allocate
from state.model import Component, State
from state.transitions import claim, next_watcher, restart, retire, taken


def claim_worker(
    state: State, blueprint: Blueprint, change: AddWorker, limits: DeviceLimits, elsewhere: Mapping[int, str]
) -> tuple[State, WatcherPlan]:
    """Claim name and devices of one more worker, which is marked as starting. `elsewhere`: devices that others on the
    machine hold, with who does."""
    template = _template(blueprint, change)
    plan = _plan_one_more(state, blueprint, template, limits, elsewhere)
    cmd = shlex.join(plan.argv)
    return claim(state, plan.watcher, role=plan.role, cmd=cmd, devices=plan.devices, phase="starting"), plan


def claim_replacement(
    state: State, blueprint: Blueprint, change: Restart, limits: DeviceLimits, elsewhere: Mapping[int, str]
) -> tuple[State, WatcherPlan | None]:
    """Claim name and devices of a worker that takes the place of that one, in the role that it has by now. None for
    what is no worker: there is one of it. Raises DeviceError if no device is free."""
    component = _restartable(state, blueprint, change.watcher)
    if not is_worker(component):
        return state, None
    plan = _plan_one_more(state, blueprint, blueprint.worker(component.component), limits, elsewhere)
    cmd = shlex.join(plan.argv)
    claimed = claim(
        state,
        plan.watcher,
        role=component.role,
        cmd=cmd,
        devices=plan.devices,
        phase="starting",
        replaces=change.watcher,
    )
    return claimed, plan


def mark_restart(state: State, blueprint: Blueprint, watcher: str) -> State:
    """Mark a process as one that is to be restarted under its name. What could not be started before, and is no worker,
    is claimed again."""
    component = _restartable(state, blueprint, watcher)
    if component.holds:
        return restart(state, watcher)
    return claim(state, watcher, role=component.role, cmd=component.cmd, phase="restarting")


def plan_in_place(state: State, blueprint: Blueprint, watcher: str) -> WatcherPlan:
    """The next process of an entry, on the devices that it holds."""
    component = state.components[watcher]
    template = blueprint.restartable(component.component)
    return plan_watcher(template, component.watcher, blueprint.inventory, component.devices)


def retire_worker(state: State, change: RemoveWorker) -> State:
    """Mark a worker as one that is to end."""
    component = state.components.get(change.watcher)
    workers = [c.watcher_name for c in state.components.values() if c.holds and is_worker(c)]
    if component is None or change.watcher not in workers:
        raise UsageError(f"there is no worker {change.watcher!r}", f"there are: {', '.join(workers) or 'none'}")
    if component.role != change.role:
        raise UsageError(f"{change.watcher} has the role {component.role} by now, not {change.role}")
    return retire(state, change.watcher)


def devices_held(state: State) -> int:
    """Devices of all workers together, those included that start or leave."""
    return sum(len(component.devices) for component in state.components.values() if is_worker(component))


def _restartable(state: State, blueprint: Blueprint, watcher: str) -> Component:
    component = state.components.get(watcher)
    if component is None or (is_worker(component) and not component.holds):
        raise UsageError(f"there is no process {watcher!r} by now", "look at `dynamo ps`")
    blueprint.restartable(component.component)
    if component.phase is not None:
        raise UsageError(f"{watcher} is {component.phase}", "wait until that is over")
    return component


def _plan_one_more(
    state: State, blueprint: Blueprint, template: ServiceTemplate, limits: DeviceLimits, elsewhere: Mapping[int, str]
) -> WatcherPlan:
    _check_budget(state, template, limits)
    others = {} if template.virtual else elsewhere
    devices = allocate(blueprint.inventory, taken(state), template.devices, template.service, others)
    return plan_watcher(template, next_watcher(state, template.service), blueprint.inventory, devices)


def _template(blueprint: Blueprint, change: AddWorker) -> ServiceTemplate:
    if change.component is None:
        return blueprint.worker_in(change.role)
    template = blueprint.worker(change.component)
    if template.role != change.role:
        raise UsageError(f"workers of {template.service} start in the role {template.role}, not {change.role}")
    return template


def _check_budget(state: State, template: ServiceTemplate, limits: DeviceLimits) -> None:
    held, most = devices_held(state), limits.max_devices
    if most is not None and held + template.devices > most:
        raise DeviceError(
            f"one more {template.service} needs {template.devices}, workers hold {held}, and may hold {most} devices",
            "raise the budget, or end another worker first",
        )
