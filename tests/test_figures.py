"""Figures of handmade records: they show the recorded values, and names appear verbatim."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from holdfast.runs.plan import Plan
from holdfast.runs.record import Record
from holdfast.study import figures
from holdfast.study.figures import Drawing, draw, save, style, svg
from holdfast.study.figures.neurons import GROUPS
from holdfast.study.store import Entry, Run
from holdfast.study.sweep import Sweep, Tried
from holdfast.study.tables import Comparison, Estimate, Row

NASTY = ["<script>alert('x')</script>", "_hidden & co", "$x_1$ 100%", "\\frac ünïcödé 방법", 'id="text_1" #17191d']
TASKS = ("cats", "dogs")


def record(seed: int = 0, *, shift: float = 0.0, tasks: Sequence[str] = TASKS, **changes: Any) -> Record:
    """A run of two tasks of ten steps, evaluated every five steps."""
    made = Record(
        stream="pets",
        tasks=list(tasks),
        plan={"seed": seed},
        settings={},
        device="cpu",
        versions={},
        steps=[10, 10],
        untrained=[0.5, 0.5],
        matrix=[[0.9 - shift, 0.5], [0.6 + shift, 0.8]],
        curves=[
            {"task": 0, "step": 5, "accuracy": [0.7 - shift]},
            {"task": 1, "step": 5, "accuracy": [0.8 - shift, 0.6 + shift]},
        ],
    )
    return dataclasses.replace(made, **changes)


def row(
    folder: Path,
    name: str,
    records: Sequence[Record],
    neurons: Mapping[str, Any] | None = None,
) -> Row:
    entries = []
    for number, each in enumerate(records):
        location = folder / f"{len(list(folder.iterdir()))}-{number}"
        location.mkdir()
        if neurons is not None:
            (location / "neurons.json").write_text(json.dumps(neurons))
        run = Run("pets", Plan("npc", seed=number), None, name, location.name)
        entries.append(Entry(run, location, each))
    return Row(name, entries)


def comparison(*rows: Row, tasks: tuple[str, ...] = TASKS, stream: str = "pets") -> Comparison:
    return Comparison(stream, tasks, "test", list(rows))


def distribution(top: float, *, most: Sequence[int] = (3, 1, 0, 0)) -> dict[str, Any]:
    return {
        "means": {"all": 0.5, "most": 0.125, "least": None},
        "top": top,
        "counts": {"all": [4, 2, 1, 1], "most": list(most), "least": [0, 0, 0, 0]},
    }


def neurons(**changes: Any) -> dict[str, Any]:
    """Three neurons in one layer and one in another. At a threshold of 0.5, the second freezes, then the first."""
    marks = [
        {"task": task, "step": step, "layers": {"a": values, "b": [0.1]}}
        for task, step, values in ((0, 10, [0.1, 0.5, 0.0]), (1, 5, [0.6, 0.9, 0.2]), (1, 10, [0.7, 1.5, 0.1]))
    ]
    drift = {"importance": [0.1, 0.5, 0.0], "absolute": distribution(2.0), "relative": distribution(4.0)}
    return {"importance": marks, "drift": drift} | changes


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A method with probed neurons, and methods with troublesome names."""
    folder = tmp_path_factory.mktemp("runs")
    npc = [record(settings={"beta": 0.5}), record(1, shift=0.1, settings={"beta": 0.5})]
    probed = row(folder, "npc", npc, neurons())
    others = [row(folder, name, [record(shift=0.02 * number)]) for number, name in enumerate(NASTY)]
    return comparison(probed, *others)


@pytest.fixture(scope="module")
def drawings(compared: Comparison) -> dict[str, Drawing]:
    return {drawing.key.split("-")[0]: drawing for drawing in draw(compared)}


def line(axes: Axes, name: str) -> Line2D:
    (found,) = [each for each in axes.get_lines() if each.get_label() == name]
    return found


def points(axes: Axes, name: str) -> list[tuple[float, float]]:
    xs, ys = line(axes, name).get_data()
    return [(float(x), round(float(y), 6)) for x, y in zip(xs, ys, strict=True)]


