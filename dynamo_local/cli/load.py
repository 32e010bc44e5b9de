"""`dynamo load` and `dynamo load compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli.commands import INTERRUPTED, CommandGroup
from dynamo_local.cli.options import FiniteRange, json_option
from dynamo_local.cli.output import print_result
from dynamo_local.core.errors import UsageError

if TYPE_CHECKING:
    from dynamo_local.load.runs import Run
    from dynamo_local.load.session import SendCounts

_STDOUT = Path("-")

BASE_URL_ENV = "OPENAI_BASE_URL"
"""Environment variable with the address of the server for `dynamo load`; --url takes precedence."""


@click.group(cls=CommandGroup, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    envvar=BASE_URL_ENV,
    show_envvar=True,
    help="Address of the server, with or without /v1.",
)
@click.option("--model", help="Model to request.  [default: the first model that the server lists]")
@click.option("--rate", metavar="RATE", help="Open loop: request rate per second; see RATE above.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Open loop: replay a recorded trace; see FILE above.",
)
@click.option("--concurrency", type=click.IntRange(min=1), metavar="N", help="Closed loop: keep N requests in flight.")
@click.option(
    "--duration", metavar="TIME", help="How long to send requests, e.g. 90s or 5m.  [default: 60s, or the whole trace]"
)
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="Maximum number of requests to send.")
@click.option("--warmup", metavar="TIME", help="Exclude requests of the first TIME from the figures, e.g. 10s.")
@click.option("--input", metavar="LENGTH", help="Tokens in each prompt; see LENGTH above.  [default: 512]")
@click.option("--output", metavar="LENGTH", help="Tokens in each answer; see LENGTH above.  [default: 128]")
@click.option(
    "--prefix-share",
    type=FiniteRange(0, 1),
    metavar="FRACTION",
    help="Fraction of each prompt that is a prefix shared with other prompts, e.g. 0.5.",
)
@click.option(
    "--prefix-groups",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of different shared prefixes.  [default: 1]",
)
@click.option(
    "--speed",
    type=FiniteRange(min=0, min_open=True),
    metavar="X",
    help="With --trace: replay the arrivals X times as fast.  [default: 1]",
)
@click.option(
    "--max-input",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --trace: maximum tokens in a prompt; longer ones are cut.",
)
@click.option(
    "--max-output",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --trace: maximum tokens in an answer; longer ones are cut.",
)
@click.option(
    "--slo",
    metavar="LIMITS",
    help="Report goodput: requests within all LIMITS, e.g. ttft=500ms,itl=50ms (also gap, e2e).",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Save the run as JSON to FILE; - writes to stdout.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the random numbers. The same seed sends the same load.",
)
@click.option("--chat", is_flag=True, help="Send chat requests (/v1/chat/completions), with text prompts.")
@click.option("--text", is_flag=True, help="Send text prompts instead of token ids. Lengths then count words.")
@click.option(
    "--vocab",
    metavar="LOW-HIGH",
    help="Range of token ids that prompts are made of.  [default: requested from the server]",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="Send ignore_eos, so that answers have their exact length. Not every server supports it.",
)
@click.option("--body", metavar="JSON", help="""Fields to add to each request, e.g. '{"temperature": 1}'.""")
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="N",
    help="Maximum number of requests in flight. Further requests are not sent and count as failed.",
)
@click.option("--timeout", default="600s", show_default=True, metavar="TIME", help="Timeout of one request.")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the API key.  [default: the key in OPENAI_API_KEY]",
)
@click.pass_context
def load(context: click.Context, /, json_file: Path | None, **options: Any) -> int:
    """Send requests to an OpenAI endpoint and measure the answers.

    \b
    dynamo load --rate 5                         5 requests per second for a minute
    dynamo load --rate 5 --slo ttft=500ms,itl=50ms --json a.json
    dynamo load --rate sine:1-10:60s --duration 5m --input power:2.0:16-4000
    dynamo load --trace mooncake.jsonl --speed 0.1 --max-input 4000
    dynamo load compare a.json b.json

    Give one of --rate, --trace and --concurrency. With --rate and --trace, requests are sent at planned times, however
    slow the answers are, as independent users do (open loop). With --concurrency, each stream sends its next request
    when its answer is complete (closed loop).

    \b
    RATE    5               5 per second on average (Poisson): independent users
            constant:5      5 per second, evenly spaced
            gamma:5:2.5     gaps with a coefficient of variation of 2.5: bursts
            sine:1-10:60s   Poisson, its rate varies between 1 and 10 every 60 s
    FILE    CSV of the Azure LLM inference traces, or JSON lines of Mooncake's
            traces; prompts share the prefixes that they share in the trace
    LENGTH  512             constant
            100-2000        uniform
            power:2.0:16-4000   power law, n tokens with weight n ** -2.0: mostly short

    Ctrl-C ends the load and reports the requests so far. The exit code is 1 if no request was completed.
    """
    if context.invoked_subcommand is not None:
        return 0
    import asyncio
    import os

    from dynamo_local.load import runs
    from dynamo_local.load.asked import Asked
    from dynamo_local.load.runs import report
    from dynamo_local.load.session import run

    settings = Asked(**options).settings(os.environ)
    _check_writable(json_file)
    watcher = _Terminal()
    finished = asyncio.run(run(settings, watcher))
    watcher.clear()
    to_stdout = json_file == _STDOUT
    click.echo(report(finished), err=to_stdout)
    if json_file is not None:
        _save(json_file, runs.encode(finished))
    return _exit_code(finished)


@load.command()
@click.argument("first", type=click.Path(path_type=Path), metavar="A.json")
@click.argument("second", type=click.Path(path_type=Path), metavar="B.json")
@json_option
def compare(first: Path, second: Path, as_json: bool) -> None:
    """Compare the saved runs A.json and B.json.

    The comparison shows the ratio of B to A, for latencies with 95 % bootstrap intervals.
    """
    import random

    from dynamo_local.load import runs

    found = runs.compare(runs.read(first), runs.read(second), random.Random(0))
    print_result(found, runs.as_text, as_json=as_json)


class _Terminal:
    """A watcher of a run (load/session.py). Prints notes to standard error, and to a terminal a line of progress."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        self.clear()
        click.echo(f"note: {text}", err=True)

    def progress(self, elapsed_s: float, counts: SendCounts) -> None:
        if self._is_terminal:
            words = f"{counts.sent} sent, {counts.in_flight} in flight, {counts.completed} done, {counts.failed} failed"
            click.echo(f"\r\033[K[{elapsed_s:5.0f} s] {words}", nl=False, err=True)

    def clear(self) -> None:
        if self._is_terminal:
            click.echo("\r\033[K", nl=False, err=True)


def _exit_code(finished: Run) -> int:
    """Return the exit code: 1 if no request was completed."""
    if finished.interrupted:
        return INTERRUPTED
    return 0 if finished.figures.completed else 1


def _check_writable(path: Path | None) -> None:
    """Raise UsageError if the folder of `path` does not exist: before the load rather than after it."""
    if path is not None and path != _STDOUT and not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}", "name another file with --json")


def _save(path: Path, data: bytes) -> None:
    if path == _STDOUT:
        click.echo(data, nl=False)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "the run is not saved") from error
