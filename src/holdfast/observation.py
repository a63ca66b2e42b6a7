"""Where a model's neurons are observed: found by watching a forward, then held by one hook per place.

A layer is observed at its own output, unless a normalisation follows it: then at the normalisation's output. What
follows what is read off the autograd graph, so it does not matter how a model's `forward` is written.

ReLU, pooling and dropout keep the sum of n * dL/dn over positions (docs/npc.md). Where they stand next in an
`nn.Sequential`, so that nothing else can see what comes between, the hook is put behind them: there are fewer values,
and autograd keeps them anyway. The same goes for the dropout inside torch's transformer layers. A `NormReluPool` is all
of that in one, and measures by itself.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from holdfast.fast import NormReluPool
from holdfast.hooks import Hook, Idle, inside_transform, needs_grad
from holdfast.importance import Observe
from holdfast.neurons import NORMS, Layer, Run, adopt, find_runs, neuron_axis

_NEEDS_SAMPLE = (
    "holdfast has not yet seen where this model's neurons are observed, and cannot look inside a compiled graph: "
    "give one batch of inputs when building the method, as in NPC(model, optimizer, sample=x)"
)


class _Tap(Hook):
    """Hands the importance of the neurons seen at a module's output to their layers' carriers.

    `place` is the module whose neurons they are: this one, or one that comes before it and has the same axes. If it is
    `able`, it has measured them itself, as long as it has their carrier.
    """

    def __init__(self, layers: Collection[Layer], place: nn.Module, copy: bool, able: NormReluPool | None) -> None:
        self.layers = layers
        self.place = place
        self.copy = copy
        self.able = able
        self.ran_eagerly = False

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if not (torch.is_grad_enabled() and output.requires_grad) or inside_transform():
            return None
        if not torch.compiler.is_compiling():
            self.ran_eagerly = True
            for layer in self.layers:
                layer.forget_if_discarded()
                if layer.carrier is not None and layer.carrier.device != output.device:  # the model was moved
                    layer.carrier = layer.new_carrier(output)
        for layer in self.layers:
            assert layer.carrier is not None
            if self.able is not None and self.able.carrier is layer.carrier:
                return None
            output = _observe(output, layer, layer.carrier, self.place, self.copy)
        if not torch.compiler.is_compiling():
            self.hand_over()
        return output

    def hand_over(self) -> None:
        """Let the module measure from now on, if it can."""
        if self.able is not None:
            (self.able.carrier,) = (layer.carrier for layer in self.layers)

    def take_back(self) -> None:
        if self.able is not None:
            self.able.carrier = None


class _Watch(Hook):
    def __init__(self, look: Callable[..., Tensor | None]) -> None:
        self.look = look

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        if not torch.is_grad_enabled() or inside_transform():
            return None
        return self.look(module, args, kwargs, output)


class _Mark(Hook):
    """Goes on saying which layer an output is of, for normalisations that may yet follow it."""

    def __init__(self, mark: Callable[[Tensor], None]) -> None:
        self.mark = mark

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and needs_grad(output):
            self.mark(output)


def _observe(output: Tensor, layer: Layer, carrier: Tensor, place: nn.Module, copy: bool) -> Tensor:
    observed: Tensor = Observe.apply(output, carrier, _axis(layer, place, output), copy)  # type: ignore[no-untyped-call]
    return observed


def _axis(layer: Layer, module: nn.Module, output: Tensor) -> int:
    return neuron_axis(module if isinstance(module, NORMS) else layer.modules[0], output)


def _shows(layer: Layer, module: nn.Module, output: Tensor) -> bool:
    axis = _axis(layer, module, output)
    return 0 <= axis < output.dim() and output.shape[axis] == layer.size


def _looks_along_neurons(layer: Layer, norm: nn.Module, output: Tensor) -> bool:
    """Whether `norm` looks along the axis of the layer's neurons, if no axes were moved between."""
    axis = neuron_axis(norm, output)
    return axis == output.dim() - 1 if isinstance(layer.modules[0], nn.Linear) else axis <= 1


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
        self._marks: dict[nn.Module, RemovableHandle] = {}
        self._runs = {run.place: run for run in find_runs(model)}
        self._run_ending_at = {run.modules[-1]: run for run in self._runs.values()}
        self._callers = {run.caller for run in self._runs.values()}
        look = torch.compiler.disable(self._look, reason=_NEEDS_SAMPLE)  # type: ignore[no-untyped-call]
        self._watches = {
            module: module.register_forward_hook(_Watch(look), prepend=True, with_kwargs=True)
            for module in self._names
            if module in self._placed
            or _has_parameters(module)
            or isinstance(module, NORMS)
            or module in self._run_ending_at
            or module in self._callers
        }
        self._forget()

    def _forget(self) -> None:
        self._seen: dict[nn.Module, list[Layer | None]] = {}  # whose neurons a module showed; None: nobody's
        self._calls: Counter[nn.Module] = Counter()
        self._carriers: dict[tuple[Layer, nn.Module | None], Tensor] = {}  # one of them will be the layer's
        self._outputs: dict[nn.Module, Tensor] = {}
        self._overwritten: set[nn.Module] = set()

    # ---- watching ----

    def _look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        self._find_wrapper()
        self._calls[module] += 1
        if module in self._placed:
            self._check_place(module, output)
        outputs = [out for out in (output if isinstance(output, tuple | list) else [output]) if needs_grad(out)]
        if not outputs:
            return None
        first_input = args[0] if args else next(iter(kwargs.values()), None)
        if module not in self._placed:
            if module in self._run_ending_at:
                return self._look_behind(self._run_ending_at[module], output)
            if module in self._callers and not _has_parameters(module):  # only its calls count
                self._seen[module] = []
                return None
            if isinstance(module, NORMS) and not needs_grad(
                first_input
            ):  # what it follows is frozen, and may yet learn
                return None
        layers, follows = self._shown(module, first_input, outputs[0]) if isinstance(output, Tensor) else ([], None)
        seen = self._seen.setdefault(module, [])
        shown: Sequence[Layer | None] = layers or [None]
        seen.extend(layer for layer in shown if layer not in seen)
        for layer in layers:
            # All normalisations of a layer share a carrier, and so do all modules that share its weight.
            role = layer.modules[0] if module in self._layer_of else None
            outputs = [self._observe(outputs[0], layer, role, place=module, at=module)]
        for out in outputs:
            self._mark(out, follows)
        return outputs[0] if layers else None

    def _shown(self, module: nn.Module, first_input: Any, output: Tensor) -> tuple[Sequence[Layer], Layer | None]:
        """Whose neurons `output` shows, and the layer that a normalisation of it would be said to follow."""
        if module in self._placed:
            return self._placed[module], None
        if module in self._layer_of:
            layer = self._layer_of[module]
            return ([layer], layer) if _shows(layer, module, output) else ([], None)
        if isinstance(module, nn.PReLU):  # an activation: what follows it follows the layer before it
            return [], self._source(first_input)[0]
        if isinstance(module, NORMS):
            source, moved = self._source(first_input)
            if (
                source is not None
                and _shows(source, module, output)
                and (moved or _looks_along_neurons(source, module, output))
            ):
                return [source], None
        return [], None

    def _look_behind(self, run: Run, output: Any) -> Tensor | None:
        layers = self._seen.get(run.place, [])
        self._seen.setdefault(run.modules[-1], [])
        if len(layers) != 1 or layers[0] is None or not isinstance(output, Tensor):
            return None
        if not _shows(layers[0], run.place, output) or (run.pools and output.dim() < 3):
            return None
        observed = self._observe(output, layers[0], run.modules[-1], run.place, at=run.modules[-1])
        self._mark(observed, self._layer_of.get(run.place))
        return observed

    def _observe(self, output: Tensor, layer: Layer, role: nn.Module | None, place: nn.Module, at: nn.Module) -> Tensor:
        carrier = self._carriers.setdefault((layer, role), layer.new_carrier(output))
        observed = _observe(output, layer, carrier, place, copy=True)
        self._note_overwritten(at)
        self._outputs[at] = observed.detach()  # shares its version counter, which in-place changes move on
        return observed

    def _mark(self, output: Tensor, follows: Layer | None) -> None:
        if output.grad_fn is not None:
            _metadata(output.grad_fn)[self] = follows

    def _source(self, tensor: Any) -> tuple[Layer | None, bool]:
        """The layer that `tensor` was computed from, if from this one and no other parameters; and if axes moved."""
        found: set[Layer | None] = set()
        pending: list[Node | None] = [tensor.grad_fn] if isinstance(tensor, Tensor) else []
        visited: set[Node] = set()
        moved = False
        while pending and len(found) < 2:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            moved |= node.name().startswith(("Permute", "Transpose"))
            if self in (marks := _metadata(node)):
                found.add(marks[self])
            elif node.name() == "ObserveBackward":
                pending.append(node.next_functions[0][0])  # and not the carrier, which is no parameter
            elif node.next_functions:
                pending.extend(earlier for earlier, _ in node.next_functions)
            else:
                found.add(None)  # a parameter
        return (found.pop() if len(found) == 1 else None), moved

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
        for module in self._seen:
            self._watches.pop(module).remove()
            self._note_overwritten(module)
        places = self._places()
        self._take_back({layer for place, layers in places.items() if place not in self._layer_of for layer in layers})
        number_of_places = Counter(layer for layers in places.values() for layer in layers)
        for place, layers in places.items():
            at, run = place, self._runs.get(place)
            if run and all(number_of_places[layer] == 1 for layer in layers) and self._may_look_behind(run, layers):
                at = run.modules[-1]
            able = self._able(place, at, layers)
            at = able or at
            for layer in layers:
                role = at if at is not place else layer.modules[0] if place in self._layer_of else None
                layer.carrier = self._carriers[layer, role]
                if isinstance(place, NORMS):
                    adopt(layer, place, self._trained)
            tap = _Tap(layers, place, at in self._overwritten, able)
            tap.hand_over()
            self._taps[tap] = at.register_forward_hook(tap, prepend=True)
        self._keep_marking()
        self._forget()

    def _take_back(self, layers: set[Layer]) -> None:
        """Stop observing these layers at their own outputs: a normalisation has turned up behind them."""
        for tap in [tap for tap in self._taps if tap.place in self._layer_of and not layers.isdisjoint(tap.layers)]:
            self._taps.pop(tap).remove()

    def _keep_marking(self) -> None:
        """As long as a normalisation has not been seen, the layers it may follow must be known to it."""
        if not any(isinstance(module, NORMS) for module in self._watches):
            for handle in self._marks.values():
                handle.remove()
            self._marks.clear()
            return
        for module in self._seen:
            layer = self._layer_of.get(module)
            if layer is not None and module not in self._marks:
                mark = _Mark(partial(self._mark, follows=layer))
                self._marks[module] = module.register_forward_hook(mark)

    def _places(self) -> dict[nn.Module, list[Layer]]:
        """At which of the modules seen which layers are to be observed."""
        places: dict[nn.Module, list[Layer]] = {}
        for module, shown in self._seen.items():
            layers = [layer for layer in shown if layer is not None]
            if len(layers) > 1 and module not in self._placed:
                # It shows none of them, because it cannot be told which one it is serving.
                names = ", ".join(layer.name for layer in layers)
                warnings.warn(
                    f"{self._names[module]!r} normalises several layers ({names}); they are observed before it, where "
                    "their importance may be hidden: give each a normalisation of its own",
                    stacklevel=7,
                )
            if module in self._placed or (module not in self._layer_of and len(layers) == len(shown) == 1):
                places[module] = layers
        normalised = {layer for layers in places.values() for layer in layers}
        for module, shown in self._seen.items():
            layer = self._layer_of.get(module)
            if layer in shown and layer is not None and layer not in normalised:
                places[module] = [layer]
        return places

    def _may_look_behind(self, run: Run, layers: list[Layer]) -> bool:
        """Whether all that the place computes goes through the run: no other call or hook takes it elsewhere."""
        calls = {self._calls[module] for module in (run.caller, run.place, run.modules[-1])}
        between = (run.place, *run.modules[:-1])
        hooks = any(not isinstance(hook, Idle) for module in between for hook in module._forward_hooks.values())
        return (
            run.place not in self._placed
            and len(calls) == 1
            and not hooks
            and all((layer, run.modules[-1]) in self._carriers for layer in layers)
        )

    def _able(self, place: nn.Module, at: nn.Module, layers: list[Layer]) -> NormReluPool | None:
        """The place, if it can measure by itself: for one layer and one optimizer, an output that stays as it is."""
        if not isinstance(place, NormReluPool) or place.carrier is not None or len(layers) > 1:
            return None
        return place if self._overwritten.isdisjoint((place, at)) else None

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
        for carrier in (*self._carriers.values(), *(layer.carrier for layer in self._layers)):
            if carrier is not None:
                carrier.grad = None

    def rehearse(self, model: nn.Module, sample: Any) -> None:
        """Watch one training forward that leaves no trace: buffers, modes and random numbers are then as they were."""
        devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
        with torch.random.fork_rng(devices), _kept(model), torch.enable_grad():
            model.train()
            if isinstance(sample, Mapping):
                model(**sample)
            elif isinstance(sample, tuple | list):
                model(*sample)
            else:
                model(sample)
        self.settle()

    def close(self) -> None:
        for handle in (*self._watches.values(), *self._taps.values(), *self._marks.values()):
            handle.remove()
        for tap in self._taps:
            tap.take_back()
        self._watches.clear()
        self._marks.clear()
        self._taps.clear()
        self._forget()


def _metadata(node: Node) -> dict[Any, Any]:
    return cast(dict[Any, Any], node.metadata)  # a dict, though the stubs say a method


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in modes
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer.copy_(value))
