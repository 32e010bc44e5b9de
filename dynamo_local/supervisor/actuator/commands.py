"""`dynamo scale`, `dynamo drain` and `dynamo restart`: plan the changes that are asked for, and make them in turn."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from dynamo_local.bus.events import publish_event
from dynamo_local.core.errors import DeviceError, UsageError
from dynamo_local.core.fleet.answering import last_answering
from dynamo_local.core.names import select_watcher, short_watcher
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, DeviceLimits, RemoveWorker, Restart
from dynamo_local.core.planning.decision import event_of
from dynamo_local.core.shares import fits, summed
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.add import devices_held
from dynamo_local.supervisor.actuator.endpoint_commands import (
    check_not_of_endpoint,
    endpoint_named,
    plan_restart_of_all,
)
from dynamo_local.supervisor.actuator.local import open_actuator
from dynamo_local.supervisor.admin.connect import bus_of
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, worker_of
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.upkeep.holders import held_by_others
from state.devices.allocation import allocate, held_by, noun
from state.paths import StatePaths
from state.statefile.model import State
from state.statefile.store import StateStore
from state.statefile.transitions import entries, release, shares_taken

_OF_WATCHER = re.compile(
    r"(?:[A-Za-z0-9-]+_)?(?:(?P<endpoint>[a-z0-9-]+)@[0-9]+_)?(?P<service>[A-Z][A-Za-z0-9]*)(?:_[0-9]+)?"
)
_TARGET = re.compile(r"(?P<name>[A-Z][A-Za-z0-9]*|[a-z0-9][a-z0-9-]*)=(?P<number>[0-9]{1,4})")


def parse_targets(arguments: Sequence[str]) -> dict[str, int]:
    """Number of workers by service or endpoint, from arguments such as "VllmWorker=3" and "chat=3". Raises
    UsageError."""
    targets: dict[str, int] = {}
    for argument in arguments:
        match = _TARGET.fullmatch(argument)
        if match is None:
            raise _no_target(argument)
        if match["name"] in targets:
            raise UsageError(f"{match['name']} is given twice", "give each service and endpoint once")
        targets[match["name"]] = int(match["number"])
    return targets


def _no_target(argument: str) -> UsageError:
    """The error for an argument that is not SERVICE=NUMBER. Many write a watcher's name for its service."""
    name, _, number = argument.partition("=")
    watcher = _OF_WATCHER.fullmatch(name)
    if watcher is None or not number.isdigit():
        return UsageError(f"{argument!r} does not say how many", "write SERVICE=NUMBER, such as VllmWorker=2")
    service, endpoint = watcher["service"], watcher["endpoint"]
    if name == service:
        return UsageError(f"{number} is more {service}s than a server can have", "ask for fewer workers")
    whole = f"endpoint, {endpoint}" if endpoint else f"service, {service}"
    return UsageError(
        f"{name} is the name of one process; the number of processes is set for its {whole}",
        f"write {endpoint or service}={number}",
    )


def plan_scaling(
    state: State,
    blueprint: Blueprint,
    targets: Mapping[str, int],
    *,
    even_the_last: bool,
    elsewhere: Mapping[int, str] = MappingProxyType({}),
) -> tuple[Action, ...]:
    """Plan the changes that give each service its number of workers. Removals come first, and free devices for the
    rest. Pure.

    `elsewhere`: devices that others on the machine hold, and who holds them. Raises UsageError for what is not a
    service of workers, for more than there are devices for, and, unless `even_the_last`, for the removal of all workers
    that answer requests.
    """
    removals: list[RemoveWorker] = []
    additions: list[AddWorker] = []
    held = shares_taken(state)
    devices = devices_held(state)
    others: dict[int, str] = {}
    for component, number in targets.items():
        template = blueprint.worker(component)
        present = [entry for entry in entries(state, component) if entry.holds]
        leaving = present[number:]
        removals += [RemoveWorker(entry.watcher_name, entry.role) for entry in reversed(leaving)]
        additions += [AddWorker(template.role, component)] * (number - len(present))
        devices = summed([devices, template.device_count * (number - len(present))])
        if not template.virtual:
            others = {device_id: who for device_id, who in elsewhere.items() if device_id not in held}
    total, kind = blueprint.device_count, blueprint.inventory.kind
    if not fits(0, devices, total - len(others)):
        raise DeviceError(
            f"that takes {devices:g} devices, and there are {total:g} {noun(kind, int(total))}{held_by(kind, others)}",
            "ask for fewer workers",
        )
    if not blueprint.clustered:
        # The cluster packs them itself.
        _check_packing(state, blueprint, {removal.watcher for removal in removals}, additions, elsewhere)
    changes: tuple[Action, ...] = (*removals, *additions)
    if not even_the_last:
        _check_answered(state, changes)
    return changes


def _check_packing(
    state: State,
    blueprint: Blueprint,
    leaving: Collection[str],
    additions: Sequence[AddWorker],
    elsewhere: Mapping[int, str],
) -> None:
    """Raise DeviceError if the free shares of devices are too small for a worker, each being chosen as at its start."""
    for watcher in leaving:
        state = release(state, watcher)
    held = shares_taken(state)
    for change in additions:
        template = blueprint.worker(str(change.component))
        others = {} if template.virtual else elsewhere
        found = allocate(blueprint.inventory, held, template.devices, template.service, others, template.share)
        held |= {device: summed([held.get(device, 0), template.share]) for device in found}


