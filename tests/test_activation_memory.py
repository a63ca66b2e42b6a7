"""Activations that NPC makes autograd keep, in networks that change activations in place."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import holdfast
from helpers import gradient_at, normalized_taylor
from holdfast.neurons.renormalize import renormalization


class BasicBlock(nn.Module):
    """As in torchvision: one ReLU for all, in place, and a sum in place."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    blocks = [BasicBlock(8, 8, 1, norm), BasicBlock(8, 8, 1, norm), BasicBlock(8, 16, 2, norm)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def images() -> Tensor:
    return torch.randn(6, 3, 12, 12)


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward of a forward, each storage counted once, without parameters."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).square().mean().backward()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in parameters)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm], ids=["batch", "group"])
def test_changes_in_place_cost_no_copies_of_activations(norm: Callable[[int], nn.Module]) -> None:
    model, x = resnet(norm), images()
    bare = kept_bytes(model, x)
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), free=[model[-1]], example=x)
    assert kept_bytes(model, x) < 1.05 * bare
    optimizer.close()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, group_norm, nn.InstanceNorm2d], ids=["batch", "group", "instance"])
def test_importance_of_neurons_changed_in_place(norm: Callable[[int], nn.Module], training: bool) -> None:
    model, x = resnet(norm), images()
    model(x)  # moves the running statistics
    model.train(training)
    twin = copy.deepcopy(model)
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0, free=[model[-1]])
    for _ in range(3):
        twin.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        output = model(x)
        assert torch.equal(output, twin(x))
        output.square().mean().backward()
        twin.zero_grad()
        twin(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        optimizer.step()
        for name in ("1.conv1", "1.conv2", "3.conv1", "3.conv2"):
            expected = normalized_taylor(*gradient_at(twin, name.replace("conv", "norm"), x), 1)
            torch.testing.assert_close(optimizer.importance[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_importance_is_the_same_in_a_checkpoint(autocast: bool) -> None:
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        body, x = resnet(), images()
        optimizer = holdfast.NPC(body, SGD(body.parameters(), lr=0.1), rate=1.0, free=[body[-1]])
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = checkpoint(body, x, use_reentrant=False) if checkpointed else body(x)
            output.float().square().mean().backward()
            optimizer.step()
        found.append(optimizer.importance)
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, track_running_stats=False),
     nn.GroupNorm(2, 4), nn.GroupNorm(2, 4, affine=False)],
)  # fmt: skip
def test_a_normalization_is_computed_again_to_the_bit_and_without_side_effects(norm: nn.Module, training: bool) -> None:
    norm, x = copy.deepcopy(norm), torch.randn(5, 4, 3, 3) * 2 + 1
    norm(x)
    norm.train(training)
    before = copy.deepcopy(norm.state_dict())
    again = renormalization(norm, x)
    assert again is not None
    computed = again(x)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(computed, norm(x))


def test_a_normalization_of_another_class_is_not_computed_again() -> None:
    class Shifted(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) + 1

    assert renormalization(Shifted(4), torch.randn(2, 4, 3, 3)) is None
