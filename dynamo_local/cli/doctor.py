"""`dynamo doctor`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dynamo_local.cli.options import json_option
from dynamo_local.cli.output import print_json

if TYPE_CHECKING:
    from dynamo_local.control.answers import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_FAILED = 1


@click.command()
@click.option(
    "--fix",
    is_flag=True,
    help="Repair what is safe: remove what dead servers have left, and close the state folder to other users. "
    "No process is ended.",
)
@json_option
def doctor(fix: bool, as_json: bool) -> int:
    """Check this machine: finding and remedy for each problem.

    Checks versions, processor, memory, kernel, GPUs, folders, the port, proxies, the model hub's settings, running
    servers, and what crashed ones have left. The exit code is 1 if a check fails.

    \b
    dynamo doctor
    dynamo doctor --fix
    """
    from dynamo_local.cli.serve import DEFAULT_HOST, DEFAULT_PORT
    from dynamo_local.control.answers import any_failed
    from dynamo_local.doctor.examine import examine
    from dynamo_local.doctor.servers import repair
    from dynamo_local.model.cache import default_cache_root
    from state.paths import state_root

    root, cache = state_root(os.environ), default_cache_root()
    fixed = repair(root) if fix else []
    findings = examine(root, cache, DEFAULT_HOST, DEFAULT_PORT, os.environ)
    if as_json:
        print_json({"findings": findings, "fixed": fixed})
    else:
        for line in fixed:
            click.echo(f"fixed: {line}")
        click.echo("\n".join(_lines(findings)))
    return _FAILED if any_failed(findings) else 0


def _lines(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        level = click.style(f"{finding.level:4}", fg=_COLOURS[finding.level])
        lines.append(f"{level}  {finding.check:{width}}  {finding.found}")
        if finding.remedy:
            lines.append(f"{'':4}  {'':{width}}  -> {finding.remedy}")
    counts = {level: sum(finding.level == level for finding in findings) for level in _COLOURS}
    return [*lines, f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"]
