"""Study files: many runs, said at once in TOML.

    stream = "digits"               # what stands above the runs is said for all of them
    model = "mlp"
    seeds = 3                       # 0, 1 and 2; or a list of seeds

    [[run]]
    method = ["ewc", "mas", "si"]   # a run for each method and each seed

    [[run]]
    method = "npc"
    settings.rate = 1e-3
    epochs = 10                     # in place of what is said above, if it is said there

A setting of a method may stand above the runs too; those of a run are added to it. Every mistake is one line, which
names the file, the line in it, what is wrong there and what there is instead.
"""

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from holdfast.study.records import Run, StudyError
from holdfast.study.usual import usual

if TYPE_CHECKING:
    from holdfast.methods import Method

Value = bool | int | float | str
Place = tuple[str | int, ...]
"""The keys that lead to a value of a study file, such as `("run", 1, "settings", "strength")`."""

_MOST_SEEDS = 1000
_REFUSALS = (StudyError, TypeError, ValueError, OverflowError, RecursionError)
_ELSEWHERE = {
    "seed": "there is no key seed: use seeds, as in seeds = 3 or seeds = [5]",
    "name": "a name is that of one run: write it below its [[run]]",
}


def read(path: Path) -> list[Run]:
    """All runs of a study file, in the order of the file: method by method, and seed by seed."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StudyError(f"{path}: {error.strerror or error}; a study file is TOML, as in study.toml") from None
    try:
        text = data.decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise StudyError(f"{path}:{line}: this is not UTF-8 text ({error.reason}); save it as UTF-8") from None
    return parse(text, str(path))


def parse(text: str, where: str) -> list[Run]:
    r"""All runs of the text of a study file, which is called `where` in messages.

    >>> runs = parse('stream = "digits"\nseeds = 2\n[[run]]\nmethod = ["ewc", "npc"]', "study.toml")
    >>> [run.label for run in runs]
    ['ewc, seed 0', 'ewc, seed 1', 'npc, seed 0', 'npc, seed 1']
    """
    document = _Document(where, text.replace("\r\n", "\n").split("\n"))
    keys = _keys()
    above = {key: given for key, given in document.data.items() if key != "run"}
    said = _understood(document, (), above, [*keys, "run"])
    found: dict[str, int] = {}
    runs = []
    for number, table in enumerate(_tables(document)):
        own = _understood(document, ("run", number), table, [*keys, "name"])
        for run in _multiplied(document, number, said, own):
            with document.at("run", number):
                if run.id in found:
                    first = document.line("run", found[run.id])
                    raise ValueError(f"{run.label} is the same run as one of line {first}: leave one of them out")
            found[run.id] = number
            runs.append(run)
    return runs


def value(text: str) -> Value:
    """A value of the command line: as TOML where it is that, else the text itself.

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
    """A setting of the command line.

    >>> setting("rate=1e-3")
    ('rate', 0.001)
    """
    name, _, given = (part.strip() for part in text.partition("="))
    if not name.isidentifier() or not given:
        raise StudyError(f"a setting is written name=value, as in rate=1e-3; got {text!r}")
    return name, value(given)


def check_settings(method: str, settings: Mapping[str, Any]) -> None:
    """Raise a StudyError if a method has no such settings, or refuses one of them.

    >>> check_settings("lwf", {"weight": 0.5})
    >>> check_settings("lwf", {"wieght": 0.5})
    Traceback (most recent call last):
    holdfast.study.records.StudyError: lwf has no setting 'wieght'; it has weight, temperature: did you mean weight?
    """
    from holdfast.methods import METHODS

    try:
        _of_plan("method", method)
        known = _settings_of(METHODS[method])
        for name in settings:
            if name not in known:
                raise ValueError(f"{method} has no setting {name!r}; it has {_instead(name, known)}")
        _build(METHODS[method], settings)
    except _REFUSALS as error:
        raise StudyError(str(error)) from None


