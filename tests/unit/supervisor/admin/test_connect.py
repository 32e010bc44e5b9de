"""Questions to single processes of a server."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.admin import RoleAnswer, RoleQuestion
from dynamo_local.supervisor.admin.asked import ask


class DeafBus:
    async def ask(self, subject: str, *_: Any, **__: Any) -> Any:
        raise BusError(f"no process listens on {subject}")


async def test_a_process_that_does_not_answer_is_named() -> None:
    with pytest.raises(BusError) as caught:
        await ask(
            cast(Bus, DeafBus()), "ns_Frontend", "dyn.ns.role.a1", RoleQuestion("decode"), RoleAnswer, timeout_s=1
        )
    assert str(caught.value) == (
        "Frontend does not answer; it may have ended or be overloaded: see `dynamo ps` and `dynamo logs Frontend`"
    )
