"""One run: a model learns a stream of tasks with a method, and the outcome is a record."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.compiling import many_variants
from holdfast.methods import Method
from holdfast.methods.building import build, defaults_of
from holdfast.models import GrowingHead, build_model
from holdfast.runs import checkpoint
from holdfast.runs.environment import (
    autocast,
    choose_device,
    device_name,
    exclusive,
    interrupt_event,
    numerics,
    peak_memory,
    versions,
)
from holdfast.runs.plan import Plan, default_plan
from holdfast.runs.probe import SAMPLES, Probe
from holdfast.runs.record import Point, Record
from holdfast.runs.stepping import Stepper
from holdfast.streams.batches import Batches, DeviceImages, Rehearsal, Shuffled
from holdfast.streams.tasks import Stream

__all__ = ["Interrupted", "Progress", "choose_device", "train"]

_NOT_FINITE = "the loss or an output was not finite: try a smaller learning rate"
_CHECK_EVERY = 100  # steps between checks for a loss that is not finite; each check synchronizes with the device
_EVALUATION_BATCH = {"cpu": 128, "cuda": 1000}
"""Images per batch of an evaluation. On a CPU the activations of more images do not fit into its caches."""
_TRAINED_PER_SAMPLE = 50  # a sample of a consolidation takes up to about ten times as long as one of training
_FEWEST_SAMPLES = 256


@dataclass(frozen=True)
class Progress:
    """The progress of a run."""

    task: int
    tasks: int
    step: int
    steps: int
    accuracy: float | None
    """The mean accuracy over the tasks seen so far, at the last evaluation."""
    point: Point | None = None
    """The new point of the curves, if the run was evaluated after this step."""


class Interrupted(KeyboardInterrupt):
    """The run was interrupted. If it has a folder, it can be resumed."""


def train(
    stream: Stream,
    plan: Plan,
    *,
    device: str | torch.device | None = None,
    folder: Path | None = None,
    save_every: float = 60.0,
    tell: Callable[[Progress], None] | None = None,
    mark: Callable[[Point], None] | None = None,
) -> Record:
    """Learn the tasks of `stream` one after another, according to `plan`.

    Args:
        stream: the tasks.
        plan: the method, the model and all other choices.
        device: "cpu" or "cuda". By default a GPU if there is one.
        folder: the folder for checkpoints. An interrupted run resumes from there, with the same result to the bit: it
            keeps the number of threads with which it began.
        save_every: the seconds between two checkpoints.
        tell: called after every step with the progress of the run.
        mark: called with every point of the curves, the end of each task included. A resumed run repeats the points
            from before the interruption.
    """
    chosen = choose_device(device)
    path = None if folder is None else Path(folder) / "checkpoint.pt"
    state = None if path is None else checkpoint.load(path)
    if state is not None:
        plan = dataclasses.replace(plan, threads=_planned(state)["threads"])
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with (
        exclusive(),
        torch.random.fork_rng(gpus),
        numerics(plan),
        many_variants() if plan.compile else nullcontext(),
        interrupt_event() as interrupted,
        closing(_Training(stream, plan, chosen)) as run,
    ):
        if path is not None and state is not None:
            run.load_state_dict(state, path)
            if mark is not None:
                for point in run.record.timeline:
                    mark(point)
            if run.ended:
                return run.record
        elif path is not None:
            checkpoint.save(path, run.state_dict())  # fails now rather than later if the folder is not writable
        saved = time.monotonic()
        for progress in run:
            if tell is not None:
                tell(progress)
            if mark is not None and progress.point is not None:
                mark(progress.point)
            if path is not None and (interrupted.is_set() or time.monotonic() - saved >= save_every):
                checkpoint.save(path, run.state_dict())
                saved = time.monotonic()
            if interrupted.is_set():
                resume = f"; train again with folder {folder} to resume" if folder else ""
                raise Interrupted(f"interrupted{resume}")
        if path is not None:
            checkpoint.save(path, run.state_dict())
        return run.record


class _Training:
    """The state of a run. Iterating it takes the remaining steps, one at a time."""

    def __init__(self, stream: Stream, plan: Plan, device: torch.device) -> None:
        self.stream, self.plan, self.device = stream, plan, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.fingerprint = stream.fingerprint
        torch.manual_seed(plan.seed)
        compile_all = plan.compile and device.type == "cuda"  # on a CPU only the loss is compiled
        self.images = DeviceImages(stream, device, compile=compile_all)
        self.settings = _budgets(stream, plan) | dict(plan.settings)
        self.model = build_model(plan.model, stream.shape, stream.outputs, plan.width).to(device)
        self.growing = self._make_head_growing() if plan.heads == "growing" else None
        if compile_all:
            from holdfast.gpu import fuse_modules

            fuse_modules(self.model)
        self.method = self._build_method()
        self.needs = self.method.all_needs
        self.stepper = Stepper(self.model, self.method, self.images, plan)
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.nodes = self._nodes()
        self.active = [torch.tensor(nodes, device=device) for nodes in self.nodes]
        self.task, self.step = 0, 0
        self.batches = self._batches()
        self.outputs_finite = torch.ones((), dtype=torch.bool, device=device)  # at the last evaluation
        self.record = Record(
            stream=stream.name,
            tasks=[task.name for task in stream.tasks],
            plan=plan.as_dict(),
            settings=_all_settings(plan.method, self.settings),
            device=device_name(device),
            versions=versions(),
            steps=[plan.steps(stream, task) for task in stream.tasks],
        )
        self.probe = self._build_probe() if plan.neurons else None

    def _make_head_growing(self) -> GrowingHead:
        """Replace the head by one with the outputs of the first task only."""
        assert isinstance(self.model.head, nn.Linear)
        self.model.head = growing = GrowingHead(self.model.head.in_features)
        growing.grow(len(self.stream.tasks[0].active)).to(self.device)
        return growing

    def _build_method(self) -> Method:
        plan, head = self.plan, self.model.head
        assert isinstance(head, nn.Module)
        example = torch.zeros(2, *self.stream.shape, device=self.device) if plan.compile else None
        optimizer = torch.optim.SGD(self.model.parameters(), lr=plan.lr)
        try:
            return build(
                plan.method, self.model, optimizer, self.settings, heads=[head], example=example, compile=plan.compile
            )
        except TypeError as error:
            raise ValueError(f"settings of {plan.method}: {error}") from error

    def _build_probe(self) -> Probe:
        task = self.stream.tasks[0]
        samples, _ = next(iter(Batches(self.images, task, task.train, SAMPLES, seed=self.plan.seed)))
        return Probe(self.model, self.method, samples)

    def _nodes(self) -> list[tuple[int, ...]]:
        """The output nodes of each task."""
        if self.growing is None:
            return [task.active for task in self.stream.tasks]
        ends = list(accumulate(len(task.active) for task in self.stream.tasks))
        return [tuple(range(end - len(task.active), end)) for end, task in zip(ends, self.stream.tasks, strict=True)]

    def _grow(self) -> None:
        """Add the outputs of the next task, if the head grows."""
        if self.growing is not None:
            part = self.growing.grow(len(self.nodes[len(self.growing.parts)]))
            self.method.add_param_group({"params": list(part.parameters())})

    def _batches(self) -> Shuffled:
        return Shuffled(self.images, self.stream.tasks[self.task], self.plan.batch, self.generator)

    def close(self) -> None:
        self.stepper.close()

    # ---- training ----

    @property
    def ended(self) -> bool:
        return self.task == len(self.stream.tasks) or self.record.failure is not None

    def __iter__(self) -> Iterator[Progress]:
        if not self.record.untrained:
            self.record.untrained = self._evaluate()
        accuracy = None
        while not self.ended:
            steps = self.record.steps[self.task]
            while self.step < steps and self.record.failure is None:
                self._learn(last=self.step + 1 == steps)
                point = self._add_point() if self._point_is_due(steps) else None
                accuracy = accuracy if point is None else point.average
                yield Progress(self.task, len(self.stream.tasks), self.step, steps, accuracy, point)
            if self.record.failure is None:
                point = self._finish_task()
                accuracy = accuracy if point is None else point.average
                yield Progress(self.task, len(self.stream.tasks), 0, steps, accuracy, point)
        self.record.peak_bytes = max(self.record.peak_bytes, peak_memory(self.device))

    def _learn(self, *, last: bool) -> None:
        """Take one step, the last one of its task if `last`."""
        began = time.monotonic()
        self.stepper.set_lr(self.plan.lr_at(self.step, self.record.steps[self.task]))
        try:
            self.stepper.step(self.batches, self.active[self.task])
        except FloatingPointError as error:
            first = self.stepper.not_finite
            self._fail(self.step if first < 0 else first, str(error))
            return
        self.step += 1
        self.record.images += self.batches.size
        if last or self.step % _CHECK_EVERY == 0:
            first = self.stepper.not_finite
            if first >= 0:
                self._fail(first, _NOT_FINITE)
        self.record.seconds["training"] += time.monotonic() - began

    def _fail(self, step: int, reason: str) -> None:
        """End the run, and drop the points after `step` from the curves."""
        self.record.failure = {"task": self.task, "step": step, "why": reason}
        self.record.curves = [
            point for point in self.record.curves if (point["task"], point["step"]) <= (self.task, step)
        ]

    def _point_is_due(self, steps: int) -> bool:
        """Whether to add a point to the curves after this step. The end of a task is evaluated in any case."""
        points = self.plan.curve
        due = self.step * points // steps > (self.step - 1) * points // steps
        return due and self.step < steps and self.record.failure is None

    def _add_point(self) -> Point:
        accuracies = self._evaluate(self.task + 1)
        self.record.curves.append({"task": self.task, "step": self.step, "accuracy": accuracies})
        if self.probe is not None:
            self.probe.mark(self.task, self.step)
        return self.record.timeline[-1]

    def _finish_task(self) -> Point | None:
        """Evaluate, consolidate and turn to the next task. None if the run failed."""
        accuracies = self._evaluate()
        if not bool(self.outputs_finite):
            self._fail(self.step, _NOT_FINITE)
            return None
        self.stepper.finish_task()
        if self.probe is not None:
            self.probe.finish_task(self.task, self.step)
            self.record.neurons = self.probe.found
        try:
            self._consolidate(self.task)
        except FloatingPointError as error:
            self._fail(self.step, str(error))
            return None
        self.record.matrix.append(accuracies)
        self.record.memory = self.method.memory()
        if taken := self.method.capacity:
            self.record.capacity.append(taken)
        point = self.record.timeline[-1]
        self.task, self.step = self.task + 1, 0
        if self.task < len(self.stream.tasks):
            self._grow()
            self.batches = self._batches()
        return point

    def _consolidate(self, number: int) -> None:
        began = time.monotonic()
        task, size, seed = self.stream.tasks[number], self.plan.batch, self.plan.seed
        batches: Iterable[Any] = Batches(self.images, task, task.train, size, seed=seed)
        if self.needs.old_data:
            batches = Rehearsal(self.images, task, size, seed=seed)
        self.method.consolidate(batches, self.nodes[number])
        self.record.seconds["consolidation"] += time.monotonic() - began

    # ---- evaluation ----

    @torch.no_grad()
    def _evaluate(self, tasks: int | None = None) -> list[float]:
        """The accuracies on the first tasks, or on all by default."""
        began = time.monotonic()
        if self.device.type == "cuda":  # pending steps count as training
            torch.cuda.synchronize(self.device)
            self.record.seconds["training"] += time.monotonic() - began
            began = time.monotonic()
        self.outputs_finite = torch.ones((), dtype=torch.bool, device=self.device)
        self.model.eval()
        accuracies = [self._accuracy(number) for number in range(len(self.stream.tasks))[:tasks]]
        if self.needs.fresh_model and self.record.matrix:  # the models of finished tasks are gone
            accuracies[: self.task] = self.record.matrix[-1][: self.task]
        self.model.train()
        self.record.seconds["evaluation"] += time.monotonic() - began
        return accuracies

    def _accuracy(self, number: int) -> float:
        task = self.stream.tasks[number]
        indices = task.test if self.plan.evaluate_on == "test" else task.validation
        if self.growing is not None and number >= len(self.growing.parts):
            return 1 / len(task.active)  # no outputs yet: a guess
        if len(indices) == 0:
            raise ValueError(f"task {number + 1} has no {self.plan.evaluate_on} images")
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        for x, y in Batches(self.images, task, indices, _EVALUATION_BATCH[self.device.type]):
            with autocast(self.plan, self.device):
                outputs = self.model(x)
            self.outputs_finite &= outputs.isfinite().all()
            correct += (outputs.index_select(1, self.active[number]).argmax(1) == y).sum()
        return int(correct) / len(indices)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        return {
            "run": self._identity(),
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "batches": self.batches.state_dict(),
            "random": torch.get_rng_state(),
            "random_of_gpu": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "task": self.task,
            "step": self.step,
            "not_finite": self.stepper.not_finite,
            "record": dataclasses.asdict(self.record),
            "probe": None if self.probe is None else self.probe.state_dict(),
        }

    def _identity(self) -> dict[str, Any]:
        """The values that tell runs apart."""
        return {"stream": self.stream.name, "images": self.fingerprint, **self.plan.as_dict()}

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """Resume from the state in the checkpoint at `path`."""
        self._check_identity(_planned(state), path)
        self.task, self.step = state["task"], state["step"]
        for _ in range(min(self.task, len(self.stream.tasks) - 1)):
            self._grow()
        if self.needs.old_data:  # no checkpoint holds data
            for number in range(self.task):
                self._consolidate(number)
        self.model.load_state_dict(state["model"])
        self.method.load_state_dict(state["method"])
        if self.task < len(self.stream.tasks):
            self.batches = self._batches()
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and state["random_of_gpu"] is not None:
            torch.cuda.set_rng_state(state["random_of_gpu"], self.device)
        self.stepper.restore(self.step, state["not_finite"])
        self.record = Record(**state["record"])
        if self.probe is not None:
            self.probe.load_state_dict(state["probe"])
        if (name := device_name(self.device)) not in self.record.device:
            self.record.device += f", then {name}"

    def _check_identity(self, saved: dict[str, Any], path: Path) -> None:
        for name, value in self._identity().items():
            if saved.get(name) != value:
                raise checkpoint.CheckpointError(
                    f"{path} belongs to another run: it has {name} {saved.get(name)!r}, this run has {value!r}; "
                    "use another folder, or delete this one"
                )


def _planned(state: dict[str, Any]) -> dict[str, Any]:
    """The values that tell the run of a checkpoint from others. Fields that are newer than it have their defaults."""
    return {**default_plan(), **state["run"]}


def _budgets(stream: Stream, plan: Plan) -> dict[str, Any]:
    """Settings `samples` of the method, where neither the plan nor a default limits them and all samples cost too much.

    A budget keeps each consolidation at about a fifth of the training of its task. It follows from the plan and the
    stream only. The paper's epochs have none, since its experiments measure on all samples.
    """
    trained = min(plan.steps(stream, task) * min(plan.batch, len(task.train)) for task in stream.tasks)
    budget = max(_FEWEST_SAMPLES, trained // _TRAINED_PER_SAMPLE)
    if plan.epoch == "paper" or budget >= max(len(task.train) for task in stream.tasks):
        return {}
    defaults = defaults_of(plan.method).items()
    return {name: budget for name, value in defaults if value is None and name.rpartition(".")[2] == "samples"}


def _all_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """All settings of the method that are plain values, including defaults."""
    defaults = {name: value for name, value in defaults_of(method).items() if value is not None}
    return {**defaults, **settings}
