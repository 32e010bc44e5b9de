"""Settings of all tests."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# No deadlines: a slow machine is not a wrong result. And the same examples each time: what one commit has passed, it
# passes again. 20 of them, where Hypothesis has 100: a property that needs more to be tried says so.
settings.register_profile(
    "tests", max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# As `make nightly` tries them: more, and each night other ones.
settings.register_profile("nightly", settings.get_profile("tests"), derandomize=False, max_examples=200)
# Other ones, and many: `pytest tests/unit --hypothesis-profile=search`.
settings.register_profile("search", settings.get_profile("tests"), derandomize=False, max_examples=1000)
settings.load_profile("tests")

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
