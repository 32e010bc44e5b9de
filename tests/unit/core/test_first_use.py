"""The first use of types by msgspec, in several threads at once: in processes of their own, which a fault would end."""

from __future__ import annotations

import subprocess
import sys

import pytest

IN_THREADS = """
import dataclasses, sys, threading
import msgspec

sys.setswitchinterval(1e-6)

def in_threads(use):
    begin, wrong = threading.Barrier(4), []

    def use_it():
        begin.wait()
        try:
            for _ in range(3):
                assert use().field1 == 1
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
"""
SETTINGS = """
from dynamo_local.sdk.config.schema import build_settings

def empty():
    return dataclasses.field(default=None)

for number in range(150):
    # It takes longest where classes are in classes.
    inner = int
    for depth in range(6):
        inner = dataclasses.make_dataclass(f"Inner{number}_{depth}", [("of", inner | None, empty())])
    fields = [("field1", int | None, empty()), ("of", inner | None, empty())]
    kind = dataclasses.make_dataclass(f"Settings{number}", fields)
    in_threads(lambda: build_settings(kind, "Service", {"field1": 1}))
"""
STRUCTS = """
from dynamo_local.core.codec import prepare_structs

for number in range(150):
    inner = int
    for depth in range(6):
        inner = msgspec.defstruct(f"Inner{number}_{depth}", [("of", inner | None, None)], module="state.made")
    kind = msgspec.defstruct(f"Kind{number}", [("field1", int), ("of", inner | None, None)], module="state.made")
    prepare_structs()
    in_threads(lambda: msgspec.json.decode(b'{"field1": 1, "of": {"of": null}}', type=kind))
"""


@pytest.mark.parametrize("program", [SETTINGS, STRUCTS], ids=["settings", "structs"])
def test_the_first_use_of_a_class_may_be_in_several_threads(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_THREADS + program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_all_structs_of_a_server_and_a_frontend_can_be_prepared() -> None:
    program = (
        "import components.frontend.service, components.workers.engine_service\n"
        "import dynamo_local.supervisor.endpoints.controller\n"
        "from dynamo_local.core.codec import prepare_structs\n"
        "prepare_structs()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