def ticks(axes: Axes, *, minor: bool = False) -> list[str]:
    """The labels of the time axis."""
    return [label.get_text() for label in axes.get_xticklabels(minor=minor)]


def texts(element: str) -> list[str]:
    root = ElementTree.fromstring(element)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


# ---- contents ----


def test_all_figures_in_reading_order(drawings: dict[str, Drawing]) -> None:
    assert list(drawings) == ["average", "tasks", "balance", "drift", "importance"]
    assert [drawing.key for drawing in drawings.values()] == [f"{kind}-pets-2-test" for kind in drawings]
    assert "1 to 2 seeds" in drawings["average"].caption


def test_average_over_time_is_the_mean_over_seeds(drawings: dict[str, Drawing]) -> None:
    (axes,) = drawings["average"].figure.axes
    first = (0.7 + 0.6) / 2, (0.9 + 0.8) / 2
    second = ((0.8 + 0.6) / 2 + (0.7 + 0.7) / 2) / 2, ((0.6 + 0.8) / 2 + (0.7 + 0.8) / 2) / 2
    assert points(axes, "npc") == [*zip((0.5, 1.0, 1.5, 2.0), (round(x, 6) for x in (*first, *second)), strict=True)]
    (band,) = axes.collections  # only one method has several seeds
    corners = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices.tolist()}
    assert {(0.5, 0.6), (0.5, 0.7), (1.0, 0.8), (1.0, 0.9)} <= corners


def test_names_stand_beside_their_lines_in_the_order_in_which_they_end(tmp_path: Path) -> None:
    ends = {"low": 0.3, "high": 0.8, "middle": 0.5}
    rows = [row(tmp_path, name, [record(matrix=[[0.9, 0.5], [end, end]])]) for name, end in ends.items()]
    (axes,) = draw(comparison(*rows))[0].figure.axes
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert sorted(heights, key=lambda name: -heights[name]) == ["high", "middle", "low"]
    for name, height in heights.items():
        (piece,) = [each for each in axes.get_lines() if each.get_xdata()[0] == 1.035 and each.get_ydata()[0] == height]
        assert piece.get_color() == line(axes, name).get_color()
        assert piece.get_marker() == line(axes, name).get_marker()


def test_a_task_is_drawn_from_when_it_begins_to_be_learned(drawings: dict[str, Drawing]) -> None:
    first, second = drawings["tasks"].figure.axes
    assert points(first, "npc") == [(0.5, 0.65), (1.0, 0.85), (1.5, 0.75), (2.0, 0.65)]
    assert points(second, "npc") == [(1.5, 0.65), (2.0, 0.8)]
    assert [each.get_title(loc="left") for each in (first, second)] == ["Task 1: cats", "Task 2: dogs"]
    for each, start in ((first, 0), (second, 1)):
        (shade,) = each.patches
        assert (shade.get_x(), shade.get_x() + shade.get_width()) == (start, start + 1)


def test_axes_name_the_tasks_in_their_order_and_accuracies_in_percent(drawings: dict[str, Drawing]) -> None:
    for kind in ("average", "tasks"):
        axes = drawings[kind].figure.axes[-1]
        assert ticks(axes, minor=True) == ["cats", "dogs"]
        assert axes.get_xticks(minor=True).tolist() == [0.5, 1.5]
        assert axes.yaxis.get_major_formatter()(0.75) == "75%"
    both = drawings["balance"].figure.axes[0]
    assert [axis.get_major_formatter()(0.125) for axis in (both.xaxis, both.yaxis)] == ["12.5%", "12.5%"]
    assert drawings["drift"].figure.axes[0].yaxis.get_major_formatter()(0.001) == "0.1%"


def test_the_legend_shows_each_method_as_it_is_drawn(drawings: dict[str, Drawing]) -> None:
    figure = drawings["tasks"].figure
    (legend,) = figure.legends
    shown = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.get_lines(), strict=True)}
    assert list(shown) == [style.shorten(name) for name in ("npc", *NASTY)]
    for name, handle in shown.items():
        drawn = line(figure.axes[0], name)
        assert (handle.get_color(), handle.get_marker()) == (drawn.get_color(), drawn.get_marker())


