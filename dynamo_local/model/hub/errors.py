"""Errors of the hub's library and of the network as ours, each with its cause and remedy."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from dynamo_local.core.errors import DynamoError, FetchError, UsageError

if TYPE_CHECKING:
    from dynamo_local.model.hub.hub import HubModel, HubSettings

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})


def as_ours(error: Exception, model: HubModel, settings: HubSettings) -> DynamoError:
    """The error to show for one that was met while a model was fetched."""
    import httpx2
    from huggingface_hub import errors

    match error:
        case DynamoError():
            return error
        case errors.HfHubHTTPError():
            return _refusal(error, model, settings)
        case errors.OfflineModeIsEnabled():
            return offline_without(model, settings)
        case httpx2.TimeoutException():
            return FetchError(
                f"{settings.host} has not answered for {settings.silence_s:g} s", "check the network, then try again"
            )
        case httpx2.RemoteProtocolError() | httpx2.ReadError():
            return FetchError(f"the connection to {settings.host} was cut", "try again: what has come is kept")
        case httpx2.HTTPError() | httpx2.InvalidURL():
            return _unreachable(error, settings)
        case errors.HFValidationError() | errors.HfUriError():
            return UsageError(f"{model} is no id of a model", "write ORG/NAME or ORG/NAME@REVISION, or name a folder")
        case OSError():
            return _of_disk(error, settings)
    return FetchError(f"{model} could not be fetched ({type(error).__name__}: {_first_line(error)})", "try again")


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    import httpx2
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code in RETRIED_STATUSES
    return isinstance(error, httpx2.TransportError) and not isinstance(error, httpx2.UnsupportedProtocol)


def is_out_of_reach(error: Exception) -> bool:
    """Whether the hub could not be reached or is not working, so that a copy in the cache is to be used."""
    return may_pass(error)


def offline_without(model: HubModel, settings: HubSettings) -> UsageError:
    return UsageError(
        f"HF_HUB_OFFLINE is set, and {model} is not whole in the cache {settings.cache}",
        "unset it once with a network, or name a folder with the model",
    )


def _refusal(error: Exception, model: HubModel, settings: HubSettings) -> DynamoError:
    """The hub answered, with an error."""
    from huggingface_hub import errors

    assert isinstance(error, errors.HfHubHTTPError)
    host = settings.host
    match error:
        case errors.GatedRepoError():
            page = f"{settings.endpoint}/{model.repo}"
            token = (
                "with the account of your token" if settings.token else "and set HF_TOKEN to a token of your account"
            )
            return UsageError(f"{model} is gated, and you have no access yet", f"accept its terms at {page} {token}")
        case errors.RevisionNotFoundError():
            return UsageError(f"{model.repo} has no revision {model.revision!r}", "name a branch, a tag or a commit")
        case errors.RepositoryNotFoundError():
            return _no_such_model(model, settings)
        case errors.DisabledRepoError():
            return UsageError(f"{host} has disabled {model}", "choose another model")
    status = error.response.status_code
    if status in (401, 403):
        return UsageError(f"{host} refuses the token in HF_TOKEN (status {status})", "make one that may read models")
    if status == 429:
        return FetchError(f"{host} answers that there were too many requests", "wait some minutes, or set HF_TOKEN")
    if status >= 500:
        return FetchError(f"{host} fails with status {status}", "try again later")
    return FetchError(f"{host} answers with status {status} when asked for {model}", "try again later")


def _no_such_model(model: HubModel, settings: HubSettings) -> UsageError:
    private = "your token may not read it" if settings.token else "a private model needs a token in HF_TOKEN"
    if "/" not in model.repo:
        return UsageError(
            f"{model} is neither a folder nor a model on {settings.host}",
            "write ORG/NAME for a model of the hub, or the path of a folder",
        )
    return UsageError(f"there is no model {model} on {settings.host}", f"check the spelling; {private}")


def _unreachable(error: Exception, settings: HubSettings) -> FetchError:
    return FetchError(
        f"{settings.host} cannot be reached ({_first_line(error) or type(error).__name__})",
        "check the network and HTTPS_PROXY, set HF_ENDPOINT to a mirror, or name a folder with the model",
    )


def _of_disk(error: OSError, settings: HubSettings) -> DynamoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError(
            f"the disk of {settings.cache} is full; what was fetched is kept", "free room there, or set HF_HOME"
        )
    return FetchError(f"the model cannot be written to {settings.cache} ({_first_line(error)})", "set HF_HOME")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")
