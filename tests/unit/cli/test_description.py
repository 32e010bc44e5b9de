"""Watchers and requests described as text, and which one a name means."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dynamo_local.cli.description import text_of
from dynamo_local.control.answers import WatcherRow
from dynamo_local.control.descriptions import EndpointDescription, WatcherDescription
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.admin import RequestLine
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointStatus, EndpointView, ServedAdapter
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.admin.describe import events_of, request_named

DEATH = Event("death", "ended: killed by SIGKILL", "restart in 1 s", "ns_VllmWorker", 1.8e9)
WORKER = WatcherDescription(
    watcher="ns_VllmWorker",
    component="VllmWorker",
    role="decode",
    state="ready",
    detail="",
    pid=41,
    children=("42 EngineCore", "43 Worker"),
    devices=(0, 1),
    age_s=3725.0,
    starts=2,
    deaths=(DEATH,),
    url=None,
    engine=EngineInfo("vllm", "qwen", 4096, 16, 512, 64, no_transfer="sliding window"),
    load=Load(running=3, waiting=None, kv_usage=0.5, kv_pinned=0.25),
    counts=Counts(requests=7, prompt_tokens=900, output_tokens=120),
    requests=3,
    leaving=1,
    arriving=0,
    config={"engine": "vllm", "api-key": "***"},
    log="/logs/ns_VllmWorker.log",
    errors=("ERROR one", "ERROR two"),
)
REQUEST = RequestLine(
    request="cmpl-12ab",
    worker="ns_VllmWorker",
    epoch=2,
    prompt_tokens=30,
    tokens=12,
    age_s=4.25,
    moving_to=None,
    stays=None,
    frontend="ns_Frontend",
    epoch_age_s=1.5,
    epoch_start=8,
    migrations=1,
    fidelity="distribution",
    fidelity_because_of="temperature",
)
ROW = WatcherRow(watcher="ns_Router", component="Router", role="router", pid=1, devices=(), state="ready")


def fields_of(text: str) -> dict[str, str]:
    """Name and first line of each fact."""
    lines = [line.split("  ", 1) for line in text.splitlines() if not line.startswith(" ")]
    return {name: rest.strip() for name, rest in lines}


def test_a_worker_is_described_with_all_that_is_known_of_it() -> None:
    text = text_of(WORKER)
    assert fields_of(text) == {
        "watcher": "ns_VllmWorker",
        "service": "VllmWorker (decode)",
        "state": "ready",
        "pid": "41",
        "children": "42 EngineCore",
        "devices": "0, 1",
        "running for": "1 h 2 min",
        "starts": "2 since the server started",
        "deaths": fields_of(text)["deaths"],
        "engine": "vllm, model qwen",
        "engine size": "4096 tokens of context, 64 requests at once, 512 KV blocks of 16 tokens",
        "KV transfer": "no: sliding window",
        "load": "3 running, unknown waiting, KV 50% used, 25% pinned for other workers",
        "requests": "3 here, 1 migrating away, 0 migrating to it",
        "counts": "7 requests, 900 prompt tokens computed, 120 tokens generated",
        "config": "api-key: ***",
        "log": "/logs/ns_VllmWorker.log",
        "log errors": "ERROR one",
    }
    assert fields_of(text)["deaths"].endswith("ended: killed by SIGKILL (restart in 1 s)")
    assert "\n             43 Worker\n" in text


def test_what_a_process_does_not_have_is_left_out_and_unknown_is_not_zero() -> None:
    bare = replace(WORKER, engine=None, load=None, counts=None, devices=(), children=(), deaths=(), config={}, pid=None)
    assert fields_of(text_of(bare))["pid"] == "-"
    assert not {"engine", "load", "requests", "devices", "config"} & fields_of(text_of(bare)).keys()
    assert fields_of(text_of(bare))["deaths"] == "none since the server started"
    assert fields_of(text_of(replace(WORKER, requests=None)))["requests"] == "unknown"


def test_a_request_is_described_with_where_it_is_and_whether_it_can_migrate() -> None:
    assert fields_of(text_of(REQUEST)) == {
        "request": "cmpl-12ab",
        "worker": "VllmWorker",
        "here for": "1.5 s, since token 8",
        "frontend": "Frontend",
        "age": "4.2 s",
        "prompt": "30 tokens",
        "output": "12 tokens so far",
        "epoch": "2",
        "remote prefill": "no: its worker prefills",
        "migrations": "1 so far",
        "can migrate": "yes",
        "fidelity": "distribution: elsewhere tokens of the same distribution follow (because of temperature)",
    }
    moving = fields_of(text_of(replace(REQUEST, moving_to="ns_B_1", stays="it is being migrated", worker=None)))
    assert moving["migrations"] == "1 so far, one to B_1 is under way"
    assert moving["can migrate"] == "no: it is being migrated"
    assert moving["worker"] == "none yet"


def test_an_endpoint_is_described_with_its_state_revisions_and_processes() -> None:
    spec = EndpointSpec(
        name="chat",
        model="Qwen/Qwen3-0.6B",
        args={"max-model-len": 4096, "hf-pat": "hidden"},
        gpu=0.5,
        max_workers=4,
        disaggregated=True,
        labels={"team": "a"},
    )
    status = EndpointStatus("updating", "revision 2 starts", wanted=2, ready=1, wanted_prefill=1)
    worker = replace(ROW, watcher="ns_chat@2_VllmWorker", endpoint="chat", revision="chat@2", state="starting")
    found = EndpointDescription(
        endpoint=EndpointView(spec, status, 1.8e9, 1.8e9 + 1, ("chat", "talk")),
        revisions=(
            BoardRevision("chat@1", True, ("chat",), (ServedAdapter("tuned", "/a"),)),
            BoardRevision("chat@2", False, ("chat",)),
        ),
        workers=(worker,),
        requests=3,
        events=(Event("endpoint", "updating", time=1.8e9, endpoint="chat"),),
    )
    text = text_of(found)
    fields = fields_of(text)
    assert fields == {
        "endpoint": "chat",
        "state": "updating: revision 2 starts",
        "model": "Qwen/Qwen3-0.6B",
        "names": "chat, talk",
        "revision": "1",
        "engine": "vllm",
        "workers": "1 of 2 ready; at least 1, at most 4",
        "prefill workers": "0 of 1 ready; at least 1, at most 1",
        "parked": "never",
        "asleep": "never",
        "devices": "0.5 for each worker",
        "policy": "concurrency, 16 requests for each worker",
        "arguments": "hf-pat: '***'",
        "labels": "team=a",
        "revisions": "chat@1 takes requests; adapters: tuned",
        "processes": "chat@2_VllmWorker (starting)",
        "requests": "3 in flight",
        "created": fields["created"],
        "updated": fields["updated"],
        "events": fields["events"],
    }
    assert "chat@2 takes no requests\n" in text
    assert "max-model-len: 4096\n" in text
    assert "hidden" not in text
    assert fields["events"].endswith("  updating")
    assert fields_of(text_of(replace(found, requests=None)))["requests"] == "unknown"


def test_an_adapter_is_described_without_workers_of_its_own() -> None:
    spec = EndpointSpec(name="tuned", model="/a", adapter_of="chat")
    view = EndpointView(spec, EndpointStatus("ready"), 1.8e9, 1.8e9)
    fields = fields_of(text_of(EndpointDescription(endpoint=view, revisions=(), workers=(), requests=0, events=())))
    assert fields["model"] == "/a, adapter of chat"
    assert not {"workers", "engine", "devices"} & fields.keys()


def test_what_serves_an_endpoint_names_its_revision() -> None:
    assert fields_of(text_of(replace(WORKER, revision="chat@2")))["revision"] == "chat@2"
    assert fields_of(text_of(replace(REQUEST, endpoint="chat", revision="chat@2")))["endpoint"] == "chat@2"


def test_a_request_is_named_by_the_beginning_of_its_id() -> None:
    other = replace(REQUEST, request="cmpl-34cd")
    assert request_named("cmpl-1", (REQUEST, other), (ROW,)) == REQUEST
    for name, why in (
        ("cmpl-", "means 2 requests.*cmpl-12ab or cmpl-34cd"),
        ("x", "no watcher and no live request 'x'.*Router"),
    ):
        with pytest.raises(UsageError, match=why):
            request_named(name, (REQUEST, other), (ROW,))
    with pytest.raises(UsageError, match="no live request ''"):
        request_named("", (REQUEST,), (ROW,))
    with pytest.raises(
        UsageError, match=r"no watcher, no endpoint and no live request 'x'; .*Router, and the endpoints ch"
    ):
        request_named("x", (REQUEST,), (ROW,), ["chat"])


def test_only_the_events_of_this_life_of_the_server_count() -> None:
    start, later = Event("server", "starting graph"), replace(DEATH, time=1.9e9)
    other = replace(later, watcher="ns_Router")
    assert events_of([start, DEATH, Event("server", "stopped"), start, other, later], "ns_VllmWorker") == [later]
    assert events_of([DEATH], "ns_VllmWorker") == [DEATH]
