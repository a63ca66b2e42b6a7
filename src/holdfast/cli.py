"""The command `holdfast`: a thin shell around the library.

What takes long to import is imported by the commands that need it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from holdfast.errors import UserError, warn_in_one_line
from holdfast.study import paper
from holdfast.study.records import Entry, Run, Study, StudyError, default_name

if TYPE_CHECKING:
    from holdfast.study.running import How
    from holdfast.training import Plan

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(
    help="List, fetch and verify the data sets that tasks are made of.",
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
        help="The folder to look in first, before $HOLDFAST_DATA and the user's cache; what is fetched goes there.",
        show_default=False,
    ),
]


@app.callback()
def holdfast() -> None:
    """Continual learning: networks that learn task after task and forget less.

    `holdfast demo` shows it in a minute. `holdfast run digits npc` is one run, `holdfast run study.toml` are many,
    `holdfast reproduce imnist` is the paper's experiment. What is finished is not run again, and what was interrupted
    goes on.
    """


# ---- data ----


@data_app.command("list")
def list_(data: Data = None) -> None:
    """Show the data sets, where they were found, and how large they are.

    Example: `holdfast data list --data ~/datasets`
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from holdfast.streams import sources

    table = Table("name", "where", "images", "classes")
    for name in sources.SOURCES:
        table.add_row(name, *map(escape, _row(name, data)))
    table.add_row("folder:PATH", "any folder with a folder of images per class", "", "")
    Console().print(table)


def _row(name: str, data: Path | None) -> tuple[str, str, str]:
    from holdfast.streams import sources
    from holdfast.streams.files import DataError

    where = sources.locate(name, data)
    if where is None:
        return "not here", "", ""
    try:
        source = sources.load(name, data, download=False)
    except DataError as error:
        return f"{where}: {error}", "", ""
    return where, f"{len(source.train.labels)} + {len(source.test.labels)}", str(len(source.classes))


@data_app.command()
def fetch(name: Name, data: Data = None) -> None:
    """Download a data set, unless a good copy of it is here already.

    What is damaged is replaced. A download that breaks off leaves nothing behind.

    Example: `holdfast data fetch mnist --data ~/datasets`
    """
    from holdfast.streams import files, sources
    from holdfast.streams.files import DataError

    if name == "digits" or name.startswith("folder:"):
        source = sources.load(name)
        typer.echo(f"{name} needs no fetching: {len(source.train.labels)} + {len(source.test.labels)} images are here")
        return
    published = sources.published(name)
    found = files.find(published, data)
    try:
        if found is not None and sources.verify(name, data):
            typer.echo(f"{name} is already in {found.where}")
            return
    except DataError as error:
        typer.echo(f"{error}; fetching it now", err=True)
    typer.echo(f"{name} is now in {files.fetch(published, data).where}")


@data_app.command()
def verify(name: Name, data: Data = None) -> None:
    """Read all of a data set and compare it with the publisher's checksums.

    The exit code is 0 if it is in order, and 1 with a line that says what to do if it is not.

    Example: `holdfast data verify mnist --data ~/datasets`
    """
    from holdfast.streams import sources

    for line in sources.verify(name, data):
        typer.echo(line)


# ---- studies ----

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="The folder of the study; studies/NAME if not given.", show_default=False
    ),
]
Seeds = Annotated[
    int, typer.Option("--seeds", min=1, metavar="N", help="Run each method N times, with seeds 0 to N-1.")
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="cpu|cuda", help="Where; a GPU if there is one.", show_default=False),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, metavar="N", help="Runs at once; what suits the machine if not given."),
]
Board = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's files too, to watch live.")]
Tasks = Annotated[int | None, typer.Option("--tasks", min=1, metavar="N", help="Only the stream's first N tasks.")]
Epochs = Annotated[float | None, typer.Option("--epochs", metavar="E", help="How long each task is learnt.")]
Width = Annotated[
    float | None, typer.Option("--width", metavar="W", help="Width of the hidden layers, as a share of the usual.")
]
Precision = Annotated[str | None, typer.Option("--precision", metavar="float32|tf32|bf16", help="Of the training.")]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="Whether the model is compiled.")]
Model = Annotated[str | None, typer.Option("--model", metavar="M", help="paper_cnn, small_cnn or mlp.")]
Rate = Annotated[float | None, typer.Option("--lr", help="The learning rate of SGD.")]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Images in a batch.")]
Validation = Annotated[bool, typer.Option("--validation", help="Judge on validation images.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting of the method, such as strength=30; may be repeated."),
]


