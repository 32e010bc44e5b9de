"""The stores of a frontend, and who answers about them."""

from __future__ import annotations

from collections.abc import Mapping

from components.frontend.batches.keeper import BatchKeeper
from components.frontend.batches.pacing import Pacer
from components.frontend.batches.rest import BatchesRest
from components.frontend.batches.run import Surroundings
from components.frontend.http.gate import Handler, HttpGate
from components.frontend.http.models import ModelTable
from components.frontend.settings import FrontendSettings
from components.frontend.stored.files import FilesRest
from components.frontend.stored.upload import Uploads
from dynamo_local.core.http.paths import BATCHES, FILES
from state.paths import StatePaths
from state.stored.batches import BatchStore
from state.stored.files import FileStore


class Stores:
    """The stores of one namespace, as a frontend has them. `handlers`: who answers, by the beginning of the path."""

    def __init__(self, paths: StatePaths, settings: FrontendSettings) -> None:
        self._settings = settings
        self._files = FileStore(paths, settings)
        self._batches = BatchStore(paths, self._files, settings)
        uploads = Uploads(self._files, settings.max_file_bytes, settings.body_timeout_s)
        self.files_rest = FilesRest(self._files, uploads)
        self.handlers: Mapping[str, Handler] = {
            FILES: self.files_rest,
            BATCHES: BatchesRest(self._batches, self._files, settings),
        }

    def keeper(self, gate: HttpGate, models: ModelTable) -> BatchKeeper:
        """Return what runs batches, by asking the gate."""
        settings = self._settings
        around = Surroundings(
            answer=gate.answer_own,
            models=models,
            pacer=Pacer(models, settings.max_batch_requests),
            files=self._files,
            limits=settings,
            max_body_bytes=settings.max_body_bytes,
            caller=gate.caller_for,
        )
        return BatchKeeper(self._batches, around)
