"""Layers whose neurons no module shows, against twins whose modules show them."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import holdfast
from holdfast.importance import parameter_taylor, taylor
from holdfast.methods.dpc import direct_all
from holdfast.methods.npc import measure_parameters
from holdfast.neurons.rows import Layout


class OneHot(nn.Module):
    """An embedding as a linear layer on one-hot inputs."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.linear = nn.Linear(*table.weight.shape, bias=False)
        self.linear.weight.data = table.weight.data.T.clone()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(F.one_hot(tokens, self.linear.in_features).to(self.linear.weight))


class Attention(nn.Module):
    """`nn.MultiheadAttention` with a module for each projection."""

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        width, self.heads = packed.embed_dim, packed.num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        for linear, weight, bias in zip(
            (self.q, self.k, self.v), packed.in_proj_weight.chunk(3), packed.in_proj_bias.chunk(3), strict=True
        ):
            linear.weight.data, linear.bias.data = weight.detach().clone(), bias.detach().clone()
        self.out.to(packed.in_proj_weight).load_state_dict(packed.out_proj.state_dict())

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for linear, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Packed experts, each token routed to one of them, as in transformers."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = 3, transposed
        up, down = (5, 4), (4, 5)
        self.gate_up_proj = nn.Parameter(torch.randn(3, *(up[::-1] if transposed else up)))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(3, 5))
        self.down_proj = nn.Parameter(torch.randn(3, *(down[::-1] if transposed else down)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
        ups, downs = self.gate_up_proj, self.down_proj
        if self.is_transposed:
            ups, downs = ups.mT, downs.mT
        output = torch.zeros_like(hidden_states)
        for expert in range(3):
            routed = (top_k_index == expert).squeeze(1)
            inner = self._apply_gate(F.linear(hidden_states[routed], ups[expert], self.gate_up_proj_bias[expert]))
            output[routed] = F.linear(inner, downs[expert])
        return output

    def _apply_gate(self, inner: Tensor) -> Tensor:
        return torch.tanh(inner)


class Separate(nn.Module):
    """The same experts as modules."""

    def __init__(self, packed: Experts) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(5, 4, bias=False) for _ in range(3))
        ups, downs = packed.gate_up_proj.data, packed.down_proj.data
        if packed.is_transposed:
            ups, downs = ups.mT, downs.mT
        for expert in range(3):
            self.ups[expert].weight.data = ups[expert].clone()
            self.ups[expert].bias.data = packed.gate_up_proj_bias.data[expert].clone()
            self.downs[expert].weight.data = downs[expert].clone()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor) -> Tensor:
        output = torch.zeros_like(hidden_states)
        for expert, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            routed = (top_k_index == expert).squeeze(1)
            output[routed] = down(torch.tanh(up(hidden_states[routed])))
        return output


def signed_sums(twin: nn.Module, names: list[str], inputs: tuple[Tensor, ...]) -> Tensor:
    """|sum over samples and positions of n dL/dn| at the outputs of linear modules, relative to the mean of each."""
    outputs: list[Tensor] = []
    for name in names:
        twin.get_submodule(name).register_forward_hook(lambda m, args, output: outputs.append(output))
    gradients = torch.autograd.grad(loss_of(twin, inputs), outputs)
    sums = [(n * g).flatten(0, -2).sum(0).abs() for n, g in zip(outputs, gradients, strict=True)]
    return torch.stack(sums).detach()


def loss_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    output = model(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    return (output * torch.linspace(-1, 2.5, output.shape[-1]).to(output)).square().mean()


def importance_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0)
    loss_of(model, inputs).backward()
    optimizer.step()
    optimizer.close()
    return optimizer.importance


def attention() -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(4, 2, batch_first=True).double()
    nn.init.normal_(module.in_proj_bias)
    return module


def sequences() -> tuple[Tensor, Tensor, Tensor]:
    source = torch.randn(3, 7, 4).double()
    return torch.randn(3, 5, 4).double(), source, source.tanh()


