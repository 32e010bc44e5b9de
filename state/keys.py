"""The registry of API keys on disk (documents.py). It outlives the server, and holds no secret: only digests."""

from __future__ import annotations

from dynamo_local.core.keys.registry import (
    KEY_CONVERSIONS,
    KEYS_VERSION,
    KeyRegistry,
    keys_from_document,
    keys_to_document,
)
from state.documents import DocumentKind, read_document
from state.paths import StatePaths

KEYS = DocumentKind(
    "keys",
    KEYS_VERSION,
    KeyRegistry(),
    files=lambda paths: (paths.keys_copy, paths.keys_file),
    backup=StatePaths.keys_backup,
    remedy="put a backup in the place of one of them; without both the server would answer everybody",
    write=keys_to_document,
    read=keys_from_document,
    conversions=KEY_CONVERSIONS,
)


def read_key_registry(paths: StatePaths) -> KeyRegistry:
    """The keys of a namespace, whether or not its server runs; none if none was ever made.

    Raises StateError if neither file can be read, or a later release wrote one.
    """
    found = read_document(KEYS, paths)
    return KeyRegistry() if found is None else found.content
