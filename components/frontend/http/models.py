"""The models behind the gate: the application of each, its limits, and what is in flight or held there."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

from components.frontend.http.waking import HoldTimes, Line, Waking
from components.frontend.limits.rooms import Room
from dynamo_local.core.http.asgi import App
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal
from dynamo_local.core.http.conversations import Conversations
from dynamo_local.core.http.paths import Catalogue, asked_model, not_answered, unknown_model
from dynamo_local.core.http.waiting import Held, Idle, Unready
from dynamo_local.core.messages.admin import HeldRow
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.priority.classes import Occupancy, PriorityClass, Taken

_SHOWN = 3
"""Models of which /health tells why they are not ready."""

Bound = Literal["max-requests", "max-held"]
"""Settings by which requests are refused for want of room."""

NO_APPLICATION = "the model is not served here yet"


async def _no_cards() -> list[dict[str, Any]]:
    return []


class Tasks(NamedTuple):
    """Asynchronous tasks for a model that have no result: those that this frontend has not in hand, and has."""

    queued: int = 0
    taken: int = 0


class Pausable(Protocol):
    """Pauses requests of a model (components/frontend/requests/pausing.py)."""

    def keep(self, running: int, priority: int) -> None:
        """Have at most so many run of those with this priority or a higher number."""

    def end(self) -> None:
        """Have all go on."""


@dataclass(eq=False)
class ModelEntry:
    """A model that requests may ask for.

    `app`: None if it has no application here; then `why_not` tells why. `paths`: those at which it answers; None: not
    known. `vocabulary`: number of its token ids; None: not known. `why_not` returns why the model takes no requests
    now, or None; then `comes` returns whether it is to take some without another order. `cards` returns the model and
    its adapters as /v1/models shows them. `on_change` is called whenever the number of sequences has changed.
    `adapters`: those of `names` that are of adapters, which are endpoints of their own.
    """

    names: Sequence[str]
    why_not: Callable[[], str | None]
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    app: App | None = None
    paths: frozenset[str] | None = None
    vocabulary: int | None = None
    cards: Callable[[], Awaitable[list[dict[str, Any]]]] = _no_cards
    on_change: Callable[[], None] = lambda: None
    comes: Callable[[], bool] = lambda: True
    members: Callable[[], Sequence[Presence]] = tuple
    """Returns the presences of the model's processes."""
    pauses: Pausable | None = None
    """Pauses requests of the model for others; None: nobody does."""
    adapters: Collection[str] = ()
    line: Line = field(default_factory=Line)
    """Requests that generate, and are held until the model takes requests."""
    in_flight: Occupancy = field(default_factory=Occupancy)
    """Sequences in flight: admitted, and not finished."""
    requests: int = 0
    """Requests that generate, in flight."""
    calls: int = 0
    """Other requests in flight."""
    tasks: Tasks = field(default_factory=Tasks)
    waiting_answers: int = 0
    """Answers in the background of this frontend that wait until they are tried again."""
    conversations: Conversations = field(default_factory=Conversations)
    """What the model has answered, and whether its workers still have it cached."""
    waking: Waking | None = None
    """Has the model's endpoint woken; None: the model belongs to none."""
    room: Room | None = None
    """What the other frontends have under way for the model; None: there are no others."""

    @property
    def busy(self) -> bool:
        """Whether a request is in flight, of whichever kind."""
        return self.requests > 0 or self.calls > 0

    @property
    def demand(self) -> int:
        """Sequences in flight, those of requests that are held, and answers that wait."""
        return self.in_flight.total + self.line.sequences.total + self.waiting_answers

    @property
    def taken(self) -> tuple[Taken, ...]:
        """Sequences in flight and held, of all frontends."""
        own = self.in_flight, self.line.sequences
        return own if self.room is None else (*own, self.room.sequences)

    @property
    def held(self) -> tuple[Taken, ...]:
        """Requests that are held, of all frontends."""
        own = self.line.requests
        return (own,) if self.room is None else (own, self.room.held)

    def name_of(self, asked: str | None) -> str:
        """Return the endpoint that a request is for, which asks for a model by this name; None: it names none. For the
        graph's own model, its first name."""
        return asked if asked in self.adapters and asked is not None else next(iter(self.names), "")

    def unready(self) -> Unready | None:
        """Return why the model takes no requests now, or None."""
        why = self.why_not()
        if why is None and self.app is None:
            why = NO_APPLICATION
        if why is None:
            return None
        comes = self.comes()
        unready = Unready(why, comes, for_good=not comes)
        return unready if self.waking is None else self.waking.judged(unready)

    def look(self) -> None:
        """Have held requests look again, if the model takes requests now, or is known to take none."""
        if len(self.line) and ((unready := self.unready()) is None or not unready.comes):
            self.line.wake()
        self._look_to_wake()

    @property
    def is_idle(self) -> bool:
        """Whether the model has no worker because nobody asks for it."""
        return self.waking is not None and self.waking.is_idle

    @property
    def woken_from(self) -> Idle | None:
        """How the model's endpoint is idle, or was until it began to wake."""
        return None if self.waking is None else self.waking.woken_from

    def hold(self, held: Held) -> None:
        """Count a request as held."""
        self.line.join(held)
        self._count_held(held, 1)
        self.on_change()
        self._look_to_wake()

    def held_rows(self) -> list[HeldRow]:
        """Return the requests that are held, the oldest first."""
        unready, now = self.unready(), time.monotonic()
        why = "" if unready is None else unready.why
        return [HeldRow(held.sequences, now - held.since, why) for held in self.line.waiting]

    def release(self, held: Held) -> None:
        """Count it as held no more."""
        self.line.leave(held)
        self._count_held(held, -1)
        self.on_change()
        self._look_to_wake()

    def refusal_at(self, path: str) -> Refusal | None:
        """Return the answer to requests at this path, if the model does not do what they ask for."""
        if self.paths is None or path in self.paths:
            return None
        return not_answered(self.names[0] if self.names else "", path, self.paths)

    def enter(self, sequences: int, priority: int = 0, key: str = "") -> None:
        """Count a request of this priority and key that generates so many sequences."""
        self._count(1, sequences, priority, key)

    def leave(self, sequences: int, priority: int = 0, key: str = "") -> None:
        """Count it no more."""
        self._count(-1, -sequences, priority, key)

    def _count(self, requests: int, sequences: int, priority: int, key: str) -> None:
        self.requests += requests
        self.in_flight.add(priority, key, sequences)
        if self.room is not None:
            self.room.sequences.add(priority, key, sequences)
        self.on_change()

    def _count_held(self, held: Held, change: int) -> None:
        if self.room is not None:
            self.room.sequences.add(held.priority, held.key, change * held.sequences)
            self.room.held.add(held.priority, held.key, change)

    def _look_to_wake(self) -> None:
        if self.waking is not None:
            self.waking.look()