def test_the_sum_over_parameters_is_that_over_samples_and_positions() -> None:
    layer, x = nn.Linear(4, 3).double(), torch.randn(5, 6, 4).double()
    n = layer(x)
    loss = n.pow(3).sum()
    weight, bias, g = torch.autograd.grad(loss, [layer.weight, layer.bias, n])
    ours = parameter_taylor([(layer.weight, weight, lambda p: p.sum(1)), (layer.bias, bias, lambda p: p)])
    torch.testing.assert_close(ours, (n * g).sum((0, 1)).abs())
    assert (ours <= 6 * taylor(n, g, axis=2) + 1e-9).all()  # which cancels less


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_over_parameters_are_taken_in_float32(dtype: torch.dtype) -> None:
    weight = torch.full((1, 3000), 30.0, dtype=dtype)
    assert parameter_taylor([(weight, weight, lambda p: p.sum(1))]) == 3000 * 900.0


def test_importance_in_an_embedding() -> None:
    table, tokens = nn.Embedding(6, 4).double(), torch.randint(6, (3, 5))
    c = signed_sums(OneHot(table), ["linear"], (tokens,))[0]
    torch.testing.assert_close(importance_of(table, (tokens,))[""], c / c.mean())


def test_importance_in_attention_is_relative_to_each_projection() -> None:
    module, inputs = attention(), sequences()
    c = signed_sums(Attention(module), ["q", "k", "v", "out"], inputs)
    expected = c / c.mean(1, keepdim=True)
    found = importance_of(module, inputs)
    torch.testing.assert_close(found["in_proj"], expected[:3].flatten())
    torch.testing.assert_close(found["out_proj"], expected[3])


@pytest.mark.parametrize("transposed", [False, True])
def test_importance_in_packed_experts_is_relative_to_all_of_them(transposed: bool) -> None:
    module = Experts(transposed).double()
    inputs = torch.randn(20, 4).double(), torch.tensor([0, 1] * 10).unsqueeze(1)  # the third is never used
    up, down = (
        torch.cat([signed_sums(Separate(module), [f"{kind}.{i}" for i in range(3)], inputs).flatten()])
        for kind in ("ups", "downs")
    )
    found = importance_of(module, inputs)
    torch.testing.assert_close(found["gate_up_proj"], up / up.mean())
    torch.testing.assert_close(found["down_proj"], down / down.mean())
    assert not found["gate_up_proj"][10:].any()


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.LSTM, 4), (nn.GRU, 3)])
def test_importance_in_recurrent_networks(kind: type[nn.RNNBase], gates: int) -> None:
    """For steps by hand, with the gates' inputs as leaves."""
    module, x = kind(3, 2, batch_first=True).double(), torch.randn(4, 5, 3).double()
    h = c = torch.zeros(4, 2).double()
    steps, outputs = [], []
    for t in range(5):
        a = F.linear(x[:, t], module.weight_ih_l0, module.bias_ih_l0).chunk(gates, 1)
        b = F.linear(h, module.weight_hh_l0, module.bias_hh_l0).chunk(gates, 1)
        if kind is nn.GRU:
            r, z = a[0] + b[0], a[1] + b[1]
            n = a[2] + r.sigmoid() * b[2]
            steps.append((r, z, n))
            h = (1 - z.sigmoid()) * n.tanh() + z.sigmoid() * h
        else:
            steps.append(tuple(map(torch.add, a, b)))
            if kind is nn.LSTM:
                i, f, g, o = steps[-1]
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            else:
                h = steps[-1][0].tanh()
        outputs.append(h)
    output = torch.stack(outputs, 1)
    torch.testing.assert_close(output, module(x)[0])
    loss = (output * torch.linspace(-1, 2.5, 2).double()).square().mean()
    inputs = [n for step in steps for n in step]
    products = [(n * g).sum(0) for n, g in zip(inputs, torch.autograd.grad(loss, inputs), strict=True)]
    expected = torch.stack(products).view(5, gates, 2).sum(0).abs().detach()
    found = importance_of(module, (x,))
    torch.testing.assert_close(found["l0"], (expected / expected.mean(1, keepdim=True)).flatten())


