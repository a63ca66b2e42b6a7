"""Sources of images as uint8 tensors: digits, MNIST, CIFAR-100, folders of images, and arrays in memory."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.errors import alternatives, warn
from holdfast.streams.published import (
    CIFAR100,
    MNIST,
    DataError,
    LocalCopy,
    Published,
    compare,
    contents,
    expand_home,
    find,
    import_optional,
    obtain,
    staged_for,
    user_cache,
    was_fetched,
)

__all__ = ["SOURCES", "DataError", "LabeledImages", "Source", "from_arrays", "load", "locate", "published", "verify"]

Bytes = NDArray[np.uint8]

SOURCES = ("digits", "mnist", "cifar100")
"""The named sources. The fourth kind is `folder:PATH`."""

_CHANNELS = 4
_PUBLISHED: dict[str, Published] = {"mnist": MNIST, "cifar100": CIFAR100}


@dataclass(frozen=True)
class LabeledImages:
    """Images and their labels.

    Args:
        pixels: uint8 [n, channels, height, width].
        labels: int64 [n], from 0.
    """

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """Training and test images of the same size, and the names of their classes, by label."""

    name: str
    train: LabeledImages
    test: LabeledImages
    classes: tuple[str, ...]


def load(name: str, data: Path | None = None, *, download: bool = True) -> Source:
    """Load a source: "digits", "mnist", "cifar100" or "folder:PATH".

    Args:
        name: the name of the source. "folder:PATH" is a folder with one subfolder of images per class, or with two
            folders of that kind, `train` and `test`. "folder:PATH?size=64" resizes its images to 64 x 64; the default
            is 32 x 32. Further options, as in "folder:PATH?size=64&per_task=5", are for streams.
        data: the folder to search first, before $HOLDFAST_DATA and the user's cache.
        download: whether to download missing files.

    >>> source = load("digits")
    >>> tuple(source.train.pixels.shape), tuple(source.test.pixels.shape), source.classes[:3]
    ((1352, 1, 8, 8), (445, 1, 8, 8), ('0', '1', '2'))
    """
    if name == "digits":
        return _digits()
    if name.startswith("folder:"):
        return _folder(name)
    return _from_files(obtain(published(name), data, download=download))


def published(name: str) -> Published:
    """The description of a source's published files."""
    if name not in _PUBLISHED:
        known = ", ".join(SOURCES)
        raise DataError(f"unknown source {name!r}; available: {known}, folder:PATH (a folder of images)")
    return _PUBLISHED[name]


def locate(name: str, data: Path | None = None) -> str | None:
    """The location of a named source, or None if it has not been downloaded."""
    if name == "digits":
        return "in scikit-learn"
    copy = find(published(name), data)
    return None if copy is None else str(copy.location)


def verify(name: str, data: Path | None = None) -> list[str]:
    """Read a whole source, compare it with the publisher's checksums, and report one line per file."""
    if name == "digits" or name.startswith("folder:"):
        source = _digits() if name == "digits" else _folder(name, cached=False)
        return [f"{name}: {len(source.train.labels)} training and {len(source.test.labels)} test images, all readable"]
    copy = obtain(published(name), data, download=False)
    source = _from_files(copy)
    size = len(source.train.labels), len(source.test.labels)
    should_match = was_fetched(copy) or size == copy.published.size
    return [_verdict(path, same, should_match, copy) for path, same in compare(copy).items()]


def _verdict(path: Path, same: bool | None, should_match: bool, copy: LocalCopy) -> str:
    if same:
        return f"{path}: the original, by its checksum"
    if same is None:
        return f"{path}: readable and consistent; the publisher gives no checksum"
    if should_match:
        remedy = f"delete it, then fetch it with `holdfast data fetch {copy.published.name}`"
        raise DataError(f"{path} is not the original: its checksum differs; {remedy}")
    return f"{path}: readable and consistent; not the original, by its size"


# ---- arrays in memory ----


