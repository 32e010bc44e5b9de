"""`dynamo run` and `dynamo chat` as a user types them: on a terminal, in a pipe, with a server of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.process.ancestry import PARENT_PID_ENV
from state.machine.processes import ProcFs
from state.paths import StatePaths
from state.remains import has_segments
from state.statefile.leftovers import leftovers
from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.terminal import Terminal

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "dynamo_local.cli.main"]
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Api(BaseHTTPRequestHandler):
    """An OpenAI API that repeats the last question; "for ever" is repeated until the client goes away."""

    protocol_version = "HTTP/1.1"
    gone = threading.Event()
    """Set when a client has gone in the middle of an answer."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "echo"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = asked["messages"][-1]["content"]
        if self.headers.get("Authorization") == "Bearer wrong":
            self._send(401, {"error": {"message": "Unauthorized"}})
        elif not asked.get("stream"):
            message = {"role": "assistant", "content": question}
            self._send(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 1}})
        else:
            self._stream(question)

    def _stream(self, question: str) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event({"delta": {"reasoning": "thinking"}, "finish_reason": None})
        try:
            self._event({"delta": {"content": question}, "finish_reason": None})
            while question == "for ever":
                self._event({"delta": {"content": "."}, "finish_reason": None})
                self.gone.wait(0.02)
        except OSError:
            self.gone.set()
            return
        self._event({"delta": {}, "finish_reason": "stop"})
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, choice: dict[str, Any]) -> None:
        data = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    hidden = ("DYN_NAMESPACE", "DYN_API_KEY", "OPENAI_API_KEY", "NATS_SERVER", "NATS_TOKEN", "NATS_CA")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "DYN_LOCAL_STATE_DIR": str(tmp_path / "state"), "DYN_CPU_SLOTS": "2", "TERM": "xterm"}


