"""What can be asked of a server: one table for the server, its clients and the OpenAPI document. Pure.

Paths that frontends open to administrators are the same here and there (core/http/paths.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import msgspec

from dynamo_local.core.errors import ConfigError, OrderError
from dynamo_local.core.http.json_text import as_utf8, why_not

_T = TypeVar("_T")

MOST_BYTES = 256 * 1024
"""Largest body of an order, in bytes."""


@dataclass(frozen=True)
class Operation:
    """A question to a server, or an order, as clients may send it. `path`: names in braces are parameters. `takes`:
    fields of the body, each with its meaning. `query`: parameters of the query, likewise."""

    name: str
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
    path: str
    does: str
    takes: Mapping[str, str] = field(default_factory=dict, hash=False)
    query: Mapping[str, str] = field(default_factory=dict, hash=False)
    status: int = 200
    """Of success. 201: something was created; 202: the order is durable, and carried out from now on."""

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of the path."""
        return tuple(name for _, name, _, _ in Formatter().parse(self.path) if name)

    def path_for(self, names: Mapping[str, str]) -> str:
        """Return the path with these names in place of those in braces. Raises OrderError for one that is empty."""
        for key in self.names:
            if not names[key]:
                raise OrderError(f"no {key} is given", param=key)
        return self.path.format_map({key: quote(name, safe="") for key, name in names.items()})


@dataclass(frozen=True)
class Call:
    """A request for an operation. `names`: the parameters of its path. `by`: name of the API key of who orders; empty:
    the owner of the server, or a part of it."""

    names: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    by: str = ""
    streams: bool = False
    """Whether the answer is wanted as a stream of server-sent events."""

    def name(self, check: Callable[[str], str]) -> str:
        """Return the name in the path. `check` raises ConfigError for what is none. Raises OrderError."""
        try:
            return check(self.names["name"])
        except ConfigError as error:
            raise OrderError(error.cause, error.remedy, param="name") from None

    def fields(self, known: Collection[str] | None = None) -> dict[str, Any]:
        """Return the fields of the body; of no body, none. Raises OrderError for anything else than an object, and for
        fields that are not `known`."""
        found = fields_of(self.body) if self.body else {}
        other = None if known is None else next((name for name in found if name not in known), None)
        if other is not None:
            there = f"; there is {', '.join(known)}" if known else ""
            raise OrderError(f"there is no field {other[:60]!r}{there}", param=other)
        return found

    def content(self, kind: type[_T]) -> _T:
        """Return the body as a struct. Raises OrderError."""
        try:
            return msgspec.convert(self.fields(), kind)
        except msgspec.ValidationError as error:
            raise OrderError(f"the body is not as it should be: {error}") from None

    def switch(self, name: str) -> bool:
        """Return the one field that the body may have, true or false; the latter without it. Raises OrderError."""
        value = self.fields((name,)).get(name, False)
        if not isinstance(value, bool):
            raise OrderError(f"{name} must be true or false", param=name)
        return value

    def number(self, name: str, otherwise: int) -> int:
        """Return a parameter of the query that is a whole number. Raises OrderError."""
        text = self.query.get(name, str(otherwise))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise OrderError(f"{name} must be a whole number", param=name)
        return int(text)

    def flag(self, name: str) -> bool:
        """Return a parameter of the query that is true or false; the latter if it is not given. Raises OrderError."""
        text = self.query.get(name, "false")
        if text not in {"true", "false"}:
            raise OrderError(f"{name} must be true or false", param=name)
        return text == "true"


@dataclass(frozen=True)
class OtherSuccess:
    """The content of an answer, with another status than the operation's."""

    content: Any
    status: int


Handler = Callable[[Call], Awaitable[Any]]
"""Does what is asked, and returns the content of the answer, or OtherSuccess. Raises DynamoError."""