def from_arrays(
    name: str, train: tuple[Any, Any], test: tuple[Any, Any], classes: Sequence[str] | None = None
) -> Source:
    """Build a source from arrays or tensors.

    Args:
        name: the name of the source.
        train: images and labels. Images are [n, h, w], [n, h, w, channels] or [n, channels, h, w]; uint8, or floats
            from 0 to 1.
        test: test images and labels, in the same form.
        classes: the names of the classes, by label. By default the labels themselves.

    >>> gray = np.zeros((2, 28, 28), dtype=np.uint8)
    >>> source = from_arrays("mine", (gray, [0, 1]), (gray, [1, 0]), classes=["cat", "dog"])
    >>> source.train.pixels.shape, source.classes
    (torch.Size([2, 1, 28, 28]), ('cat', 'dog'))
    """
    parts = {"train": _images(f"{name}, train", *train), "test": _images(f"{name}, test", *test)}
    shapes = {part: tuple(images.pixels.shape[1:]) for part, images in parts.items()}
    if shapes["train"] != shapes["test"]:
        raise DataError(
            f"{name}: training and test images must have the same shape, got {shapes['train']}, {shapes['test']}"
        )
    highest = max(int(images.labels.max()) for images in parts.values())
    if classes is None and highest >= sum(len(images.labels) for images in parts.values()):
        raise DataError(f"{name}: label {highest} exceeds the number of images; labels must count the classes from 0")
    names = tuple(str(label) for label in range(highest + 1)) if classes is None else tuple(classes)
    if highest >= len(names):
        raise DataError(f"{name}: label {highest} has no name among the {len(names)} classes; labels must count from 0")
    return Source(name, parts["train"], parts["test"], names)


def _images(name: str, pixels: Any, labels: Any) -> LabeledImages:
    x, y = _tensor(pixels), _tensor(labels)
    if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
        raise DataError(f"{name}: labels must be integers [n], got {y.dtype} {tuple(y.shape)}")
    if len(x) != len(y) or len(x) == 0:
        raise DataError(f"{name}: there must be as many labels as images, and at least one; got {len(y)} and {len(x)}")
    if int(y.min()) < 0:
        raise DataError(f"{name}: labels must count from 0, got {int(y.min())}")
    return LabeledImages(_channels_first(name, _to_bytes(name, x)), y.to(torch.int64))


def _tensor(values: Any) -> Tensor:
    """Copy values into a tensor on the CPU of dtype uint8, int64, float or bool."""
    if not isinstance(values, Tensor):
        try:
            array = np.array(values)
        except ValueError as error:
            raise DataError(f"images and labels must be arrays: {error}") from None
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise DataError(f"images and labels must be arrays of numbers, got {array.dtype}")
        values = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    tensor: Tensor = values.detach().cpu()
    if tensor.is_complex():
        raise DataError(f"images and labels must be real numbers, got {tensor.dtype}")
    tensor = tensor if tensor.dim() else tensor[None]
    is_integer = not tensor.is_floating_point() and tensor.dtype not in (torch.uint8, torch.bool)
    return tensor.to(torch.int64 if is_integer else tensor.dtype, copy=True)


def _to_bytes(name: str, pixels: Tensor) -> Tensor:
    if pixels.dtype == torch.uint8:
        return pixels
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.numel() else (0.0, 0.0)
    if not pixels.is_floating_point() or not (low >= 0 and high <= 1):
        raise DataError(
            f"{name}: images must be uint8, or floats from 0 to 1; got {pixels.dtype} from {low:g} to {high:g}"
        )
    return (pixels.to(torch.float32) * 255).round().to(torch.uint8)


def _channels_first(name: str, pixels: Tensor) -> Tensor:
    if pixels.dim() == 3:
        pixels = pixels[:, None]
    elif pixels.dim() == 4 and pixels.shape[1] > _CHANNELS:
        pixels = pixels.permute(0, 3, 1, 2)
    if pixels.dim() != 4 or pixels.numel() == 0 or pixels.shape[1] > _CHANNELS:
        shapes = f"[n, h, w], [n, h, w, channels] or [n, channels, h, w] with at most {_CHANNELS} channels"
        raise DataError(f"{name}: images must be {shapes}, got {list(pixels.shape)}")
    return pixels.contiguous()


