"""What is chosen for a model on a machine where nothing is given: the arguments of engines, parsers, devices; and for a
server of endpoints alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynamo_local.core.endpoints.checks import devices_together
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.shares import held, summed
from dynamo_local.core.sizing.choosing import MEMORY_KEYS, EnginePlan, plan_engines, slots_for_endpoints
from dynamo_local.core.sizing.machine import GIB, Choice, Gpu, Machine, Wanted, counted
from dynamo_local.core.sizing.model_facts import ModelFacts, is_pooling
from dynamo_local.core.sizing.parsers import PARSER_KEYS, choose_parsers
from dynamo_local.engine.vllm.command_line import OF_VLLM
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.config.sections import Section
from dynamo_local.sdk.graph import Graph
from dynamo_local.sdk.service import ServiceSpec
from dynamo_local.supervisor.server.launch.models import MOCKER, MODEL, SERVED_NAME, ModelSource
from dynamo_local.supervisor.server.launch.request import OF_ENDPOINTS
from state.devices.allocation import Inventory
from state.devices.inventory import CPU_SLOTS_VARIABLE
from state.machine.memory import gpu_memories, machine_memory

CPU_SLOTS = "cpu-slots"
MAX_LEN = "max-model-len"
_PLANNER_ROLE = "planner"
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_ANY_LENGTH = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_ANY_DEVICES = 1_000_000
"""A budget that no cluster reaches: the devices that its nodes have are the bound."""


@dataclass(frozen=True)
class Chosen:
    """What was chosen where the user gives nothing, and the number of CPU slots (None: as it is).

    `engine_bytes`: what each engine takes of the machine's memory at most, and `kv_bytes` what its KV cache does; None
    on GPUs, and where it is not known.
    """

    choices: tuple[Choice, ...] = ()
    slots: int | None = None
    engine_bytes: int | None = None
    kv_bytes: int | None = None

    @property
    def sections(self) -> Mapping[str, Section]:
        """The settings of services, by service."""
        values: dict[str, dict[str, Any]] = {}
        for one in self.choices:
            for service in one.services:
                if one.value is not None:
                    values.setdefault(service, {})[one.key] = one.value
        return {service: Section(settings) for service, settings in values.items()}


@dataclass(frozen=True)
class Chooser:
    """Chooses for graphs as they are configured.

    `sized`: whether engines and planner are to be decided on as well, and not parsers alone. The memory of workers with
    shares of devices is decided on in any case. `scaling`: the planner is to act. `parsers`: whether parsers of tools
    and reasoning may be chosen. `machine`: that of a running server, as it was before the first worker: its devices
    stay as they are, and memory goes by devices. None: this machine, as it is now. `endpoints`: are served beside: they
    get slots of the CPU, unless the user has said how many there are (`cpu_slots`, `environ`), and memory goes by
    devices, since they get the rest. `clustered`: whether workers live on the nodes of a cluster.
    """

    sized: bool
    scaling: bool = False
    parsers: bool = True
    cpu_slots: int | None = None
    machine: Machine | None = None
    endpoints: Sequence[EndpointSpec] = ()
    clustered: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def choose(self, graph: Graph, resolved: ResolvedGraph, inventory: Inventory, models: ModelSource) -> Chosen:
        """Choose for the graph. Raises UsageError if the model does not fit, or cannot be had."""
        if graph.target == OF_ENDPOINTS:
            return self._choose_for_endpoints(graph, inventory)
        config = _model_config(graph, resolved)
        if config is None:
            return Chosen()
        engines = [service for service in resolved.services if service.role in ENGINE_ROLES]
        computing = any(service.config.get("engine") != MOCKER for service in engines)
        machine = self.machine or machine_of(inventory, self._slots_given if self.sized else len(inventory.devices))
        wanted = self._wanted(resolved, engines)
        sizes = computing and (self.sized or wanted.share < 1)

        def fit(facts: ModelFacts) -> None:
            if sizes:
                plan_engines(facts, machine, wanted)

        facts = models.facts(config, computing=computing, on_cpu=not machine.on_gpu, fit=fit)
        plan = plan_engines(facts or ModelFacts(), machine, wanted) if sizes else None
        choices = [] if plan is None else self._plan(graph, plan, machine, wanted)
        if self.sized:
            choices += _with_readers(graph, _served_name(config))
        if facts is not None and self.parsers and not is_pooling(facts, wanted.given):
            choices += _with_readers(graph, choose_parsers(facts, _given_parsers(resolved)))
        if plan is None:
            return Chosen(tuple(choices))
        return Chosen(tuple(choices), plan.slots, plan.engine_bytes, plan.kv_bytes)

    def _choose_for_endpoints(self, graph: Graph, inventory: Inventory) -> Chosen:
        """Choose CPU slots, and that the planner acts, on all devices, also on those of the nodes that join a cluster:
        endpoints have settings of their own."""
        number, choices = len(inventory.devices), list[Choice]()
        slots = None
        if inventory.kind != "gpu" and not self.clustered and self._slots_given is None:
            slots = slots_for_endpoints(*devices_together(self.endpoints), number)
        if slots is not None:
            number = int(slots.value)
            choices += [slots]
        budget = _ANY_DEVICES if self.clustered else max(1, number)
        settings = {"no-operation": (False, "it scales endpoints"), "max-gpu-budget": (budget, "all devices")}
        choices += _for_planner(graph, settings)
        return Chosen(tuple(choices), None if slots is None else number)

    @property
    def _slots_given(self) -> int | None:
        """The number of CPU slots if the user has said it; the inventory has that many then."""
        set_by_variable = self.environ.get(CPU_SLOTS_VARIABLE, "").strip()
        return self.cpu_slots or (int(set_by_variable) if set_by_variable.isdigit() else None)

    def _wanted(self, resolved: ResolvedGraph, engines: Sequence[ResolvedService]) -> Wanted:
        given: dict[str, Any] = {}
        space: str | None = self.environ.get(_KV_SPACE)
        long = self.environ.get(_ANY_LENGTH)
        for service in resolved.services:
            if service in engines:
                given |= {key: value for key, value in service.config.items() if value is not None}
                space = service.envs.get(_KV_SPACE, space)
                long = service.envs.get(_ANY_LENGTH, long)
            elif service.config.get(MAX_LEN) is not None:
                given.setdefault(MAX_LEN, service.config[MAX_LEN])
        return Wanted(
            workers=sum(service.workers for service in engines if service.role != PREFILL_ROLE),
            prefill_workers=sum(service.workers for service in engines if service.role == PREFILL_ROLE),
            scaling=self.scaling,
            share=min((service.gpu for service in engines if 0 < service.gpu < 1), default=1.0),
            by_device=self.machine is not None or bool(self.endpoints) or not self.sized,
            given=given,
            kv_space=int(space) * GIB if space and space.isdigit() else None,
            any_length=(long or "").strip().lower() in ("1", "true"),
            # One more, for the next revision of an endpoint.
            endpoint_slots=devices_together(self.endpoints)[0] + 1 if self.endpoints else 0,
        )

    def _plan(self, graph: Graph, plan: EnginePlan, machine: Machine, wanted: Wanted) -> list[Choice]:
        if not self.sized:
            return list(_with_readers(graph, [choice for choice in plan.choices if choice.key in MEMORY_KEYS]))
        _check_lending(plan, wanted)
        return [*_with_readers(graph, plan.choices), *self._plan_planner(graph, plan, machine, wanted.share)]

    def _plan_planner(self, graph: Graph, plan: EnginePlan, machine: Machine, share: float) -> Iterator[Choice]:
        settings: dict[str, tuple[Any, str]] = {}
        if self.scaling:
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
        return _for_planner(graph, settings)


def _for_planner(graph: Graph, settings: Mapping[str, tuple[Any, str]]) -> Iterator[Choice]:
    """The settings of the graph's planner, each with value and reason; none if it has no planner."""
    planners = tuple(spec.name for spec in graph.specs if spec.role == _PLANNER_ROLE)
    return (Choice(key, value, reason, services=planners) for key, (value, reason) in settings.items() if planners)


