"""The publishers' files: found where they are, or fetched, checked and put in place whole or not at all."""

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
_MOST_BYTES = 2**30
_SUMS = "checksums.md5"  # as md5sum writes and checks it


class DataError(UserError):
    """Something is wrong with the data; the message is one line that says what and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class Published:
    """A data set as its publisher gives it out.

    Args:
        name: what it is called here.
        url: the address of what is fetched, without the file's name.
        fetched: the MD5 checksums of what is fetched, by file name.
        parts: the files with the data, and their MD5 checksums where these are known ("" where they are not).
        folders: where these files may lie under a place; what is fetched goes to the first.
        size: how many training and test images the original has.
        archive: the archive that holds the parts under `folders[0]`, if they come in one.
        pickled: what the publisher's pickled version of it is called, which is never read.
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
class Found:
    """A data set that is here: the folder or archive it was found in, and the file that holds each part."""

    published: Published
    where: Path
    files: Mapping[str, Path]

    @property
    def archived(self) -> bool:
        return self.where.name == self.published.archive

    def damaged(self, part: str, what: str) -> DataError:
        return _damaged(self.files[part], what, self.published.name)


def _damaged(path: Path, what: str, name: str) -> DataError:
    return DataError(f"{path} {what}; delete it, then `holdfast data fetch {name}` brings it anew")


# ---- finding ----


def user_cache() -> Path:
    """Where this user's programs keep what they can get again."""
    return Path(needed("platformdirs").user_cache_path("holdfast"))


def needed(module: str, package: str | None = None) -> ModuleType:
    """A module that only some sources need."""
    try:
        return import_module(module)
    except ImportError:
        package = package or module
        raise DataError(f"{package} is needed for this and is not installed; `pip install {package}`") from None


def places(data: Path | None = None) -> Iterator[Path]:
    """Where files are looked for, in this order; what is fetched goes to the first."""
    if data is not None:
        yield home(data)
    if given := os.environ.get("HOLDFAST_DATA"):
        yield home(given)
    yield user_cache()


def home(path: Path | str) -> Path:
    """The path, with the user's home folder in place of ~."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path} begins with a user who has no home folder here") from None


def find(published: Published, data: Path | None = None) -> Found | None:
    """The data set in the first place that has all of it."""
    for place in places(data):
        for folder in published.folders:
            files = {part: file for part in published.parts if (file := _file(place / folder, part, published))}
            if len(files) == len(published.parts):
                return Found(published, place / folder, files)
        if published.archive and _is_file(archive := place / published.archive):
            return Found(published, archive, dict.fromkeys(published.parts, archive))
    return None


def _file(folder: Path, part: str, published: Published) -> Path | None:
    """As it is fetched first, so that what is fetched replaces what is damaged."""
    gzipped = f"{part}.gz"
    names = (gzipped, part) if gzipped in published.fetched else (part,)
    return next((folder / name for name in names if _is_file(folder / name)), None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a place that this user may not look into
        return False


def obtain(published: Published, data: Path | None = None, *, download: bool = True) -> Found:
    """The data set from where it is, or else fetched."""
    found = find(published, data)
    if found is not None:
        return found
    if download:
        return fetch(published, data)
    looked = ", ".join(str(place) for place in places(data))
    remedy = f"fetch it with `holdfast data fetch {published.name}`, or name the folder that has it with --data"
    raise DataError(f"{published.name} is not here (looked in {looked}); {remedy}{_only_pickled(published, data)}")


def _only_pickled(published: Published, data: Path | None) -> str:
    for place in places(data):
        for name in published.pickled:
            if _is_file(place / name) or _is_file(place / name / "train"):
                binary = f"{published.url}{published.archive}"
                return f"; {place / name} is pickled and is not read: the binary version is needed, {binary}"
    return ""


# ---- fetching ----


def fetch(published: Published, data: Path | None = None) -> Found:
    """Downloads the data set into the first place. It appears there whole and checked, or not at all."""
    place = next(places(data))
    folder = place / published.folders[0]
    with _writing(place):
        place.mkdir(parents=True, exist_ok=True)
        with _staging(place) as staged:
            for name, md5 in published.fetched.items():
                try:
                    _download(published.url + name, staged / name, md5)
                except _DownloadError as failure:
                    remedy = f"try again later, or put it into {folder if published.archive is None else place} by hand"
                    pickled = _only_pickled(published, data)
                    raise DataError(f"could not fetch {published.url}{name}: {failure}; {remedy}{pickled}") from None
            if published.archive is not None:
                _unpack(staged / published.archive, published)
            publish(staged, folder)
    found = find(published, data)
    if found is None:
        raise DataError(f"{published.name} was fetched into {folder} and is gone again; fetch it once more")
    return found


class _DownloadError(Exception):
    """A download that did not succeed, and why."""


def _download(url: str, to: Path, md5: str) -> None:
    """The file at `url`, tried several times unless the server says that there is none."""
    pooch = needed("pooch")
    from requests import HTTPError, RequestException

    bar = sys.stderr.isatty()
    if bar:
        needed("tqdm")
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
    """The parts in place of the archive, with their checksums."""
    contents = members(archive, published)
    archive.unlink()
    for part, content in contents.items():
        archive.with_name(part).write_bytes(content)
    sums = "".join(f"{_md5(content)}  {part}\n" for part, content in contents.items())
    archive.with_name(_SUMS).write_text(sums, encoding="ascii")


@contextmanager
def _staging(place: Path) -> Iterator[Path]:
    """A folder to make something in that is then published, on the same disk and with the usual permissions."""
    with TemporaryDirectory(prefix=".holdfast-", dir=place) as temporary:
        staged = Path(temporary) / "staged"
        staged.mkdir()
        yield staged


def publish(staged: Path, folder: Path) -> None:
    """Renames the folder into place as a whole, or file by file where there is one already."""
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
    """A folder that takes the place of `folder` when all has been written to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _staging(folder.parent) as staged:
        yield staged
        publish(staged, folder)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"cannot write to {place}: {reason}; choose another folder with --data") from None


