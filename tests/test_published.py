"""Finding, downloading and reading published data sets, from an unreliable server."""

import gzip
import hashlib
import io
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from holdfast.streams import published
from holdfast.streams.published import CIFAR100, MNIST, DataError, Published, fetch, find, obtain

USER_CACHE = published.user_cache


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def tar_of(*members: tuple[str, bytes | None]) -> bytes:
    """An archive of members; a member without content is a link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content or b""))
    return buffer.getvalue()


PARTS = {"train.bin": b"training" * 500, "test.bin": b"test", "fine_label_names.txt": b"cat\ndog\n"}
MEMBERS = [(f"cifar-100-binary/{part}", content) for part, content in PARTS.items()]


def everything_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


class Server:
    """Serves `content`. The first `broken` answers for each file stop in the middle."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.broken = 0
        self.status = 200
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = request.path.lstrip("/")
        self.asked.append(name)
        content = self.content.get(name)
        if content is None or self.status != 200:
            request.send_error(404 if content is None else self.status)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: len(content) // 2] if self.asked.count(name) <= self.broken else content)

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(published, "_WAIT_SECONDS", 0.0)
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.setattr(published, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def cifar_at(server: Server, content: bytes | None = None) -> Published:
    content = tar_of(*MEMBERS) if content is None else content
    server.content["cifar-100-binary.tar.gz"] = content
    return replace(CIFAR100, url=server.url, fetched={"cifar-100-binary.tar.gz": md5(content)})


def mnist_at(server: Server) -> Published:
    server.content |= {name: gzip.compress(name.encode()) for name in MNIST.fetched}
    return replace(MNIST, url=server.url, fetched={name: md5(server.content[name]) for name in MNIST.fetched})


# ---- finding ----


def test_the_cache_is_the_users_own() -> None:
    assert "holdfast" in USER_CACHE().parts
    assert USER_CACHE().is_absolute()


def test_an_unreadable_location_is_skipped(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300)
    assert find(MNIST, too_long) is None
    with pytest.raises(DataError, match=r"cannot write to .*: File name too long"):
        fetch(MNIST, too_long)


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_found_in_every_layout(tmp_path: Path, folder: str, suffix: str) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for part in MNIST.parts:
        content = part.encode()
        (tmp_path / folder / f"{part}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    copy = find(MNIST, tmp_path)
    assert copy is not None
    assert copy.location == tmp_path / folder
    assert published.contents(copy) == {part: part.encode() for part in MNIST.parts}


def test_three_files_of_four_are_not_a_data_set(tmp_path: Path) -> None:
    for part in list(MNIST.parts)[:3]:
        (tmp_path / part).touch()
    assert find(MNIST, tmp_path) is None


def test_locations_are_searched_in_order(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "env"))
    order = [tmp_path / "given", tmp_path / "env", cache]
    assert list(published.locations(tmp_path / "given")) == order
    for location in reversed(order):
        location.mkdir()
        (location / "cifar-100-binary.tar.gz").write_bytes(tar_of(*MEMBERS))
        copy = find(CIFAR100, tmp_path / "given")
        assert copy is not None
        assert copy.location.parent == location


def test_an_archive_is_read_in_place(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(tar_of(("cifar-100-binary/README", b"x"), *MEMBERS))
    copy = find(CIFAR100, tmp_path)
    assert copy is not None
    assert published.contents(copy) == PARTS
    assert everything_under(tmp_path) == {"cifar-100-binary.tar.gz"}


def test_the_error_for_a_missing_data_set_names_locations_and_remedy(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(DataError) as caught:
        obtain(MNIST, tmp_path / "given", download=False)
    message = str(caught.value)
    assert all(text in message for text in (str(tmp_path / "given"), str(cache), "holdfast data fetch mnist", "--data"))
    assert "\n" not in message


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").write_bytes(b"pickle")
    with pytest.raises(DataError, match=r"cifar-100-python is pickled .* binary version, .*cifar-100-binary\.tar\.gz"):
        obtain(CIFAR100, tmp_path, download=False)


# ---- fetching ----


def test_fetch_unpacks_into_the_first_location(tmp_path: Path, server: Server) -> None:
    copy = fetch(cifar_at(server), tmp_path / "new" / "location")
    folder = tmp_path / "new" / "location" / "cifar-100-binary"
    assert copy.location == folder
    assert published.contents(copy) == PARTS
    assert everything_under(tmp_path) == {
        str((folder / name).relative_to(tmp_path)) for name in (*PARTS, "checksums.md5")
    }
    assert folder.stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o777  # not a private folder
    assert set(published.compare(copy).values()) == {True}
    (folder / "test.bin").write_bytes(b"other")
    assert published.compare(copy)[folder / "test.bin"] is False


def test_fetch_goes_to_the_cache_by_default(cache: Path, server: Server) -> None:
    assert obtain(mnist_at(server)).location == cache / "MNIST" / "raw"
    requests = len(server.asked)
    assert requests == 4
    obtain(mnist_at(server))
    assert len(server.asked) == requests, "an existing copy is not fetched again"


def test_fetch_replaces_what_is_damaged_and_leaves_other_files(tmp_path: Path, server: Server) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-labels-idx1-ubyte").write_bytes(b"bad")
    (raw / "train-images-idx3-ubyte.gz").write_bytes(b"bad")
    (raw / "notes.txt").write_text("mine")
    copy = fetch(mnist_at(server), tmp_path)
    assert published.contents(copy) == {part: f"{part}.gz".encode() for part in MNIST.parts}
    assert (raw / "notes.txt").read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_connection_that_breaks_off_is_tried_again(tmp_path: Path, server: Server) -> None:
    server.broken = 2
    assert published.contents(fetch(cifar_at(server), tmp_path)) == PARTS
    assert len(server.asked) == 3


def _always_broken(server: Server) -> Published:
    server.broken = 1000
    return mnist_at(server)


def _wrong_checksum(server: Server) -> Published:
    return replace(cifar_at(server), fetched={"cifar-100-binary.tar.gz": "0" * 32})


def _missing(server: Server) -> Published:
    published = mnist_at(server)
    del server.content["t10k-labels-idx1-ubyte.gz"]
    return published


def _failing(server: Server) -> Published:
    server.status = 503
    return mnist_at(server)


def _no_server(server: Server) -> Published:
    published = mnist_at(server)
    server.http.socket.close()
    return replace(published, url="http://127.0.0.1:9/")


@pytest.mark.parametrize(
    ("break_it", "says", "requests"),
    [
        (_always_broken, "connection failed", 3),
        (_wrong_checksum, "MD5 checksum is .*, expected 0000", 3),
        (_missing, "error 404", 4),
        (_failing, "error 503", 3),
        (_no_server, "connection failed", 0),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(
    tmp_path: Path, server: Server, break_it: Callable[[Server], Published], says: str, requests: int
) -> None:
    published = break_it(server)
    with pytest.raises(DataError, match=says) as caught:
        fetch(published, tmp_path)
    assert "\n" not in str(caught.value)
    assert f"could not fetch {published.url}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert len(server.asked) == requests


def test_a_location_that_cannot_be_written_to(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write to .*file.*--data"):
        fetch(mnist_at(server), tmp_path / "file")


def test_a_full_disk(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    published = cifar_at(server)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DataError, match=r"cannot write to .*: No space left on device"):
        fetch(published, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- archives ----


@pytest.mark.parametrize(
    "evil",
    [
        ("../evil", b"x"),
        ("cifar-100-binary/../../evil", b"x"),
        ("/tmp/evil", b"x"),
        ("cifar-100-binary/train.bin", None),
        ("cifar-100-binary/link", None),
    ],
)
def test_an_archive_that_reaches_out_of_its_folder_is_refused(
    tmp_path: Path, server: Server, evil: tuple[str, bytes | None]
) -> None:
    content = tar_of(evil, *MEMBERS)
    with pytest.raises(DataError, match="not a file in its folder"):
        fetch(cifar_at(server, content), tmp_path / "location")
    assert everything_under(tmp_path) == set()
    archive = tmp_path / "cifar-100-binary.tar.gz"
    archive.write_bytes(content)
    copy = find(CIFAR100, tmp_path)
    assert copy is not None
    with pytest.raises(DataError, match="not a file in its folder"):
        published.contents(copy)


def test_an_archive_without_a_part(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match=r"does not have cifar-100-binary/fine_label_names\.txt"):
        fetch(cifar_at(server, tar_of(*MEMBERS[:2])), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_truncated_or_changed_archive_never_gives_wrong_data(tmp_path: Path) -> None:
    content = tar_of(*MEMBERS)
    archive = tmp_path / "cifar-100-binary.tar.gz"
    archive.write_bytes(content)
    copy = find(CIFAR100, tmp_path)
    assert copy is not None
    for end in range(len(content)):
        archive.write_bytes(content[:end])
        with pytest.raises(DataError, match=r"cifar-100-binary\.tar\.gz .*; delete it"):
            published.contents(copy)
    for i in range(len(content)):
        archive.write_bytes(content[:i] + bytes([content[i] ^ 16]) + content[i + 1 :])
        with suppress(DataError):
            assert published.contents(copy) == PARTS, "only bytes without data may change unnoticed"


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for part in MNIST.parts:
        (tmp_path / part).touch()
    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte cannot be read: Permission denied"):
        published.contents(obtain(MNIST, tmp_path))


def test_the_bar_is_shown_on_a_terminal(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch(cifar_at(server), tmp_path)
    err = capsys.readouterr().err
    assert server.url in err
    assert "100%" in err


def test_two_at_once_both_succeed(tmp_path: Path, server: Server) -> None:
    dataset = cifar_at(server)
    with ThreadPoolExecutor(4) as pool:
        for copy in pool.map(lambda _: fetch(dataset, tmp_path), range(8)):
            assert published.contents(copy) == PARTS
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-100-binary"]


def test_a_missing_package_is_named() -> None:
    with pytest.raises(DataError, match="`pip install no-such-package`"):
        published.import_optional("no_such_module", "no-such-package")


def test_files_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_MAX_BYTES", 1000)
    for part in MNIST.parts:
        (tmp_path / f"{part}.gz").write_bytes(gzip.compress(bytes(2000)))
    with pytest.raises(DataError, match=r"idx3-ubyte\.gz is far larger than the data set; delete it"):
        published.contents(obtain(MNIST, tmp_path))
    archive = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        member = tarfile.TarInfo("cifar-100-binary/train.bin")
        member.size = 2000
        tar.addfile(member, io.BytesIO(bytes(2000)))
    with pytest.raises(DataError, match=r"has a member far larger than the data set: cifar-100-binary/train\.bin"):
        published.members(archive, published.CIFAR100)


def test_a_home_that_does_not_exist() -> None:
    with pytest.raises(DataError, match="names a user without a home folder; give the full path"):
        published.find(MNIST, Path("~no-such-user/data"))
