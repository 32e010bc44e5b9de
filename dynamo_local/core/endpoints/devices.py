"""The devices that endpoints need for the workers that each has at least, and at most. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import DeviceError
from dynamo_local.core.shares import fit_together, fits

_SLOTS = "CPU slots"
_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size")


def devices_of_worker(spec: EndpointSpec) -> float:
    """Devices of each worker, or the share of one, as far as the spec says; 1 where it is chosen for the model."""
    if spec.gpu is not None:
        return spec.gpu
    sizes = (spec.args.get(name) for name in _SIZES)
    return float(math.prod(size for size in sizes if isinstance(size, int) and size > 0))


def least_devices(spec: EndpointSpec) -> float:
    """Devices of the workers that the endpoint always has. An adapter needs none of its own, and an endpoint that may
    sleep none while it does."""
    if spec.adapter_of is not None or spec.min_workers == 0:
        return 0.0
    workers = spec.min_workers + (spec.min_prefill_workers if spec.disaggregated else 0)
    return workers * devices_of_worker(spec)


def least_awake_devices(spec: EndpointSpec) -> float:
    """Devices of the workers that the endpoint has at least while it is awake."""
    if spec.adapter_of is not None:
        return 0.0
    workers = spec.least_awake + (spec.min_prefill_workers if spec.disaggregated else 0)
    return workers * devices_of_worker(spec)


def devices_together(specs: Iterable[EndpointSpec]) -> tuple[int, int]:
    """Whole devices that the workers of these endpoints need together: for the least numbers of workers, and for the
    most. Workers with shares are on as few devices as have room for them; of the endpoints that may sleep, each can be
    awake, one at a time."""
    specs = tuple(specs)
    least = [amount for spec in specs for amount in _least_workers(spec)]
    more = [amount for spec in specs for amount in _more_workers(spec)]
    one_awake = max((least_awake_devices(spec) for spec in specs if spec.min_workers == 0), default=0.0)
    return _whole([*least, one_awake] if one_awake else least), _whole([*least, *more])


def check_devices(
    spec: EndpointSpec, others: Iterable[EndpointSpec], total: float, noun: str, *, on_nodes: bool = False
) -> None:
    """Raise DeviceError, with figures, if there are too few devices for the least workers of an endpoint beside those
    of the others. `total`: devices for all endpoints; `noun`: what they are called, in the plural. `on_nodes`: whether
    they are those of the nodes of a cluster."""
    others = tuple(others)
    needed, awake = least_devices(spec), least_awake_devices(spec)
    wanted = f"endpoint {spec.name} needs {_counted(awake, noun)} for the workers that it has at least"
    slots = ", or serve with more CPU slots, which may share cores (--cpu-slots)" if noun == _SLOTS else ""
    more = ", or add a node to the cluster" if on_nodes else slots
    if not fits(0, awake, total):
        raise DeviceError(
            f"{wanted}, and there are {total:g}", f"lower min_workers, or the devices of each worker{more}"
        )
    taken = {other.name: least_devices(other) for other in others}
    if needed and not fits(sum(taken.values()), needed, total):
        listed = ", ".join(f"{name} {count:g}" for name, count in taken.items() if count)
        raise DeviceError(
            f"{wanted}, and of {total:g} the others need {sum(taken.values()):g} ({listed})",
            f"lower min_workers of one of them, or delete one{more}",
        )
    if needed and not fit_together([each for one in (spec, *others) for each in _least_workers(one)], math.ceil(total)):
        raise DeviceError(
            f"the shares of {noun} that endpoint {spec.name} needs do not fit: each is of one device, and beside the "
            f"other endpoints too little of each of {total:g} is left",
            f"choose shares that add up to whole devices, such as 0.5 or 0.25{more}",
        )


def _least_workers(spec: EndpointSpec) -> list[float]:
    """What each of the workers takes that the endpoint has at least."""
    each = devices_of_worker(spec)
    return [each] * round(least_devices(spec) / each)


def _more_workers(spec: EndpointSpec) -> list[float]:
    """What each of the workers takes that the endpoint may have beyond these."""
    if spec.adapter_of is not None:
        return []
    workers = spec.most_workers + spec.most_prefill_workers
    return [devices_of_worker(spec)] * (workers - len(_least_workers(spec)))


def _whole(amounts: list[float]) -> int:
    number = math.ceil(sum(amounts) - 1e-6)
    while not fit_together(amounts, number):
        number += 1
    return number


def _counted(number: float, noun: str) -> str:
    return f"{number:g} {noun.removesuffix('s') if number == 1 else noun}"
