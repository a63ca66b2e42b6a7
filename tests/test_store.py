"""The folders of a study: plain files, whole or not there, and one process per run."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.runs.plan import Plan
from holdfast.runs.record import Record
from holdfast.study.store import Run, Study, StudyError, claimed, default_name, is_locked


def record(method: str = "npc", matrix: list[list[float]] | None = None, **knobs: object) -> Record:
    matrix = [[0.9, 0.5], [0.8, 0.7]] if matrix is None else matrix
    tasks = [f"task {number}" for number in range(len(matrix))]
    plan = {"method": method, "seed": 0}
    return Record("digits", tasks, plan, {}, "a CPU", {}, [10] * len(tasks), [0.5] * len(tasks), matrix, **knobs)


def run(method: str = "npc", name: str | None = None, **knobs: object) -> Run:
    return Run.of("digits", Plan(method, **knobs), name=name)  # type: ignore[arg-type]


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    study, made, out = Study(tmp_path), run(seed=3, settings={"rate": 0.1}), record(neurons={"drift": None})
    assert study.add(made).state == "waiting"
    study.finish(made, out)
    (entry,) = study.entries
    assert entry.run == made
    assert entry.state == "finished"
    assert entry.record is not None
    assert entry.record.summary == out.summary
    assert entry.record.timeline == out.timeline
    assert entry.neurons == {"drift": None}


def test_the_name_of_a_folder_says_what_it_is() -> None:
    assert run(seed=2).id.startswith("digits-npc-2-")
    assert Run.of("folder:/home/me/My Pictures", Plan("ewc")).id.startswith("folder-home-me-My-Pictures-ewc-0-")


def test_runs_that_differ_have_different_folders() -> None:
    variants = [
        run(),
        run(seed=1),
        run("ewc"),
        run(epochs=3),
        run(settings={"rate": 0.1}),
        run(evaluate_on="validation"),
    ]
    variants += [Run.of("digits", Plan("npc"), tasks=2), Run.of("imnist", Plan("npc"))]
    assert len({each.id for each in variants}) == len(variants)
    assert run(name="another name").id == run().id
    assert run(epochs=30.0, settings={}).id == run().id  # the defaults, given
    assert run("ewc", settings={"strength": 30}).id == run("ewc", settings={"strength": 30.0}).id


def test_a_folder_of_images_is_known_by_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        made = [
            Run.of(f"folder:{name}?size=16", Plan("npc")) for name in ("pets", "./pets", tmp_path / folder / "pets")
        ]
        assert len({each.id for each in made}) == 1
        assert made[0].stream == f"folder:{tmp_path / folder / 'pets'}?size=16"
        ids.add(made[0].id)
    assert len(ids) == 2


def test_a_default_that_is_added_to_plans_later_does_not_orphan_finished_runs() -> None:
    """The name of a folder depends on the given values alone, not on the defaults."""
    given = b'["digits", null, {"lr": 0.2, "method": "npc", "seed": 1.0}]'
    assert run(seed=1, lr=0.2).id == f"digits-npc-1-{hashlib.sha256(given).hexdigest()[:8]}"


def test_a_run_is_called_by_its_settings() -> None:
    assert run("ewc", settings={"strength": 3, "labels": "exact"}).name == "ewc strength=3 labels=exact"
    assert default_name("npc", {}) == "npc"


def test_another_name_is_taken_over(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.finish(study.add(run()).run, record())
    study.add(run(name="NPC, mine"))
    (entry,) = study.entries
    assert (entry.run.name, entry.state) == ("NPC, mine", "finished")
    study.add(run())
    assert [entry.run.name for entry in study.entries] == ["NPC, mine"]  # no other was given


def test_states(tmp_path: Path) -> None:
    study = Study(tmp_path)
    entry = study.add(run())
    (entry.folder / "checkpoint.pt").touch()
    assert entry.state == "interrupted"
    with claimed(entry.folder) as ours:
        assert ours
    failure = {"task": 1, "step": 7, "why": "the loss was not finite"}
    study.finish(run(), record(matrix=[], failure=failure))
    assert study.add(run()).state == "failed"
    assert not (entry.folder / "checkpoint.pt").exists()


ZERO = json.dumps(record().as_dict() | {"steps": [0, 0]})
NO_PLAN = json.dumps({"stream": "digits", "plan": {}, "tasks": None, "name": "npc"})


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"stream": "digits"}',
        '{"stream": 3, "tasks": null}',
        "\x00",
        '{"matrix": [[1]]}',
        "7",
        ZERO,
        NO_PLAN,
    ],
)
@pytest.mark.parametrize("name", ["record.json", "run.json"])
def test_a_damaged_file_is_named_and_the_others_are_listed(tmp_path: Path, name: str, content: str) -> None:
    study = Study(tmp_path)
    for each in (run(), run("ewc")):
        study.finish(study.add(each).run, record())
    damaged = study.folder_of(run()) / name
    damaged.write_text(content)
    with pytest.warns(UserWarning, match=f"{damaged.parent} is left out, and can be deleted: "):
        entries = study.entries
    assert [entry.run.id for entry in entries] == [run("ewc").id]


def test_a_damaged_record_is_not_run_over(tmp_path: Path) -> None:
    study = Study(tmp_path)
    study.finish(study.add(run()).run, record())
    (study.folder_of(run()) / "record.json").write_text("{")
    with pytest.raises(StudyError, match=r"record\.json cannot be read"):
        study.add(run())


def test_a_thousand_runs_are_read_from_a_thousand_files_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(tmp_path)
    made = [run(seed=seed) for seed in range(1000)]
    for each in made:
        folder = study.folder_of(each)
        study.finish(study.add(each).run, record(neurons={"importance": []}))
        (folder / "curve.csv").touch()
    opened: list[str] = []
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *a: (opened.append(path.name), read(path, *a))[1])
    assert len(study.entries) == 1000
    assert sorted(set(opened)) == ["record.json", "run.json"]
    assert len(opened) == 2000


def test_listing_needs_no_torch() -> None:
    code = "import sys; from holdfast.study import store, tables, terminal; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- locks ----


def _hold(folder: Path, held: "multiprocessing.Queue[bool]") -> None:
    with claimed(folder) as ours:
        held.put(ours)
        time.sleep(60)


def test_one_process_at_a_time_and_none_after_it_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held: multiprocessing.Queue[bool] = context.Queue()
    process = context.Process(target=_hold, args=(tmp_path, held))
    process.start()
    try:
        assert held.get(timeout=60)
        assert is_locked(tmp_path)
        with claimed(tmp_path) as ours:
            assert not ours
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        held.close()
    assert not is_locked(tmp_path)
    with claimed(tmp_path) as ours:
        assert ours


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    """A writer is killed again and again; whatever it was at, what is read is the whole of some version."""
    code = (
        "import itertools, pathlib, sys; from holdfast.study.store import write_json\n"
        "for n in itertools.count(): write_json(pathlib.Path(sys.argv[1]) / 'x.json', [n] * 20000)"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        while not (tmp_path / "x.json").exists():
            time.sleep(0.01)
        for _ in range(20):
            found = json.loads((tmp_path / "x.json").read_text())
            assert len(found) == 20000
            assert len(set(found)) == 1
        writer.kill()
        writer.wait()
        assert len(set(json.loads((tmp_path / "x.json").read_text()))) == 1
