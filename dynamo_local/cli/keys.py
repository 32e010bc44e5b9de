"""`dynamo key`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from dynamo_local.cli import completion
from dynamo_local.cli.commands import CommandGroup
from dynamo_local.cli.options import json_option, namespace_option, paths_of_kept
from dynamo_local.cli.output import Console, date, facts, print_json, table

if TYPE_CHECKING:
    from dynamo_local.control.operations import Operation


_HEADERS = ("NAME", "ENDPOINTS", "REQUESTS/MIN", "TOKENS/MIN", "AT ONCE", "BEST PRIORITY", "EXPIRES", "ADMIN")
_ANY = "-"
_NO_KEYS = "there are no keys, and everybody who reaches the server is answered; create one: dynamo key create NAME"


@click.group(cls=CommandGroup)
def key() -> None:
    """Create, list, rotate and revoke API keys.

    While there is no key, the server answers everybody who reaches it. From the first key on, each request needs one.
    Keys stay when the server ends; they can also be changed while it does not run.

    \b
    dynamo key create alice --requests-per-minute 60 --tokens-per-minute 100000 --expires 30d
    dynamo key create boss --admin                # may change endpoints and keys
    dynamo key list
    dynamo key rotate alice --overlap 1h          # the former secret works for one more hour
    dynamo key revoke alice
    """


@key.command()
@click.argument("name", shell_complete=completion.nothing)
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="ENDPOINT",
    shell_complete=completion.endpoints,
    help="Endpoint that it may use; the others are as if they were not there. May be repeated.  [default: all]",
)
@click.option("--requests-per-minute", type=int, metavar="NUMBER", help="Requests a minute.  [default: no limit]")
@click.option(
    "--tokens-per-minute",
    type=int,
    metavar="NUMBER",
    help="Tokens a minute, of prompts and answers together.  [default: no limit]",
)
@click.option("--requests-at-once", type=int, metavar="NUMBER", help="Requests in flight.  [default: no limit]")
@click.option(
    "--best-priority",
    type=int,
    metavar="NUMBER",
    help="Lowest `priority` of its requests; lower numbers are served first.  [default: any]",
)
@click.option(
    "--default-priority",
    type=int,
    metavar="NUMBER",
    help="`priority` of its requests that name none.  [default: 0, or the best if that is above 0]",
)
@click.option("--expires", metavar="TIME", help="When it ends, from now: e.g. 12h or 30d.  [default: never]")
@click.option("--admin", is_flag=True, help="It may change endpoints and keys.")
@namespace_option
@json_option
def create(name: str, expires: str | None, namespace: str, as_json: bool, **given: Any) -> None:
    """Create key NAME, and print its secret.

    The secret is shown now and never again: only a digest of it is kept. Clients send it as their API key.

    \b
    dynamo key create alice
    dynamo key create guest --endpoint chat --requests-per-minute 20 --requests-at-once 2 --expires 30d
    export OPENAI_API_KEY=$(dynamo key create me --json | jq -r .secret)
    """
    import time

    from dynamo_local.control.operations import CREATE_KEY
    from dynamo_local.core.keys.registry import EXPIRES_IN_S, read_terms
    from dynamo_local.load.quantities import parse_duration

    fields = {"name": name, **given, "endpoints": list(given["endpoints"])}
    if expires is not None:
        fields[EXPIRES_IN_S] = parse_duration(expires)
    # Checked here as well: mistakes of the command line need no server to be found.
    read_terms(fields, time.time())
    _print_secret(_send(namespace, CREATE_KEY, fields, as_json=as_json), as_json=as_json)


@key.command(name="list")
@namespace_option
@json_option
def list_(namespace: str, as_json: bool) -> None:
    """List all keys, with what they allow."""
    from dynamo_local.control.operations import LIST_KEYS

    keys = _send(namespace, LIST_KEYS, as_json=as_json)["data"]
    if as_json:
        print_json(list(map(_shown, keys)))
    else:
        click.echo(table(_HEADERS, list(map(_cells, keys))) if keys else _NO_KEYS)


@key.command()
@click.argument("name", shell_complete=completion.keys)
@click.option(
    "--overlap",
    default="1h",
    show_default=True,
    metavar="TIME",
    help="How long the former secret stays valid. 0: it ends now.",
)
@namespace_option
@json_option
def rotate(name: str, overlap: str, namespace: str, as_json: bool) -> None:
    """Give key NAME another secret, and print it.

    The former secret stays valid for a while, so that no request fails while clients change over. Limits and name stay.

    \b
    dynamo key rotate alice --overlap 1d
    dynamo key rotate alice --overlap 0           # it has leaked: end the former secret now
    """
    from dynamo_local.control.operations import ROTATE_KEY
    from dynamo_local.load.quantities import parse_duration

    overlap_s = 0.0 if overlap.strip() == "0" else parse_duration(overlap)
    answer = _send(namespace, ROTATE_KEY, {"overlap_s": overlap_s}, name, as_json=as_json)
    _print_secret(answer, as_json=as_json)


@key.command()
@click.argument("name", shell_complete=completion.keys)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--open", "opens", is_flag=True, help="Also if it is the last key: the server then answers everybody.")
@namespace_option
@json_option
def revoke(name: str, yes: bool, opens: bool, namespace: str, as_json: bool) -> None:
    """Remove key NAME. Its requests in flight are finished; the next ones are refused.

    Confirmation is asked for on a terminal only.

    \b
    dynamo key revoke alice
    dynamo key revoke last --open                 # no key is left: everybody who reaches the server is answered
    """
    from dynamo_local.control.operations import REVOKE_KEY

    if not yes and sys.stdin.isatty():
        click.confirm(f"Revoke key {name}?", abort=True)
    _send(namespace, REVOKE_KEY, {"open": opens}, name, as_json=as_json)
    click.echo('{"revoked": true}' if as_json else f"{name} is revoked")


def _send(
    namespace: str, operation: Operation, fields: dict[str, Any] | None = None, name: str = "", *, as_json: bool
) -> Any:
    """Have an order carried out by the server, or, while none runs, on its files. Returns the answer's content."""
    import asyncio

    import msgspec

    from dynamo_local.control.client import ControlClient
    from dynamo_local.control.operations import Call
    from state.namespaces import is_running

    paths = paths_of_kept(namespace, "keys")
    if is_running(paths):
        return ControlClient(paths).do(operation, fields, name=name)
    from dynamo_local.supervisor.keys.start import do_without_server

    call = Call({"name": name}, body=msgspec.json.encode(fields or {}))
    return asyncio.run(do_without_server(paths, operation, call, Console(err=as_json)))