Handlers = Mapping[Operation, Handler]


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields in the body of an order. Raises OrderError."""
    text = body
    try:
        text = as_utf8(body)
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise OrderError(f"the body is not a JSON object: {why_not(text, error)}") from None


_KEY = "Name of the key: small letters, digits and inner hyphens."

LIST_KEYS = Operation("list_keys", "GET", "/v1/keys", "List all API keys, with what they allow.")
GET_KEY = Operation("get_key", "GET", "/v1/keys/{name}", "Show an API key.")
CREATE_KEY = Operation(
    "create_key",
    "POST",
    "/v1/keys",
    "Create an API key. Its secret is in this answer and nowhere else.",
    takes={
        "name": _KEY,
        "endpoints": "Endpoints that it may use; empty: all.",
        "requests_per_minute": "Requests a minute.",
        "tokens_per_minute": "Tokens a minute, of prompts and answers together.",
        "requests_at_once": "Requests in flight.",
        "best_priority": "Lowest `priority` of its requests.",
        "default_priority": "`priority` of its requests that name none.",
        "expires_at": "When it ends, in seconds since 1970.",
        "expires_in_s": "In how many seconds it ends.",
        "admin": "Whether it may change endpoints and keys.",
    },
    status=201,
)
ROTATE_KEY = Operation(
    "rotate_key",
    "POST",
    "/v1/keys/{name}/rotate",
    "Give an API key another secret, which is in this answer and nowhere else.",
    takes={"overlap_s": "How long the former secret stays valid, in seconds. [default: an hour]"},
)
REVOKE_KEY = Operation(
    "revoke_key",
    "DELETE",
    "/v1/keys/{name}",
    "Remove an API key.",
    takes={"open": "Also if it is the last one, so that the server answers everybody."},
)

_MODEL_ENDPOINT: Mapping[str, str] = {
    "model": "Folder, Hugging Face id, or name of a model; with `adapter_of`, the folder of a LoRA adapter.",
    "adapter_of": "Endpoint whose workers serve the model, an adapter.",
    "engine": "`vllm` or `mocker`.",
    "args": "Settings of frontend and workers, such as `max-model-len`.",
    "gpu": "Devices of each worker, or its share of one.",
    "min_workers": "Smallest number of workers. 0: none while nobody asks for it.",
    "max_workers": "Largest number of workers.",
    "disaggregated": "Whether long prompts are prefilled by other workers.",
    "min_prefill_workers": "Smallest number of prefill workers.",
    "max_prefill_workers": "Largest number of prefill workers.",
    "park_after_s": "Time without a request until workers are parked, in seconds.",
    "sleep_after_s": "Time without a request until workers end, in seconds.",
    "awake": "When it is awake without a request.",
    "forecast": "Whether it is awake at times at which it was often used.",
    "requests_per_worker": "What policy `concurrency` aims at.",
    "policy": "Policy of scaling: `concurrency`, `load`, `freeness` or `dynamo`.",
    "labels": "Labels: texts by name.",
    "replace": "Whether the old workers may end before the new ones are ready.",
    "roll": "Of an adapter: whether arguments of its base that leave no room for it may be changed.",
}

LIST_ENDPOINTS = Operation("list_endpoints", "GET", "/v1/endpoints", "List all endpoints, with their states.")
GET_ENDPOINT = Operation("get_endpoint", "GET", "/v1/endpoints/{name}", "Show an endpoint.")
CREATE_ENDPOINT = Operation(
    "create_endpoint",
    "POST",
    "/v1/endpoints",
    "Create an endpoint.",
    takes={"name": "Name of the endpoint: small letters, digits and inner hyphens.", **_MODEL_ENDPOINT},
    status=201,
)
UPDATE_ENDPOINT = Operation(
    "update_endpoint",
    "PATCH",
    "/v1/endpoints/{name}",
    "Change an endpoint. Fields that are not given stay; `null` gives one its default.",
    takes=_MODEL_ENDPOINT,
    status=202,
)
PUT_ENDPOINT = replace(UPDATE_ENDPOINT, name="update_endpoint_by_put", method="PUT", does="The same as PATCH.")
SCALE_ENDPOINT = Operation(
    "scale_endpoint",
    "POST",
    "/v1/endpoints/{name}/scale",
    "Have an endpoint run so many workers, within its bounds.",
    takes={"workers": "Number of workers.", "prefill_workers": "Number of prefill workers."},
    status=202,
)
PARK_ENDPOINT = Operation(
    "park_endpoint",
    "POST",
    "/v1/endpoints/{name}/park",
    "Park the workers of an endpoint once its requests under way have finished.",
    status=202,
)
WAKE_ENDPOINT = Operation(
    "wake_endpoint",
    "POST",
    "/v1/endpoints/{name}/wake",
    "Have a worker of an endpoint ready.",
    query={"asked": "Whether a frontend holds a request for it, instead of its owner wanting it awake."},
    status=202,
)
DELETE_ENDPOINT = Operation(
    "delete_endpoint",
    "DELETE",
    "/v1/endpoints/{name}",
    "End an endpoint once its requests under way have finished. 200: nothing is left of it.",
    status=202,
)

GET_USAGE = Operation(
    "get_usage",
    "GET",
    "/v1/usage",
    "Show what requests have used.",
    query={
        "since": "From when: a time before now such as `12h` or `1d`, a date, or a date and a time (of UTC).",
        "until": "Until when, likewise.",
        "by": "Groups, of `key`, `endpoint` and `day`. [default: key,endpoint]",
    },
)

LIST_JOBS = Operation(
    "list_jobs",
    "GET",
    "/v1/jobs",
    "List the asynchronous tasks that have not ended, then such batches, the newest of each first.",
    query={"kind": "`task` or `batch`: only these.", "ended": "Whether also those that have ended."},
)
GET_JOB = Operation("get_job", "GET", "/v1/jobs/{job}", "Show an asynchronous task or a batch.")
CANCEL_JOB = Operation(
    "cancel_job",
    "POST",
    "/v1/jobs/{job}/cancel",
    "Cancel an asynchronous task, which then has failed, or a batch, of which is kept what was done. One that has "
    "ended stays as it is.",
)

_LIMIT = "How many to tell at most."
_ENDPOINT = "Tell those of this endpoint alone."

LIST_WORKERS = Operation(
    "list_workers",
    "GET",
    "/v1/workers",
    "List all processes of the server, with their states and devices.",
    query={"others": "Whether to tell which devices of the machine others hold, in `held_by_others`."},
)
CHANGE_ROLE = Operation(
    "change_role",
    "POST",
    "/v1/workers/{watcher}/role",
    "Have a worker take up another role. It does not load its model again.",
    takes={
        "role": "prefill or decode.",
        "force": "Also if no worker is left that decodes.",
        "recorded": "Whether an event records it; false if whoever orders records it.",
    },
)
LOOK = Operation(
    "look", "GET", "/v1/fleet", "Tell what all processes announce, how long queues are, and what the planner reports."
)
DIAGNOSE = Operation(
    "diagnose",
    "GET",
    "/v1/doctor",
    "Tell what is wrong with the server and its endpoints, as `dynamo doctor` does; the server itself first.",
)
DESCRIBE = Operation(
    "describe", "GET", "/v1/describe/{name}", "Tell everything known of a process, an endpoint or a live request."
)
LIST_REQUESTS = Operation(
    "list_requests",
    "GET",
    "/v1/requests",
    "List the requests in flight, the oldest of each frontend first.",
    query={"limit": _LIMIT, "worker": "Tell those of this worker alone.", "endpoint": _ENDPOINT},
)
MIGRATE = Operation(
    "migrate",
    "POST",
    "/v1/migrations",
    "Migrate running requests to another worker; answered when each has migrated, or has not.",
    takes={
        "request": "Id of a request, as its client knows it, or its beginning.",
        "from": "In its place: the worker whose requests are to migrate.",
        "to": "Destination. [default: the worker with the most free capacity]",
        "cold": "Whether the destination computes the KV cache again.",
    },
)
READ_QUEUE = Operation(
    "read_queue",
    "GET",
    "/v1/queue",
    "Count the jobs of the prefill queues, and list the oldest.",
    query={"limit": _LIMIT, "endpoint": _ENDPOINT},
)
PURGE_QUEUE = Operation(
    "purge_queue", "DELETE", "/v1/queue", "Drop the jobs of the prefill queues.", query={"endpoint": _ENDPOINT}
)
LIST_ROUTES = Operation(
    "list_routes",
    "GET",
    "/v1/routes",
    "List to which workers the latest requests went, and why.",
    query={"limit": _LIMIT, "request": "A request's id, or the beginning of it.", "endpoint": _ENDPOINT},
)
LIST_SETTINGS = Operation(
    "list_settings", "GET", "/v1/settings", "List the live settings, and where each value comes from."
)
SET_SETTING = Operation(
    "set_setting",
    "PUT",
    "/v1/settings/{key}",
    "Change a live setting, until the server ends.",
    takes={"value": "A whole number; 0 or 1 for a switch."},
)
ROTATE_TOKEN = Operation(
    "rotate_token", "POST", "/v1/token/rotate", "Replace the token of the bus; answered when the former one is refused."
)

LIST_EVENTS = Operation(
    "list_events",
    "GET",
    "/v1/events",
    "List the server's events of the last hour, at most 10,000. With `Accept: text/event-stream`, follow them: the "
    "stream begins with those of the last hour, and after a header Last-Event-ID with those after that event.",
    query={
        "after": "Id of an event: only those after it. An id of an earlier server leaves none out. `now`: only those "
        "to come; the list has in `last` the id after which they follow.",
        "kind": "Only events of these kinds, with commas between them. Those of kind `request` (at most 50 new "
        "requests a second of each frontend, the others are left out) and `state` are told only if they are asked for.",
    },
)

_ORDER = "Id of the order, by whoever gives it: given again, it is not carried out again. [default: another one]"
_FORCE = "Also if no worker is left to answer requests."
_READY = "How long each new worker may take to become ready, in seconds. [default: the server's own]"

SCALE = Operation(
    "scale",
    "POST",
    "/v1/scale",
    "Set the numbers of workers of services.",
    takes={
        "targets": "Number of workers by service.",
        "force": _FORCE,
        "ready_timeout_s": _READY,
        "id": _ORDER,
    },
    status=202,
)
DRAIN_WORKER = Operation(
    "drain_worker",
    "POST",
    "/v1/workers/{watcher}/drain",
    "Drain and end a worker.",
    takes={"force": _FORCE, "id": _ORDER},
    status=202,
)
RESTART_WORKERS = Operation(
    "restart_workers",
    "POST",
    "/v1/workers/restart",
    "Restart the processes of a service or an endpoint, one after the other, or one process.",
    takes={
        "name": "A service, an endpoint or a watcher.",
        "force": "Also if no worker answers requests meanwhile.",
        "ready_timeout_s": _READY,
        "id": _ORDER,
    },
    status=202,
)
BEGIN_PLANNING = Operation(
    "begin_planning",
    "POST",
    "/v1/planner",
    "Have a planner be the only one that acts, for as long as its process lives.",
    takes={"pid": "Of the planner's process, on the server's machine."},
)
TAKE_ACTION = Operation(
    "take_action",
    "POST",
    "/v1/planner/actions",
    "Carry out what the planner that acts has decided for the graph's own workers.",
    takes={
        "pid": "Of the planner's process.",
        "action": "An object: `action` is AddWorker, RemoveWorker, SwitchRole or Restart; the rest are its fields.",
        "why": "Its reasons, for the event that records it.",
        "max_devices": "How many devices all workers together may hold. [default: all]",
        "ready_timeout_s": _READY,
        "id": _ORDER,
    },
    status=202,
)
GET_ORDER = Operation(
    "get_order",
    "GET",
    "/v1/orders/{id}",
    "Tell how far an order is.",
    query={"after": "How many of its steps are known: they are left out, and others are waited for, for 5 s at most."},
)

GET_LOG = Operation(
    "get_log",
    "GET",
    "/v1/logs/{watcher}",
    "Tell the last lines of a process's log, wherever it runs, and the offset in bytes after them.",
    query={
        "lines": "How many lines at most; no more than 1,000 are told.",
        "after": "Offset in bytes: only lines after it.",
    },
)
STOP = Operation(
    "stop",
    "POST",
    "/v1/stop",
    "Stop the server. Requests in flight are finished first.",
    takes={"hurry": "Whether nothing is waited for."},
    status=202,
)

OPERATIONS = tuple(value for value in tuple(globals().values()) if isinstance(value, Operation))
"""All of the above, in their order."""
CHANGES = (SCALE, DRAIN_WORKER, RESTART_WORKERS, BEGIN_PLANNING, TAKE_ACTION, CHANGE_ROLE, SET_SETTING, ROTATE_TOKEN)
"""Orders that change what runs. A server that stops refuses them."""
