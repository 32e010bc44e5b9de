"""Documents with a version: read whatever release wrote them, converted step by step. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from dynamo_local.core.errors import StateError

Convert = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes a document of the next version of one of its own. It need not set `schema_version`."""

_T = TypeVar("_T", bound=msgspec.Struct)


class NewerDocumentError(StateError):
    """A document was written by a later release."""


def as_document(content: msgspec.Struct, version: int) -> dict[str, Any]:
    """The content as JSON has it, with its version."""
    return {"schema_version": version, **msgspec.to_builtins(content)}


def from_versions(
    document: Any, kind: type[_T], version: int, conversions: Mapping[int, Convert], too_new: Callable[[int], Exception]
) -> tuple[_T, int]:
    """Inverse of `as_document`, also for older versions. Returns the content and the version that it had.

    `conversions`: by version, what makes the next one of it. Raises StateError for anything else, and what `too_new`
    makes of a later version.
    """
    found = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise StateError("it has no version")
    if found > version:
        raise too_new(found)
    body = {key: value for key, value in document.items() if key != "schema_version"}
    try:
        for step in range(found, version):
            body = conversions[step](body)
        return msgspec.convert(body, kind), found
    except (msgspec.ValidationError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"it is no registry of version {found}: {error}") from error
