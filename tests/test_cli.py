"""The command `holdfast data`, run as a user runs it."""

import gzip
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import cli
from holdfast.streams import published, sources
from holdfast.version import __version__
from test_published import Server, md5, server
from test_sources import idx, write_cifar, write_images, write_mnist

__all__ = ["server"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    for module in (published, sources):
        monkeypatch.setattr(module, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        code = caught.value.code
        return code if isinstance(code, int) else 0, captured.out, captured.err

    return run


def served(server: Server, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """MNIST as it is published, on the server."""
    write_mnist(folder)
    server.content = {name: (folder / name).read_bytes() for name in published.MNIST.fetched}
    sums = {name: md5(content) for name, content in server.content.items()}
    parts = {name.removesuffix(".gz"): md5(gzip.decompress(content)) for name, content in server.content.items()}
    ours = replace(published.MNIST, url=server.url, fetched=sums, parts=parts, size=(12, 5))
    monkeypatch.setitem(sources._PUBLISHED, "mnist", ours)


def failed(outcome: tuple[int, str, str]) -> str:
    code, _, err = outcome
    assert code == 1
    assert err.startswith("holdfast: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("arguments", [["--help"], ["data", "--help"], ["data", "list", "--help"]])
def test_help(run: Run, arguments: list[str]) -> None:
    code, out, _ = run(*arguments)
    assert code == 0
    assert "data" in out


@pytest.mark.parametrize("command", ["list", "fetch", "verify"])
def test_every_command_has_an_example(run: Run, command: str) -> None:
    assert f"Example: holdfast data {command}" in run("data", command, "--help")[1]


def test_list(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a [bold] name"
    write_mnist(folder / "MNIST" / "raw")
    code, out, err = run("data", "list", "--data", folder)
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in out.splitlines()[3:-1]
    }
    assert (code, err) == (0, "")
    assert rows["digits"] == ["in scikit-learn", "1352 + 445", "10"]
    assert rows["mnist"] == [str(folder / "MNIST" / "raw"), "12 + 5", "10"]
    assert rows["cifar100"] == ["not found", "", ""]


def test_list_goes_on_after_something_damaged(run: Run, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    write_cifar(tmp_path / "cifar-100-binary")
    code, out, _ = run("data", "list", "--data", tmp_path)
    assert code == 0
    assert "truncated or corrupt" in out
    assert "6 + 4" in out


def test_fetch_and_verify(run: Run, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    served(server, monkeypatch, tmp_path / "served")
    data = tmp_path / "data"
    raw = data / "MNIST" / "raw"
    assert "mnist was not found in" in failed(run("data", "verify", "mnist", "--data", data))
    assert run("data", "fetch", "mnist", "--data", data) == (0, f"mnist is now in {raw}\n", "")
    assert run("data", "fetch", "mnist", "--data", data) == (0, f"mnist is already in {raw}\n", "")
    assert len(server.asked) == 4
    code, out, err = run("data", "verify", "mnist", "--data", data)
    assert (code, err) == (0, "")
    assert out.count("the original, by its checksum") == 4

    labels = raw / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-3])
    assert str(labels) in failed(run("data", "verify", "mnist", "--data", data))
    code, out, err = run("data", "fetch", "mnist", "--data", data)
    assert (code, out) == (0, f"mnist is now in {raw}\n")
    assert "fetching it now" in err
    assert run("data", "verify", "mnist", "--data", data)[0] == 0


def test_a_changed_copy_is_found_out(run: Run, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    served(server, monkeypatch, tmp_path)
    labels = sources.load("mnist", tmp_path).train.labels.numpy().astype("u1")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels[::-1].copy())))
    assert "is not the original" in failed(run("data", "verify", "mnist", "--data", tmp_path))


def test_a_failed_fetch(run: Run, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    served(server, monkeypatch, tmp_path / "served")
    server.content.clear()
    assert "error 404" in failed(run("data", "fetch", "mnist", "--data", tmp_path / "data"))
    assert list((tmp_path / "data").iterdir()) == []


def test_what_needs_no_fetching(run: Run, tmp_path: Path) -> None:
    assert run("data", "fetch", "digits")[:2] == (0, "digits needs no fetching: 1352 + 445 images are here\n")
    for name in ("a", "b"):
        write_images(tmp_path / "pets" / name, 2)
    assert "needs no fetching: 2 + 2 images" in run("data", "fetch", f"folder:{tmp_path / 'pets'}")[1]
    assert "all readable" in run("data", "verify", f"folder:{tmp_path / 'pets'}")[1]


@pytest.mark.parametrize("command", ["fetch", "verify"])
def test_an_unknown_name(run: Run, command: str) -> None:
    assert "unknown source 'cifar10'" in failed(run("data", command, "cifar10"))


def test_a_place_that_cannot_be_written_to(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot write to" in failed(run("data", "fetch", "mnist", "--data", tmp_path / "file" / "data"))


def test_other_errors_of_the_system_are_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, data: Path | None) -> list[str]:
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setattr(sources, "verify", full)
    assert failed(run("data", "verify", "mnist")).startswith(
        "holdfast: /some/file: No space left on device; the disk of /some is full: "
    )


def test_without_the_extra_packages_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from holdfast.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'holdfast[study]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"holdfast {__version__}\n", "")


def test_the_command_itself() -> None:
    result = subprocess.run([sys.executable, "-m", "holdfast", "data", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "fetch" in result.stdout
