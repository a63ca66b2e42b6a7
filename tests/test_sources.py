"""Sources of images, from tiny files in the publishers' formats."""

import gzip
import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from holdfast.streams import published, sources
from holdfast.streams.sources import DataError, from_arrays, load, parse_cifar100, parse_idx


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    for module in (published, sources):
        monkeypatch.setattr(module, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- digits ----


def test_digits_are_split_by_class_and_always_alike() -> None:
    source, again = load("digits"), load("digits")
    assert torch.equal(source.test.pixels, again.test.pixels)
    assert source.train.pixels.dtype == torch.uint8
    assert source.train.pixels.max() == 255
    assert source.train.labels.dtype == torch.int64
    assert source.classes == tuple("0123456789")
    train, test = (torch.bincount(part.labels).double() for part in (source.train, source.test))
    assert (train + test).sum() == 1797
    assert ((test / (train + test) - 0.25).abs() < 0.01).all()


# ---- MNIST ----


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes() + values.tobytes()


def write_mnist(folder: Path, *, gzipped: bool = True, train: int = 12, test: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    parts = {}
    for half, count in (("train", train), ("t10k", test)):
        parts[f"{half}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 6, 7), dtype=np.uint8)
        parts[f"{half}-labels-idx1-ubyte"] = rng.integers(0, 10, count, dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for part, values in parts.items():
        name = f"{part}.gz" if gzipped else part
        (folder / name).write_bytes(gzip.compress(idx(values)) if gzipped else idx(values))
    return parts


@pytest.mark.parametrize("gzipped", [True, False])
def test_mnist(tmp_path: Path, gzipped: bool) -> None:
    parts = write_mnist(tmp_path / "MNIST" / "raw", gzipped=gzipped)
    source = load("mnist", tmp_path, download=False)
    assert source.name == "mnist"
    assert source.classes == tuple("0123456789")
    for images, half in ((source.train, "train"), (source.test, "t10k")):
        assert np.array_equal(images.pixels.numpy()[:, 0], parts[f"{half}-images-idx3-ubyte"])
        assert np.array_equal(images.labels.numpy(), parts[f"{half}-labels-idx1-ubyte"])
        assert (images.pixels.dtype, images.labels.dtype) == (torch.uint8, torch.int64)


@given(arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=3, max_side=6)))
def test_idx_round_trip(values: np.ndarray) -> None:
    assert np.array_equal(parse_idx(idx(values), values.ndim), values)


@given(arrays.arrays(np.uint8, arrays.array_shapes(min_dims=3, max_dims=3, max_side=5)), st.data())
def test_idx_of_another_length_is_refused(values: np.ndarray, data: st.DataObject) -> None:
    content = idx(values)
    with pytest.raises(ValueError, match=r"begins with|ends within|expected"):
        parse_idx(content[: data.draw(st.integers(0, len(content) - 1))], 3)
    with pytest.raises(ValueError, match="expected"):
        parse_idx(content + data.draw(st.binary(min_size=1, max_size=9)), 3)


@pytest.mark.parametrize(
    ("part", "content", "says"),
    [
        ("train-images-idx3-ubyte", idx(np.zeros((5, 2), np.uint8)), "begins with 00 00 08 02, expected 00 00 08 03"),
        ("train-images-idx3-ubyte", b"", "begins with , expected 00 00 08 03"),
        ("train-images-idx3-ubyte", idx(np.zeros((12, 6, 7), np.uint8))[:-1], "has 519 bytes, expected 520"),
        ("train-images-idx3-ubyte", b"\0\0\x08\3" + b"\xff" * 12, "has 16 bytes, expected"),
        ("train-images-idx3-ubyte", idx(np.zeros((0, 6, 7), np.uint8)), "has 16 bytes, expected"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(4, np.uint8)), "has 4 labels for 5 images"),
        ("t10k-labels-idx1-ubyte", idx(np.full(5, 10, np.uint8)), "has a label 10, expected 0 to 9"),
    ],
)
def test_a_wrong_mnist_file_is_named(tmp_path: Path, part: str, content: bytes, says: str) -> None:
    write_mnist(tmp_path, gzipped=False)
    (tmp_path / part).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    assert one_line(caught).startswith(f"{tmp_path / part} {says}")
    assert "delete it, then fetch it with `holdfast data fetch mnist`" in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.data())
