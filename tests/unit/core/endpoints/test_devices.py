"""Whether there are devices for the workers that endpoints have at least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.devices import check_devices, devices_together, least_awake_devices, least_devices
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import DeviceError
from dynamo_local.core.shares import fit_together, fits, summed

AMOUNTS = st.sampled_from([1, 2, 3, 0.5, 0.7, 1 / 3, 0.25, 0.1])


def endpoint(name: str, gpu: float | None, workers: int = 1) -> EndpointSpec:
    return EndpointSpec(name=name, model="m", gpu=gpu, min_workers=workers)


def test_shares_of_several_endpoints_may_fill_a_device() -> None:
    check_devices(endpoint("c", 0.25, 2), [endpoint("a", 0.5), endpoint("b", 1)], 2, "GPUs")
    check_devices(endpoint("c", 1 / 3), [endpoint("a", 1 / 3), endpoint("b", 1 / 3)], 1, "GPUs")
    with pytest.raises(DeviceError, match=r"endpoint c needs 0.75 GPUs .* and of 2 the others need 1.5 \(a 0.5, b 1\)"):
        check_devices(endpoint("c", 0.25, 3), [endpoint("a", 0.5), endpoint("b", 1)], 2, "GPUs")


def test_shares_that_do_not_fit_on_one_device_each_are_refused() -> None:
    # 2.8 of 3 devices, but each device has room for one of them.
    others = [endpoint("a", 0.7), endpoint("b", 0.7, 2)]
    with pytest.raises(DeviceError, match="the shares of GPUs that endpoint c needs do not fit: each is of one device"):
        check_devices(endpoint("c", 0.7), others, 3, "GPUs")
    check_devices(endpoint("c", 0.3, 3), others, 3, "GPUs")


def test_an_endpoint_without_workers_of_its_own_needs_nothing() -> None:
    adapter = EndpointSpec(name="c", model="folder", adapter_of="a")
    assert least_devices(adapter) == 0
    check_devices(adapter, [endpoint("a", 1, 3)], 2, "GPUs")


@given(st.lists(AMOUNTS, max_size=8), st.integers(0, 6))
def test_what_fits_together_adds_up_and_leaves_further_devices_alone(amounts: list[float], devices: int) -> None:
    if fit_together(amounts, devices):
        assert fits(0, summed(amounts), devices)
        assert fit_together(amounts, devices + 1)
        assert fit_together([*amounts, 1], devices + 1)
    # A device for each worker with a share is always enough.
    assert fit_together(amounts, sum(max(1, int(amount)) for amount in amounts))


def test_devices_of_all_workers_together() -> None:
    chat = EndpointSpec(name="a", model="m", gpu=0.5, max_workers=4)
    other = EndpointSpec(name="b", model="m", args={"tensor-parallel-size": 2}, disaggregated=True, max_workers=2)
    adapter = EndpointSpec(name="c", model="folder", adapter_of="a")
    assert devices_together([]) == (0, 0)
    assert devices_together([chat, adapter]) == (1, 2)
    assert devices_together([chat, other]) == (5, 8)
    assert devices_together([endpoint("a", 0.7, 3)]) == (3, 3)


def test_the_refusal_names_what_makes_more_devices() -> None:
    with pytest.raises(DeviceError, match=r"c needs 1 CPU slot for .* \(--cpu-slots\)"):
        check_devices(endpoint("c", 1), [endpoint("a", 1, 2)], 2, "CPU slots")
    # Slots of nodes are the cores that the cluster counts, and no option makes more of them.
    with pytest.raises(DeviceError, match=r"delete one, or add a node to the cluster$"):
        check_devices(endpoint("c", 1), [endpoint("a", 1, 2)], 2, "CPU slots", on_nodes=True)
    with pytest.raises(DeviceError, match=r"delete one$"):
        check_devices(endpoint("c", 1), [endpoint("a", 1, 2)], 2, "GPUs")


def test_an_endpoint_that_may_sleep_needs_devices_only_while_it_is_awake() -> None:
    zero = EndpointSpec(name="zero", model="m", gpu=2, min_workers=0, max_workers=2)
    assert least_devices(zero) == 0
    assert least_awake_devices(zero) == 2
    check_devices(zero, [endpoint("a", 1, 2)], 2, "GPUs")
    with pytest.raises(DeviceError, match=r"zero needs 2 GPUs .*, and there are 1"):
        check_devices(zero, (), 1, "GPUs")
    assert devices_together([zero]) == (2, 4)
    assert devices_together([zero, EndpointSpec(name="b", model="m", min_workers=0)]) == (2, 5)
