"""Makes a model ready to be loaded: finds what is wrong with it, and gets it from the hub if it is not here.

Once for a server, before any process is started; the workers are given a folder and download nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.model.check import Needs, check_model
from dynamo_local.model.hub.download import Steps
from dynamo_local.model.hub.hub import HubModel, HubSettings, fetch, parse_id

BeforeWeights = Callable[[ModelFacts], None]

_MODELSCOPE = "VLLM_USE_MODELSCOPE"
"""A variable of vLLM's: models then come from ModelScope."""

_LOADED_HERE = ("auto", "hf", "safetensors")
"""Values of load-format with which vLLM loads the files that are fetched here."""
_FROM_ELSEWHERE = (
    "code-revision", "hf-config-path", "ignore-patterns", "model-loader-extra-config", "tokenizer-revision",
)  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """A model as the user names it, with the settings that decide what is fetched and checked.

    `download_dir`: the cache to use in place of the hub's; `token`: the token in place of HF_TOKEN; `fetches`: False
    leaves a model of the hub to vLLM.
    """

    model: str
    revision: str | None = None
    download_dir: Path | None = None
    token: str | None = field(default=None, repr=False)
    needs: Needs = field(default_factory=Needs)
    fetches: bool = True


@dataclass(frozen=True)
class Obtained:
    """A model that is ready. `model`: what vLLM is given; `served_name`: the name that clients use; `folder`: None if
    the model is left to vLLM, and then nothing is known of it."""

    model: str
    served_name: str
    folder: Path | None = None
    facts: ModelFacts = field(default_factory=ModelFacts)


def wish_of(config: Mapping[str, Any], on_cpu: bool | None = None) -> Wish:
    """The wish of a service, from its configuration in vLLM's keys.

    `revision`, `download-dir` and `hf-token` are honoured. With `tokenizer` or `skip-tokenizer-init` the model needs
    no tokenizer of its own, and with `load-format: dummy` no weights. `hf-overrides` switches the check of the
    architecture off. Other values of `load-format`, and settings that take parts of the model from elsewhere
    (`hf-config-path`, `code-revision`, `tokenizer-revision` and the like), leave a model of the hub to vLLM as it is.
    """
    load_format = config.get("load-format") or "auto"
    elsewhere = load_format not in (*_LOADED_HERE, "dummy") or any(config.get(key) for key in _FROM_ELSEWHERE)
    download_dir, token = config.get("download-dir"), config.get("hf-token")
    needs = Needs(
        weights=load_format in _LOADED_HERE and not elsewhere,
        tokenizer=not (config.get("tokenizer") or config.get("skip-tokenizer-init")),
        trust_remote_code=bool(config.get("trust-remote-code")),
        on_cpu=on_cpu,
        plain_architecture=not (config.get("hf-overrides") or elsewhere),
    )
    folder = Path(download_dir).expanduser() if isinstance(download_dir, str) else None
    return Wish(
        model=str(config["model"]),
        revision=config.get("revision"),
        download_dir=folder,
        token=token if isinstance(token, str) else None,  # vLLM takes True for "the token on this machine"
        needs=needs,
        fetches=not elsewhere,
    )


def obtain(
    wish: Wish | str,
    report: Steps,
    before_weights: BeforeWeights | None = None,
    settings: HubSettings | None = None,
) -> Obtained:
    """Check a model, and fetch it if it is one of the hub's.

    `wish`: a wish, or just the model: a folder, or "org/name" or "org/name@revision" on the hub. `before_weights` is
    called with the facts, among them the size of the weights, before these are fetched, and may refuse the model.
    Addresses such as s3://... are left to vLLM. Raises UsageError for what cannot be had or loaded, FetchError if the
    network, the hub or the disk fails.
    """
    wish = Wish(wish) if isinstance(wish, str) else wish
    if "://" in wish.model:
        return Obtained(wish.model, wish.model)
    hub_model = None if _is_here(wish.model) else parse_id(wish.model)
    if hub_model is None:
        return _local(wish, before_weights)
    if not wish.fetches or _uses_another_hub():
        return Obtained(wish.model, wish.model)
    return _of_hub(_at_revision(hub_model, wish.revision), wish, report, before_weights, settings)


def _is_here(model: str) -> bool:
    """Whether the text means a path, as it exists or can be nothing else."""
    return model.startswith(("/", "./", "../", "~")) or model in (".", "..") or os.access(model, os.F_OK)


def _local(wish: Wish, before_weights: BeforeWeights | None) -> Obtained:
    folder = Path(wish.model).expanduser()
    facts = check_model(folder, wish.needs)
    if before_weights is not None:
        before_weights(facts)
    return Obtained(str(folder), wish.model, folder, facts)


def _of_hub(
    model: HubModel, wish: Wish, report: Steps, before_weights: BeforeWeights | None, settings: HubSettings | None
) -> Obtained:
    try:
        settings = settings or HubSettings.of_environment()
    except ImportError:
        return Obtained(wish.model, wish.model)  # without the library vLLM is not installed either, and says so
    settings = replace(settings, cache=wish.download_dir or settings.cache, token=wish.token or settings.token)
    folder = fetch(model, settings, wish.needs, report, before_weights)
    return Obtained(str(folder), model.repo, folder, check_model(folder, wish.needs))


def _at_revision(model: HubModel, revision: str | None) -> HubModel:
    """The model at the revision that its name or the setting gives. Raises UsageError if they differ."""
    if revision is None or revision == model.revision:
        return model
    if model.revision is not None:
        raise UsageError(
            f"the model is {model}, and the setting revision says {revision!r}", "leave one of the two out"
        )
    return replace(model, revision=revision)


def _uses_another_hub() -> bool:
    """Whether vLLM is told to fetch models from ModelScope."""
    return os.environ.get(_MODELSCOPE, "").lower() in ("1", "true")
