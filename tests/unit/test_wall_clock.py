"""Who asks for the time of day. It may be set at any moment: nothing is waited for or given up by it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKS = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(datetime\.)?(now|today)\(|\butcnow\(|CLOCK_REALTIME")

KNOWN = {
    "dynamo_local/cli/keys.py": "whether the end of a key that is created is still to come",
    "dynamo_local/cli/look.py": "what usage is asked for: the time of the question",
    "state/limits_file.py": "a note that keys have changed, which differs from the last one",
    "dynamo_local/planner/tensorboard.py": "names of event files begin with the second: which one it is, not how long",
    "dynamo_local/supervisor/endpoints/controller.py": "when endpoints of a file were created or changed: shown",
    "dynamo_local/bus/jetstream/streams.py": "how old a stored message is, which NATS has dated: shown, not waited for",
    "dynamo_local/cli/reports.py": "which day it is: events of other days are shown with their date",
    "dynamo_local/doctor/machine.py": "whether the clock is years behind: shown, never waited for",
    "dynamo_local/bus/certificate.py": "from when until when a certificate is valid, by years",
    "dynamo_local/supervisor/circus/circusd.py": "where circusd's own clock begins",
}


def test_nobody_else_does() -> None:
    found = {
        str(file.relative_to(ROOT))
        for folder in ("dynamo_local", "components", "state")
        for file in (ROOT / folder).rglob("*.py")
        if ASKS.search(file.read_text())
    }
    assert found == KNOWN.keys()
