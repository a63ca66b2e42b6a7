"""The results that are kept here: whole, small, and what the documentation says they are."""

import re
import runpy
import shlex
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.models import paper_cnn
from holdfast.study import paper
from holdfast.study.records import Entry, Run, Study, read_json
from holdfast.study.tables import Row, compare
from test_sources import records

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCUMENT = ROOT / "docs" / "reproduction.md"
STUDIES = sorted(path.parent for path in RESULTS.glob("*/runs"))
SEARCHES = sorted(path.parent for path in RESULTS.glob("*/sweeps"))
NAMES = {"fine-tuning": "finetune"}

pytestmark = pytest.mark.skipif(not STUDIES, reason="the results are not part of what is here")


def rows(study: str) -> dict[str, Row]:
    (comparison,) = compare(Study(RESULTS / study).entries)
    return {row.name: row for row in comparison.rows}


def table(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading of the document, but for its head."""
    text = DOCUMENT.read_text().split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_every_run_is_whole(folder: Path) -> None:
    entries = Study(folder).entries
    assert entries
    for entry in entries:
        assert entry.state == "finished"
        assert entry.record is not None
        assert len(entry.record.matrix) == entry.run.tasks
        assert set(entry.record.versions) == {"holdfast", "torch", "python"}
        assert entry.record.device
        assert sum(entry.record.seconds.values()) > 0
        assert {"final", "learnt", "forgetting"} <= set(entry.record.summary or {})


def test_there_are_neither_weights_nor_data() -> None:
    kinds = {".json", ".jsonl", ".csv", ".html", ".md", ".png", ".pdf", ".py", ".pyc"}
    for path in RESULTS.rglob("*"):
        assert path.is_dir() or path.suffix in kinds, path
        assert path.stat().st_size < 2**20, path


def test_settings_were_not_chosen_on_test_images() -> None:
    searches = [read_json(path) for folder in SEARCHES for path in (folder / "sweeps").glob("*.json")]
    assert searches
    assert {search["plan"]["judged_on"] for search in searches} == {"validation"}


def test_the_chosen_settings_are_those_that_the_search_found() -> None:
    chosen = rows("icifar100")
    for path in (RESULTS / "icifar100-search" / "sweeps").glob("*.json"):
        found = read_json(path)
        best = max(found["curve"], key=lambda tried: tried["final"]["mean"])["value"]
        assert chosen[found["plan"]["method"]].entries[0].run.plan["settings"][found["over"]] == best


def test_the_table_beside_the_paper_s() -> None:
    found, lines = rows("icifar100"), iter(table("Table 1: iCIFAR100"))
    left = {*found} - {"npc off"}
    for name, *cells in lines:
        row = found[NAMES.get(name, name.lower())]
        left.remove(row.name)
        final = row.metric("final")
        assert final is not None
        ours = [each.percent() for each in (*row.tasks, final)]
        pairs = paper.beside("icifar100", row)
        if not pairs:
            assert cells == ours
            continue
        assert cells == [("*" if pair.differ else "") + here for pair, here in zip(pairs, ours, strict=True)]
        assert next(lines) == ["paper", *(pair.theirs.percent() for pair in pairs)]
    assert not left


def test_the_table_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text().split("## The paper, done again")[1].splitlines()
    head, _, here, there, *_ = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line)
    found = rows("icifar100")
    for name, ours, theirs in zip(head[1:], here[1:], there[1:], strict=True):
        final = found[NAMES.get(name, name.lower())].metric("final")
        printed = paper.table1("icifar100", name.lower())
        assert final is not None
        assert ours == final.percent()
        assert theirs == (printed.average.percent() if printed else "")


def test_cpc_at_the_paper_s_threshold() -> None:
    (row,) = rows("icifar100-paper").values()
    assert row.entries[0].run.plan["settings"]["beta"] == 0.7
    final = row.metric("final")
    assert final is not None
    assert f"CPC reaches *{final.percent()}" in DOCUMENT.read_text()


def test_the_searches_at_full_length() -> None:
    found = {}
    for path in (RESULTS / "icifar100-search" / "sweeps").glob("*.json"):
        search = read_json(path)
        curve = ", ".join(f"{tried['value']:g}: {100 * tried['final']['mean']:.1f}" for tried in search["curve"])
        found[search["plan"]["method"]] = curve
    lines = {name.split(",")[0].lower(): cells for name, *cells in table("Where the settings come from")}
    assert {name: curve for name, (curve, _, _) in lines.items()} == found
    for name, (_, chosen, printed) in lines.items():
        over = "beta" if name in ("npc", "cpc") else "strength"
        assert float(chosen) == rows("icifar100")[name].entries[0].run.plan["settings"][over]
        assert printed == f"{paper.SETTINGS['icifar100'][name].get(over, 'not given')}".removesuffix(".0")


def neurons_of(name: str) -> Iterator[dict[str, Any]]:
    for entry in rows("icifar100")[name].entries:
        yield read_json(entry.folder / "neurons.json")


def test_how_many_neurons_were_frozen() -> None:
    lines, runs = table("What NPC does there"), list(neurons_of("npc"))
    assert [layer for layer, *_ in lines] == ["conv1", "conv2", "conv3", "hidden"]
    for layer, *cells in lines:
        for task, cell in enumerate(cells):
            shares = []
            for found in runs:
                last = max((point for point in found["importance"] if point["task"] == task), key=lambda p: p["step"])
                shares.append(np.mean(np.array(last["layers"][layer]) >= 0.7))
            assert cell == f"{100 * fmean(shares):.0f}%"


def test_figure_3() -> None:
    found = {}
    for name in ("npc", "npc off"):
        changes = [neurons["change"] for neurons in neurons_of(name)]
        for measure, digits in (("absolute", ".3f"), ("relative", ".2f")):
            groups = [
                fmean(change[measure]["means"][group] for change in changes) for group in ("all", "most", "least")
            ]
            found[name, measure] = [f"{value:{digits}}" if value < 1 else f"{value:.1f}" for value in groups]
    printed, *lines = (cells for _, *cells in table("Figure 3"))
    assert printed == ["0.383", "0.094", "0.667"]
    order = [("npc", "absolute"), ("npc off", "absolute"), ("npc", "relative"), ("npc off", "relative")]
    assert lines == [found[key] for key in order]


@pytest.mark.parametrize("kind", ["average", "importance"])
def test_the_figures_in_the_document(kind: str) -> None:
    shown = ROOT / "docs" / "images" / f"icifar100-{kind}.png"
    assert shown.read_bytes() == (RESULTS / "icifar100" / "figures" / f"{kind}-icifar100-5-test.png").read_bytes()
    assert f"images/{shown.name}" in DOCUMENT.read_text()


def test_numbers_in_the_text() -> None:
    found, text = rows("icifar100"), " ".join(DOCUMENT.read_text().split())
    final = {name: row.metric("final") for name, row in found.items()}
    forgotten = {name: 100 * row.metric("forgetting").mean for name, row in found.items()}
    learnt = {
        name: fmean(record.matrix[task][task] for record in found[name].records for task in range(1, 5))
        for name in ("npc", "finetune")
    }
    for rival in ("si", "ewc"):
        lead = final["npc"].mean - final[rival].mean
        assert f"{100 * lead:.1f} ({100 * np.hypot(final['npc'].error, final[rival].error):.1f})" in text
    others = [forgotten[name] for name in ("si", "cpc", "ssl", "mas")]
    assert f"({forgotten['npc']:.1f} points; they {min(others):.1f} to {max(others):.1f})" in text
    percent = {name: f"{100 * value:.0f}%" for name, value in learnt.items()}
    assert f"{percent['npc']} right after learning, fine-tuning {percent['finetune']}" in text
    silent = {name: [neurons["change"]["silent"] for neurons in neurons_of(name)] for name in ("npc", "npc off")}
    kept, free = silent["npc"], silent["npc off"]
    assert f"{min(kept)} to {max(kept)} of the 512 neurons hardly vary with NPC, {min(free)} to {max(free)}" in text
    assert f"after {np.log(0.3) / np.log(1 - 5e-4):,.0f} steps" in text


def commands() -> list[list[str]]:
    """Those of the README of the results, but for the search that was cut off."""
    blocks = re.findall(r"```console\n(.*?)```", (RESULTS / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("holdfast") and "search-short" not in line]


def test_the_commands_make_these_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, set[str]] = {}

    def record(study: Study, runs: list[Run], *_: Any, **__: Any) -> list[Entry]:
        made.setdefault(study.folder.name, set()).update(run.id for run in runs)
        return [Study(RESULTS / study.folder.name).look(run) for run in runs]

    monkeypatch.setattr("holdfast.study.running.on_gpu", lambda how: True)
    monkeypatch.setattr("holdfast.cli._execute", record)
    monkeypatch.setattr("holdfast.cli._carry_out", record)
    for command in commands():
        at = command.index("--out") + 1
        command[at] = str(tmp_path / Path(command[at]).name)
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert {*made} == {"icifar100", "icifar100-paper", "icifar100-search"}
    for study, runs in made.items():
        assert runs == {entry.run.id for entry in Study(RESULTS / study).entries}
        for path in (tmp_path / study).glob("sweeps/*.json"):
            assert (RESULTS / study / "sweeps" / path.name).exists()


# ---- what made them, scaled down ----


def small_cifar(folder: Path) -> None:
    """Fifty classes of five images for training and one for the test."""
    rng = np.random.default_rng(0)
    (folder / "cifar-100-binary").mkdir(parents=True)
    for part, each in (("train", 5), ("test", 1)):
        labels = np.repeat(np.arange(50), each)
        pixels = rng.integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
        (folder / "cifar-100-binary" / f"{part}.bin").write_bytes(records(pixels, labels))
    names = "\n".join(f"class {number}" for number in range(50))
    (folder / "cifar-100-binary" / "fine_label_names.txt").write_text(names)


def test_the_paper_s_experiment_runs_scaled_down(tmp_path: Path) -> None:
    small_cifar(tmp_path)
    options = ["--epochs", "0.5", "--width", "0.05", "--seeds", "2", "--curve", "1", "--jobs", "1", "--device", "cpu"]
    where = ["--data", str(tmp_path), "--out", str(tmp_path / "study")]
    done = CliRunner().invoke(app, ["reproduce", "icifar100", "--set", "si.strength=0.2", *options, *where])
    assert done.exit_code == 0, done.output
    (comparison,) = compare(Study(tmp_path / "study").entries)
    assert sorted(row.name for row in comparison.rows) == sorted(paper.METHODS)
    assert all(len(row.entries) == 2 for row in comparison.rows)
    assert {row.name for row in comparison.rows if paper.beside("icifar100", row)} == {*paper.METHODS} - {"finetune"}


def test_the_variations_run_scaled_down(tmp_path: Path) -> None:
    small_cifar(tmp_path)
    names = ["npc, black border", "npc, seen before the norm", "npc, dropout before the hidden layer"]
    options = ["--seeds", "1", "--epochs", "0.5", "--width", "0.05", "--data", str(tmp_path), "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, RESULTS / "variations.py", *names, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("%") == 3
    made = [read_json(path) for path in tmp_path.glob("*.json")]
    assert sorted(record["name"] for record in made) == sorted(names)
    assert all(len(record["matrix"]) == 5 for record in made)


def test_where_the_dropout_goes_in_the_variations() -> None:
    script = runpy.run_path(str(RESULTS / "variations.py"))
    modules = OrderedDict(paper_cnn(classes=10, width=0.05).named_children())
    script["with_early_dropout"](modules)
    assert list(modules)[-4:] == ["dropout", "hidden", "relu", "head"]
    script["without_dropout"](modules)
    assert list(modules)[-4:] == ["flatten", "hidden", "relu", "head"]
