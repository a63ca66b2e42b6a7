"""Published data sets: find local copies, or download, verify and install the files atomically."""

import gzip
import hashlib
import os
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from types import ModuleType

from holdfast.errors import UserError

_ATTEMPTS = 3
_WAIT_SECONDS = 2.0
_MAX_BYTES = 2**30
_CHECKSUMS = "checksums.md5"  # in the format of md5sum


class DataError(UserError):
    """A problem with the data. The message is one line: the problem, then the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class Published:
    """A data set as published.

    Args:
        name: its name in this library.
        url: the address of the downloads, without the file name.
        fetched: the MD5 checksums of the downloads, by file name.
        parts: the MD5 checksums of the data files, by file name; "" if unknown.
        folders: the folders under a location that may hold the files. Downloads go to the first.
        size: the numbers of training and test images of the original.
        archive: the archive that holds the parts under `folders[0]`, if there is one.
        pickled: the file names of the publisher's pickled version, which is never read.
    """

    name: str
    url: str
    fetched: Mapping[str, str]
    parts: Mapping[str, str]
    folders: tuple[str, ...]
    size: tuple[int, int]
    archive: str | None = None
    pickled: tuple[str, ...] = ()


MNIST = Published(
    name="mnist",
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    fetched={
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    parts={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    folders=("MNIST/raw", "mnist", "."),
    size=(60000, 10000),
)

CIFAR100 = Published(
    name="cifar100",
    url="https://www.cs.toronto.edu/~kriz/",
    fetched={"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"},
    parts={"train.bin": "", "test.bin": "", "fine_label_names.txt": ""},
    folders=("cifar-100-binary", "."),
    size=(50000, 10000),
    archive="cifar-100-binary.tar.gz",
    pickled=("cifar-100-python", "cifar-100-python.tar.gz"),
)


@dataclass(frozen=True)
class LocalCopy:
    """A data set on disk: its folder or archive, and the file that holds each part."""

    published: Published
    location: Path
    files: Mapping[str, Path]

    @property
    def archived(self) -> bool:
        return self.location.name == self.published.archive

    def damaged(self, part: str, problem: str) -> DataError:
        return _damaged(self.files[part], problem, self.published.name)


def _damaged(path: Path, problem: str, name: str) -> DataError:
    return DataError(f"{path} {problem}; delete it, then fetch it with `holdfast data fetch {name}`")


# ---- finding ----


def user_cache() -> Path:
    """The user's cache folder."""
    return Path(import_optional("platformdirs").user_cache_path("holdfast"))


def import_optional(module: str, package: str | None = None) -> ModuleType:
    """Import a module that only some sources need."""
    try:
        return import_module(module)
    except ImportError:
        package = package or module
        raise DataError(f"{package} is required and not installed; `pip install {package}`") from None


def locations(data: Path | None = None) -> Iterator[Path]:
    """The locations to search, in order. Downloads go to the first."""
    if data is not None:
        yield expand_home(data)
    if folder := os.environ.get("HOLDFAST_DATA"):
        yield expand_home(folder)
    yield user_cache()


def expand_home(path: Path | str) -> Path:
    """Replace a leading ~ by the user's home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path} names a user without a home folder; give the full path") from None


def find(published: Published, data: Path | None = None) -> LocalCopy | None:
    """Find the data set in the first location that has all of it."""
    for location in locations(data):
        for folder in published.folders:
            files = {part: file for part in published.parts if (file := _file(location / folder, part, published))}
            if len(files) == len(published.parts):
                return LocalCopy(published, location / folder, files)
        if published.archive and _is_file(archive := location / published.archive):
            return LocalCopy(published, archive, dict.fromkeys(published.parts, archive))
    return None


def _file(folder: Path, part: str, published: Published) -> Path | None:
    """The file of a part. The downloaded form comes first, so that a download replaces a damaged file."""
    gzipped = f"{part}.gz"
    names = (gzipped, part) if gzipped in published.fetched else (part,)
    return next((folder / name for name in names if _is_file(folder / name)), None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no permission to read the location
        return False


def obtain(published: Published, data: Path | None = None, *, download: bool = True) -> LocalCopy:
    """Find the data set, or else download it."""
    copy = find(published, data)
    if copy is not None:
        return copy
    if download:
        return fetch(published, data)
    searched = ", ".join(str(location) for location in locations(data))
    remedy = f"fetch it with `holdfast data fetch {published.name}`, or give its folder with --data"
    raise DataError(f"{published.name} was not found in {searched}; {remedy}{_only_pickled(published, data)}")


def _only_pickled(published: Published, data: Path | None) -> str:
    for location in locations(data):
        for name in published.pickled:
            if _is_file(location / name) or _is_file(location / name / "train"):
                binary = f"{published.url}{published.archive}"
                return f"; {location / name} is pickled and not read: download the binary version, {binary}"
    return ""


# ---- fetching ----


def fetch(published: Published, data: Path | None = None) -> LocalCopy:
    """Download the data set into the first location. It appears there complete and verified, or not at all."""
    location = next(locations(data))
    folder = location / published.folders[0]
    with _writing(location):
        location.mkdir(parents=True, exist_ok=True)
        with _staging(location) as staged:
            for name, md5 in published.fetched.items():
                try:
                    _download(published.url + name, staged / name, md5)
                except _DownloadError as failure:
                    remedy = (
                        f"try again later, or put it into {folder if published.archive is None else location} by hand"
                    )
                    pickled = _only_pickled(published, data)
                    raise DataError(f"could not fetch {published.url}{name}: {failure}; {remedy}{pickled}") from None
            if published.archive is not None:
                _unpack(staged / published.archive, published)
            publish(staged, folder)
    copy = find(published, data)
    if copy is None:
        raise DataError(f"{published.name} was fetched into {folder} and then removed; fetch it again")
    return copy


class _DownloadError(Exception):
    """A failed download, with the reason."""


def _download(url: str, to: Path, md5: str) -> None:
    """Download a file. Broken connections and server errors are retried; a missing file is not."""
    pooch = import_optional("pooch")
    from requests import HTTPError, RequestException

    bar = sys.stderr.isatty()
    if bar:
        import_optional("tqdm")
        print(url, file=sys.stderr)
    get = pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, headers={"Accept-Encoding": "identity"})
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            get(url, str(to), None)
            if (actual := checksum(to)) == md5:
                return
            failure = f"its MD5 checksum is {actual}, expected {md5}"
        except HTTPError as error:
            status = 500 if error.response is None else error.response.status_code
            failure = f"the server answers with error {status}"
            if status < 500:
                break
        except RequestException as error:
            failure = f"the connection failed ({type(error).__name__})"
        if attempt < _ATTEMPTS:
            time.sleep(_WAIT_SECONDS * attempt)
    raise _DownloadError(failure)


def _unpack(archive: Path, published: Published) -> None:
    """Replace an archive by its parts and a file of their checksums."""
    contents = members(archive, published)
    archive.unlink()
    for part, content in contents.items():
        archive.with_name(part).write_bytes(content)
    sums = "".join(f"{_md5(content)}  {part}\n" for part, content in contents.items())
    archive.with_name(_CHECKSUMS).write_text(sums, encoding="ascii")


@contextmanager
def _staging(location: Path) -> Iterator[Path]:
    """A temporary folder on the same disk, with default permissions, to be published when complete."""
    with TemporaryDirectory(prefix=".holdfast-", dir=location) as temporary:
        staged = Path(temporary) / "staged"
        staged.mkdir()
        yield staged


def publish(staged: Path, folder: Path) -> None:
    """Rename a staged folder to `folder`; if that exists, move the files into it one by one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        staged.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        for file in staged.iterdir():
            file.replace(folder / file.name)


