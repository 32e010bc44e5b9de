"""Reads configurations of NVIDIA Dynamo's example graphs (v0.2 and v0.3): their keys become those of our services.

Source of the keys: https://github.com/ai-dynamo/dynamo, examples/llm/configs and examples/llm/utils/vllm.py. Keys that
have no counterpart are left out, each with a note that says what stands for it here. docs/guides/from-dynamo.md lists
them. `Frontend.port` is left out without a note: `dynamo serve` takes it for --port.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dynamo_local.sdk.config.schema import canonical

_TAKES = "common-configs"
_SERVED = "served-model-name"
_FRONTEND, _PROCESSOR, _DECODE, _PREFILL = "Frontend", "Processor", "VllmWorker", "PrefillWorker"
_CONNECTOR, _OURS = "kv-transfer-config", "kv-transfer"
_DYNAMO_S_CONNECTOR = "DynamoNixlConnector"
_LIMITS = ("max-local-prefill-length", "max-prefill-queue-size")
_UNBOUNDED_QUEUE = 10_000
"""Number of jobs that the prefill queue holds at most: a limit that is never reached."""

_ROUTING = "Router.policy says how requests are routed, by default to where their prefix is cached"
_PROCESSOR_S = {
    "router": _ROUTING,
    "router-num-threads": "the frontend has no such threads",
    "min-workers": "requests wait until a worker is ready, and /health answers 503",
}
IGNORED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Common": _PROCESSOR_S,
        _FRONTEND: {**_PROCESSOR_S, "endpoint": "the frontend is the processor as well", "port": ""},
        "Router": {**_PROCESSOR_S, _TAKES: "the router has no settings but its policy"},
        _DECODE: _PROCESSOR_S,
        _PREFILL: _PROCESSOR_S,
    }
)
"""By section, the keys that are left out, each with the reason for its note (empty: no note)."""


def from_dynamo(tree: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a configuration with our keys in place of Dynamo's, and a note for each one that was replaced or left out.

    Anything else stays as it is, errors included: the result is still to be checked.
    """
    rewriting = _Rewriting(tree)
    rewriting.join_processor()
    rewriting.list_served_name()
    rewriting.move_prefill_limits()
    rewriting.replace_connector()
    rewriting.leave_out()
    return rewriting.sections, tuple(rewriting.notes)


class _Rewriting:
    """A configuration that is being rewritten. Sections that are no mappings are left alone."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.sections: dict[str, Any] = {
            name: _spelled(section) if isinstance(section, Mapping) else section for name, section in tree.items()
        }
        self.notes: list[str] = []

    def join_processor(self) -> None:
        """Give the processor's keys to the frontend, with the length that it needs to refuse prompts."""
        if not isinstance(self.sections.get(_PROCESSOR), Mapping):
            return
        processor = self.sections.pop(_PROCESSOR)
        frontend = self._frontend()
        common = self._section("Common")
        lists = [frontend.get(_TAKES, []), processor.pop(_TAKES, [])]
        wrong = next((takes for takes in lists if not isinstance(takes, list)), None)
        takes = [key for keys in lists if isinstance(keys, list) for key in keys]
        takes += [name for name in ("model", "max-model-len") if name in common]
        frontend[_TAKES] = list(dict.fromkeys(takes)) if wrong is None else wrong
        for key, value in processor.items():
            frontend.setdefault(key, value)
        self.notes.append(f"{_PROCESSOR}: its keys are those of {_FRONTEND}")

    def list_served_name(self) -> None:
        """Make a list of the name under which the model is served. Dynamo has one name."""
        for section in map(self._section, ("Common", _FRONTEND)):
            if isinstance(section.get(_SERVED), str):
                section[_SERVED] = [section[_SERVED]]

    def move_prefill_limits(self) -> None:
        """Give the frontend the limits of remote prefill, about which it decides here."""
        decode = self._section(_DECODE)
        found = {key: decode.pop(key) for key in _LIMITS if key in decode}
        remote, conditional = decode.pop("remote-prefill", None), decode.pop("conditional-disagg", None)
        if remote is False:
            found["max-prefill-queue-size"] = 0
        elif remote is True and conditional is False:
            found |= {"max-local-prefill-length": 0, "max-prefill-queue-size": _UNBOUNDED_QUEUE}
        elif remote is not None or conditional is not None:
            self.notes.append(f"{_DECODE}: prefills remotely in graphs with {_PREFILL}, within limits of {_FRONTEND}")
        for key, value in found.items():
            self._frontend().setdefault(key, value)
            self.notes.append(f"{_FRONTEND}.{key} is {value}, from {_DECODE}")

    def replace_connector(self) -> None:
        """Replace Dynamo's own connector, which vLLM does not have."""
        for name, section in self.sections.items():
            if isinstance(section, Mapping) and _DYNAMO_S_CONNECTOR in str(section.get(_CONNECTOR, "")):
                del self.sections[name][_CONNECTOR]
                self.sections[name][_OURS] = True
                self.notes.append(f"{name}.{_OURS} is true, for the connector {_DYNAMO_S_CONNECTOR}")
        if _OURS not in self._section("Common"):
            return
        for name, section in self.sections.items():
            if isinstance(section, Mapping) and isinstance(section.get(_TAKES), list):
                takes = [_OURS if key == _CONNECTOR else key for key in section[_TAKES]]
                self.sections[name][_TAKES] = [key for key in takes if key != _OURS or name != _FRONTEND]

    def leave_out(self) -> None:
        """Leave out what has no counterpart."""
        for name, keys in IGNORED.items():
            section = self._section(name)
            for key in [key for key in section if key in keys]:
                del section[key]
                self._ignored(name, key, keys[key])
            if isinstance(section.get(_TAKES), list):
                section[_TAKES] = [key for key in section[_TAKES] if key not in _PROCESSOR_S]
        if self._section("Planner").get("environment") == "kubernetes":
            del self.sections["Planner"]["environment"]
            self._ignored("Planner", "environment", "workers run on this machine")
        for name, section in self.sections.items():
            resources = _nested(section, "ServiceArgs", "resources")
            if "memory" in resources:
                del resources["memory"]
                self._ignored(name, "ServiceArgs.resources.memory", "memory is not limited")

    def _section(self, name: str) -> dict[str, Any]:
        """Return the section to be changed; an empty one, which is nowhere, if there is none."""
        section = self.sections.get(name)
        return section if isinstance(section, dict) else {}

    def _frontend(self) -> dict[str, Any]:
        if self.sections.get(_FRONTEND) is None:
            self.sections[_FRONTEND] = {}
        return self._section(_FRONTEND)

    def _ignored(self, section: str, key: str, why: str) -> None:
        if why:
            self.notes.append(f"{section}.{key} is ignored: {why}")


def _spelled(section: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy with the keys in kebab-case, as far as that does not hide a key that is given twice."""
    named = {canonical(key) if isinstance(key, str) else key: _copy(value) for key, value in section.items()}
    takes = named.get(_TAKES)
    if isinstance(takes, list):
        named[_TAKES] = [canonical(key) if isinstance(key, str) else key for key in takes]
    return named if len(named) == len(section) else dict(section)


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _nested(section: Any, *path: str) -> dict[str, Any]:
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}
