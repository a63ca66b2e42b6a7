"""Where a model's neurons are observed: found by watching a forward, then held by one hook per place.

A layer is observed at its own output, unless a normalisation follows it: then at the normalisation's output. What
follows what is read off the autograd graph, so it does not matter how a model's `forward` is written.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from holdfast.importance import Observe
from holdfast.neurons import NORMS, Layer, adopt, neuron_axis

_NEEDS_SAMPLE = (
    "holdfast has not yet seen where this model's neurons are observed, and cannot look inside a compiled graph: "
    "give one batch of inputs when building the method, as in NPC(model, optimizer, sample=x)"
)


class _Idle:
    """What a copied or unpickled model has in place of a hook: nothing is measured on it."""

    def __call__(self, *_: Any) -> None:
        return None


class _Hook:
    def __reduce__(self) -> tuple[type[_Idle], tuple[()]]:
        return _Idle, ()


class _Tap(_Hook):
    """Hands the importance of the neurons seen at a module's output to their layers' carriers."""

    def __init__(self, layers: Collection[Layer], copy: bool) -> None:
        self.layers = layers
        self.copy = copy
        self.ran_eagerly = False

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not (torch.is_grad_enabled() and output.requires_grad):
            return None
        if not torch.compiler.is_compiling():
            if torch._C._are_functorch_transforms_active():  # per-sample gradients and the like are not training
                return None
            self.ran_eagerly = True
        for layer in self.layers:
            assert layer.carrier is not None
            output = _observe(output, layer, layer.carrier, module, self.copy)
        return output


class _Watch(_Hook):
    def __init__(self, look: Callable[..., Tensor | None]) -> None:
        self.look = look

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        return self.look(module, args, kwargs, output) if torch.is_grad_enabled() else None


def _observe(output: Tensor, layer: Layer, carrier: Tensor, module: nn.Module, copy: bool) -> Tensor:
    observed: Tensor = Observe.apply(output, carrier, _axis(layer, module, output), copy)  # type: ignore[no-untyped-call]
    return observed


def _axis(layer: Layer, module: nn.Module, output: Tensor) -> int:
    return neuron_axis(module if isinstance(module, NORMS) else layer.modules[0], output)


def _shows(layer: Layer, module: nn.Module, output: Tensor) -> bool:
    axis = _axis(layer, module, output)
    return 0 <= axis < output.dim() and output.shape[axis] == layer.size


class Observation:
    """The hooks that measure `layers`. `settle()` turns what was seen so far into their final places.

    `trained` are the parameters that normalisations may bring in; `places` says where some layers are observed.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Collection[Layer],
        trained: Collection[nn.Parameter],
        places: Mapping[Layer, nn.Module],
    ) -> None:
        self.wrapper: weakref.ref[DistributedDataParallel] | None = None  # weak: it holds on to its process group
        self._layers = layers
        self._names = {module: name for name, module in model.named_modules()}
        self._trained = trained
        self._placed: dict[nn.Module, list[Layer]] = {}
        for layer, module in places.items():
            self._placed.setdefault(module, []).append(layer)
        self._layer_of = {module: layer for layer in layers if layer not in places for module in layer.modules}
        self._taps: dict[_Tap, RemovableHandle] = {}
        look = torch.compiler.disable(self._look, reason=_NEEDS_SAMPLE)  # type: ignore[no-untyped-call]
        self._watches = {
            module: module.register_forward_hook(_Watch(look), with_kwargs=True)
            for module in self._names
            if module in self._placed or _has_parameters(module) or isinstance(module, NORMS)
        }
        self._forget()

    def _forget(self) -> None:
        self._seen: dict[nn.Module, list[Layer | None]] = {}  # whose neurons a module showed; None: nobody's
        self._own: dict[Layer, Tensor] = {}  # carriers at layers' own outputs, until it is known what follows
        self._outputs: dict[nn.Module, Tensor] = {}
        self._overwritten: set[nn.Module] = set()

    # ---- watching: every module with parameters, every normalisation, every place that was named ----

    def _look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        self._find_wrapper()
        if module in self._placed:
            self._check_place(module, output)
        outputs = [out for out in (output if isinstance(output, tuple | list) else [output]) if _needs_grad(out)]
        if not outputs:
            return None
        layers, follows = self._shown(module, args[0] if args else next(iter(kwargs.values()), None), outputs[0])
        seen = self._seen.setdefault(module, [])
        shown: Sequence[Layer | None] = layers or [None]
        seen.extend(layer for layer in shown if layer not in seen)
        for layer in layers:
            outputs = [self._observe(outputs[0], layer, module)]
        for out in outputs:
            if out.grad_fn is not None:
                _metadata(out.grad_fn)[self] = follows
        return outputs[0] if layers else None

    def _shown(self, module: nn.Module, first_input: Any, output: Tensor) -> tuple[Sequence[Layer], Layer | None]:
        """Whose neurons `output` shows, and the layer that a normalisation of it would be said to follow."""
        if module in self._placed:
            return self._placed[module], None
        if module in self._layer_of:
            return [self._layer_of[module]], self._layer_of[module]
        if isinstance(module, nn.PReLU):  # an activation: what follows it follows the layer before it
            return [], self._source(first_input)
        if isinstance(module, NORMS):
            source = self._source(first_input)
            if source is not None and _shows(source, module, output):
                return [source], None
        return [], None

    def _observe(self, output: Tensor, layer: Layer, module: nn.Module) -> Tensor:
        if module in self._layer_of:
            carrier = self._own.setdefault(layer, layer.new_carrier(output))
        else:
            carrier = layer.carrier = layer.new_carrier(output) if layer.carrier is None else layer.carrier
        observed = _observe(output, layer, carrier, module, copy=True)
        self._note_overwritten(module)
        self._outputs[module] = observed.detach()  # shares its version counter, which in-place changes move on
        return observed

    def _source(self, tensor: Tensor) -> Layer | None:
        """The layer that `tensor` was computed from, if it was from this one and no other parameters."""
        found: set[Layer | None] = set()
        pending: list[Node | None] = [tensor.grad_fn]
        visited: set[Node] = set()
        while pending and len(found) < 2:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            if self in (marks := _metadata(node)):
                found.add(marks[self])
            elif node.next_functions:
                pending.extend(earlier for earlier, _ in node.next_functions)
            else:
                found.add(None)  # a parameter
        return found.pop() if len(found) == 1 else None

    def _note_overwritten(self, module: nn.Module) -> None:
        if module in self._outputs and self._outputs[module]._version > 0:
            self._overwritten.add(module)

    def _check_place(self, module: nn.Module, output: Any) -> None:
        name = self._names[module]
        if not isinstance(output, Tensor):
            raise TypeError(
                f"observe: {name!r} returns a {type(output).__name__}; name a module that returns one tensor"
            )
        for layer in self._placed[module]:
            if not _shows(layer, module, output):
                raise ValueError(
                    f"observe: {layer.name!r} has {layer.size} neurons, but the output of {name!r} has shape "
                    f"{tuple(output.shape)}; name a module whose output has these neurons on axis "
                    f"{_axis(layer, module, output)}"
                )

    def _find_wrapper(self) -> None:
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if self.wrapper is None and wrapper is not None:
            self.wrapper = weakref.ref(wrapper)

    @property
    def process_group(self) -> ProcessGroup | None:
        """That of the processes which train this model together."""
        wrapper = None if self.wrapper is None else self.wrapper()
        return None if wrapper is None else wrapper.process_group

    # ---- settling ----

    def settle(self) -> None:
        """Decide for every module seen since the last call; those not yet seen go on being watched."""
        if not self._seen:
            return
        places: dict[nn.Module, list[Layer]] = {}
        for module, shown in self._seen.items():
            self._watches.pop(module).remove()
            self._note_overwritten(module)
            layers = [layer for layer in shown if layer is not None]
            # A normalisation that serves several layers shows none of them: it cannot be told which one it is serving.
            if module in self._placed or (module not in self._layer_of and len(layers) == len(shown) == 1):
                places[module] = layers
        normalised = {layer for layers in places.values() for layer in layers}
        for module in self._seen:
            layer = self._layer_of.get(module)
            if layer is not None and layer not in normalised:
                layer.carrier = self._own[layer]
                places[module] = [layer]
        for module, layers in places.items():
            tap = _Tap(layers, copy=module in self._overwritten)
            self._taps[tap] = module.register_forward_hook(tap)
            if isinstance(module, NORMS):
                for layer in layers:
                    adopt(layer, module, self._trained)
        self._forget()

    @property
    def compiled(self) -> bool:
        """Whether the model runs compiled, so that its user has a working compiler and wants it used."""
        return bool(self._taps) and not any(tap.ran_eagerly for tap in self._taps)

    def collect(self) -> list[Tensor | None]:
        """What was measured since the last call, per layer; None where a layer took no part."""
        measured = [None if layer.carrier is None else layer.carrier.grad for layer in self._layers]
        self.discard()
        return measured

    def discard(self) -> None:
        for carrier in (*self._own.values(), *(layer.carrier for layer in self._layers)):
            if carrier is not None:
                carrier.grad = None

    def rehearse(self, model: nn.Module, sample: Any) -> None:
        """Watch one forward that leaves no trace: buffers and random numbers are afterwards as they were."""
        devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
        with torch.random.fork_rng(devices), _kept_buffers(model), torch.enable_grad():
            if isinstance(sample, Mapping):
                model(**sample)
            elif isinstance(sample, tuple | list):
                model(*sample)
            else:
                model(sample)
        self.settle()

    def close(self) -> None:
        for handle in (*self._watches.values(), *self._taps.values()):
            handle.remove()
        self._watches.clear()
        self._taps.clear()
        self._forget()


def _metadata(node: Node) -> dict[Any, Any]:
    return cast(dict[Any, Any], node.metadata)  # a dict, though the stubs say a method


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
