"""Settings that are built in several threads at once, in a process of its own, which a fault would end."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import dataclasses, sys, threading
from dynamo_local.sdk.config.schema import build_settings

sys.setswitchinterval(1e-6)
for number in range(150):
    # The first use of each class is the one at stake, and takes longest where classes are in classes.
    inner, empty = int, dataclasses.field(default=None)
    for depth in range(6):
        inner = dataclasses.make_dataclass(f"Inner{number}_{depth}", [("of", inner | None, empty)])
    fields = [("field1", int | None, dataclasses.field(default=None)), ("of", inner | None, empty)]
    kind = dataclasses.make_dataclass(f"Settings{number}", fields)
    begin = threading.Barrier(4)

    def build():
        begin.wait()
        for _ in range(3):
            assert build_settings(kind, "Service", {"field1": 1}).field1 == 1

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_the_first_use_of_a_class_may_be_in_several_threads() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
