"""Paths that are open, and those that are not."""

from __future__ import annotations

import pytest

from dynamo_local.core.http.paths import route_of


@pytest.mark.parametrize(
    "path",
    ["/v1/endpointsx", "/v1/endpoints//", "/v1/endpoints//scale", "/v1/endpoints/a/b", "/v1/endpoints/a/scale/b"],
)
def test_no_other_path_is_open(path: str) -> None:
    assert route_of(path) is None