def test_seeds_with_points_at_other_times_are_read_between_them(tmp_path: Path) -> None:
    sparse = record(1, curves=[])
    (axes,) = draw(comparison(row(tmp_path, "npc", [record(), sparse])))[0].figure.axes
    there, between = (0.8 + 0.6) / 2, (0.9 + 0.7) / 2  # at 1.5: recorded, and halfway from 0.9 to 0.7
    assert points(axes, "npc") == [(1.0, 0.9), (1.5, round((there + between) / 2, 6)), (2.0, 0.7)]


def test_forgetting_against_plasticity(drawings: dict[str, Drawing]) -> None:
    (axes,) = drawings["balance"].figure.axes
    (bars,) = [each for each in axes.containers if each.get_label() == "npc"]
    x, y = (float(value[0]) for value in bars.lines[0].get_data())
    assert x == pytest.approx(((0.9 + 0.8) / 2 + (0.8 + 0.8) / 2) / 2)
    assert y == pytest.approx((0.3 + 0.1) / 2)
    across, up = (each.get_segments()[0] for each in bars.lines[2])
    assert np.ptp(across[:, 0]) == pytest.approx(2 * 0.05 / 2)  # two standard errors of 0.85 and 0.8
    assert np.ptp(up[:, 1]) == pytest.approx(2 * 0.2 / 2)


def test_histograms_are_shares_and_means_are_written(drawings: dict[str, Drawing]) -> None:
    absolute, relative = drawings["drift"].figure.axes
    assert [patch.get_label() for patch in absolute.patches] == ["all", "most"]  # no neuron of the third group varied
    for axes in (absolute, relative):
        for patch in axes.patches:
            assert patch.get_data().values.sum() == pytest.approx(1)
    everything = absolute.patches[0].get_data()
    assert everything.values.tolist() == [0.5, 0.25, 0.125, 0.125]
    assert everything.edges.tolist() == [0, 0.5, 1, 1.5, 2]
    assert absolute.get_title(loc="left") == "npc\nmean: all 0.5, most 0.125, least none"


def test_groups_of_neurons_are_named_in_their_colors(drawings: dict[str, Drawing]) -> None:
    figure = drawings["drift"].figure
    (legend,) = figure.legends
    named = {text.get_text(): patch for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=True)}
    assert list(named) == list(GROUPS.values())
    for drawn in figure.axes[0].patches:
        patch = named[GROUPS[drawn.get_label()]]
        assert (patch.get_facecolor(), patch.get_edgecolor()) == (drawn.get_facecolor(), drawn.get_edgecolor())


def test_means_of_neurons_are_over_all_seeds_or_none(tmp_path: Path) -> None:
    rows = row(tmp_path, "npc", [record(), record(1)], neurons())
    other = neurons()
    other["drift"]["absolute"]["means"] = {"all": 1.5, "most": 3.875, "least": 0.5}
    (rows.entries[1].folder / "neurons.json").write_text(json.dumps(other))
    drawing = draw(comparison(rows))[-1]
    axes = drawing.figure.axes[0]
    assert axes.get_title(loc="left") == "npc\nmean: all 1, most 2, least none"  # the first seed has no least mean
    triangles = {float(each.get_xdata()[0]): each.get_color() for each in axes.get_lines()}
    assert triangles == {1.0: style.INK, 2.0: to_hex(axes.patches[1].get_edgecolor())}
    assert "Numbers show means over 2 seeds; 'none' means that in at least one seed no neuron of the" in drawing.caption


def test_a_mean_beyond_the_panel_has_no_triangle(tmp_path: Path) -> None:
    far = neurons()
    far["drift"]["absolute"]["means"]["all"] = 2.5
    axes = draw(comparison(row(tmp_path, "npc", [record()], far)))[-1].figure.axes[0]
    assert [float(each.get_xdata()[0]) for each in axes.get_lines()] == [0.125]


