"""A model of the Hugging Face Hub: which files it has, which of them vLLM needs, and getting them into the cache.

The library's own download starts a file anew when it is interrupted, and tells its progress only to terminals; this
one goes on where it was, and leaves the same cache behind. HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and
HF_HUB_OFFLINE are honoured, and so are proxies.

huggingface_hub is imported when a model is fetched, never before.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from dynamo_local.core.errors import DynamoError, UsageError
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.model.check import Needs, check_config
from dynamo_local.model.hub.cache import CachedModel
from dynamo_local.model.hub.download import (
    MB,
    Download,
    Steps,
    Wanted,
    as_ours,
    is_out_of_reach,
    megabytes,
    offline_without,
)
from dynamo_local.model.weights import index_name, indexed_files, loaded_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_ID = re.compile(r"(?P<repo>[\w][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[^\s@]+))?")

_LEFT_OUT = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.ot",
    "*.tflite", "*.ckpt", "*.npz", "*.mlpackage/*", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.webp", "*.svg", "*.mp4",
    "*.mp3", "*.wav", "*.pdf", "*.md", "*.zip", "*.tar*", "*.parquet", ".gitattributes", "original/*", "onnx/*",
    "openvino/*", "coreml/*", "metal/*",
)  # fmt: skip
"""Files that vLLM does not need, and weights, which come later."""
_SENTENCE_LAYERS = "[0-9]_*/*"
"""Weights of layers that sentence transformers put after the model, such as 2_Dense/model.safetensors."""
_SPARE_BYTES = 100 * MB
"""Room that is left free on the disk."""


@dataclass(frozen=True)
class HubModel:
    """`repo`: "org/name"; `revision`: a branch, tag or commit, None for the main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


@dataclass(frozen=True)
class HubSettings:
    """Where models come from and go to.

    `silence_s`: after how long without a byte a connection is given up; `tries`: how many times in a row without any
    byte; `pause_s`: how long to wait after the first of them, which doubles.
    """

    endpoint: str
    cache: Path
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    silence_s: float = 15.0
    tries: int = 5
    pause_s: float = 1.0

    @property
    def host(self) -> str:
        """Host and port of the hub, without user and password."""
        return urlsplit(self.endpoint).netloc.rpartition("@")[2] or self.endpoint

    @classmethod
    def of_environment(cls) -> HubSettings:
        """The settings that the hub's library reads from the environment and from its files."""
        from huggingface_hub import constants, get_token

        return cls(
            endpoint=constants.ENDPOINT.rstrip("/"),
            cache=Path(constants.HF_HUB_CACHE),
            token=get_token(),
            offline=constants.HF_HUB_OFFLINE,
        )


@dataclass(frozen=True)
class Listing:
    """The files of a model at one commit, each with its size in bytes (None: unknown)."""

    commit: str
    sizes: dict[str, int | None]


def parse_id(text: str) -> HubModel | None:
    """The model of a text like "org/name" or "org/name@revision"; None if it cannot be one."""
    match = _ID.fullmatch(text)
    return HubModel(match["repo"], match["revision"]) if match else None


def fetch(
    model: HubModel,
    settings: HubSettings,
    needs: Needs,
    report: Steps,
    before_weights: Callable[[ModelFacts], None] | None = None,
) -> Path:
    """Get the model into the cache and return its folder. Resumes what was begun.

    Configuration and tokenizer come first and are checked. `before_weights` is then called with the facts, sizes
    included, and may refuse the model by raising. Raises UsageError for what cannot be had or loaded, FetchError for
    failures of network, hub or disk.
    """
    cached = CachedModel(settings.cache, model.repo)
    try:
        if settings.offline:
            return _from_cache(model, settings, needs, report, "HF_HUB_OFFLINE is set")
        report.step(f"{model}: looking it up on {settings.host}")
        try:
            listing = _list(model, settings)
        except Exception as error:
            if is_out_of_reach(error) and cached.commit_of(model.revision) is not None:
                return _from_cache(model, settings, needs, report, as_ours(error, model, settings).cause)
            raise
        return _Fetching(model, settings, cached, listing, report).whole(needs, before_weights)
    except DynamoError:
        raise
    except Exception as error:
        raise as_ours(error, model, settings) from error


def _list(model: HubModel, settings: HubSettings) -> Listing:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.endpoint, token=settings.token or False)
    info = api.model_info(model.repo, revision=model.revision, files_metadata=True, timeout=settings.silence_s)
    return Listing(info.sha or model.revision or "main", _sizes(info))


def _sizes(info: ModelInfo) -> dict[str, int | None]:
    return {sibling.rfilename: sibling.size for sibling in info.siblings or ()}


