"""The command `holdfast`: a thin shell around the library."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from holdfast.streams import files, sources
from holdfast.streams.files import DataError

app = typer.Typer(
    name="holdfast",
    help="Continual learning: networks that learn task after task and forget less.",
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
    """Continual learning: networks that learn task after task and forget less."""


@data_app.command("list")
def list_(data: Data = None) -> None:
    """Show the data sets, where they were found, and how large they are.

    Example: `holdfast data list --data ~/datasets`
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "where", "images", "classes")
    for name in sources.SOURCES:
        table.add_row(name, *map(escape, _row(name, data)))
    table.add_row("folder:PATH", "any folder with a folder of images per class", "", "")
    Console().print(table)


def _row(name: str, data: Path | None) -> tuple[str, str, str]:
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
    for line in sources.verify(name, data):
        typer.echo(line)


def main() -> None:
    """The entry point: an error that the user can do something about is one line, not a traceback."""
    try:
        app()
    except DataError as error:
        _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}; check its permissions and the space left on the disk")


def _fail(message: str) -> NoReturn:
    print(f"holdfast: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
