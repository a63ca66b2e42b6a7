"""The results that are kept here: whole, small, and what the documentation says they are."""

import re
import runpy
import shlex
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.models import paper_cnn
from holdfast.runs.record import Record
from holdfast.study import paper
from holdfast.study.store import Entry, Run, Study, read_json
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


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The cells of a table under a heading of the document, but for its head."""
    text = DOCUMENT.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    whole = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)[number]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in whole.splitlines()[2:]]


def prose() -> str:
    """The document with its lines joined."""
    return " ".join(DOCUMENT.read_text().split())


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_every_run_is_whole(folder: Path) -> None:
    entries = Study(folder).entries
    assert entries
    for entry in entries:
        assert entry.state == "finished"
        assert entry.record is not None
        assert len(entry.record.matrix) == (entry.run.tasks or len(entry.record.tasks))
        assert set(entry.record.versions) == {"holdfast", "torch", "python"}
        assert entry.record.device
        assert sum(entry.record.seconds.values()) > 0
        assert {"final", "learned", "forgetting"} <= set(entry.record.summary or {})


def test_there_are_neither_weights_nor_data() -> None:
    kinds = {".json", ".jsonl", ".csv", ".html", ".md", ".png", ".pdf", ".py", ".pyc", ".toml"}
    for path in RESULTS.rglob("*"):
        assert path.is_dir() or path.suffix in kinds, path
        assert path.stat().st_size < 2**20, path


def test_settings_were_not_chosen_on_test_images() -> None:
    searches = [read_json(path) for folder in SEARCHES for path in (folder / "sweeps").glob("*.json")]
    assert searches
    assert {search["plan"]["evaluate_on"] for search in searches} == {"validation"}


def settings_of(study: str, method: str) -> dict[str, Any]:
    settings: dict[str, Any] = rows(study)[method].entries[0].run.plan.settings
    return settings


def tried(study: str) -> Iterator[tuple[str, int, float, dict[str, Any]]]:
    """The method, the number of seeds, what they gave on validation images and the settings, of all points."""
    for path in (RESULTS / study / "sweeps").glob("*.json"):
        found = read_json(path)
        for point in found["curve"]:
            settings = {**found["plan"]["settings"], found["over"]: point["value"]}
            yield found["plan"]["method"], found["seeds"], point["final"]["mean"], settings


@pytest.mark.parametrize(("stream", "shorter"), [("icifar100", 1), ("imnist", 3)])
def test_the_chosen_settings_are_those_that_the_search_found(stream: str, shorter: float) -> None:
    points = list(tried(f"{stream}-search"))
    for method in {method for method, *_ in points}:
        *_, best = max((point for point in points if point[0] == method), key=lambda point: point[1:3])
        if "rate" in best:
            best["rate"] /= shorter
        assert settings_of(stream, method) == pytest.approx(best)


@pytest.mark.parametrize(("stream", "name"), [("icifar100", "iCIFAR100"), ("imnist", "iMNIST")])
def test_the_table_beside_the_paper_s(stream: str, name: str) -> None:
    found = {row: row_ for row, row_ in rows(stream).items() if row != paper.OFF}
    lines = iter(table(f"Table 1: {name}"))
    for label, *cells in lines:
        row = found.pop(NAMES.get(label, label.lower()))
        final = row.metric("final")
        assert final is not None
        ours = [each.percent() for each in (*row.tasks, final)]
        pairs = paper.beside(stream, row)
        if not pairs:
            assert cells == ours
            continue
        assert cells == [("*" if pair.differ else "") + here for pair, here in zip(pairs, ours, strict=True)]
        assert next(lines) == ["paper", *(pair.theirs.percent() for pair in pairs)]
    assert not found


def test_the_search_for_lwf_around_npc() -> None:
    found = {
        (settings["lwf.weight"], settings["npc.beta"]): f"{100 * mean:.2f}"
        for _, _, mean, settings in tried("icifar100-combined-search")
    }
    shown = {
        (float(weight), beta): cell
        for weight, *cells in table("LwF around NPC")
        for beta, cell in zip((0.7, 1, 1.5, 2, 3, 5), cells, strict=True)
        if cell != "–"  # noqa: RUF001
    }
    assert shown == found
    best = max(found, key=lambda pair: float(found[pair]))
    assert best == (0.1, 2)
    assert settings_of("icifar100-combined", "lwf+npc") == {
        "npc.beta": 2.0, "npc.rate": 5e-4, "lwf.weight": 0.1
    }  # fmt: skip


def test_lwf_around_npc_beside_its_parts() -> None:
    studies = rows("icifar100") | rows("icifar100-combined")
    for label, *cells in table("LwF around NPC", 1):
        row = studies[label.lower()]
        final = row.metric("final")
        assert final is not None
        assert cells == [each.percent() for each in (*row.tasks, final)]
    records = studies["lwf+npc"].records
    seeds = [f"{each:.1f}" for each in averages(records)]
    assert f"Its seeds are {seeds[0]}, {seeds[1]} and {seeds[2]}." in prose()
    thirds = [f"{100 * record.matrix[2][2]:.1f}%" for record in records]
    assert f"the third task ended at {thirds[0]}, with the others at {thirds[1]} and {thirds[2]}" in prose()


def test_the_table_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text().split("## Reproducing the paper")[1].split("\n## ")[0].splitlines()
    _, _, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    assert len(cells) == 8
    streams = {stream: rows(stream) for stream in ("icifar100", "imnist")}
    for name, *numbers in cells:
        for (stream, found), ours, theirs in zip(streams.items(), numbers[::2], numbers[1::2], strict=True):
            final = found[NAMES.get(name, name.lower())].metric("final")
            printed = paper.table1(stream, name.lower())
            assert final is not None
            assert ours == final.percent()
            assert theirs == (printed.average.percent() if printed else "")


@pytest.mark.parametrize("study", ["icifar100-paper", "imnist-paper"])
def test_at_the_paper_s_own_settings(study: str) -> None:
    stream = study.removesuffix("-paper")
    for name, row in rows(study).items():
        assert settings_of(study, name) == paper.SETTINGS[stream][name]
        (*_, average) = paper.beside(stream, row)
        shown = f"{name.upper()} reaches {'*' if average.differ else ''}{average.ours.percent()}"
        assert shown in prose()


@pytest.mark.parametrize(("stream", "digits"), [("icifar100", 1), ("imnist", 2)])
def test_the_searches(stream: str, digits: int) -> None:
    found = {}
    for path in (RESULTS / f"{stream}-search" / "sweeps").glob("*.json"):
        search = read_json(path)
        curve = ", ".join(f"{point['value']:g}: {100 * point['final']['mean']:.{digits}f}" for point in search["curve"])
        found[search["plan"]["method"], search["over"], search["seeds"]] = curve
    lines = {}
    for label, *cells in table("How the settings were chosen", {"icifar100": 0, "imnist": 1}[stream]):
        method, over, *seeds = label.split(", ")
        lines[method.lower(), over.split()[-1], int(seeds[0].removesuffix(" seeds")) if seeds else 1] = cells
    assert {key: curve for key, (curve, _, _) in lines.items()} == found
    for (method, over, _), (_, chosen, printed) in lines.items():
        assert float(chosen.split()[0]) == settings_of(stream, method)[over]
        assert printed == f"{paper.SETTINGS[stream].get(method, {}).get(over, 'not given')}".removesuffix(".0")


def averages(records: Iterable[Record]) -> list[float]:
    return [100 * record.summary["final"] for record in records if record.summary]


def shown(values: Sequence[float]) -> list[str]:
    """Of a line in a table: each value, and their mean."""
    return [", ".join(f"{value:.1f}" for value in values), mean_of(values)]


def mean_of(values: Sequence[float]) -> str:
    error = f"({stdev(values) / len(values) ** 0.5:.2f})" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{error}"


def variations() -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for path in sorted((RESULTS / "variations").glob("*.json")):
        record = read_json(path)
        found.setdefault(record.pop("name"), []).append(Record.from_dict(record))
    return found


def test_the_variations() -> None:
    heading, found, text = "Ablations", variations(), prose()
    lines = {name: cells for name, *cells in table(heading)}
    assert lines.pop("baseline") == shown(averages(rows("icifar100")["npc"].records))
    assert all(cells == shown(averages(found[f"npc, {name}"])) for name, cells in lines.items())
    told = {f"npc, {name}" for name in lines}
    precisions = {name: cells for name, *cells in table(heading, 1)}
    assert precisions == {name: shown(averages(rows(f"icifar100-{name}")["npc"].records)) for name in precisions}
    as_it_is = rows("icifar100") | rows("icifar100-paper") | {"ewc": rows("icifar100-ewc")["ewc (strength=50)"]}
    for label, *cells in table(heading, 2):
        name = NAMES.get(label, label.lower())
        told.add(f"{name}, black border")
        printed = paper.table1("icifar100", name)
        assert cells == [
            mean_of(averages(as_it_is[name].records)),
            mean_of(averages(found[f"{name}, black border"])),
            printed.average.percent() if printed else "not given",
        ]
    stiff = {}
    for label, *cells in table(heading, 3):
        method, _, what = label.partition(", ")
        told.add(name := f"{method.lower()}, {what}")
        first = found[name][0]
        if first.failure is None:
            assert cells == shown(averages(found[name]))
            continue
        assert first.failure["task"] == 1
        assert cells == [f"diverged after {first.failure['step']} steps of the second task", "none"]
        stiffness = re.search(r"importance is ([\d.]+) in 'conv1.weight'", first.failure["why"])
        assert stiffness
        stiff[method] = stiffness[1]
    ewc, mas, si = (stiff[method] for method in ("EWC", "MAS", "SI"))
    assert f"(the product is {ewc}, {mas} and {si} for a weight of the first convolution)" in text
    assert told == {*found}
    finals = {name: averages(records) for name, records in found.items()}
    npc, black = fmean(averages(as_it_is["npc"].records)), fmean(finals["npc, black border"])
    assert f"costs NPC {npc - black:.1f} points" in text
    assert f"is worth {npc - fmean(finals['npc, no crop']):.1f} points" in text
    assert f"and {npc - fmean(finals['npc, tapped before the norm']):.1f} points are lost in the end" in text
    at_0_7, together = (fmean(averages(as_it_is["cpc"].records)), finals["cpc, measured together"])
    border, slower = (at_0_7 - fmean(finals[f"cpc, {what}"]) for what in ("black border", "largest rate 0.05"))
    assert f"a black border explains {border:.1f} points" in text
    assert f"a maximum rate of 0.05 explains {slower:.1f}." in text
    assert f"it reaches {mean_of(together)} at the paper's threshold: {npc - fmean(together):.1f} (" in text
    assert f"this choice is worth {fmean(together) - at_0_7:.1f} points" in text
    at_300 = averages(rows("icifar100")["ewc"].records)
    strengths = [averages(rows("icifar100-ewc")[f"ewc (strength={value})"].records) for value in (50, 1000)]
    given = [mean_of(values) for values in (strengths[0], at_300, strengths[1])]
    assert f"gave EWC {given[0]}, {given[1]} and {given[2]}" in text


def test_where_neurons_are_seen_in_the_variations() -> None:
    def learned(records: Iterable[Record]) -> str:
        means = 100 * np.mean([[record.matrix[task][task] for task in range(1, 5)] for record in records], axis=0)
        return f"{means.min():.0f} to {means.max():.0f}%"

    before, after = learned(variations()["npc, tapped before the norm"]), learned(rows("icifar100")["npc"].records)
    assert f"tasks 2 to 5 at {before} right after learning instead of {after}" in prose()


def neurons_of(name: str) -> Iterator[dict[str, Any]]:
    for entry in rows("icifar100")[name].entries:
        yield read_json(entry.folder / "neurons.json")


def test_how_many_neurons_were_frozen() -> None:
    lines, runs = table("Frozen neurons"), list(neurons_of("npc"))
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
        changes = [neurons["drift"] for neurons in neurons_of(name)]
        for measure, digits in (("absolute", ".3f"), ("relative", ".2f")):
            groups = [
                fmean(change[measure]["means"][group] for change in changes) for group in ("all", "most", "least")
            ]
            found[name, measure] = [f"{value:{digits}}" if value < 1 else f"{value:.1f}" for value in groups]
    printed, *lines = (cells for _, *cells in table("Figure 3"))
    assert printed == ["0.383", "0.094", "0.667"]
    order = [("npc", "absolute"), ("npc off", "absolute"), ("npc", "relative"), ("npc off", "relative")]
    assert lines == [found[key] for key in order]


@pytest.mark.parametrize(
    ("stream", "kind"), [("icifar100", "average"), ("icifar100", "importance"), ("imnist", "average")]
)
def test_the_figures_in_the_document(stream: str, kind: str) -> None:
    shown = ROOT / "docs" / "images" / f"{stream}-{kind}.png"
    assert shown.read_bytes() == (RESULTS / stream / "figures" / f"{kind}-{stream}-5-test.png").read_bytes()
    assert f"images/{shown.name}" in DOCUMENT.read_text()


def test_numbers_in_the_text() -> None:
    found, text = rows("icifar100"), prose()
    final = {name: row.metric("final") for name, row in found.items()}
    forgotten = {name: 100 * row.metric("forgetting").mean for name, row in found.items()}
    learned = {
        name: fmean(record.matrix[task][task] for record in found[name].records for task in range(1, 5))
        for name in ("npc", "ewc", "si", "ssl", "mas", "finetune")
    }
    for rival in ("cpc", "si", "ssl", "ewc", "mas"):
        lead = final["npc"].mean - final[rival].mean
        error = np.hypot(final["npc"].error, final[rival].error)
        assert f"{100 * lead:.1f} ({100 * error:.1f}) over {rival.upper()}" in text
    ahead, error = final["lwf"].mean - final["npc"].mean, np.hypot(final["npc"].error, final["lwf"].error)
    assert f"{100 * ahead:.1f} ({100 * error:.1f}) points above NPC" in text
    assert f"({forgotten['lwf']:.1f} points; NPC {forgotten['npc']:.1f})" in text
    few = ", ".join(f"{name.upper()} {forgotten[name]:.1f}" for name in ("ewc", "si", "mas"))
    assert f"({forgotten['npc']:.1f} points; {few})" in text
    percent = {name: f"{100 * value:.0f}%" for name, value in learned.items()}
    assert f"{percent['npc']} right after learning, fine-tuning {percent['finetune']}" in text
    others = ", ".join(f"{name.upper()} {percent[name]}" for name in ("ewc", "si", "ssl", "mas"))
    assert f"tasks 2 to 5; {others}; fine-tuning" in text
    silent = {name: [neurons["drift"]["silent"] for neurons in neurons_of(name)] for name in ("npc", "npc off")}
    kept, free = silent["npc"], silent["npc off"]
    assert f"{min(kept)} to {max(kept)} of the 512 neurons hardly vary with NPC, {min(free)} to {max(free)}" in text
    assert f"after {np.log(0.3) / np.log(1 - 5e-4):,.0f} steps" in text


def test_the_last_digits() -> None:
    text = prose()
    first, last = rows("imnist-paper")["npc"].tasks[0], rows("imnist")["separate"].tasks[-1]
    printed = paper.table1("imnist", "npc")
    assert printed
    assert f"{100 * printed.tasks[0].mean:.2f} there, {100 * first.mean:.2f} here at the same settings" in text
    records = [entry.record for entry in Study(RESULTS / "imnist-search").entries]
    most = max(record.matrix[-1][-1] for record in records if record)
    assert f"reaches {100 * last.mean:.2f} here, and no run of the search more than {100 * most:.2f}" in text


def falls(records: Iterable[Record]) -> str:
    """How many points of the curves of tasks lie over 0.1 below one before, of how many; and how many are ends.

    Curves that are the same count once.
    """
    curves = set()
    for record in records:
        for task in range(5):
            points = [point["accuracy"][task] for point in record.curves if point["task"] == task]
            curves.add((*points, record.matrix[task][task]))
    fallen = [at for curve in curves for at in range(1, len(curve)) if curve[at] < max(curve[:at]) - 0.1]
    return f"{len(fallen)} of {9 * len(curves):,}, {fallen.count(9)} ends"


def test_how_often_training_falls() -> None:
    text = prose()
    studies = [rows(name) for name in ("icifar100", "icifar100-ewc", "icifar100-paper")]
    of_studies = [record for study in studies for row in study.values() for record in row.records]
    every = [*of_studies, *(record for records in variations().values() for record in records if not record.failure)]
    off = [record for record in every if record.settings.get("beta") == paper.FULLY_PLASTIC]
    held = [record for record in every if record.plan["method"] in ("npc", "cpc") and record not in off]
    free = [record for record in every if record.plan["method"] not in ("npc", "cpc")]
    assert {record.plan["lr"] for record in free} == {0.05}
    assert falls(free) == "29 of 2,160, 8 ends"
    assert "29 of 2,160 points of the curves lie more than ten points below" in text
    assert "and 8 of them are ends of tasks" in text
    assert falls(held) == "0 of 1,755, 0 ends"
    assert falls(off) == "16 of 135, 5 ends"
    assert "have none in 1,755; NPC's rate of 0.1 without any limit, `npc off`, has 16 in 135" in text
    found = rows("icifar100")
    same = {tuple(record.matrix[0][0] for record in found[name].records) for name in ("mas", "si", "finetune")}
    assert [record.matrix[0][0] for record in found["separate"].records] in map(list, same)
    ((_, _, fallen),) = same
    assert fallen == 0.474
    without = {name: 50 * sum(record.summary["final"] for record in row.records[:2]) for name, row in found.items()}
    frozen = averages(variations()["ewc, frozen after the first task"])
    above = {name: fmean(averages(found[name].records)) - fmean(frozen) for name in ("npc", "ewc", "si", "mas")}
    assert f"the average is {mean_of(frozen)}. NPC is {above['npc']:.1f} points above that" in text
    ewc, si, mas = (f"{above[name]:.1f}" for name in ("ewc", "si", "mas"))
    assert f"and EWC {ewc}. SI ({si}) and MAS ({mas}) include the collapse with seed 2" in text
    there = [without[name] - fmean(frozen[:2]) for name in ("si", "mas")]
    assert f"without that seed they are {there[0]:.1f} and {there[1]:.1f} above it" in text
    order = sorted(("npc", "ewc", "si", "ssl", "cpc", "mas"), key=lambda name: -without[name])
    assert ", ".join(f"{name.upper()} {without[name]:.1f}" for name in order) in text


def commands() -> list[list[str]]:
    """Those of the README of the results, but for the search that was cut off."""
    blocks = re.findall(r"```console\n(.*?)```", (RESULTS / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [
        shlex.split(line) for line in lines if line.startswith(("holdfast", "python")) and "search-short" not in line
    ]


def test_the_commands_make_these_variations() -> None:
    made = {}
    for command in commands():
        if command[:2] == ["python", "results/variations.py"]:
            options, names = command[2:], [word for word in command[2:] if "," in word]
            seeds = int(options[options.index("--seeds") + 1]) if "--seeds" in options else 3
            made.update(dict.fromkeys(names, seeds))
    assert made == {name: len(records) for name, records in variations().items()}


def test_the_commands_make_these_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, set[str]] = {}

    def record(study: Study, runs: list[Run], *_: Any, **__: Any) -> list[Entry]:
        made.setdefault(study.folder.name, set()).update(run.id for run in runs)
        return [Study(RESULTS / study.folder.name).entry(run) for run in runs]

    monkeypatch.setattr("holdfast.study.work.Execution.on_gpu", True)
    monkeypatch.setattr("holdfast.cli._execute", record)
    monkeypatch.setattr("holdfast.cli._carry_out", record)
    monkeypatch.chdir(ROOT)
    for command in (rest for program, *rest in commands() if program == "holdfast"):
        at = command.index("--out") + 1
        command[at] = str(tmp_path / Path(command[at]).name)
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert {*made} == {folder.name for folder in STUDIES if not folder.name.endswith("-short")}
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
    assert sorted(row.name for row in comparison.rows) == sorted(paper.COMPARED)
    assert all(len(row.entries) == 2 for row in comparison.rows)
    assert {row.name for row in comparison.rows if paper.beside("icifar100", row)} == {*paper.COMPARED} - {"finetune"}


def test_the_variations_run_scaled_down(tmp_path: Path) -> None:
    small_cifar(tmp_path)
    names = ["npc, tapped before the norm", "npc, dropout before the hidden layer", "cpc, black border"]
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


def test_the_slow_head_of_the_variations() -> None:
    script = runpy.run_path(str(RESULTS / "variations.py"))
    modules = OrderedDict(head=torch.nn.Linear(3, 2))
    script["with_slow_head"](modules)
    modules["head"](torch.ones(1, 3)).sum().backward()
    assert modules["head"].weight.grad.unique().tolist() == [0.5]
