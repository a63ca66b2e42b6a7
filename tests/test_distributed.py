"""Two processes with half a batch each, against one process with the whole batch."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import holdfast
from helpers import assert_same_bits, memory_of, train
from holdfast.methods import METHODS, Method
from holdfast.methods.building import build as build_method

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed")

STEPS, BATCH = 5, 8


class Attended(nn.Module):
    """Layers that are measured by their gradients, which processes average."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.attention = (
            nn.Parameter(torch.randn(1, 3, 2)),
            nn.MultiheadAttention(2, 1, batch_first=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (3, 2)) + self.position
        return (x + self.attention(x, x, x, need_weights=False)[0]).flatten(1)


def build(untapped: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    middle = Attended() if untapped else nn.ReLU()
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), middle, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def data() -> list[Tensor]:
    torch.manual_seed(4)
    return [torch.randn(BATCH, 4, dtype=torch.float64) for _ in range(STEPS)]


def trained(model: nn.Module, optimizer: holdfast.NPC, batches: list[Tensor]) -> dict[str, Any]:
    train(model, optimizer, batches)
    return {"model": optimizer.model.state_dict(), "importance": optimizer.importance}


def leave() -> None:
    """End this process at once: on the way out, gloo's threads abort it now and then, also without holdfast."""
    dist.barrier()
    os._exit(0)


def worker(rank: int, folder: str, given: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    inner = build(given == "untapped")
    wrapper = DistributedDataParallel(inner)
    model = wrapper if given == "wrapper" else inner
    optimizer = holdfast.NPC(model, SGD(wrapper.parameters(), lr=0.1), rate=0.3, free=[inner[5]])
    result = trained(wrapper, optimizer, [x.chunk(2)[rank] for x in data()])
    torch.save(result, Path(folder) / f"{rank}.pt")
    leave()


@pytest.mark.parametrize("given", ["wrapper", "model inside", "untapped"])
def test_halves_of_a_batch_on_two_processes(given: str) -> None:
    whole = build(given == "untapped")
    expected = trained(whole, holdfast.NPC(whole, SGD(whole.parameters(), lr=0.1), rate=0.3, free=[whole[5]]), data())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder, given), nprocs=2)
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for result in results:
        for part in ("model", "importance"):
            for name, value in expected[part].items():
                torch.testing.assert_close(result[part][name], value, rtol=1e-10, atol=1e-12)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in METHODS},
    "compact": ("compact", {"weight": 0.0}),  # an effective rank is not a mean over samples
    "dpc without boundaries": ("dpc", {"every": 2}),
}


def two_tasks(case: str, wrap: bool, share: slice) -> dict[str, Any]:
    """What a method makes of a model, and remembers, when it learns from this share of every batch."""
    name, knobs = CASES[case]
    inner = build()
    model = DistributedDataParallel(inner) if wrap else inner
    if METHODS[name].needs.heads:
        knobs = {**knobs, "free": [inner[5]]}
    optimizer = METHODS[name](model, SGD(model.parameters(), lr=0.1), **knobs)
    torch.manual_seed(5)
    for _ in range(2):
        batches = [(x[share], torch.randint(2, (BATCH,))[share]) for x in data()]
        train(model, optimizer, [x for x, _ in batches])
        optimizer.consolidate(batches[:1], active=[0, 1])
        train(model, optimizer, [x for x, _ in batches[1:]])
    return {**inner.state_dict(), **memory_of(optimizer)}


def worker_of_all_methods(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    half = BATCH // 2
    share = slice(rank * half, (rank + 1) * half)
    torch.save({case: two_tasks(case, True, share) for case in CASES}, Path(folder) / f"{rank}.pt")
    leave()


def test_every_method_on_two_processes() -> None:
    expected = {case: two_tasks(case, False, slice(None)) for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker_of_all_methods, args=(folder,), nprocs=2)
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for result in results:
        for case in CASES:
            assert result[case].keys() == expected[case].keys()
            for key, value in expected[case].items():
                near = 1e-6 if key.startswith("/vectors") else 1e-12  # as exact as eigenvalues are apart
                torch.testing.assert_close(result[case][key], value, rtol=1e-9, atol=near, msg=f"{case} {key}")


def broadcasting_worker(rank: int, folder: str) -> None:
    """The state of a trained method on the first process, given to new methods on both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {}
    for name in (*METHODS, "lwf+npc", "lwf+si+cpc"):
        batches = [(x, torch.arange(BATCH) % 3) for x in data()]

        def made(name: str = name) -> tuple[nn.Module, Method]:
            model = DistributedDataParallel(build())
            return model, build_method(name, model, SGD(model.parameters(), lr=0.1, momentum=0.9))

        model, method = made()
        train(model, method, [x for x, _ in batches])
        method.consolidate(batches, active=[0, 1, 2])
        train(model, method, [x for x, _ in batches])
        method.zero_grad()
        state = get_optimizer_state_dict(model, method, options=StateDictOptions(full_state_dict=True))
        again, loaded = made()
        if loaded.needs.old_data:
            loaded.consolidate(batches, active=[0, 1, 2])
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(again, loaded, state if rank == 0 else {}, options=options)
        assert loaded.memory() == method.memory(), name
        found[name] = {"saved": memory_of(method), "loaded": memory_of(loaded)}
    torch.save(found, Path(folder) / f"{rank}.pt")
    leave()


def test_the_state_of_the_first_process_is_broadcast() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(broadcasting_worker, args=(folder,), nprocs=2)
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, saved in results[0].items():
        for result in results:
            assert_same_bits(result[name]["loaded"], saved["saved"])


def lonely_worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = build()
    optimizer = holdfast.NPC(model, SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="each process measures importance alone"):
        train(model, optimizer, data()[:1])
    mas = holdfast.MAS(model, SGD(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="each process consolidates alone.*give MAS that wrapper") as caught:
        mas.consolidate(data()[:1])
    assert caught[0].filename == __file__
    leave()


def test_processes_without_the_wrapper_are_warned() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(lonely_worker, args=(folder,), nprocs=2)
