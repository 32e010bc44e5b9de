"""From an endpoint's spec to what its revision runs: the model is had and checked, settings are chosen, as by
`dynamo serve MODEL`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import DynamoError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.names import Revision
from dynamo_local.core.sizing.machine import Machine
from dynamo_local.model.weights import MODEL_FILES_ENV, read_identity
from dynamo_local.process.forkserver.prepared.orders import withdraw
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.config.sections import Flag
from dynamo_local.supervisor.server.launch.blueprint import BlueprintFile
from dynamo_local.supervisor.server.launch.choosing import Chooser, machine_of
from dynamo_local.supervisor.server.launch.machine_room import check_memory_for_wake, needs_of_workers, require, room_of
from dynamo_local.supervisor.server.launch.models import ModelSource
from dynamo_local.supervisor.server.launch.plan import Launch, revision_templates
from dynamo_local.supervisor.server.launch.prepare import settle
from dynamo_local.supervisor.server.launch.request import request_of_endpoint
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from dynamo_local.supervisor.server.nats.streams import ServerStreams
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import finish_in_thread
from state.devices.allocation import Inventory
from state.files import make_private_directory, replace_file, system_errors
from state.machine.memory import Memory, machine_memory
from state.paths import StatePaths

# The files of an endpoint's model, as they were when its revision was checked: all of its workers load the same.


class ModelChangedError(DynamoError):
    """The files of a revision's model are others than when it was checked. `files`: their identity now, by folder."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__(
            f"the model's files have changed: {', '.join(files)}",
            "update the endpoint, or put the former files back",
        )
        self.files = files


def files_of(graph: ResolvedGraph) -> Mapping[str, str]:
    """Identity of the files of each model in a folder, by folder. Raises ConfigError."""
    folders = {_folder(service) for service in graph.services} - {""}
    return {folder: read_identity(folder) for folder in sorted(folders)}


def with_files(graph: ResolvedGraph, files: Mapping[str, str]) -> ResolvedGraph:
    """The graph whose workers load these files only (`model.files.check_model_files`)."""

    def marked(service: ResolvedService) -> ResolvedService:
        if service.role not in ENGINE_ROLES or _folder(service) not in files:
            return service
        return msgspec.structs.replace(service, envs={**service.envs, MODEL_FILES_ENV: files[_folder(service)]})

    return msgspec.structs.replace(graph, services=tuple(map(marked, graph.services)))


def check_files(files: Mapping[str, str]) -> None:
    """Raise ModelChangedError if files are others by now, ConfigError if they cannot be read. Blocks."""
    now = {folder: read_identity(folder) for folder in files}
    if now != files:
        raise ModelChangedError({folder: found for folder, found in now.items() if found != files[folder]})


def _folder(service: ResolvedService) -> str:
    model = service.config.get("model")
    return model if isinstance(model, str) and Path(model).is_dir() else ""


_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Launched:
    """What a revision runs: the graph for its frontend and workers, and the templates of the latter.

    `engine_bytes` and `kv_bytes`: what each worker takes of the machine's memory at most, and its KV cache, see
    `choosing.Chosen`. `files`: identity of the model's files, by folder.
    """

    graph: ResolvedGraph
    templates: tuple[ServiceTemplate, ...]
    engine_bytes: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    kv_bytes: int | None = None

    def template(self, *, prefill: bool) -> ServiceTemplate | None:
        """The template of the workers that answer, or of those that prefill."""
        return next((one for one in self.templates if (one.role == PREFILL_ROLE) == prefill), None)


