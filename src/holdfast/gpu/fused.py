"""Fused modules: drop-in replacements for groups of layers that read and write less memory on a GPU."""

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from holdfast.importance import Observe
from holdfast.taps.hooks import inside_transform

EPS = 1e-5  # the default of nn.InstanceNorm2d
_ALIGNMENT = 8  # tensor cores need a multiple of this many columns


class NormReluPool(nn.InstanceNorm2d):
    """Instance norm, ReLU and 2x2 max pooling, on a GPU in one kernel.

    It offers two taps (`holdfast.neurons.protocols`): it measures the importance of its channels for `carrier`, and
    shows their mean activity between ReLU and pooling while `shows` is positive.

    Args:
        features: number of channels.
    """

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.shows = 0
        self.activity: Tensor | None = None
        self.carrier: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        carrier = self._carrier_for(x)
        shows = self.shows > 0 and torch.is_grad_enabled() and not inside_transform()
        if not _runs_fused(x) or x.shape[2] % 2 or x.shape[3] % 2:
            active = relu(super().forward(x))
            self.activity = active.mean((-2, -1)) if shows else None
            pooled = max_pool2d(active, 2)
            return pooled if carrier is None else _observed(pooled, carrier)
        from holdfast.gpu.kernels import norm_relu_pool  # needs Triton

        out: Tensor
        out, _, _, activity, _ = norm_relu_pool(x, shows, carrier)
        self.activity = activity if shows else None
        return out

    def _carrier_for(self, x: Tensor) -> Tensor | None:
        """The carrier, if gradients are recorded and it is on the device of `x`."""
        wanted = x.requires_grad and torch.is_grad_enabled() and not inside_transform()
        return self.carrier if wanted and self.carrier is not None and self.carrier.device == x.device else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shows": 0, "activity": None, "carrier": None}  # copies are not tapped

    def take_activity(self) -> Tensor | None:
        """Return and forget the mean over positions in the last forward, `[sample, channel]`."""
        activity, self.activity = self.activity, None
        return activity


class BeforeNorm(nn.Conv2d):
    """A convolution followed by an instance norm.

    The norm subtracts each channel's mean and so cancels the bias. On a GPU the bias is skipped and gets no gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._conv_forward(x, self.weight, None if _runs_fused(x) else self.bias)
        return out


class FewChannels(nn.Conv2d):
    """A 3x3 convolution with few input channels, such as those of an image; on a GPU, one product with all patches."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor
        if not _runs_fused(x):
            out = super()._conv_forward(x, weight, bias)
            return out
        samples, channels, height, width = x.shape
        windows = pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)  # [sample, channel, row, column, 3, 3]
        patches = windows.permute(0, 2, 3, 4, 5, 1).reshape(-1, 9 * channels)
        filters = weight.permute(0, 2, 3, 1).flatten(1)
        missing = -9 * channels % _ALIGNMENT
        out = nn.functional.linear(pad(patches, (0, missing)), pad(filters, (0, missing)), bias)
        return out.view(samples, height, width, self.out_channels).permute(0, 3, 1, 2)


class FewChannelsBeforeNorm(BeforeNorm, FewChannels):
    """A 3x3 convolution with few input channels, followed by an instance norm."""


_CONVOLUTIONS: Mapping[tuple[bool, bool], type[nn.Conv2d]] = {  # by (few channels, before an instance norm)
    (False, True): BeforeNorm,
    (True, False): FewChannels,
    (True, True): FewChannelsBeforeNorm,
}


def _observed(pooled: Tensor, carrier: Tensor) -> Tensor:
    observed: Tensor = Observe.apply(pooled, carrier, pooled.dim() - 3, False)  # type: ignore[no-untyped-call]
    return observed


def _runs_fused(x: Tensor) -> bool:
    return x.is_cuda and x.dim() == 4 and x.numel() > 0 and x.dtype != torch.float64 and not inside_transform()


def fuse_modules(model: nn.Sequential) -> None:
    """Replace modules of `model` by fused ones, in place.

    The new modules share the old ones' parameters, so the optimizer and the `state_dict` stay valid. Hooks do not carry
    over: call this before anything hooks the model.

    The model's output stays the same. On a GPU the output of a convolution before an instance norm lacks its bias,
    which gets no gradient: `DistributedDataParallel` then needs `find_unused_parameters=True`.

    Args:
        model: a sequence of modules. Only its direct children are fused.
    """
    names, modules = list(model._modules), list(model)
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    fusible = [find_spec("triton") is not None and _is_norm_relu_pool(modules[i : i + 3]) for i in range(len(modules))]
    convolutions: dict[nn.Module, nn.Module] = {}
    for module, before_norm in zip(modules, [*fusible[1:], False], strict=True):
        if type(module) is nn.Conv2d:
            few_channels = _is_plain(module) and module.in_channels <= 4
            kind = _CONVOLUTIONS.get((few_channels, before_norm and uses[module] == 1))
            if kind is not None:
                convolutions[module] = _convolution(kind, module)
    _replace(model, convolutions)
    for i, norm in enumerate(modules):
        if not fusible[i]:
            continue
        assert isinstance(norm, nn.InstanceNorm2d)
        setattr(model, names[i], NormReluPool(norm.num_features).train(norm.training))
        setattr(model, names[i + 1], nn.Identity())
        setattr(model, names[i + 2], nn.Identity())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _convolution(kind: type[nn.Conv2d], old: nn.Conv2d) -> nn.Conv2d:
    """A convolution of another class that shares the parameters of `old`."""
    new = kind(
        old.in_channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        old.dilation,  # type: ignore[arg-type]
        old.groups,
        old.bias is not None,
        old.padding_mode,
        device="meta",  # neither allocates nor draws random numbers
    )
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def _replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules wherever they occur, so that a shared module stays shared."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])


def _is_plain(convolution: nn.Conv2d) -> bool:
    plain = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    plain |= {"padding_mode": "zeros"}
    return all(getattr(convolution, name) == value for name, value in plain.items())


def _is_norm_relu_pool(modules: Sequence[nn.Module]) -> bool:
    match modules:
        case [nn.InstanceNorm2d() as norm, nn.ReLU(), nn.MaxPool2d() as pool]:
            plain = type(norm) is nn.InstanceNorm2d and norm.eps == EPS
            plain &= not norm.affine and not norm.track_running_stats
            windows = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, pool.return_indices
            return plain and windows == (2, 2, 0, 1, False, False)
    return False
