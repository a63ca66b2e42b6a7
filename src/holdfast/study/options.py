"""Options of the command line, declared by the fields of a plan."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from holdfast.runs.plan import Plan, default_plan
from holdfast.study.defaults import defaults_for

_WITH_DEFAULTS = {"digits": "digits", "folder": "folder:"}
"""The streams with defaults of their own, by the name that `--help` gives them."""


@dataclass(frozen=True)
class Option:
    """A field of a plan as an option.

    Args:
        field: the name of the field.
        kind: the type of its values on the command line: bool, int, float or str.
        help: one sentence for `--help`.
        metavar: the name of its value in `--help`.
        switch: the value that the option sets, if it takes none. Its name is then the name of the option.
        negated: whether a second option, `--no-FIELD`, sets the field to False.
    """

    field: str
    kind: type
    help: str
    metavar: str | None
    switch: str | None
    negated: bool

    @property
    def declaration(self) -> str:
        """The names of the option, as `typer` takes them.

        >>> [options()[name].declaration for name in ("lr", "compile", "evaluate_on")]
        ['--lr', '--compile/--no-compile', '--validation']
        """
        name = f"--{self.switch or self.field}"
        return f"{name}/--no-{self.field}" if self.negated else name

    @property
    def default(self) -> str:
        """The default values, by stream where they differ; nothing for an option without a value.

        >>> options()["model"].default, options()["epochs"].default, options()["neurons"].default
        ('paper_cnn; digits: mlp; folder: small_cnn', '30', '')
        """
        if self.kind is bool:
            return ""
        common = (default_plan() | defaults_for(""))[self.field]
        others = {name: defaults_for(stream).get(self.field, common) for name, stream in _WITH_DEFAULTS.items()}
        found = [_short(common), *(f"{name}: {_short(value)}" for name, value in others.items() if value != common)]
        return "; ".join(found)

    def value(self, given: Any) -> Any:
        """The value of the field for a value of the option."""
        return given if self.switch is None else self.switch

    def words(self, value: Any) -> list[str]:
        """The words of a command that set the field to `value`.

        >>> options()["epochs"].words(20.0), options()["neurons"].words(True)
        (['--epochs', '20'], ['--neurons'])
        """
        if self.kind is not bool:
            return [self.declaration, _short(value)]
        return [f"--no-{self.field}" if value is False else f"--{self.switch or self.field}"]


@cache
def options() -> dict[str, Option]:
    """The fields of a plan with an option, by name."""
    hints = get_type_hints(Plan, include_extras=True)
    return {
        item.name: Option(item.name, bool if item.metadata["switch"] else _kind(hints[item.name]), **item.metadata)
        for item in dataclasses.fields(Plan)
        if item.metadata
    }


def _kind(hint: Any) -> type:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint if hint in (bool, int, float) else str


def _short(value: Any) -> str:
    return str(value).removesuffix(".0")
