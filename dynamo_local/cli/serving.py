"""Carries out the command line of `dynamo serve`: starts, explains or describes a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.choosing import (
    OF_ENDPOINTS,
    ModelChooser,
    ModelSource,
    Target,
    Wishes,
    graph_of,
    overrides_of,
    parse_target,
    parsers_line,
    summary,
)
from dynamo_local.cli.output import Console
from dynamo_local.cli.serve_output import choices_as_json, choices_as_text, plan_as_json, plan_as_text
from dynamo_local.cli.served_endpoints import EndpointsChooser, EndpointToolMaker, check_settings, specs_of
from dynamo_local.core.endpoints.checks import devices_together
from dynamo_local.core.errors import ConfigError, UsageError
from dynamo_local.core.fleet.view import AGGREGATED_ROLE
from dynamo_local.core.sizing.machine import counted
from dynamo_local.engine.vllm.arguments import OF_SERVER
from dynamo_local.engine.vllm.variables import REFUSED
from dynamo_local.sdk.config.schema import check_variables
from dynamo_local.sdk.config.sections import Flag, kv_network_flag, kv_stream_flag
from dynamo_local.supervisor.endpoints.start import endpoint_controller
from dynamo_local.supervisor.server.launch.addresses import check_kv_network, claim_address
from dynamo_local.supervisor.server.launch.launch import LOCAL, Launch
from dynamo_local.supervisor.server.launch.machine_room import check_room
from dynamo_local.supervisor.server.launch.plan import HttpAddress
from dynamo_local.supervisor.server.launch.prepare import ServeRequest, prepare, registry_of
from dynamo_local.supervisor.server.serve import serve
from dynamo_local.supervisor.upkeep.devices import beside
from state.devices.holding import held_elsewhere
from state.paths import state_root

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.reports.report import Report
    from dynamo_local.supervisor.server.settings import ServerSettings

_MODEL = "model"

AnyChooser = ModelChooser | EndpointsChooser


class Mode(Enum):
    """What `dynamo serve` is to do."""

    START = auto()
    EXPLAIN = auto()
    DRY_RUN = auto()


@dataclass(frozen=True)
class Serving:
    """What is to be served. `request`: the command line, before the graph is chosen and `wishes` are added."""

    target: Target
    wishes: Wishes
    request: ServeRequest
    kv_network: str | None = None
    kv_stream: bool = False

    @classmethod
    def of(cls, targets: Sequence[str], wishes: Wishes, request: ServeRequest, *, alone: bool = False) -> Serving:
        """`request`: what is given beside the targets and `wishes`. `alone`: there are endpoints, so that neither model
        nor graph need be named. Raises UsageError if no target is named, or two are."""
        flags, model = tuple(flag for flag in request.flags if flag.path != (_MODEL,)), request.model
        if model is None:
            # A file for `vllm serve --config` names the model as well.
            model = next((flag.text for flag in request.flags if flag.path == (_MODEL,)), None)
        if model is not None and not model.strip():
            raise UsageError(
                "--model is empty", "name a folder, a Hugging Face id, or one of smollm2, random, quickstart"
            )
        if len(targets) > 1:
            raise UsageError(f"{targets[1]!r} is one argument too many", "write values as --key=value")
        if not targets and model is None and alone:
            return cls(Target(OF_ENDPOINTS, is_graph=True), wishes, replace(request, flags=_no_flags(flags)))
        if not targets and model is None:
            raise UsageError(
                "no graph named, and no model",
                "write `dynamo serve MODEL` or `dynamo serve MODULE:SERVICE`, or list endpoints in a file (-f)",
            )
        target = parse_target(targets[0] if targets else str(model))
        if not target.is_graph and targets and model is not None:
            raise UsageError(f"two models are named, {target.name} and {model}", "leave out --model")
        return cls(target, wishes, replace(request, model=model if target.is_graph else target.name, flags=flags))

    def described(self, host: str, port: int, mode: Mode, *, as_json: bool) -> str:
        """The text of --explain and --dry-run. Raises UsageError for what could not be started."""
        if mode is Mode.EXPLAIN and self._of_endpoints:
            raise UsageError("--explain shows what is chosen for a model, and none is named", "use --dry-run")
        chooser, source = self._chooser(Console(err=True), fetches_weights=False)
        explained = mode is Mode.EXPLAIN
        looks = explained or not self.target.is_graph or self._of_endpoints
        launch = prepare(
            self._whole_request(),
            HttpAddress(host, port),
            os.environ,
            source.named if looks else None,
            source.obtain if looks else None,
            chooser if looks else None,
        )
        if explained:
            text = choices_as_json if as_json else choices_as_text
            return text(self.request.model or self.target.name, launch, chooser.decided)
        slots = self._chosen_lines(launch, chooser) if self._of_endpoints else []
        for note in (*_notes(launch), *slots):
            click.echo(note, err=True)
        launch = beside(launch, held_elsewhere(launch.inventory, os.getpid()))
        endpoints = registry_of(launch.paths, launch.endpoints, forget=launch.forget).entries.values()
        specs = [entry.spec for entry in endpoints]
        return plan_as_json(launch, specs) if as_json else plan_as_text(launch, specs)

    def run(self, host: str, port: int, settings: ServerSettings, report: Report) -> None:
        """Serve until a signal comes. Raises DynamoError."""
        address = claim_address(host, port)
        # Before a model is fetched, which takes time; and again for the workers, which are known only afterwards.
        check_room(state_root(os.environ))
        chooser, source = self._chooser(report, fetches_weights=True)
        launch = prepare(self._whole_request(), address, os.environ, source.named, source.obtain, chooser)
        check_room(launch.paths.root, launch.own_templates, launch.inventory.kind)
        for line in (*_notes(launch), *self._chosen_lines(launch, chooser)):
            report.step(line)
        tools = EndpointToolMaker.at_start(launch.probed, self._kv_flags)
        serve(launch, settings, report, endpoint_controller(tools, forks=self.request.forkserver))

    def _whole_request(self) -> ServeRequest:
        check_variables(os.environ, REFUSED)
        self._check_endpoints()
        self._check_kv()
        # Where endpoints are all that is served, these are for their workers alone.
        flags = () if self._of_endpoints else self._kv_flags
        return replace(
            self.request,
            target=graph_of(self.target, self.wishes),
            overrides=(*overrides_of(self.wishes), *self.request.overrides),
            flags=(*self.request.flags, *flags),
        )

    @property
    def _kv_flags(self) -> tuple[Flag, ...]:
        """How KV crosses machines, for the workers of the graph and of endpoints."""
        return (*kv_network_flag(self.kv_network), *kv_stream_flag(given=self.kv_stream))

    def _check_kv(self) -> None:
        """Raises UsageError. Endpoints' workers would only fail."""
        if self.kv_network and self.kv_stream:
            raise UsageError("--kv-network and --kv-stream exclude each other", "KV crosses machines in one way")
        check_kv_network(self.kv_network, here=self.request.environment == LOCAL)

    def _check_endpoints(self) -> None:
        """Raise ConfigError for settings of the file's endpoints that nothing takes: a server that starts would have
        endpoints that fail."""
        for spec in self.request.endpoints:
            try:
                check_settings(spec)
            except UsageError as error:
                raise ConfigError(f"endpoint {spec.name}: {error.cause}", error.remedy) from error

    @property
    def _of_endpoints(self) -> bool:
        """Whether endpoints are all that is served."""
        return self.target.name == OF_ENDPOINTS

    def _chooser(self, report: Report, *, fetches_weights: bool) -> tuple[AnyChooser, ModelSource]:
        source = ModelSource(report, fetches_weights=fetches_weights)
        sized = not self.target.is_graph
        # The settings of other graphs do not depend on endpoints.
        served = sized or self._of_endpoints
        specs = specs_of(self.request.namespace, self.request.endpoints, forget=self.request.forget) if served else ()
        if self._of_endpoints:
            return EndpointsChooser(specs, self.request.cpu_slots, clustered=self.request.environment != LOCAL), source
        # One more, for the next revision of an endpoint.
        slots = devices_together(specs)[0] + 1 if specs else 0
        beside = bool(specs)
        chooser = ModelChooser(
            source.facts, self.wishes, sized, self.request.cpu_slots, beside_endpoints=beside, endpoint_slots=slots
        )
        return chooser, source

    def _chosen_lines(self, launch: Launch, chooser: AnyChooser) -> list[str]:
        """At most two lines about what was chosen."""
        if self._of_endpoints:
            slots = [one for one in chooser.decided if one.setting == "cpu-slots"]
            return [f"{one.value} CPU slots, {one.reason} (--cpu-slots N: another number)" for one in slots]
        lines = []
        if not self.target.is_graph:
            workers = [service for service in launch.graph.services if service.gpu]
            said = ", ".join(counted(service.workers, _kind(service.role)) for service in workers)
            lines.append(
                f"{self.target.name}: {said}, {summary(chooser.decided)} (--explain: why)".replace(", (", " (")
            )
        parsers = parsers_line(chooser.decided)
        return [*lines, parsers] if parsers else lines


def _no_flags(flags: tuple[Flag, ...]) -> tuple[Flag, ...]:
    """Return the options, which must be of the HTTP server: without a model there is no engine that would take others.
    Raises UsageError."""
    of_models = [flag for flag in flags if flag.path[0] not in OF_SERVER]
    if of_models:
        said = f"{of_models[0].typed} goes with a model, and none is named"
        raise UsageError(said, "write it under args of an endpoint")
    return flags


def _kind(role: str) -> str:
    return "worker" if role == AGGREGATED_ROLE else f"{role} worker"


def _notes(launch: Launch) -> list[str]:
    return [f"note: {note}" for note in launch.graph.notes]
