"""What is ordered of an endpoint. The fields are those of LLM Engine's model endpoints, in the words used here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from dynamo_local.core.errors import EndpointConflictError
from dynamo_local.core.names import MAIN

Scaling = Literal["concurrency", "load", "freeness", "dynamo"]
"""Policies that decide the number of an endpoint's workers (core/planning/policies)."""


class AdapterRoom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Room for LoRA adapters that the workers of an endpoint are started with where its `args` do not say: for so many
    of the endpoints at a time, and of this rank at most (core/endpoints/adapters.py)."""

    slots: int
    rank: int


class EndpointSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An endpoint as ordered, by command, REST or file.

    `model`: folder, Hugging Face id, or name of a model; with `adapter_of`, the folder of a LoRA adapter, which the
    workers of that other endpoint serve. `args`: settings of frontend and workers, keys in kebab-case, such as
    {"max-model-len": 4096}. `gpu`: devices of each worker, or the share of one that a worker gets (0.5). The workers
    stay between `min_workers` and `max_workers` (None: as many as the minimum, and at least one); with `disaggregated`,
    there are prefill workers as well. `requests_per_worker`: what policy `concurrency` aims at.

    With `min_workers` 0 the endpoint has no workers until somebody asks for it. After `park_after_s` without a request
    the workers are parked; after `sleep_after_s` they end, if `min_workers` is 0 (None: as `idling.times_of` says).
    `awake`: times at which it is awake without a request, such as "mon-fri 08:00-18:30" (schedule.py).
    `forecast`: whether it is awake at times at which it was often used (schedule.py).

    `adapter_room` is the server's: nobody else gives it.
    """

    name: str
    model: str
    adapter_of: str | None = None
    engine: Literal["vllm", "mocker"] = "vllm"
    args: dict[str, Any] = {}
    gpu: float | None = None
    min_workers: int = 1
    max_workers: int | None = None
    disaggregated: bool = False
    min_prefill_workers: int = 1
    max_prefill_workers: int | None = None
    park_after_s: float | None = None
    sleep_after_s: float | None = None
    awake: tuple[str, ...] = ()
    forecast: bool = False
    requests_per_worker: float = 16.0
    policy: Scaling = "concurrency"
    labels: dict[str, str] = {}
    adapter_room: AdapterRoom | None = None

    @property
    def most_workers(self) -> int:
        """Upper bound on the number of workers."""
        return max(1, self.min_workers) if self.max_workers is None else self.max_workers

    @property
    def least_awake(self) -> int:
        """Lower bound on the number of workers while the endpoint is awake."""
        return max(1, self.min_workers)

    @property
    def most_prefill_workers(self) -> int:
        """Upper bound on the number of prefill workers."""
        if not self.disaggregated:
            return 0
        return self.min_prefill_workers if self.max_prefill_workers is None else self.max_prefill_workers


# The names by which requests ask for an endpoint's model. Pure.

SERVED_NAME = "served-model-name"


def served_names(spec: EndpointSpec) -> tuple[str, ...]:
    """The endpoint's own name, and those that its arguments give beside it."""
    given = spec.args.get(SERVED_NAME) or ()
    others = (given,) if isinstance(given, str) else given
    return tuple(dict.fromkeys((spec.name, *map(str, others))))


def check_names(spec: EndpointSpec, others: Iterable[EndpointSpec], own: Iterable[str]) -> None:
    """Raise EndpointConflictError if a request could mean another endpoint or the server's own model as well, and for
    the name of the endpoint that a graph has itself. `own`: names of the server's own model."""
    if spec.name == MAIN:
        raise EndpointConflictError("endpoint main: that is the name of a graph's own model", "choose another name")
    taken = {name: f"endpoint {other.name}" for other in others for name in served_names(other)}
    taken |= dict.fromkeys(own, "the server's own model")
    for name in served_names(spec):
        if name in taken:
            raise EndpointConflictError(
                f"endpoint {spec.name}: {taken[name]} is served as {name} already", "choose another name"
            )
