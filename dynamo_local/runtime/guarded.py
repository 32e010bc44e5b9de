"""`python -m dynamo_local.runtime.guarded -- COMMAND ARG...`: run a foreign program that dies with its parent."""

from __future__ import annotations

import os
import sys

from dynamo_local.runtime.processes import PARENT_PID_ENV, die_with_parent_from_environment


def main(argv: list[str]) -> int:
    """Set the parent-death signal, then become COMMAND."""
    if len(argv) < 2 or argv[0] != "--":
        print("usage: python -m dynamo_local.runtime.guarded -- COMMAND ARG...", file=sys.stderr)
        return 2
    die_with_parent_from_environment()
    os.environ.pop(PARENT_PID_ENV, None)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        print(f"error: cannot run {argv[1]}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