@app.command()
def demo(
    seeds: Seeds = 3,
    epochs: Annotated[float, typer.Option(metavar="E", help="How long each task is learnt.")] = 30,
    out: Out = Path("studies/demo"),
    device: Device = "cpu",
    jobs: Jobs = None,
) -> None:
    """See forgetting, and its cures, in a minute: all methods on small images of digits.

    A small network learns to tell 0 from 1, then 2 from 3, and so on, and never sees the earlier digits again. No data
    are downloaded.
    """
    from holdfast.study.demo import runs
    from holdfast.study.running import How

    _carry_out(_study(out, "demo"), runs(seeds, epochs), How(device=device, jobs=jobs))


@app.command()
def run(
    what: Annotated[str, typer.Argument(metavar="STREAM|FILE", help="A stream, or a study file that ends in .toml.")],
    methods: Annotated[list[str] | None, typer.Argument(metavar="METHOD...", help="One method or several.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, metavar="N", help="Run N times, with seeds 0 to N-1; once if not given."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="This seed; may be repeated.")] = None,
    tasks: Tasks = None,
    epochs: Epochs = None,
    epoch: Annotated[str | None, typer.Option(metavar="paper|task", help="What an epoch is: see the docs.")] = None,
    model: Model = None,
    width: Width = None,
    lr: Rate = None,
    batch: BatchSize = None,
    heads: Annotated[str | None, typer.Option(metavar="masked|growing", help="How outputs belong to tasks.")] = None,
    settings: Settings = None,
    name: Annotated[str | None, typer.Option(help="How it is called in tables; only with one method.")] = None,
    validation: Validation = False,
    curve: Annotated[int | None, typer.Option(metavar="N", help="Points of the curves in each task.")] = None,
    neurons: Annotated[
        bool, typer.Option("--neurons", help="Record what the neurons do, for two more figures.")
    ] = False,
    precision: Precision = None,
    compiled: Compile = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits twice, on a GPU too.")] = False,
    out: Out = None,
    data: Data = None,
    device: Device = None,
    jobs: Jobs = None,
    tensorboard: Board = False,
) -> None:
    """Learn a stream of tasks with a method, or do all runs of a study file.

    Streams: digits, imnist, icifar100, pmnist, rmnist and folder:PATH. Methods: npc, cpc, ewc, mas, si, ssl, lwf,
    finetune, joint and separate.

    Examples: `holdfast run digits npc ewc --seeds 3`, `holdfast run imnist ewc --set strength=30 --epochs 1`,
    `holdfast run study.toml`
    """
    from holdfast.study import files
    from holdfast.study.running import How

    how = How(data, device, jobs, tensorboard)
    given = {"epochs": epochs, "epoch": epoch, "model": model, "width": width, "lr": lr, "batch": batch}
    given |= {"heads": heads, "curve": curve, "precision": precision, "compile": compiled}
    given |= {"neurons": neurons or None, "deterministic": deterministic or None}
    given["judged_on"] = "validation" if validation else None
    chosen = {key: value for key, value in given.items() if value is not None}
    if what.endswith(".toml"):
        if methods or settings or name or chosen or tasks or seed or seeds:
            raise StudyError(
                f"{what} says what is run: leave out all but --out, --data, --device, --jobs, --tensorboard"
            )
        _carry_out(_study(out, Path(what).stem), files.read(Path(what)), how)
        return
    if not methods:
        raise StudyError(f"which method? For example: holdfast run {what} npc")
    if name is not None and len(methods) > 1:
        raise StudyError("--name is for one method; several would have the same")
    if seed and seeds:
        raise StudyError("--seeds and --seed say two things: give one of them")
    name = None if name is None else files.check_name(name)
    own = dict(map(files.setting, settings or []))
    runs = [
        Run.of(what, _plan(what, method, own, chosen | {"seed": number}), tasks, name)
        for number in seed or range(seeds or 1)
        for method in methods
    ]
    _carry_out(_study(out, what), runs, how)


def _plan(stream: str, method: str, settings: dict[str, Any], given: dict[str, Any]) -> "Plan":
    """What the user has said, over what is usual for the stream."""
    from holdfast.study import files
    from holdfast.study.usual import usual
    from holdfast.training import Plan

    plan = Plan(method, settings=settings, **(usual(stream) | given))
    files.check_settings(method, settings)
    return plan


@app.command()
def reproduce(
    stream: Annotated[str, typer.Argument(metavar="imnist|icifar100", help="Which of the paper's experiments.")],
    methods: Annotated[
        str, typer.Option(help="Which methods, separated by commas; `all` adds those that the paper does not have.")
    ] = ",".join(paper.METHODS),
    seeds: Seeds = 3,
    epochs: Epochs = None,
    tasks: Annotated[int, typer.Option(min=1, metavar="N", help="Only the first N tasks.")] = 5,
    width: Width = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="METHOD.NAME=VALUE", help="Another setting than the paper's; may be repeated."),
    ] = None,
    searched: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Take the settings that searches in this study found the best.")
    ] = None,
    validation: Validation = False,
    curve: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Points of the curves in each task; 10 on a GPU, 2 on a CPU.")
    ] = None,
    precision: Precision = None,
    compiled: Compile = None,
    out: Out = None,
    data: Data = None,
    device: Device = None,
    jobs: Jobs = None,
    tensorboard: Board = False,
) -> None:
    """Do the paper's experiment again: its protocol, its settings, its Table 1 beside what comes out here.

    The whole of it is for a GPU. For a laptop, make it smaller:
    `holdfast reproduce imnist --epochs 0.1 --width 0.25 --seeds 1 --methods npc,finetune`
    """
    from holdfast.study.running import How, on_gpu
    from holdfast.training import Plan

    if stream not in paper.SETTINGS:
        raise StudyError(f"the paper has no experiment {stream!r}; it has {' and '.join(paper.SETTINGS)}")
    how = How(data, device, jobs, tensorboard)
    gpu = on_gpu(how)
    plan = Plan(
        "npc",
        epochs=30 if epochs is None else epochs,
        width=1.0 if width is None else width,
        judged_on="validation" if validation else "test",
        curve=curve or (10 if gpu else 2),
        neurons=True,
        precision=precision or ("bf16" if gpu else "float32"),  # type: ignore[arg-type]
        compile=gpu if compiled is None else compiled,
    )
    chosen = [*paper.METHODS, *paper.FURTHER, paper.OFF] if methods == "all" else _names(methods)
    found = _searched(searched, stream, chosen) if searched else {}
    runs = paper.runs(stream, chosen, seeds, plan, tasks=tasks, settings=_by_method(settings or [], chosen, found))
    _carry_out(_study(out, stream), runs, how, beside_the_paper=True)


