from __future__ import annotations

from pathlib import Path

import pytest

from state.machine.identity import identity_of, machine_id


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """As much of a /proc as it takes."""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("fd56cf37\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    for name in ("time", "net", "pid"):
        (tmp_path / "self/ns" / name).symlink_to(f"{name}:[1]")
    return tmp_path


def test_it_is_the_same_for_all_processes_until_the_machine_starts_again(proc: Path) -> None:
    before = identity_of(proc)
    assert before == identity_of(proc)
    (proc / "sys/kernel/random/boot_id").write_text("another\n")
    assert identity_of(proc) not in ("", before)


@pytest.mark.parametrize("namespace", ["time", "net", "pid"])
def test_another_namespace_is_another_machine(proc: Path, namespace: str) -> None:
    before = identity_of(proc)
    (proc / "self/ns" / namespace).unlink()
    (proc / "self/ns" / namespace).symlink_to(f"{namespace}:[2]")
    assert identity_of(proc) != before


@pytest.mark.parametrize("boot_id", ["", None])
def test_a_machine_that_cannot_be_told_has_no_name(proc: Path, boot_id: str | None) -> None:
    file = proc / "sys/kernel/random/boot_id"
    file.unlink() if boot_id is None else file.write_text(boot_id)
    assert identity_of(proc) == ""


def test_this_machine_has_one() -> None:
    assert machine_id() == identity_of(Path("/proc")) != ""
