"""A disk whose steps can be made to fail."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from state.files import Disk


class SteppingDisk(Disk):
    """Calls `step` before whatever it does, and writes at most `at_once` bytes at a time."""

    at_once: int

    @abstractmethod
    def step(self) -> None:
        """Return, or let the step fail."""

    def create(self, path: Path) -> int:
        self.step()
        return super().create(path)

    def write(self, descriptor: int, data: bytes) -> int:
        self.step()
        return super().write(descriptor, data[: self.at_once])

    def sync(self, descriptor: int) -> None:
        self.step()
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.step()
        super().rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        self.step()
        super().sync_directory(directory)
