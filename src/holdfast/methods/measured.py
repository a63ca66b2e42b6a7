"""Measurements of a model that was trained elsewhere, and their file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast import atomic
from holdfast.directions import Directions, Moment, dense

_FORMAT = "holdfast measurements, version 1"
_PARTS = ("importance", "diagonal", *Directions._fields)


@dataclass(frozen=True, repr=False)
class Measured:
    """The importances of a model's neurons and the second moments of its layers' inputs, by name.

    `holdfast.measure` returns it, and the `remember` of NPC and DPC take it.
    """

    importance: dict[str, Tensor]
    """One value per neuron. The mean of each layer is 1."""
    moments: dict[str, Moment]
    """The second moment A of the inputs, as DPC keeps it."""
    samples: int
    """The number of samples on which both were measured."""

    def save(self, path: str | Path) -> None:
        """Write a `safetensors` file."""
        parts: dict[str, dict[str, Tensor]] = {"importance": self.importance, "diagonal": {}}
        for name, moment in self.moments.items():
            fields = {"diagonal": moment} if isinstance(moment, Tensor) else moment._asdict()
            for part, tensor in fields.items():
                parts.setdefault(part, {})[name] = tensor
        tensors = {
            f"{part}:{name}": tensor.detach().cpu().contiguous()
            for part, by_name in parts.items()
            for name, tensor in by_name.items()
        }
        content = _safetensors().torch.save(tensors, {"format": _FORMAT, "samples": str(self.samples)})
        atomic.write(Path(path), content)

    def moment(self, name: str) -> Tensor:
        """The second moment of a layer's inputs as a matrix, or its diagonal for an embedding, in float64."""
        moment = self.moments[name]
        return moment.double() if isinstance(moment, Tensor) else dense(Directions(*(each.double() for each in moment)))

    def fit(self, neurons: Mapping[str, Tensor], inputs: Mapping[str, tuple[int, int]] | None = None) -> None:
        """Raise a ValueError unless all layers were measured, with the same numbers of neurons and inputs.

        Args:
            neurons: tensors like those in `importance`, by layer.
            inputs: the numbers of groups and of inputs, by layer.
        """
        measured = {name: tuple(values.shape) for name, values in self.importance.items()}
        _check_fit("neurons", {name: tuple(values.shape) for name, values in neurons.items()}, measured)
        moments = self.moments.items()
        shapes = {name: (each if isinstance(each, Tensor) else each.vectors).shape[:2] for name, each in moments}
        _check_fit("inputs", inputs or {}, shapes)

    def __repr__(self) -> str:
        neurons = sum(map(len, self.importance.values()))
        return f"Measured({neurons} neurons in {len(self.importance)} layers, on {self.samples} samples)"


def load_measured(path: str | Path) -> Measured:
    """Read a file written by `Measured.save`."""
    library = _safetensors()
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        with library.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except library.SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a safetensors file, or it is damaged: {error}") from None
    if header.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} was not written by Measured.save: its format is {header.get('format')!r}")
    try:
        return _parsed(tensors, int(header["samples"]))
    except (KeyError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is damaged, at {error}: measure the model again") from None


def _parsed(tensors: Mapping[str, Tensor], samples: int) -> Measured:
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for key, tensor in tensors.items():
        part, _, name = key.partition(":")
        parts[part][name] = tensor
        if not tensor.isfinite().all():
            raise ValueError(repr(key))
    importance, diagonal, *fields = parts.values()
    directions = {name: Directions(*(field[name] for field in fields)) for name in fields[0]}
    for name, (vectors, values, others) in directions.items():
        if vectors.dim() != 3 or values.shape != (len(vectors), vectors.shape[2]) or others.shape != vectors.shape[:1]:
            raise ValueError(repr(name))
    return Measured(importance, {**directions, **diagonal}, samples)


def _check_fit(what: str, present: Mapping[str, tuple[int, ...]], measured: Mapping[str, tuple[int, ...]]) -> None:
    """Compare present and measured shapes."""
    for name, here in present.items():
        if name not in measured:
            raise ValueError(f"the {what} of layer {name!r} were not measured: list it in free=, or measure this model")
        if tuple(measured[name]) != here:
            raise ValueError(
                f"layer {name!r} has {what} {here} here, but had {tuple(measured[name])} when measured: measure this "
                "model"
            )


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("files of measurements need safetensors: pip install 'holdfast[measure]'") from None
    return safetensors
