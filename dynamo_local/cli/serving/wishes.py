"""What the options of `dynamo serve` say beside the configuration of services."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.cli.serving.target import Target
from dynamo_local.core.errors import UsageError

AGGREGATED = "components.graphs.aggregated:Frontend"
DISAGGREGATED = "components.graphs.disaggregated:Frontend"
OF_ENDPOINTS = "components.graphs.endpoints:Frontend"
_FRONTENDS, _WORKERS, _PREFILL_WORKERS = "Frontend", "VllmWorker", "PrefillWorker"


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
        ("--workers", wishes.workers is not None, f"--{_WORKERS}.ServiceArgs.workers=N"),
        ("--prefill-workers", wishes.prefill_workers is not None, f"--{_PREFILL_WORKERS}.ServiceArgs.workers=N"),
        ("--disagg", wishes.disagg, "examples.llm.graphs.disagg:Frontend as the graph"),
        ("--planner", wishes.planner, "--Planner.no-operation=false"),
        ("--frontends", wishes.frontends is not None, f"--{_FRONTENDS}.ServiceArgs.workers=N"),
    ):
        if given:
            raise UsageError(f"{option} goes with a model, and {target.name} is a graph", f"write {instead}")
    return target.name


def _check_no_model(wishes: Wishes) -> None:
    """Raise UsageError for options that go with a model, where endpoints are all that is served."""
    for option, given, field in (
        ("--workers", wishes.workers is not None, "min_workers"),
        ("--prefill-workers", wishes.prefill_workers is not None, "min_prefill_workers"),
        ("--disagg", wishes.disagg, "disaggregated"),
    ):
        if given:
            raise UsageError(f"{option} goes with a model, and none is named", f"set {field} of each endpoint")


def overrides_of(wishes: Wishes) -> tuple[str, ...]:
    """The options for a model as options of services."""
    counts = (
        (_FRONTENDS, wishes.frontends),
        (_WORKERS, wishes.workers),
        (_PREFILL_WORKERS, wishes.prefill_workers),
    )
    return tuple(f"--{service}.ServiceArgs.workers={count}" for service, count in counts if count is not None)
