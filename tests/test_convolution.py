"""The per-sample convolution against torch's own."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from holdfast.samples.convolution import PerSampleConvolutions, columns

sides = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(sides, sides, st.tuples(st.integers(0, 2), st.integers(0, 2)), sides, st.booleans(), st.integers(0, 1000))
def test_as_torchs_own(kernel: Any, stride: Any, padding: Any, dilation: Any, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=bias).double()
    model = nn.Sequential(nn.Conv2d(2, 2, 1).double(), layer)  # so that the layer passes a gradient on
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(4, 2, 8, 9, dtype=torch.float64)

    def loss(weights: Any, sample: torch.Tensor) -> torch.Tensor:
        return functional_call(model, weights, (sample[None],)).sin().sum()

    expected_outputs, expected = model(x), vmap(grad(loss), in_dims=(None, 0))(weights, x)
    with PerSampleConvolutions():
        outputs, found = model(x), vmap(grad(loss), in_dims=(None, 0))(weights, x)
        whole = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    torch.testing.assert_close(outputs, expected_outputs)
    for gradient, each in zip(whole, expected.values(), strict=True):
        torch.testing.assert_close(gradient, each.sum(0), rtol=1e-9, atol=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(sides, sides, st.tuples(st.integers(0, 2), st.integers(0, 2)), sides)
def test_columns_are_those_of_unfold(kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    x = torch.randn(2, 3, 8, 9)
    expected = nn.functional.unfold(x, kernel, dilation, padding, stride)
    assert torch.equal(columns(x, kernel, stride, padding, dilation), expected)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, padding_mode="circular")],
)
def test_other_kinds_are_torchs_own(layer: nn.Module) -> None:
    x = torch.randn(2, 4, 6, 6)
    with PerSampleConvolutions():
        outputs = layer(x)
    torch.testing.assert_close(outputs, layer(x))
