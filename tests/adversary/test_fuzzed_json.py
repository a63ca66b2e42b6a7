"""Files with any JSON in them: `list` and `report` name the file in one line, and the other runs go on."""

import copy
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from holdfast.study import exports, page, sweep, terminal
from holdfast.study.figures import drawing
from holdfast.study.store import Study
from holdfast.study.tables import compare
from victims import a_run, a_study, holdfast

FILES = ("run.json", "record.json", "neurons.json", "sweep")
DEEP = "[" * 100_000


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**400, -(2**63), 2**63]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\x1b[2J", "=1+1", "\ud800", "npc", "0" * 300]),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=3), SCALARS, max_size=3),
    st.sampled_from([5, 40, 200, 900]).map(nested),
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return a_study(tmp_path_factory.mktemp("sound") / "study")


def location(study: Study, name: str) -> Path:
    if name == "sweep":
        return next((study.folder / "sweeps").iterdir())
    return study.folder_of(a_run()) / name


def paths_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from paths_in(inner, (*path, key))


def mutated(data: Any, draw: st.DataObject) -> Any:
    """The data with one value anywhere replaced by another, or removed."""
    path = draw.draw(st.sampled_from(list(paths_in(data))))
    if not path:
        return draw.draw(VALUES)
    data = copy.deepcopy(data)
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    if draw.draw(st.booleans()) and isinstance(owner, dict):
        del owner[path[-1]]
    else:
        owner[path[-1]] = draw.draw(VALUES)
    return data


def attacked(sound: Study, folder: Path, name: str, draw: st.DataObject) -> Study:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound.folder, folder)
    study = Study(folder)
    path = location(study, name)
    data = json.loads(path.read_text())
    data.pop("digest", None)  # else every change is noticed by it
    path.write_text(json.dumps(mutated(data, draw)))
    return study


def check_warnings(caught: list[warnings.WarningMessage], path: Path) -> None:
    for each in caught:
        assert str(path.parent) in str(each.message)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_any_value_anywhere(sound: Study, tmp_path: Path, name: str, draw: st.DataObject) -> None:
    study = attacked(sound, tmp_path / "study", name, draw)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entries = study.entries
        terminal.runs(entries)
        for comparison in compare(entries):
            with Console(quiet=True) as console:
                console.print(terminal.results(comparison))
        exports.write(tmp_path, entries)
        sweep.read(study.folder)
    check_warnings(caught, location(study, name))
    assert {a_run(seed=1).id, a_run("ewc").id} <= {entry.run.id for entry in entries}


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(draw=st.data())
def test_any_value_in_a_report(sound: Study, tmp_path: Path, name: str, draw: st.DataObject) -> None:
    study = attacked(sound, tmp_path / "study", name, draw)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(drawing, "_render", lambda *_, **__: b"<svg/>")  # figures are laid out, which is most of the risk
        text = page.write(study).read_text()
    check_warnings(caught, location(study, name))
    assert a_run("ewc").id in text


@pytest.mark.parametrize("content", ['{"a":' + DEEP, "", '{"digest": 3}'])
def test_files_that_are_hardly_json(sound: Study, tmp_path: Path, content: str) -> None:
    folder = tmp_path / "study"
    shutil.copytree(sound.folder, folder)
    study = Study(folder)
    for name in FILES:
        location(study, name).write_text(content)
    for command in ("list", "report"):
        done = holdfast(command, folder)
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        assert all(line.startswith("holdfast: ") for line in done.stderr.splitlines())
        assert str(location(study, "run.json")) in done.stderr
    assert str(location(study, "sweep")) in done.stderr
    assert a_run("ewc").id in (folder / "index.html").read_text()
