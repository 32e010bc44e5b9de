"""`python -m scripts.reference`: write the pages of docs/reference that come from the code.

With --check, compare them with the code instead, and fail if they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.reference import command_line, configuration, control_api, environment, vllm_options

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"


def main(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Returns the exit code: 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files with the code, and write nothing")
    check = parser.parse_args(arguments).check
    pages = {
        "cli.md": command_line.page(),
        "configuration.md": configuration.page(),
        "control-api.md": control_api.page(),
        "environment.md": environment.page(ROOT),
        "vllm-options.md": vllm_options.page(),
    }
    changed = {name: text for name, text in pages.items() if _text(folder / name) != text}
    if check and changed:
        names = ", ".join(changed)
        print(f"error: {names} in {folder} differ from the code; run `make reference`", file=sys.stderr)
        return 1
    for name, text in changed.items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
