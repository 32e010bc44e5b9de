"""What `dynamo serve` is asked for, and what it chooses for a model on this machine: the arguments of engines, parsers,
devices. Each model is checked, and made or fetched, once, before anything is started."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_local.core.errors import DynamoError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.shares import held, summed
from dynamo_local.core.sizing.choosing import MEMORY_KEYS, EnginePlan, plan_engines
from dynamo_local.core.sizing.machine import GIB, Choice, Gpu, Machine, Wanted, counted, size
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.core.sizing.parsers import PARSER_KEYS, TOOL_PARSER, choose_parsers
from dynamo_local.core.sizing.pooling import is_pooling
from dynamo_local.engine.vllm.command_line import OF_VLLM
from dynamo_local.model.facts import read_config_facts, read_facts
from dynamo_local.model.named.names import NAMES, NamedModel, named_model
from dynamo_local.model.obtain import Obtained, Wish, obtain, wish_of
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.config.sections import Section
from dynamo_local.sdk.graph import Graph
from dynamo_local.sdk.service import ServiceSpec
from dynamo_local.supervisor.endpoints.revisions.launch import AGGREGATED, DISAGGREGATED
from dynamo_local.supervisor.server.launch.prepare import Chosen
from state.devices.allocation import Inventory
from state.devices.inventory import CPU_SLOTS_VARIABLE
from state.machine.memory import gpu_memories, machine_memory

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.reports.report import Report

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB_URL = re.compile(r"(?:https?://(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://(?:models/)?)([^/?#]+/[^/?#]+)")
_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_HUB_ID = re.compile(r"\w[\w.-]*(?:/[\w.-]+)?(?:@[^\s@]+)?")

_WHAT = "give a folder, a Hugging Face id (ORGANISATION/NAME), or a graph (package.module:Service)"

OF_ENDPOINTS = "components.graphs.endpoints:Frontend"
_FRONTENDS, WORKERS, PREFILL_WORKERS = "Frontend", "VllmWorker", "PrefillWorker"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_ANY_LENGTH = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_MAX_LEN = "max-model-len"
_SERVED_NAME = "served-model-name"
_MOCKER = "mocker"
PLANNER_ROLE = "planner"


@dataclass(frozen=True)
class Target:
    """What is to be served. `name` is a model's folder, id or name, or a graph's `module:Service`."""

    name: str
    is_graph: bool


def parse_target(text: str) -> Target:
    """Raises UsageError for what can be neither a graph nor a model."""
    if _URL.match(text):
        hub = _HUB_URL.match(text)
        raise UsageError(f"{text!r} is an address, not a model", f"write {hub[1]}" if hub else _WHAT)
    if _WINDOWS.match(text) or ("\\" in text and "/" not in text):
        raise UsageError(f"{text!r} is a path of Windows", "write the folder as this system has it: /models/mine")
    # Not Path.exists, which raises where this user may not look.
    if text and os.access(Path(text).expanduser(), os.F_OK):
        return Target(text, is_graph=False)
    module, colon, service = text.partition(":")
    if colon:
        return _with_colon(text, module, service)
    if _is_module(text) and "." in text:
        return Target(text, is_graph=True)
    _check_model(text)
    return Target(text, is_graph=False)


def _with_colon(text: str, module: str, service: str) -> Target:
    if not _is_module(module):
        raise UsageError(f"{text!r} is no model and no graph", _WHAT)
    if service and not service.isidentifier():
        remedy = f"names with a tag are Ollama's; {_WHAT}"
        raise UsageError(f"{text!r} names no service, since {service!r} is no name of a class", remedy)
    return Target(text, is_graph=True)


def _is_module(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _check_model(text: str) -> None:
    """Raise UsageError for what can be neither a path nor an id. Whether it is there is checked later."""
    looks_like_path = text.startswith((".", "/", "~")) or text.count("/") > 1
    if not looks_like_path and not _HUB_ID.fullmatch(text):
        raise UsageError(f"{text!r} is no model", _WHAT)


@dataclass(frozen=True)
class Wishes:
    """Options for a model. None: not given. `parsers`: whether parsers of tools and reasoning may be chosen."""

    workers: int | None = None
    prefill_workers: int | None = None
    disagg: bool = False
    planner: bool = False
    parsers: bool = True
    frontends: int | None = None


def graph_of(target: Target, wishes: Wishes) -> str:
    """The graph to start, as `module:Service`. Raises UsageError for options that a graph does not take."""
    if not target.is_graph:
        return DISAGGREGATED if wishes.disagg or wishes.prefill_workers else AGGREGATED
    if target.name == OF_ENDPOINTS:
        _check_no_model(wishes)
        return target.name
    for option, given, instead in (
        ("--workers", wishes.workers is not None, f"--{WORKERS}.ServiceArgs.workers=N"),
        ("--prefill-workers", wishes.prefill_workers is not None, f"--{PREFILL_WORKERS}.ServiceArgs.workers=N"),
        ("--disagg", wishes.disagg, "examples.llm.graphs.disagg:Frontend as the graph"),
        ("--planner", wishes.planner, "--Planner.no-operation=false"),
        ("--frontends", wishes.frontends is not None, f"--{_FRONTENDS}.ServiceArgs.workers=N"),
    ):
        if given:
            raise UsageError(f"{option} goes with a model, and {target.name} is a graph", f"write {instead}")
    return target.name


def _check_no_model(wishes: Wishes) -> None:
    """Raise UsageError for options that go with a model, where endpoints are all that is served."""
    for option, given, instead in (
        ("--workers", wishes.workers is not None, "min_workers"),
        ("--prefill-workers", wishes.prefill_workers is not None, "min_prefill_workers"),
        ("--disagg", wishes.disagg, "disaggregated"),
    ):
        if given:
            raise UsageError(f"{option} goes with a model, and none is named", f"set {instead} of each endpoint")


def overrides_of(wishes: Wishes) -> tuple[str, ...]:
    """The options for a model as options of services."""
    counts = (
        (_FRONTENDS, wishes.frontends),
        (WORKERS, wishes.workers),
        (PREFILL_WORKERS, wishes.prefill_workers),
    )
    return tuple(f"--{service}.ServiceArgs.workers={count}" for service, count in counts if count is not None)


class _KnownError(DynamoError):
    """Ends `obtain` where its facts are wanted and not its weights."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__("the facts are known")
        self.facts = facts


