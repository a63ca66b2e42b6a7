"""Study files: many runs in one TOML file.

    stream = "digits"               # fields above the runs apply to all of them
    model = "mlp"
    seeds = 3                       # 0, 1 and 2; or a list of seeds

    [[run]]
    method = ["ewc", "mas", "si"]   # one run for each method and seed

    [[run]]
    method = "npc"
    settings.rate = 1e-3
    epochs = 10                     # replaces the field above, if there is one

    [[run]]
    method = "lwf+npc"              # LwF around NPC
    settings.lwf.weight = 0.1
    settings.npc.beta = 0.7

Settings above the runs apply to all methods. A run adds its own. Every error is one line with the file, the line
number, the mistake and the alternatives.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from holdfast.errors import alternatives
from holdfast.methods import METHODS
from holdfast.methods.building import check, defaults_of
from holdfast.runs.plan import Plan
from holdfast.study.defaults import defaults_for
from holdfast.study.store import Run, StudyError

Value = bool | int | float | str
Keys = tuple[str | int, ...]
"""The keys that lead to a value, such as `("run", 1, "settings", "strength")`."""

_MOST_SEEDS = 1000
_REFUSALS = (StudyError, TypeError, ValueError, OverflowError, RecursionError)
_ELSEWHERE = {
    "seed": "unknown field seed: use seeds, as in seeds = 3 or seeds = [5]",
    "name": "a name belongs to one run: write it below its [[run]]",
}


def read(path: Path) -> list[Run]:
    """Read all runs of a study file, in the order of the file, by method and seed."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StudyError(f"{path}: {error.strerror or error}; a study file is TOML, as in study.toml") from None
    try:
        text = data.decode("utf-8-sig")  # some editors start a file with a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise StudyError(f"{path}:{line}: this is not UTF-8 text ({error.reason}); save it as UTF-8") from None
    return parse(text, str(path))


def parse(text: str, filename: str) -> list[Run]:
    r"""Parse all runs of the text of a study file.

    >>> runs = parse('stream = "digits"\nseeds = 2\n[[run]]\nmethod = ["ewc", "npc"]', "study.toml")
    >>> [run.label for run in runs]
    ['ewc, seed 0', 'ewc, seed 1', 'npc, seed 0', 'npc, seed 1']
    """
    document = _Document(filename, text.replace("\r\n", "\n"))
    names = [*_FIELDS, "run"]
    common = _fields(document, (), {key: value for key, value in document.data.items() if key != "run"}, names)
    found: dict[str, int] = {}
    runs = []
    for number, table in enumerate(_tables(document)):
        own = _fields(document, ("run", number), table, [*_FIELDS, "name"])
        for run in _multiplied(document, number, common, own):
            with document.at("run", number):
                if run.id in found:
                    first = document.line("run", found[run.id])
                    raise ValueError(f"{run.label} is the same run as one of line {first}: leave one of them out")
            found[run.id] = number
            runs.append(run)
    return runs


def value(text: str) -> Value:
    """Parse a value of the command line: as TOML if possible, else as the text itself.

    >>> value("3"), value("1e-3"), value("true"), value('"3"'), value("proximal")
    (3, 0.001, True, '3', 'proximal')
    """
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    found = document["value"]
    return found if len(document) == 1 and isinstance(found, Value) and _fits(found) else text


def setting(text: str) -> tuple[str, Value]:
    """Parse a setting of the command line.

    >>> setting("rate=1e-3"), setting("npc.beta=0.7")
    (('rate', 0.001), ('npc.beta', 0.7))
    """
    name, _, given = (part.strip() for part in text.partition("="))
    if not all(part.isidentifier() for part in name.split(".")) or not given:
        raise StudyError(f"a setting is written name=value, as in rate=1e-3; got {text!r}")
    return name, value(given)


def check_settings(method: str, settings: Mapping[str, Any]) -> None:
    """Raise a StudyError if a method is unknown, cannot be composed so, or refuses a setting.

    >>> check_settings("lwf+npc", {"lwf.weight": 0.5})
    >>> check_settings("lwf", {"wieght": 0.5})
    Traceback (most recent call last):
    holdfast.study.store.StudyError: lwf has no setting 'wieght'; it has weight, temperature: did you mean weight?
    """
    try:
        check(method, settings)
    except _REFUSALS as error:
        raise StudyError(str(error)) from None


# ---- the text, and the lines of its values ----


