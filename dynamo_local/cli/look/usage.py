"""`dynamo usage`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option, paths_of_usage
from dynamo_local.cli.output.console import date, table

if TYPE_CHECKING:
    from dynamo_local.core.usage.totals import Sums, UsageReport

_TIME = "a time before now such as 12h, 1d or 2w, a date, or a date and a time"
_COLUMNS = ("REQUESTS", "FAILED", "PROMPT", "CACHED", "OUTPUT", "SECONDS")


@click.command()
@namespace_option
@click.option("--since", metavar="TIME", help=f"Show usage from TIME on: {_TIME}.  [default: all that is kept]")
@click.option("--until", metavar="TIME", help="Show usage before TIME.  [default: now]")
@click.option(
    "--by", default="key,endpoint", show_default=True, metavar="GROUPS", help="Groups: key, endpoint, day (of UTC)."
)
@click.option("--json", "as_json", is_flag=True, help=JSON_HELP)
@click.option("--csv", "as_csv", is_flag=True, help="Print the rows as CSV.")
def usage(namespace: str, since: str | None, until: str | None, by: str, as_json: bool, as_csv: bool) -> None:
    """Show what requests have used, by API key and endpoint.

    These are requests, tokens of prompts (with those that were cached) and of answers, and seconds, by the hour, and
    by the day where they are older than a week. They are kept after the server has ended.

    \b
    dynamo usage --since 1d
    dynamo usage --since 2026-05-01 --until 2026-06-01 --by key,day --csv
    """
    import msgspec

    from dynamo_local.core.errors import UsageError
    from dynamo_local.core.usage.totals import as_csv as csv_of
    from dynamo_local.core.usage.totals import as_document, notes, parse_grouping, parse_moment, report
    from state.usage.totals import read_usage

    if as_json and as_csv:
        raise UsageError("--json and --csv exclude each other", "give one of the two")
    now = datetime.now(UTC).astimezone()
    since_s, until_s = (None if text is None else parse_moment(text, now) for text in (since, until))
    groups = parse_grouping(by)
    found = report(read_usage(paths_of_usage(namespace)), since_s, until_s, groups)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(as_document(found)), indent=2))
        return
    click.echo(csv_of(found).rstrip("\n") if as_csv else _text(found))
    for note in notes(found):
        click.echo(note, err=True)


def _text(found: UsageReport) -> str:
    rows = [(*(value or "-" for value in row.group), *_cells(row.sums)) for row in found.rows]
    if len(rows) > 1 and found.by:
        rows.append(("total", *("" for _ in found.by[1:]), *_cells(found.total)))
    begins = "" if found.since is None else f" from {date(found.since)}"
    ends = "" if found.until is None else f" until {date(found.until)}"
    if not rows:
        return f"no request has been counted{begins}{ends}"
    whole = table((*(each.upper() for each in found.by), *_COLUMNS), rows)
    return f"usage{begins}{ends}\n{whole}"


def _cells(sums: Sums) -> tuple[str, ...]:
    numbers = (sums.requests, sums.failed, sums.prompt, sums.cached, sums.output)
    return (*map(str, numbers), f"{sums.seconds:.1f}")
