"""Plasticity by direction: which changes of a layer leave its outputs on old inputs alone.

A layer multiplies its inputs a by a matrix W. A change G of W changes the outputs on old inputs by G a. With the second
moment A = E[a a^T] of old inputs, the change G P with P = (I + kappa A)^-1 minimizes |G P - G|^2 + kappa E|G P a|^2:
it stays close to G where no old input lies, and vanishes where old inputs are strong. Tensors have a leading axis of
groups, for grouped convolutions.

The inputs of an embedding are one-hot, so their second moment is diagonal: how often each row was used. Such a moment
is a matrix `[groups, inputs]` of its diagonals, and needs no directions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_SPARE = 32  # directions iterated beyond those kept
_ITERATIONS = 6
_SHIFT = 1e-11  # of the squared norm: keeps Cholesky factors finite where there are few directions


class Directions(NamedTuple):
    """A second moment by its leading directions: A = U diag(values) U^T + rest (I - U U^T)."""

    vectors: Tensor
    """U, `[groups, inputs, rank]`: orthonormal columns, or 0 for directions without inputs."""
    values: Tensor
    """The eigenvalues of these directions, `[groups, rank]`."""
    rest: Tensor
    """The mean eigenvalue of all other directions, `[groups]`."""

    @property
    def missing(self) -> int:
        """The number of directions that are not kept."""
        return self.vectors.shape[1] - self.vectors.shape[2]


Moment = Directions | Tensor
"""A second moment by its directions, or a diagonal one, `[groups, inputs]`, if inputs are indices of rows."""


def second_moment(rows: Tensor, *, bias: bool) -> Tensor:
    """Sum a a^T over the rows a, `[groups, n, inputs]`, with a 1 appended to each row if the layer has a bias.

    >>> second_moment(torch.tensor([[[2.0], [3.0]]]), bias=True)
    tensor([[[13.,  5.],
             [ 5.,  2.]]])
    """
    total = rows.mT @ rows
    if not bias:
        return total
    sums = rows.sum(1, keepdim=True)
    count = sums.new_full((len(rows), 1, 1), rows.shape[1])
    return torch.cat([torch.cat([total, sums.mT], 2), torch.cat([sums, count], 2)], 1)


def uses(indices: Tensor, inputs: int) -> Tensor:
    """The diagonal second moment of one-hot inputs, given as indices: how often each was used, `[1, inputs]`.

    >>> uses(torch.tensor([[2, 0], [2, 2]]), inputs=4)
    tensor([[1., 0., 3., 0.]], dtype=torch.float64)
    """
    return torch.bincount(indices.flatten(), minlength=inputs).double().unsqueeze(0)


def normalized(moment: Tensor) -> Tensor:
    """Divide a second moment, or a diagonal one, by the mean of its diagonal. Zero stays zero.

    >>> normalized(torch.tensor([[[3.0, 1.0], [1.0, 1.0]]]))
    tensor([[[1.5000, 0.5000],
             [0.5000, 0.5000]]])
    """
    diagonal = moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)
    scale = diagonal.mean(1)
    return moment / torch.where(scale > 0, scale, 1).view(-1, *[1] * (moment.dim() - 1))


def leading(moment: Tensor, rank: int | None) -> Directions:
    """The `rank` leading directions of a second moment, or all of them if None.

    Directions without inputs, of eigenvalue 0, are not determined, and neither are signs: the former become 0, and the
    largest component of each direction becomes positive.

    >>> found = leading(torch.diag(torch.tensor([1.0, 5.0, 2.0])).unsqueeze(0), rank=1)
    >>> found.values, found.rest
    (tensor([[5.]]), tensor([1.5000]))
    """
    inputs = moment.shape[1]
    others = 0 if rank is None else max(0, inputs - rank)
    if inputs - others + _SPARE < inputs / 2:
        values, vectors = _subspace(moment, inputs - others)
    else:
        values, vectors = (each[..., others:] for each in torch.linalg.eigh(moment))  # in ascending order
    values = values.clamp(min=0)
    trace = moment.diagonal(dim1=1, dim2=2).sum(1)
    rest = (trace - values.sum(1)).clamp(min=0) / others if others else torch.zeros_like(trace)
    signs = vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
    present = values > inputs * torch.finfo(values.dtype).eps * values[:, -1:]
    return Directions((vectors * signs * present.unsqueeze(1)).contiguous(), values * present, rest)


def _subspace(moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues, in ascending order, and their vectors, by subspace iteration.

    Faster than `eigh` for few directions of a large matrix, and exact up to directions of nearly the same eigenvalue.
    """
    groups, inputs, _ = moment.shape
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(groups, inputs, rank + _SPARE, dtype=moment.dtype, generator=generator).to(moment.device)
    shift = _SHIFT * torch.eye(rank + _SPARE, dtype=moment.dtype, device=moment.device)
    for _ in range(_ITERATIONS):
        image = moment @ basis
        scale = torch.linalg.matrix_norm(image, keepdim=True).clamp(min=torch.finfo(moment.dtype).tiny)
        image = image / scale
        factor = torch.linalg.cholesky(image.mT @ image + shift)  # nearly orthonormal columns, faster than by qr
        basis = torch.linalg.solve_triangular(factor.mT, image, upper=True, left=False)
    basis = torch.linalg.qr(basis).Q
    values, rotation = torch.linalg.eigh(basis.mT @ moment @ basis)
    return values[:, -rank:], basis @ rotation[:, :, -rank:]


