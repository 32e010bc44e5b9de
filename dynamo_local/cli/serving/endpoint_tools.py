"""What `dynamo serve MODEL` does for its model, for an endpoint of a running server: the same options, choices and
checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_local.cli.serving.choosing import ModelChooser, machine_of
from dynamo_local.cli.serving.source import ModelSource
from dynamo_local.cli.serving.wishes import Wishes
from dynamo_local.core.endpoints.adapters import settings_of
from dynamo_local.core.endpoints.served import SERVED_NAME, served_names
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.machine import Machine
from dynamo_local.engine.vllm.arguments import OF_SERVER, every_argument
from dynamo_local.engine.vllm.command_line import flag_of
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.flags import KV_NETWORK, KV_STREAM, Flag
from dynamo_local.sdk.config.schema import canonical
from dynamo_local.sdk.graph import load_graph
from dynamo_local.supervisor.endpoints.revisions.launch import AGGREGATED, DISAGGREGATED, ModelTools
from state.devices.allocation import Inventory

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.reports.report import Report

_WORKERS, _PREFILL_WORKERS = "VllmWorker", "PrefillWorker"
_TENSOR_PARALLEL = "tensor-parallel-size"
_SIZES = (_TENSOR_PARALLEL, "pipeline-parallel-size", "prefill-context-parallel-size")


@dataclass(frozen=True)
class EndpointToolMaker:
    """Makes the tools for the endpoints of one server (launch.MakeTools). `machine`: as it was before the first of
    their workers: what each gets of its memory goes by devices, and does not depend on which others run. `flags`: for
    the workers of all of them, unless an endpoint has its own."""

    machine: Machine
    flags: tuple[Flag, ...] = ()

    @classmethod
    def at_start(cls, inventory: Inventory, flags: tuple[Flag, ...] = ()) -> EndpointToolMaker:
        """With the memory that is free now."""
        return cls(machine_of(inventory, len(inventory.devices)), flags)

    def __call__(self, spec: EndpointSpec, inventory: Inventory, report: Report) -> ModelTools:
        """The tools for one endpoint's model. Raises UsageError for arguments that no service takes."""
        _check_no_server_settings(spec)
        source = ModelSource(report, fetches_weights=True)
        wishes = Wishes(
            spec.least_awake,
            spec.min_prefill_workers if spec.disaggregated else None,
            disagg=spec.disaggregated,
            planner=spec.most_workers > spec.least_awake,
        )
        chooser = ModelChooser(source.facts, wishes, sized=True, machine=self.machine)
        flags = (*(flag for flag in self.flags if not _goes_before(spec, flag)), *_flags(spec))
        return ModelTools(flags, tuple(_overrides(spec)), chooser, source.named, source.obtain)


def check_settings(spec: EndpointSpec) -> None:
    """Raise UsageError for arguments that no service takes, or with values that are none. Looks at no model."""
    _check_no_server_settings(spec)
    if spec.adapter_of is None:
        graph = load_graph(DISAGGREGATED if spec.disaggregated else AGGREGATED)
        resolve(graph, None, tuple(_overrides(spec)), None, spec.model, flags=tuple(_flags(spec)))


def _check_no_server_settings(spec: EndpointSpec) -> None:
    """Raise UsageError for arguments of the one HTTP server, which an endpoint of its own would not change."""
    sections = (value for name, value in spec.args.items() if _is_section(name, value))
    for name in map(canonical, chain(spec.args, *sections)):
        if name in OF_SERVER:
            what = f"args.{name} is about the HTTP server, which is the same for all models"
            raise UsageError(what, f"give it to the server: `dynamo serve ... --Frontend.{name}=VALUE`")


def _flags(spec: EndpointSpec) -> Iterator[Flag]:
    """The arguments that name no service."""
    yield flag_of(SERVED_NAME, _text(list(served_names(spec))), "name")
    for key, value in settings_of(spec).items():
        if key in every_argument() and key != SERVED_NAME:
            yield flag_of(key, _text(value), f"args.{key}")
        elif key != SERVED_NAME and not _is_section(key, value):
            yield Flag((key,), _text(value), f"args.{key}", beside=key)
    if spec.engine == "vllm" and _is_whole(spec.gpu) and not any(key in spec.args for key in _SIZES):
        yield flag_of(_TENSOR_PARALLEL, f"{spec.gpu:g}", "gpu")


def _overrides(spec: EndpointSpec) -> Iterator[str]:
    """The options of single services: those that the endpoint's fields stand for, then those of its arguments."""
    counts = {_WORKERS: spec.least_awake} | ({_PREFILL_WORKERS: spec.min_prefill_workers} if spec.disaggregated else {})
    for service, count in counts.items():
        yield f"--{service}.engine={spec.engine}"
        yield f"--{service}.ServiceArgs.workers={count}"
        if spec.gpu is not None and (spec.engine == "mocker" or not _is_whole(spec.gpu)):
            yield f"--{service}.ServiceArgs.resources.gpu={spec.gpu:g}"
    for key, value in spec.args.items():
        if _is_section(key, value):
            yield from (f"--{key}.{name}={_text(item)}" for name, item in value.items())


def _goes_before(spec: EndpointSpec, flag: Flag) -> bool:
    """Whether the endpoint has its own in the place of an option of the server. KV crosses machines in one way: one
    that chooses the other way does without the server's."""
    key, others = flag.path[0], {KV_NETWORK: KV_STREAM, KV_STREAM: KV_NETWORK}
    sections = (value for name, value in spec.args.items() if _is_section(name, value))
    return key in spec.args or any(own.get(others.get(key, "")) for own in (spec.args, *sections))


def _is_section(key: str, value: Any) -> bool:
    """Whether the argument holds settings of one service, by the service's name."""
    return key[0].isupper() and isinstance(value, Mapping)


def _is_whole(gpu: float | None) -> bool:
    return gpu is not None and gpu >= 1


def _text(value: Any) -> str:
    """A value as options spell it."""
    if isinstance(value, str):
        return f'"{value}"' if value in ("null", "~") else value
    return msgspec.json.encode(value).decode()
