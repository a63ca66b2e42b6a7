"""Single flipped bits: they are noticed wherever they are, and never change a number unnoticed."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.streams import sources
from test_sources import write_images
from victims import a_record, a_run, a_study


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", ["record.json", "run.json"])
def test_every_bit_of_a_run(tmp_path: Path, name: str) -> None:
    study = a_study(tmp_path)
    path = study.folder_of(a_run()) / name
    content = path.read_bytes()
    sound = {entry.run.id: (entry.run, entry.record) for entry in study.entries}
    bits = random.Random(0).sample(range(8 * len(content)), 1500)
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        found, left_out = study.scan()
        assert all((entry.run, entry.record) == sound[entry.run.id] for entry in found), bit
        assert len(found) == 3 or [str(path) in each.reason for each in left_out] == [True]


@pytest.mark.parametrize("change", [lambda x: x + 0.001, lambda x: x / 2, lambda x: 1 - x])
def test_an_older_record_without_a_digest_has_the_summary_of_its_matrix(
    tmp_path: Path, change: Callable[[float], float]
) -> None:
    study = a_study(tmp_path)
    path = study.folder_of(a_run()) / "record.json"
    data = json.loads(path.read_text())
    del data["digest"]
    path.write_text(json.dumps(data))
    assert len(study.entries) == 3
    data["matrix"][1][0] = change(data["matrix"][1][0])
    path.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="summary does not match its matrix"):
        assert len(study.entries) == 2


def test_a_finished_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    (entry,) = (entry for entry in study.entries if entry.run == a_run())
    assert entry.record == a_record(a_run(), neurons=None)


@pytest.mark.parametrize("half", ["train", "test"])
def test_the_cache_of_an_image_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    monkeypatch.setattr(sources, "user_cache", lambda: tmp_path / "cache")
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 5)
    stream = f"folder:{tmp_path / 'pets'}?size=4"
    first = sources.load(stream)
    file = next((tmp_path / "cache").rglob(f"{half}.npy"))
    content = file.read_bytes()
    header = range(8 * 128)
    everywhere = range(8 * len(content))
    for bit in [*random.Random(0).sample(header, 20), *random.Random(1).sample(everywhere, 20)]:
        file.write_bytes(flipped(content, bit))
        with pytest.warns(UserWarning, match=r"(train|test)\.npy has changed") as caught:
            again = sources.load(stream)
        assert len(caught) == 1
        assert torch.equal(again.train.pixels, first.train.pixels)
        assert torch.equal(again.test.pixels, first.test.pixels)
        assert file.read_bytes() == content
