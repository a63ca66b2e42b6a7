"""Builds a method from its name, such as "lwf+npc", and its settings."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import alternatives
from holdfast.methods import METHODS, parts_of
from holdfast.methods.settings import checked, settings_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from holdfast.methods.method import Method


def split_settings(method: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Split settings by part. Those of a composed method are named by part and setting.

    >>> split_settings("lwf+npc", {"lwf.weight": 0.1, "npc.beta": 0.7})
    {'lwf': {'weight': 0.1}, 'npc': {'beta': 0.7}}
    >>> split_settings("npc", {"beta": 0.7})
    {'npc': {'beta': 0.7}}
    """
    parts = parts_of(method)
    if len(parts) == 1:
        return {method: dict(settings)}
    split: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for name, value in settings.items():
        part, _, setting = name.partition(".")
        if part not in split or not setting:
            raise ValueError(f"{method} has no setting {name!r}; name the part too, as in {_example(parts, name)}")
        split[part][setting] = value
    return split


def _example(parts: Iterable[str], wanted: str) -> str:
    """A setting with its part: the wanted one if a part has it."""
    known = [(part, name) for part in parts for name in settings_of(METHODS[part])]
    part, name = next((each for each in known if each[1] == wanted), known[0] if known else ("npc", "beta"))
    return f"{part}.{name}"


def joined_settings(split: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The inverse of `split_settings`."""
    if len(split) == 1:
        return {name: value for settings in split.values() for name, value in settings.items()}
    return {f"{part}.{name}": value for part, settings in split.items() for name, value in settings.items()}


def defaults_of(method: str) -> dict[str, Any]:
    """All settings of a method that are plain values, with their defaults.

    >>> defaults_of("lwf+npc")
    {'lwf.weight': 1.0, 'lwf.temperature': 2.0, 'npc.beta': 0.7, 'npc.rate': 0.0005, 'npc.gain': 1.0}
    """
    return joined_settings({part: settings_of(METHODS[part]) for part in parts_of(method)})


def summary_of(method: str) -> str:
    """What a method does, in a line: the first one of the docstring of its class.

    >>> summary_of("finetune")
    'The bare optimizer, with the interface of a method.'
    """
    lines = [(part, (METHODS[part].__doc__ or "").strip().partition("\n")[0]) for part in parts_of(method)]
    return lines[0][1] if len(lines) == 1 else " ".join(f"{part}: {line}" for part, line in lines)


def searched_setting(method: str) -> str:
    """The setting that a search varies by default: one of the outermost part, or the learning rate.

    >>> searched_setting("lwf+npc"), searched_setting("finetune")
    ('lwf.weight', 'lr')
    """
    outermost, *others = parts_of(method)
    name = METHODS[outermost].searched
    return f"{outermost}.{name}" if others and name != "lr" else name


def check(method: str, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError or TypeError if the parts cannot be combined or a setting has a wrong value.

    >>> check("npc+cpc", {})
    Traceback (most recent call last):
    ValueError: NPC and CPC cannot be combined: both control plasticity
    """
    split = split_settings(method, settings)
    kinds = [METHODS[part] for part in split]
    for number, kind in enumerate(kinds):
        kind.check_combination(kinds[number + 1 :])
    for part, given in split.items():
        known = settings_of(METHODS[part])
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{part} has no setting {name!r}; it has {alternatives(name, known)}")
            checked(METHODS[part], name, value)


def build(
    method: str,
    model: "nn.Module",
    optimizer: "Optimizer",
    settings: Mapping[str, Any] | None = None,
    *,
    heads: Iterable["nn.Module"] = (),
    example: Any = None,
    compile: bool = False,  # noqa: A002
) -> "Method":
    """Build a method around an optimizer, and meet the needs of each part.

    Args:
        method: one name, or several joined by "+", the outermost first.
        model: the model in training.
        optimizer: the innermost optimizer.
        settings: the settings, named as in a plan.
        heads: the task heads, for methods that leave them free.
        example: a batch of inputs, for methods that need one before the model is compiled.
        compile: whether the methods compile their own part of a step on a GPU.
    """
    heads = list(heads)
    for part, given in reversed(split_settings(method, settings or {}).items()):
        kind = METHODS[part]
        supplied: dict[str, Any] = {}
        if kind.needs.heads:
            supplied["free"] = heads
        if kind.needs.example and example is not None:
            supplied["example"] = example
        optimizer = kind(model, optimizer, **supplied, **given)
        optimizer.compile = compile
    return optimizer  # type: ignore[return-value]
