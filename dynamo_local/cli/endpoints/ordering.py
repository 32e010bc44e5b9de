"""Options of the commands that create and change endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import click

from dynamo_local.cli.arguments.numbers import FiniteRange
from dynamo_local.cli.arguments.options import JSON_HELP, namespace_option

_F = TypeVar("_F", bound=Callable[..., Any])

DEFAULT_TIMEOUT_S = 600.0


def order_options(metavar: str, complete: Callable[..., Any]) -> Callable[[_F], _F]:
    """Add the words of the command, which begin with the endpoint's name, and --namespace."""

    def add(function: _F) -> _F:
        words = click.argument(
            "words", nargs=-1, type=click.UNPROCESSED, metavar=metavar, shell_complete=complete, required=True
        )
        return words(namespace_option(function))

    return add


def spec_options(function: _F) -> _F:
    """Add an option for each field of an endpoint, None if not given (core/endpoints/spec.py)."""
    workers, seconds = click.IntRange(min=1), FiniteRange(min=0, min_open=True)
    options = (
        click.option("--model", help="Model: a folder, a Hugging Face id, or smollm2, random, quickstart."),
        click.option("--adapter-of", metavar="NAME", help="Endpoint whose workers serve MODEL, a LoRA adapter."),
        click.option("--engine", metavar="ENGINE", help="Engine of the workers: vllm or mocker.  [default: vllm]"),
        click.option(
            "--arg", "args", multiple=True, metavar="KEY=VALUE", help="Setting of workers or frontend. May be repeated."
        ),
        click.option("--gpu", type=float, help="Devices of each worker, or its share of one, such as 0.5."),
        click.option(
            "--min-workers",
            type=click.IntRange(min=0),
            help="Smallest number of workers. 0: none while nobody asks for it; requests wait until one has started."
            "  [default: 1]",
        ),
        click.option("--max-workers", type=workers, help="Largest number of workers.  [default: the smallest]"),
        click.option("--disagg/--no-disagg", "disaggregated", default=None, help="Prefill long prompts elsewhere."),
        click.option("--min-prefill-workers", type=workers, help="Smallest number of prefill workers.  [default: 1]"),
        click.option("--max-prefill-workers", type=workers, help="Largest number of prefill workers."),
        click.option(
            "--park-after",
            "park_after_s",
            type=seconds,
            metavar="SECONDS",
            help="Time without a request until workers are parked: they keep their devices, and answer again at once."
            "  [default: 60 with --min-workers 0, else never]",
        ),
        click.option(
            "--sleep-after",
            "sleep_after_s",
            type=seconds,
            metavar="SECONDS",
            help="Time without a request until workers end, with --min-workers 0: their devices are free for others."
            "  [default: 900]",
        ),
        click.option(
            "--awake",
            multiple=True,
            metavar="TIMES",
            help="When it is awake without a request, such as 'mon-fri 08:00-18:30' or 'daily 20:00'. May be repeated.",
        ),
        click.option("--forecast/--no-forecast", default=None, help="Wake it at times at which it was often used."),
        click.option("--requests-per-worker", type=float, help="What policy concurrency aims at.  [default: 16]"),
        click.option(
            "--policy",
            metavar="POLICY",
            help="Policy of scaling: concurrency, load or freeness.  [default: concurrency]",
        ),
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Label. May be repeated."),
    )
    return reduce(lambda decorated, option: option(decorated), reversed(options), function)


def ways_options(function: _F) -> _F:
    """Add --replace and --roll, which say how an order may be carried out (core/endpoints/checks.py)."""
    options = (
        click.option(
            "--replace",
            is_flag=True,
            help="End the old workers before the new ones are ready, if there is no device for both.",
        ),
        click.option(
            "--roll",
            is_flag=True,
            help="With --adapter-of: raise max-loras and the like of that endpoint, if you have set them too low.",
        ),
    )
    return reduce(lambda decorated, option: option(decorated), reversed(options), function)


def wait_options(function: _F) -> _F:
    """Add --wait, --timeout and --json."""
    options = (
        click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is done."),
        click.option(
            "--timeout",
            type=FiniteRange(min=0, min_open=True),
            default=DEFAULT_TIMEOUT_S,
            show_default=True,
            metavar="SECONDS",
            help="How long to wait. What is ordered stays so.",
        ),
        click.option("--json", "as_json", is_flag=True, help=JSON_HELP),
    )
    return reduce(lambda decorated, option: option(decorated), reversed(options), function)
