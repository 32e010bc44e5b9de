"""`dynamo run` and `dynamo chat`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli import completion
from dynamo_local.cli.commands import INTERRUPTED
from dynamo_local.cli.options import FiniteRange, together
from dynamo_local.core.conversation import printable
from dynamo_local.core.errors import UsageError
from dynamo_local.core.names import NAMESPACE_ENV

if TYPE_CHECKING:
    from dynamo_local.chat.client import ChatClient, Part
    from dynamo_local.core.conversation import Conversation
    from dynamo_local.load.client import Endpoint

_PROMPT = ">>> "
_DIM, _PLAIN = "\033[2m", "\033[0m"

API_KEY_ENV = "DYN_API_KEY"
"""API key of `dynamo run` and `dynamo chat`, in place of OPENAI_API_KEY; --api-key-file takes precedence."""


class Terminal:
    """A screen (chat/session.py) on standard input and output. Notes go to standard error.

    A model's reasoning is shown on a terminal only, dimmed, so that a program that reads the output gets the answer
    alone.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_dim = False
        self._ends_line = True

    def read(self) -> str:
        with suppress(ImportError):
            # Imported for its effect: `input` edits lines and has a history.
            import readline  # noqa: F401
        try:
            return input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            click.echo()
            raise

    def show(self, part: Part) -> None:
        if not self._is_terminal:
            if not part.is_reasoning:
                self._write(part.text)
            return
        if part.is_reasoning != self._is_dim:
            # The answer begins below the thoughts.
            self._write(f"{_DIM}" if part.is_reasoning else f"{_PLAIN}\n\n")
            self._is_dim = part.is_reasoning
        self._write(printable(part.text))

    def end_answer(self) -> None:
        if self._is_dim:
            self._write(_PLAIN)
            self._is_dim = False
        if not self._ends_line:
            self._write("\n")

    def note(self, text: str) -> None:
        if text:
            click.echo(text, err=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._ends_line = text.endswith("\n") or (self._ends_line and text in (_DIM, _PLAIN, ""))


_options = together(
    click.option("--system", metavar="TEXT", help="System prompt."),
    click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Maximum tokens in an answer."),
    click.option(
        "--temperature",
        type=FiniteRange(min=0),
        metavar="X",
        help="Randomness of the answer; 0 always takes the likeliest token.  [default: the server's]",
    ),
    click.option(
        "--url",
        metavar="URL",
        help="OpenAI API to ask, with or without /v1.  [default: a running server of this user]",
    ),
    click.option(
        "--namespace",
        envvar=NAMESPACE_ENV,
        show_envvar=True,
        shell_complete=completion.namespaces,
        help="Ask the server of this namespace only.",
    ),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File with the API key.  [default: the key in DYN_API_KEY or OPENAI_API_KEY]",
    ),
    click.option("--verbose", "-v", is_flag=True, help="Print tokens and times after each answer."),
)
"""The options that both commands have."""


@click.command()
@click.argument("model", shell_complete=completion.models)
@click.argument("prompt", required=False)
@_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print the whole answer with its usage as JSON, as the API gives it."
)
def run(model: str, prompt: str | None, as_json: bool, **options: Any) -> int:
    """Ask MODEL one PROMPT, or start a chat.

    \b
    dynamo run Qwen/Qwen3-0.6B "Why is the sky blue?"
    dynamo run smollm2 "Summarise this:" < report.txt
    dynamo run smollm2                                  a chat

    MODEL is a name that a running server serves, or a model that `dynamo serve` takes. If no server serves the model,
    one is started, and ends with the command. Text on standard input is added to PROMPT.

    Without PROMPT, on a terminal, the command is a chat; /help in the chat lists its commands. Ctrl-C ends an answer,
    and pressed again the chat. A model's reasoning is shown dimmed on a terminal, and is left out elsewhere.
    """
    text = _prompt(prompt)
    if text is None:
        if as_json:
            raise UsageError("--json needs a prompt", 'write `dynamo run MODEL "PROMPT" --json`')
        return _chat(model, options)
    with _client(model, options) as client:
        return _ask(client, _conversation(options).asked(text), as_json=as_json, is_verbose=options["verbose"])


