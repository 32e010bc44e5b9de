"""The number of a worker's devices: as many as its model is split among."""

from __future__ import annotations

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.sdk import load_graph
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedService

GPU = "--VllmWorker.ServiceArgs.resources.gpu"
TP = "--VllmWorker.tensor-parallel-size"


def worker(*options: str) -> ResolvedService:
    graph = load_graph("examples.llm.graphs.agg:Frontend")
    return resolve(graph, overrides=["--VllmWorker.model=m", "--Frontend.model=m", *options]).service("VllmWorker")


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ([], 1),
        ([f"{TP}=2"], 2),
        ([f"{TP}=2", "--VllmWorker.pipeline-parallel-size=3"], 6),
        ([f"{TP}=2", f"{GPU}=2"], 2),
        ([f"{GPU}=1"], 1),
        ([f"{GPU}=3", "--VllmWorker.engine=mocker"], 3),
        ([f"{GPU}=0.5"], 0.5),
        ([f"{GPU}=0.5", "--VllmWorker.engine=mocker"], 0.5),
        (["--VllmWorker.engine=mocker"], 1),
    ],
)
def test_there_is_a_device_for_each_rank(options: list[str], devices: float) -> None:
    assert worker(*options).gpu == devices


@pytest.mark.parametrize(
    ("options", "given", "needed"),
    [([f"{GPU}=2"], 2, 1), ([f"{TP}=2", f"{GPU}=1"], 1, 2), ([f"{TP}=2", f"{GPU}=0.5"], 0.5, 2)],
)
def test_another_number_of_devices_is_refused(options: list[str], given: float, needed: int) -> None:
    said = f"resources.gpu is {given}, but by its settings a worker needs {needed}; leave resources.gpu out"
    with pytest.raises(ConfigError, match=said):
        worker(*options)


def test_a_mocker_takes_its_devices_from_nobody() -> None:
    assert worker("--VllmWorker.engine=mocker").virtual
    assert not worker().virtual
