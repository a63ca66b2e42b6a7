"""The argument `free`: parameters chosen by modules, parameters and names; and patterns of names."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

Choice = nn.Module | nn.Parameter | str
"""A module, a parameter, or the name of either. A name may be a pattern, such as `"*.bias"`."""


class Selection:
    """Some parameters of a model.

    Args:
        model: the model.
        given: one choice, or several.
        argument: the name of the argument, for errors.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    >>> len(Selection(model, [model[1], "*.bias"], "free").parameters)
    3
    """

    def __init__(self, model: nn.Module, given: Choice | Iterable[Choice], argument: str) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._argument = argument
        choices = [given] if isinstance(given, nn.Module | nn.Parameter | str) else list(given)
        self._chosen = [chosen for choice in choices for chosen in self._resolved(choice)]

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The chosen parameters, including parameters that chosen modules got later."""
        return {p for chosen in self._chosen for p in _parameters_of(chosen)}

    def _resolved(self, choice: Choice) -> list[nn.Module | nn.Parameter]:
        argument = self._argument
        if isinstance(choice, str):
            return self._named(choice)
        if not isinstance(choice, nn.Module | nn.Parameter):
            raise TypeError(
                f"{argument} takes modules, parameters and names, as in {argument}=[model.head, '*.bias']; "
                f"got {choice!r}"
            )
        if isinstance(choice, nn.Module) and choice not in set(self._modules.values()):
            raise ValueError(f"{argument} has a {type(choice).__name__} that is not a module of this model: {choice}")
        if isinstance(choice, nn.Parameter) and choice not in set(self._parameters.values()):
            raise ValueError(f"{argument} has a parameter of shape {tuple(choice.shape)} that is not of this model")
        return [choice]

    def _named(self, pattern: str) -> list[nn.Module | nn.Parameter]:
        known = {**self._modules, **self._parameters}
        found = [chosen for name, chosen in known.items() if fnmatchcase(name, pattern)]
        if not found:
            near = " or ".join(map(repr, get_close_matches(pattern, known)))
            remedy = f"did you mean {near}?" if near else "names are those of model.named_parameters()"
            raise ValueError(f"{self._argument}: the model has no module or parameter {pattern!r}; {remedy}")
        return found


def _parameters_of(chosen: nn.Module | nn.Parameter) -> Iterator[nn.Parameter]:
    if isinstance(chosen, nn.Module):
        yield from chosen.parameters()
    else:
        yield chosen


def pattern_of(name: str) -> str:
    """Replace the numbers in a name by `*`.

    >>> pattern_of("layers.0.conv1.bias")
    'layers.*.conv1.bias'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def patterns(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in numbers, by a pattern that matches them.

    >>> patterns(["layers.0.bias", "layers.1.bias", "conv1.bias"])
    {'layers.*.bias': ['layers.0.bias', 'layers.1.bias'], 'conv1.bias': ['conv1.bias']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(name)
    return {pattern if len(group) > 1 else group[0]: group for pattern, group in groups.items()}


def listed(names: Iterable[str], width: int = 160) -> str:
    """The patterns of names and how many each stands for, cut after about `width` characters.

    >>> listed(["layers.0.bias", "layers.1.bias", "head.bias"])
    'layers.*.bias (2), head.bias'
    >>> listed(["a.bias", "b.bias", "c.bias"], width=10)
    'a.bias and 2 more'
    """
    entries = [f"{name} ({len(group)})" if len(group) > 1 else name for name, group in patterns(names).items()]
    shown = entries[:1]
    for entry in entries[1:]:
        if len(", ".join([*shown, entry])) > width:
            return f"{', '.join(shown)} and {len(entries) - len(shown)} more"
        shown.append(entry)
    return ", ".join(shown)
