"""The command `holdfast`: a thin shell around the library. Expensive imports are left to the commands."""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from holdfast.errors import UserError, describe, printable, warn, warn_in_one_line
from holdfast.methods import METHODS
from holdfast.runs.plan import Plan
from holdfast.study import paper
from holdfast.study.options import Option, options
from holdfast.study.store import Entry, Run, Study, StudyError, default_name
from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.study.work import Execution

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(
    help="List, fetch and verify data sets.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(data_app, name="data")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="digits, mnist, cifar100 or folder:PATH.", show_default=False)
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder searched first, before $HOLDFAST_DATA and the user's cache; downloads are stored there.",
        show_default=False,
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def holdfast(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Continual learning: networks that learn task after task and forget less.

    `holdfast demo` shows it in a minute. `holdfast run digits npc` is one run, `holdfast run study.toml` is a whole
    study, `holdfast reproduce imnist` is the paper's experiment. Finished runs are not repeated, and interrupted runs
    resume.
    """


# ---- data ----


@data_app.command("list")
def list_(data: Data = None) -> None:
    """List the data sets with their locations and sizes.

    Example: `holdfast data list --data ~/datasets`
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from holdfast.streams import sources

    table = Table("name", "location", "images", "classes")
    for name in sources.SOURCES:
        table.add_row(name, *map(escape, _row(name, data)))
    table.add_row("folder:PATH", "any folder with a folder of images per class", "", "")
    Console().print(table)


def _row(name: str, data: Path | None) -> tuple[str, str, str]:
    from holdfast.streams import sources
    from holdfast.streams.published import DataError

    location = sources.locate(name, data)
    if location is None:
        return "not found", "", ""
    try:
        source = sources.load(name, data, download=False)
    except DataError as error:
        return f"{location}: {error}", "", ""
    return location, f"{len(source.train.labels)} + {len(source.test.labels)}", str(len(source.classes))


@data_app.command()
def fetch(name: Name, data: Data = None) -> None:
    """Download a data set, unless an intact copy is found.

    A damaged copy is replaced. An interrupted download leaves nothing behind.

    Example: `holdfast data fetch mnist --data ~/datasets`
    """
    from holdfast.streams import published, sources
    from holdfast.streams.published import DataError

    if name == "digits" or name.startswith("folder:"):
        source = sources.load(name)
        typer.echo(f"{name} needs no fetching: {len(source.train.labels)} + {len(source.test.labels)} images are here")
        return
    archive = sources.published(name)
    found = published.find(archive, data)
    try:
        if found is not None and sources.verify(name, data):
            typer.echo(f"{name} is already in {found.location}")
            return
    except DataError as error:
        typer.echo(f"{error}; fetching it now", err=True)
    typer.echo(f"{name} is now in {published.fetch(archive, data).location}")


@data_app.command()
def verify(name: Name, data: Data = None) -> None:
    """Compare a data set with the publisher's checksums.

    The exit code is 0 if it is intact. Otherwise it is 1, and one line says what to do.

    Example: `holdfast data verify mnist --data ~/datasets`
    """
    from holdfast.streams import sources

    for line in sources.verify(name, data):
        typer.echo(line)


# ---- options of studies ----


def _out(default: str) -> Any:
    return typer.Option("--out", metavar="DIR", help=f"Folder of the study. [default: {default}]", show_default=False)


Seeds = Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="Run with seeds 0 to N-1.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="cpu|cuda", help="[default: a GPU if there is one]", show_default=False),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        metavar="N",
        help="Number of runs at once. [default: chosen for the hardware]",
        show_default=False,
    ),
]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard files.")]
SaveEvery = Annotated[
    float, typer.Option("--save-every", min=0, metavar="SECONDS", help="Seconds between two checkpoints of a run.")
]
Tasks = Annotated[int | None, typer.Option("--tasks", min=1, metavar="N", help="Only the first N tasks.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the method, such as strength=30, or npc.beta=0.7 of lwf+npc. Repeatable.",
    ),
]

