"""A recorder (core/planning/decision.py) that appends every decision of the planner to a file, and what
the server does to endpoints by itself, as a line of JSON each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.json_text import as_line
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.planning.actions import Action, ActionOutcome, Outcome
from dynamo_local.core.planning.decision import Decision, Recorder, Verdict, describe
from dynamo_local.core.planning.options import PlannerOptions
from state.paths import StatePaths

_log = logging.getLogger(__name__)

MAX_BYTES = 10 * 1024 * 1024
"""Maximum size of the file. A full one is renamed to `{name}.1`, in place of an earlier one."""


_OF_GRAPH = frozenset({"model", "acts"})
"""Fields of `about` that say something of the graph's own model and of decisions about its workers."""


class DecisionLog(Recorder):
    """Appends decisions to `path`; event files have the pulls. `about`: fields of each line. Disk errors are logged,
    and the planner goes on."""

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        *,
        max_bytes: int = MAX_BYTES,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError if nothing can be written there."""
        self.path = path
        self._about = dict(about)
        self._about_others = {name: value for name, value in about.items() if name not in _OF_GRAPH}
        self._max_bytes = max_bytes
        self._wall_clock = wall_clock
        self._broken = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot write decisions to {path}: {error.strerror}", "choose another log-dir"
            ) from error

    def decided(self, decision: Decision, outcomes: Sequence[Outcome]) -> None:
        """Append a line of a few hundred bytes."""
        about = self._about if decision.by_actions else self._about_others
        self._write({**about, **fields_of(decision, outcomes)})

    def changed(self, event: Event) -> None:
        """Append a line of a few hundred bytes."""
        self._write({**self._about_others, **fields_of_change(event)})

    def _write(self, fields: Mapping[str, Any]) -> None:
        line = as_line(msgspec.json.encode({"time": self._wall_clock(), **fields}))
        try:
            self._append(line)
            self._broken = False
        except OSError as error:
            if not self._broken:
                _log.warning("decisions cannot be written to %s: %s", self.path, error.strerror)
            self._broken = True

    def _append(self, line: bytes) -> None:
        with self.path.open("ab") as file:
            full = file.tell() > 0 and file.tell() + len(line) > self._max_bytes
            if not full:
                file.write(line)
                return
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self.path.touch(0o600)
        self.path.write_bytes(line)


def fields_of(decision: Decision, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return a decision as the fields of its line. Unknown numbers are null."""
    fields = {
        "at": decision.at,
        "policy": decision.policy,
        "devices": decision.devices,
        "max_devices": decision.max_devices,
        "roles": [_role(verdict) for verdict in decision.verdicts],
    }
    if decision.by_actions:
        actions, became = [_action(action) for action in decision.actions], [_outcome(each) for each in outcomes]
        return {**fields, "actions": actions, "outcomes": became, "text": decision.text}
    order = decision.order
    return {
        "endpoint": decision.endpoint,
        "acts": decision.acts,
        **fields,
        "order": None if order is None else {"workers": order.workers, "prefill_workers": order.prefill_workers},
        "outcome": _outcome(outcomes[0]) if outcomes else None,
        "text": decision.text,
    }


def fields_of_change(event: Event) -> dict[str, Any]:
    """Return what the server has done to an endpoint as the fields of its line. `took_s` is null while it lasts."""
    text = f"{event.endpoint}: {event.what}" + (f" ({event.why})" if event.why else "")
    fields: dict[str, Any] = {"endpoint": event.endpoint, "change": event.kind, "text": text}
    if event.cause:
        fields["cause"] = event.cause
    if event.to:
        fields["to"] = event.to
    if event.kind in ("wake", "swap"):
        fields["took_s"] = event.took_s
    return fields


def _role(verdict: Verdict) -> dict[str, Any]:
    count = verdict.count
    numbers: dict[str, int | None] = {"wanted": verdict.wanted}
    if count is not None:
        numbers = {"ordered": count.ordered, **numbers, "gets": count.gets, "order": count.order, "ready": count.ready}
    return {"role": verdict.role, **numbers, "reason": verdict.reason, **verdict.figures}


def _action(action: Action) -> dict[str, Any]:
    # Workers of the graph itself are told by their service alone.
    left_out = {"", FIRST_OF_MAIN}
    return {name: value for name, value in msgspec.to_builtins(action).items() if value not in left_out}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    if not isinstance(outcome, ActionOutcome):
        return {"done": outcome.done, "note": outcome.note}
    return {
        "action": describe(outcome.action),
        "done": outcome.done,
        "watcher": outcome.watcher,
        "note": outcome.note,
        "took_s": round(outcome.took_s, 3),
    }


# Chooses the planner's recorders on disk by its options.


def recorders_of(options: PlannerOptions, paths: StatePaths) -> tuple[Recorder, ...]:
    """Return a decision log, in log-dir or beside the server's logs, and with a log-dir a TensorBoard recorder too.

    Raises ConfigError if the folder cannot be written to.
    """
    about = {"namespace": paths.namespace, "model": options.served_model_name, "acts": not options.no_operation}
    if options.log_dir is None:
        return (DecisionLog(paths.decisions_file, about),)
    from dynamo_local.planner.tensorboard import TensorBoardRecorder

    folder = Path(options.log_dir).expanduser()
    return DecisionLog(folder / paths.decisions_file.name, about), TensorBoardRecorder(
        folder, max_bytes=options.event_files_max_mib << 20, dynamo_tags=options.dynamo_tags
    )
