"""Carries out the command line of `dynamo serve`: starts, explains or describes a server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.console import Console
from dynamo_local.cli.serving.choosing import ModelChooser, parsers_line, summary
from dynamo_local.cli.serving.source import ModelSource
from dynamo_local.cli.serving.target import Target, parse_target
from dynamo_local.cli.serving.wishes import Wishes, graph_of, overrides_of
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import AGGREGATED_ROLE
from dynamo_local.core.sizing.machine import counted
from dynamo_local.engine.vllm.command_line import CommandLine
from dynamo_local.sdk.config.flags import Flag
from dynamo_local.supervisor.server.launch import Launch, ServeRequest, prepare
from dynamo_local.supervisor.server.listening import claim_address
from dynamo_local.supervisor.server.machine_room import check_room
from dynamo_local.supervisor.server.plan import HttpAddress
from dynamo_local.supervisor.server.serve import serve
from dynamo_local.supervisor.upkeep.devices import beside
from state.holding import held_elsewhere
from state.paths import state_root

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.report import Report
    from dynamo_local.supervisor.server.server import ServerSettings

_MODEL = "model"


class Mode(Enum):
    """What `dynamo serve` is to do."""

    START = auto()
    EXPLAIN = auto()
    DRY_RUN = auto()


@dataclass(frozen=True)
class Serving:
    """The command line, as far as it says what is to be served. `model`: of a graph, by --model."""

    target: Target
    wishes: Wishes
    overrides: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    model: str | None = None
    config: Path | None = None
    namespace: str | None = None
    nats_url: str | None = None
    cpu_slots: int | None = None
    forkserver: bool = True

    @classmethod
    def of(cls, line: CommandLine, wishes: Wishes, model: str | None) -> Serving:
        """Raises UsageError if no target is named, or two are."""
        flags = tuple(flag for flag in line.flags if flag.path != (_MODEL,))
        # A file for `vllm serve --config` names the model as well.
        model = next((flag.text for flag in line.flags if flag.path == (_MODEL,)), None) if model is None else model
        if model is not None and not model.strip():
            raise UsageError(
                "--model is empty", "name a folder, a Hugging Face id, or one of smollm2, random, quickstart"
            )
        if len(line.targets) > 1:
            raise UsageError(f"{line.targets[1]!r} is one argument too many", "write values as --key=value")
        if not line.targets and model is None:
            raise UsageError(
                "no graph named, and no model", "write `dynamo serve MODEL` or `dynamo serve MODULE:SERVICE`"
            )
        target = parse_target(line.targets[0] if line.targets else str(model))
        if target.is_graph:
            return cls(target, wishes, line.overrides, flags, model)
        if line.targets and model is not None:
            raise UsageError(f"two models are named, {target.name} and {model}", "leave out --model")
        return cls(target, wishes, line.overrides, flags)

    def described(self, host: str, port: int, mode: Mode, *, as_json: bool) -> str:
        """The text of --explain and --dry-run. Raises UsageError for what could not be started."""
        chooser, source = self._chooser(Console(err=True), fetches_weights=False)
        explained = mode is Mode.EXPLAIN
        looks = explained or not self.target.is_graph
        launch = prepare(
            self._request(),
            HttpAddress(host, port),
            os.environ,
            source.named if looks else None,
            source.obtain if looks else None,
            chooser if looks else None,
        )
        if explained:
            from dynamo_local.cli.serving import explain

            text = explain.as_json if as_json else explain.as_text
            return text(self.model or self.target.name, launch, chooser.decided)
        from dynamo_local.cli.server import dry_run

        for note in _notes(launch):
            click.echo(note, err=True)
        launch = beside(launch, held_elsewhere(launch.inventory, os.getpid()))
        return dry_run.as_json(launch) if as_json else dry_run.as_text(launch)

    def run(self, host: str, port: int, settings: ServerSettings, report: Report) -> None:
        """Serve until a signal comes. Raises DynamoError."""
        address = claim_address(host, port)
        # Before a model is fetched, which takes time; and again for the workers, which are known only afterwards.
        check_room(state_root(os.environ))
        chooser, source = self._chooser(report, fetches_weights=True)
        launch = prepare(self._request(), address, os.environ, source.named, source.obtain, chooser)
        check_room(launch.paths.root, launch.templates, launch.inventory.kind)
        for line in (*_notes(launch), *self._chosen_lines(launch, chooser)):
            report.step(line)
        serve(launch, settings, report)

    def _request(self) -> ServeRequest:
        graph = graph_of(self.target, self.wishes)
        return ServeRequest(
            graph,
            self.config,
            (*overrides_of(self.wishes), *self.overrides),
            self.namespace,
            self.model if self.target.is_graph else self.target.name,
            self.nats_url,
            self.cpu_slots,
            self.forkserver,
            self.flags,
        )

    def _chooser(self, report: Report, *, fetches_weights: bool) -> tuple[ModelChooser, ModelSource]:
        source = ModelSource(report, fetches_weights=fetches_weights)
        sized = not self.target.is_graph
        return ModelChooser(source.facts, self.wishes, sized, self.cpu_slots), source

    def _chosen_lines(self, launch: Launch, chooser: ModelChooser) -> list[str]:
        """At most two lines about what was chosen."""
        lines = []
        if not self.target.is_graph:
            workers = [service for service in launch.graph.services if service.gpu]
            said = ", ".join(counted(service.workers, _kind(service.role)) for service in workers)
            lines.append(
                f"{self.target.name}: {said}, {summary(chooser.decided)} (--explain: why)".replace(", (", " (")
            )
        parsers = parsers_line(chooser.decided)
        return [*lines, parsers] if parsers else lines


def _kind(role: str) -> str:
    return "worker" if role == AGGREGATED_ROLE else f"{role} worker"


def _notes(launch: Launch) -> list[str]:
    return [f"note: {note}" for note in launch.graph.notes]