# ---- the text, and where in it something stands ----


@dataclass(frozen=True)
class _Document:
    where: str
    lines: list[str]

    @cached_property
    def data(self) -> dict[str, Any]:
        try:
            return tomllib.loads("\n".join(self.lines))
        except (ValueError, RecursionError) as error:
            raise StudyError(self._syntax(str(error))) from None

    def _syntax(self, message: str) -> str:
        """The message of tomllib, with the line where it is in all other messages."""
        said = re.fullmatch(r"(.*) \(at (?:line (\d+), (column \d+)|end of document)\)", message, re.DOTALL)
        if said is None:
            return f"{self.where}: this is not TOML: {message}"
        line, column = said[2] or len(self.lines), said[3] or "end of file"
        return f"{self.where}:{line}: this is not TOML: {said[1]} ({column})"

    def line(self, *place: str | int) -> int:
        """The line in which what stands at `place` begins.

        tomllib does not tell, but the first lines of a file are TOML wherever a statement has ended, and nowhere else.
        """
        begins = 1
        for count in range(1, len(self.lines)):
            try:
                data = tomllib.loads("\n".join(self.lines[:count]))
            except tomllib.TOMLDecodeError:
                continue
            if _holds(data, place):
                break
            begins = count + 1
        return begins

    @contextmanager
    def at(self, *place: str | int) -> Iterator[None]:
        """Say of what is refused in the block where it stands."""
        try:
            yield
        except _REFUSALS as error:
            raise StudyError(f"{self.where}:{self.line(*place)}: {error}") from None


def _holds(data: Any, place: Place) -> bool:
    for key in place:
        try:
            data = data[key]
        except (LookupError, TypeError):
            return False
    return True


# ---- tables of keys and values ----


def _keys() -> list[str]:
    """What may be said above the runs and of each."""
    from holdfast.training import Plan

    return ["stream", "tasks", "seeds", *(item.name for item in dataclasses.fields(Plan) if item.name != "seed")]


def _tables(document: _Document) -> list[dict[str, Any]]:
    tables = document.data.get("run")
    if not tables and not isinstance(tables, dict):
        raise StudyError(f'{document.where}: there are no runs: add [[run]] and, below it, method = "npc"')
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        with document.at("run"):
            raise ValueError("a run is a table of its own: write [[run]], and below it what is said of it")
    return tables