def test_histograms_of_several_methods_have_the_same_bins(tmp_path: Path) -> None:
    wide = neurons(drift=neurons()["drift"] | {"absolute": distribution(4.0, most=[2, 1, 0, 1])})
    rows = row(tmp_path, "narrow", [record()], neurons()), row(tmp_path, "wide", [record()], wide)
    first, _, second, _ = draw(comparison(*rows))[-1].figure.axes
    assert [patch.get_data().edges.tolist() for patch in (*first.patches, *second.patches)] == [[0, 1, 2]] * 4
    assert first.patches[1].get_data().values.tolist() == [1, 0]
    assert second.patches[1].get_data().values.tolist() == [
        0.5,
        0.5,
    ]  # three quarters of its range lie beyond the panel


def test_no_histogram_ends_within_its_panel(tmp_path: Path) -> None:
    wide = neurons(drift=neurons()["drift"] | {"absolute": distribution(20.0)})
    rows = row(tmp_path, "narrow", [record()], neurons()), row(tmp_path, "wide", [record()], wide)
    first, _, second, _ = draw(comparison(*rows))[-1].figure.axes
    assert first.get_xlim() == second.get_xlim() == (0, 2)


def test_importance_is_relative_to_the_threshold_in_order_of_freezing(drawings: dict[str, Drawing]) -> None:
    first, second, bar = drawings["importance"].figure.axes
    (mesh,) = first.collections
    values = np.asarray(mesh.get_array())
    np.testing.assert_allclose(values, [[1, 1.8, 3], [0.2, 1.2, 1.4], [0, 0.4, 0.2]])
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0, 1, 1.5, 2]
    assert np.all(np.diff(mesh.get_coordinates()[:, 0, 1]) > 0)  # rows of values are stacked upward
    assert first.get_ylim() == (0, 1)  # the first neuron to freeze is lowest
    assert ticks(second, minor=True) == ["cats", "dogs"]
    assert first.yaxis.get_major_formatter()(0.5) == "50%"
    assert first.get_title(loc="left") == "a: 2 of 3 frozen"
    assert second.get_title(loc="left") == "b: 0 of 1 frozen"
    below, at = mesh.cmap(mesh.norm(np.array([0.999, 1.0])))
    assert np.abs(below - at).max() > 0.4  # the threshold is visible
    assert {text.get_text(): text.get_position()[0] for text in bar.texts} == {"plastic": 0.5, "frozen": 1.5}
    assert ticks(bar) == [f"{tick:g}" for tick in bar.get_xticks()]


def test_a_method_looks_the_same_in_all_figures_and_like_no_other(drawings: dict[str, Drawing]) -> None:
    axes = [drawings["average"].figure.axes[0], *drawings["tasks"].figure.axes]
    for name in ("npc", style.shorten(NASTY[2])):
        assert len({(line(each, name).get_color(), str(line(each, name).get_marker())) for each in axes}) == 1
        assert len({str(line(each, name)._dash_pattern) for each in axes}) == 1
    many = [style.method_style(number, "") for number in range(132)]
    assert len(set(many)) == 132


def test_colors_can_be_seen_on_white_and_on_a_dark_page() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    for color in style.PALETTE:
        assert luminance("#ffffff") / luminance(color) >= 3
        assert luminance(color) / luminance("#14171c") >= 3


# ---- missing data ----


def test_nothing_is_drawn_of_runs_that_failed(tmp_path: Path) -> None:
    failed = record(failure={"error": "no"}, matrix=[], curves=[])
    assert draw(comparison(row(tmp_path, "npc", [failed], neurons()))) == []
    assert draw(comparison()) == []


def test_one_task_has_no_figures_that_need_two(tmp_path: Path) -> None:
    one: dict[str, Any] = {"tasks": ["cats"], "steps": [10], "untrained": [0.5], "matrix": [[0.9]]}
    curve = [{"task": 0, "step": 5, "accuracy": [0.7]}]
    drawn = draw(comparison(row(tmp_path, "a", [record(**one, curves=curve)]), tasks=("cats",)))
    assert [drawing.key for drawing in drawn] == ["average-pets-1-test"]
    assert draw(comparison(row(tmp_path, "a", [record(**one, curves=[])]), tasks=("cats",))) == []