def test_a_cell_is_a_recurrent_layer() -> None:
    cell, x = nn.LSTMCell(3, 2), torch.randn(4, 3)
    assert importance_of(cell, (x,))[""].shape == (8,)


class Vision(nn.Module):
    """Bare parameters, a normalization behind a sum, one behind a layer, and parametrized and shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 6, 4))
        self.scale = nn.Parameter(torch.randn(4))
        self.temperature = nn.Parameter(torch.ones(()))
        self.embed = nn.Linear(3, 4)
        self.after_sum, self.after_layer = nn.LayerNorm(4), nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.position
        x = x + self.scale * torch.tanh(self.after_layer(self.linear(self.after_sum(x))))
        return self.temperature * self.normed(x)


def test_every_other_parameter_belongs_to_one_layer() -> None:
    model, x = Vision().double(), torch.randn(2, 5, 3).double()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0)
    assert "after_layer" not in optimizer.importance
    twin = copy.deepcopy(model)
    loss_of(model, (x,)).backward()
    optimizer.step()
    found = optimizer.importance
    assert found.keys() == {
        *("embed", "linear", "token", "position", "scale", "after_sum"),
        *("normed.bias", "normed.parametrizations.weight.original0"),
    }
    loss_of(twin, (x,)).backward()
    for name in ("token", "position", "scale"):
        p = getattr(twin, name)
        c = (p * p.grad).flatten(0, -2).sum(0).abs() if p.dim() > 1 else (p * p.grad).abs()
        torch.testing.assert_close(found[name], (c / c.mean()).detach())
    norm = twin.after_sum
    c = (norm.weight * norm.weight.grad + norm.bias * norm.bias.grad).abs()
    torch.testing.assert_close(found["after_sum"], (c / c.mean()).detach())
    owned = [p for layer in optimizer._layers for p, _ in layer.parameters]
    assert len(owned) == len(set(owned))
    assert set(model.parameters()) - set(owned) == {model.temperature}


def test_frozen_neurons_do_not_move() -> None:
    model, x = Vision(), torch.randn(2, 5, 3)
    optimizer = holdfast.NPC(model, AdamW(model.parameters(), lr=0.1), rate=1.0, beta=1e-9, free="temperature")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(2):
        loss_of(model, (x,)).backward()
        optimizer.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert moved == ["temperature"]


# ---- DPC ----


def projected(
    model: nn.Module, inputs: tuple[Tensor, ...], wrapped: Callable[..., torch.optim.Optimizer]
) -> holdfast.DPC:
    """Train frozen neurons on a second task, so that each change is G P."""
    optimizer = holdfast.DPC(model, wrapped(model.parameters(), lr=0.01), rate=1.0, beta=1e-12, kappa=3.0)
    first, second = (tuple(x[part] for x in inputs) for part in (slice(0, 2), slice(2, None)))
    for batch in (first, second):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.consolidate([(batch, None)])
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, second).backward()
        optimizer.step()
    optimizer.close()
    return optimizer


WRAPPED = pytest.mark.parametrize("wrapped", [SGD, AdamW])


@WRAPPED
def test_an_embedding_moves_like_a_linear_layer_on_one_hot_inputs(wrapped: type[torch.optim.Optimizer]) -> None:
    table, tokens = nn.Embedding(6, 4).double(), torch.tensor([[0, 1, 2, 2], [1, 2, 2, 2], [2, 3, 4, 4]])
    twin, before = OneHot(table), table.weight.detach().clone()
    ours, theirs = projected(table, (tokens,), wrapped), projected(twin, (tokens,), wrapped)
    torch.testing.assert_close(table.weight, twin.linear.weight.T)
    torch.testing.assert_close(ours.capacity[""], theirs.capacity["linear"])
    assert (table.weight - before)[2:5].abs().max() > 0
    if wrapped is SGD:
        assert torch.equal(table.weight[5], before[5])
    assert ours.memory()["values"] == 6 * 8
    assert "vectors" not in ours.memory()


@WRAPPED
def test_attention_moves_like_one_with_a_module_for_each_projection(wrapped: type[torch.optim.Optimizer]) -> None:
    module, inputs = attention(), sequences()
    twin, before = Attention(module), module.in_proj_weight.detach().clone()
    ours, theirs = projected(module, inputs, wrapped), projected(twin, inputs, wrapped)
    torch.testing.assert_close(module.in_proj_weight, torch.cat([twin.q.weight, twin.k.weight, twin.v.weight]))
    torch.testing.assert_close(module.in_proj_bias, torch.cat([twin.q.bias, twin.k.bias, twin.v.bias]))
    torch.testing.assert_close(module.out_proj.weight, twin.out.weight)
    torch.testing.assert_close(module.out_proj.bias, twin.out.bias)
    assert not torch.allclose(module.in_proj_weight, before, atol=1e-6)
    separate = [theirs.capacity[name] for name in "qkv"]
    assert ours.capacity["in_proj"] == pytest.approx(sum(separate) / 3)
    assert ours.capacity["out_proj"] == pytest.approx(theirs.capacity["out"])


@WRAPPED
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_move_like_modules_on_the_tokens_routed_to_them(
    transposed: bool, wrapped: type[torch.optim.Optimizer]
) -> None:
    module = Experts(transposed).double()
    inputs = torch.randn(12, 4).double(), torch.arange(12).remainder(2).unsqueeze(1)
    twin = Separate(module)
    projected(module, inputs, wrapped)
    projected(twin, inputs, wrapped)
    up, down = module.gate_up_proj, module.down_proj
    if transposed:
        up, down = up.mT, down.mT
    for expert in range(2 if wrapped is AdamW else 3):
        torch.testing.assert_close(up[expert], twin.ups[expert].weight)
        torch.testing.assert_close(module.gate_up_proj_bias[expert], twin.ups[expert].bias)
        torch.testing.assert_close(down[expert], twin.downs[expert].weight)


def test_the_input_sides_of_a_recurrent_network() -> None:
    """Inputs of the first layer and states of the last one are read, and nothing else."""
    module, x = nn.GRU(3, 2, 2, batch_first=True, bidirectional=True), torch.randn(4, 5, 3)
    optimizer = projected(module, (x,), SGD)
    assert optimizer.capacity.keys() == {"l0.ih", "l0_reverse.ih", "l1.hh", "l1_reverse.hh"}
    single = nn.GRU(3, 2, batch_first=True)
    optimizer = holdfast.DPC(single, SGD(single.parameters(), lr=0.1), kappa=2.0)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3, 5]), batch_first=True, enforce_sorted=False)
    for given in (x, packed):
        loss = single(given)[0]
        (loss if isinstance(loss, Tensor) else loss.data).square().sum().backward()
    optimizer.step()
    optimizer.consolidate([x])
    for name, rows in (("l0.ih", x), ("l0.hh", single(x)[0].detach())):
        a = F.pad(rows.flatten(0, 1), (0, 1), value=1.0).double()
        moment = a.T @ a / (a.T @ a).diagonal().mean()
        inverse = torch.linalg.inv(torch.eye(len(moment)) + 2.0 * moment)
        assert optimizer.capacity[name] == pytest.approx(1 - inverse.trace().item() / len(moment), abs=1e-5)


class Shifted(nn.Embedding):
    """Looks up other rows than those given, as the position tables of some transformers do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input + 1)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 3 * super().forward(input)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.scaled, self.shifted = nn.Embedding(6, 4), Scaled(6, 4), Shifted(6, 4)
        self.scaled.weight = self.shared.weight
        self.linear = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.scaled(tokens) + self.shifted(tokens), self.linear.weight, self.linear.bias)