Command = Callable[..., None]


_PLAN = "Plan (some defaults depend on the stream)"


def plan_options(*names: str, panel: str = _PLAN) -> Callable[[Command], Command]:
    """Give a command an option for each of these fields of a plan. It gets the given ones as `fields`."""
    chosen = {name: options()[name] for name in names}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_options(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in chosen}
            fields = {name: chosen[name].value(value) for name, value in given.items() if value is not None}
            command(**arguments, fields=fields)

        own = [each for each in inspect.signature(command).parameters.values() if each.name != "fields"]
        parameters = [*own, *(_parameter(option, panel) for option in chosen.values())]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_options

    return decorate


def _parameter(option: Option, panel: str) -> inspect.Parameter:
    default = f" [default: {option.default}]" if option.default and panel == _PLAN else ""
    declared = typer.Option(
        option.declaration,
        help=option.help + default,
        metavar=option.metavar,
        show_default=False,
        rich_help_panel=panel,
    )
    annotation = Annotated[option.kind | None, declared]  # type: ignore[name-defined]
    return inspect.Parameter(option.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


# ---- studies ----


@app.command()
def demo(
    seeds: Seeds = 3,
    epochs: Annotated[float, typer.Option(metavar="E", help="Epochs per task.")] = 30,
    out: Annotated[Path | None, _out("studies/demo")] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda")] = "cpu",
    jobs: Jobs = None,
) -> None:
    """Demonstrate forgetting and its remedies in a minute: all methods on small images of digits.

    A small network learns to tell 0 from 1, then 2 from 3, and so on, and never sees the earlier digits again. Nothing
    is downloaded.
    """
    from holdfast.study.demo import runs
    from holdfast.study.work import Execution

    _carry_out(_study(out, "demo"), runs(seeds, epochs), Execution(device=device, jobs=jobs))


@app.command(
    help=f"""Run methods on a stream of tasks, or all runs of a study file.

    Streams: digits, imnist, icifar100, pmnist, rmnist and folder:PATH. Methods: {", ".join(METHODS)}. Methods are
    composed with +: lwf+npc is LwF around NPC. `holdfast methods` explains them and lists their settings.

    Examples: `holdfast run digits npc ewc --seeds 3`, `holdfast run imnist ewc --set strength=30 --epochs 1`,
    `holdfast run digits lwf+npc --set lwf.weight=0.1 --set npc.beta=0.7`, `holdfast run folder:~/photos npc`,
    `holdfast run study.toml`

    A folder has one folder of images per class. Its stream takes options, in quotes:
    `holdfast run "folder:~/photos?size=64&per_task=5&order=0" npc` has images of 64x64 and tasks of 5 classes in a
    random order by seed 0. `order=cat,dog,bird` gives the order by name.
    """
)
@plan_options(*options())
def run(
    what: Annotated[str, typer.Argument(metavar="STREAM|FILE", help="A stream, or a study file ending in .toml.")],
    methods: Annotated[list[str] | None, typer.Argument(metavar="METHOD", help="One or more methods.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, metavar="N", help="Run with seeds 0 to N-1. [default: 1]", show_default=False),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, metavar="S", help="A single seed. Repeatable.")] = None,
    tasks: Tasks = None,
    settings: Settings = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name in tables and figures, for one method.")
    ] = None,
    out: Annotated[Path | None, _out("studies/STREAM, or studies/FILE without .toml")] = None,
    data: Data = None,
    device: Device = None,
    jobs: Jobs = None,
    tensorboard: Board = False,
    save_every: SaveEvery = 60,
    *,
    fields: dict[str, Any],
) -> None:
    from holdfast.study import studyfile
    from holdfast.study.work import Execution

    execution = Execution(data, device, jobs, tensorboard, save_every)
    if what.endswith(".toml"):
        if methods or settings or name or fields or tasks or seed or seeds:
            raise StudyError(
                f"{what} defines its runs: leave out all but --out, --data, --device, --jobs, --tensorboard and "
                "--save-every"
            )
        _carry_out(_study(out, Path(what).stem), studyfile.read(Path(what)), execution)
        return
    if not methods:
        raise StudyError(f"no method given; for example: holdfast run {what} npc")
    methods = list(dict.fromkeys(methods))
    if name is not None and len(methods) > 1:
        raise StudyError("--name is for one method: several methods need different names")
    if seed and seeds:
        raise StudyError("use either --seeds or --seed, not both")
    name = None if name is None else studyfile.check_name(name)
    own = dict(map(studyfile.setting, settings or []))
    runs = [
        Run.of(what, _plan(what, method, own, fields | {"seed": number}), tasks, name)
        for number in dict.fromkeys(seed or range(seeds or 1))
        for method in methods
    ]
    _carry_out(_study(out, what), runs, execution)


def _plan(stream: str, method: str, settings: dict[str, Any], fields: dict[str, Any]) -> Plan:
    """The plan with the given fields; unspecified fields have the stream's defaults."""
    from holdfast.study import studyfile
    from holdfast.study.defaults import defaults_for

    plan = Plan(method, settings=settings, **(defaults_for(stream) | fields))
    studyfile.check_settings(method, settings)
    return plan


@app.command()
@plan_options(
    *("epochs", "width", "evaluate_on", "curve", "precision", "compile", "threads"),
    panel="Plan (defaults: the paper's, adapted to the hardware)",
)
def reproduce(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The paper's experiment: imnist or icifar100.")],
    methods: Annotated[
        str,
        typer.Option(metavar="LIST", help="Methods, separated by commas; `all` adds those that are not in the paper."),
    ] = ",".join(paper.COMPARED),
    seeds: Seeds = 3,
    tasks: Annotated[int, typer.Option(min=1, metavar="N", help="Only the first N tasks.")] = paper.TASKS,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="METHOD.NAME=VALUE", help="A setting that replaces the paper's. Repeatable."),
    ] = None,
    searched: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use the best settings of the searches in this study.")
    ] = None,
    out: Annotated[Path | None, _out("studies/STREAM")] = None,
    data: Data = None,
    device: Device = None,
    jobs: Jobs = None,
    tensorboard: Board = False,
    save_every: SaveEvery = 60,
    *,
    fields: dict[str, Any],
) -> None:
    """Reproduce the paper's experiment: its protocol and settings, the results beside its Table 1.

    The full experiment needs a GPU. A smaller one for a laptop:
    `holdfast reproduce imnist --epochs 0.1 --width 0.25 --seeds 1 --methods npc,finetune`
    """
    from holdfast.study.work import Execution

    if stream not in paper.SETTINGS:
        raise StudyError(f"the paper has no experiment {stream!r}; it has {' and '.join(paper.SETTINGS)}")
    execution = Execution(data, device, jobs, tensorboard, save_every)
    defaults = {"curve": 10, "precision": "bf16", "compile": True} if execution.on_gpu else {"curve": 2}
    plan = Plan("npc", neurons=True, **(defaults | fields))
    chosen = [*paper.COMPARED, *paper.FURTHER, paper.OFF] if methods == "all" else _names(methods)
    found = _searched(searched, stream, chosen) if searched else {}
    runs = paper.runs(stream, chosen, seeds, plan, tasks=tasks, settings=_by_method(settings or [], chosen, found))
    _carry_out(_study(out, stream), runs, execution, beside_the_paper=True)


