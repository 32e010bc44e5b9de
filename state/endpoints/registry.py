"""The registry of endpoints on disk (documents.py). It outlives the server."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.core.documents import Convert
from dynamo_local.core.endpoints.registry import CONVERSIONS, SCHEMA_VERSION, Registry, from_document, to_document
from state.documents import DocumentKind, DocumentStore, forget_document, has_document, read_document
from state.files import DISK, Disk, system_errors
from state.locks import ServerLock
from state.paths import StatePaths

REGISTRY = DocumentKind(
    "endpoints",
    SCHEMA_VERSION,
    Registry(),
    files=lambda paths: (paths.registry_copy, paths.registry_file),
    backup=StatePaths.registry_backup,
    remedy="put a backup in its place, or drop the endpoints: dynamo serve --forget, dynamo stop --forget",
    write=to_document,
    read=from_document,
    conversions=CONVERSIONS,
)


def read_registry(paths: StatePaths, conversions: Mapping[int, Convert] = CONVERSIONS) -> Registry:
    """The endpoints of a namespace, whether or not its server runs; an empty registry if none was ever made.

    Raises StateError, with `--forget` as the remedy, if neither file can be read or a later release wrote one.
    """
    found = read_document(REGISTRY, paths, conversions)
    return Registry() if found is None else found.content


class RegistryStore(DocumentStore[Registry]):
    """The registry of one namespace, for the server that holds its lock. Safe from any one thread at a time."""

    def __init__(
        self, lock: ServerLock, *, disk: Disk = DISK, conversions: Mapping[int, Convert] = CONVERSIONS
    ) -> None:
        super().__init__(REGISTRY, lock, disk=disk, conversions=conversions)


def forget(lock: ServerLock) -> bool:
    """Remove the registry with its copy and backups, and what is known of the use of its endpoints; it need not be
    readable. Returns whether there was one.

    The caller holds the server lock. Raises DiskError.
    """
    found = forget_document(REGISTRY, lock)
    use = lock.paths.endpoint_use_file
    for each in (use.with_name(f"{use.name}.tmp"), use):
        with system_errors(f"cannot remove {each}"):
            each.unlink(missing_ok=True)
    return found


def has_registry(paths: StatePaths) -> bool:
    """Whether the namespace has files of a registry, readable or not."""
    return has_document(REGISTRY, paths)
