"""Measurements of a model that was trained elsewhere, and their file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast import atomic
from holdfast.directions import Directions

_FORMAT = "holdfast measurements, version 1"
_PARTS = ("importance", "vectors", "values", "rest")


@dataclass(frozen=True, repr=False)
class Measured:
    """The importances of a model's neurons and the second moments of its layers' inputs, by layer.

    `holdfast.measure` returns it, and the `remember` of NPC and DPC take it.
    """

    importance: dict[str, Tensor]
    """One value per neuron. The mean of each layer is 1."""
    directions: dict[str, Directions]
    """The second moment A of the inputs, as DPC keeps it."""
    samples: int
    """The number of samples on which both were measured."""

    def save(self, path: str | Path) -> None:
        """Write a `safetensors` file."""
        parts = {"importance": self.importance} | {
            part: {name: getattr(directions, part) for name, directions in self.directions.items()}
            for part in _PARTS[1:]
        }
        tensors = {
            f"{part}:{name}": tensor.detach().cpu().contiguous()
            for part, by_layer in parts.items()
            for name, tensor in by_layer.items()
        }
        content = _safetensors().torch.save(tensors, {"format": _FORMAT, "samples": str(self.samples)})
        atomic.write(Path(path), content)

    def fit(self, neurons: Mapping[str, Tensor], inputs: Mapping[str, Tensor] | None = None) -> None:
        """Raise a ValueError unless all layers were measured, with the same numbers of neurons and inputs.

        Args:
            neurons: tensors like those in `importance`, by layer.
            inputs: tensors like the vectors in `directions`, by layer.
        """
        _check_fit("neurons", 1, neurons, self.importance)
        _check_fit("inputs", 2, inputs or {}, {name: each.vectors for name, each in self.directions.items()})

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
    importance, *rest = parts.values()
    directions = {name: Directions(*(part[name] for part in rest)) for name in rest[0]}
    for name, (vectors, values, others) in directions.items():
        if vectors.dim() != 3 or values.shape != (len(vectors), vectors.shape[2]) or others.shape != vectors.shape[:1]:
            raise ValueError(repr(name))
    return Measured(importance, directions, samples)


def _check_fit(what: str, axes: int, present: Mapping[str, Tensor], measured: Mapping[str, Tensor]) -> None:
    """Compare the first `axes` axes of present and measured tensors."""
    for name, tensor in present.items():
        if name not in measured:
            raise ValueError(f"the {what} of layer {name!r} were not measured: list it in free=, or measure this model")
        here, there = (tuple(each.shape[:axes]) for each in (tensor, measured[name]))
        if here != there:
            raise ValueError(
                f"layer {name!r} has {what} {here} here, but had {there} when measured: measure this model"
            )


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("files of measurements need safetensors: pip install 'holdfast[measure]'") from None
    return safetensors