@WRAPPED
def test_weights_whose_inputs_no_call_shows_change_by_their_plasticity(wrapped: type[torch.optim.Optimizer]) -> None:
    """They do not move if frozen. Rows of a shared and scaled table move unless old tasks used them."""
    model, tokens = Tables().double(), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [2, 3, 3, 3]])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = projected(model, (tokens,), wrapped)
    moved = {name: (p != before[name]) for name, p in model.named_parameters()}
    assert {name for name, where in moved.items() if where.any()} == {"shared.weight"}
    report = holdfast.explain(optimizer)
    assert {layer.name: layer.directed for layer in report.layers} == {"linear": 0, "shared": 24, "shifted": 0}
    twin = Tables().double()
    other = holdfast.DPC(twin, wrapped(twin.parameters(), lr=0.1))
    other.load_state_dict(optimizer.state_dict())
    assert holdfast.explain(other).directed == report.directed


def test_a_bare_table_with_sparse_gradients_is_left_alone() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.linear(F.embedding(tokens, self.table, sparse=True))

    model = Lookup()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1), rate=1.0, beta=1e-9)
    before = model.table.detach().clone()
    loss_of(model, (torch.tensor([[1, 2]]),)).backward()
    with pytest.warns(UserWarning, match="full rate: table;"):
        optimizer.step()
    assert [row for row in range(6) if not torch.equal(model.table[row], before[row])] == [1, 2]