class ChatTerminal(Terminal):
    def __init__(self, environ: Mapping[str, str], *arguments: str) -> None:
        # The terminal becomes the one that controls the process, so that Ctrl-C is a signal.
        control = (
            "import os, fcntl, termios, sys; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        super().__init__([sys.executable, "-c", control, *COMMAND, *arguments], environ)

    def shows(self, part: bytes, times: int = 1) -> None:
        eventually(lambda: self.written.count(part) >= times, f"{part!r} is not shown {times} times")


def test_a_chat_on_a_terminal(url: str, environ: Mapping[str, str]) -> None:
    Api.gone.clear()
    with ChatTerminal(environ, "chat", "--url", url, "--verbose") as terminal:
        terminal.shows(b">>> ")
        terminal.type(b"one two\n")
        terminal.shows(b"\x1b[2mthinking\x1b[0m")
        terminal.shows(b"one two", times=2)
        terminal.shows(b">>> ", times=2)
        # Line editing: up brings back the last line, Ctrl-A goes to its beginning.
        terminal.type(b"\x1b[A\x01zero \n")
        terminal.shows(b"zero one two")
        terminal.shows(b">>> ", times=3)
        terminal.type(b"for ever\n")
        terminal.shows(b"for ever..")
        terminal.type(CTRL_C)
        assert Api.gone.wait(PATIENCE_S), "the request was not cancelled"
        terminal.shows(b">>> ", times=4)
        terminal.type(b"/nosuch\n")
        terminal.shows(b"there is no command /nosuch")
        terminal.shows(b">>> ", times=5)
        terminal.type(CTRL_C)
        terminal.shows(b"Ctrl-C again, Ctrl-D or /exit ends the chat")
        terminal.shows(b">>> ", times=6)
        terminal.type(CTRL_C)
        assert terminal.process.wait(PATIENCE_S) == 130


def test_the_end_of_the_input_ends_a_chat(url: str, environ: Mapping[str, str]) -> None:
    with ChatTerminal(environ, "run", "echo", "--url", url) as terminal:
        terminal.shows(b">>> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(PATIENCE_S) == 0


def run(environ: Mapping[str, str], *arguments: str, given: str = "") -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=environ,
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_question_in_a_pipe_gets_the_answer_alone(url: str, environ: Mapping[str, str]) -> None:
    assert run(environ, "run", "echo", "Hi", "--url", url) == (0, "Hi\n", "")
    assert run(environ, "run", "echo", "--url", url, given="from a file\n") == (0, "from a file\n", "")
    assert run(environ, "run", "echo", "Read:", "--url", url, given="a file\n") == (0, "Read:\n\na file\n", "")
    code, out, _ = run(environ, "run", "echo", "Hi", "--json", "--url", url)
    assert (code, json.loads(out)["usage"]) == (0, {"completion_tokens": 1})
    code, out, figures = run(environ, "run", "echo", "Hi", "--verbose", "--url", url)
    assert (code, out) == (0, "Hi\n")
    assert "first after" in figures


MISTAKES = [
    (["run"], r"MODEL is missing", 2),
    (["run", "echo"], r"no prompt; write `dynamo run MODEL", 2),
    (["run", "echo", "Hi", "--max-tokens", "0"], r"0 is not in the range", 2),
    (["run", "nosuch", "Hi"], r"has no model nosuch; it has echo", 1),
    (["run", "echo", "Hi", "--url", "ftp://x"], r"'ftp://x' is not the address of an API", 2),
    (["run", "echo", "Hi", "--url", "http://127.0.0.1:1"], r"cannot connect", 1),
    (["run", "echo", "Hi", "--api-key-file", "/nosuch"], r"cannot read the API key in /nosuch", 2),
    (["chat", "echo"], r"a chat needs a terminal; write `dynamo run MODEL", 2),
    (["run", "echo", "Hi", "--namespace", "a_b"], r"namespace 'a_b' is not valid", 2),
    (["run", "echo", "Hi", "--namespace", "nobody"], r"no server of namespace nobody serves echo", 2),
    (["completion", "tcsh"], r"'tcsh' is not one of 'bash', 'zsh', 'fish'", 2),
    (["doctor", "now"], r"unexpected extra argument \(now\)", 2),
]
"""What is typed, what is said, exit code."""


@pytest.mark.parametrize(("arguments", "said", "code"), MISTAKES)
def test_mistakes(
    url: str, environ: Mapping[str, str], arguments: list[str], said: str, code: int, tmp_path: Path
) -> None:
    import re

    asks = arguments[0] == "run" and not {"--url", "--namespace"} & {*arguments}
    found, out, err = run(environ, *arguments, *(["--url", url] if asks and len(arguments) > 1 else []))
    assert (found, out) == (code, "")
    assert re.search(said, err), err
    assert (err.startswith("error: "), err.count("\n")) == (True, 1)
    assert not (tmp_path / "state").exists()


def test_a_wrong_key_is_said(url: str, environ: Mapping[str, str]) -> None:
    code, out, err = run({**environ, "DYN_API_KEY": "wrong"}, "run", "echo", "Hi", "--url", url)
    assert (code, out) == (1, "")
    assert "Unauthorized; give the key with --api-key-file, DYN_API_KEY or OPENAI_API_KEY" in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_server_of_a_command_ends_with_it_however_it_ends(
    environ: Mapping[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    paths = StatePaths(tmp_path / "state", "run-1")
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo_local.process.guarded", "--", *COMMAND, "run", "quickstart", "Hi"],
        env={**environ, PARENT_PID_ENV: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        # Its services start then: a server that has much to end.
        eventually(paths.blueprint_file.exists, "no server was started")
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == (130 if number == signal.SIGINT else -number)
        eventually(lambda: not leftovers(paths, ProcFs().snapshot()), "processes are left")
        eventually(lambda: {path.name for path in paths.root.iterdir()} == {"run-1.logs"}, "files are left")
        assert not has_segments(paths)
    finally:
        process.kill()
        process.wait()
        ProcFs().end(leftovers(paths, ProcFs().snapshot()), 5.0, PATIENCE_S)
