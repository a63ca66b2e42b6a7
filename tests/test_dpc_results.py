"""The numbers in docs/dpc.md are those of the committed runs."""

import json
import re
from math import hypot
from statistics import mean

import pytest

from holdfast.runs.record import Record
from holdfast.study.store import Study
from holdfast.study.tables import Row
from test_results import RESULTS, ROOT, STUDIES, rows, tried

pytestmark = pytest.mark.skipif(not STUDIES, reason="the results are not part of this copy")

PARAMETERS = 1_519_282
"""Of the paper's network with the 50 outputs of five tasks."""
TEXT = (ROOT / "docs" / "dpc.md").read_text()
PROSE = " ".join(TEXT.split())


def table(number: int) -> list[list[str]]:
    found = re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE)[number]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in found.splitlines()[2:]]


def all_rows() -> dict[str, Row]:
    return {**rows("icifar100"), **rows("icifar100-dpc")}


def share(record: Record) -> float:
    """The memory of the method, relative to the parameters."""
    return sum(record.memory.values()) / 4 / PARAMETERS


def test_the_results() -> None:
    for label, *cells in table(1):
        row = all_rows()[label.lower()]
        final = row.metric("final")
        assert final is not None
        assert cells == [each.percent() for each in (*row.tasks, final)]


@pytest.mark.parametrize(
    ("better", "worse", "sentence"),
    [
        ("dpc", "npc", "DPC is {} points above NPC"),
        ("dpc", "kfac", "is level with DPC**, {} below"),
        ("lwf", "dpc", "LwF alone is {} above DPC"),
        ("lwf+dpc", "lwf", "{} above LwF, and forgets"),
        ("joint", "lwf+dpc", "is {} above it"),
    ],
)
def test_the_differences(better: str, worse: str, sentence: str) -> None:
    a, b = (all_rows()[name].metric("final") for name in (better, worse))
    assert a is not None
    assert b is not None
    difference = f"{100 * (a.mean - b.mean):.1f} ({100 * hypot(a.error or 0, b.error or 0):.1f})"
    assert sentence.format(difference) in PROSE


def test_forgetting() -> None:
    forgotten = {name: f"{100 * row.metric('forgetting').mean:.1f}" for name, row in all_rows().items()}
    assert f"It forgets less ({forgotten['dpc']} points; NPC {forgotten['npc']})" in PROSE
    assert f"It forgets {forgotten['kfac']} points and learns new tasks less well" in PROSE
    assert f"it forgets {forgotten['lwf']} points" in PROSE
    assert all_rows()["kfac"].metric("learned").mean < all_rows()["dpc"].metric("learned").mean
    assert f"Its factors take {share(all_rows()['kfac'].records[0]):.1f} times the parameters" in PROSE
    assert f"Diagonal EWC has {all_rows()['ewc'].metric('final').percent()}" in PROSE
    assert f"forgets {forgotten['lwf+dpc']} points" in PROSE


def test_the_rank() -> None:
    validation = {
        entry.run.plan.settings.get("rank"): entry.record
        for entry in Study(RESULTS / "icifar100-dpc-search").entries
        if entry.run.plan.method == "dpc" and entry.run.plan.settings["beta"] == 0.4
    }
    shown = {None if rank == "all" else int(rank): cells for rank, *cells in table(0)}
    assert shown.keys() == validation.keys()
    for rank, (memory, average) in shown.items():
        record = validation[rank]
        assert record is not None
        assert record.summary is not None
        assert average == f"{100 * record.summary['final']:.2f}"
        assert memory == f"{share(record):.2f}"
    ranked, full = (all_rows()[name].metric("final") for name in ("dpc rank=128", "dpc"))
    assert f"{ranked.percent()} on the test images against {full.percent()}" in PROSE


def test_the_search() -> None:
    points = list(tried("icifar100-dpc-search"))
    for label, name, cell in table(2):
        method = label.split(",")[0].lower()
        prefix = "dpc." if "+" in method else ""
        fixed = {part.split()[0]: float(part.split()[1]) for part in label.split(", ")[1:]}
        fixed = {("lwf.weight" if key == "weight" else prefix + key): value for key, value in fixed.items()}
        found = {
            settings[prefix + name]: mean
            for each, _, mean, settings in points
            if each == method and {**settings, **fixed} == settings
        }
        assert cell == ", ".join(f"{value:g}: {100 * found[value]:.2f}" for value in sorted(found))


def test_the_capacity() -> None:
    first = {name: [record.capacity[0] for record in all_rows()[name].records] for name in ("dpc", "lwf+dpc")}
    larger = [100 * record[layer] for record in first["dpc"] for layer in ("conv2", "conv3", "hidden")]
    assert f"one task takes {min(larger):.0f}% to {max(larger):.0f}%" in PROSE
    assert all(0.38 < value < 0.6 for record in first["lwf+dpc"] for value in record.values())


def test_the_table_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text().split("## Better, if tasks have ends")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    names, numbers = ([cell.strip() for cell in lines[i].strip("|").split("|")] for i in (0, 2))
    known = {"fine-tuning": "finetune", "DPC, rank=128": "dpc rank=128", "LwF around DPC": "lwf+dpc"}
    known |= {"NPC": "npc", "LwF": "lwf", "all data at once": "joint"}
    for name, number in zip(names, numbers, strict=True):
        assert all_rows()[known[name]].metric("final").percent() == number
    record = all_rows()["dpc rank=128"].records[0]
    assert f"needs {share(record):.2f} numbers per parameter" in " ".join(text.split())


