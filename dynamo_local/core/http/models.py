"""Which model a request asks for, and which of the models that are served that is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.paths import ROUTES

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
