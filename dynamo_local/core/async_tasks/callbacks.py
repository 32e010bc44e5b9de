"""Callbacks of tasks: where they may go, what is sent, how it is signed, and when it is tried again. Pure.

Signed as Standard Webhooks has it (https://www.standardwebhooks.com), which OpenAI's clients verify as well:
`webhook-id`, `webhook-timestamp`, and `webhook-signature`, which is the HMAC-SHA256 of id, timestamp and body.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.answers.requests import unfit_field
from dynamo_local.core.async_tasks.records import Call, Task
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.http.json_text import as_utf8
from dynamo_local.core.http.paths import ROUTES

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_URL_CHARACTERS = 2048
AT_ONCE = 64
"""Attempts of a frontend at the same time."""

AT_ONCE_FOR_ORIGIN = 4
"""Attempts of a frontend at the same time for one scheme, host and port."""

_FIRST_PAUSE_S, _GROWTH, _LONGEST_PAUSE_S = 5.0, 4, 7200.0
MOST_ATTEMPTS = 16
"""Over about a day."""

_GONE = 410
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_URL = re.compile(r"[!-~]+")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that IANA has given for global unicast. What is outside is local, translated or reserved."""
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "3fff::/20", "168.63.129.16/32")))
"""What `is_global` of some Pythons takes for public: protocol assignments (RFC 6890), documentation (RFC 9637), and the
address at which every virtual machine of Azure reaches its host."""
_SECRET_PREFIX = "whsec_"


@dataclass(frozen=True)
class CallbackLimits:
    """Settings of callbacks."""

    callback_allow: str = field(
        default="",
        metadata={
            "help": "Networks to which callbacks of tasks may go beside public addresses, as CIDRs with commas "
            "between, such as 127.0.0.1/32,10.0.0.0/8."
        },
    )
    callback_timeout_s: float = field(
        default=10.0,
        metadata={"help": "Longest time for one attempt of a callback, the look-up of its host included, in s."},
    )


class CallbackAuth(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Basic authentication at the receiver, as LLM Engine has it."""

    kind: str
    username: str = ""
    password: str = ""

    def header(self) -> str:
        """Return the value of the header Authorization."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class Target(NamedTuple):
    """Where a callback goes. `path`: with the query."""

    is_tls: bool
    host: str
    port: int
    path: str

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{'https' if self.is_tls else 'http'}://{host_in_url(self.host)}:{self.port}"


def target_of(url: str) -> Target:
    """Return where a callback of this URL goes. Raises ConfigError."""
    if len(url) > MAX_URL_CHARACTERS:
        raise ConfigError(f"callback_url: it has {len(url)} characters, at most {MAX_URL_CHARACTERS}")
    if _URL.fullmatch(url) is None or "\\" in url:
        raise ConfigError("callback_url: it has characters that no URL has")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"callback_url: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"callback_url: the scheme must be http or https, got {parts.scheme[:20]!r}")
    if "@" in parts.netloc:
        raise ConfigError("callback_url: it has a user or a password", "send them in callback_auth")
    if _address(host) is None and _HOST.fullmatch(host) is None:
        raise ConfigError(f"callback_url: it names no host: {host[:60]!r}")
    if port == 0:
        raise ConfigError("callback_url: port 0 is none")
    is_tls = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(is_tls, host, port or (443 if is_tls else 80), path)


def checked_auth(auth: CallbackAuth) -> CallbackAuth:
    """Check what a client sends as `callback_auth`. Raises ConfigError."""
    if auth.kind != "basic":
        raise ConfigError(f"callback_auth.kind: it must be basic, got {auth.kind[:20]!r}")
    if not auth.username or ":" in auth.username or max(len(auth.username), len(auth.password)) > 256:
        raise ConfigError("callback_auth: username and password have at most 256 characters, the username no colon")
    return auth


def is_address(host: str) -> bool:
    """Whether a host is an address, which need not be looked up."""
    return _address(host) is not None


def networks_of(text: str) -> tuple[Network, ...]:
    """Return the networks of the setting callback-allow. Raises ConfigError."""
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"callback-allow: {error}", "write CIDRs, such as 127.0.0.1/32,10.0.0.0/8") from error


