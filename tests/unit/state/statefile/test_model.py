from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import StateError
from state.statefile.model import Component, Owner, Resources, State, decode, encode, recorded_environment
from state.statefile.transitions import claim, release
from tests.unit.state.builders import disaggregated, empty_state, states

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(states())
def test_decode_inverts_encode(state: State) -> None:
    assert decode(encode(state)) == state


@given(st.binary(max_size=64))
def test_garbage_raises_state_error(data: bytes) -> None:
    with pytest.raises(StateError):
        decode(data)


@given(states(), st.data())
def test_a_damaged_file_decodes_to_a_state_or_raises_state_error(state: State, data: st.DataObject) -> None:
    raw = bytearray(encode(state))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    for damaged in (raw, cut):
        try:
            decoded = decode(bytes(damaged))
        except StateError:
            continue
        assert decode(encode(decoded)) == decoded


@given(states(), st.data())
def test_a_field_of_another_type_raises_only_state_error(state: State, data: st.DataObject) -> None:
    document: dict[str, Any] = json.loads(encode(state))
    document[data.draw(st.sampled_from([*document, "extra"]))] = data.draw(ANY_JSON)
    with suppress(StateError):
        decode(json.dumps(document).encode())


def test_deep_nesting_raises_state_error() -> None:
    with pytest.raises(StateError):
        decode(b'{"schema_version":5,"components":' + b"[" * 200_000)


def test_the_shape_is_that_of_dynamo() -> None:
    document = json.loads(encode(release(disaggregated(), "dynamo_PrefillWorker")))
    assert document["namespace"] == "dynamo"
    assert document["circus_endpoint"].startswith("ipc://")
    assert document["environment"] == {}
    assert document["schema_version"] == 6
    worker = document["components"]["dynamo_VllmWorker"]
    assert worker["watcher_name"] == "dynamo_VllmWorker"
    assert worker["cmd"] == "python -m host"
    assert worker["resources"] == {"allocated_gpus": [0]}
    assert worker["lease"] is None
    assert worker["role"] == "decode"
    assert worker["revision"] == "main@1"
    assert document["components"]["dynamo_PrefillWorker"]["resources"] == {}


def test_a_template_is_in_no_phase() -> None:
    template = release(disaggregated(), "dynamo_VllmWorker").components["dynamo_VllmWorker"]
    with pytest.raises(StateError, match="holds no resources but a lease, a pid or a phase"):
        msgspec.structs.replace(template, phase="retiring")


def test_a_file_of_the_version_before_tells_revisions_by_names_and_roles() -> None:
    state = claim(disaggregated(), "dynamo_chat@2_VllmWorker", role="decode", cmd="python -m host", devices=[2])
    document = json.loads(encode(state))
    for entry in document["components"].values():
        del entry["revision"]
    document["schema_version"] = 5
    assert decode(json.dumps(document).encode()) == state
    document["components"]["no watcher"] = document["components"]["dynamo_VllmWorker"]
    with pytest.raises(StateError):
        decode(json.dumps(document).encode())


def test_another_version_is_named_before_its_unknown_fields() -> None:
    with pytest.raises(StateError, match="schema version 7, this program reads 6"):
        decode(b'{"schema_version": 7, "future": true}')


@pytest.mark.parametrize(
    "name", ["DYN_BUS_TOKEN", "DYN_API_KEY", "DYN_PASSWORD", "DYN_DB_PASSWD", "DYN_SECRET", "DYN_apikey"]
)
def test_settings_that_look_secret_are_refused(name: str) -> None:
    with pytest.raises(StateError, match="looks secret"):
        msgspec.structs.replace(empty_state(), environment={name: "x"})
    document = json.loads(encode(empty_state())) | {"environment": {name: "x"}}
    with pytest.raises(StateError, match="looks secret"):
        decode(json.dumps(document).encode())


def test_settings_of_others_are_refused() -> None:
    with pytest.raises(StateError, match="PATH is not recorded"):
        msgspec.structs.replace(empty_state(), environment={"PATH": "/bin"})


def test_the_recorded_environment_is_an_allow_list() -> None:
    environ = {"DYN_LOG": "debug", "DYN_NATS_TOKEN": "s3cret", "HF_TOKEN": "s3cret", "HOME": "/root"}
    assert recorded_environment(environ) == {"DYN_LOG": "debug"}


@pytest.mark.parametrize(
    "command",
    [
        "host --api-key sk-1",
        "host --api-key=sk-1",
        "host --token x",
        "--password=x run",
        "host --hf-token x",
        "host --client-secret=x",
    ],
)
def test_a_command_with_a_credential_is_refused(command: str) -> None:
    with pytest.raises(StateError, match="looks secret"):
        Component("dynamo_A", "A", "", command)


@pytest.mark.parametrize(
    "command",
    ["host --max-num-batched-tokens 8", "host --tokenizer=x", "host --stop-token-ids 1", "host key token"],
)
def test_a_command_without_one_is_not(command: str) -> None:
    assert Component("dynamo_A", "A", "", command).cmd == command


def test_a_device_has_one_holder() -> None:
    with pytest.raises(StateError, match="device 3 is held by both dynamo_A and dynamo_B"):
        with_components(holding("dynamo_A", "A", 3), holding("dynamo_B", "B", 3))


def test_a_device_is_held_once() -> None:
    with pytest.raises(StateError, match="twice"):
        holding("dynamo_A", "A", 3, 3)


def test_an_emptied_entry_has_neither_lease_nor_pid() -> None:
    for change in ({"lease": "l"}, {"pid": 1}):
        with pytest.raises(StateError, match="holds no resources but"):
            msgspec.structs.replace(Component("dynamo_A", "A", "", "run"), **change)


def test_a_suffixed_entry_is_never_empty() -> None:
    with pytest.raises(StateError, match="suffixed and holds nothing"):
        Component("dynamo_A_1", "A", "", "run")


@pytest.mark.parametrize(("name", "service"), [("other_A", "A"), ("dynamo_B", "A"), ("A", "A")])
def test_names_agree(name: str, service: str) -> None:
    with pytest.raises(StateError):
        with_components(holding(name, service))


def test_the_key_is_the_watchers_name() -> None:
    with pytest.raises(StateError, match="entry dynamo_B carries"):
        msgspec.structs.replace(empty_state(), components={"dynamo_B": holding("dynamo_A", "A")})


@pytest.mark.parametrize("namespace", ["../../etc/x", "a b", ""])
def test_a_namespace_that_is_none_is_refused(namespace: str) -> None:
    with pytest.raises(StateError, match="is not valid"):
        empty_state(namespace)


@pytest.mark.parametrize("owner", [Owner(0, 1), Owner(-1, 1), Owner(1, -1), Owner(1, 2**64)])
def test_what_could_not_be_read_back_is_not_written(owner: Owner) -> None:
    with pytest.raises(StateError):
        encode(msgspec.structs.replace(empty_state(), owner=owner))


def test_text_that_is_not_unicode_is_not_written() -> None:
    with pytest.raises(StateError, match="cannot be written"):
        encode(msgspec.structs.replace(empty_state(), environment={"DYN_LOG": "\udcff"}))


def holding(name: str, service: str, *devices: int) -> Component:
    return Component(name, service, "", "run", Resources(devices))


def with_components(*found: Component) -> State:
    return msgspec.structs.replace(empty_state(), components={c.watcher_name: c for c in found})
