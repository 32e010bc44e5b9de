"""Chooses the planner's recorders on disk by its options."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.core.planning.endpoints.recording import EndpointRecorder
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.planner.decision_log import DecisionLog
from state.paths import StatePaths


def recorders_of(options: PlannerOptions, paths: StatePaths) -> tuple[EndpointRecorder, ...]:
    """Return a decision log, in log-dir or beside the server's logs, and with a log-dir a TensorBoard recorder too.

    Raises ConfigError if the folder cannot be written to.
    """
    about = {"namespace": paths.namespace, "model": options.served_model_name, "acts": not options.no_operation}
    if options.log_dir is None:
        return (DecisionLog(paths.decisions_file, about),)
    from dynamo_local.planner.tensorboard import TensorBoardRecorder

    folder = Path(options.log_dir).expanduser()
    return DecisionLog(folder / paths.decisions_file.name, about), TensorBoardRecorder(
        folder, max_bytes=options.event_files_max_mib << 20, dynamo_tags=options.dynamo_tags
    )
