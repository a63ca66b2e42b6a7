"""What several tests need: small models, and the statistic of eq. 2 and 3 taken by a plain tensor hook."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import holdfast


def gradient_at(model: nn.Module, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of module `name` and the loss's gradient there, on a copy of the model without holdfast."""
    twin = copy.deepcopy(model)
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output.retain_grad()
        kept.append(output)
        return output.clone()  # what the model changes in place is not what was kept

    twin.get_submodule(name).register_forward_hook(keep)
    twin(x).square().mean().backward()
    (n,) = kept
    assert n.grad is not None
    return n.detach(), n.grad


def normalized_taylor(n: Tensor, g: Tensor, axis: int) -> Tensor:
    product = (n * g).movedim(axis, 1).reshape(n.shape[0], n.shape[axis], -1)
    c = product.mean(2).abs().mean(0)
    return c / c.mean()


class Block(nn.Module):
    """Convolutions, normalization and pooling called from `forward`, in an order of its own."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.conv = nn.Conv2d(2, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(2).mean(2))


def mlp(inputs: int = 4, width: int = 6, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def train(model: nn.Module, optimizer: Optimizer, batches: Iterable[Tensor]) -> None:
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if isinstance(optimizer, holdfast.methods.Method):
            loss = loss + optimizer.penalty()
        loss.backward()
        optimizer.step()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def memory_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors that a method remembers, beside the state of the wrapped optimizer."""
    return tensors_in(memory_in(optimizer.state_dict()))


def memory_in(state: dict[str, Any]) -> dict[str, Any]:
    """The memory of a method in its state_dict."""
    memory: dict[str, Any] = state["param_groups"][0]["holdfast"]
    return memory


def tensors_in(state: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def collect(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                collect(f"{path}/{key}", inner)

    collect("", state)
    return found


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())