class ModelSource:
    """Finds models. `fetches_weights`: False only to look what a model is."""

    def __init__(self, report: Report, *, fetches_weights: bool) -> None:
        self._report = report
        self._fetches_weights = fetches_weights
        self._named: dict[str, NamedModel] = {}
        self._obtained: dict[str, Obtained] = {}

    def facts(
        self, config: Mapping[str, Any], *, computing: bool, on_cpu: bool, fit: Callable[[ModelFacts], None]
    ) -> ModelFacts | None:
        """The facts of the model of a service with that configuration; None if vLLM is to find it.

        `fit` is called with them before weights are fetched, and may raise. `computing`: engines load the model.
        Raises DynamoError for what cannot be had or loaded.
        """
        model = str(config["model"])
        if model in NAMES:
            facts = read_facts(self.named(model).folder)
            fit(facts)
            return facts
        if not computing:
            return _tokenizer_facts(Path(model).expanduser())
        try:
            found = self._find(wish_of(config, on_cpu), fit)
        except _KnownError as known:
            return known.facts
        return None if found.folder is None else found.facts

    def named(self, name: str) -> NamedModel:
        """The model of one of `NAMES`. Raises UsageError if it cannot be had."""
        if name not in self._named:
            self._named[name] = named_model(name, self._report.step)
        return self._named[name]

    def obtain(self, wish: Wish) -> Obtained:
        """A model that is ready to be loaded. Raises DynamoError."""
        try:
            return self._find(wish, lambda _: None)
        except _KnownError:
            return Obtained(wish.model, wish.model)

    def _find(self, wish: Wish, fit: Callable[[ModelFacts], None]) -> Obtained:
        def before_weights(facts: ModelFacts) -> None:
            fit(facts)
            if not self._fetches_weights and not Path(wish.model).expanduser().is_dir():
                raise _KnownError(facts)

        if wish.model not in self._obtained:
            self._obtained[wish.model] = obtain(wish, self._report, before_weights)
        return self._obtained[wish.model]


def _tokenizer_facts(folder: Path) -> ModelFacts | None:
    """Facts for a frontend before mockers, which load no model. Whatever is wrong, the frontend will say."""
    try:
        return read_config_facts(folder) if folder.is_dir() else None
    except (DynamoError, OSError):
        return None


@dataclass(frozen=True)
class Decided:
    """A setting that was chosen. `services`: those that get it; empty if it concerns no configuration. `value` None:
    nothing was chosen."""

    setting: str
    value: Any
    services: tuple[str, ...]
    reason: str


class FindFacts(Protocol):
    """Finds a model: source.ModelSource.facts, or an imitation."""

    def __call__(
        self, config: Mapping[str, Any], *, computing: bool, on_cpu: bool, fit: Callable[[ModelFacts], None]
    ) -> ModelFacts | None: ...


