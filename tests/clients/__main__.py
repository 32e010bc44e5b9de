"""Run the programs of docs/guides/clients.md, each client in its environment, against one server.

Ends with 1 if a program fails. Needs the network's package registries for environments that are not there yet; and npm,
node and nginx.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dynamo_local.core.errors import DynamoError
from dynamo_local.model.cache import default_cache_root
from tests.clients import page
from tests.clients.environments import Environment, make
from tests.clients.recipes import CLIENTS, Client
from tests.clients.run import Result, run
from tests.clients.server import serving


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    clients = [client for client in CLIENTS if not options.only or client.name in options.only]
    blocks = page.files_of(page.PAGE.read_text())
    made: list[tuple[Client, Environment]] = []
    results: list[Result] = []
    for client in clients:
        try:
            made.append((client, make(client.name, client.environment, options.cache)))
        except DynamoError as error:
            results.append(_say(Result(client.name, "", client.does, 0.0, str(error))))
    if made:
        with (
            tempfile.TemporaryDirectory(prefix="clients-") as folder,
            serving(blocks[page.SERVER], Path(folder)) as (place, model),
        ):
            results += [_say(run(client, environment, blocks, place, model)) for client, environment in made]
    failed = sum(not result.passed for result in results)
    if options.json:
        print(json.dumps([dataclasses.asdict(result) | {"passed": result.passed} for result in results], indent=2))
    print(f"{len(results) - failed} passed, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = [client.name for client in CLIENTS]
    cache = default_cache_root() / "clients"
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--only", action="append", choices=names, help="this client; may be repeated")
    parser.add_argument("--json", action="store_true", help="the report as JSON, to standard output")
    parser.add_argument("--cache", type=Path, default=cache, metavar="FOLDER", help=f"of environments ({cache})")
    return parser.parse_args(arguments)


def _say(result: Result) -> Result:
    """Tell a person what a client came to, at once."""
    outcome = "passed" if result.passed else "FAILED"
    print(f"{outcome}  {result.client} {result.version}  {result.seconds:g} s  {result.does}", file=sys.stderr)
    if not result.passed:
        print(result.complaint, file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