def _names(text: str) -> list[str]:
    from holdfast.study import studyfile

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name != paper.OFF:
            studyfile.check_settings(name, {})
    if not names:
        raise StudyError("--methods is empty: name at least one, as in --methods npc")
    return names


def _searched(folder: Path, stream: str, methods: list[str]) -> dict[str, dict[str, Any]]:
    """The best settings of the searches in a folder, for the methods searched there."""
    from holdfast.study import sweep

    found = sweep.chosen(folder, stream, methods)
    for method, settings in found.items():
        _say(f"{default_name(method, settings)}: the best in {folder}")
    return found


def _by_method(texts: list[str], methods: list[str], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The found settings, replaced by those of `--set` and checked."""
    from holdfast.study import studyfile

    for text in texts:
        method, dot, rest = text.partition(".")
        if not dot:
            raise StudyError(f"--set {text}: name the method too, as in ewc.strength=30")
        if method not in methods:
            raise StudyError(f"--set {text}: {method} is not among the methods {', '.join(methods)}")
        name, value = studyfile.setting(rest)
        found.setdefault(method, {})[name] = value
    for method, settings in found.items():
        own = {name: value for name, value in settings.items() if name != "lr"}
        studyfile.check_settings(paper.actual(method), own)
        Plan("finetune", lr=settings.get("lr", 1.0))
    return found


@app.command()
@plan_options(*(name for name in options() if name not in ("evaluate_on", "curve", "neurons")))
def sweep(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream.")],
    method: Annotated[str, typer.Argument(metavar="METHOD", help="The method.")],
    over: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The setting, such as beta, or npc.beta of lwf+npc, or lr. [default: depends on the method]",
            show_default=False,
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Values, separated by commas. [default: 0.001,0.01,...,1000]", show_default=False
        ),
    ] = None,
    finer: Annotated[bool, typer.Option("--finer/--coarse", help="Search finer around the best value.")] = True,
    seeds: Seeds = 1,
    tasks: Tasks = None,
    settings: Settings = None,
    out: Annotated[Path | None, _out("studies/STREAM-sweep")] = None,
    data: Data = None,
    device: Device = None,
    jobs: Jobs = None,
    *,
    fields: dict[str, Any],
) -> None:
    """Search for a setting of a method as the paper did, on validation images only.

    Seven powers of ten first, then finer around the best. DIR/sweeps keeps all values and their accuracies.

    Examples: `holdfast sweep digits ewc --seeds 3`, `holdfast sweep digits lwf+npc --over npc.beta`
    """
    from rich.console import Console

    from holdfast.methods.building import searched_setting
    from holdfast.study import studyfile, terminal
    from holdfast.study.sweep import DECADES, FINER, acceptable, search
    from holdfast.study.work import Execution

    plan = _plan(stream, method, dict(map(studyfile.setting, settings or [])), fields)
    over = over or searched_setting(method)
    if over != "lr":
        studyfile.check_settings(method, {over: 1.0})
    if values:
        coarse = [_number(text) for text in values.split(",")]
        if refused := [value for value in coarse if not acceptable(plan, over, value)]:
            raise StudyError(f"--values: {method} does not accept {refused[0]:g} as {over}")
    else:
        coarse = [value for value in DECADES if acceptable(plan, over, value)]
    study = _study(out, f"{stream}-sweep")
    found = search(
        stream,
        plan,
        over,
        seeds,
        lambda runs: _execute(study, runs, Execution(data, device, jobs)),
        tasks=tasks,
        values=coarse,
        finer=FINER if finer else (),
    ).with_earlier(study.folder)
    path = found.save(study.folder)
    _say(f"{found.common.name} on {stream}: average accuracy on validation images, %")
    Console().print(terminal.search(found))
    if found.at_the_edge:
        _say(f"The best value is at the edge of the search; extend the range with --values. Saved in {path}")
    else:
        _say(f"Saved in {path}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise StudyError(f"--values: {text!r} is not a number; write them as 0.1,1,10") from None


@app.command()
def report(folder: Folder) -> None:
    """Write the page of a study, with tables and figures of its finished runs.

    Example: `holdfast report studies/demo`
    """
    from holdfast.study import page

    study = _existing(folder)
    study.clean()
    _say(f"The page is {page.write(study)}")


@app.command("list")
def list_runs(folder: Folder) -> None:
    """List the runs of a study with their states.

    Example: `holdfast list studies/demo`
    """
    from holdfast.study import terminal

    entries, left_out = _existing(folder).scan()
    typer.echo(terminal.runs(entries, left_out))
    for each in left_out:
        warn(str(each))


@app.command()
def methods(
    names: Annotated[list[str] | None, typer.Argument(metavar="METHOD", help="[default: all]")] = None,
) -> None:
    """Explain methods, and list their settings with the defaults.

    A setting is set by --set in `holdfast run`, or by settings in a study file.

    Examples: `holdfast methods`, `holdfast methods npc lwf+npc`
    """
    from holdfast.study import terminal

    _say_lines(terminal.methods(names or METHODS))


def _say_lines(text: str) -> None:
    for line in text.splitlines():
        _say(line)


def _say(text: str, *, err: bool = False) -> None:
    typer.echo(printable(text), err=err)


def _study(out: Path | None, name: str) -> Study:
    folder = out if out is not None else Path("studies") / name.replace("/", "-").replace(":", "-")
    if folder.exists() and not folder.is_dir():
        raise StudyError(f"{folder} is a file, not a folder: choose another with --out")
    return Study(folder)


def _existing(folder: Path) -> Study:
    if not (folder / "runs").is_dir():
        raise StudyError(f"{folder} is not a study: it has no folder {folder / 'runs'}")
    return Study(folder)


def _carry_out(study: Study, runs: Sequence[Run], execution: "Execution", *, beside_the_paper: bool = False) -> None:
    """Execute the runs and show the results, even if some runs failed."""
    try:
        entries = _execute(study, runs, execution)
    except StudyError:
        if any(study.entry(run).record is not None for run in runs):
            _conclude(study, [study.entry(run) for run in runs], beside_the_paper=beside_the_paper)
        raise
    _conclude(study, entries, beside_the_paper=beside_the_paper)


def _execute(study: Study, runs: Sequence[Run], execution: "Execution") -> list[Entry]:
    from rich.console import Console

    from holdfast.study.logs import require_tensorboard
    from holdfast.study.processes import LocalExecutor
    from holdfast.study.schedule import run_all
    from holdfast.study.terminal import Bars

    if execution.tensorboard:
        require_tensorboard()
    study.clean()
    left = [run for run in runs if study.entry(run).record is None]
    if len(left) < len(runs):
        _say(f"{len(runs) - len(left)} of {len(runs)} runs are finished already, in {study.folder}")
    if not left:
        return [study.add(run) for run in runs]
    try:
        with Bars(Console(), len(left)) as bars:
            return run_all(study, runs, LocalExecutor(study, execution), bars)
    except KeyboardInterrupt as interruption:
        _say(f"holdfast: {str(interruption) or 'interrupted; run the same command again to resume'}", err=True)
        raise typer.Exit(130) from None


def _conclude(study: Study, entries: list[Entry], *, beside_the_paper: bool = False) -> None:
    from rich.console import Console

    from holdfast.study import page, terminal
    from holdfast.study.tables import compare

    console = Console()
    digits = 2 if console.width >= 92 else 1  # two do not fit a narrow terminal
    for comparison in compare(entries):
        console.print(
            terminal.beside_the_paper(comparison, digits)
            if beside_the_paper
            else terminal.results(comparison, console.width)
        )
    _say(f"The page is {page.write(study)}")
    if all(entry.state == "failed" for entry in entries):
        raise StudyError("every run failed: the reasons are above and on the page")


def main() -> None:
    """The entry point. Errors the user can fix are one line, not a traceback."""
    warn_in_one_line()
    try:
        app()
    except OSError as error:
        _fail(describe(error))
    except (UserError, ValueError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(printable(f"holdfast: {message}"), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
