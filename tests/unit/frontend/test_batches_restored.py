"""Copies of the stores of files and batches, taken while batches run, are backups of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.fleet_of_fakes import until
from tests.unit.frontend.test_batches import Frontend, Model, lines

NUMBER = 12


def copied(source: Path, target: Path) -> Path:
    """Copy in the order that the guide says: batches, then files."""
    for name in ("test.batches", "test.files"):
        shutil.copytree(source / name, target / name)
    return target


async def test_a_copy_goes_on_where_it_was_taken(tmp_path: Path) -> None:
    model = Model()
    model.stops_at = "5"
    frontend = Frontend(tmp_path / "first", model)
    batch_id = await frontend.order(*lines(NUMBER))
    async with frontend.running():
        await until(lambda: model.asked["5"] == 1)
        await until(lambda: frontend.store.find(None, batch_id).state.status == "in_progress")
        middle = copied(tmp_path / "first", tmp_path / "middle")
        model.stops_at = ""
        model.open.set()
        await frontend.until(batch_id, "completed")
    end = copied(tmp_path / "first", tmp_path / "end")
    for place in (middle, end):
        again = Model()
        restored = Frontend(place, again)
        async with restored.running():
            batch = await restored.until(batch_id, "completed")
        assert (await restored.results(batch["output_file_id"])).keys() == {f"id {n}" for n in range(NUMBER)}
        assert batch["request_counts"] == {"total": NUMBER, "completed": NUMBER, "failed": 0}
        assert batch["usage"]["total_tokens"] == NUMBER * 3
        # The input, which had been stored by a client, is there as well.
        assert (await restored.ask("GET", f"/v1/files/{batch['input_file_id']}"))["purpose"] == "batch"
        assert bool(again.asked) == (place == middle)


async def test_a_batch_that_was_copied_without_its_input_fails_and_says_so(tmp_path: Path) -> None:
    """A batch that ended while its folder was copied is told as failed, for want of its input."""
    frontend = Frontend(tmp_path, Model())
    batch_id = await frontend.order(*lines(3))
    (tmp_path / "test.batches" / batch_id / "input.jsonl").unlink()
    async with frontend.running():
        batch = await frontend.until(batch_id, "failed")
    assert [each["code"] for each in batch["errors"]["data"]] == ["input_missing"]


@pytest.mark.parametrize("store", ["batches", "files"])
async def test_a_store_of_a_later_release_is_refused_in_one_line_and_left_alone(tmp_path: Path, store: str) -> None:
    await Frontend(tmp_path, Model()).order(*lines(3))
    version = tmp_path / f"test.{store}" / "store.json"
    version.write_text('{"schema_version": 9}')
    later = Frontend(tmp_path, Model())
    async with later.running():
        refused = await later.ask("GET", f"/v1/{store}")
    assert refused["http"] == 503
    message = refused["error"]["message"]
    assert "version 9" in message
    assert "\n" not in message
    assert version.read_text() == '{"schema_version": 9}'