# ---- streams that nothing was tuned on ----

UNTUNED = ("fine-tuning", "NPC", "EWC", "KFAC", "LwF", "DPC", "DPC without boundaries", "LwF+DPC", "joint")


def untuned() -> dict[str, dict[str, Row]]:
    """The rows by stream and label."""
    found: dict[str, dict[str, Row]] = {}
    labels = {label.lower(): label for label in UNTUNED} | {"finetune": "fine-tuning"}
    for stream in ("digits", "pmnist", "rmnist"):
        for row in rows(stream).values():
            run = row.entries[0].run
            found.setdefault(stream, {})[labels[run.name if run.name in labels else run.plan.method]] = row
    return found


def test_streams_that_nothing_was_tuned_on() -> None:
    shown = {label: cells for label, *cells in table(6)}
    assert list(shown) == list(UNTUNED)
    for number, (stream, found) in enumerate(untuned().items()):
        assert found.keys() == set(UNTUNED), stream
        for label, row in found.items():
            assert shown[label][number] == row.metric("final").percent(), (stream, label)
            assert len(row.entries) == 3


def test_their_settings_are_those_of_icifar100() -> None:
    """But for rates, which are 1.46 divided by the steps of a task, and bounds of time and memory."""
    chosen = {name: row.entries[0].run.plan for name, row in all_rows().items()}
    for stream, found in untuned().items():
        for label, row in found.items():
            plan = row.entries[0].run.plan
            ours, theirs = plan.settings, chosen[plan.method].settings
            for name in {*ours, *theirs}:
                part = name.rpartition(".")[2]
                if part == "rate":
                    assert ours[name] == pytest.approx(1.46 / row.records[0].steps[0], rel=0.05), (stream, label)
                elif part not in ("samples", "rank", "every"):
                    assert ours.get(name) == theirs.get(name), (stream, label, name)
            assert plan.lr == chosen[plan.method].lr


def test_kappa_does_not_carry_over() -> None:
    found = {settings["kappa"]: final for method, _, final, settings in tried("pmnist-search") if method == "dpc"}
    assert f"kappa 100 {100 * found[100]:.2f}, 10 {100 * found[10]:.2f}, 1 {100 * found[1]:.2f}" in PROSE
    taken = [100 * value for record in untuned()["pmnist"]["DPC"].records for value in record.capacity[0].values()]
    assert f"the first task takes {min(taken):.0f}% to {max(taken):.0f}% of the directions" in PROSE
    lost = {}
    for stream, found_rows in untuned().items():
        told, untold = (found_rows[name].metric("final").mean for name in ("DPC", "DPC without boundaries"))
        lost[stream] = f"{100 * (told - untold):.1f}"
    assert f"loses** {lost['pmnist']} points on permuted and {lost['rmnist']} on rotated MNIST" in PROSE
    assert float(lost["digits"]) <= 0


def test_compact() -> None:
    records = {}
    for entry in Study(RESULTS / "pmnist-search").entries:
        settings = entry.run.plan.settings
        if settings.get("dpc.kappa", settings.get("kappa")) == 10:
            records[settings.get("compact.weight", 0.0)] = entry.record
    for label, taken, last, forgetting, average in table(7):
        record = records[0.0 if label == "none" else float(label)]
        assert taken == ", ".join(f"{100 * value:.0f}%" for value in record.capacity[-1].values())
        numbers = record.matrix[-1][-1], record.summary["forgetting"], record.summary["final"]
        assert [last, forgetting, average] == [f"{100 * value:.2f}" for value in numbers]


def test_other_forms() -> None:
    found = {
        "DPC rank=128": "dpc rank=128",
        "without boundaries": "dpc every=100",
        "input side": "dpc inputs",
        "LwF+DPC": "lwf+dpc weight=0.2",
    }
    for label, average, learned, forgetting in table(3):
        if label.startswith("product"):
            continue
        (row,) = (rows("icifar100-dpc")[name] for start, name in found.items() if label.startswith(start))
        assert average == row.metric("final").percent()
        assert [learned, forgetting] == [f"{100 * row.metric(name).mean:.2f}" for name in ("learned", "forgetting")]


def test_ten_tasks() -> None:
    for label, average, learned, forgetting, first, last in table(4):
        row = rows("icifar100-ten")[label.split(",")[0].lower().replace("fine-tuning", "finetune")]
        means = [100 * row.metric(name).mean for name in ("learned", "forgetting")]
        assert [learned, forgetting] == [f"{value:.1f}" for value in means]
        assert float(average.split()[0]) == pytest.approx(100 * row.metric("final").mean, abs=0.0501)
        for given, task in ((first, row.tasks[0]), (last, row.tasks[-1])):
            assert float(given) == pytest.approx(100 * task.mean, abs=0.0501)


def test_the_ablations() -> None:
    records = [json.loads(path.read_text()) for path in (RESULTS / "ablations").glob("*.json")]
    finals = [f"{100 * mean(record['matrix'][-1]):.2f}" for record in records]
    for label, averages, *_ in table(5):
        assert set(re.findall(r"\d+\.\d+", averages)) <= set(finals), label
