"""The page on options of `vllm serve`: who reads each of them, and what to do instead of those that are refused."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_local.engine.vllm.arguments import (
    MANAGED,
    OF_SERVER,
    described_vllm,
    every_argument,
    server_schema,
)
from dynamo_local.engine.vllm.command_line import REFUSED, flag_of
from scripts.reference import markdown

_INTRODUCTION = f"""
Each option of `vllm serve` {described_vllm()} acts here, or is refused before anything starts. `dynamo serve MODEL`,
`dynamo endpoint create` and `--config FILE` take the same ones; `dynamo serve --help-engine` says what each does. In a
[configuration](configuration.md#arguments-of-vllm) they are keys, spelled without dashes.
"""
_READERS = """
*Server* is the HTTP server in front of all models: an endpoint cannot have its own, so give such an option to
`dynamo serve`. *Frontend* is the part of it that belongs to one model, in each process of the frontend: bounds such as
`--max-num-queued-reqs` hold for each process by itself. *Workers* have the engines.
"""
_NOTES = """
- `--ssl-ciphers` is about TLS 1.2; the ciphers of TLS 1.3 are fixed. With `--enable-ssl-refresh`, files of TLS that
  change count for new connections within two seconds. Files that do not go together change nothing.
- `--root-path /llm`: each path answers with the prefix and without it. It is removed once, before keys and limits are
  looked at. The documentation at `/docs` expects it.
- The access log is off. `--no-disable-uvicorn-access-log` turns it on, and so does
  `--disable-access-log-for-endpoints`, for all other paths; both raise `--uvicorn-log-level` to `info`.
- vLLM's log begins at level WARNING. `--enable-log-requests` adds requests to the frontend's, `--enable-log-outputs`
  answers too, and `--enable-logging-iteration-details` has workers log from level INFO. Prompts are written with
  `--log-level DEBUG` alone.
- A frontend has one log: an endpoint's `--log-level`, `--log-config-file` and `--logging-config` are for its workers.
"""
_SPLIT = """
In a configuration the same ones are refused, except that workers whose model is split among several processes take
"""


def page() -> str:
    """The text of docs/reference/vllm-options.md."""
    return markdown.page("Options of vllm serve", _parts())


def _parts() -> Iterator[str]:
    yield markdown.paragraph(_INTRODUCTION)
    yield "## Taken"
    yield markdown.paragraph(_READERS)
    taken, refused = _grouped()
    yield markdown.table(("read by", "options"), [(reader, markdown.codes(taken[reader])) for reader in sorted(taken)])
    yield _NOTES.strip()
    yield "## Refused"
    yield markdown.table(("options", "instead"), [(markdown.codes(refused[remedy]), remedy) for remedy in refused])
    of_workers = markdown.codes(sorted(set(REFUSED) - set(MANAGED)))
    yield markdown.paragraph(f"{_SPLIT} {of_workers}.")


def _grouped() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The options that are taken by who reads them, and those that are refused by what to do instead."""
    taken: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name, argument in sorted(every_argument().items()):
        names = [f"--{name}", *argument.aliases]
        if name in REFUSED:
            refused.setdefault(REFUSED[name], []).extend(names)
        else:
            taken.setdefault(_readers(name), []).extend(names)
    return taken, refused


def _readers(name: str) -> str:
    if name in OF_SERVER:
        return "server"
    if name in set(server_schema().keys()):
        return "frontend"
    return "workers" if flag_of(name, "", name).engines_only else "frontend and workers"