class _Statement(NamedTuple):
    """A statement of a TOML file: the line on which it starts, and the values it defines."""

    line: int
    table: Keys
    data: dict[str, Any]

    def defines(self, path: Keys) -> bool:
        if path[: len(self.table)] == self.table:
            return _holds(self.data, path[len(self.table) :])
        return self.table[: len(path)] == path


@dataclass(frozen=True)
class _Document:
    filename: str
    text: str

    @cached_property
    def data(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise StudyError(self._syntax(str(error))) from None

    def _syntax(self, message: str) -> str:
        """The message of tomllib in the form of all other messages."""
        parts = re.fullmatch(r"(.*) \(at (?:line (\d+), (column \d+)|end of document)\)", message, re.DOTALL)
        if parts is None:
            return f"{self.filename}: this is not TOML: {message}"
        line, column = parts[2] or self.text.count("\n") + 1, parts[3] or "end of file"
        return f"{self.filename}:{line}: this is not TOML: {parts[1]} ({column})"

    @cached_property
    def statements(self) -> list[_Statement]:
        return list(_statements(self.text))

    def line(self, *path: str | int) -> int:
        """The line of the statement that first defines the value at `path`."""
        return next((statement.line for statement in self.statements if statement.defines(path)), 1)

    @contextmanager
    def at(self, *path: str | int) -> Iterator[None]:
        """Add the file and the line to errors about the value at `path`."""
        try:
            yield
        except _REFUSALS as error:
            raise StudyError(f"{self.filename}:{self.line(*path)}: {error}") from None


_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # multi-line strings
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'  # strings
    r"|'[^'\n]*'"
    r"|\#[^\n]*"  # comments
    r"|.",
    re.DOTALL,
)


def _statements(text: str) -> Iterator[_Statement]:
    """Split valid TOML into statements. Each of them is valid TOML by itself."""
    table: Keys = ()
    counts: dict[Keys, int] = {}
    for line, source in _sources(text):
        data = tomllib.loads(source)
        if source.startswith("["):
            table, data = _opened(data, counts), {}
        yield _Statement(line, table, data)


def _sources(text: str) -> Iterator[tuple[int, str]]:
    """The text of each statement with its line. A statement ends at a line break outside strings and brackets."""
    line, begins, depth, source = 1, 1, 0, ""
    for token in [*_TOKEN.findall(text), "\n"]:
        if token == "\n" and depth == 0:
            if source.strip():
                yield begins, source.strip()
            source = ""
        elif not token.startswith("#"):
            if not source.strip():
                begins = line
            depth += (token in "[{") - (token in "]}")
            source += token
        line += token.count("\n")


def _opened(header: Any, counts: dict[Keys, int]) -> Keys:
    """The path of the table that a header opens. `[[run]]` opens the next table of an array."""
    path: Keys = ()
    while header:
        ((key, header),) = header.items()
        path = (*path, key)
        if isinstance(header, list):
            counts[path] = counts.get(path, -1) + 1
            (header,) = header
        if path in counts:
            path = (*path, counts[path])
    return path


def _holds(data: Any, path: Keys) -> bool:
    for key in path:
        try:
            data = data[key]
        except (LookupError, TypeError):
            return False
    return True


# ---- fields ----

_FIELDS = ["stream", "tasks", "seeds", *(item.name for item in dataclasses.fields(Plan) if item.name != "seed")]
"""Fields allowed above the runs and in each run."""


def _tables(document: _Document) -> list[dict[str, Any]]:
    tables = document.data.get("run")
    if not tables and not isinstance(tables, dict):
        raise StudyError(f'{document.filename}: there are no runs: add [[run]] and, below it, method = "npc"')
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        with document.at("run"):
            raise ValueError("a run must be a table: write [[run]] and its fields below it")
    return tables