# ---- digits ----


def _digits() -> Source:
    """Scikit-learn's 8 x 8 digits. Every fourth image of each class is a test image."""
    images, labels = import_optional("sklearn.datasets", "scikit-learn").load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    index = np.zeros(len(labels), dtype=np.int64)  # within the class
    for digit in range(10):
        index[labels == digit] = np.arange((labels == digit).sum())
    test = index % 4 == 3
    return from_arrays("digits", (pixels[~test], labels[~test]), (pixels[test], labels[test]))


# ---- the publishers' formats ----


def _from_files(copy: LocalCopy) -> Source:
    return {"mnist": _mnist, "cifar100": _cifar100}[copy.published.name](copy, contents(copy))


def _mnist(copy: LocalCopy, parts: Mapping[str, bytes]) -> Source:
    arrays: dict[str, Bytes] = {}
    for part, content in parts.items():
        try:
            arrays[part] = parse_idx(content, axes=3 if "images" in part else 1)
        except ValueError as error:
            raise copy.damaged(part, str(error)) from None
    for half in ("train", "t10k"):
        images, labels = arrays[f"{half}-images-idx3-ubyte"], f"{half}-labels-idx1-ubyte"
        if len(arrays[labels]) != len(images):
            raise copy.damaged(labels, f"has {len(arrays[labels])} labels for {len(images)} images")
        if arrays[labels].max() > 9:
            raise copy.damaged(labels, f"has a label {arrays[labels].max()}, expected 0 to 9")
    train, test = (
        (arrays[f"{half}-images-idx3-ubyte"], arrays[f"{half}-labels-idx1-ubyte"]) for half in ("train", "t10k")
    )
    return from_arrays("mnist", train, test, [str(digit) for digit in range(10)])


def parse_idx(content: bytes, axes: int) -> Bytes:
    """Parse an IDX file of bytes: 0, 0, 8, the number of axes; the length of each, big-endian; the values.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 0, 4]), axes=1)
    array([5, 0, 4], dtype=uint8)
    """
    start = 4 + 4 * axes
    magic = bytes([0, 0, 8, axes])
    if content[:4] != magic:
        raise ValueError(f"begins with {content[:4].hex(' ')}, expected {magic.hex(' ')} (an IDX file of {axes} axes)")
    if len(content) < start:
        raise ValueError(f"ends within its header of {start} bytes")
    lengths = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    size = start + math.prod(lengths)
    if len(content) != size or size == start:
        raise ValueError(f"has {len(content)} bytes, expected {size} for the {lengths} values of its header")
    return np.frombuffer(content, np.uint8, offset=start).reshape(lengths)


def _cifar100(copy: LocalCopy, parts: Mapping[str, bytes]) -> Source:
    lines = parts["fine_label_names.txt"].decode("utf-8", errors="replace").splitlines()
    classes = [line.strip() for line in lines if line.strip()]
    if not classes:
        raise copy.damaged("fine_label_names.txt", "names no classes")
    halves = []
    for part in ("train.bin", "test.bin"):
        try:
            pixels, labels = parse_cifar100(parts[part])
        except ValueError as error:
            raise copy.damaged(part, str(error)) from None
        if labels.max() >= len(classes):
            names = f"fine_label_names.txt has {len(classes)} names"
            raise copy.damaged(part, f"has a label {labels.max()}, but {names}")
        halves.append((pixels, labels))
    return from_arrays("cifar100", halves[0], halves[1], classes)


def parse_cifar100(content: bytes) -> tuple[Bytes, Bytes]:
    """Parse images [n, 3, 32, 32] and fine labels. A record is a coarse and a fine label and 3072 bytes of pixels."""
    if not content or len(content) % 3074:
        raise ValueError(f"has {len(content)} bytes, expected a multiple of 3074, the size of an image and its labels")
    records = np.frombuffer(content, np.uint8).reshape(-1, 3074)
    return records[:, 2:].reshape(-1, 3, 32, 32), records[:, 1]


