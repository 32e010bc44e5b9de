from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.supervisor.actuator.change_lock import turn_at
from state.locks import FileLock, LockTimeoutError


async def test_the_turn_of_another_is_awaited_and_told_of(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = FileLock(path)
    other.acquire(0.0)
    told: list[bool] = []

    def busy(error: LockTimeoutError, first: bool) -> None:
        told.append(first)
        if len(told) == 3:
            other.release(remove=False)

    async with turn_at(path, 0.0, busy):
        with pytest.raises(LockTimeoutError):
            other.acquire(0.0)
    assert told == [True, False, False]
    assert not path.exists()


async def test_it_is_not_awaited_if_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    other = FileLock(path)
    other.acquire(0.0)

    def busy(error: LockTimeoutError, first: bool) -> None:
        raise error

    with pytest.raises(LockTimeoutError):
        async with turn_at(path, 0.0, busy):
            pytest.fail("it is another's turn")
    assert path.exists()
    other.release(remove=False)
