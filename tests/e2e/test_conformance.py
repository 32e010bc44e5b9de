"""vLLM's own API tests that pass here go on passing: `make conformance` runs all of them, on every graph."""

from __future__ import annotations

import pytest

from dynamo_local.model.cache import default_cache_root
from tests.conformance.__main__ import main
from tests.conformance.sdist import FetchError, fetch_tests


def test_vllms_own_api_tests_that_pass_go_on_passing() -> None:
    try:
        fetch_tests(default_cache_root() / "conformance")
    except FetchError as error:
        pytest.skip(f"vLLM's tests cannot be had: {error}")
    assert main(["--server=agg_router", "--passing"]) == 0, "see the lines above"
