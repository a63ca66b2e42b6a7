"""The same network, quicker on a GPU: modules that compute what those they replace do, with less to read and write."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from holdfast.hooks import inside_transform
from holdfast.importance import Observe

EPS = 1e-5  # of nn.InstanceNorm2d
_MULTIPLE = 8  # of columns, that tensor cores want


class NormReluPool(nn.InstanceNorm2d):
    """Instance norm, ReLU and 2x2 max pooling, on a GPU in one kernel.

    Args:
        features: how many channels there are.
        shows: whether it is wanted how active they are between ReLU and pooling.
    """

    def __init__(self, features: int, *, shows: bool = False) -> None:
        super().__init__(features)
        self.shows = shows
        self.activity: Tensor | None = None
        self.carrier: Tensor | None = None
        """Where it is wanted how important the channels are: gets that of the output as its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        carrier = self._carrier_for(x)
        if not _quick(x) or x.shape[2] % 2 or x.shape[3] % 2:
            active = relu(super().forward(x))
            self.activity = active.mean((-2, -1)) if self.shows and not inside_transform() else None
            pooled = max_pool2d(active, 2)
            return pooled if carrier is None else _observed(pooled, carrier)
        from holdfast.kernels import norm_relu_pool  # which needs Triton

        out: Tensor
        out, _, _, activity, _ = norm_relu_pool(x, self.shows, carrier)
        self.activity = activity if self.shows else None
        return out

    def _carrier_for(self, x: Tensor) -> Tensor | None:
        """The carrier, if there will be a gradient, and one that is where the carrier is."""
        wanted = x.requires_grad and torch.is_grad_enabled() and not inside_transform()
        return self.carrier if wanted and self.carrier is not None and self.carrier.device == x.device else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "activity": None, "carrier": None}  # of this module only, not of its copies

    def take_activity(self) -> Tensor | None:
        """The mean over positions in the last forward, [sample, channel]; once, so that it is not kept for longer."""
        activity, self.activity = self.activity, None
        return activity


class BeforeNorm(nn.Conv2d):
    """A convolution before an instance norm, which takes away again what is the same all over a channel: on a GPU it
    leaves out its bias, which then has no gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(x, self.weight, None if _quick(x) else self.bias)
        return out


class FewChannels(nn.Conv2d):
    """A 3x3 convolution of few channels, such as an image has, on a GPU as one product with the image's patches."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor
        if not _quick(x):
            out = super()._conv_forward(x, weight, bias)
            return out
        samples, channels, height, width = x.shape
        seen = pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)  # [sample, channel, row, column, 3, 3]
        patches = seen.permute(0, 2, 3, 4, 5, 1).reshape(-1, 9 * channels)
        rows = weight.permute(0, 2, 3, 1).flatten(1)
        missing = -9 * channels % _MULTIPLE
        out = nn.functional.linear(pad(patches, (0, missing)), pad(rows, (0, missing)), bias)
        return out.view(samples, height, width, self.out_channels).permute(0, 3, 1, 2)


class FewChannelsBeforeNorm(BeforeNorm, FewChannels):
    """Both."""


_CONVOLUTIONS = {  # by whether they have few channels, and whether an instance norm follows
    (False, False): nn.Conv2d,
    (False, True): BeforeNorm,
    (True, False): FewChannels,
    (True, True): FewChannelsBeforeNorm,
}


def _observed(pooled: Tensor, carrier: Tensor) -> Tensor:
    observed: Tensor = Observe.apply(pooled, carrier, pooled.dim() - 3, False)  # type: ignore[no-untyped-call]
    return observed


def _quick(x: Tensor) -> bool:
    return x.is_cuda and x.dim() == 4 and x.numel() > 0 and x.dtype != torch.float64 and not inside_transform()


def quicken(model: nn.Sequential, *, activations: bool = False) -> None:
    """Replace modules of `model` by quicker ones, in place. Its parameters and its `state_dict` stay what they are.

    What comes out of the model stays the same, too, but on a GPU not what comes out of a convolution before an instance
    norm: its bias is left out. `DistributedDataParallel` then needs `find_unused_parameters=True`.

    Args:
        model: a sequence of modules.
        activations: whether it is looked at how active the neurons are.
    """
    names, modules = list(model._modules), list(model)
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))

    def fusible(at: int) -> bool:
        return find_spec("triton") is not None and _is_norm_relu_pool(modules[at : at + 3])

    for at, module in enumerate(modules):
        if type(module) is nn.Conv2d:
            few = _is_plain(module) and module.in_channels <= 4
            normed = fusible(at + 1) and places[module] == 1
            module.__class__ = _CONVOLUTIONS[few, normed]
        if fusible(at):
            assert isinstance(module, nn.InstanceNorm2d)
            quicker = NormReluPool(module.num_features, shows=activations).train(module.training)
            setattr(model, names[at], quicker)
            setattr(model, names[at + 1], nn.Identity())
            setattr(model, names[at + 2], nn.Identity())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _is_plain(convolution: nn.Conv2d) -> bool:
    usual = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    usual |= {"padding_mode": "zeros"}
    return all(getattr(convolution, name) == value for name, value in usual.items())


def _is_norm_relu_pool(modules: Sequence[nn.Module]) -> bool:
    match modules:
        case [nn.InstanceNorm2d() as norm, nn.ReLU(), nn.MaxPool2d() as pool]:
            plain = type(norm) is nn.InstanceNorm2d and norm.eps == EPS
            plain &= not norm.affine and not norm.track_running_stats
            windows = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, pool.return_indices
            return plain and windows == (2, 2, 0, 1, False, False)
    return False


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, compiled, once for all that use it; what it does to each tensor goes into few kernels."""
    return torch.compile(function, options={"combo_kernels": True})