def _fields(document: _Document, path: Keys, table: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """The values of a table, each checked alone, so that an error has the line of its value."""
    fields = {}
    for key, given in table.items():
        with document.at(*path, key):
            if key not in known:
                raise ValueError(_no_such_field(key, known))
            if not _fits(given):
                raise ValueError(f"{key} has a whole number of more than 64 bits, which is not TOML")
            fields[key] = _PARSERS[key](given) if key in _PARSERS else _of_plan(key, given)
    return fields


def _no_such_field(key: str, known: list[str]) -> str:
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    if owners := [method for method in METHODS if key in defaults_of(method)]:
        return f"{key} is a setting of {', '.join(owners)}: write settings.{key} = ..."
    return f"unknown field {key!r}; available: {alternatives(key, known)}"


def _multiplied(document: _Document, number: int, common: dict[str, Any], own: dict[str, Any]) -> list[Run]:
    """One run for each method and seed of a [[run]]."""
    path = "run", number
    fields = {"seeds": [0], "tasks": None, "name": None, **common, **own}
    fields["settings"] = {**common.get("settings", {}), **own.get("settings", {})}
    with document.at(*path):
        for key, example in (("method", "npc"), ("stream", "digits")):
            if key not in fields:
                raise ValueError(f'this run has no {key}: add one, as in {key} = "{example}"')
    stream, tasks, methods, seeds, name = (fields.pop(key) for key in ("stream", "tasks", "method", "seeds", "name"))
    if name is not None and len(methods) > 1:
        with document.at(*path, "name"):
            raise ValueError(f"a name is for one method, and these are {', '.join(methods)}: write a [[run]] for each")
    runs = []
    for method in methods:
        for key, given in fields["settings"].items():
            table = path if key in own.get("settings", {}) else ()
            with document.at(*table, "settings", *_written(document, table, key)):
                check_settings(method, {key: given})
        with document.at(*path):
            check_settings(method, fields["settings"])
            plan = Plan(method, **(defaults_for(stream) | fields))
            runs += [Run.of(stream, dataclasses.replace(plan, seed=seed), tasks, name) for seed in seeds]
    return runs


def _written(document: _Document, table: Keys, name: str) -> list[str]:
    """The keys under which a setting was written: `npc.beta` is one quoted key, or two."""
    return [name] if _holds(document.data, (*table, "settings", name)) else name.split(".")


# ---- single values ----


def _fits(given: Any) -> bool:
    """Whether all whole numbers in a value have at most 64 bits, as TOML requires; tomllib does not check it."""
    if isinstance(given, dict):
        return all(map(_fits, given.values()))
    if isinstance(given, list):
        return all(map(_fits, given))
    return not isinstance(given, int) or -(2**63) <= given < 2**63


def _of_plan(key: str, given: Any) -> Any:
    if get_type_hints(Plan)[key] is str and not isinstance(given, str):
        raise ValueError(f"{key} must be a name in quotes, got {given!r}")
    Plan(**{"method": "finetune", key: given})
    return given


def _methods(given: Any) -> list[str]:
    methods = given if isinstance(given, list) else [given]
    for method in methods:
        _of_plan("method", method)
    if not methods or len(set(methods)) < len(methods):
        raise ValueError(f"method must be a name or a list of different names, got {given!r}")
    return methods


def _settings(given: Any) -> dict[str, Any]:
    """Settings by name. Those of a composed method may be tables: `npc = { beta = 0.7 }` is `npc.beta`."""
    if not isinstance(given, dict):
        raise ValueError(f"settings must be a table, as in settings = {{ strength = 10 }}, got {given!r}")
    settings: dict[str, Any] = {}
    for name, inner in given.items():
        settings |= {f"{name}.{key}": each for key, each in inner.items()} if isinstance(inner, dict) else {name: inner}
    return settings


def _seeds(given: Any) -> list[int]:
    if type(given) is int and 1 <= given <= _MOST_SEEDS:
        return list(range(given))
    if isinstance(given, list) and given and all(type(seed) is int and seed >= 0 for seed in given):
        if len(set(given)) == len(given):
            return given
        raise ValueError(f"seeds must be different from each other, got {given!r}")
    raise ValueError(
        f"seeds must be a number of seeds, from 1 to {_MOST_SEEDS}, or a list of whole numbers of at least 0, as in "
        f"seeds = [5, 6]; got {given!r}"
    )


def _stream(given: Any) -> str:
    from holdfast.streams import STREAMS, unknown_stream

    if isinstance(given, str) and (given in STREAMS or given.removeprefix("folder:") not in ("", given)):
        return given
    raise unknown_stream(given)


def _tasks(given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"tasks must be a whole number of at least 1, got {given!r}")
    return given


def check_name(given: Any) -> str:
    """The name of a run, if it is one line of text."""
    if not isinstance(given, str) or not given.strip() or not given.isprintable():
        raise ValueError(f"name must be a line of text, got {given!r}")
    return given


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "method": _methods,
    "settings": _settings,
    "seeds": _seeds,
    "stream": _stream,
    "tasks": _tasks,
    "name": check_name,
}
