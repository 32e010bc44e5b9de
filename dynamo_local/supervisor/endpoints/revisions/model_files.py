"""The files of an endpoint's model, as they were when its revision was checked: all of its workers load the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.model.files import MODEL_FILES_ENV, read_identity
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService


class ModelChangedError(DynamoError):
    """The files of a revision's model are others than when it was checked. `files`: their identity now, by folder."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__(
            f"the model's files have changed: {', '.join(files)}",
            "update the endpoint, or put the former files back",
        )
        self.files = files


def files_of(graph: ResolvedGraph) -> Mapping[str, str]:
    """Identity of the files of each model in a folder, by folder. Raises ConfigError."""
    folders = {_folder(service) for service in graph.services} - {""}
    return {folder: read_identity(folder) for folder in sorted(folders)}


def with_files(graph: ResolvedGraph, files: Mapping[str, str]) -> ResolvedGraph:
    """The graph whose workers load these files only (`model.files.check_model_files`)."""

    def marked(service: ResolvedService) -> ResolvedService:
        if service.role not in ENGINE_ROLES or _folder(service) not in files:
            return service
        return msgspec.structs.replace(service, envs={**service.envs, MODEL_FILES_ENV: files[_folder(service)]})

    return msgspec.structs.replace(graph, services=tuple(map(marked, graph.services)))


def check_files(files: Mapping[str, str]) -> None:
    """Raise ModelChangedError if files are others by now, ConfigError if they cannot be read. Blocks."""
    now = {folder: read_identity(folder) for folder in files}
    if now != files:
        raise ModelChangedError({folder: found for folder, found in now.items() if found != files[folder]})


def _folder(service: ResolvedService) -> str:
    model = service.config.get("model")
    return model if isinstance(model, str) and Path(model).is_dir() else ""