def may_be_called(address: Address, allowed: Iterable[Network]) -> bool:
    """Whether callbacks may go to an address: to public ones, and where the administrator says so."""
    meant = _meant(address)
    if any(each in network for network in allowed for each in (address, meant) if each.version == network.version):
        return True
    if meant.version == 6 and meant not in _GLOBAL_UNICAST:
        return False
    return meant.is_global and not meant.is_multicast and not any(meant in network for network in _NOT_PUBLIC)


def chosen(host: str, found: Iterable[str], allowed: Iterable[Network]) -> str:
    """Return the address to connect to, of those that were found for a host. Raises ConfigError: none may be called."""
    addresses, networks = [ipaddress.ip_address(each) for each in found], tuple(allowed)
    good = next((each for each in addresses if may_be_called(each, networks)), None)
    if good is not None:
        return str(good)
    shown = ", ".join(map(str, addresses[:3]))
    raise ConfigError(
        f"callback_url: {host[:60]} is {shown}, where callbacks may not go",
        "use a public address, or have the administrator allow it (setting callback-allow)",
    )


def pause_s(attempts: int) -> float | None:
    """Return for how long to wait after so many attempts that have failed; None: no further one is made."""
    if attempts >= MOST_ATTEMPTS:
        return None
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * float(_GROWTH ** min(attempts - 1, 8)))


def left_s(calls: Sequence[Call], now: float, pause_s: Callable[[int], float | None]) -> float:
    """Return how many seconds are left until the receiver is to be called next, whoever has made these calls. `now`: in
    seconds since 1970."""
    if not calls or calls[-1].at > now:
        # That of the last call is not known: the clock was set back.
        return 0.0
    return max(0.0, calls[-1].at + (pause_s(len(calls)) or 0.0) - now)


def is_delivered(status: int) -> bool:
    """Whether the receiver has taken a callback that it has answered with this status."""
    return 200 <= status < 300


def is_last(status: int) -> bool:
    """Whether the receiver wants no further attempt."""
    return is_delivered(status) or status == _GONE


def secret_of(master: bytes, owner: str) -> bytes:
    """Return the secret by which callbacks of an owner's tasks are signed: nobody can sign for another owner."""
    return hmac.digest(master, b"callbacks of " + owner.encode(), hashlib.sha256)


def secret_text(secret: bytes) -> str:
    """Return a secret as Standard Webhooks writes it."""
    return _SECRET_PREFIX + base64.b64encode(secret).decode()


def payload_of(task: Task) -> bytes:
    """Return the body of a callback: the same at each attempt."""
    assert task.result is not None, "a callback tells the result"
    became = "succeeded" if task.status == "SUCCESS" else "failed"
    event = {
        "id": event_id(task.head.task),
        "object": "event",
        "type": f"task.{became}",
        "created_at": task.result.at,
        "data": task.shown(),
    }
    return msgspec.json.encode(event)


def event_id(task: str) -> str:
    """Return the id of a task's callback: the same at each attempt, so that a receiver knows one that it has."""
    return f"evt_{task.removeprefix('task_')}"


def headers_of(task: Task, payload: bytes, secret: bytes, now: float) -> dict[str, str]:
    """Return the headers of an attempt. `now`: in seconds since 1970."""
    named, timestamp = event_id(task.head.task), str(int(now))
    signed = hmac.digest(secret, f"{named}.{timestamp}.".encode() + payload, hashlib.sha256)
    headers = {
        "content-type": "application/json",
        "user-agent": "dynamo-local",
        "webhook-id": named,
        "webhook-timestamp": timestamp,
        "webhook-signature": "v1," + base64.b64encode(signed).decode(),
    }
    auth = task.head.callback_auth
    return headers if auth is None else {**headers, "authorization": auth}


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _meant(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1] or address


# What clients order as an asynchronous task, in LLM Engine's shape (EndpointPredictV1Request). Pure.

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