def _shown(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return a key of an answer as --json prints it."""
    return {name: value for name, value in key.items() if name != "object"}


def _print_secret(key: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(_shown(key))
        return
    click.echo(facts(_facts(key)), err=True)
    click.echo("This secret is not shown again:", err=True)
    click.echo(key["secret"])


def _cells(key: Mapping[str, Any]) -> tuple[str, ...]:
    limits = ("requests_per_minute", "tokens_per_minute", "requests_at_once", "best_priority")
    return (
        key["name"],
        ", ".join(key["endpoints"]) or "all",
        *(_ANY if key[name] is None else str(key[name]) for name in limits),
        _ANY if key["expires_at"] is None else date(key["expires_at"]),
        "yes" if key["admin"] else _ANY,
    )


def _facts(key: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "key", key["name"]
    yield "endpoints", ", ".join(key["endpoints"]) or "all"
    limits = {"a minute": key["requests_per_minute"], "at once": key["requests_at_once"]}
    yield "requests", ", ".join(f"{number} {what}" for what, number in limits.items() if number is not None)
    yield "tokens", "" if key["tokens_per_minute"] is None else f"{key['tokens_per_minute']} a minute"
    yield "best priority", "" if key["best_priority"] is None else str(key["best_priority"])
    yield "default priority", "" if key["default_priority"] is None else str(key["default_priority"])
    yield "expires", "" if key["expires_at"] is None else date(key["expires_at"])
    yield "admin", "may change endpoints and keys" if key["admin"] else ""
    yield "former secret", "" if key["former_until"] is None else f"valid until {date(key['former_until'])}"
