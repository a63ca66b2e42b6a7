import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.importance import Observe, layer_means, moving_average, taylor


def taylor_by_loops(n: torch.Tensor, g: torch.Tensor, axis: int) -> list[float]:
    n, g = n.movedim(axis, 1).flatten(2).double(), g.movedim(axis, 1).flatten(2).double()
    result = []
    for neuron in range(n.shape[1]):
        total = 0.0
        for sample in range(n.shape[0]):
            inner = [
                n[sample, neuron, p].item() * g[sample, neuron, p].item()
                for p in range(n.shape[2] if n.dim() > 2 else 1)
            ]
            total += abs(sum(inner) / len(inner))
        result.append(total)
    return result


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=5), st.data())
def test_taylor_is_the_loop(shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.integers(1, len(shape) - 1))
    n, g = torch.randn(shape), torch.randn(shape)
    full = [*shape, 1] if len(shape) == 2 else shape
    assert taylor(n, g, axis).tolist() == pytest.approx(
        taylor_by_loops(n.view(full), g.view(full), axis), rel=1e-5, abs=1e-6
    )


def test_taylor_by_hand() -> None:
    n = torch.tensor([[[1.0, -2.0], [3.0, 1.0]], [[0.0, 4.0], [1.0, 1.0]]])  # 2 samples, 2 neurons, 2 positions
    g = torch.tensor([[[1.0, 1.0], [2.0, -6.0]], [[5.0, -1.0], [1.0, 1.0]]])
    # neuron 1: |1 - 2| / 2 + |0 - 4| / 2 = 2.5; neuron 2: |6 - 6| / 2 + |1 + 1| / 2 = 1
    assert taylor(n, g, axis=1).tolist() == [2.5, 1.0]
    assert taylor(n[0], g[0], axis=0).tolist() == [0.5, 0.0]  # without a batch axis


def test_half_precision_products_neither_overflow_nor_vanish() -> None:
    n = torch.full((2, 1), 300.0, dtype=torch.float16)
    g = torch.full((2, 1), 600.0, dtype=torch.float16)
    assert taylor(n, g, axis=1).tolist() == [360_000.0]
    assert taylor(n / 30_000, g / 600_000, axis=1).item() > 0


def test_observe_is_the_identity_and_keeps_the_gradient() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    carrier = torch.zeros(3, requires_grad=True)
    for copy in (False, True):
        x.grad = carrier.grad = None
        observed = Observe.apply(x, carrier, 1, copy)
        assert torch.equal(observed, x)
        (observed**2).sum().backward()
        assert x.grad is not None
        assert carrier.grad is not None
        assert torch.equal(x.grad, 2 * x)
        torch.testing.assert_close(carrier.grad, (2 * x * x).abs().sum(0).detach())


def test_observe_adds_up_over_backwards() -> None:
    x, carrier = torch.randn(4, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    for part in (x[:1], x[1:]):
        Observe.apply(part, carrier, 1, False).square().sum().backward()
    torch.testing.assert_close(carrier.grad, (2 * x * x).sum(0).detach())


def test_second_derivatives_pass_through() -> None:
    x, carrier = torch.randn(3, 2, requires_grad=True, dtype=torch.float64), torch.zeros(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((Observe.apply(x, carrier, 1, False) ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, 6 * x.detach())


def average(importance: list[float], measured: list[float], sizes: list[int], rate: float) -> list[float]:
    layer = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    before, now = torch.tensor([importance, measured], dtype=torch.float64)
    mean = layer_means(now, torch.tensor(sizes), sizes)
    return moving_average(before, now, mean, layer, rate).tolist()


def test_moving_average_by_hand() -> None:
    # layer means 2 and 5; normalized 0.5, 1.5 and 1; rate 0.25 from 1, 1, 0
    assert average([1, 1, 0], [1, 3, 5], [2, 1], 0.25) == pytest.approx([0.875, 1.125, 0.25])


@given(st.floats(1e-6, 1e6))
def test_a_layer_is_measured_on_its_own_scale(scale: float) -> None:
    """So the batch size, the loss scale and the number of micro-batches drop out."""
    plain = average([0, 0, 0], [1, 3, 5], [2, 1], 0.5)
    assert average([0, 0, 0], [scale, 3 * scale, 5], [2, 1], 0.5) == pytest.approx(plain)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_a_layer_without_a_usable_measurement_keeps_its_importance(bad: float) -> None:
    assert average([0.3, 0.7, 0], [bad, 0 if bad == 0 else 1, 2], [2, 1], 0.5) == pytest.approx([0.3, 0.7, 0.5])