def test_masked_attention_is_read_as_it_is_used() -> None:
    """In evaluation torch would take a fast path that calls no module."""
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    x, mask = torch.randn(2, 5, 4), torch.tensor([[False] * 4 + [True]] * 2)
    optimizer = holdfast.DPC(model, SGD(model.parameters(), lr=0.1))
    model(x, src_key_padding_mask=mask).square().sum().backward()
    optimizer.step()
    optimizer.consolidate([({"src": x, "src_key_padding_mask": mask}, None)])
    assert all(0 < share <= 1 for share in optimizer.capacity.values())
    assert torch.backends.mha.get_fastpath_enabled()


def test_stacked_layouts() -> None:
    weight = torch.randn(3, 5, 4)
    for layout, matrix in ((Layout(3, stacked=True), weight), (Layout(3, transposed=True, stacked=True), weight.mT)):
        assert torch.equal(layout.matrix(weight), matrix)
        assert torch.equal(layout.weight(matrix, weight.shape), weight)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(6, 4), nn.Parameter(torch.randn(1, 3, 4))
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def test_models_without_taps_compile_to_one_graph() -> None:
    """The model, and the parts of a step that are compiled on a GPU."""
    model, tokens = Text(), torch.randint(6, (2, 3))
    optimizer = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), rate=0.5, example=tokens)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss_of(whole, (tokens,)).backward()
    optimizer.step()
    optimizer.consolidate([tokens])
    moving = optimizer._moving()
    terms = [[(p.detach(), p.grad, spread)] for p, _, spread in moving]
    measure, direct = (torch.compile(f, backend="aot_eager", fullgraph=True) for f in (measure_parameters, direct_all))
    torch.testing.assert_close(measure(terms), measure_parameters(terms))
    sides = optimizer._sides({p: index for index, (p, _, _) in enumerate(moving)})
    shares, gradients = torch.cat(list(optimizer.plasticity.values())), [p.grad for p, _, _ in moving]
    compiled, eager = (f(shares, optimizer._widths, gradients, sides, None, 10.0) for f in (direct, direct_all))
    torch.testing.assert_close(compiled, eager)
    torch.compiler.reset()


def test_a_state_is_restored() -> None:
    model, x = Vision(), torch.randn(2, 5, 3)
    optimizer = holdfast.DPC(model, SGD(model.parameters(), lr=0.1), rate=0.5, free="temperature")
    loss_of(model, (x,)).backward()
    optimizer.step()
    optimizer.consolidate([x])
    twin = copy.deepcopy(model)
    other = holdfast.DPC(twin, SGD(twin.parameters(), lr=0.1), free="temperature")
    other.load_state_dict(optimizer.state_dict())
    for each, method in ((model, optimizer), (twin, other)):
        method.zero_grad()
        loss_of(each, (x,)).backward()
        method.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name, values in optimizer.importance.items():
        assert torch.equal(values, other.importance[name])
