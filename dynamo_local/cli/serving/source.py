"""Where `dynamo serve` has its models from: each is checked, and made or fetched, once, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.sizing.model_facts import ModelFacts
from dynamo_local.model.facts import read_config_facts, read_facts
from dynamo_local.model.named.names import NAMES, NamedModel, named_model
from dynamo_local.model.obtain import Obtained, Wish, obtain, wish_of

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.reports.report import Report


class _KnownError(DynamoError):
    """Ends `obtain` where its facts are wanted and not its weights."""

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__("the facts are known")
        self.facts = facts


class ModelSource:
    """Finds models. `fetches_weights`: False only to look what a model is."""

    def __init__(self, report: Report, *, fetches_weights: bool) -> None:
        self._report = report
        self._fetches_weights = fetches_weights
        self._named: dict[str, NamedModel] = {}
        self._obtained: dict[str, Obtained] = {}

    def facts(
        self, config: Mapping[str, Any], *, computing: bool, on_cpu: bool, fit: Callable[[ModelFacts], None]
    ) -> ModelFacts | None:
        """The facts of the model of a service with that configuration; None if vLLM is to find it.

        `fit` is called with them before weights are fetched, and may raise. `computing`: engines load the model.
        Raises DynamoError for what cannot be had or loaded.
        """
        model = str(config["model"])
        if model in NAMES:
            facts = read_facts(self.named(model).folder)
            fit(facts)
            return facts
        if not computing:
            return _tokenizer_facts(Path(model).expanduser())
        try:
            found = self._find(wish_of(config, on_cpu), fit)
        except _KnownError as known:
            return known.facts
        return None if found.folder is None else found.facts

    def named(self, name: str) -> NamedModel:
        """The model of one of `NAMES`. Raises UsageError if it cannot be had."""
        if name not in self._named:
            self._named[name] = named_model(name, self._report.step)
        return self._named[name]

    def obtain(self, wish: Wish) -> Obtained:
        """A model that is ready to be loaded. Raises DynamoError."""
        try:
            return self._find(wish, lambda _: None)
        except _KnownError:
            return Obtained(wish.model, wish.model)

    def _find(self, wish: Wish, fit: Callable[[ModelFacts], None]) -> Obtained:
        def before_weights(facts: ModelFacts) -> None:
            fit(facts)
            if not self._fetches_weights and not Path(wish.model).expanduser().is_dir():
                raise _KnownError(facts)

        if wish.model not in self._obtained:
            self._obtained[wish.model] = obtain(wish, self._report, before_weights)
        return self._obtained[wish.model]


def _tokenizer_facts(folder: Path) -> ModelFacts | None:
    """Facts for a frontend before mockers, which load no model. Whatever is wrong, the frontend will say."""
    try:
        return read_config_facts(folder) if folder.is_dir() else None
    except (DynamoError, OSError):
        return None
