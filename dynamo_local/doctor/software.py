"""Facts about Python and the installed packages, from their metadata."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from dynamo_local.core.doctor.software import Software
from dynamo_local.core.errors import SupervisorError
from dynamo_local.supervisor.server.nats.nats_server import find_binary

_PROJECT = "dynamo-local"
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)


def software() -> Software:
    try:
        requirements = tuple(importlib.metadata.requires(_PROJECT) or ())
    except importlib.metadata.PackageNotFoundError:
        requirements = ()
    return Software(sys.version_info[:3], requirements, _versions(), _torch_cuda(), _nats_server())


def _versions() -> dict[str, str]:
    """Versions by name, from the names of the metadata folders: to parse hundreds of them would take a second."""
    found: dict[str, str] = {}
    for folder in reversed(sys.path):
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found[name.lower().replace("_", "-")] = version
    return found


def _torch_cuda() -> str | None:
    # `find_spec` of a package does not import it, and its version file says what it was built for.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        match = _TORCH_CUDA.search((Path(spec.origin).parent / "version.py").read_text())
    except OSError:
        return None
    return match[1] if match else None


def _nats_server() -> str | None:
    try:
        return str(find_binary())
    except SupervisorError:
        return None