def test_a_gzip_file_cut_anywhere_is_named(tmp_path: Path, data: st.DataObject) -> None:
    write_mnist(tmp_path)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz .*; delete it") as caught:
        load("mnist", tmp_path)
    one_line(caught)


def test_images_of_different_sizes(tmp_path: Path) -> None:
    write_mnist(tmp_path, gzipped=False)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(np.zeros((5, 2, 2), np.uint8)))
    with pytest.raises(DataError, match="must have the same shape"):
        load("mnist", tmp_path)


# ---- CIFAR-100 ----


def records(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    rows = (bytes([3, int(label)]) + image.tobytes() for image, label in zip(pixels, labels, strict=True))
    return b"".join(rows)


def write_cifar(folder: Path, *, train: int = 6, test: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (train + test, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 3, train + test)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.bin").write_bytes(records(pixels[:train], labels[:train]))
    (folder / "test.bin").write_bytes(records(pixels[train:], labels[train:]))
    (folder / "fine_label_names.txt").write_text("apple\naquarium_fish\nbaby\n\n")
    return pixels, labels


def test_cifar100(tmp_path: Path) -> None:
    pixels, labels = write_cifar(tmp_path / "cifar-100-binary")
    source = load("cifar100", tmp_path, download=False)
    assert source.classes == ("apple", "aquarium_fish", "baby")
    assert np.array_equal(torch.cat([source.train.pixels, source.test.pixels]).numpy(), pixels)
    assert np.array_equal(torch.cat([source.train.labels, source.test.labels]).numpy(), labels)
    assert len(source.train.labels) == 6


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_cifar100_round_trip(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 100, count)
    images, fine = parse_cifar100(records(pixels, labels))
    assert np.array_equal(images, pixels)
    assert np.array_equal(fine, labels)


@given(st.integers(0, 2 * 3074 - 1).filter(lambda size: size != 3074))
def test_cifar100_of_broken_records_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"has {size} bytes, expected a multiple of 3074"):
        parse_cifar100(bytes(size))


@pytest.mark.parametrize(
    ("part", "content", "says"),
    [
        ("train.bin", bytes(3073), "has 3073 bytes, expected a multiple of 3074"),
        ("test.bin", b"\0\3" + bytes(3072), "has a label 3, but fine_label_names.txt has 3 names"),
        ("fine_label_names.txt", b" \n", "names no classes"),
    ],
)
def test_a_wrong_cifar_file_is_named(tmp_path: Path, part: str, content: bytes, says: str) -> None:
    folder = tmp_path / "cifar-100-binary"
    write_cifar(folder)
    (folder / part).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load("cifar100", tmp_path)
    assert one_line(caught).startswith(f"{folder / part} {says}")


# ---- verifying ----


def test_a_subset_is_in_order_and_not_the_original(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    lines = sources.verify("mnist", tmp_path)
    assert len(lines) == 4
    assert all("not the original, by its size" in line for line in lines)
    write_cifar(tmp_path)
    assert all("gives no checksum" in line for line in sources.verify("cifar100", tmp_path))


def test_a_copy_of_the_original_size_must_match_its_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = write_mnist(tmp_path)
    sums = {part: hashlib.md5(idx(values)).hexdigest() for part, values in parts.items()}
    monkeypatch.setitem(sources._PUBLISHED, "mnist", replace(published.MNIST, size=(12, 5), parts=sums))
    assert all("the original, by its checksum" in line for line in sources.verify("mnist", tmp_path))
    labels = parts["t10k-labels-idx1-ubyte"]
    labels[0] = (labels[0] + 1) % 10
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is not the original") as caught:
        sources.verify("mnist", tmp_path)
    one_line(caught)


def test_fetched_files_must_not_change(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    sums = {part: hashlib.md5((tmp_path / part).read_bytes()).hexdigest() for part in published.CIFAR100.parts}
    (tmp_path / "checksums.md5").write_text("".join(f"{md5}  {part}\n" for part, md5 in sums.items()))
    assert all("the original, by its checksum" in line for line in sources.verify("cifar100", tmp_path))
    (tmp_path / "train.bin").write_bytes((tmp_path / "train.bin").read_bytes()[3074:])
    with pytest.raises(DataError, match=r"train\.bin has changed since it was fetched"):
        sources.verify("cifar100", tmp_path)


def test_unknown_names() -> None:
    with pytest.raises(DataError, match="unknown source 'cifar10'; available: digits, mnist, cifar100"):
        load("cifar10")


# ---- arrays ----

GRAY = np.arange(2 * 5 * 6, dtype=np.uint8).reshape(2, 5, 6)
COLOR = np.arange(2 * 3 * 5 * 6).astype(np.uint8).reshape(2, 3, 5, 6)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (GRAY, GRAY[:, None]),
        (torch.from_numpy(GRAY), GRAY[:, None]),
        (COLOR, COLOR),
        (COLOR.transpose(0, 2, 3, 1), COLOR),
        (COLOR[:, :, ::-1], COLOR[:, :, ::-1]),
        (GRAY / 255, GRAY[:, None]),
        (torch.from_numpy(COLOR) / 255, COLOR),
        (GRAY[..., None], GRAY[:, None]),
    ],
)
def test_arrays(images: object, expected: np.ndarray) -> None:
    source = from_arrays("mine", (images, [1, 0]), (images, torch.tensor([0, 2], dtype=torch.uint8)))
    for part in (source.train, source.test):
        assert np.array_equal(part.pixels.numpy(), expected)
        assert part.pixels.is_contiguous()
    assert source.train.labels.tolist() == [1, 0]
    assert source.classes == ("0", "1", "2")


def test_arrays_are_copied() -> None:
    images, labels = GRAY.copy(), np.array([0, 1])
    source = from_arrays("mine", (images, labels), (images, labels))
    images[:], labels[:] = 0, 0
    assert np.array_equal(source.train.pixels[:, 0].numpy(), GRAY)
    assert source.train.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (GRAY.astype(np.int32), [0, 1], "uint8, or floats from 0 to 1; got torch.int64 from 0 to 59"),
        (GRAY.astype(np.float32), [0, 1], "floats from 0 to 1; got torch.float32 from 0 to 59"),
        (np.full((2, 4, 4), np.nan), [0, 1], "floats from 0 to 1"),
        (GRAY > 3, [0, 1], "got torch.bool"),
        (GRAY[0], [0, 1, 0, 1, 0], "images must be"),
        (np.zeros((2, 5, 6, 7), np.uint8), [0, 1], "at most 4 channels"),
        (GRAY, [0], "as many labels as images"),
        (GRAY[:0], np.zeros(0, int), "at least one"),
        (GRAY, [0, -1], "labels must count from 0, got -1"),
        (GRAY, [0.0, 1.0], "labels must be integers"),
        (GRAY, [True, False], "labels must be integers"),
        (GRAY, ["a", "b"], "arrays of numbers"),
        (GRAY, [[0], [1, 2]], "must be arrays"),
        (torch.zeros(2, 4, 4, dtype=torch.complex64), [0, 1], "real numbers"),
        (GRAY, [0, 2], "label 2 has no name among the 2 classes"),
    ],
)
def test_wrong_arrays(images: object, labels: object, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        from_arrays("mine", (images, labels), (GRAY, [0, 1]), classes=["cat", "dog"])
    one_line(caught)


def test_training_and_test_images_must_have_the_same_shape() -> None:
    with pytest.raises(DataError, match=r"\(1, 5, 6\), \(3, 5, 6\)"):
        from_arrays("mine", (GRAY, [0, 1]), (COLOR, [0, 1]))


# ---- folders of images ----


def write_images(folder: Path, count: int, mode: str = "RGB", color: object = (200, 100, 50)) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new(mode, (20 + number, 30), color).save(folder / f"{number:03}.png")


def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        write_images(tmp_path / part / "cat", count, color=(200, 100, 50))
        write_images(tmp_path / part / "dog", count, color=(1, 2, 3))
    (tmp_path / "train" / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".hidden").mkdir()
    source = load(f"folder:{tmp_path}?size=8")
    assert source.classes == ("cat", "dog")
    assert source.train.pixels.shape == (6, 3, 8, 8)
    assert source.test.labels.tolist() == [0, 0, 1, 1]
    assert (source.train.pixels[:3] == torch.tensor([200, 100, 50])[:, None, None]).all()
    assert (source.train.pixels[3:] == torch.tensor([1, 2, 3])[:, None, None]).all()


def test_a_split_is_by_class_disjoint_and_always_alike(tmp_path: Path) -> None:
    for shade, (name, count) in enumerate({"cat": 10, "dog": 2, "emu": 16}.items()):
        folder = tmp_path / "pets" / name
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("L", (8, 8), 100 * shade + number).save(folder / f"{number}.png")
    source = load(f"folder:{tmp_path / 'pets'}")
    assert source.train.pixels.shape[1:] == (1, 32, 32)
    assert torch.bincount(source.test.labels).tolist() == [2, 1, 3]
    assert torch.bincount(source.train.labels).tolist() == [8, 1, 13]
    shades = [set(part.pixels[:, 0, 0, 0].tolist()) for part in (source.train, source.test)]
    assert len(shades[0] | shades[1]) == 28
    moved = tmp_path / "moved"
    (tmp_path / "pets").rename(moved)
    assert torch.equal(load(f"folder:{moved}").test.pixels, source.test.pixels)


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("1", 1, [255]),
        ("L", 77, [77]),
        ("LA", (77, 10), [77]),
        ("I;16", 257 * 77, [77]),
        ("RGB", (1, 2, 3), [1, 2, 3]),
        ("RGBA", (1, 2, 3, 4), [1, 2, 3]),
        ("P", 0, [0, 0, 0]),
    ],
)
def test_modes(tmp_path: Path, mode: str, color: object, expected: list[int]) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / name, 2, mode, color)
    pixels = load(f"folder:{tmp_path}?size=3").train.pixels
    assert pixels.shape == (2, len(expected), 3, 3)
    assert pixels[0, :, 0, 0].tolist() == expected


