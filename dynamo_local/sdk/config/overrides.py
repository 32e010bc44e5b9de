"""Reads command-line options `--Service.key.sub=value` as configuration.

Values are YAML, except for keys of kind `str`, which take the text as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamo_local.core.errors import ConfigError
from dynamo_local.sdk.config.schema import ConfigSchema, KeySpec, canonical
from dynamo_local.sdk.config.sections import ARGS
from dynamo_local.sdk.config.yaml_source import parse_yaml


@dataclass(frozen=True)
class Override:
    """A command-line option, split into its parts. `text` is None without `=`.

    `typed`: the option as the user typed it, without its value, where that is another spelling (flags.py).
    """

    section: str
    path: tuple[str, ...]
    text: str | None
    typed: str | None = None

    @property
    def origin(self) -> str:
        """The option without its value, which may be a secret."""
        return self.typed or f"--{'.'.join((self.section, *self.path))}"

    def tree(self, schema: ConfigSchema) -> dict[str, Any]:
        """Return the option as nested mappings, like a section of a file. Raises ConfigError."""
        value = self._value(schema.keys().get(canonical(self.path[0])))
        for name in reversed(self.path):
            value = {name: value}
        return value  # type: ignore[no-any-return]  # the path is not empty

    def _value(self, spec: KeySpec | None) -> Any:
        if self.text is None:
            if spec is not None and spec.kind in ("bool", "any") and len(self.path) == 1:
                return True
            raise ConfigError(f"{self.origin} has no value", f"write {self.origin}=VALUE")
        if self.path[:2] == (ARGS, "envs") and len(self.path) == 3:
            return self.text
        if spec is not None and spec.kind == "str" and len(self.path) == 1 and self._is_text(spec):
            return self.text
        return parse_yaml(self.text, self.origin)

    def _is_text(self, spec: KeySpec) -> bool:
        """Return whether the text is the value, so that `--Middle.suffix=!` needs no YAML quotes."""
        text = self.text or ""
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return not quoted and not (spec.optional and text in ("null", "~"))


def parse_override(option: str) -> Override:
    """Split an option into its parts. Raises ConfigError."""
    name, equals, text = option.removeprefix("--").partition("=")
    section, *path = name.split(".")
    if not option.startswith("--") or not section or not path or not all(path):
        raise ConfigError(
            f"option {'--' * option.startswith('--')}{name} is not understood", "write --Service.key=value"
        )
    return Override(section, tuple(path), text if equals else None)
