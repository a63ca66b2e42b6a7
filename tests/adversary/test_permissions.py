"""Files and folders that cannot be read or written: nothing good is replaced, and nothing vanishes silently."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.study import page
from holdfast.study.store import Study
from victims import a_run, a_study, holdfast

WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
"""The administrator may read everything, unless this command takes the privilege away."""


def can_be_denied(folder: Path) -> bool:
    folder.chmod(0)
    try:
        return subprocess.run([*WITHOUT_PRIVILEGES, "ls", folder], capture_output=True, check=False).returncode != 0
    except OSError:
        return False
    finally:
        folder.chmod(0o755)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("permissions")
    if not can_be_denied(folder):
        pytest.skip("permissions do not apply to this user")
    page.write(a_study(folder / "study"))
    return folder / "study"


@pytest.fixture
def study(reported: Path, tmp_path: Path) -> Iterator[Study]:
    made = Study(shutil.copytree(reported, tmp_path / "study"))
    yield made
    for path in (made.folder, *made.folder.rglob("*")):
        path.chmod(0o755)


def denied(command: str, study: Study) -> tuple[int, str, str]:
    done = holdfast(command, study.folder, prefix=WITHOUT_PRIVILEGES)
    assert "Traceback" not in done.stderr
    assert "delete" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def files(study: Study) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in study.folder.rglob("*") if path.is_file()}


def test_no_run_can_be_read(study: Study) -> None:
    before, runs = files(study), study.folder / "runs"
    runs.chmod(0)
    code, _, err = denied("report", study)
    runs.chmod(0o755)
    assert (code, err.count("\n")) == (1, 1)
    assert f"{runs} cannot be read (Permission denied): check its permissions" in err
    assert files(study) == before
    for folder in runs.iterdir():
        folder.chmod(0)
    code, _, err = denied("report", study)
    for folder in runs.iterdir():
        folder.chmod(0o755)
    assert code == 1
    assert "its page is left as it is" in err
    assert files(study) == before


def test_one_run_cannot_be_read(study: Study) -> None:
    folder = study.folder_of(a_run())
    figures = {path.name for path in (study.folder / "figures").iterdir()}
    for unreadable in (folder, folder / "record.json"):
        mode = unreadable.stat().st_mode
        unreadable.chmod(0)
        code, out, err = denied("list", study)
        unreadable.chmod(mode)
        assert code == 0
        assert f"{folder.name}  " in out
        assert "2 finished, 1 unreadable" in out
        assert f"{folder} is left out: {folder}" in err
        assert "Permission denied" in err
    folder.chmod(0)
    code, _, err = denied("report", study)
    assert code == 0
    assert f"{folder} is left out: " in err
    assert {path.name for path in (study.folder / "figures").iterdir()} == figures


def test_searches_that_cannot_be_read(study: Study) -> None:
    before = files(study)
    (study.folder / "sweeps").chmod(0)
    code, _, err = denied("report", study)
    (study.folder / "sweeps").chmod(0o755)
    assert code == 1
    assert f"{study.folder / 'sweeps'} cannot be read" in err
    assert files(study) == before


def test_a_read_only_study_is_listed(study: Study) -> None:
    waiting = study.add(a_run(seed=7)).folder
    (waiting / "lock").touch()
    for path in (study.folder, *study.folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    code, out, err = denied("list", study)
    assert (code, err) == (0, "")
    assert "3 finished, 1 waiting" in out
    code, _, err = denied("report", study)
    assert (code, err.count("\n")) == (1, 1)
    assert "Permission denied" in err


def test_a_damaged_run_can_be_deleted(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    path = study.folder_of(a_run()) / "record.json"
    path.write_text("{")
    done = holdfast("list", tmp_path)
    assert "2 finished, 1 damaged" in done.stdout
    assert f"{path.parent} is left out, and can be deleted: {path}" in done.stderr
    shutil.rmtree(path.parent)
    assert holdfast("list", tmp_path).stderr == ""