# ---- folders of images ----

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"})
_SIZE = 32
_TEST_SHARE = 0.2
_SEED = 0
_VERSION = 1  # of the cache: increase when decoding changes

Listing = dict[str, list[Path]]
"""The image files of each class, by its name."""


def _folder(name: str, *, cached: bool = True) -> Source:
    root, size = _parse_folder(name)
    train, test = _listings(root)
    images = [list(chain.from_iterable(listing.values())) for listing in (train, test)]
    arrays = _decoded_once(root, images, size) if cached else _decode_parts(images, size)
    labels = [np.repeat(np.arange(len(part)), [len(paths) for paths in part.values()]) for part in (train, test)]
    pixels = [np.moveaxis(array, -1, 1) for array in arrays]
    return from_arrays(name, (pixels[0], labels[0]), (pixels[1], labels[1]), list(train))


def _parse_folder(name: str) -> tuple[Path, int]:
    path, given = folder_options(name)
    root = expand_home(path)
    if not path or not root.is_dir():
        raise DataError(f"{name!r}: there is no folder {path!r}; give a folder with one subfolder of images per class")
    return root, whole_option(name, given, "size", _SIZE)


_FOLDER_OPTIONS = {"size": "64", "per_task": "5", "order": "cat,dog"}
"""The options in the name of a folder, each with an example."""


def folder_options(name: str) -> tuple[str, dict[str, str]]:
    """Split the name of a folder into its path and its options.

    >>> folder_options("folder:~/birds?size=64&per_task=5")
    ('~/birds', {'size': '64', 'per_task': '5'})
    """
    path, _, text = name.removeprefix("folder:").partition("?")
    given: dict[str, str] = {}
    for option in text.split("&") if text else []:
        key, _, value = option.partition("=")
        if key not in _FOLDER_OPTIONS:
            raise DataError(f"{name!r} has no option {key!r}; available: {alternatives(key, _FOLDER_OPTIONS)}")
        if key in given or not value:
            raise DataError(f"{name!r} needs one value of {key}, as in folder:PATH?{key}={_FOLDER_OPTIONS[key]}")
        given[key] = value
    return path, given


def whole_option(name: str, given: Mapping[str, str], key: str, default: int) -> int:
    """The value of an option in the name of a folder that is a number."""
    value = given.get(key, str(default))
    if not (value.isdecimal() and 1 <= int(value) <= 4096):
        example = f"folder:PATH?{key}={_FOLDER_OPTIONS[key]}"
        raise DataError(f"the {key} in {name!r} must be an integer from 1 to 4096, as in {example}")
    return int(value)


def _listings(root: Path) -> tuple[Listing, Listing]:
    """The training and test images: from the folders `train` and `test` if present, else split."""
    if not ((root / "train").is_dir() and (root / "test").is_dir()):
        return _split(_listing(root))
    train, test = _listing(root / "train"), _listing(root / "test")
    if unmatched := sorted(train.keys() ^ test.keys()):
        incomplete = root / ("train" if unmatched[0] in test else "test")
        raise DataError(
            f"{incomplete} has no folder for the class {unmatched[0]!r}; train and test need the same classes"
        )
    return train, test


def _listing(root: Path) -> Listing:
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        listing = {folder.name: sorted(filter(_is_image, folder.iterdir())) for folder in folders}
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be read: {error.strerror}; check its permissions") from None
    if len(listing) < 2:
        raise DataError(f"{root} has {len(listing)} folders of images, expected at least two: one per class")
    for folder in folders:
        if not listing[folder.name]:
            raise DataError(f"{folder} has no images ({' '.join(sorted(_SUFFIXES))}); add some or remove it")
    return listing


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def _split(listing: Listing) -> tuple[Listing, Listing]:
    """Split off a fifth of each class for testing, by a hash of the file names: the same split on every machine."""
    train, test = {}, {}
    for name, paths in listing.items():
        if len(paths) < 2:
            raise DataError(f"{paths[0].parent} has one image, expected at least two: one to train and one to test")
        shuffled = sorted(paths, key=lambda path: hashlib.sha256(os.fsencode(f"{_SEED}/{path.name}")).digest())
        count = max(1, round(_TEST_SHARE * len(paths)))
        test[name], train[name] = sorted(shuffled[:count]), sorted(shuffled[count:])
    return train, test


