"""One run: a model learns a stream with a method, and what came out is a record."""

import dataclasses
import inspect
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast
from holdfast import checkpoint
from holdfast.fast import compiled, quicken
from holdfast.methods import METHODS, Joint, Method, Separate
from holdfast.methods.method import number
from holdfast.methods.plastic import Plastic
from holdfast.models import MODELS, GrowingHead, build_model
from holdfast.record import Point, Record
from holdfast.recording import Recorded
from holdfast.streams.batches import Batches, Images, Pass, Rehearsal, Shuffled, batch
from holdfast.streams.tasks import Stream, Task
from holdfast.watching import SAMPLES, Watch

Precision = Literal["float32", "tf32", "bf16"]
Part = Literal["test", "validation"]
Epoch = Literal["paper", "task"]
Heads = Literal["masked", "growing"]

_NOT_FINITE = "the loss or an output was not finite: try a smaller learning rate"
_LOOK_EVERY = 100  # steps between two looks at whether the loss is still finite, each of which waits for the device


@dataclass(frozen=True)
class Plan:
    """Everything that decides how a run on a stream turns out.

    Args:
        method: the name of a method.
        settings: its settings, where they are not the defaults.
        model: the name of a model.
        width: how wide its hidden layers are, as a share of what they usually are.
        seed: of the model, the order of the images and all else that is random.
        lr: the learning rate of the optimizer, which is plain SGD as in the paper.
        batch: images in a batch.
        epochs: how long each task is learnt.
        epoch: "paper": as many samples as the source has training images, whatever the size of the task; "task": as
            many as the task has.
        heads: "masked": one output layer for all tasks, of which the loss and the test see the task's own outputs;
            "growing": outputs are added when a task comes. A task whose outputs are not there yet counts as guessed.
        judged_on: "test", or "validation" to choose settings.
        curve: how many points the curves have in each task, the one at its end among them.
        neurons: whether it is recorded what the neurons do: how their activations before the head change, and, of a
            method that knows it, how important they are over time.
        precision: of the training. "bf16" is autocast.
        compile: whether the model is compiled and, on a GPU, every step recorded as a CUDA graph.
        deterministic: whether the same run must give the same bits on the same machine, on a GPU too. It is slower, and
            steps are not recorded.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = "paper_cnn"
    width: float = 1.0
    seed: int = 0
    lr: float = 0.05
    batch: int = 512
    epochs: float = 30
    epoch: Epoch = "paper"
    heads: Heads = "masked"
    judged_on: Part = "test"
    curve: int = 1
    neurons: bool = False
    precision: Precision = "float32"
    compile: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, known in (("method", METHODS), ("model", MODELS)):
            if getattr(self, name) not in list(known):
                raise ValueError(f"there is no {name} {getattr(self, name)!r}; there are {', '.join(known)}")
        for name, choices in (("epoch", Epoch), ("heads", Heads), ("judged_on", Part), ("precision", Precision)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")
        if not isinstance(self.settings, Mapping):
            raise ValueError(f"settings must be names and values, got {self.settings!r}")
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, _plain(item.name, getattr(self, item.name)))
        for name in ("lr", "epochs", "width"):
            try:
                object.__setattr__(self, name, number(name, getattr(self, name), above=0))
            except TypeError as error:
                raise ValueError(str(error)) from None
        for name, least in (("batch", 1), ("curve", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for name in ("neurons", "compile", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("free", "sample"):
            if name in self.settings:
                raise ValueError(f"{name} is no setting of a plan: a run sees to it itself")

    def steps(self, stream: Stream, task: Task) -> int:
        """How many steps a task is learnt for, at least one."""
        samples = stream.epoch if self.epoch == "paper" else len(task.train)
        return max(1, int(self.epochs * samples / min(self.batch, len(task.train)) + 1e-6))


@dataclass(frozen=True)
class Progress:
    """Where a run is."""

    task: int
    tasks: int
    step: int
    steps: int
    accuracy: float | None
    """The average over the tasks seen, when last judged."""
    point: Point | None = None
    """What was found, if it was judged just now."""


class Interrupted(KeyboardInterrupt):
    """The run was interrupted and can go on where it was."""


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
    """Learn the tasks of `stream` one after another, as `plan` says.

    Args:
        stream: the tasks.
        plan: how they are learnt.
        device: where; a GPU if there is one.
        folder: where checkpoints are kept. A run that was interrupted goes on from there, and ends as if it had not
            been.
        save_every: seconds between two checkpoints.
        tell: is called after every step with where the run is.
        mark: is called with every point of the curves and the end of every task, those from before an interruption
            among them.
    """
    where = choose_device(device)
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with (
        _alone(),
        torch.random.fork_rng(cuda),
        _numerics(plan),
        _many_graphs(plan),
        _interruptible() as interrupted,
        closing(_Run(stream, plan, where)) as run,
    ):
        path = None if folder is None else Path(folder) / "checkpoint.pt"
        if path is not None and (state := checkpoint.load(path)) is not None:
            run.load_state_dict(state, path)
            if mark is not None:
                for point in run.record.timeline:
                    mark(point)
            if run.ended:
                return run.record
        elif path is not None:
            checkpoint.save(path, run.state_dict())  # at once, so that a folder that cannot be written to is found now
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
                raise Interrupted(
                    f"interrupted; to go on, run the same again with {folder}" if folder else "interrupted"
                )
        if path is not None:
            checkpoint.save(path, run.state_dict())
        return run.record


class _Run:
    """The state of a run. Iterating takes one step at a time, from wherever it is."""

    def __init__(self, stream: Stream, plan: Plan, device: torch.device) -> None:
        self.stream, self.plan, self.device = stream, plan, device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.fingerprint = stream.fingerprint
        torch.manual_seed(plan.seed)
        quick = plan.compile and device.type == "cuda"
        self.images = Images(stream, device, fuse=quick)
        self.model = build_model(plan.model, stream.shape, stream.outputs, plan.width).to(device)
        self.growing: GrowingHead | None = None
        if plan.heads == "growing":
            assert isinstance(self.model.head, nn.Linear)
            self.model.head = self.growing = GrowingHead(self.model.head.in_features)
            self.growing.grow(len(stream.tasks[0].active)).to(device)
        if quick:
            quicken(self.model, activations=METHODS[plan.method].looks_at_activations)
        self.method = self._build_method()
        self.method.fuse = plan.compile
        self.loss_of = torch.compile(MethodType(_loss_with(plan.method), self)) if plan.compile else self._loss
        self.note = compiled(note_) if quick else note_
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.nodes = self._nodes()
        self.active = [torch.tensor(nodes, device=device) for nodes in self.nodes]
        self.task, self.step = 0, 0
        self.batches = self._batches()
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # of the task's steps, where they are taken
        self.not_finite = torch.full((), -1, device=device)  # the first step whose loss was not
        self.part: Pass | None = None
        self.recorded: Recorded | None = None
        self.sound = torch.ones((), dtype=torch.bool, device=device)  # whether all outputs were finite when last judged
        names = [task.name for task in stream.tasks]
        settings = {**_defaults(METHODS[plan.method]), **plan.settings}
        self.record = Record(
            stream.name,
            names,
            dataclasses.asdict(plan),
            settings,
            _name_of(device),
            _versions(),
            [plan.steps(stream, task) for task in stream.tasks],
        )
        self.watch = self._build_watch() if plan.neurons else None

    def _build_method(self) -> Method:
        kind = METHODS[self.plan.method]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.plan.lr)
        settings = dict(self.plan.settings)
        if issubclass(kind, Plastic):
            settings["free"] = [self.model.head]
        if kind is holdfast.NPC and self.plan.compile:
            settings["sample"] = torch.zeros(2, *self.stream.shape, device=self.device)
        try:
            return kind(self.model, optimizer, **settings)
        except TypeError as error:
            raise ValueError(f"settings of {self.plan.method}: {error}") from error

    def _build_watch(self) -> Watch:
        task = self.stream.tasks[0]
        samples, _ = next(iter(Batches(self.images, task, task.train, SAMPLES, seed=self.plan.seed)))
        return Watch(self.model, self.method, samples)

    def _nodes(self) -> list[tuple[int, ...]]:
        """The output nodes of each task."""
        if self.growing is None:
            return [task.active for task in self.stream.tasks]
        ends = list(accumulate(len(task.active) for task in self.stream.tasks))
        return [tuple(range(end - len(task.active), end)) for end, task in zip(ends, self.stream.tasks, strict=True)]

    def _grow(self) -> None:
        """Make the outputs of the task that is coming."""
        if self.growing is not None:
            part = self.growing.grow(len(self.nodes[len(self.growing.parts)]))
            self.method.add_param_group({"params": list(part.parameters())})

    def _batches(self) -> Shuffled:
        return Shuffled(self.images, self.stream.tasks[self.task], self.plan.batch, self.generator)

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.plan.precision == "bf16" else nullcontext()

    def _loss(self, x: Tensor, y: Tensor, active: Tensor) -> Tensor:
        with self._autocast():
            outputs = self.model(x)
        return cross_entropy(outputs.float().index_select(1, active), y)

    # ---- learning ----

    @property
    def ended(self) -> bool:
        return self.task == len(self.stream.tasks) or self.record.failure is not None

    def __iter__(self) -> Iterator[Progress]:
        if not self.record.untrained:
            self.record.untrained = self._judge()
        accuracy = None
        while not self.ended:
            steps = self.record.steps[self.task]
            while self.step < steps and self.record.failure is None:
                self._learn(last=self.step + 1 == steps)
                point = self._mark() if self._due(steps) else None
                accuracy = accuracy if point is None else point.average
                yield Progress(self.task, len(self.stream.tasks), self.step, steps, accuracy, point)
            if self.record.failure is None:
                point = self._finish_task()
                accuracy = accuracy if point is None else point.average
                yield Progress(self.task, len(self.stream.tasks), 0, steps, accuracy, point)
        self.record.peak_bytes = max(self.record.peak_bytes, _peak(self.device))

    def _learn(self, *, last: bool) -> None:
        began = time.monotonic()
        try:
            if self._recordable:
                self._replay()
            else:
                self._step(*next(self.batches))
        except FloatingPointError as error:
            first = int(self.not_finite)
            self._fail(self.step if first < 0 else first, str(error))
            return
        self.step += 1
        self.record.images += self.batches.size
        if last or self.step % _LOOK_EVERY == 0:
            where = int(self.not_finite)
            if where >= 0:
                self._fail(where, _NOT_FINITE)
        self.record.seconds["training"] += time.monotonic() - began

    def _step(self, x: Tensor, y: Tensor) -> None:
        loss = self.loss_of(x, y, self.active[self.task])
        if self.method._acts_through_loss:  # else it is zero
            with self._autocast():
                loss = loss + self.method.penalty()
        self.method.zero_grad()
        loss.backward()
        self.method.step()
        self.note(loss.detach(), self.count, self.not_finite)

    @property
    def _recordable(self) -> bool:
        fast = self.plan.compile and self.device.type == "cuda" and not self.plan.deterministic
        return fast and self.images.resident and self.method.repeatable

    def _replay(self) -> None:
        """A step on the next images, which are put to where the recorded step looks for them."""
        part = self.batches.draw()
        if self.recorded is None or self.part is None:
            self.part = part.clone()
            self.recorded = Recorded(self._step_on_part, self.device)
        self.part.copy_(part)
        self.recorded()

    def _step_on_part(self) -> None:
        assert self.part is not None
        self._step(*batch(self.images, self.stream.tasks[self.task], self.part))

    def _forget_recorded(self) -> None:
        """What was recorded for a task is no good for the next."""
        self.method.zero_grad()
        self.part = self.recorded = None

    def close(self) -> None:
        """Let go of what would otherwise stay on the device until Python looks for cycles."""
        self._forget_recorded()
        del self.loss_of

    def _fail(self, step: int, why: str) -> None:
        self.record.failure = {"task": self.task, "step": step, "why": why}
        still_good = [point for point in self.record.curves if (point["task"], point["step"]) <= (self.task, step)]
        self.record.curves = still_good

    def _due(self, steps: int) -> bool:
        """Whether this is a moment for a point of the curves. The end of a task is judged anyway."""
        points = self.plan.curve
        due = self.step * points // steps > (self.step - 1) * points // steps
        return due and self.step < steps and self.record.failure is None

    def _mark(self) -> Point:
        accuracies = self._judge(self.task + 1)
        self.record.curves.append({"task": self.task, "step": self.step, "accuracy": accuracies})
        if self.watch is not None:
            self.watch.mark(self.task, self.step)
        return self.record.timeline[-1]

    def _finish_task(self) -> Point | None:
        accuracies = self._judge()
        if not bool(self.sound):
            self._fail(self.step, _NOT_FINITE)
            return None
        self._forget_recorded()
        if self.watch is not None:
            self.watch.finish_task(self.task, self.step)
            self.record.neurons = self.watch.found
        try:
            self._consolidate(self.task)
        except FloatingPointError as error:
            self._fail(self.step, str(error))
            return None
        self.record.matrix.append(accuracies)
        point = self.record.timeline[-1]
        self.task, self.step = self.task + 1, 0
        self.count.zero_()
        if self.task < len(self.stream.tasks):
            self._grow()
            self.batches = self._batches()
        return point

    def _consolidate(self, number: int) -> None:
        began = time.monotonic()
        task, seed = self.stream.tasks[number], self.plan.seed
        batches: Any = Batches(self.images, task, task.train, self.plan.batch, seed=seed)
        if isinstance(self.method, Joint):
            batches = Rehearsal(self.images, task, self.plan.batch, seed=seed)
        self.method.consolidate(batches, self.nodes[number])
        self.record.seconds["consolidating"] += time.monotonic() - began

    # ---- judging ----

    @torch.no_grad()
    def _judge(self, tasks: int | None = None) -> list[float]:
        """The accuracy on the first tasks, or on all of them."""
        began = time.monotonic()
        if self.device.type == "cuda":  # what is waited for here is still training
            torch.cuda.synchronize(self.device)
            self.record.seconds["training"] += time.monotonic() - began
            began = time.monotonic()
        self.sound = torch.ones((), dtype=torch.bool, device=self.device)
        self.model.eval()
        found = [self._accuracy(number) for number in range(len(self.stream.tasks))[:tasks]]
        if isinstance(self.method, Separate) and self.record.matrix:  # finished tasks have models of their own
            found[: self.task] = self.record.matrix[-1][: self.task]
        self.model.train()
        self.record.seconds["judging"] += time.monotonic() - began
        return found

    def _accuracy(self, number: int) -> float:
        task = self.stream.tasks[number]
        places = task.test if self.plan.judged_on == "test" else task.validation
        if self.growing is not None and number >= len(self.growing.parts):
            return 1 / len(task.active)
        if len(places) == 0:
            raise ValueError(f"task {number + 1} has no {self.plan.judged_on} images")
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        for x, y in Batches(self.images, task, places, 1000):
            with self._autocast():
                outputs = self.model(x)
            self.sound &= outputs.isfinite().all()
            right += (outputs.index_select(1, self.active[number]).argmax(1) == y).sum()
        return int(right) / len(places)

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
            "not_finite": int(self.not_finite),
            "record": dataclasses.asdict(self.record),
            "watch": None if self.watch is None else self.watch.state_dict(),
        }

    def _identity(self) -> dict[str, Any]:
        return {"stream": self.stream.name, "images": self.fingerprint, **dataclasses.asdict(self.plan)}

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        theirs, ours = state["run"], self._identity()
        for name in ours:
            if theirs.get(name) != ours[name]:
                raise checkpoint.CheckpointError(
                    f"{path} belongs to another run, with {name} {theirs.get(name)!r} and not {ours[name]!r}: use "
                    "another folder, or delete this one"
                )
        self.task, self.step = state["task"], state["step"]
        self.count.fill_(self.step)
        for _ in range(min(self.task, len(self.stream.tasks) - 1)):
            self._grow()
        if isinstance(self.method, Joint):  # whose data are in no state
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
        self.not_finite.fill_(state["not_finite"])
        self.record = Record(**state["record"])
        if self.watch is not None:
            self.watch.load_state_dict(state["watch"])
        if (here := _name_of(self.device)) not in self.record.device:
            self.record.device += f", then {here}"


def note_(loss: Tensor, count: Tensor, not_finite: Tensor) -> None:
    """Count a step, and keep in `not_finite` which was the first whose loss was not."""
    not_finite.copy_(torch.where((not_finite < 0) & ~loss.isfinite(), count, not_finite))
    count += 1


@cache
def _loss_with(method: str) -> FunctionType:
    """The loss as a function of its own for each method.

    torch.compile keeps what it has compiled with the code of a function, and does not look whether a model has hooks:
    what was compiled for a method that has none would otherwise be taken for one that has.
    """
    code = _Run._loss.__code__.replace(co_name=f"_loss_with_{method}")
    return FunctionType(code, globals(), code.co_name)


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device that is asked for, if it is there; a GPU if none is and there is one."""
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"there is no device {str(device)!r}: use cpu or cuda") from None
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported: use cpu or cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} was asked for, but there is no GPU here")
    return where


