"""The paths that are open, and with which methods. An allow-list: the server behind has others, which change it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from dynamo_local.core.http.bounds.admission import Refusal

MODEL_PREFIX = "/v1/models/"
"""Prefix of a model's path. The rest is the model's name, which may contain slashes."""

ENDPOINTS = "/v1/endpoints"
"""Path of the endpoints; behind it, a slash and a name, and behind these perhaps the next."""

KEYS = "/v1/keys"
"""Path of the API keys; behind it, a slash and a name, and behind these perhaps the next."""

USAGE = "/v1/usage"
"""Path of what requests have used."""

FILES = "/v1/files"
"""Path of stored files; behind it, a slash and an id, and behind that perhaps the next."""

BATCHES = "/v1/batches"
"""Path of batches; behind it, a slash and an id, and behind that perhaps the next."""

RESPONSES = "/v1/responses"
"""Path of answers that are kept; behind it, a slash and an id, and behind that perhaps the next."""

TASKS = "/v1/async-tasks"
"""Path of asynchronous tasks; behind it, a slash and an id."""

DETOKENIZE = "/detokenize"
"""Path of the text of token ids."""

METRICS = "/metrics"
"""Path of the metrics for Prometheus."""

CANCEL = "/cancel"
INPUT_ITEMS = "/input_items"
CONTENT = "/content"
ROTATE = "/rotate"
SCALE = "/scale"
PARK = "/park"
WAKE = "/wake"


@dataclass(frozen=True)
class Route:
    """Methods that are open at a path."""

    methods: frozenset[str]
    generates: bool = False
    """The body asks for work of the engines (tokens, or pooled outputs); admission counts its sequences."""
    streams: bool = False
    """If the body asks for it, the answer is a stream of server-sent events."""
    keyless: bool = False
    """No API key is needed, as monitoring expects."""
    asks_model: bool = False
    """The body names a model, which answers."""
    admin: bool = False
    """The key of an administrator is needed."""
    stored: bool = False
    """It is about what is stored for who asks."""
    keeps: bool = False
    """The body may ask for an answer that is kept."""


_GENERATION = Route(frozenset({"POST"}), generates=True, asks_model=True)
_STREAM = Route(frozenset({"POST"}), generates=True, asks_model=True, streams=True)
_CALL = Route(frozenset({"POST"}), asks_model=True)
_LOOK = Route(frozenset({"GET"}))
_PUBLIC = Route(frozenset({"GET", "HEAD"}), keyless=True)
_PAGE = Route(frozenset({"GET"}), keyless=True)

_ENDPOINTS = Route(frozenset({"GET", "POST"}), admin=True)
_ENDPOINT = Route(frozenset({"GET", "PUT", "PATCH", "DELETE"}), admin=True)
_KEYS = Route(frozenset({"GET", "POST"}), admin=True)
_KEY = Route(frozenset({"GET", "DELETE"}), admin=True)
_ACTION = Route(frozenset({"POST"}), admin=True)
_USAGE = Route(frozenset({"GET"}), admin=True)
_STORE = Route(frozenset({"GET", "POST"}), stored=True)
_FILE = Route(frozenset({"GET", "DELETE"}), stored=True)
_CONTENT = Route(frozenset({"GET"}), stored=True)
_BATCH = Route(frozenset({"GET"}), stored=True)
_TASKS = Route(frozenset({"POST"}), stored=True)
_TASK = Route(frozenset({"GET", "DELETE"}), stored=True)
_ANSWER = Route(frozenset({"GET", "DELETE"}), stored=True)
_CANCEL = Route(frozenset({"POST"}), stored=True)
_ITEMS = Route(frozenset({"GET"}), stored=True)

ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        "/v1/chat/completions": _STREAM,
        "/v1/chat/completions/batch": _GENERATION,
        "/v1/completions": _STREAM,
        RESPONSES: replace(_STREAM, keeps=True),
        "/v1/messages": _STREAM,
        "/generative_scoring": _GENERATION,
        "/invocations": _GENERATION,
        "/v1/embeddings": _GENERATION,
        "/v2/embed": _GENERATION,
        "/pooling": _GENERATION,
        "/classify": _GENERATION,
        "/v1/score": _GENERATION,
        "/score": _GENERATION,
        "/v1/rerank": _GENERATION,
        "/v2/rerank": _GENERATION,
        "/rerank": _GENERATION,
        "/v1/messages/count_tokens": _CALL,
        "/tokenize": _CALL,
        DETOKENIZE: _CALL,
        "/v1/models": _LOOK,
        "/health": _PUBLIC,
        "/live": _PUBLIC,
        "/load": _PUBLIC,
        METRICS: _PUBLIC,
        "/ping": Route(frozenset({"GET", "POST"}), keyless=True),
        "/version": _PAGE,
        "/docs": _PAGE,
        "/openapi.json": _PAGE,
        "/static/swagger-ui.css": _PAGE,
        "/static/swagger-ui-bundle.js": _PAGE,
    }
)


def route_of(path: str) -> Route | None:
    """Find what is open at exactly this path; None if nothing is."""
    if (route := ROUTES.get(path)) is not None:
        return route
    if path.startswith(MODEL_PREFIX) and path != MODEL_PREFIX:
        return _LOOK
    if path == USAGE:
        return _USAGE
    if path.startswith(ENDPOINTS):
        return _named_route(
            path.removeprefix(ENDPOINTS), _ENDPOINTS, _ENDPOINT, dict.fromkeys((SCALE, PARK, WAKE), _ACTION)
        )
    if path.startswith(KEYS):
        return _named_route(path.removeprefix(KEYS), _KEYS, _KEY, {ROTATE: _ACTION})
    if path.startswith(FILES):
        return _named_route(path.removeprefix(FILES), _STORE, _FILE, {CONTENT: _CONTENT})
    if path.startswith(BATCHES):
        return _named_route(path.removeprefix(BATCHES), _STORE, _BATCH, {CANCEL: _CANCEL})
    if path.startswith(TASKS):
        return _named_route(path.removeprefix(TASKS), _TASKS, _TASK, {})
    if path.startswith(RESPONSES):
        return _named_route(
            path.removeprefix(RESPONSES), ROUTES[RESPONSES], _ANSWER, {CANCEL: _CANCEL, INPUT_ITEMS: _ITEMS}
        )
    return None


def _named_route(rest: str, of_all: Route, of_one: Route, behind: Mapping[str, Route]) -> Route | None:
    """Find what is open for all, for one by its name, or behind one."""
    if not rest:
        return of_all
    slash, _, rest = rest.partition("/")
    name, _, action = rest.partition("/")
    if slash or not name:
        return None
    return behind.get(f"/{action}") if action else of_one


def without_last_slash(path: str) -> str:
    """The path as it is known here: clients and scrapers write some with a slash at the end."""
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


# Which model a request asks for, and which of the models that are served that is. Pure.

NAME_CHARACTERS = 4096
"""Longest name of a model: without another name, a model is served under the path of its folder."""

_LISTED = 50
"""Names that an error lists at most."""
_SHOWN_CHARACTERS = 256
"""Characters of a name that an error repeats."""

_T = TypeVar("_T")


def asked_model(fields: Mapping[str, Any]) -> str | Refusal | None:
    """Return the name of the model that a request asks for; None: it names none."""
    name = fields.get("model")
    if name is None or name == "":
        return None
    if not isinstance(name, str):
        return Refusal(400, "model is no string", "BadRequestError", "model")
    if len(name) > NAME_CHARACTERS:
        return Refusal(400, f"model must be at most {NAME_CHARACTERS} characters", "BadRequestError", "model")
    return name


class Catalogue(Generic[_T]):
    """The models that are served, each under one or more names. Of two with the same name, the first has it."""

    def __init__(self, models: Iterable[tuple[Sequence[str], _T]] = ()) -> None:
        self.entries: list[_T] = []
        self._by_name: dict[str, _T] = {}
        self._first_names: list[str] = []
        for names, entry in models:
            self.entries.append(entry)
            self._first_names += names[:1]
            for name in names:
                self._by_name.setdefault(name, entry)

    def find(self, name: str | None) -> _T | Refusal:
        """Find the model that a request asks for; None: it names none, which a single model takes for itself. A single
        model whose names are not known yet gets every request."""
        alone = self.entries[0] if len(self.entries) == 1 else None
        if name is None:
            return Refusal(400, self._which(), "BadRequestError", "model") if alone is None else alone
        found = self._by_name.get(name, None if self._by_name else alone)
        return unknown_model(name) if found is None else found

    def _which(self) -> str:
        if not self._first_names:
            return "the request names no model, and none is served"
        more = "" if len(self._first_names) <= _LISTED else ", ..."
        return f"the request names no model; there are: {', '.join(self._first_names[:_LISTED])}{more}"


def unknown_model(name: str) -> Refusal:
    """Return the answer to a request for a model that is not served, as vLLM gives it."""
    shown = name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "..."
    return Refusal(404, f"The model `{shown}` does not exist.", "NotFoundError", "model")


def not_answered(name: str, path: str, paths: Collection[str]) -> Refusal:
    """Return the answer to a request that the model cannot do: `paths` are those at which it answers."""
    does = ", ".join(known for known, route in ROUTES.items() if route.generates and known in paths)
    return Refusal(404, f"The model `{name}` does not answer {path}; it answers {does or 'none'}.", "NotFoundError")