def _understood(document: _Document, place: Place, table: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """The values of a table, each checked by itself, so that a mistake is found in its own line."""
    said = {}
    for key, given in table.items():
        with document.at(*place, key):
            if key not in known:
                raise ValueError(_no_such_key(key, known))
            if not _fits(given):
                raise ValueError(f"{key} has a whole number of more than 64 bits, which is not TOML")
            said[key] = _READERS[key](given) if key in _READERS else _of_plan(key, given)
    return said


def _no_such_key(key: str, known: list[str]) -> str:
    from holdfast.methods import METHODS

    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    if owners := [method for method, kind in METHODS.items() if key in _settings_of(kind)]:
        return f"{key} is a setting of {', '.join(owners)}: write settings.{key} = ..."
    return f"there is no key {key!r}; there are {_instead(key, known)}"


def _instead(name: str, known: list[str]) -> str:
    """What there is, and which of it may have been meant."""
    near = " or ".join(get_close_matches(name, known))
    return (", ".join(known) or "none") + (f": did you mean {near}?" if near else "")


def _multiplied(document: _Document, number: int, above: dict[str, Any], own: dict[str, Any]) -> list[Run]:
    """A run for each method and each seed of a [[run]]."""
    from holdfast.training import Plan

    place = "run", number
    said = {"seeds": [0], "tasks": None, "name": None, **above, **own}
    said["settings"] = {**above.get("settings", {}), **own.get("settings", {})}
    with document.at(*place):
        for key, example in (("method", "npc"), ("stream", "digits")):
            if key not in said:
                raise ValueError(f'this run has no {key}: add one, as in {key} = "{example}"')
    stream, tasks, methods, seeds, name = (said.pop(key) for key in ("stream", "tasks", "method", "seeds", "name"))
    if name is not None and len(methods) > 1:
        with document.at(*place, "name"):
            raise ValueError(f"a name is for one method, and these are {', '.join(methods)}: write a [[run]] for each")
    runs = []
    for method in methods:
        for key, given in said["settings"].items():
            with document.at(*(place if key in own.get("settings", {}) else ()), "settings", key):
                check_settings(method, {key: given})
        with document.at(*place):
            check_settings(method, said["settings"])
            runs += [Run.of(stream, Plan(method, seed=seed, **(usual(stream) | said)), tasks, name) for seed in seeds]
    return runs


# ---- single values ----


def _fits(given: Any) -> bool:
    """Whether all whole numbers in a value are such as TOML has, which tomllib does not look at."""
    if isinstance(given, dict):
        return all(map(_fits, given.values()))
    if isinstance(given, list):
        return all(map(_fits, given))
    return not isinstance(given, int) or -(2**63) <= given < 2**63


def _of_plan(key: str, given: Any) -> Any:
    from holdfast.training import Plan

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
    if not isinstance(given, dict):
        raise ValueError(f"settings must be a table, as in settings = {{ strength = 10 }}, got {given!r}")
    return given


def _seeds(given: Any) -> list[int]:
    if type(given) is int and 1 <= given <= _MOST_SEEDS:
        return list(range(given))
    if isinstance(given, list) and given and all(type(seed) is int and seed >= 0 for seed in given):
        if len(set(given)) == len(given):
            return given
        raise ValueError(f"seeds must be different from each other, got {given!r}")
    raise ValueError(
        f"seeds must be how many there are, from 1 to {_MOST_SEEDS}, or a list of whole numbers of at least 0, as in "
        f"seeds = [5, 6]; got {given!r}"
    )


def _stream(given: Any) -> str:
    from holdfast.streams import STREAMS

    if isinstance(given, str) and (given in STREAMS or given.removeprefix("folder:") not in ("", given)):
        return given
    raise ValueError(f"there is no stream {given!r}; there are {', '.join(STREAMS)} and folder:PATH")


def _tasks(given: Any) -> int:
    if type(given) is not int or given < 1:
        raise ValueError(f"tasks must be a whole number of at least 1, got {given!r}")
    return given


def check_name(given: Any) -> str:
    """How a run is called: one line of text."""
    if not isinstance(given, str) or not given.strip() or not given.isprintable():
        raise ValueError(f"name must be a line of text, got {given!r}")
    return given


_READERS: dict[str, Callable[[Any], Any]] = {
    "method": _methods,
    "settings": _settings,
    "seeds": _seeds,
    "stream": _stream,
    "tasks": _tasks,
    "name": check_name,
}


# ---- methods ----


def _settings_of(kind: "type[Method]") -> list[str]:
    """The settings of a method that are plain values: modules and functions cannot be said in a file."""
    _model, _optimizer, *names = inspect.signature(kind).parameters
    hints = get_type_hints(kind.__init__)
    return [name for name in names if name not in hints or _is_plain(hints[name])]


def _is_plain(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return all(map(_is_plain, get_args(hint)))
    return hint in (*get_args(Value), NoneType) or get_origin(hint) is Literal


def _build(kind: "type[Method]", settings: Mapping[str, Any]) -> None:
    """Build a method as a run does, around a model of a few neurons, to hear what it says of its settings."""
    import torch

    from holdfast.methods.plastic import Plastic
    from holdfast.models import build_model

    with torch.random.fork_rng(devices=[]):
        model = build_model("mlp", (1, 2, 2), 2, width=0.01)
    given = {"free": [model.head], **settings} if issubclass(kind, Plastic) else settings
    kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
