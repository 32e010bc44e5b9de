"""Environment variables, from the source of the product.

A variable is a constant of a module whose name ends in _ENV or _VARIABLE; the text below it is its description.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGES = ("components", "dynamo_local", "examples", "state")
_SUFFIXES = ("_ENV", "_VARIABLE")
_INTERNAL = "Set by the server "


@dataclass(frozen=True)
class Variable:
    """An environment variable that the product reads. `help` is empty if the code does not describe it."""

    name: str
    help: str
    path: Path

    @property
    def is_internal(self) -> bool:
        """Whether the server sets it in its own processes, and users do not."""
        return self.help.startswith(_INTERNAL)


def variables(root: Path) -> list[Variable]:
    """All variables, by name. A variable that two modules declare is there twice."""
    found = (variable for path in sources(root) for variable in _declared(path))
    return sorted(found, key=lambda variable: variable.name)


def sources(root: Path) -> Iterator[Path]:
    """The modules of the product."""
    for package in PACKAGES:
        yield from (root / package).rglob("*.py")


def _declared(path: Path) -> Iterator[Variable]:
    text = path.read_text(encoding="utf-8")
    if not any(f'{suffix} = "' in text for suffix in _SUFFIXES):
        return
    for statement, following in pairwise([*ast.parse(text).body, ast.Pass()]):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))) if name.endswith(
                _SUFFIXES
            ):
                yield Variable(value, _docstring(following), path)


def _docstring(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""
