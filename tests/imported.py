"""`python -m tests.imported SOCKET MODULE...`: has imported, and is forked for the fork servers of tests' servers.

`scripts.run_tests` starts one that has imported vLLM, and names it in $DYN_IMPORTED. A server's fork server is then a
fork of this process, which takes it no time, where importing takes 17 s of a core. All else of the server is as ever,
except that its fork server is not among its descendants, and has no spare: `ServerProcess(imports=True)` is for tests
of that.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dynamo_local.process.ancestry import die_as_environment_says
from dynamo_local.process.forkserver import protocol
from dynamo_local.process.forkserver.__main__ import MODULE, parse, serve
from dynamo_local.process.forkserver.child import take_over
from dynamo_local.process.forkserver.preload import Preloaded
from dynamo_local.process.forkserver.server import AcceptedOrder, ForkServer
from state.paths import StatePaths

READ_LATER = (
    "COLUMNS",
    "CUDA_VISIBLE_DEVICES",
    "IN_FLIGHT",
    "LINES",
    "MACHINE_FACTS",
    "OMP_NUM_THREADS",
    "PWD",
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTHONPATH",
    "TMPDIR",
)
"""What tests set for their servers or servers for their processes, and no import reads."""


class Imported(Preloaded):
    """What is imported, for fork servers of any working directory."""

    def objection(self, environ: Mapping[bytes, bytes], cwd: str) -> str | None:
        return super().objection(environ, self.cwd)


@contextmanager
def importing(environ: Mapping[str, str]) -> Iterator[Path]:
    """Have such a process that imports vLLM. Returns its socket, which is there once it can be forked."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "imported.sock")
        command = [sys.executable, "-m", "tests.imported", str(path), "components.vllm.preload"]
        with subprocess.Popen(
            command,
            cwd=Path(__file__).parents[1],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        ) as process:
            try:
                yield path
            finally:
                process.kill()


def main(path: str, *names: str) -> None:
    """Import, then fork until the parent ends."""
    die_as_environment_says()
    preloaded = Imported.load((*names, __name__))
    # Not earlier: a fork server that waits for this one listens to no launcher meanwhile.
    accepted = ForkServer(protocol.listen(path), preloaded).run()
    assert isinstance(accepted, AcceptedOrder)
    take_over(accepted, preloaded, MODULE)
    arguments = parse(accepted.order.argv)
    os.chdir(accepted.order.cwd)
    # As `python -m` has it.
    sys.path[0] = accepted.order.cwd
    modules = tuple(map(importlib.import_module, arguments.modules))
    paths = StatePaths.of(arguments.namespace, os.environ)
    # From here on, it is as if it had imported by itself.
    own = Preloaded(modules, accepted.order.environ, accepted.order.cwd)
    print(f"imported {', '.join(arguments.modules)} before", flush=True)
    serve(protocol.listen(str(paths.forkserver_socket)), own, paths, death_pipe=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
