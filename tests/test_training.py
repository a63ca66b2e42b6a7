"""Runs: what they record, that they go on after being killed, and what they say when they cannot."""

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import assert_same_bits, tensors_in
from holdfast import atomic
from holdfast.methods import METHODS
from holdfast.runs import checkpoint, training
from holdfast.runs.checkpoint import CheckpointError
from holdfast.runs.plan import Plan
from holdfast.runs.training import Interrupted, Progress, Record, train
from holdfast.streams.sources import LabeledImages, Source
from holdfast.streams.tasks import Frame, Stream, split


def stream(classes: int = 6, each: int = 20, validation: float = 0.2) -> Stream:
    """Noise with a bright spot for each class: easy to learn, and forgotten when the spots change."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> LabeledImages:
        labels = torch.arange(classes).repeat_interleave(count)
        pixels = torch.randint(0, 120, (len(labels), 1, 8, 8), dtype=torch.uint8, generator=generator)
        for c in range(classes):
            pixels[labels == c, 0, c, c % 8] = 255
        return LabeledImages(pixels, labels)

    names = tuple(str(c) for c in range(classes))
    return split(Source("spots", part(each), part(10), names), Frame(8, padding=1), per_task=2, validation=validation)


def plan(method: str = "finetune", settings: dict[str, Any] | None = None, **knobs: Any) -> Plan:
    return Plan(
        method, settings or {}, **{"model": "mlp", "batch": 8, "epochs": 3, "epoch": "task", "lr": 0.1, **knobs}
    )


def outcome(record: Record) -> dict[str, Any]:
    """What must not depend on how often a run was interrupted, or on how long it took."""
    return {k: v for k, v in record.as_dict().items() if k not in ("seconds", "images_per_second", "peak_bytes")}


@pytest.mark.parametrize("method", METHODS)
def test_a_record_says_what_happened(method: str) -> None:
    record = train(stream(), plan(method, curve=6), device="cpu")
    assert [len(row) for row in record.matrix] == [3, 3, 3]
    assert all(0 <= value <= 1 for row in record.matrix for value in row)
    steps = 3 * 32 // 8
    assert [(c["task"], c["step"]) for c in record.curves] == [(t, s) for t in range(3) for s in range(2, steps, 2)]
    assert [len(c["accuracy"]) for c in record.curves] == [c["task"] + 1 for c in record.curves]
    assert record.images == 3 * steps * 8
    assert record.seconds["training"] > 0
    assert record.summary is not None
    assert record.plan["method"] == method
    if method == "npc":
        assert record.settings == {"beta": 0.7, "rate": 5e-4, "gain": 1.0}
    json.dumps(record.as_dict())


def test_tasks_are_learned_and_forgotten() -> None:
    learned = train(stream(each=60), plan(epochs=30), device="cpu")
    assert learned.summary is not None
    assert learned.summary["learned"] > 0.95
    assert sum(learned.untrained) / 3 < 0.8
    joint = train(stream(each=60), plan("joint", epochs=30), device="cpu")
    assert joint.summary is not None
    assert joint.summary["final"] > 0.9


def test_the_same_plan_gives_the_same_bits_and_another_seed_others() -> None:
    first, again, other = (outcome(train(stream(), plan("npc", seed=s), device="cpu")) for s in (1, 1, 2))
    assert first == again
    assert first["matrix"] != other["matrix"] or first["untrained"] != other["untrained"]


def test_a_run_leaves_the_random_numbers_of_others_alone() -> None:
    state = torch.get_rng_state()
    train(stream(), plan(), device="cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_the_papers_epoch_and_an_ordinary_one() -> None:
    made = stream()  # 120 training images in all, 32 for training in each task
    assert plan(epoch="paper", epochs=2, batch=8).steps(made, made.tasks[0]) == 2 * 120 // 8
    assert plan(epoch="task", epochs=2, batch=8).steps(made, made.tasks[0]) == 2 * 32 // 8
    assert plan(epochs=0.001).steps(made, made.tasks[0]) == 1


def test_a_batch_larger_than_a_task_is_the_task() -> None:
    record = train(stream(), plan(batch=512, epochs=2), device="cpu")
    assert record.images == 3 * 2 * 32


@pytest.mark.parametrize("heads", ["masked", "growing"])
def test_the_learning_rate_falls_over_each_task(heads: str) -> None:
    run = training._Training(stream(), plan(decay=0.01, heads=heads, epochs=5), torch.device("cpu"))  # 20 steps a task
    rates = [{group["lr"] for group in run.method.param_groups} for progress in run if progress.step > 0]
    expected = [0.1 * 0.01 ** (stage / 9) for stage in range(10) for _ in range(2)]
    assert [len(rate) for rate in rates] == [1] * 60
    assert [rate.pop() for rate in rates] == pytest.approx(3 * expected)


def test_validation_images_instead_of_test_images() -> None:
    made = stream()
    evaluated = train(made, plan(evaluate_on="validation", epochs=30), device="cpu")
    assert all((value * 8) % 1 == 0 for value in evaluated.matrix[-1])  # 8 validation images in a task, 20 for the test
    with pytest.raises(ValueError, match="task 1 has no validation images"):
        train(stream(validation=0), plan(evaluate_on="validation"), device="cpu")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_batches_of_an_evaluation_do_not_change_it(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, how = stream(each=40), plan("npc", model="small_cnn", curve=4, epochs=6)
    whole = outcome(train(made, how, device="cpu"))
    monkeypatch.setitem(training._EVALUATION_BATCH, "cpu", size)
    assert outcome(train(made, how, device="cpu")) == whole


@pytest.mark.parametrize("method", ["ewc", "mas", "ssl"])
def test_a_run_measures_on_as_many_samples_as_its_training_pays_for(method: str) -> None:
    made = stream(each=200, validation=0)  # 400 images in each task
    assert train(made, plan(method, epochs=1), device="cpu").settings["samples"] == 256  # the fewest
    assert train(made, plan(method, epochs=40), device="cpu").settings["samples"] == 40 * 400 // 50
    assert "samples" not in train(made, plan(method, epochs=50), device="cpu").settings  # all are cheap enough
    assert "samples" not in train(made, plan(method, epochs=1, epoch="paper"), device="cpu").settings
    assert train(made, plan(method, {"samples": 399}, epochs=1), device="cpu").settings["samples"] == 399


def test_a_budget_of_samples_reaches_the_method_and_leaves_limits_alone() -> None:
    made = stream(each=200, validation=0)
    run = training._Training(made, plan("ewc+cpc", epochs=1), torch.device("cpu"))
    assert run.method.samples == 256
    assert run.record.settings["ewc.samples"] == 256
    assert training._budgets(made, plan("kfac", epochs=1)) == {}  # its default is a limit
    assert training._budgets(made, plan("npc", epochs=1)) == {}


# ---- going on ----


@pytest.mark.parametrize("heads", ["masked", "growing"])
@pytest.mark.parametrize("method", [*METHODS, "lwf+npc", "ewc+cpc"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(method: str, heads: str, tmp_path: Path) -> None:
    """Stopped by Ctrl-C, again and again, with random crops."""
    made, how = stream(), plan(method, curve=2, model="small_cnn", heads=heads, decay=0.5)
    whole = outcome(train(made, how, device="cpu", folder=tmp_path / "whole"))
    seen, message = [], ""

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) % 5 == 0:
            os.kill(os.getpid(), signal.SIGINT)

    for _ in range(20):
        try:
            record = train(made, how, device="cpu", folder=tmp_path / "stopped", tell=stop)
            break
        except Interrupted as error:
            message = str(error)
    assert message == f"interrupted; train again with folder {tmp_path / 'stopped'} to resume"
    assert len(seen) > 20
    assert outcome(record) == whole
    assert_same_bits(final_state(tmp_path / "stopped"), final_state(tmp_path / "whole"))


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.load(folder / "checkpoint.pt")
    assert state is not None
    return tensors_in({part: state[part] for part in ("model", "method")})


def run_to_its_end(method: str, folder: Path) -> None:
    torch.set_num_threads(1)
    how = plan(method, curve=8, epochs=6, model="small_cnn")  # which has dropout
    record = train(stream(), how, device="cpu", folder=folder, save_every=0)
    atomic.write(folder / "record.json", json.dumps(outcome(record)).encode())  # since it may be killed here, too


@pytest.mark.parametrize("method", ["npc", "joint"])
def test_a_run_that_is_killed_at_random_moments_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    run_to_its_end(method, tmp_path / "whole")
    killed = tmp_path / "killed"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["holdfast.runs.training"])
    moments, kills = random.Random(1), 0
    while not (killed / "record.json").exists():
        process = context.Process(target=run_to_its_end, args=(method, killed))
        process.start()
        for _ in range(moments.randint(1, 19)):  # so many checkpoints later, and a little
            before = _stamp(killed)
            while process.is_alive() and _stamp(killed) == before:
                time.sleep(0.001)
        process.join(moments.random() * 0.005)
        if process.is_alive():
            process.kill()
            process.join()
            kills += 1
        assert process.exitcode in (0, -signal.SIGKILL)
        process.close()
    assert kills > 3
    assert (killed / "record.json").read_text() == (tmp_path / "whole" / "record.json").read_text()
    assert_same_bits(final_state(killed), final_state(tmp_path / "whole"))


def _stamp(folder: Path) -> int:
    try:
        return (folder / "checkpoint.pt").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(stream(), plan(), device="cpu", folder=tmp_path)
    told: list[Progress] = []
    monkeypatch.setattr(checkpoint, "save", lambda *_: pytest.fail("there is nothing to save"))
    again = train(stream(), plan(), device="cpu", folder=tmp_path, tell=told.append)
    assert again.as_dict() == first.as_dict()
    assert not told


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    train(stream(), plan(lr=0.1), device="cpu", folder=tmp_path)
    with pytest.raises(
        CheckpointError, match=r"belongs to another run: it has lr 0\.1, this run has 0\.2; use another"
    ):
        train(stream(), plan(lr=0.2), device="cpu", folder=tmp_path)


def test_a_checkpoint_of_other_images_or_another_order_is_refused(tmp_path: Path) -> None:
    made = stream()
    train(made, plan(), device="cpu", folder=tmp_path)
    turned = dataclasses.replace(made, tasks=made.tasks[::-1])
    darker = dataclasses.replace(made, pixels=made.pixels // 2)
    for other in (turned, darker):
        with pytest.raises(CheckpointError, match=r"belongs to another run: it has images '.*', this run has '.*'"):
            train(other, plan(), device="cpu", folder=tmp_path)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path) -> None:
    made, how = stream(), plan("ewc")
    whole = outcome(train(made, how, device="cpu", folder=tmp_path, save_every=0))
    newest = tmp_path / "checkpoint.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"checkpoint\.pt is damaged"):
        assert outcome(train(made, how, device="cpu", folder=tmp_path)) == whole


def test_growing_heads_learn_as_masked_ones_do() -> None:
    made = stream(each=60)
    record = train(made, plan("ewc", heads="growing", epochs=30), device="cpu")
    assert record.summary is not None
    assert record.summary["learned"] > 0.9
    assert record.matrix[0][1:] == [0.5, 0.5]  # guessed: there are no outputs for these tasks yet
    assert record.untrained[1:] == [0.5, 0.5]


# ---- what goes wrong ----


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_found_before_anything_is_computed(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    told: list[Progress] = []
    with pytest.raises(CheckpointError, match=r"cannot write .*: Permission denied"):
        train(stream(), plan(), device="cpu", folder=tmp_path / "run", tell=told.append)
    assert not told


def test_a_path_that_is_no_folder_is_found_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    told: list[Progress] = []
    with pytest.raises(CheckpointError, match=r"cannot write .*run/checkpoint\.pt: .*(exists|Not a directory)"):
        train(stream(), plan(), device="cpu", folder=tmp_path / "run", tell=told.append)
    assert not told


def test_a_loss_that_is_not_finite_ends_the_run_with_a_record_of_it() -> None:
    record = train(stream(), plan(lr=1e30, epochs=3), device="cpu")
    assert record.failure is not None
    assert record.failure["task"] == 0
    assert 0 < record.failure["step"] < 5
    assert "the loss or an output was not finite" in record.failure["why"]
    assert record.summary is None
    json.dumps(record.as_dict())


@pytest.mark.parametrize("method", METHODS)
def test_a_last_step_that_goes_wrong_is_noticed_in_its_own_task(method: str, tmp_path: Path) -> None:
    """One step per task, whose loss is finite and whose outcome is not; going on from there says the same."""
    how = plan(method, lr=1e30, epochs=0.01, model="small_cnn")
    for _ in range(2):
        record = train(stream(), how, device="cpu", folder=tmp_path)
        assert record.failure is not None
        assert (record.failure["task"], record.matrix, record.summary) == (0, [], None)


def test_where_it_went_wrong_is_known_also_after_a_stop(tmp_path: Path) -> None:
    how = plan(lr=1e30, epochs=40)
    whole = train(stream(), how, device="cpu")
    assert whole.failure is not None

    def stop(progress: Progress) -> None:
        if progress.step == 20:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(stream(), how, device="cpu", folder=tmp_path, tell=stop)
    assert train(stream(), how, device="cpu", folder=tmp_path).failure == whole.failure


def test_points_after_a_failure_are_no_part_of_the_curves() -> None:
    record = train(stream(), plan(lr=1e30, epochs=3, curve=12), device="cpu")
    assert record.failure is not None
    assert all(point["step"] <= record.failure["step"] for point in record.curves)


TERMS = {"ssl": (True, True), "compact": (True, True), "lwf": (False, True), "joint": (False, True)}
"""Whether a method has a term in the loss in the first task, and later."""


@pytest.mark.parametrize("name", METHODS)
def test_the_term_in_the_loss_is_asked_for_where_there_is_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    run = training._Training(stream(), plan(name), torch.device("cpu"))
    term = run.method.penalty
    monkeypatch.setattr(run.method, "penalty", lambda: asked.append(run.task) or term())
    for _ in run:
        pass
    first, later = TERMS.get(name, (False, False))
    assert set(asked) == {task for task in range(len(run.stream.tasks)) if (later if task else first)}


def test_a_penalty_that_diverges_ends_the_run_with_a_record_of_it() -> None:
    record = train(stream(), plan("mas", settings={"strength": 1e6, "form": "loss"}, epochs=20), device="cpu")
    assert record.failure is not None
    assert record.failure["task"] == 1
    assert 'use form="proximal"' in record.failure["why"]
    assert len(record.matrix) == 1


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"batch": 2.5}, "batch must be a whole number of at least 1, got 2.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"epochs": float("inf")}, "epochs must be above 0, got inf"),
        ({"settings": {"criterion": torch.nn.CrossEntropyLoss()}}, "settings: criterion must be plain data"),
        ({"settings": {"free": []}}, "free is not a setting of a plan"),
        ({"method": "magic"}, "unknown method 'magic'; available: npc, dpc, cpc, ewc"),
        ({"model": "resnet"}, "unknown model 'resnet'; available: paper_cnn"),
        ({"lr": 0}, "lr must be above 0, got 0"),
        ({"decay": 2}, "decay must be above 0 and at most 1, got 2"),
        ({"epoch": "week"}, "epoch must be one of paper, task; got 'week'"),
        ({"precision": "fp4"}, "precision must be one of float32, tf32, bf16; got 'fp4'"),
    ],
)
def test_plans_that_cannot_be(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**knobs)


def test_numbers_of_numpy_are_taken_as_plain_ones(tmp_path: Path) -> None:
    how = plan("npc", lr=np.float64(0.1), settings={"rate": np.linspace(1e-3, 1e-2, 3)[0]}, seed=np.int64(2))
    assert type(how.lr) is float
    record = train(stream(), how, device="cpu", folder=tmp_path)
    json.dumps(record.as_dict())
    assert train(stream(), how, device="cpu", folder=tmp_path).matrix == record.matrix


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="device 'cuda' is not available: torch finds no GPU"):
        train(stream(), plan(), device="cuda")


def test_two_runs_in_one_process_would_change_each_other() -> None:
    def another(_: Progress) -> None:
        train(stream(), plan(), device="cpu")

    with pytest.raises(RuntimeError, match="another run is active in this process"):
        train(stream(), plan(), device="cpu", tell=another)
    train(stream(), plan(), device="cpu")


def test_a_method_is_consolidated_on_training_images_and_evaluated_in_evaluation_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second by independent code: the accuracies of the record are those of the model without dropout."""
    made = stream()
    runs, seen = [], []
    build = training._Training._build_method

    def watched(run: Any) -> Any:
        method = build(run)
        runs.append(run)
        method.consolidate = lambda batches, active: seen.append(torch.cat([x for x, _ in batches]))
        return method

    monkeypatch.setattr(training._Training, "_build_method", watched)
    record = train(made, plan(model="small_cnn", epochs=10), device="cpu")
    for task, images in zip(made.tasks, seen, strict=True):
        mean, std = made.mean.item(), made.std.item()
        found = {tuple(image.flatten().tolist()) for image in ((images[:, 0] * std + mean) * 255).round().int()}
        centered = made.pixels[task.train][:, 0].int()
        assert found == {tuple(image.flatten().tolist()) for image in centered}
    model = runs[0].model.eval()
    for task, accuracy in zip(made.tasks, record.matrix[-1], strict=True):
        x = (made.pixels[task.test].float() / 255 - made.mean.item()) / made.std.item()
        answers = model(x)[:, list(task.active)].argmax(1)
        assert accuracy == pytest.approx((answers == made.labels[task.test]).double().mean().item())