def dense(directions: Directions) -> Tensor:
    """The second moment as a matrix, `[groups, inputs, inputs]`."""
    vectors, values, rest = directions
    along = (vectors * (values - rest.unsqueeze(1)).unsqueeze(1)) @ vectors.mT
    return along + torch.diag_embed(rest.unsqueeze(1).expand(-1, vectors.shape[1]))


def freedom(directions: Directions, kappa: float) -> tuple[Tensor, Tensor]:
    """The eigenvalues 1 / (1 + kappa lambda) of P: along the kept directions, and elsewhere.

    >>> directions = Directions(torch.eye(2)[:, 1:].unsqueeze(0), torch.tensor([[9.0]]), torch.tensor([1.0]))
    >>> freedom(directions, kappa=1.0)
    (tensor([[0.1000]]), tensor([0.5000]))
    """
    return (1 + kappa * directions.values).reciprocal(), (1 + kappa * directions.rest).reciprocal()


def capacity(directions: Directions, kappa: float) -> Tensor:
    """The share of directions taken: trace(kappa A (I + kappa A)^-1) / inputs, over all groups."""
    along, elsewhere = freedom(directions, kappa)
    taken = (1 - along).sum(1) + directions.missing * (1 - elsewhere)
    return (taken / directions.vectors.shape[1]).mean()


def directed(
    change: Tensor, bias: Tensor | None, share: Tensor, directions: Directions, kappa: float
) -> tuple[Tensor, Tensor | None]:
    """The change s G + (1 - s) G P of neurons with plasticity s, of their weights and biases.

    Args:
        change: the weights' part of G, `[groups, neurons, inputs]`.
        bias: the biases' part, `[groups, neurons, 1]`, or None; the last of the inputs in A.
        share: s, `[groups, neurons, 1]`.
        directions: A.
        kappa: the strength of the protection.

    >>> directions = Directions(torch.eye(2).unsqueeze(0), torch.tensor([[0.0, 9.0]]), torch.zeros(1))
    >>> directed(torch.ones(1, 3, 2), None, torch.tensor([[[0.0], [0.5], [1.0]]]), directions, kappa=1.0)[0]
    tensor([[[1.0000, 0.1000],
             [1.0000, 0.5500],
             [1.0000, 1.0000]]])
    """
    along, elsewhere = freedom(directions, kappa)
    elsewhere = elsewhere.view(-1, 1, 1)
    inputs = change.shape[2]
    weights, last = directions.vectors[:, :inputs], directions.vectors[:, inputs:]
    inside = change @ weights if bias is None else change @ weights + bias * last
    inside = inside * ((1 - share) * (along.unsqueeze(1) - elsewhere))
    outside = torch.lerp(elsewhere.expand_as(share), torch.ones_like(share), share)
    moved = outside * change + inside @ weights.mT
    return moved, None if bias is None else outside * bias + (inside * last).sum(2, keepdim=True)


def diagonal_capacity(moment: Tensor, kappa: float) -> Tensor:
    """The `capacity` of a diagonal second moment.

    >>> diagonal_capacity(torch.tensor([[0.0, 1.0]]), kappa=1.0)
    tensor(0.2500)
    """
    return (1 - (1 + kappa * moment).reciprocal()).mean()


def diagonally_directed(change: Tensor, share: Tensor, moment: Tensor, kappa: float) -> Tensor:
    """The change of `directed` for a diagonal second moment.

    >>> diagonally_directed(torch.ones(1, 2, 2), torch.tensor([[[0.0], [0.5]]]), torch.tensor([[0.0, 9.0]]), kappa=1.0)
    tensor([[[1.0000, 0.1000],
             [1.0000, 0.5500]]])
    """
    return change * torch.lerp((1 + kappa * moment).reciprocal().unsqueeze(1), torch.ones_like(share), share)
