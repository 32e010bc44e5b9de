"""Writes the planner's options into docs/planner.md, from the code. Run it after changing one of them."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.core.names import DEFAULT_NAMESPACE
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.sdk.config.schema import KeySpec, schema_of

DOCUMENT = Path(__file__).parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- options: made by scripts/planner_table.py -->", "<!-- end of options -->"


def table() -> str:
    """All options, as Markdown."""
    namespace = ("`--namespace`", f"`{DEFAULT_NAMESPACE}`", "namespace of the server (on the command line only)")
    rows = [namespace, *(_row(spec) for spec in schema_of(PlannerOptions).keys().values())]
    return "\n".join(["| option | default | |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)])


def with_table(document: str) -> str:
    """The document with the table of now. Raises ValueError if it has no place for one."""
    before, _, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{DOCUMENT} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def _row(spec: KeySpec) -> tuple[str, str, str]:
    if spec.kind == "bool":
        default = "off"
    elif spec.default is None:
        default = "none"
    else:
        default = f"`{spec.default:g}`" if spec.kind == "float" else f"`{spec.default}`"
    choices = f" ({', '.join(f'`{choice}`' for choice in spec.choices)})" if len(spec.choices) > 1 else ""
    return f"`--{spec.name}`", default, f"{spec.help}{choices}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