def test_without_neurons_there_are_no_figures_of_them(tmp_path: Path) -> None:
    plain = row(tmp_path, "a", [record()])
    unknown = row(tmp_path, "b", [record()], {"importance": [], "drift": None})
    without = neurons(importance=[])["drift"] | {"importance": None}
    unimportant = row(tmp_path, "c", [record()], {"importance": [], "drift": without})
    drawn = draw(comparison(plain, unknown, unimportant))
    assert [drawing.key.split("-")[0] for drawing in drawn] == ["average", "tasks", "balance"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"importance": [{}], "drift": null}', "drift", "top"])
def test_neurons_that_cannot_be_read_are_left_out_with_a_warning(tmp_path: Path, content: str) -> None:
    rows = row(tmp_path, "npc", [record(settings={"beta": 0.5}), record(1, settings={"beta": 0.5})], neurons())
    path = rows.entries[0].folder / "neurons.json"
    flat = neurons()["drift"] | {"relative": distribution(0.0)}
    damaged = {"drift": neurons(drift={"importance": []}), "top": neurons(drift=flat)}
    path.write_text(json.dumps(damaged[content]) if content in damaged else content)
    with pytest.warns(UserWarning, match=re.escape(str(path))) as warned:
        drawn = draw(comparison(rows))
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    assert [drawing.key.split("-")[0] for drawing in drawn[-2:]] == ["drift", "importance"]
    assert "seed 1" in drawn[-1].caption


def test_the_importance_is_that_of_a_run_that_holds_something_back(tmp_path: Path) -> None:
    off = row(tmp_path, "off", [record(settings={"beta": 1e12})], neurons())
    assert "importance" not in {drawing.key.split("-")[0] for drawing in draw(comparison(off))}
    on = row(tmp_path, "on", [record(settings={"beta": 0.5})], neurons())
    assert draw(comparison(off, on))[-1].title == "Neuron importance: on"


def test_the_importance_of_a_composed_method(tmp_path: Path) -> None:
    off, on = ({"lwf.weight": 0.1, "npc.beta": beta} for beta in (1e12, 0.5))
    unclear = {"outer.beta": 0.5, "inner.beta": 0.7}
    rows = [
        row(tmp_path, f"{number}", [record(settings=settings)], neurons())
        for number, settings in enumerate((off, unclear, on))
    ]
    drawn = draw(comparison(*rows))[-1]
    assert drawn.title == "Neuron importance: 2"
    assert "relative to the threshold 0.5 " in drawn.caption
    assert drawn.figure.axes[0].get_title(loc="left") == "a: 2 of 3 frozen"
    assert not any(drawing.key.startswith("importance") for drawing in draw(comparison(*rows[:2])))


def test_many_methods_tasks_and_layers(tmp_path: Path) -> None:
    tasks = tuple(f"task number {number}" for number in range(9))
    matrix = [[0.5 + 0.05 * (i == j) for j in range(9)] for i in range(9)]
    made = record(tasks=tasks, steps=[10] * 9, matrix=matrix, untrained=[0.5] * 9, curves=[], settings={"beta": 1.0})
    marks = [{"task": 8, "step": 10, "layers": {f"layer{n}": [0.1] * (n + 1) for n in range(5)}}]
    rows = [row(tmp_path, f"method {number}", [made], {"importance": marks, "drift": None}) for number in range(30)]
    drawn = draw(comparison(*rows, tasks=tasks))
    assert [drawing.key.split("-")[0] for drawing in drawn] == ["average", "tasks", "balance", "importance"]
    assert len(drawn[1].figure.axes) == 9
    assert {f"method {number}" for number in range(30)} <= set(texts(svg(drawn[0])))


# ---- SVG ----


def test_names_are_shown_as_they_are(drawings: dict[str, Drawing]) -> None:
    for kind in ("average", "tasks", "balance"):
        shown = texts(svg(drawings[kind]))
        for name in NASTY:
            assert shown.count(style.shorten(name)) == 1, (kind, name)
    assert "<script" not in svg(drawings["average"])