def test_precision_and_determinism_hold_during_a_run_and_no_longer() -> None:
    seen = []

    def look(_: Progress) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()))

    before = torch.get_float32_matmul_precision()
    train(stream(), plan(precision="tf32", deterministic=True), device="cpu", tell=look)
    assert set(seen) == {("high", True)}
    assert torch.get_float32_matmul_precision() == before
    assert not torch.are_deterministic_algorithms_enabled()
    outputs = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda m, a, y: outputs.append(y.dtype))
    try:
        train(stream(), plan(precision="bf16", epochs=0.1), device="cpu")
    finally:
        hook.remove()
    assert torch.bfloat16 in outputs


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_threads_are_those_of_the_plan_during_a_run_and_no_longer(threads: int) -> None:
    seen = []
    torch.set_num_threads(2)
    try:
        record = train(
            stream(), plan(threads=threads), device="cpu", tell=lambda _: seen.append(torch.get_num_threads())
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {threads}
    assert record.plan["threads"] == threads


def test_a_resumed_run_keeps_its_threads(tmp_path: Path) -> None:
    seen = []

    def stop(_: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(stream(), plan(threads=2), device="cpu", folder=tmp_path, tell=stop)
    record = train(
        stream(), plan(threads=1), device="cpu", folder=tmp_path, tell=lambda _: seen.append(torch.get_num_threads())
    )
    assert set(seen) == {2}
    assert record.plan["threads"] == 2


def test_a_checkpoint_from_before_a_field_of_the_plan_is_resumed(tmp_path: Path) -> None:
    whole = outcome(train(stream(), plan(), device="cpu", folder=tmp_path))
    state = checkpoint.load(tmp_path / "checkpoint.pt")
    assert state is not None
    assert state["run"].pop("threads") == 1
    checkpoint.save(tmp_path / "checkpoint.pt", state)
    assert outcome(train(stream(), plan(), device="cpu", folder=tmp_path)) == whole


def test_settings_that_a_method_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"settings of ewc: .*unexpected keyword argument 'beta'"):
        train(stream(), plan("ewc", settings={"beta": 1}), device="cpu")
    with pytest.raises(ValueError, match="the paper's network is for images of 32x32, not 8x8"):
        train(stream(), plan(model="paper_cnn"), device="cpu")


def test_bf16_and_determinism() -> None:
    record = train(stream(each=60), plan("npc", precision="bf16", deterministic=True, epochs=30), device="cpu")
    assert record.summary is not None
    assert record.summary["learned"] > 0.7
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore")
def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compiler = torch.compile
    monkeypatch.setattr(training.torch, "compile", lambda f: compiler(f, backend="aot_eager"))
    for method in ("npc", "lwf"):
        plain = train(stream(), plan(method), device="cpu")
        compiled = train(stream(), plan(method, compile=True), device="cpu")
        assert compiled.failure is None
        assert abs(plain.summary["final"] - compiled.summary["final"]) < 0.1
