from __future__ import annotations

import subprocess
import sys

_ENDS = """
import atexit
from dynamo_local.process import main
class Costly:
    def __del__(self): print("taken apart")
kept = Costly()
atexit.register(print, "handled")
main.end(3)
"""


def test_a_process_ends_with_its_status_once_its_exit_handlers_have_run() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "handled\n", "")