def test_a_long_name_loses_its_middle(tmp_path: Path) -> None:
    name = "method " + "x" * 200 + " beta=2"
    (drawn, *_) = draw(comparison(row(tmp_path, name, [record()])))
    (shown,) = [text for text in texts(svg(drawn)) if text.startswith("method")]
    assert len(shown) <= 34
    assert shown.endswith("beta=2")
    assert "…" in shown


def test_control_characters_do_not_break_the_page(tmp_path: Path) -> None:
    (drawn, *_) = draw(comparison(row(tmp_path, "a\x00b\nc\ud800", [record()])))
    assert "a b c " in texts(svg(drawn))


def test_svg_scales_and_says_what_it_is(drawings: dict[str, Drawing]) -> None:
    for drawing in drawings.values():
        text = svg(drawing)
        root = ElementTree.fromstring(text)
        assert text.startswith("<svg")
        assert root.get("role") == "img"
        assert root.get("aria-label") == drawing.title
        assert root.get("viewBox", "").startswith("0 0 460.8 ")
        assert not {"width", "height"} & set(root.attrib)
        assert "<style" not in text
        assert "<metadata" not in text


def test_ids_do_not_clash_and_are_there(drawings: dict[str, Drawing]) -> None:
    seen: set[str] = set()
    for drawing in drawings.values():
        root = ElementTree.fromstring(svg(drawing))
        ids = [value for node in root.iter() if (value := node.get("id")) is not None]
        assert len(ids) == len(set(ids))
        assert not seen & set(ids)
        seen |= set(ids)
        values = [value for node in root.iter() for value in node.attrib.values()]
        used = {found for value in values for found in re.findall(r"(?:url\(|^)#([^)]+)", value)}
        assert used
        assert used <= set(ids)


def test_all_ink_is_that_of_the_page(drawings: dict[str, Drawing]) -> None:
    ours = {*style.PALETTE, "#ffffff", "#3b4048", "#1d3a57", "#6d1a12", "none", "currentColor"}
    for drawing in drawings.values():
        root = ElementTree.fromstring(svg(drawing))
        styles = [node.get("style", "") for node in root.iter()]
        colors = {color for style in styles for color in re.findall(r"(?:fill|stroke): ([^;]+)", style)}
        assert "currentColor" in colors
        assert colors <= ours
        for node in root.iter("{http://www.w3.org/2000/svg}text"):
            assert "fill: " in node.get("style", "")  # otherwise it is black


# ---- files ----


def test_files_are_the_same_each_time(drawings: dict[str, Drawing], compared: Comparison, tmp_path: Path) -> None:
    first, second = save(drawings.values(), tmp_path / "a"), save(draw(compared), tmp_path / "b")
    names = [f"{each.key}.{ending}" for each in drawings.values() for ending in ("pdf", "png")]
    assert [path.name for path in first] == names
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes().startswith(b"%PDF")
    assert b"CreationDate" not in first[0].read_bytes()
    assert first[1].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in first)


def test_the_registered_kinds() -> None:
    names = [kind.name for kinds in (figures.COMPARISON_KINDS, figures.SEARCH_KINDS) for kind in kinds]
    assert names == ["average", "tasks", "balance", "drift", "importance", "capacity", "search"]


def test_figures_of_what_is_gone_are_removed(tmp_path: Path) -> None:
    folder, rows = tmp_path / "figures", [row(tmp_path, "npc", [record()])]
    for stream in ("Old/1", "old"):
        assert len(save(draw(comparison(*rows, stream=stream)), folder)) == 6
    kept = {"mine.png", "average-of-mine.pdf", "tasks-old-2-test.svg", "balance-old-2-test.png.txt"}
    for name in kept:
        (folder / name).touch()
    written = save(draw(comparison(*rows)), folder)
    assert {path.name for path in folder.iterdir()} == {path.name for path in written} | kept
    assert save([], folder) == []
    assert {path.name for path in folder.iterdir()} == kept
    assert save([], tmp_path / "none") == []


def test_streams_with_odd_names_have_files_of_their_own(tmp_path: Path) -> None:
    rows = [row(tmp_path, "npc", [record()])]
    keys = [
        draw(comparison(*rows, stream=stream))[0].key for stream in ("pets", "Pets", "folder:/my pets", "방법/../x")
    ]
    assert len(set(keys)) == 4
    assert all(re.fullmatch(r"[a-z0-9-]+", key) for key in keys)


