"""What a recorded run took, as tables: `python -m scripts.timings FILE [--top N]`.

The file is made by `python -m scripts.run_tests --record FILE`. CPU seconds say more than seconds where the machine has
other work. Those of a test include its servers', but not what forks of tests/imported.py compute; those of a suite
include all.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

import msgspec


class Line(msgspec.Struct):
    """What one process has noted. `seconds`: from start to end, of a suite, a fixture, an import, or a server until it
    was ready; those of a test are the three."""

    kind: str
    pid: int = 0
    test: str = ""
    """The test that was running."""
    name: str = ""
    command: list[str] = []
    seconds: float = 0.0
    setup: float = 0.0
    call: float = 0.0
    teardown: float = 0.0
    cpu: float = 0.0

    @property
    def wall(self) -> float:
        return self.seconds + self.setup + self.call + self.teardown


Row = tuple[str, int, float, float]
"""Name, number, seconds, CPU seconds."""


def read(path: Path) -> list[Line]:
    """The lines of a record, in the order in which they were written."""
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def folder_of(test: str) -> str:
    """The folder of a test below its suite's, as in `tests/unit/core`."""
    return "/".join(PurePosixPath(file_of(test)).parts[:3])


def summed(lines: Iterable[Line], key: Callable[[Line], str]) -> list[Row]:
    """A row for each key, the longest first."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[key(line)].append(line)
    rows = [(name, len(of), sum(each.wall for each in of), sum(each.cpu for each in of)) for name, of in groups.items()]
    return sorted(rows, key=lambda row: -row[2])


def table(title: str, rows: Sequence[Row], top: int) -> list[str]:
    """Lines of Markdown. The last row has the sum of those that are left out."""
    rest = rows[top:]
    shown = list(rows[:top])
    if rest:
        shown.append((f"{len(rest)} others", *map(sum, list(zip(*rest, strict=True))[1:])))  # type: ignore[arg-type]
    body = [f"| {name} | {number} | {seconds:.1f} | {cpu:.1f} |" for name, number, seconds, cpu in shown]
    return ["", f"| {title} | number | seconds | CPU seconds |", "|---|---|---|---|", *body]


def report(lines: Sequence[Line], top: int) -> list[str]:
    """All tables."""
    of = {kind: [line for line in lines if line.kind == kind] for kind in {line.kind for line in lines}}
    tests = of.get("test", [])
    servers = {line.test for line in of.get("server", [])}
    return [
        # Those within a test are others' runs.
        *table("suite", summed([line for line in of.get("suite", []) if not line.test], lambda line: line.name), top),
        *table("folder", summed(tests, lambda line: folder_of(line.name)), top),
        *table("file", summed(tests, lambda line: file_of(line.name)), top),
        *table("test", summed(tests, lambda line: line.name), top),
        *table("fixture", summed(of.get("fixture", []), lambda line: f"{line.name} ({folder_of(line.test)})"), top),
        *table("server starts, until ready", summed(of.get("server", []), lambda line: file_of(line.test)), top),
        *table("processes of Python by file", summed(of.get("process", []), lambda line: file_of(line.test)), top),
        *table("imports of vLLM, torch and transformers by file", summed(imports(lines), _importer), top),
        "",
        f"{len(tests)} tests, {len(of.get('server', []))} server starts in {len(servers)} tests, "
        f"{len({line.pid for line in imports(lines) if line.name == 'vllm'})} imports of vLLM",
    ]


def imports(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.kind == "import"]


def _importer(line: Line) -> str:
    return f"{file_of(line.test) or 'no test'}: {' '.join(line.command)[:60]}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--top", type=int, default=20, help="rows of each table (default: 20)")
    options = parser.parse_args(arguments)
    print("\n".join(report(read(options.file), options.top)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
