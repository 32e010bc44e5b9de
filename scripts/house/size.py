"""Size and shape of a checkout's product code: `python -m scripts.house.size [CHECKOUT]`.

Product are dynamo_local, components and state. Code lines are lines without blanks, comments and docstrings. Nothing is
imported or run: any revision can be counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PRODUCT = ("dynamo_local", "components", "state")
BESIDE = ("tests", "benchmarks", "scripts", "examples")
"""Counted in lines of their own: code that moves there is no less."""
_SMALL = 40
_FOLDERS, _PACKAGES = 4, 30
"""Shown of the largest."""


@dataclass(frozen=True)
class Module:
    """What is counted of one file. `imports`: modules that it names; `functions`: their lengths."""

    path: Path
    code_lines: int
    import_lines: int
    imports: frozenset[str]
    functions: tuple[int, ...]
    classes: tuple[str, ...]
    protocols: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """Its folder, two levels deep at most."""
        return "/".join(self.path.parts[: min(2, len(self.path.parts) - 1)])


@dataclass(frozen=True)
class Size:
    """The figures. Files without code are in `files` alone."""

    code_lines: int
    files: int
    files_with_code: int
    median_file: float
    files_under_40_lines: int
    largest_file: tuple[str, int]
    import_lines: int
    import_share: float
    median_function: int
    p90_function: int
    longest_function: int
    files_whose_name_another_has: int
    class_names_used_again: int
    pieces: int
    """Files that only one other file imports, which is of the same folder."""
    protocols: int
    classes: int
    flat_folders: Mapping[str, int]
    """Folders with the most files of their own."""
    packages: Mapping[str, int]
    """Code lines."""
    beside: Mapping[str, int]
    """Code lines of what is no product code."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.house.size", description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(), metavar="CHECKOUT", help="(this folder)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    size = count(options.checkout.resolve())
    print(json.dumps(asdict(size), indent=2) if options.json else told(size))
    return 0


def count(root: Path) -> Size:
    """Count the product's files below a folder."""
    modules = list(_modules(root, PRODUCT))
    full = [module for module in modules if module.code_lines]
    named = [module for module in full if not module.is_package]
    lines = [module.code_lines for module in full]
    functions = sorted(length for module in modules for length in module.functions)
    names = Counter(module.path.name for module in named)
    classes = Counter(name for module in modules for name in module.classes)
    largest = max(full, key=lambda module: module.code_lines)
    packages: Counter[str] = Counter()
    for module in modules:
        packages[module.package] += module.code_lines
    return Size(
        code_lines=sum(lines),
        files=len(modules),
        files_with_code=len(full),
        median_file=statistics.median(lines),
        files_under_40_lines=sum(each < _SMALL for each in lines),
        largest_file=(str(largest.path), largest.code_lines),
        import_lines=(imports := sum(module.import_lines for module in modules)),
        import_share=imports / sum(lines),
        median_function=functions[len(functions) // 2],
        p90_function=functions[int(len(functions) * 0.9)],
        longest_function=functions[-1],
        files_whose_name_another_has=sum(number for number in names.values() if number > 1),
        class_names_used_again=sum(number > 1 for number in classes.values()),
        pieces=len(_pieces(modules, named)),
        protocols=sum(module.protocols for module in modules),
        classes=sum(classes.values()),
        flat_folders=dict(Counter(str(module.path.parent) for module in named).most_common(_FOLDERS)),
        packages=dict(packages.most_common(_PACKAGES)),
        beside={top: sum(module.code_lines for module in _modules(root, [top])) for top in BESIDE},
    )


def told(size: Size) -> str:
    """Return the figures as text."""
    largest, lines = size.largest_file
    return "\n".join(
        (
            f"code lines {size.code_lines} in {size.files} files ({size.files_with_code} with code); median file "
            f"{size.median_file:.0f}, under {_SMALL} lines {size.files_under_40_lines}, largest {largest} {lines}",
            f"imports {size.import_lines} lines ({size.import_share:.1%}); functions median {size.median_function}, "
            f"p90 {size.p90_function}, max {size.longest_function}",
            f"files whose name another has {size.files_whose_name_another_has}; class names used twice or more "
            f"{size.class_names_used_again}; pieces used by one file of their own folder {size.pieces}; "
            f"protocols {size.protocols}; records and classes {size.classes}",
            f"largest flat folders: {_listed(size.flat_folders)}",
            f"beside, code lines: {_listed(size.beside)}",
            f"packages: {_listed(size.packages)}",
        )
    )


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def _modules(root: Path, tops: Iterable[str]) -> Iterator[Module]:
    for top in tops:
        for path in sorted((root / top).rglob("*.py")):
            yield module_of(path.relative_to(root), path.read_text())


def module_of(path: Path, source: str) -> Module:
    """Count one file."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return Module(
        path,
        code_lines=_code_lines(source, nodes),
        import_lines=sum(map(_length, imports)),
        imports=frozenset(name for node in imports for name in _imported(node)),
        functions=tuple(map(_length, functions)),
        classes=tuple(node.name for node in classes),
        protocols=sum(any("Protocol" in ast.unparse(base) for base in node.bases) for node in classes),
    )


def _code_lines(source: str, nodes: Iterable[ast.AST]) -> int:
    texts: set[int] = set()
    for node in nodes:
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            # Docstrings, those of attributes included.
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                texts.update(range(each.lineno, each.lineno + _length(each)))
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in texts for number, line in lines)


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module]
    return [alias.name for alias in node.names]


def _pieces(modules: Iterable[Module], named: Iterable[Module]) -> list[Module]:
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    for module in modules:
        for name in module.imports:
            importers[name].add(module.path)
    found = ((module, importers[".".join(module.path.with_suffix("").parts)]) for module in named)
    return [module for module, by in found if len(by) == 1 and next(iter(by)).parent == module.path.parent]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