@dataclass
class EndpointLauncher:
    """Launches the endpoints of one server. It is made before the first of their workers starts.

    `server`: what the server starts. `flags`: for the workers of all endpoints, unless one has its own. `forks`:
    whether workers may be forked from the fork server. `memory`: there is now. `machine`: as it was at the start: what
    each endpoint gets of its memory goes by devices, and does not depend on which others run.
    """

    server: Launch
    report: Report
    flags: tuple[Flag, ...] = ()
    forks: bool = True
    memory: Callable[[], Memory | None] = machine_memory
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.machine = machine_of(self._inventory, len(self._inventory.devices))

    @property
    def _inventory(self) -> Inventory:
        return self.server.probed

    @property
    def _is_here(self) -> bool:
        """Whether the workers live on this machine. What other machines have room for, and when their model's files
        were written, is not known."""
        return not self.server.clustered

    async def launch(self, revision: Revision, spec: EndpointSpec, progress: Callable[[str], None]) -> Launched:
        """Decide what the revision runs, and get its model. `progress` is told in words how far that is.

        A model may take long; a call that is cancelled ends its work soon after. Raises UsageError for what cannot be
        run as it is ordered, and another DynamoError where trying again may help.
        """
        report = _LaunchReport(self.report, spec.name, asyncio.get_running_loop(), progress)
        try:
            return await _in_thread(lambda: self.prepare(revision, spec, report), f"launch {revision}")
        finally:
            report.stopped.set()

    def prepare(self, revision: Revision, spec: EndpointSpec, report: Report) -> Launched:
        """As `launch`, in this thread."""
        request = request_of_endpoint(spec, self.server.paths.namespace, self.flags, forks=self.forks)
        chooser = Chooser(sized=True, scaling=spec.most_workers > spec.least_awake, machine=self.machine)
        given, models = request.resolve(), ModelSource(report)
        settled = settle(request, given, self._inventory, chooser, models, is_here=self._is_here)
        resolved, chosen = settled.graph, settled.chosen
        files = files_of(resolved) if self._is_here else {}
        resolved = with_files(resolved, files)
        templates = revision_templates(resolved, str(revision), self.server.paths.root)
        if self._is_here:
            self._check_devices(spec, templates)
        return Launched(resolved, templates, chosen.engine_bytes, files, chosen.kv_bytes)

    def check_room(self, launched: Launched, number: int, *, prefill: bool, shared: int = 0) -> None:
        """Raise UsageError if the machine has no room for so many more workers, MemoryShortError if that is for its
        memory. `shared`: bytes of each one's weights that are in memory already. Blocks."""
        template = launched.template(prefill=prefill)
        if template is not None and number > 0 and self._is_here:
            each = None if launched.engine_bytes is None else max(launched.engine_bytes - shared, 0)
            needs = needs_of_workers(template, number, self._inventory.kind, each)
            require(needs, room_of(self.server.paths.root, self.memory))

    def check_room_to_wake(self, launched: Launched, number: int) -> None:
        """Raise MemoryShortError if the machine has no memory for the KV caches of so many parked workers. Blocks."""
        if self._is_here:
            check_memory_for_wake(number, launched.kv_bytes, self.memory)

    def _check_devices(self, spec: EndpointSpec, templates: tuple[ServiceTemplate, ...]) -> None:
        most = len(self._inventory.devices)
        for template in templates:
            if template.devices > most:
                raise UsageError(f"a worker of {spec.name} needs {template.devices} devices, and there are {most}")


class _StoppedError(DynamoError):
    """The launch was cancelled."""

    def __init__(self) -> None:
        super().__init__("the launch was cancelled")


@dataclass(frozen=True)
class _LaunchReport:
    """Shows the lines of one launch on the server's report and in the endpoint's status. Used from a thread; ends it,
    by an error, once the launch is not wanted any more."""

    report: Report
    endpoint: str
    loop: asyncio.AbstractEventLoop
    progress: Callable[[str], None]
    stopped: threading.Event = field(default_factory=threading.Event)

    def step(self, text: str) -> None:
        self.pending(text)
        self.report.step(f"{self.endpoint}  {text}")

    def say(self, text: str) -> None:
        self.report.say(text)

    def pending(self, text: str) -> None:
        if self.stopped.is_set():
            raise _StoppedError
        self.loop.call_soon_threadsafe(self.progress, text)


async def _in_thread(work: Callable[[], _T], name: str) -> _T:
    """Run `work` in a daemon thread: the end of the server does not wait for a download."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)  # type: ignore[arg-type]  # there is a result if there is no error
        else:
            outcome.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # noqa: BLE001 - raised in the task that waits
            error = failure
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            _log.debug("%s ended after the server", name)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await outcome


# The files of a revision in the run directory, and its streams on the bus: made before its workers start, removed when
# they have ended. (upkeep/files.py writes them anew if they are removed meanwhile.)


@dataclass(frozen=True)
class RevisionFiles:
    """The graph file, the part of the blueprint, and the prefill queue of each revision of a server."""

    paths: StatePaths
    blueprint: BlueprintFile
    streams: ServerStreams
    bus: Bus

    async def create(self, revision: Revision, launched: Launched) -> None:
        """Make all that workers and frontends of the revision need, or nothing. Raises StateError, SupervisorError."""
        name = str(revision)
        try:
            # A launch may be cancelled, and is followed by `remove`: nothing is to be made after that.
            await finish_in_thread(lambda: _write(self.paths.graph_of(name), launched.graph.to_json()))
            await self.streams.create_streams(self.bus, launched.graph, name)
            await finish_in_thread(lambda: self.blueprint.change(lambda old: old.with_revision(launched.templates)))
        except DynamoError:
            with suppress(DynamoError):
                await self.remove(revision)
            raise

    async def remove(self, revision: Revision) -> None:
        """Remove what `create` has made. Harmless if there is nothing. Raises StateError, SupervisorError."""
        name = str(revision)
        # First, so that the graph is not written anew.
        await asyncio.to_thread(self.blueprint.change, lambda old: old.without_revision(name))
        await asyncio.to_thread(_remove, self.paths.graph_of(name))
        await asyncio.to_thread(withdraw, self.paths, name)
        await self.streams.delete_streams(self.bus, name)


def _write(path: Path, data: bytes) -> None:
    make_private_directory(path.parent)
    replace_file(path, data, durable=False)


def _remove(path: Path) -> None:
    with system_errors(f"cannot remove {path}"):
        path.unlink(missing_ok=True)
