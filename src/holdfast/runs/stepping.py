"""The training steps of a run, taken eagerly or replayed as a CUDA graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.compiling import compiled
from holdfast.methods import Method
from holdfast.runs.environment import autocast
from holdfast.runs.plan import Plan
from holdfast.streams.batches import DeviceImages, Pass, Shuffled, make_batch
from holdfast.streams.tasks import Task


def count_step_(loss: Tensor, steps: Tensor, not_finite: Tensor) -> None:
    """Count a step, in place. If its loss is the first that is not finite, keep its number in `not_finite`.

    >>> steps, not_finite = torch.tensor(7), torch.tensor(-1)
    >>> count_step_(torch.tensor(torch.nan), steps, not_finite)
    >>> steps, not_finite
    (tensor(8), tensor(7))
    """
    not_finite.copy_(torch.where((not_finite < 0) & ~loss.isfinite(), steps, not_finite))
    steps += 1


class Stepper:
    """Takes training steps: loss, gradients, update.

    On a GPU with `compile`, the whole step is captured as a CUDA graph and replayed, if the method allows it.

    Args:
        model: the model in training.
        method: the method it is trained with.
        images: the images of the stream.
        plan: the plan of the run.
    """

    def __init__(self, model: nn.Module, method: Method, images: DeviceImages, plan: Plan) -> None:
        self.model, self.method, self.images, self.plan = model, method, images, plan
        self.device = images.device
        self.graphed: Callable[[], None] | None = None
        on_gpu = plan.compile and self.device.type == "cuda"
        self._can_capture = on_gpu and images.resident and not plan.deterministic
        self._compiled_loss: Callable[..., Any] = torch.compile(self._loss) if plan.compile else self._loss
        self._count_step = compiled(count_step_) if on_gpu else count_step_
        self._part: Pass | None = None  # read by the graph, so refilled in place
        # On the device: reading them at every step would synchronize.
        self._steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._not_finite = torch.full((), -1, device=self.device)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps. A graph has its learning rate built in, so it is captured anew."""
        for group in self.method.param_groups:
            if group["lr"] != lr:
                group["lr"] = lr
                self.graphed = None

    def step(self, batches: Shuffled, active: Tensor) -> None:
        """Take one step on the next batch; `active` are the output nodes of its task."""
        if not (self._can_capture and self.method.recordable):
            self._step(*next(batches), active)
            return
        part = batches.draw()
        if self.graphed is None or self._part is None:
            from holdfast.gpu import GraphedStep

            self._part = part.clone()
            self.graphed = GraphedStep(partial(self._step_on_part, batches.task, active), self.device)
        self._part.copy_(part)
        self.graphed()

    def _step_on_part(self, task: Task, active: Tensor) -> None:
        assert self._part is not None
        self._step(*make_batch(self.images, task, self._part), active)

    def _step(self, x: Tensor, y: Tensor, active: Tensor) -> None:
        loss = self._compiled_loss(x, y, active)
        if self.method.has_penalty:
            with autocast(self.plan, self.device):
                loss = loss + self.method.penalty()
        self.method.zero_grad()
        loss.backward()
        self.method.step()
        self._count_step(loss.detach(), self._steps, self._not_finite)

    def _loss(self, x: Tensor, y: Tensor, active: Tensor) -> Tensor:
        with autocast(self.plan, self.device):
            outputs = self.model(x)
        return cross_entropy(outputs.float().index_select(1, active), y)

    @property
    def not_finite(self) -> int:
        """The number of the first step whose loss was not finite, or -1. Reading it waits for the device."""
        return int(self._not_finite)

    def restore(self, steps: int, not_finite: int) -> None:
        """Resume after `steps` steps of a task."""
        self._steps.fill_(steps)
        self._not_finite.fill_(not_finite)

    def finish_task(self) -> None:
        """Discard the gradients and the graph of the task, and count from 0 again."""
        self.method.zero_grad()
        self._part = self.graphed = None
        self._steps.zero_()

    def close(self) -> None:
        """Free the memory on the device, which reference cycles would keep until the next garbage collection."""
        self.finish_task()
        del self._compiled_loss
