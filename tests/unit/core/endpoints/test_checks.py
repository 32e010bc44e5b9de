"""Specs from outside: what is right is taken as it is meant, and every mistake is said in one line."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.checks import (
    FIELDS,
    Ways,
    changed_spec,
    check_devices,
    devices_together,
    least_awake_devices,
    least_devices,
    read_spec,
    runs_differently,
    ways_of,
    with_bounds_of,
)
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import ConfigError, DeviceError
from dynamo_local.core.shares import fit_together, fits, summed
from tests.unit.core.endpoints.endpoints_strategies import specs

# Whether there are devices for the workers that endpoints have at least.

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


CHAT: dict[str, Any] = {"name": "chat", "model": "m"}


def test_the_fields_that_are_given_are_kept() -> None:
    fields = {
        **CHAT,
        "engine": "mocker",
        "args": {"max_model_len": 4096, "--hf-overrides": {"rope_theta": 1e6}, "seed": None},
        "gpu": 2,
        "min_workers": 2,
        "max_workers": 4,
        "disaggregated": True,
        "max_prefill_workers": 3,
        "requests_per_worker": 8,
        "policy": "load",
        "labels": {"team": "search"},
    }
    assert read_spec(fields) == EndpointSpec(
        name="chat",
        model="m",
        engine="mocker",
        args={"max-model-len": 4096, "hf-overrides": {"rope_theta": 1e6}},
        gpu=2.0,
        min_workers=2,
        max_workers=4,
        disaggregated=True,
        max_prefill_workers=3,
        requests_per_worker=8.0,
        policy="load",
        labels={"team": "search"},
    )


def test_a_field_that_is_null_has_its_default() -> None:
    assert read_spec(CHAT | dict.fromkeys(["gpu", "args", "policy", "max_workers"])) == EndpointSpec(**CHAT)


@given(specs())
def test_a_spec_reads_itself(spec: EndpointSpec) -> None:
    assert read_spec(msgspec.to_builtins(spec)) == spec
    assert read_spec({name: getattr(spec, name) for name in FIELDS}) == spec


DEEP: Any = 1
for _ in range(40):
    DEEP = [DEEP]

MISTAKES: list[tuple[Any, str]] = [
    ("chat", r"an endpoint is 'chat'; write its fields as a mapping"),
    ([], r"an endpoint is a list; write its fields as a mapping"),
    ({}, r"endpoint has no name; write name: chat"),
    ({"name": "chat"}, r"endpoint chat has no model; write model: Qwen/"),
    (CHAT | {"model": None}, r"endpoint chat has no model"),
    (CHAT | {"name": None}, r"endpoint has no name"),
    (CHAT | {"min_wokers": 2}, r"an endpoint has no field min_wokers; did you mean min_workers"),
    (CHAT | {7: 2}, r"an endpoint has no field 7; it has name, model, "),
    (CHAT | {"replace": True}, r"an endpoint has no field replace; "),
    (CHAT | {"name": "Chat"}, r"endpoint Chat: name is 'Chat'; use small letters, digits and inner hyphens"),
    (CHAT | {"name": "a" * 41}, r"name is 'a{41}'; use small letters"),
    (CHAT | {"name": "chat@2"}, r"name is 'chat@2'; use small letters"),
    (CHAT | {"name": 3}, r"endpoint 3: name is 3; write text"),
    (CHAT | {"name": "a\nb"}, r"endpoint 'a\\nb': name is 'a\\nb'; use small letters"),
    (CHAT | {"model": " "}, r"model is ' '; write a folder, a Hugging Face id"),
    (CHAT | {"model": "a\nb"}, r"model is 'a\\nb'; write a folder"),
    (CHAT | {"model": "m" * 5000}, r"model has 5000 characters; write at most 4096"),
    (CHAT | {"model": "./m"}, r"model is '\./m'; write the whole path: endpoints are read in other folders"),
    (CHAT | {"engine": "trt"}, r"engine is 'trt'; write one of vllm, mocker"),
    (CHAT | {"engine": ["vllm"]}, r"engine is a list; write one of"),
    (CHAT | {"policy": "best"}, r"policy is 'best'; write one of concurrency, load, freeness"),
    (CHAT | {"min_workers": -1}, r"min_workers is -1; write a whole number from 0 to 1024"),
    (CHAT | {"max_workers": 0}, r"max_workers is 0; write a whole number from 1 to 1024"),
    (CHAT | {"park_after_s": 0}, r"park_after_s is 0; write a time in seconds above 0"),
    (CHAT | {"park_after_s": "1 min"}, r"park_after_s is '1 min'; write a time in seconds above 0"),
    (CHAT | {"sleep_after_s": 60}, r"sleep_after_s is given, and min_workers is 1: .*; set min_workers to 0"),
    (
        CHAT | {"min_workers": 0, "park_after_s": 60, "sleep_after_s": 60},
        r"park_after_s is 60, not below sleep_after_s, which is 60; raise sleep_after_s",
    ),
    (
        CHAT | {"min_workers": 0, "park_after_s": 1000},
        r"park_after_s is 1000, not below sleep_after_s, which is 900, its default",
    ),
    (CHAT | {"awake": "daily 20:00"}, r"awake is 'daily 20:00'; write a list of at most 64 texts"),
    (CHAT | {"awake": ["daily 8:00"]}, r"awake.0 is wrong: 'daily 8:00' has '8:00' for a time; write days and times"),
    (CHAT | {"awake": ["daily " + "x" * 100]}, r"awake.0 is 'daily x+\.\.\.; write at most 80 characters"),
    (CHAT | {"forecast": 1}, r"forecast is 1; write true or false"),
    (CHAT | {"min_workers": True}, r"min_workers is True; write a whole number"),
    (CHAT | {"min_workers": 2.0}, r"min_workers is 2.0; write a whole number"),
    (CHAT | {"max_workers": 10**6}, r"max_workers is 1000000; write a whole number"),
    (CHAT | {"max_workers": 10**400}, r"max_workers is a huge number; write a whole number"),
    (CHAT | {"min_workers": 3, "max_workers": 2}, r"max_workers is 2, below min_workers, which is 3; raise max_w"),
    (CHAT | {"disaggregated": "yes"}, r"disaggregated is 'yes'; write true or false"),
    (CHAT | {"max_prefill_workers": 2}, r"max_prefill_workers is given without prefill workers; add disaggr"),
    (
        CHAT | {"disaggregated": True, "min_prefill_workers": 3, "max_prefill_workers": 2},
        r"max_prefill_workers is 2, below min_prefill_workers, which is 3",
    ),
    (CHAT | {"gpu": 0}, r"gpu is 0; write a number of devices from 1 to 64, or a share of one"),
    (CHAT | {"gpu": -1}, r"gpu is -1; write a number of devices"),
    (CHAT | {"gpu": 1.5}, r"gpu is 1.5; write a number of devices"),
    (CHAT | {"gpu": float("nan")}, r"gpu is nan; write a number of devices"),
    (CHAT | {"gpu": 10**400}, r"gpu is a huge number; write a number of devices"),
    (CHAT | {"gpu": "half"}, r"gpu is 'half'; write a number of devices"),
    (CHAT | {"requests_per_worker": 0}, r"requests_per_worker is 0; write a number above 0"),
    (CHAT | {"requests_per_worker": float("inf")}, r"requests_per_worker is inf; write a number above 0"),
    (CHAT | {"labels": {"a": 1}}, r"labels has 1; write text of at most 256"),
    (CHAT | {"labels": {"": "x"}}, r"labels has an empty key; name the label"),
    (CHAT | {"labels": {"a": "x" * 257}}, r"labels has 'x+\.\.\.; write text of at most 256"),
    (CHAT | {"labels": {str(n): "" for n in range(65)}}, r"labels is a mapping; write at most 64 labels"),
    (CHAT | {"labels": ["a"]}, r"labels is a list; write at most 64 labels"),
    (CHAT | {"args": "--seed 1"}, r"args is '--seed 1'; write settings as a mapping"),
    (CHAT | {"args": {"max len": 1}}, r"args has the key 'max len'; write the name of a setting"),
    (CHAT | {"args": {3: 1}}, r"args has the key 3; write the name of a setting"),
    (CHAT | {"args": {"max_len": 1, "max-len": 2}}, r"args\.max-len is given twice; write it once: - and _ mean"),
    (CHAT | {"args": {"model": "other"}}, r"args\.model is no argument; use the field model"),
    (CHAT | {"args": {"a": DEEP}}, r"args\.a is nested too deeply; use at most 16 levels"),
    (CHAT | {"args": {"a": {3: 1}}}, r"args\.a has the key 3; write text"),
    (CHAT | {"args": {"a": 2**63}}, r"args\.a has a value that JSON cannot express"),
    (CHAT | {"args": {"a": [float("inf")]}}, r"args\.a has a value that JSON cannot express"),
    (CHAT | {"args": {"a": b"x"}}, r"args\.a has a value that JSON cannot express"),
    (CHAT | {"args": {"a": "\ud800"}}, r"args\.a is not text; use UTF-8"),
    (CHAT | {"args": {"a": "x" * 70_000}}, r"args takes \d+ bytes; write at most 65536"),
    ({**CHAT, "adapter_of": "chat"}, r"endpoint chat is an adapter of itself; name its base"),
    ({**CHAT, "adapter_of": "b", "gpu": 1}, r"gpu is given for an adapter; leave it out: the workers of b serve it"),
    ({**CHAT, "adapter_of": "b", "min_workers": 2}, r"min_workers is given for an adapter"),
]


@pytest.mark.parametrize(("fields", "error"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_said_in_one_line(fields: Any, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(fields)
    assert re.search(error, str(caught.value))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 320


@pytest.mark.parametrize(
    "args",
    [
        {"hf-token": "hf_abc"},
        {"hf_token": "hf_abc"},
        {"api-key": ["abc"]},
        {"ssl-keyfile-password": "abc"},
        {"kv-transfer-config": {"extra": {"secret_access_key": "abc"}}},
        {"model-loader-extra-config": {"url": "s3://user:abc@host/bucket"}},
    ],
)
def test_secrets_are_refused_and_not_shown(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="looks like a secret") as caught:
        read_spec(CHAT | {"args": args})
    assert "abc" not in str(caught.value)


def test_what_only_resembles_a_secret_is_taken() -> None:
    args = {
        "hf-token": True,
        "dbo-decode-token-threshold": 4,
        "api-key-file": "/k",
        "hf-overrides": {"pad_token": "x"},
    }
    assert read_spec(CHAT | {"args": args}).args == args


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists) | st.binary())
def test_whatever_a_field_holds_is_taken_or_refused(value: Any) -> None:
    for name in EndpointSpec.__struct_fields__:
        try:
            spec = read_spec(CHAT | {name: value})
        except ConfigError:
            continue
        assert msgspec.convert(msgspec.to_builtins(spec), EndpointSpec) == spec


class TestUpdates:
    SPEC = read_spec(CHAT | {"args": {"seed": 1, "dtype": "auto"}, "max_workers": 4, "labels": {"a": "1"}})

    def test_what_is_not_named_stays(self) -> None:
        changed = changed_spec(self.SPEC, {"max_workers": 2, "replace": True})
        assert changed == msgspec.structs.replace(self.SPEC, max_workers=2)

    def test_null_is_the_default(self) -> None:
        assert changed_spec(self.SPEC, {"max_workers": None, "args": None}).most_workers == 1
        assert changed_spec(self.SPEC, {"args": None}).args == {}

    def test_args_and_labels_are_merged_by_key(self) -> None:
        changed = changed_spec(self.SPEC, {"args": {"seed": None, "max_model_len": 8}, "labels": {"b": "2"}})
        assert changed.args == {"dtype": "auto", "max-model-len": 8}
        assert changed.labels == {"a": "1", "b": "2"}

    def test_bounds_of_prefill_workers_go_with_them(self) -> None:
        split = read_spec(CHAT | {"disaggregated": True, "max_prefill_workers": 3})
        assert changed_spec(split, {"disaggregated": False}) == EndpointSpec(**CHAT)

    @pytest.mark.parametrize(
        ("changes", "error"),
        [
            ({"name": "other"}, r"name cannot be changed; create another endpoint"),
            ({"adapter_of": "b"}, r"adapter_of cannot be changed"),
            ({"modle": "x"}, r"no field modle; did you mean model"),
            ({"model": None}, r"endpoint chat has no model"),
            ({"min_workers": 5}, r"max_workers is 4, below min_workers, which is 5"),
            ({"args": {"max_len": 1, "max-len": 1}}, r"args has a key twice"),
            ({"args": [1]}, r"args is a list"),
        ],
    )
    def test_mistakes(self, changes: dict[str, Any], error: str) -> None:
        with pytest.raises(ConfigError, match=error):
            changed_spec(self.SPEC, changes)

    def test_the_same_name_is_no_change(self) -> None:
        assert changed_spec(self.SPEC, {"name": "chat", "adapter_of": None}) == self.SPEC

    @pytest.mark.parametrize("way", ["replace", "roll"])
    def test_the_ways_of_an_order_are_switches(self, way: str) -> None:
        assert [ways_of({}), ways_of({way: None}), ways_of({way: True})] == [Ways(), Ways(), Ways(**{way: True})]
        with pytest.raises(ConfigError, match=f"{way} is 1; write true or false"):
            ways_of({way: 1})


@pytest.mark.parametrize(
    ("changes", "differently"),
    [
        ({"model": "other"}, True),
        ({"engine": "mocker"}, True),
        ({"args": {"seed": 1}}, True),
        ({"gpu": 0.5}, True),
        ({"disaggregated": True}, True),
        ({"min_workers": 2, "max_workers": 4}, False),
        ({"requests_per_worker": 4, "policy": "load", "labels": {"a": "b"}}, False),
    ],
)
def test_only_what_processes_run_takes_another_revision(changes: dict[str, Any], differently: bool) -> None:
    spec = read_spec(CHAT)
    assert runs_differently(spec, changed_spec(spec, changes)) is differently


def test_values_of_other_types_run_differently() -> None:
    one, true = (read_spec(CHAT | {"args": {"a": value}}) for value in (1, True))
    assert runs_differently(one, true)


@given(specs(), specs())
def test_bounds_are_taken_over_without_running_differently(spec: EndpointSpec, other: EndpointSpec) -> None:
    mixed = with_bounds_of(spec, other)
    assert not runs_differently(spec, mixed)
    assert (mixed.min_workers, mixed.max_workers, mixed.labels) == (
        *(other.min_workers, other.max_workers),
        other.labels,
    )
    assert read_spec(msgspec.to_builtins(mixed)) == mixed