@click.command()
@click.argument("model", required=False, shell_complete=completion.models)
@_options
def chat(model: str | None, **options: Any) -> int:
    """Chat with MODEL, or with the model of the server that runs.

    Type /help in the chat for its commands. Ctrl-C ends an answer, and pressed again the chat. If no server serves
    MODEL, one is started, and ends with the chat.

    \b
    dynamo chat
    dynamo chat smollm2
    """
    return _chat(model, options)


def _prompt(given: str | None) -> str | None:
    """The argument and standard input; None if there is neither, and a terminal to chat on."""
    if sys.stdin.isatty():
        return given
    try:
        piped = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise UsageError("standard input is not text in UTF-8", "convert it first") from error
    text = "\n\n".join(filter(None, (given, piped)))
    if not text.strip():
        raise UsageError("no prompt", 'write `dynamo run MODEL "PROMPT"`, or give it on standard input')
    return text


def _conversation(options: dict[str, Any]) -> Conversation:
    from dynamo_local.core.conversation import Conversation

    return Conversation(options["system"])


@contextmanager
def _client(model: str | None, options: dict[str, Any]) -> Iterator[ChatClient]:
    """A client of the model; its server, if one was started, ends with the context."""
    from dynamo_local.chat.client import ChatClient, Sampling

    with ExitStack() as stack:
        endpoint, name = _target(stack, model, options)
        yield ChatClient(endpoint, name, Sampling(options["max_tokens"], options["temperature"]))


def _target(stack: ExitStack, model: str | None, options: dict[str, Any]) -> tuple[Endpoint, str]:
    """The API to ask, and the model's name there. Starts a server on the stack if none serves the model."""
    import asyncio

    from dynamo_local.chat.servers import choose, first_model, running_servers, serving
    from dynamo_local.load.asked import read_key
    from dynamo_local.load.client import parse_url
    from state.paths import state_root

    key = read_key(options["api_key_file"], {**os.environ, **_key_of_ours()})
    if options["url"] is not None:
        endpoint = parse_url(options["url"], key)
        return endpoint, asyncio.run(first_model(endpoint, model))
    root = state_root(os.environ)
    found = choose(asyncio.run(running_servers(root, options["namespace"], key, _note)), model)
    if found is not None:
        return parse_url(found[0], key), found[1]
    assert model is not None, "without a model, choose raises"
    if options["namespace"] is not None:
        raise UsageError(
            f"no server of namespace {options['namespace']} serves {model}",
            "see `dynamo ls`, or leave --namespace and DYN_NAMESPACE out",
        )
    _note(f"no running server serves {model}: starting one for this command")
    endpoint = parse_url(stack.enter_context(serving(model, root, _note)), key)
    return endpoint, asyncio.run(first_model(endpoint, None))


def _key_of_ours() -> dict[str, str]:
    from dynamo_local.load.asked import KEY_ENV

    key = os.environ.get(API_KEY_ENV)
    return {KEY_ENV: key} if key else {}


def _ask(client: ChatClient, conversation: Conversation, *, as_json: bool, is_verbose: bool) -> int:
    import asyncio

    async def whole() -> None:
        try:
            click.echo(await client.whole(conversation))
        finally:
            client.close()

    async def stream() -> None:
        from dynamo_local.chat.client import reader

        terminal, figures = Terminal(), reader()
        try:
            async for part in client.stream(conversation, figures):
                terminal.show(part)
        finally:
            terminal.end_answer()
            client.close()
        if is_verbose:
            _note(figures.figures())

    asyncio.run(whole() if as_json else stream())
    return 0


def _chat(model: str | None, options: dict[str, Any]) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("a chat needs a terminal", 'write `dynamo run MODEL "PROMPT"`')
    from dynamo_local.chat.session import Session

    with _client(model, options) as client:
        _note(f"chat with {client.model}; /help lists the commands, Ctrl-D ends it")
        was_interrupted = Session(client, Terminal(), _conversation(options), is_verbose=options["verbose"]).run()
    return INTERRUPTED if was_interrupted else 0


def _note(text: str) -> None:
    click.echo(text, err=True)
