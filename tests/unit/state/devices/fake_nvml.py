"""An NVML binding with the GPUs it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class AnyNvmlError(Exception):
    pass


class LibraryNotFoundError(AnyNvmlError):
    pass


class DriverNotLoadedError(AnyNvmlError):
    pass


class NoPermissionError(AnyNvmlError):
    pass


@dataclass(frozen=True)
class Gpu:
    """A GPU; `denied`: this user may not open it; `failing`: the call that fails."""

    uuid: str | bytes
    name: str | bytes = "NVIDIA H200"
    denied: bool = False
    failing: str = ""


@dataclass
class FakeNvml:
    """Has the attributes of module `pynvml` that the inventory uses."""

    gpus: Sequence[Gpu] = ()
    at_init: AnyNvmlError | None = None
    at_count: AnyNvmlError | None = None
    at_shutdown: AnyNvmlError | None = None
    open: bool = False
    calls: list[str] = field(default_factory=list)

    NVMLError: type[Exception] = AnyNvmlError
    NVMLError_LibraryNotFound: type[Exception] = LibraryNotFoundError
    NVMLError_DriverNotLoaded: type[Exception] = DriverNotLoadedError
    NVMLError_NoPermission: type[Exception] = NoPermissionError

    def nvmlInit(self) -> None:  # noqa: N802
        self._answer("init", self.at_init)
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False
        self._answer("shutdown", self.at_shutdown)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._answer("count", self.at_count)
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:  # noqa: N802
        gpu = self.gpus[index]
        self._answer("handle", NoPermissionError("Insufficient Permissions") if gpu.denied else None, gpu)
        return gpu

    def nvmlDeviceGetUUID(self, handle: object) -> str | bytes:  # noqa: N802
        assert isinstance(handle, Gpu)
        self._answer("uuid", None, handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: object) -> str | bytes:  # noqa: N802
        assert isinstance(handle, Gpu)
        self._answer("name", None, handle)
        return handle.name

    def _answer(self, call: str, error: AnyNvmlError | None, gpu: Gpu | None = None) -> None:
        self.calls.append(call)
        assert self.open or call in ("init", "shutdown"), "asked before it was initialised"
        if error is not None:
            raise error
        if gpu is not None and gpu.failing == call:
            raise AnyNvmlError("GPU is lost")