def _names(text: str) -> list[str]:
    from holdfast.methods import METHODS

    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METHODS and name != paper.OFF:
            raise StudyError(f"there is no method {name!r}; there are {', '.join(METHODS)} and {paper.OFF!r}")
    if not names:
        raise StudyError("--methods is empty")
    return names


def _searched(folder: Path, stream: str, methods: list[str]) -> dict[str, dict[str, Any]]:
    """The best settings of the searches in a folder, of those methods that were searched."""
    from holdfast.study import sweep

    found = sweep.chosen(folder, stream, methods)
    for method, settings in found.items():
        typer.echo(f"{default_name(method, settings)}: the best in {folder}")
    return found


def _by_method(texts: list[str], methods: list[str], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was found, with what `--set` says over it; all of it checked."""
    from holdfast.study import files
    from holdfast.training import Plan

    for text in texts:
        method, dot, rest = text.partition(".")
        if not dot:
            raise StudyError(f"--set {text}: say of which method, such as ewc.strength=30")
        if method not in methods:
            raise StudyError(f"--set {text}: {method} is not among the methods {', '.join(methods)}")
        name, value = files.setting(rest)
        found.setdefault(method, {})[name] = value
    for method, settings in found.items():
        own = {name: value for name, value in settings.items() if name != "lr"}
        files.check_settings(paper.actual(method), own)
        Plan("finetune", lr=settings.get("lr", 1.0))
    return found


@app.command()
def sweep(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The stream.")],
    method: Annotated[str, typer.Argument(metavar="METHOD", help="The method.")],
    over: Annotated[str | None, typer.Option(help="The setting, or lr; strength, weight or beta if not given.")] = None,
    values: Annotated[str | None, typer.Option(help="Other values than 0.001, 0.01, ... 1000, with commas.")] = None,
    finer: Annotated[bool, typer.Option("--finer/--coarse", help="Whether to look closer around the best.")] = True,
    seeds: Seeds = 1,
    tasks: Tasks = None,
    epochs: Epochs = None,
    model: Model = None,
    width: Width = None,
    lr: Rate = None,
    batch: BatchSize = None,
    settings: Settings = None,
    precision: Precision = None,
    compiled: Compile = None,
    out: Out = None,
    data: Data = None,
    device: Device = None,
    jobs: Jobs = None,
) -> None:
    """Search for a method's setting as the paper did, on validation images only.

    Seven decades first, then finer around the best. All values and what they gave are kept in DIR/sweeps.

    Example: `holdfast sweep digits ewc --seeds 3`
    """
    from rich.console import Console

    from holdfast.study import files, show
    from holdfast.study.running import How
    from holdfast.study.sweep import DECADES, FINER, OVER, acceptable, search

    given = {"epochs": epochs, "model": model, "width": width, "lr": lr, "batch": batch}
    given |= {"precision": precision, "compile": compiled}
    chosen = {key: value for key, value in given.items() if value is not None}
    plan = _plan(stream, method, dict(map(files.setting, settings or [])), chosen)
    over = over or OVER.get(method, "strength")
    if over != "lr":
        files.check_settings(method, {over: 1.0})
    if values:
        coarse = [_number(text) for text in values.split(",")]
        if refused := [value for value in coarse if not acceptable(plan, over, value)]:
            raise StudyError(f"--values: {method} does not take {refused[0]:g} as {over}")
    else:
        coarse = [value for value in DECADES if acceptable(plan, over, value)]
    study = _study(out, f"{stream}-sweep")
    found = search(
        stream,
        plan,
        over,
        seeds,
        lambda runs: _execute(study, runs, How(data, device, jobs)),
        tasks=tasks,
        values=coarse,
        finer=FINER if finer else (),
    ).with_those_before(study.folder)
    kept = found.save(study.folder)
    typer.echo(f"{found.common.name} on {stream}: average accuracy on validation images, %")
    Console().print(show.search(found))
    if found.at_the_edge:
        typer.echo(f"The best value is at the edge of what was tried: --values may reach further. All of it: {kept}")
    else:
        typer.echo(f"All of it: {kept}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise StudyError(f"--values: {text!r} is no number; write them as 0.1,1,10") from None


@app.command()
def report(folder: Folder) -> None:
    """Make the page of a study, with its tables and figures, from the runs that are finished.

    Example: `holdfast report studies/demo`
    """
    from holdfast.study import page

    typer.echo(f"The page is {page.write(_existing(folder))}")


@app.command("list")
def list_runs(folder: Folder) -> None:
    """List the runs of a study and how they stand.

    Example: `holdfast list studies/demo`
    """
    from rich.console import Console

    from holdfast.study import show

    entries = _existing(folder).entries
    Console().print(show.runs(entries))
    typer.echo(show.counts(entries))


def _study(out: Path | None, name: str) -> Study:
    folder = out if out is not None else Path("studies") / name.replace("/", "-").replace(":", "-")
    if folder.exists() and not folder.is_dir():
        raise StudyError(f"{folder} is a file, and a study is a folder: choose another with --out")
    return Study(folder)


def _existing(folder: Path) -> Study:
    if not (folder / "runs").is_dir():
        raise StudyError(f"{folder} is no study: there is no folder {folder / 'runs'}")
    return Study(folder)


def _carry_out(study: Study, runs: "Sequence[Run]", how: "How", *, beside_the_paper: bool = False) -> None:
    """Do the runs, and show what came out, also if it did not come out for all of them."""
    try:
        entries = _execute(study, runs, how)
    except StudyError:
        if any(study.look(run).record is not None for run in runs):
            _conclude(study, [study.look(run) for run in runs], beside_the_paper=beside_the_paper)
        raise
    _conclude(study, entries, beside_the_paper=beside_the_paper)


def _execute(study: Study, runs: "Sequence[Run]", how: "How") -> list[Entry]:
    from rich.console import Console

    from holdfast.study.logs import require_tensorboard
    from holdfast.study.running import prepare, run_all
    from holdfast.study.show import Bars

    if how.tensorboard:
        require_tensorboard()
    left = [run for run in runs if study.look(run).record is None]
    if len(left) < len(runs):
        typer.echo(f"{len(runs) - len(left)} of {len(runs)} runs are finished already, in {study.folder}")
    if not left:
        return [study.add(run) for run in runs]
    prepare(left, how)
    try:
        with Bars(Console(), len(left)) as bars:
            return run_all(study, runs, how, bars)
    except KeyboardInterrupt as interruption:
        typer.echo(f"holdfast: {str(interruption) or 'interrupted; the same command goes on where it was'}", err=True)
        raise typer.Exit(130) from None


def _conclude(study: Study, entries: list[Entry], *, beside_the_paper: bool = False) -> None:
    from rich.console import Console

    from holdfast.study import page, show
    from holdfast.study.tables import compare

    console = Console()
    digits = 2 if console.width >= 92 else 1  # for which a narrow terminal has room
    for comparison in compare(entries):
        console.print(show.beside_the_paper(comparison, digits) if beside_the_paper else show.results(comparison))
    typer.echo(f"The page is {page.write(study)}")


def main() -> None:
    """The entry point: an error that the user can do something about is one line, not a traceback."""
    warn_in_one_line()
    try:
        app()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check its permissions and the space left on the disk")
    except (UserError, ValueError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"holdfast: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
