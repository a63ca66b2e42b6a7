"""Checkpoints that are damaged, foreign, or cut off in the middle of being written."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.runs import checkpoint
from holdfast.runs.checkpoint import CheckpointError, load, previous, save

STATE = {"weights": torch.arange(5.0), "step": 3, "names": ["a", "b"], "nothing": None}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoint.pt"
    assert load(path) is None
    save(path, STATE)
    found = load(path)
    assert found is not None
    assert torch.equal(found.pop("weights"), STATE["weights"])
    assert found == {"step": 3, "names": ["a", "b"], "nothing": None}
    assert sorted(p.name for p in path.parent.iterdir()) == ["checkpoint.pt"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_seen_and_the_one_before_is_used(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "checkpoint.pt"
    save(path, {"step": 1})
    save(path, {"step": 2})
    content = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[index] ^= data.draw(st.integers(1, 255))
    else:
        del content[index:]
    path.write_bytes(bytes(content))
    with pytest.warns(
        UserWarning, match=r"checkpoint\.pt is damaged or not a checkpoint; resuming from the previous one"
    ):
        assert load(path) == {"step": 1}


def test_a_damaged_one_never_takes_the_place_of_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    for step in (1, 2):
        save(path, {"step": step})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is damaged"):
        assert load(path) == {"step": 1}
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(CheckpointError):
        save(path, {"step": 3})
    assert load(path) == {"step": 1}
    monkeypatch.undo()
    save(path, {"step": 3})
    assert load(path) == {"step": 3}


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read: Is a directory"):
        load(tmp_path / "checkpoint.pt")


def test_if_none_is_left_nothing_is_started_anew_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"what is this?")
    with pytest.raises(
        CheckpointError, match=r"is damaged or not a checkpoint, and there is no other: delete .* to start over"
    ):
        load(path)


def test_nothing_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    path = tmp_path / "checkpoint.pt"
    save(path, {"trap": Trap()})
    with pytest.raises(CheckpointError, match="is not a checkpoint of Holdfast: it contains code or other data"):
        load(path)
    assert not (tmp_path / "sprung").exists()


def test_a_crash_at_any_moment_of_saving_leaves_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.pt"
    save(path, {"step": 1})
    real = Path.replace
    for moment in range(2):
        calls = []

        def crash(self: Path, target: Path, moment: int = moment, calls: list[int] = calls) -> Path:
            if len(calls) == moment:
                raise OSError("no space left on device")
            calls.append(1)
            return real(self, target)

        monkeypatch.setattr(Path, "replace", crash)
        with pytest.raises(CheckpointError, match=r"cannot write .*: no space left on device; free some space"):
            save(path, {"step": 2})
        monkeypatch.setattr(Path, "replace", real)
        assert load(path) == {"step": 1}
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(CheckpointError, match=r"cannot write .*: no space left.* the previous checkpoint is intact"):
        save(path, {"step": 3})
    assert load(path) == {"step": 1}
    assert previous(path).exists()
    assert checkpoint.previous(path) != path
