"""What clients order as an asynchronous task, in LLM Engine's shape (EndpointPredictV1Request). Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from dynamo_local.core.answers.requests import unfit_field
from dynamo_local.core.async_tasks.callbacks import CallbackAuth, checked_auth, target_of
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.json_text import as_utf8
from dynamo_local.core.http.paths import ROUTES

MODEL_ENDPOINT = "model_endpoint_id"
"""Parameter of the query that names the endpoint, which is the model."""

TASK_PRIORITY = 100
"""Priority of tasks that name none: behind people, before batches."""

_CHAT, _COMPLETIONS, _RESPONSES, _EMBEDDINGS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
_PATHS_BY_FIELD = (("messages", (_CHAT,)), ("prompt", (_COMPLETIONS,)), ("input", (_RESPONSES, _EMBEDDINGS)))
"""Paths for a body with this field, if the order names none. Of several, the first one that the model answers."""

_SHOWN = 60


class TaskOrder(NamedTuple):
    """What is ordered. `fields`: the body of the request. `paths`: those that it may be for. `callback_url`,
    `callback_auth`: as in TaskHead."""

    fields: dict[str, Any]
    paths: tuple[str, ...]
    callback_url: str = ""
    callback_auth: str | None = None


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an order, as clients of LLM Engine send it."""

    args: dict[str, Any]
    destination_path: str | None = None
    url: Any = None
    cloudpickle: Any = None
    return_pickled: bool = False
    callback_url: str | None = None
    callback_auth: CallbackAuth | None = None


def order_of(body: bytes, endpoint: str | None) -> TaskOrder:
    """Return the order that a request stands for. `endpoint`: the one that its query names. Raises ConfigError, which
    names the field."""
    try:
        asked = msgspec.json.decode(as_utf8(body), type=_Asked)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"the order of a task cannot be read: {error}") from error
    if asked.url is not None:
        raise ConfigError("url: the server reads no arguments from elsewhere; send them in args")
    if asked.cloudpickle is not None:
        raise ConfigError("cloudpickle: the server takes no code; send arguments as JSON in args")
    if asked.return_pickled:
        raise ConfigError("return_pickled: results are JSON; leave it out")
    paths = _paths(asked)
    if (name := unfit_field(asked.args, paths)) is not None:
        raise ConfigError(f"args.{name}: it cannot be set in a task")
    return TaskOrder(_with_model(asked.args, endpoint), paths, *_callback(asked))


def _callback(asked: _Asked) -> tuple[str, str | None]:
    url, auth = asked.callback_url, asked.callback_auth
    if url is None:
        if auth is not None:
            raise ConfigError("callback_auth: there is no callback_url")
        return "", None
    target_of(url)
    return url, None if auth is None else checked_auth(auth).header()


def _with_model(args: dict[str, Any], endpoint: str | None) -> dict[str, Any]:
    if not endpoint:
        return args
    named = args.get("model", endpoint)
    if named != endpoint:
        raise ConfigError(f"args.model is {str(named)[:_SHOWN]!r}, and {MODEL_ENDPOINT} is {endpoint[:_SHOWN]!r}")
    return {**args, "model": endpoint}


def _paths(asked: _Asked) -> tuple[str, ...]:
    if asked.destination_path is not None:
        route = ROUTES.get(asked.destination_path)
        if route is None or not route.generates:
            raise ConfigError(f"destination_path: no path of a model: {asked.destination_path[:_SHOWN]!r}")
        return (asked.destination_path,)
    found = next((paths for name, paths in _PATHS_BY_FIELD if name in asked.args), None)
    if found is None:
        names = ", ".join(name for name, _ in _PATHS_BY_FIELD)
        raise ConfigError(f"args: it has none of {names}", "name the path in destination_path")
    return found