def test_floats_transparency_and_orientation(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((4, 4), 0.2, np.float32)).save(tmp_path / name / "0.tiff")
        palette = Image.new("P", (4, 4), 1)
        palette.putpalette([0, 0, 0, 9, 8, 7])
        palette.save(tmp_path / name / "1.png", transparency=b"\x00\x80")
        turned = Image.fromarray(np.array([[[0, 0, 0], [255, 255, 255]]], np.uint8))  # black, white
        turned.getexif()[0x0112] = 3  # upside down
        turned.save(tmp_path / name / "2.png", exif=turned.getexif())
    listing = [tmp_path / "a" / name for name in ("0.tiff", "1.png", "2.png")]
    gray, colored, orientated = (sources._decode(path, 2) for path in listing)
    assert gray.tolist() == [[[51], [51]], [[51], [51]]]
    assert colored[0, 0].tolist() == [9, 8, 7]
    assert orientated[0, :, 0].tolist() == [255, 0]
    assert load(f"folder:{tmp_path}").train.pixels.shape == (4, 3, 32, 32)


def test_gray_images_among_colored_ones_get_three_channels(tmp_path: Path) -> None:
    write_images(tmp_path / "a", 2, "L", 9)
    write_images(tmp_path / "b", 2)
    assert load(f"folder:{tmp_path}").train.pixels[:, :, 0, 0].tolist() == [[9, 9, 9], [200, 100, 50]]


