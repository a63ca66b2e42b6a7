"""The same network, quicker on a GPU: modules that compute what those they replace do, with less to read and write."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from holdfast.hooks import inside_transform

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

    def forward(self, x: Tensor) -> Tensor:
        if not _quick(x) or x.shape[2] % 2 or x.shape[3] % 2:
            active = relu(super().forward(x))
            self.activity = active.mean((2, 3)) if self.shows and not inside_transform() else None
            return max_pool2d(active, 2)
        from holdfast.kernels import norm_relu_pool  # which needs Triton

        pooled: Tensor
        pooled, _, _, activity = norm_relu_pool(x, self.shows)
        self.activity = activity if self.shows else None
        return pooled

    def take_activity(self) -> Tensor | None:
        """The mean over positions in the last forward, [sample, channel]; once, so that it is not kept for longer."""
        activity, self.activity = self.activity, None
        return activity


class FewChannels(nn.Conv2d):
    """A 3x3 convolution of few channels, such as an image has, on a GPU as one product with the image's patches."""

    def forward(self, x: Tensor) -> Tensor:
        if not _quick(x):
            return super().forward(x)
        samples, channels, height, width = x.shape
        wide = pad(x, (1, 1, 1, 1))
        shifted = [wide[:, :, i : i + height, j : j + width] for i, j in product(range(3), repeat=2)]
        missing = -9 * channels % _MULTIPLE
        patches = pad(torch.cat(shifted, 1).permute(0, 2, 3, 1), (0, missing)).flatten(0, 2)
        weight = pad(self.weight.permute(0, 2, 3, 1).flatten(1), (0, missing))
        out = nn.functional.linear(patches, weight, self.bias)
        return out.view(samples, height, width, self.out_channels).permute(0, 3, 1, 2)


def _quick(x: Tensor) -> bool:
    return x.is_cuda and x.dim() == 4 and x.dtype != torch.float64 and not inside_transform()


def quicken(model: nn.Sequential, *, activations: bool = False) -> None:
    """Replace modules of `model` by quicker ones, in place. Its parameters and its `state_dict` stay what they are.

    Args:
        model: a sequence of modules.
        activations: whether it is looked at how active the neurons are.
    """
    names, modules = list(model._modules), list(model)
    for at, module in enumerate(modules):
        if type(module) is nn.Conv2d and _is_plain(module) and module.in_channels <= 4:
            module.__class__ = FewChannels
        if find_spec("triton") is not None and _is_norm_relu_pool(modules[at : at + 3]):
            assert isinstance(module, nn.InstanceNorm2d)
            setattr(model, names[at], NormReluPool(module.num_features, shows=activations))
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
            plain = not norm.affine and not norm.track_running_stats and norm.eps == EPS
            windows = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, pool.return_indices
            return plain and windows == (2, 2, 0, 1, False, False)
    return False