def _decoded_once(root: Path, parts: Sequence[Sequence[Path]], size: int) -> list[Bytes]:
    """Decode images once; later calls read the cache. A read-only cache is ignored, a damaged one is replaced."""
    folder = user_cache() / "folders" / _key(root, parts, size)
    files = [folder / "train.npy", folder / "test.npy"]
    try:
        return [_read_cache(file, (len(paths), size, size)) for file, paths in zip(files, parts, strict=True)]
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        warn(f"the cache {folder} cannot be used ({error}); the images of {root} are decoded again")
    arrays = _decode_parts(parts, size)
    with suppress(OSError), staged_for(folder) as staged:
        for file, array in zip(files, arrays, strict=True):
            _write_cache(staged / file.name, array)
    return arrays


def _write_cache(path: Path, array: Bytes) -> None:
    """Write an array in NumPy's format, followed by the SHA-256 digest of all that precedes."""
    with path.open("w+b") as file:
        np.save(file, array, allow_pickle=False)
        size = file.tell()
        file.seek(0)
        file.write(_digest(file, size))


def _read_cache(path: Path, shape: tuple[int, ...]) -> Bytes:
    """Read an array. A file that has changed since it was written is a ValueError."""
    with path.open("rb") as file:
        size = max(0, path.stat().st_size - hashlib.sha256().digest_size)
        if _digest(file, size) != file.read():
            raise ValueError(f"{path.name} has changed since it was written")
        file.seek(0)
        array: Bytes = np.load(file, allow_pickle=False)
    if array.dtype != np.uint8 or array.shape[:-1] != shape:
        raise ValueError(f"{path.name} has {array.dtype} {array.shape}")
    return array


def _digest(file: BinaryIO, size: int) -> bytes:
    """The SHA-256 digest of the next `size` bytes."""
    digest = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(size, 2**20))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()


def _key(root: Path, parts: Sequence[Sequence[Path]], size: int) -> str:
    """A cache key that changes when a file is added, removed or written."""
    files = []
    for paths in parts:
        stats = ((path, path.stat()) for path in paths)
        files.append(
            [(str(path.relative_to(root)), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]
        )
    description = json.dumps([_VERSION, size, str(root.resolve()), files])
    return hashlib.sha256(description.encode()).hexdigest()[:32]


def _decode_parts(parts: Sequence[Sequence[Path]], size: int) -> list[Bytes]:
    """Decode images to [n, size, size, channels], with one channel if all are gray, else three."""
    import_optional("PIL.Image", "pillow")
    with ThreadPoolExecutor() as pool:
        decoded = [list(pool.map(lambda path: _decode(path, size), paths)) for paths in parts]
    channels = max(image.shape[-1] for images in decoded for image in images)
    return [np.stack([np.broadcast_to(image, (size, size, channels)) for image in images]) for images in decoded]


def _decode(path: Path, size: int) -> Bytes:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith(("I", "F")):  # Pillow would clip their values at 255
                image = Image.fromarray(_eight_bits(np.asarray(image)))
            if "transparency" in image.info:
                image = image.convert("RGBA")
            image = image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB")
            pixels = np.asarray(image.resize((size, size), Image.Resampling.BILINEAR), dtype=np.uint8)
    except Exception as error:  # a damaged image may raise almost anything
        raise DataError(f"{path} cannot be opened as an image ({error}); replace or remove it") from None
    return pixels.reshape(size, size, -1)


def _eight_bits(values: NDArray[Any]) -> Bytes:
    """Convert 16-bit values, or floats from 0 to 1, to bytes."""
    scaled = values * 255.0 if values.dtype.kind == "f" else values / 257
    return np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
