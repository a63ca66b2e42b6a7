"""Accuracy on each task over time: the paper's Figure 2 (b)."""

from collections.abc import Sequence

from holdfast.runs.record import Point
from holdfast.study.figures.axes import (
    Series,
    accuracy_axis,
    mean_series,
    method_legend,
    plot_series,
    seeds_shown,
    time_panels,
)
from holdfast.study.figures.drawing import Drawing, Kind
from holdfast.study.figures.style import INK, shorten
from holdfast.study.figures.subject import Subject


def draw(key: str, subject: Subject) -> Drawing | None:
    tasks = subject.comparison.tasks
    rows = [row for row in subject.comparison.rows if row.records]
    if not rows or len(tasks) < 2:
        return None
    columns = 1 if len(tasks) <= 6 else 2 if len(tasks) <= 20 else 3
    figure, panels = time_panels(tasks, len(tasks), columns, row_height=1.05, extra_height=0.5 + 0.06 * len(rows))
    for task, axes in enumerate(panels):
        axes.axvspan(task, task + 1, color=INK, alpha=0.07, linewidth=0)
        axes.set_title(f"Task {task + 1}: {shorten(tasks[task], 42 // columns)}")
    for number, row in enumerate(rows):
        timelines = [record.timeline for record in row.records]
        for task, axes in enumerate(panels):
            series = _accuracy(timelines, task)
            if series is not None:
                plot_series(axes, subject.styles[row.name], series, number / len(rows), every=0.13 * columns)
    for axes in panels:
        accuracy_axis(axes)
    figure.supylabel("accuracy on the task", fontsize=9)
    method_legend(figure, [subject.styles[row.name] for row in rows])
    return Drawing(
        key,
        "Accuracy on each task",
        f"Accuracy on each task, on {subject.comparison.evaluate_on} images, from the start of its training. Shading "
        f"marks the time in which the task is learned. Lines show {seeds_shown([len(row.records) for row in rows])}.",
        figure,
    )


KIND = Kind("tasks", draw)


def _accuracy(timelines: Sequence[Sequence[Point]], task: int) -> Series | None:
    return mean_series(
        [[(point.time, point.accuracy[task]) for point in timeline if point.task >= task] for timeline in timelines]
    )
