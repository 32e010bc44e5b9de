"""The number of a delivery, read from the subject for its acknowledgement."""

from __future__ import annotations

import pytest

from dynamo_local.bus.jetstream.streams import delivery_count
from dynamo_local.core.errors import BusError


def test_the_number_of_deliveries_is_read_from_both_forms() -> None:
    assert delivery_count("$JS.ACK.stream.workers.3.17.20.1795249702217261361.2") == 3
    assert delivery_count("$JS.ACK.domain.hash.stream.workers.4.17.20.1795249702217261361.2.token") == 4


@pytest.mark.parametrize("subject", ["", "a.b", "$JS.ACK.stream.workers.x.17.20.1.2", "_INBOX.a.b"])
def test_another_subject_is_refused(subject: str) -> None:
    with pytest.raises(BusError, match="no subject for acknowledgements"):
        delivery_count(subject)
