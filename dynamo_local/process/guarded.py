"""`python -m dynamo_local.process.guarded [--term] -- COMMAND ARG...`: runs a program that is not ours, so that it dies
with its parent or with its server (ancestry.py).

With --term the program gets SIGTERM when its parent dies, in place of SIGKILL, so that it can tidy up.
"""

from __future__ import annotations

import os
import sys

from dynamo_local.process.ancestry import die_as_environment_says, end_with_parent


def main(argv: list[str]) -> int:
    """Tie this process to the one that its environment names, then become COMMAND."""
    is_gentle = argv[:1] == ["--term"]
    argv = argv[1:] if is_gentle else argv
    if len(argv) < 2 or argv[0] != "--":
        print("usage: python -m dynamo_local.process.guarded [--term] -- COMMAND ARG...", file=sys.stderr)
        return 2
    if is_gentle:
        end_with_parent()
    else:
        die_as_environment_says(across_exec=True)
    try:
        os.execvp(argv[1], argv[1:])
    except OSError as error:
        print(f"error: cannot run {argv[1]}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
