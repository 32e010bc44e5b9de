"""`dynamo load` and `dynamo load compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.core.errors import UsageError

if TYPE_CHECKING:
    from dynamo_local.load.generator import SendCounts
    from dynamo_local.load.results.file import Run

_INTERRUPTED = 130
_STDOUT = Path("-")


@click.group(invoke_without_command=True, context_settings={"max_content_width": 110})
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    envvar="OPENAI_BASE_URL",
    show_envvar=True,
    help="The server, with or without /v1.",
)
@click.option("--model", help="Model to ask.  [default: the first that the server names]")
@click.option("--rate", metavar="RATE", help="Open loop: requests a second, drawn; see above.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Open loop: a recorded trace; see above."
)
@click.option(
    "--concurrency", type=click.IntRange(min=1), metavar="N", help="Closed loop: N requests always under way."
)
@click.option(
    "--duration", metavar="TIME", help="Send for so long, e.g. 90s or 5m.  [default: 60s, or all of the trace]"
)
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="Send at most N requests.")
@click.option("--warmup", metavar="TIME", help="Leave requests of the first TIME out of the figures.")
@click.option("--input", metavar="LENGTH", help="Tokens of each prompt; see above.  [default: 512]")
@click.option("--output", metavar="LENGTH", help="Tokens of each answer; see above.  [default: 128]")
@click.option(
    "--prefix-share",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="This part of each prompt, e.g. 0.5, begins others too.",
)
@click.option(
    "--prefix-groups", type=click.IntRange(min=1), metavar="N", help="So many different beginnings.  [default: 1]"
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="With --trace: arrivals X times as fast.  [default: 1]",
)
@click.option(
    "--max-input", type=click.IntRange(min=1), metavar="N", help="With --trace: cut longer prompts to N tokens."
)
@click.option(
    "--max-output", type=click.IntRange(min=1), metavar="N", help="With --trace: cut longer answers to N tokens."
)
@click.option(
    "--slo",
    metavar="LIMITS",
    help="Count the goodput: requests that keep all limits, e.g. ttft=500ms,itl=50ms (also gap, e2e).",
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Save the run; - for stdout."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed sends the same load.")
@click.option("--chat", is_flag=True, help="Use /v1/chat/completions, with text.")
@click.option("--text", is_flag=True, help="Send words, not token ids: lengths are then words.")
@click.option("--vocab", metavar="LOW-HIGH", help="Token ids to write prompts with.  [default: asked of the server]")
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Ask for answers of exact length; not every server knows how.",
)
@click.option("--body", metavar="JSON", help="""More fields of each request, e.g. '{"temperature": 1}'.""")
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="N",
    help="With so many under way, further requests are not sent and count as failed.",
)
@click.option("--timeout", default="600s", show_default=True, metavar="TIME", help="For one request.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the API key.  [env: OPENAI_API_KEY holds the key itself]",
)
@click.pass_context
def load(context: click.Context, /, json_file: Path | None, **options: Any) -> int:
    """Put an OpenAI endpoint under load and measure it.

    \b
    dynamo load --rate 5                         5 requests a second for a minute
    dynamo load --rate 5 --slo ttft=500ms,itl=50ms --json a.json
    dynamo load --rate sine:1-10:60s --duration 5m --input power:2.0:16-4000
    dynamo load --trace mooncake.jsonl --speed 0.1 --max-input 4000
    dynamo load compare a.json b.json

    Requests come at times of their own, as those of users do, however slow the answers are (open loop);
    --concurrency waits for an answer before it asks again (closed loop).

    \b
    RATE    5               on average, Poisson: independent users
            constant:5      at equal distances
            gamma:5:2.5     gaps with a coefficient of variation of 2.5: bursts
            sine:1-10:60s   Poisson, the rate swinging from 1 to 10 every 60 s
    FILE    CSV of the Azure LLM inference traces, or JSON lines of Mooncake's;
            the blocks that its prompts share are shared here too
    LENGTH  512             always
            100-2000        any of these as often
            power:2.0:16-4000   n tokens as often as n ** -2.0: mostly short

    Ctrl-C ends the load and reports what there is.
    """
    if context.invoked_subcommand is not None:
        return 0
    import asyncio
    import os

    from dynamo_local.load.asked import Asked
    from dynamo_local.load.results import file
    from dynamo_local.load.results.report import report
    from dynamo_local.load.session import run

    settings = Asked(**options).settings(os.environ)
    _check_writable(json_file)
    watcher = _Terminal()
    finished = asyncio.run(run(settings, watcher))
    watcher.clear()
    to_stdout = json_file == _STDOUT
    click.echo(report(finished), err=to_stdout)
    if json_file is not None:
        _save(json_file, file.encode(finished))
    return _exit_code(finished)


@load.command()
@click.argument("first", type=click.Path(path_type=Path), metavar="A.json")
@click.argument("second", type=click.Path(path_type=Path), metavar="B.json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Put two saved runs side by side: B over A, latencies with 95 % bootstrap intervals."""
    import random

    import msgspec

    from dynamo_local.load.results import comparison, file

    found = comparison.compare(file.read(first), file.read(second), random.Random(0))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
    else:
        click.echo(comparison.as_text(found))


class _Terminal:
    """A Watcher of a run: notes on stderr, and there, if it is a terminal, a line of progress."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        self.clear()
        click.echo(f"note: {text}", err=True)

    def progress(self, elapsed_s: float, tally: SendCounts) -> None:
        if self._is_terminal:
            words = f"{tally.sent} sent, {tally.in_flight} in flight, {tally.completed} done, {tally.failed} failed"
            click.echo(f"\r\033[K[{elapsed_s:5.0f} s] {words}", nl=False, err=True)

    def clear(self) -> None:
        if self._is_terminal:
            click.echo("\r\033[K", nl=False, err=True)


def _exit_code(finished: Run) -> int:
    """1 if the load has not one answer to show for it."""
    if finished.interrupted:
        return _INTERRUPTED
    return 0 if finished.figures.completed else 1


def _check_writable(path: Path | None) -> None:
    """Before the load, not after it. Raises UsageError."""
    if path is not None and path != _STDOUT and not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}", "name another file with --json")


def _save(path: Path, data: bytes) -> None:
    if path == _STDOUT:
        click.echo(data, nl=False)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "the report above is all there is") from error
