"""`dynamo planner` and the planner's section of a configuration have the same options."""

from __future__ import annotations

from dataclasses import fields

import click
from click.testing import CliRunner

from components.planner import Planner, PlannerSettings
from dynamo_local.cli.planner import planner
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.sdk import schema_of, spec_of

NAMES = {field.name.replace("_", "-") for field in fields(PlannerOptions)}


def test_every_option_is_on_the_command_line_with_its_default() -> None:
    params = planner.get_params(click.Context(planner))
    given = {param.opts[-1].removeprefix("--"): param.default for param in params}
    assert set(given) == NAMES | {"namespace", "help"}
    options = PlannerOptions()
    for field in fields(PlannerOptions):
        assert given[field.name.replace("_", "-")] == getattr(options, field.name)


def test_every_option_has_its_help() -> None:
    told = " ".join(CliRunner().invoke(planner, ["--help"]).output.split())
    for spec in schema_of(PlannerOptions).keys().values():
        assert spec.help in told, spec.name


def test_the_service_takes_the_same_and_only_observes_by_default() -> None:
    assert set(spec_of(Planner).schema.keys()) == NAMES
    different = [
        f.name
        for f in fields(PlannerOptions)
        if getattr(PlannerOptions(), f.name) != getattr(PlannerSettings(), f.name)
    ]
    assert different == ["no_operation"]
    assert PlannerSettings().no_operation