def plan_drain(state: State, watcher: str, *, even_the_last: bool) -> Action:
    """Plan the removal of a worker. Pure. Raises UsageError for what is no worker, and as `plan_scaling`."""
    worker = worker_of(state, watcher)
    check_not_of_endpoint(worker)
    change = RemoveWorker(worker.watcher_name, worker.role)
    if not even_the_last:
        _check_answered(state, (change,))
    return change


def _restartable(state: State, blueprint: Blueprint, name: str) -> str:
    """The full name of a watcher. Raises UsageError, which lists services and watchers."""
    services = {(template.service, template.revision) for template in blueprint.templates}
    known = [name for name, c in state.components.items() if (c.component, c.watcher.revision) in services]
    return select_watcher(name, known, "service, endpoint or watcher")


def plan_restart(state: State, blueprint: Blueprint, name: str, *, even_the_last: bool) -> tuple[Action, ...]:
    """Plan the restart of a watcher, or of all watchers of a service or an endpoint, the unsuffixed one first. Pure.

    Raises UsageError for what cannot be restarted. Whether other workers answer requests meanwhile is checked by the
    actuator, when their turn comes.
    """
    if of_endpoint := plan_restart_of_all(state, name, even_the_last=even_the_last):
        return of_endpoint
    services = {template.service for template in blueprint.templates if not template.revision}
    # The short name of a service's first watcher is the service's own: all its watchers are meant.
    watcher = None if name in services else state.components[_restartable(state, blueprint, name)]
    service, revision = (name, "") if watcher is None else (watcher.component, watcher.watcher.revision)
    template = blueprint.restartable(service, revision)
    found = entries(state, service) if watcher is None else (watcher,)
    # A service that is no worker is restarted even if it holds nothing, as it could not be started before.
    present = [entry for entry in found if entry.holds or template not in blueprint.workers]
    if not present:
        raise UsageError(f"{service} has no workers", f"`dynamo scale {service}=1` starts one")
    return tuple(Restart(entry.watcher_name, entry.role, even_the_last) for entry in present)


async def scale(
    paths: StatePaths,
    targets: Mapping[str, int],
    report: Report,
    *,
    even_the_last: bool = False,
    ready_deadline_s: float | None = None,
) -> list[ActionOutcome]:
    """Give each service its number of workers. Stops at the first change that fails. Raises as `plan_scaling`."""

    def plan(state: State, blueprint: Blueprint) -> tuple[Action, ...]:
        elsewhere = held_by_others(blueprint, state)
        return plan_scaling(state, blueprint, targets, even_the_last=even_the_last, elsewhere=elsewhere)

    return await _make_changes(paths, report, plan, "`dynamo scale`", ready_deadline_s)


async def drain(paths: StatePaths, watcher: str, report: Report, *, even_the_last: bool = False) -> ActionOutcome:
    """End one worker in order. Raises as `plan_drain`."""

    def plan(state: State, _: Blueprint) -> tuple[Action, ...]:
        return (plan_drain(state, watcher, even_the_last=even_the_last),)

    (outcome,) = await _make_changes(paths, report, plan, "`dynamo drain`")
    return outcome


async def restart(
    paths: StatePaths,
    name: str,
    report: Report,
    *,
    even_the_last: bool = False,
    ready_deadline_s: float | None = None,
) -> list[ActionOutcome]:
    """Restart a watcher, or all of a service or an endpoint, one after the other. Stops at the first that fails. Raises
    as `plan_restart`."""

    def plan(state: State, blueprint: Blueprint) -> tuple[Action, ...]:
        return plan_restart(state, blueprint, name, even_the_last=even_the_last)

    endpoint = endpoint_named(name)
    return await _make_changes(paths, report, plan, "`dynamo restart`", ready_deadline_s, endpoint)


async def _make_changes(
    paths: StatePaths,
    report: Report,
    plan: Callable[[State, Blueprint], tuple[Action, ...]],
    command: str,
    ready_deadline_s: float | None = None,
    endpoint: str = "",
) -> list[ActionOutcome]:
    outcomes: list[ActionOutcome] = []
    async with (
        open_actuator(paths, report, endpoint=endpoint, ready_deadline_s=ready_deadline_s) as actuator,
        bus_of(paths, "events") as bus,
    ):
        for note in await actuator.reconcile():
            report.step(note)
        blueprint = await asyncio.to_thread(Blueprint.read, paths)
        state = await asyncio.to_thread(StateStore(paths).read)
        for change in await asyncio.to_thread(plan, state, blueprint):
            outcome = await actuator.apply(change, DeviceLimits())
            outcomes.append(outcome)
            await publish_event(bus, Subjects(paths.namespace), event_of(outcome, command))
            if not outcome.done:
                break
            note = " ".join(map(short_watcher, outcome.note.split(" ")))
            report.step(f"{outcome.watcher}  {note} after {outcome.took_s:.1f} s")
    return outcomes


def _check_answered(state: State, changes: Sequence[Action]) -> None:
    roles = {c.watcher_name: c.role for c in state.components.values() if c.holds and not c.watcher.revision}
    # An added worker has no name yet.
    roles |= {f"added {n}": change.role for n, change in enumerate(changes) if isinstance(change, AddWorker)}
    leaving = {change.watcher for change in changes if isinstance(change, RemoveWorker)}
    if last := last_answering(roles, leaving):
        raise UsageError(
            f"no worker would be left to answer requests without {', '.join(last)}",
            "use --force if that is what you want",
        )