class ModelTable:
    """The models that are served now."""

    def __init__(self, entries: Iterable[ModelEntry] = ()) -> None:
        self._catalogue = Catalogue[ModelEntry]()
        self.hold_times = HoldTimes()
        self._refused: Counter[tuple[str, str, str]] = Counter()
        self.replace(entries)

    def replace(self, entries: Iterable[ModelEntry]) -> None:
        """Serve these models from now on. Requests under way stay where they are; held ones look for theirs again."""
        before = self._catalogue.entries
        self._catalogue = Catalogue((entry.names, entry) for entry in entries)
        for entry in before:
            entry.line.wake()

    def wake(self) -> None:
        """Have all held requests look again."""
        for entry in self.entries:
            entry.line.wake()

    @property
    def entries(self) -> list[ModelEntry]:
        """The models, in the order in which they are listed."""
        return self._catalogue.entries

    def find(self, name: str | None) -> ModelEntry | Refusal:
        """Find the model that a request asks for by this name; None: it names none."""
        return self._catalogue.find(name)

    def asked(
        self, fields: Mapping[str, Any], path: str, allows: Callable[[str], bool] = lambda _: True
    ) -> ModelEntry | Refusal:
        """Find the model that a request asks for, and that can do what is asked at this path. One whose endpoint is not
        allowed is as if it were not there."""
        name = asked_model(fields)
        entry = name if isinstance(name, Refusal) else self._found(name, allows)
        return entry if isinstance(entry, Refusal) else entry.refusal_at(path) or entry

    def _found(self, name: str | None, allows: Callable[[str], bool]) -> ModelEntry | Refusal:
        entry = self.find(name)
        if name is not None:
            is_hidden = isinstance(entry, ModelEntry) and not allows(entry.name_of(name))
            return unknown_model(name) if is_hidden else entry
        allowed = [each for each in self.entries if allows(each.name_of(None))]
        if len(allowed) == len(self.entries):
            return entry
        return Catalogue((each.names, each) for each in allowed).find(None)

    def held(self) -> dict[str, int]:
        """Return how many requests are held for each model, by its first name."""
        held: dict[str, int] = {}
        for entry in self.entries:
            for name in entry.names[:1]:
                held[name] = held.get(name, 0) + len(entry.line)
        return held

    def held_by_class(self) -> dict[tuple[str, str], int]:
        """Return the same by class as well."""
        return {
            (name, one): entry.line.requests.of(one)
            for entry in self.entries
            for name in entry.names[:1]
            for one in PriorityClass
        }

    def note_refused(self, entry: ModelEntry, one: PriorityClass, bound: Bound) -> None:
        """Count a request of this class that was refused for want of room."""
        for name in entry.names[:1]:
            self._refused[name, one, bound] += 1

    def refused(self) -> dict[tuple[str, str, str], int]:
        """Return how many requests were refused so, by model, class and bound; all series of models served now."""
        names = [name for entry in self.entries for name in entry.names[:1]]
        every = itertools.product(names, PriorityClass, get_args(Bound))
        return {**dict.fromkeys(every, 0), **self._refused}

    def why_none(self) -> str | None:
        """Return why no model can answer. None: one can, perhaps once it is woken, or there is none that should."""
        reasons = []
        for entry in self.entries:
            if (why := entry.why_not()) is None or entry.is_idle:
                return None
            reasons.append(why if len(self.entries) == 1 else f"{entry.names[0]}: {why}")
        if not reasons:
            return None
        more = "" if len(reasons) <= _SHOWN else f"; and {len(reasons) - _SHOWN} more"
        return "; ".join(reasons[:_SHOWN]) + more

    async def cards(self, allows: Callable[[str], bool] = lambda _: True) -> list[dict[str, Any]]:
        """Return all models and their adapters as /v1/models shows them, as far as their endpoints are allowed."""
        return [card for entry in self.entries for card in await entry.cards() if allows(entry.name_of(card.get("id")))]
