"""The cache of the Hugging Face Hub on disk, in the layout that its libraries share.

models--ORG--NAME/refs/REVISION holds a commit; snapshots/COMMIT/FILE links to blobs/ETAG:
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import UsageError

MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


def repo_of_snapshot(folder: Path) -> str | None:
    """The id of the model of which the folder is a snapshot; None for any other folder."""
    model = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not is_commit(folder.name) or not model.startswith("models--"):
        return None
    return model.removeprefix("models--").replace("--", "/", 1)


@dataclass(frozen=True)
class CachedModel:
    """The part of a cache that belongs to one model."""

    cache: Path
    repo: str

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        """The folder of the model's files at a commit. It need not be there, nor whole."""
        return self.folder / "snapshots" / commit

    def blob(self, etag: str) -> Path:
        """The content of a file, whole once it is there."""
        return self.folder / "blobs" / etag

    def partial(self, etag: str) -> Path:
        """The start of a file's content: what a later download goes on with."""
        return self.folder / "blobs" / f"{etag}.dynamo-incomplete"

    def commit_of(self, revision: str | None) -> str | None:
        """The commit that a branch or tag stood for when it was last fetched; None if it never was."""
        if revision is not None and is_commit(revision):
            return revision if self.snapshot(revision).is_dir() else None
        with suppress(OSError, ValueError):
            commit = (self.folder / "refs" / (revision or MAIN)).read_text(encoding="utf-8").strip()
            return commit if is_commit(commit) and self.snapshot(commit).is_dir() else None
        return None

    def remember(self, revision: str | None, commit: str) -> None:
        """Note which commit a branch or tag stands for."""
        if revision != commit:
            ref = self.folder / "refs" / (revision or MAIN)
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit, encoding="utf-8")

    def prepare(self, commit: str) -> None:
        """Make the folders. Raises UsageError if they cannot be written."""
        try:
            for folder in (self.folder / "blobs", self.snapshot(commit)):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the cache of models {self.cache} cannot be written ({error.strerror})",
                "set HF_HOME to a folder that you can write",
            ) from error

    def link(self, commit: str, name: str, etag: str) -> None:
        """Have the file of a snapshot be the content `etag`. Safe with concurrent callers."""
        pointer = self.snapshot(commit) / name
        pointer.parent.mkdir(parents=True, exist_ok=True)
        draft = pointer.with_name(f".{pointer.name}.{os.getpid()}")
        try:
            draft.symlink_to(os.path.relpath(self.blob(etag), pointer.parent))
        except OSError:  # a file system without symbolic links: the content itself is put there
            self.blob(etag).replace(pointer)
            return
        draft.replace(pointer)