@dataclass
class ModelChooser:
    """A `launch.Chooser`. `decided` is what was chosen by its last call.

    `sized`: whether engines and planner are to be decided on as well, and not parsers alone. The memory of workers with
    shares of devices is decided on in any case. `machine`: that of a running server, as it was before the first worker:
    its devices stay as they are, and memory goes by devices. None: this machine, as it is now. `beside_endpoints`:
    memory goes by devices in this case, too, since endpoints get the rest; `endpoint_slots`: CPU slots to make for
    them.
    """

    find: FindFacts
    wishes: Wishes
    sized: bool
    cpu_slots: int | None = None
    machine: Machine | None = None
    beside_endpoints: bool = False
    endpoint_slots: int = 0
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    decided: list[Decided] = field(default_factory=list)

    def __call__(self, graph: Graph, resolved: ResolvedGraph, inventory: Inventory) -> Chosen:
        """Choose for the graph. Raises UsageError if the model does not fit, or cannot be had."""
        self.decided = []
        config = _model_config(graph, resolved)
        if config is None:
            return Chosen()
        engines = [service for service in resolved.services if service.role in ENGINE_ROLES]
        computing = any(service.config.get("engine") != _MOCKER for service in engines)
        machine = self.machine or machine_of(
            inventory, slots_given(self.cpu_slots, self.environ) if self.sized else len(inventory.devices)
        )
        by_device = self.machine is not None or self.beside_endpoints or not self.sized
        wanted = _wanted(resolved, engines, self.wishes, self.environ)
        wanted = replace(wanted, by_device=by_device, endpoint_slots=self.endpoint_slots)
        sizes = computing and (self.sized or wanted.share < 1)

        def fit(facts: ModelFacts) -> None:
            if sizes:
                plan_engines(facts, machine, wanted)

        facts = self.find(config, computing=computing, on_cpu=not machine.on_gpu, fit=fit)
        plan = plan_engines(facts or ModelFacts(), machine, wanted) if sizes else None
        if plan is not None:
            self._plan(graph, plan, machine, wanted)
        if self.sized:
            self._name(graph, config)
        if facts is not None and self.wishes.parsers and not is_pooling(facts, wanted.given):
            self._take(graph, choose_parsers(facts, _given_parsers(resolved)))
        sections = _sections(self.decided)
        return Chosen(sections) if plan is None else Chosen(sections, plan.slots, plan.engine_bytes, plan.kv_bytes)

    def _plan(self, graph: Graph, plan: EnginePlan, machine: Machine, wanted: Wanted) -> None:
        if not self.sized:
            self._take(graph, [choice for choice in plan.choices if choice.key in MEMORY_KEYS])
            return
        _check_lending(plan, wanted)
        self._take(graph, plan.choices)
        self._plan_planner(graph, plan, machine, wanted.share)

    def _name(self, graph: Graph, config: Mapping[str, Any]) -> None:
        """Serve a folder under its name: the whole path would tell clients how this machine is arranged."""
        folder = Path(config["model"]).expanduser()
        if folder.is_dir() and not config.get(_SERVED_NAME):
            self._take(graph, [Choice(_SERVED_NAME, [folder.absolute().name], "the name of the folder", "all")])

    def _take(self, graph: Graph, choices: Sequence[Choice]) -> None:
        for choice in choices:
            services = tuple(spec.name for spec in graph.specs if _reads(spec, choice))
            if services or choice.key == "cpu-slots":
                self.decided.append(Decided(choice.key, choice.value, services, choice.reason))

    def _plan_planner(self, graph: Graph, plan: EnginePlan, machine: Machine, share: float) -> None:
        planners = tuple(spec.name for spec in graph.specs if spec.role == PLANNER_ROLE)
        if not planners:
            return
        settings: dict[str, tuple[Any, str]] = {}
        if self.wishes.planner:
            budget = math.ceil(summed([plan.most_engines * held(plan.ranks, share)]))
            devices = counted(budget, "GPU" if machine.on_gpu else "CPU slot")
            settings["no-operation"] = (False, "--planner: it adds and removes workers")
            settings["max-gpu-budget"] = (
                budget,
                f"{devices} and the memory for {counted(plan.most_engines, 'worker')}",
            )
            settings["min-gpu-budget"] = (plan.ranks, "one worker of each role stays")
        else:
            settings["no-operation"] = (True, "it only says what it would do; --planner lets it act")
        if plan.ranks > 1:
            reason = "as many as each engine takes"
            settings |= dict.fromkeys(("decode-engine-num-gpu", "prefill-engine-num-gpu"), (plan.ranks, reason))
        self.decided += [Decided(key, value, planners, reason) for key, (value, reason) in settings.items()]


def slots_given(cpu_slots: int | None, environ: Mapping[str, str]) -> int | None:
    """The number of CPU slots if the user has said it; the inventory has that many then."""
    set_by_variable = environ.get(CPU_SLOTS_VARIABLE, "").strip()
    return cpu_slots or (int(set_by_variable) if set_by_variable.isdigit() else None)