_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """Random numbers and precision belong to the whole process, so that two runs in it would change each other."""
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        raise RuntimeError("a run is going on in this process: start others in processes of their own")
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


@contextmanager
def _numerics(plan: Plan) -> Iterator[None]:
    """The precision and the determinism that a plan asks for, and afterwards what was before."""
    precision = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    exact = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.set_float32_matmul_precision("high" if plan.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = plan.precision == "tf32"
    if plan.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which a GPU refuses
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@contextmanager
def _many_graphs(plan: Plan) -> Iterator[None]:
    """Let a process compile a function as often as the runs of a study differ; torch gives up after eight times."""
    if not plan.compile:
        yield
        return
    import torch._dynamo as dynamo

    with dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=10000):
        yield


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that is set by the first Ctrl-C, which so waits for the end of a step; the second one does not wait."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(*_: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _defaults(method: type[Method]) -> dict[str, Any]:
    """The settings that a method has if none are given, as far as they are plain data."""
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters if isinstance(p.default, str | bool | int | float)}


def _plain(name: str, value: Any) -> Any:
    """`value` as plain data that JSON knows, numbers of NumPy and torch as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}: {key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{name} must be plain data, so that it can be recorded; got {value!r}")


def _peak(device: torch.device) -> int:
    """The most memory that was in use: of the GPU by this process, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def _versions() -> dict[str, str]:
    return {"holdfast": holdfast.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