def test_a_folder_is_decoded_once_and_again_when_it_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 3)
    decoded: list[Path] = []
    real = sources._decode
    monkeypatch.setattr(sources, "_decode", lambda path, size: decoded.append(path) or real(path, size))
    name = f"folder:{tmp_path / 'pets'}"
    first = load(name)
    assert len(decoded) == 6
    assert torch.equal(load(name).train.pixels, first.train.pixels)
    assert len(decoded) == 6
    entry = next((cache / "folders").iterdir())
    assert {path.name for path in entry.iterdir()} == {"train.npy", "test.npy"}
    assert list((cache / "folders").iterdir()) == [entry], "nothing else is left"

    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "pets" / "a" / "new.png")
    assert len(load(name).train.labels) + len(load(name).test.labels) == 7
    assert len(decoded) == 13
    assert sources.verify(name) == [f"{name}: 5 training and 2 test images, all readable"]
    assert len(decoded) == 20, "verifying reads the images, not the cache"


def test_an_image_that_is_overwritten_is_decoded_again(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 2)
    load(f"folder:{tmp_path / 'pets'}")
    for path in tmp_path.glob("pets/?/*.png"):
        Image.new("RGB", (5, 5), (9, 9, 9)).save(path)
    assert (load(f"folder:{tmp_path / 'pets'}").train.pixels == 9).all()