def _served_name(config: Mapping[str, Any]) -> Iterator[Choice]:
    """Serve a folder under its name: the whole path would tell clients how this machine is arranged."""
    folder = Path(config[MODEL]).expanduser()
    if folder.is_dir() and not config.get(SERVED_NAME):
        yield Choice(SERVED_NAME, [folder.absolute().name], "the name of the folder", "all")


def _with_readers(graph: Graph, choices: Iterable[Choice]) -> Iterator[Choice]:
    """Each choice with the services that read it."""
    for choice in choices:
        services = tuple(spec.name for spec in graph.specs if _reads(spec, choice))
        if services or choice.key == CPU_SLOTS:
            yield replace(choice, services=services)


def _reads(spec: ServiceSpec, choice: Choice) -> bool:
    if spec.role == _PLANNER_ROLE:
        # Its served-model-name is a label of its own, one text instead of a list.
        return False
    is_engine = spec.role in ENGINE_ROLES
    wanted = choice.readers == "all" or is_engine == (choice.readers == "engines")
    return wanted and {choice.key, OF_VLLM} <= set(spec.schema.keys())


def _model_config(graph: Graph, resolved: ResolvedGraph) -> Mapping[str, Any] | None:
    """The configuration of the service with the model: the one that answers requests, else a worker's. None if no
    service takes a model as vLLM does."""
    ours = {spec.name for spec in graph.specs if OF_VLLM in set(spec.schema.keys())}
    models = [service.config for service in resolved.services if service.name in ours and service.config.get(MODEL)]
    # The root is the last.
    return models[-1] if models else None


def _given_parsers(resolved: ResolvedGraph) -> dict[str, Any]:
    """What the user gives of the keys about parsers, to whichever service."""
    return {
        key: service.config.get(key) for service in resolved.services for key in PARSER_KEYS if key in service.config
    }


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
