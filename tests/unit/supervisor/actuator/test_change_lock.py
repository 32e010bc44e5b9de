from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.supervisor.actuator.change_lock import hold_lock
from state.locks import FileLock, LockTimeoutError


async def test_a_lock_that_another_holds_is_awaited_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = FileLock(path)
    other.acquire(0.0)
    told: list[bool] = []

    def busy(error: LockTimeoutError, first: bool) -> None:
        told.append(first)
        if len(told) == 3:
            other.release(remove=False)

    async with hold_lock(path, 0.0, busy):
        with pytest.raises(LockTimeoutError):
            other.acquire(0.0)
    assert told == [True, False, False]
    assert not path.exists()


async def test_waiting_ends_when_the_callback_raises(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = FileLock(path)
    other.acquire(0.0)

    def busy(error: LockTimeoutError, first: bool) -> None:
        raise error

    with pytest.raises(LockTimeoutError):
        async with hold_lock(path, 0.0, busy):
            pytest.fail("the lock is held by another")
    assert path.exists()
    other.release(remove=False)