def test_a_cache_of_another_shape_is_not_used(tmp_path: Path, cache: Path) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 3)
    load(f"folder:{tmp_path / 'pets'}")
    sources._write_cache(next(cache.rglob("train.npy")), np.zeros((4, 2, 2, 3), np.uint8))
    with pytest.warns(UserWarning, match="decoded again"):
        assert load(f"folder:{tmp_path / 'pets'}").train.pixels.shape == (4, 3, 32, 32)


@pytest.mark.parametrize("damage", [lambda content: content[:-5], lambda content: content[:20], lambda content: b""])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, cache: Path, damage: Callable[[bytes], bytes]) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 3)
    first = load(f"folder:{tmp_path / 'pets'}")
    file = next(cache.rglob("train.npy"))
    content = file.read_bytes()
    file.write_bytes(damage(content))
    with pytest.warns(UserWarning, match="decoded again"):
        assert torch.equal(load(f"folder:{tmp_path / 'pets'}").train.pixels, first.train.pixels)
    assert file.read_bytes() == content


def test_a_pickle_in_the_cache_is_not_run(tmp_path: Path, cache: Path) -> None:
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 3)

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "evil",)

    load(f"folder:{tmp_path / 'pets'}")
    file = next(cache.rglob("train.npy"))
    np.save(file, np.array([Evil()], dtype=object), allow_pickle=True)
    file.write_bytes(file.read_bytes() + hashlib.sha256(file.read_bytes()).digest())  # it passes for intact
    with pytest.warns(UserWarning, match="decoded again"):
        assert load(f"folder:{tmp_path / 'pets'}").train.pixels.dtype == torch.uint8
    assert not (tmp_path / "evil").exists()


def test_without_a_cache_that_can_be_written_to(tmp_path: Path, cache: Path) -> None:
    cache.write_text("in the way")
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 3)
    assert len(load(f"folder:{tmp_path / 'pets'}").train.labels) == 4


def _one_class(root: Path) -> Path:
    write_images(root / "a", 2)
    return root


def _empty_class(root: Path) -> Path:
    write_images(root / "a", 2)
    (root / "b").mkdir()
    return root / "b"


def _lonely_image(root: Path) -> Path:
    write_images(root / "a", 2)
    write_images(root / "b", 1)
    return root / "b"


def _class_without_test(root: Path) -> Path:
    for name in ("train/a", "train/b", "train/c", "test/a", "test/b"):
        write_images(root / name, 1)
    return root / "test"


def _no_image(root: Path) -> Path:
    write_images(root / "a", 2)
    write_images(root / "b", 2)
    (root / "b" / "000.png").write_text("no image")
    return root / "b" / "000.png"


def _truncated_image(root: Path) -> Path:
    write_images(root / "a", 2)
    write_images(root / "b", 2)
    content = (root / "b" / "001.png").read_bytes()
    (root / "b" / "001.png").write_bytes(content[:-30])
    return root / "b" / "001.png"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_one_class, "has 1 folders of images, expected at least two"),
        (_empty_class, "has no images"),
        (_lonely_image, "has one image, expected at least two"),
        (_class_without_test, "has no folder for the class 'c'"),
        (_no_image, "cannot be opened as an image"),
        (_truncated_image, "cannot be opened as an image"),
    ],
)
def test_a_wrong_folder_is_named(tmp_path: Path, cache: Path, make: Callable[[Path], Path], says: str) -> None:
    root = tmp_path / "pets"
    path = make(root)
    with pytest.raises(DataError) as caught:
        load(f"folder:{root}")
    assert one_line(caught).startswith(f"{path} {says}")
    assert not cache.exists()


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", deny)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize("name", ["folder:", "folder:/no/such/folder", "folder:/tmp?size=0", "folder:/tmp?size=big"])
def test_a_wrong_name_of_a_folder(name: str) -> None:
    with pytest.raises(DataError, match=r"no folder|must be an integer") as caught:
        load(name)
    assert name in one_line(caught)


# ---- imports ----


def test_only_torch_and_numpy_are_needed_to_import() -> None:
    blocked = ["PIL", "pooch", "sklearn", "typer", "rich", "platformdirs", "tqdm", "requests"]
    code = f"""
import sys
for name in {blocked}:
    sys.modules[name] = None
from holdfast.streams import sources
try:
    sources.load("digits")
except sources.DataError as error:
    assert "pip install scikit-learn" in str(error), error
else:
    raise SystemExit("scikit-learn was there")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
