"""Capacity taken in each layer after each task: room runs out before accuracy does."""

from statistics import fmean

from matplotlib.lines import Line2D

from holdfast.study.figures.axes import legend, panel_grid, percent_axis, seeds_shown
from holdfast.study.figures.drawing import Drawing, Kind
from holdfast.study.figures.style import method_style, shorten
from holdfast.study.figures.subject import Subject
from holdfast.study.tables import Row


def draw(key: str, subject: Subject) -> Drawing | None:
    taken = {row.name: means for row in subject.comparison.rows if (means := capacity(row))}
    if not taken:
        return None
    layers = dict.fromkeys(layer for means in taken.values() for layer in means)
    styles = {layer: method_style(number, layer) for number, layer in enumerate(layers)}
    columns = 2 if len(taken) in (2, 4) else min(3, len(taken))
    figure, panels = panel_grid(len(taken), columns, row_height=1.8, extra_height=0.9, sharex=True)
    for number, (axes, (name, means)) in enumerate(zip(panels, taken.items(), strict=True)):
        axes.set_title(shorten(name, 66 // columns))
        axes.tick_params(axis="x", labelbottom=number + columns >= len(taken))
        for layer, values in means.items():
            axes.plot(range(1, len(values) + 1), values, **styles[layer].line, clip_on=False)
        axes.set_ylim(0, 1)
        axes.set_xticks(range(1, len(subject.comparison.tasks) + 1))
        axes.grid(axis="y")
        percent_axis(axes.yaxis)
    figure.supylabel("directions taken", fontsize=9)
    figure.supxlabel("finished tasks", fontsize=9)
    handles = [Line2D([], [], **style.line) for style in styles.values()]
    legend(figure, handles, [style.label for style in styles.values()], min(4, len(handles)))
    seeds = [len(row.records) for row in subject.comparison.rows if row.name in taken]
    return Drawing(
        key,
        "Capacity",
        "Share of each layer's input directions taken by the finished tasks. A full layer cannot change without "
        f"changing its outputs on old inputs. Lines show {seeds_shown(seeds)}.",
        figure,
    )


KIND = Kind("capacity", draw)


def capacity(row: Row) -> dict[str, list[float]]:
    """The mean capacity of each layer after each task, over the runs of a row; empty if it was not measured."""
    runs = [record.capacity for record in row.records if record.capacity]
    if not runs:
        return {}
    common = set.intersection(*(set(taken) for run in runs for taken in run))
    return {
        layer: [fmean(run[task][layer] for run in runs) for task in range(min(map(len, runs)))]
        for layer in runs[0][0]
        if layer in common
    }