@contextmanager
def staged_for(folder: Path) -> Iterator[Path]:
    """A temporary folder that replaces `folder` when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _staging(folder.parent) as staged:
        yield staged
        publish(staged, folder)


@contextmanager
def _writing(location: Path) -> Iterator[None]:
    """Turn write errors into errors that name the location and the remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot write to {location}: {reason}; choose another folder with --data") from None


# ---- reading ----


def contents(copy: LocalCopy) -> dict[str, bytes]:
    """Read the unpacked parts. Unpacked downloads are verified against their stored checksums."""
    if copy.archived:
        return members(copy.location, copy.published)
    parts = {part: _read(path, copy.published.name) for part, path in copy.files.items()}
    for part, md5 in _stored_sums(copy).items():
        if _md5(parts[part]) != md5:
            raise copy.damaged(part, "has changed since it was fetched")
    return parts


def _read(path: Path, name: str) -> bytes:
    content = b""
    with _reading(path, name), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise _damaged(path, "is far larger than the data set", name)
    return content


def members(archive: Path, published: Published) -> dict[str, bytes]:
    """Read the parts from an archive. An archive with a member outside its folder is refused."""
    wanted = {PurePosixPath(published.folders[0], part): part for part in published.parts}
    parts: dict[str, bytes] = {}
    with _reading(archive, published.name), gzip.open(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    problem = f"has a member that is not a file in its folder: {member.name}"
                    raise _damaged(archive, problem, published.name)
                if member.issparse() or member.size > _MAX_BYTES:
                    raise _damaged(archive, f"has a member far larger than the data set: {member.name}", published.name)
                file = tar.extractfile(member) if path in wanted and member.isfile() else None
                if file is not None:
                    parts[wanted[path]] = file.read()
        while stream.read(2**20):  # to the end, where gzip verifies its checksum
            pass
    missing = [str(path) for path, part in wanted.items() if part not in parts]
    if missing:
        raise _damaged(archive, f"does not have {', '.join(missing)}", published.name)
    return parts


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Turn read errors into errors that name the file and the remedy."""
    try:
        yield
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
        raise _damaged(path, f"is truncated or corrupt ({error})", name) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from None


# ---- checksums ----


def checksum(path: Path) -> str:
    """The MD5 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def compare(copy: LocalCopy) -> dict[Path, bool | None]:
    """By file, whether it has the original's checksum; None if that is unknown."""
    if copy.archived:
        return {copy.location: checksum(copy.location) == copy.published.fetched[copy.location.name]}
    sums = {**copy.published.parts, **_stored_sums(copy)}
    return {path: _same(path, sums[part], copy.published.name) for part, path in copy.files.items()}


def _same(path: Path, md5: str, name: str) -> bool | None:
    return _md5(_read(path, name)) == md5 if md5 else None


def was_fetched(copy: LocalCopy) -> bool:
    """Whether the files were unpacked from a downloaded archive, which stores their checksums beside them."""
    return bool(_stored_sums(copy))


def _stored_sums(copy: LocalCopy) -> dict[str, str]:
    file = copy.location / _CHECKSUMS
    if copy.archived or not file.is_file():
        return {}
    pairs = (line.split() for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2 and pair[1] in copy.files}