def _from_cache(model: HubModel, settings: HubSettings, needs: Needs, report: Steps, reason: str) -> Path:
    """The folder of the model as it is in the cache. Raises UsageError if it is not whole."""
    cached = CachedModel(settings.cache, model.repo)
    commit = cached.commit_of(model.revision)
    if commit is None or not _is_whole(cached.snapshot(commit), needs):
        raise offline_without(model, settings)
    report.step(f"{reason}: {model} is taken from the cache")
    return cached.snapshot(commit)


def _is_whole(folder: Path, needs: Needs) -> bool:
    names = {path.name for path in folder.iterdir() if path.is_file()}
    index = index_name(names)
    if index is not None:
        return not needs.weights or indexed_files(folder / index) <= names
    return bool(names) and (not needs.weights or bool(loaded_files(names)))


class _Fetching:
    """Gets the files of one model at one commit."""

    def __init__(
        self, model: HubModel, settings: HubSettings, cached: CachedModel, listing: Listing, report: Steps
    ) -> None:
        self._model = model
        self._settings = settings
        self._cached = cached
        self._listing = listing
        self._report = report
        self._folder = cached.snapshot(listing.commit)

    def whole(self, needs: Needs, before_weights: Callable[[ModelFacts], None] | None) -> Path:
        """Get what the model is needed for, and return its folder."""
        self._cached.prepare(self._listing.commit)
        self._get(config_files(self._listing.sizes), f"{self._model}: configuration and tokenizer")
        self._check_kind()
        facts = check_config(self._folder, needs, str(self._model))
        if needs.weights:
            self._weights(facts, before_weights)
        self._cached.remember(self._model.revision, self._listing.commit)
        return self._folder

    def _check_kind(self) -> None:
        names = set(self._listing.sizes)
        if names.isdisjoint(("config.json", "params.json")):
            what = "only weights in the format GGUF, which vLLM does not load" if _has_gguf(names) else "no config.json"
            raise UsageError(f"{self._model} has {what}", "choose the model that it was made from")

    def _weights(self, facts: ModelFacts, before_weights: Callable[[ModelFacts], None] | None) -> None:
        names = weights_of(self._listing.sizes, self._folder)
        if not names:
            raise UsageError(f"{self._model} has no weights that vLLM loads", "choose a model with safetensors")
        if before_weights is not None:
            sizes = [self._listing.sizes[name] for name in names]
            known = [size for size in sizes if size is not None]
            before_weights(replace(facts, weight_bytes=sum(known) if len(known) == len(sizes) else None))
        layers = [name for name in self._listing.sizes if fnmatchcase(name, _SENTENCE_LAYERS)]
        missing = self._missing([*names, *layers])
        self._check_room(missing)
        self._get(missing, f"{self._model}: weights")

    def _check_room(self, missing: Collection[str]) -> None:
        """Raises UsageError unless the disk has room for the files, those begun included."""
        needed = sum(self._listing.sizes[name] or 0 for name in missing)
        begun = sum(path.stat().st_size for path in self._cached.partial("x").parent.glob("*.dynamo-incomplete"))
        free = shutil.disk_usage(self._cached.folder).free
        if missing and needed - begun + _SPARE_BYTES > free:
            raise UsageError(
                f"the weights of {self._model} need {megabytes(max(needed - begun, 0))} on the disk of "
                f"{self._settings.cache}, which has {free // MB:,} MB free",
                "free room there, or set HF_HOME to a folder on another disk",
            )

    def _missing(self, names: Collection[str]) -> list[str]:
        return [name for name in names if not (self._folder / name).is_file()]

    def _get(self, names: Collection[str], what: str) -> None:
        wanted = [
            Wanted(
                name=name,
                url=f"{self._settings.endpoint}/{self._model.repo}/resolve/{self._listing.commit}/{quote(name)}",
                size=self._listing.sizes[name],
            )
            for name in self._missing(names)
        ]
        if wanted:
            Download(self._settings, self._cached, self._listing.commit).run(wanted, what, self._report)


def config_files(names: Collection[str]) -> list[str]:
    """The files beside the weights that vLLM and Transformers may read: configurations, tokenizer, templates, code."""
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in _LEFT_OUT)]


def weights_of(names: Collection[str], folder: Path) -> tuple[str, ...]:
    """The files of weights that vLLM loads; `folder` has the index, if there is one. Raises UsageError if the index
    names files that the model does not have."""
    top = {name for name in names if "/" not in name}
    index = index_name(top)
    if index is None:
        return loaded_files(top)
    listed = indexed_files(folder / index)
    missing = sorted(listed - top)
    if missing:
        raise UsageError(f"the model's {index} names {missing[0]}, which it does not have", "choose another revision")
    return loaded_files(top, listed)


def _has_gguf(names: Collection[str]) -> bool:
    return any(name.lower().endswith(".gguf") for name in names)