def _reads(spec: ServiceSpec, choice: Choice) -> bool:
    if spec.role == PLANNER_ROLE:
        # Its served-model-name is a label of its own, one text instead of a list.
        return False
    is_engine = spec.role in ENGINE_ROLES
    wanted = choice.readers == "all" or is_engine == (choice.readers == "engines")
    return wanted and {choice.key, OF_VLLM} <= set(spec.schema.keys())


def _sections(decided: Sequence[Decided]) -> dict[str, Section]:
    values: dict[str, dict[str, Any]] = {}
    for one in decided:
        for service in one.services:
            if one.value is not None:
                values.setdefault(service, {})[one.setting] = one.value
    return {service: Section(settings) for service, settings in values.items()}


def _model_config(graph: Graph, resolved: ResolvedGraph) -> Mapping[str, Any] | None:
    """The configuration of the service with the model: the one that answers requests, else a worker's. None if no
    service takes a model as vLLM does."""
    ours = {spec.name for spec in graph.specs if OF_VLLM in set(spec.schema.keys())}
    models = [service.config for service in resolved.services if service.name in ours and service.config.get("model")]
    # The root is the last.
    return models[-1] if models else None


def _given_parsers(resolved: ResolvedGraph) -> dict[str, Any]:
    """What the user gives of the keys about parsers, to whichever service."""
    return {
        key: service.config.get(key) for service in resolved.services for key in PARSER_KEYS if key in service.config
    }


def _wanted(
    resolved: ResolvedGraph, engines: Sequence[ResolvedService], wishes: Wishes, environ: Mapping[str, str]
) -> Wanted:
    given: dict[str, Any] = {}
    space: str | None = environ.get(KV_SPACE)
    long = environ.get(_ANY_LENGTH)
    for service in resolved.services:
        if service in engines:
            given |= {key: value for key, value in service.config.items() if value is not None}
            space = service.envs.get(KV_SPACE, space)
            long = service.envs.get(_ANY_LENGTH, long)
        elif service.config.get(_MAX_LEN) is not None:
            given.setdefault(_MAX_LEN, service.config[_MAX_LEN])
    return Wanted(
        workers=sum(service.workers for service in engines if service.role != PREFILL_ROLE),
        prefill_workers=sum(service.workers for service in engines if service.role == PREFILL_ROLE),
        scaling=wishes.planner,
        share=min((service.gpu for service in engines if 0 < service.gpu < 1), default=1.0),
        given=given,
        kv_space=int(space) * GIB if space and space.isdigit() else None,
        any_length=(long or "").strip().lower() in ("1", "true"),
    )


def machine_of(inventory: Inventory, slots: int | None) -> Machine:
    """Returns the facts of this machine, with these devices and the memory that is free now. `slots`: CPU slots, None
    if the number may be chosen."""
    memory = machine_memory()
    total, free = (None, None) if memory is None else (memory.total, memory.free)
    if inventory.kind == "gpu":
        gpus = tuple(Gpu(one.total, one.free) for one in gpu_memories([gpu.uuid for gpu in inventory.devices]))
        return Machine(0, None, total, free, gpus, len(inventory.devices))
    cores = {core for device in inventory.devices for core in device.cores}
    return Machine(len(cores), slots, total, free)


def _check_lending(plan: EnginePlan, wanted: Wanted) -> None:
    """Raise UsageError if there are to be prefill workers, and the model's KV cannot be transferred."""
    refused = [choice for choice in plan.choices if choice.key == "kv-transfer" and choice.value is False]
    if wanted.prefill_workers and refused:
        raise UsageError(
            f"prefill workers hand KV over, which is not possible here: {refused[0].reason}",
            "leave out --disagg (or `disaggregated` of the endpoint)",
        )


def summary(decided: Sequence[Decided]) -> str:
    """What was chosen, for one line: the settings that users ask about most."""
    values = {one.setting: one.value for one in decided if one.value is not None}
    parts = [
        f"context {values[_MAX_LEN]} tokens" if _MAX_LEN in values else "",
        f"KV cache {size(values['kv-cache-memory-bytes'])} for each worker"
        if "kv-cache-memory-bytes" in values
        else "",
        f"{values['tensor-parallel-size']} GPUs for each worker" if values.get("tensor-parallel-size", 1) > 1 else "",
        str(values.get("dtype", "")),
    ]
    return ", ".join(part for part in parts if part)


def parsers_line(decided: Sequence[Decided]) -> str:
    """What was chosen for tools and reasoning, for one line. Empty if nothing had to be."""
    found = {one.setting: one for one in decided if one.setting in PARSER_KEYS}
    tools, reasoning = found.get(TOOL_PARSER), found.get("reasoning-parser")
    parts = []
    if tools is not None:
        parts.append(f"tools: {tools.value or f'off, {tools.reason}'}")
    if reasoning is not None and reasoning.value is not None:
        parts.append(f"reasoning: {reasoning.value}")
    return "; ".join(parts)