def test_settings_of_the_user_neither_matter_nor_change(tmp_path: Path) -> None:
    compared = comparison(row(tmp_path, "$x$", [record()]))
    default = svg(draw(compared)[0])
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "text.parse_math": True}):
        before = dict(matplotlib.rcParams)
        assert svg(draw(compared)[0]) == default
        assert dict(matplotlib.rcParams) == before


def test_torch_is_not_needed() -> None:
    code = "import sys, holdfast.study.figures; sys.exit('torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- searches ----


def sweep_of(name: str, curve: Mapping[float, float | None], *, epochs: float = 3, seeds: int = 1) -> Sweep:
    error = 0.01 if seeds > 1 else None
    tried = [Tried(value, None if mean is None else Estimate(mean, error, seeds)) for value, mean in curve.items()]
    return Sweep(Run("pets", Plan("ewc", epochs=epochs), 2, name, ""), "strength", seeds, tried)


def test_a_search_is_drawn_as_it_was_found() -> None:
    curve = {0.01: 0.2, 0.1: 0.6, 1.0: 0.8, 10.0: None}
    (drawing,) = figures.draw_searches([sweep_of("ewc", curve), sweep_of("mas", {1.0: 0.7, 2.0: 0.75}, seeds=3)])
    first, second = drawing.figure.axes
    assert [axes.get_title("left") for axes in (first, second)] == ["ewc: strength", "mas: strength, 3 seeds"]
    line, below, failed, best = first.lines
    assert np.allclose(line.get_xydata(), [(0.01, 0.2), (0.1, 0.6), (1.0, 0.8)])
    assert list(below.get_xdata()) == [0.01]  # below the panel: far from the best
    assert first.get_ylim()[0] > 0.5
    assert (list(failed.get_xdata()), failed.get_marker()) == ([10.0], "x")
    assert best.get_xydata().tolist() == [[1.0, 0.8]]
    assert first.get_xscale() == "log"
    assert second.get_xscale() == "linear"
    assert "1 to 3 seeds" in drawing.caption


def test_searches_of_other_lengths_are_other_figures(tmp_path: Path) -> None:
    drawings = figures.draw_searches([sweep_of("ewc", {1.0: 0.5}), sweep_of("ewc", {1.0: 0.5}, epochs=30)])
    assert len({drawing.key for drawing in drawings}) == 2
    paths = save(drawings, tmp_path)
    assert all(figures.own_files().fullmatch(path.name) for path in paths)
    save([], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_registered_kind_of_search_is_drawn_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = figures.Kind("count", lambda key, sweeps: Drawing(key, f"{len(sweeps)} searches", "", Figure()))
    monkeypatch.setattr(figures, "SEARCH_KINDS", (*figures.SEARCH_KINDS, kind))
    drawings = figures.draw_searches([sweep_of("ewc", {1.0: 0.5}), sweep_of("mas", {1.0: 0.5})])
    assert [(drawing.key, drawing.title) for drawing in drawings] == [
        ("search-pets-1-validation", "Searches on pets"),
        ("count-pets-1-validation", "2 searches"),
    ]
    assert len(save(drawings, tmp_path)) == 4
    save([], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_search_in_which_all_failed() -> None:
    (drawing,) = figures.draw_searches([sweep_of("ewc", {1.0: None, 10.0: None})])
    assert svg(drawing)


def test_a_figure_shows_as_many_methods_as_there_are_styles(tmp_path: Path) -> None:
    rows = [row(tmp_path, f"method {number}", [record(shift=number / 1000)]) for number in range(style.STYLES + 1)]
    drawings = draw(Comparison("pets", TASKS, "test", rows))
    assert drawings
    for drawing in drawings:
        assert drawing.caption.endswith(" Only the 132 best of 133 methods are shown.")
    shown = [text.get_text() for text in drawings[0].figure.axes[0].texts]
    assert style.shorten("method 131") in shown
    assert style.shorten("method 132") not in shown
