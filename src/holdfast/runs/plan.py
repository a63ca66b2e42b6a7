"""The plan of a run: every choice that decides its outcome. Importing this module does not import torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from holdfast.methods import parts_of
from holdfast.methods.settings import Fraction, Positive, Range, number
from holdfast.models import MODELS, check_model

if TYPE_CHECKING:
    from holdfast.streams.tasks import Stream, Task

_STAGES = 10  # of the learning rate in a task, if it falls
_DEPTH = 4  # of nested settings
Natural = Annotated[int, Range(least=1)]
Seed = Annotated[int, Range(least=0)]


def _option(
    help: str,  # noqa: A002
    metavar: str | None = None,
    *,
    switch: str | None = None,
    negated: bool = False,
) -> dict[str, Any]:
    """Declare a field as an option of the command line: see `holdfast.study.options`."""
    return {"help": help, "metavar": metavar, "switch": switch, "negated": negated}


@dataclass(frozen=True)
class Plan:
    """Every choice that decides the outcome of a run on a stream.

    Args:
        method: the name of a method, or several joined by "+": "lwf+npc" is LwF around NPC.
        settings: the method's settings, where they differ from the defaults. Those of a composed method are named by
            part and setting, as in "npc.beta".
        model: the name of a model.
        width: the number of hidden neurons, as a multiple of the model's default.
        seed: seeds the model, the order of the images and all other random choices.
        lr: the learning rate of the optimizer, plain SGD as in the paper.
        decay: the factor by which the learning rate falls over each task, in ten stages of equal length. By default it
            is constant, as in the paper.
        batch: the number of images in a batch.
        epochs: the number of epochs per task.
        epoch: the length of an epoch. "paper": the number of training images of the whole source, whatever the size of
            the task; "task": the number of training images of the task.
        heads: "masked": one output layer for all tasks, masked to the outputs of the task at hand; "growing": outputs
            are added with each task, and tasks without outputs yet count as guessed.
        evaluate_on: "test", or "validation" to choose settings.
        curve: the number of points per task in the learning curves, including the one at its end.
        neurons: whether to record the importance of neurons over time and the drift of activations before the head.
        precision: the precision of training. "bf16" is autocast.
        compile: whether to compile the model and, on a GPU, to capture each step as a CUDA graph.
        deterministic: whether the same run must give the same bits on the same machine, on a GPU too. Slower: steps
            are not captured.
        threads: the number of threads of torch on the CPU. Sums depend on it in their last bits, so it is part of the
            plan and does not follow from the machine. Small models are fastest with one.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = field(default="paper_cnn", metadata=_option(f"The model: {', '.join(MODELS)}.", "NAME"))
    width: Positive = field(
        default=1.0, metadata=_option("Number of hidden neurons, as a multiple of the model's default.", "W")
    )
    seed: Seed = 0
    lr: Positive = field(default=0.05, metadata=_option("Learning rate of SGD.", "RATE"))
    decay: Fraction = field(
        default=1.0, metadata=_option("Factor by which the learning rate falls over each task.", "FACTOR")
    )
    batch: Natural = field(default=512, metadata=_option("Images per batch.", "N"))
    epochs: Positive = field(default=30.0, metadata=_option("Epochs per task.", "E"))
    epoch: Literal["paper", "task"] = field(
        default="paper", metadata=_option("Length of an epoch: all images of the source, or of the task.", "paper|task")
    )
    heads: Literal["masked", "growing"] = field(
        default="masked",
        metadata=_option("One output layer masked by task, or one that grows with each task.", "masked|growing"),
    )
    evaluate_on: Literal["test", "validation"] = field(
        default="test", metadata=_option("Evaluate on validation images.", switch="validation")
    )
    curve: Natural = field(default=1, metadata=_option("Points per task in the learning curves.", "N"))
    neurons: bool = field(
        default=False, metadata=_option("Record importance and drift of neurons, for two more figures.")
    )
    precision: Literal["float32", "tf32", "bf16"] = field(
        default="float32", metadata=_option("Precision of training.", "float32|tf32|bf16")
    )
    compile: bool = field(
        default=False, metadata=_option("Compile the model and, on a GPU, capture steps as CUDA graphs.", negated=True)
    )
    deterministic: bool = field(default=False, metadata=_option("Bitwise reproducible, also on a GPU."))
    threads: Natural = field(default=1, metadata=_option("Threads of each run on the CPU.", "N"))

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Mapping):
            raise ValueError(f"settings must be names and values, got {self.settings!r}")
        for name, hint in _hints().items():
            object.__setattr__(self, name, _checked(name, _plain(name, getattr(self, name)), hint))
        parts_of(self.method)
        check_model(self.model)
        for name in self.settings:  # a training loop provides these two: see `holdfast.methods.method.Needs`
            if (setting := name.rpartition(".")[2]) in ("free", "example"):
                raise ValueError(f"{setting} is not a setting of a plan: a run provides it itself")

    def steps(self, stream: "Stream", task: "Task") -> int:
        """The number of steps for a task, at least one."""
        samples = stream.epoch if self.epoch == "paper" else len(task.train)
        return max(1, int(self.epochs * samples / min(self.batch, len(task.train)) + 1e-6))

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate at a step of a task of `steps` steps.

        >>> Plan("npc", lr=0.1, decay=0.01).lr_at(99, 100)
        0.001
        """
        progress = (step * _STAGES // steps) / (_STAGES - 1)
        return self.lr * float(self.decay**progress)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return {name: _plain(name, getattr(self, name)) for name in _hints()}

    @property
    def choices(self) -> dict[str, Any]:
        """The method, the seed and every field that differs from its default."""
        defaults = default_plan()
        return {
            name: value
            for name, value in self.as_dict().items()
            if name in ("method", "seed") or value != defaults[name]
        }


def default_plan() -> dict[str, Any]:
    """The defaults of all fields but the method.

    >>> default_plan()["batch"], default_plan()["settings"]
    (512, {})
    """
    return {
        item.name: {} if item.name == "settings" else item.default
        for item in dataclasses.fields(Plan)
        if item.name != "method"
    }


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Plan, include_extras=True)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """A value of a field, if it is of the declared type and in the declared range."""
    if hint is str and not isinstance(value, str):
        raise ValueError(f"{name} must be a name, got {value!r}")
    if get_origin(hint) is Literal and value not in get_args(hint):
        raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}; got {value!r}")
    if hint is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    if get_origin(hint) is Annotated:
        kind, limits = get_args(hint)
        return _whole(name, value, limits) if kind is int else _number(name, value, limits)
    return value


def _number(name: str, value: Any, limits: Range) -> float:
    try:
        return number(name, value, above=limits.above, most=limits.most)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _whole(name: str, value: Any, limits: Range) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not limits.least <= value < 2**63:
        raise ValueError(f"{name} must be a whole number of at least {limits.least}, got {value!r}")
    return value


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """`value` as plain data for JSON. Numbers of NumPy and torch become Python's."""
    if depth > _DEPTH:
        raise ValueError(f"{name} must be plain data of at most {_DEPTH} levels")
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}: {key}", inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner, depth + 1) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{name} must be plain data, so that it can be recorded; got {value!r}")
