"""The folder in which a command runs, where that is gone or closed to this user."""

from __future__ import annotations

import os
from pathlib import Path

_ALWAYS_THERE = "/"


def leave_unusable_folder() -> str | None:
    """Go to / if no process could be started in the working folder. Returns what is wrong with the folder, or None."""
    try:
        os.chdir(Path.cwd())
    except FileNotFoundError:
        reason = "the working folder was removed"
    except OSError as error:
        reason = f"the working folder cannot be entered ({error.strerror})"
    else:
        return None
    os.chdir(_ALWAYS_THERE)
    return f"{reason}: processes run in {_ALWAYS_THERE}"