# ---- reading ----


def contents(found: Found) -> dict[str, bytes]:
    """What the parts hold, unpacked; compared with the checksums that were left with them, if they were fetched."""
    if found.archived:
        return members(found.where, found.published)
    read = {part: _read(path, found.published.name) for part, path in found.files.items()}
    for part, md5 in _kept_sums(found).items():
        if _md5(read[part]) != md5:
            raise found.damaged(part, "has changed since it was fetched")
    return read


def _read(path: Path, name: str) -> bytes:
    content = b""
    with _whole(path, name), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise _damaged(path, "holds far more than the data set does", name)
    return content


def members(archive: Path, published: Published) -> dict[str, bytes]:
    """What the archive has of the data set's parts; the archive is refused if any member would leave its folder."""
    wanted = {PurePosixPath(published.folders[0], part): part for part in published.parts}
    found: dict[str, bytes] = {}
    with _whole(archive, published.name), gzip.open(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    what = f"has a member that is no file in its folder: {member.name}"
                    raise _damaged(archive, what, published.name)
                if member.issparse() or member.size > _MOST_BYTES:
                    raise _damaged(archive, f"has a member far larger than the data set: {member.name}", published.name)
                file = tar.extractfile(member) if path in wanted and member.isfile() else None
                if file is not None:
                    found[wanted[path]] = file.read()
        while stream.read(2**20):  # to its end, where the checksum of the whole is
            pass
    missing = [str(path) for path, part in wanted.items() if part not in found]
    if missing:
        raise _damaged(archive, f"does not have {', '.join(missing)}", published.name)
    return found


@contextmanager
def _whole(path: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
        raise _damaged(path, f"is truncated or corrupt ({error})", name) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; check its permissions") from None


# ---- checksums ----


def checksum(path: Path) -> str:
    """The MD5 checksum of a file, as the publishers give it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def compare(found: Found) -> dict[Path, bool | None]:
    """By file, whether its checksum is the original's; None where the original's is not known."""
    if found.archived:
        return {found.where: checksum(found.where) == found.published.fetched[found.where.name]}
    known = {**found.published.parts, **_kept_sums(found)}
    return {path: _same(path, known[part], found.published.name) for part, path in found.files.items()}


def _same(path: Path, md5: str, name: str) -> bool | None:
    return _md5(_read(path, name)) == md5 if md5 else None


def was_fetched(found: Found) -> bool:
    """Whether the files were unpacked here from the publisher's archive, which left their checksums with them."""
    return bool(_kept_sums(found))


def _kept_sums(found: Found) -> dict[str, str]:
    file = found.where / _SUMS
    if found.archived or not file.is_file():
        return {}
    pairs = (line.split() for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2 and pair[1] in found.files}
