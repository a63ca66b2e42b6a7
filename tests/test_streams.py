"""Tasks and batches, on images whose first pixels hold their class, number and part."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from holdfast import streams
from holdfast.errors import UserError
from holdfast.streams import build_stream
from holdfast.streams.batches import (
    Batches,
    DeviceImages,
    Rehearsal,
    Shuffled,
    crop,
    make_batch,
    plain_pass,
    prepare,
    random_pass,
    rotate,
)
from holdfast.streams.sources import LabeledImages, Source
from holdfast.streams.tasks import Frame, Stream, permuted, rotated, split
from test_compile import BACKENDS

CPU = torch.device("cpu")


def source(classes: int = 6, each: int = 10, side: int = 6, channels: int = 2) -> Source:
    """Images whose first pixel is the class, the second the number within the class, the third the part."""

    def part(number: int, count: int) -> LabeledImages:
        labels = torch.arange(classes).repeat_interleave(count)
        pixels = torch.randint(256, (len(labels), channels, side, side), dtype=torch.uint8)
        pixels[:, 0, 0, 0] = labels.to(torch.uint8)
        pixels[:, 0, 0, 1] = torch.arange(count).repeat(classes).to(torch.uint8)
        pixels[:, 0, 0, 2] = number
        return LabeledImages(pixels, labels)

    return Source("toy", part(0, each), part(1, 4), tuple(f"class {c}" for c in range(classes)))


FRAME = Frame(6)


def classes_at(stream: Stream, indices: Tensor) -> list[int]:
    return stream.pixels[indices, 0, 0, 0].tolist()


# ---- tasks ----


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 3), st.one_of(st.none(), st.integers(0, 99)), st.floats(0, 0.6), st.integers(0, 9))
def test_a_split_puts_every_image_where_it_belongs(per_task: int, order: int | None, share: float, seed: int) -> None:
    stream = split(source(), FRAME, per_task=per_task, order=order, validation=share, seed=seed)
    assert len(stream.tasks) == 6 // per_task
    assert sorted(c for task in stream.tasks for c in task.active) == list(range(6))
    for task in stream.tasks:
        parts = task.train, task.validation, task.test
        for number, indices in enumerate(parts):
            for c in set(classes_at(stream, indices)):
                assert c in task.active
            assert set(stream.pixels[indices, 0, 0, 2].tolist()) <= {0 if number < 2 else 1}
            expected = [task.active.index(c) for c in classes_at(stream, indices)]
            assert stream.labels[indices].tolist() == expected  # labels count within the task
        assert len(task.validation) == per_task * round(share * 10)
        assert len(task.train) + len(task.validation) == per_task * 10
        assert len(task.test) == per_task * 4
        assert set(task.train.tolist()).isdisjoint(task.validation.tolist())
    assert stream.outputs == 6
    assert stream.epoch == 60


def test_validation_images_of_a_class_do_not_depend_on_its_task() -> None:
    one = split(source(), FRAME, per_task=2, seed=3)
    other = split(source(), FRAME, per_task=3, order=[5, 4, 3, 2, 1, 0], seed=3)
    assert {i for t in one.tasks for i in t.validation.tolist()} == {
        i for t in other.tasks for i in t.validation.tolist()
    }
    another = split(source(each=40), FRAME, per_task=2, seed=4)
    assert not torch.equal(another.tasks[0].validation, split(source(each=40), FRAME, per_task=2).tasks[0].validation)


def test_an_order_as_given_and_the_first_tasks() -> None:
    stream = split(source(), FRAME, per_task=2, order=[4, 1, 0, 5], tasks=2)
    assert [task.active for task in stream.tasks] == [(4, 1), (0, 5)]
    assert [task.name for task in stream.tasks] == ["class 4, class 1", "class 0, class 5"]
    assert [task.active for task in stream.first(1).tasks] == [(4, 1)]
    with pytest.raises(ValueError, match="has 2 tasks, not 3: choose 1 to 2"):
        stream.first(3)


def test_inputs_are_normalized_by_the_first_tasks_training_images() -> None:
    stream = split(source(), FRAME, per_task=2, order=[3, 1, 0, 2])
    assert len(stream.tasks) == 2
    first = stream.pixels[stream.tasks[0].train].double() / 255
    torch.testing.assert_close(stream.mean.double(), first.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stream.std.double(), first.std((0, 2, 3)), rtol=1e-5, atol=1e-6)


def test_some_images_are_always_left_for_training() -> None:
    stream = split(source(each=2), FRAME, per_task=2, validation=0.9)
    assert [len(task.train) for task in stream.tasks] == [2, 2, 2]
    with pytest.raises(ValueError, match="a stream needs at least one task, got 0"):
        permuted(source(), FRAME, tasks=0)


def test_permuted_and_rotated_streams_share_all_classes() -> None:
    stream = permuted(source(), FRAME, tasks=3)
    assert [task.active for task in stream.tasks] == [tuple(range(6))] * 3
    assert stream.tasks[0].permutation is None
    first, second = stream.tasks[1].permutation, stream.tasks[2].permutation
    assert first is not None
    assert second is not None
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(36))
    assert not torch.equal(first, second)
    turned = rotated(source(), FRAME, angles=[0, 45])
    assert [task.angle for task in turned.tasks] == [0, 45]
    assert [task.name for task in turned.tasks] == ["0 degrees", "45 degrees"]


@pytest.mark.parametrize(
    ("classes", "per_task", "sizes", "name"),
    [
        (5, 2, [2, 3], "toy in 2 x 2, the last of 3"),
        (5, 3, [3, 2], "toy in 2 x 3, the last of 2"),
        (7, 3, [3, 4], "toy in 2 x 3, the last of 4"),
        (6, 3, [3, 3], "toy in 2 x 3"),
        (3, 2, [3], "toy in 1 x 2, the last of 3"),
    ],
)
def test_no_class_is_dropped(classes: int, per_task: int, sizes: list[int], name: str) -> None:
    stream = split(source(classes), FRAME, per_task=per_task)
    assert [len(task.active) for task in stream.tasks] == sizes
    assert [c for task in stream.tasks for c in task.active] == list(range(classes))
    assert stream.name == name
    first = split(source(classes), FRAME, per_task=per_task, tasks=1).tasks[0]
    assert first.active == stream.tasks[0].active


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_task": 4, "tasks": 3}, "toy has 6 classes, too few for 3 tasks of 4"),
        ({"per_task": 1}, "at least one task of at least two classes"),
        ({"per_task": 7}, "too few for 0 tasks of 7"),
        ({"per_task": 2, "order": [0, 0]}, "order must list classes from 0 to 5, each at most once"),
        ({"per_task": 2, "order": [0, 6]}, r"got \[0, 6\]"),
        ({"per_task": 2, "validation": 1.0}, "at least 0 and below 1; got 1.0"),
    ],
)
def test_splits_that_cannot_be_made(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(source(), FRAME, **options)


def test_images_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="a frame of 9 does not fit into images of 8 with padding: reduce its size"):
        split(source(), Frame(9, padding=1), per_task=2)
    few = source()
    few = Source("few", few.train, LabeledImages(few.test.pixels[:4], few.test.labels[:4]), few.classes)
    with pytest.raises(
        ValueError, match="class 'class 1' of few has 10 training and 0 test images: it needs at least two training"
    ):
        split(few, FRAME, per_task=2)


# ---- from images to inputs ----


def by_hand(stream: Stream, index: int, top: int, left: int, mirrored: bool) -> Tensor:
    """One input in plain loops."""
    image, frame = stream.pixels[index], stream.frame
    result = torch.zeros(stream.shape)
    for c in range(image.shape[0]):
        for i in range(frame.size):
            for j in range(frame.size):
                y, x = top + i - frame.padding, left + (frame.size - 1 - j if mirrored else j) - frame.padding
                inside = 0 <= y < image.shape[1] and 0 <= x < image.shape[2]
                border = round(255 * stream.mean[c].item()) / 255 if frame.fill == "mean" else 0.0
                value = image[c, y, x].item() / 255 if inside else border
                result[c, i, j] = (value - stream.mean[c]) / stream.std[c]
    return result


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([Frame(6), Frame(6, 2), Frame(5, 1, True, "mean"), Frame(8, 1, True), Frame(3, 0, True)]),
    st.integers(0, 99),
)
def test_crop_mirror_and_normalize_as_in_plain_loops(frame: Frame, seed: int) -> None:
    torch.manual_seed(seed)
    stream = split(source(each=3), frame, per_task=2)
    task = stream.tasks[1]
    drawn = random_pass(stream, task.train, torch.Generator().manual_seed(seed))
    found, _ = make_batch(DeviceImages(stream, CPU), task, drawn)
    for i in range(len(found)):
        expected = by_hand(
            stream, *(int(each[i]) for each in (drawn.indices, drawn.top, drawn.left)), bool(drawn.mirrored[i])
        )
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-5)


def test_at_test_images_are_centered_and_in_order() -> None:
    """As in the paper: 28x28 padded by 4 and cropped to 32x32, which leaves two pixels of border on each side."""
    stream = split(source(side=28, channels=1), Frame(32, padding=4, mirror=True), per_task=2)
    part = plain_pass(stream, stream.tasks[0].test)
    assert torch.equal(part.indices, stream.tasks[0].test)
    x = make_batch(DeviceImages(stream, CPU), stream.tasks[0], part)[0] * stream.std[0] + stream.mean[0]
    torch.testing.assert_close(x[:, :, 2:30, 2:30] * 255, stream.pixels[part.indices].float(), rtol=1e-4, atol=1e-2)
    assert x[:, :, :2].abs().max() < 1e-5


def test_random_crops_reach_every_corner_and_half_are_mirrored() -> None:
    stream = split(source(classes=2, each=800, side=4), Frame(4, padding=2, mirror=True), per_task=2, validation=0)
    drawn = random_pass(stream, stream.tasks[0].train, torch.Generator().manual_seed(0))
    assert drawn.top.unique().tolist() == drawn.left.unique().tolist() == [0, 1, 2, 3, 4]
    assert 0.45 < drawn.mirrored.float().mean() < 0.55
    assert sorted(drawn.indices.tolist()) == sorted(stream.tasks[0].train.tolist())
    assert not random_pass(split(source(), FRAME, per_task=2), torch.arange(9), torch.Generator()).mirrored.any()


def test_a_permutation_moves_pixels_of_all_channels_alike() -> None:
    stream = permuted(source(), FRAME, tasks=2)
    task, images = stream.tasks[1], DeviceImages(stream, CPU)
    part = plain_pass(stream, task.test)
    (plain, _), (moved, _) = (make_batch(images, each, part) for each in (stream.tasks[0], task))
    assert task.permutation is not None
    for to, origin in enumerate(task.permutation.tolist()):
        assert torch.equal(moved.flatten(2)[:, :, to], plain.flatten(2)[:, :, origin])


def test_a_quarter_turn_to_the_left() -> None:
    x = torch.rand(3, 2, 5, 5)
    torch.testing.assert_close(rotate(x, 90), torch.rot90(x, 1, (2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotate(x, 360), x, rtol=1e-4, atol=1e-5)


def test_crop_takes_the_corner_it_is_told() -> None:
    x = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    one, fill = torch.tensor([1]), torch.tensor(99, dtype=torch.uint8).view(1, 1, 1, 1)

    def found(mirrored: bool, size: int, padding: int) -> list[int]:
        return crop(x, one, one, torch.tensor([mirrored]), fill, size, padding).flatten().tolist()

    assert found(False, 2, 0) == [5, 6, 9, 10]
    assert found(True, 2, 0) == [6, 5, 10, 9]
    assert found(False, 2, 2) == [99, 99, 99, 0]
    assert found(True, 2, 2) == [99, 99, 0, 99]
    none = torch.tensor([], dtype=torch.long)
    assert crop(x[:0], none, none, none > 0, fill, 3, 1).shape == (0, 1, 3, 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 4), st.data())
def test_crop_gives_the_bytes_of_a_padded_image(height: int, width: int, padding: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, min(height, width) + 2 * padding))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    pixels = torch.randint(256, (5, 3, height, width), dtype=torch.uint8)
    fill = torch.randint(256, (1, 3, 1, 1), dtype=torch.uint8)
    top, left = (torch.randint(side + 2 * padding - size + 1, (5,)) for side in (height, width))
    mirrored = torch.rand(5) < 0.5
    found = crop(pixels, top, left, mirrored, fill, size, padding)
    assert found.dtype == torch.uint8
    for i in range(5):
        canvas = fill[0].expand(3, height + 2 * padding, width + 2 * padding).clone()
        canvas[:, padding : padding + height, padding : padding + width] = pixels[i]
        expected = canvas[:, top[i] : top[i] + size, left[i] : left[i] + size]
        assert torch.equal(found[i], expected.flip(2) if mirrored[i] else expected)


# ---- batches ----


def stream_of(frame: Frame = FRAME) -> Stream:
    return split(source(), frame, per_task=3)


def test_a_pass_takes_every_image_once_and_leaves_out_what_fills_no_batch() -> None:
    stream = stream_of()
    task = stream.tasks[0]  # 27 training images
    batches = Shuffled(DeviceImages(stream, CPU), task, 5, torch.Generator().manual_seed(0))
    for _ in range(3):
        seen = []
        for _ in range(5):
            x, y = next(batches)
            assert x.shape == (5, 2, 6, 6)
            first = (x[:, 0, 0, 0] * stream.std[0] + stream.mean[0]) * 255
            assert [task.active[int(label)] for label in y] == first.round().int().tolist()
            second = (x[:, 0, 0, 1] * stream.std[0] + stream.mean[0]) * 255
            seen += list(zip(first.round().int().tolist(), second.round().int().tolist(), strict=True))
        assert len(set(seen)) == 25


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 13), st.integers(0, 9))
def test_training_batches_go_on_where_they_were(stop: int, seed: int) -> None:
    stream = stream_of(Frame(6, 2, True))
    images = DeviceImages(stream, CPU)
    whole = Shuffled(images, stream.tasks[1], 8, torch.Generator().manual_seed(seed))
    expected = [next(whole) for _ in range(stop + 7)][stop:]
    first = Shuffled(images, stream.tasks[1], 8, torch.Generator().manual_seed(seed))
    for _ in range(stop):
        next(first)
    again = Shuffled(images, stream.tasks[1], 8, torch.Generator().manual_seed(99))
    again.load_state_dict(first.state_dict())
    for x, y in expected:
        found = next(again)
        assert torch.equal(found[0], x)
        assert torch.equal(found[1], y)


def test_a_batch_is_never_larger_than_the_task() -> None:
    stream = stream_of()
    x, _ = next(Shuffled(DeviceImages(stream, CPU), stream.tasks[0], 512, torch.Generator()))
    assert len(x) == 27


def test_images_on_the_host_give_the_same_batches() -> None:
    stream = stream_of(Frame(6, 2, True))
    here, there = (DeviceImages(stream, CPU, resident=resident) for resident in (True, False))
    assert here.resident
    assert not there.resident
    ours, theirs = (Shuffled(images, stream.tasks[0], 8, torch.Generator().manual_seed(0)) for images in (here, there))
    for _ in range(7):
        for one, other in zip(next(ours), next(theirs), strict=True):
            assert torch.equal(one, other)
    for mine, yours in zip(*(Batches(i, stream.tasks[0], stream.tasks[0].test, 5) for i in (here, there)), strict=True):
        assert torch.equal(mine[0], yours[0])


def test_the_making_of_a_batch_is_one_graph() -> None:
    """With a graph break, torch would silently leave a part of it eager."""
    stream = permuted(source(), Frame(7, 2, True, "mean"), tasks=2)
    images = DeviceImages(stream, CPU)
    images.prepare = torch.compile(prepare, fullgraph=True, backend="aot_eager")
    for task in stream.tasks:
        part = random_pass(stream, task.train, torch.Generator().manual_seed(0))
        for one, other in zip(
            make_batch(images, task, part), make_batch(DeviceImages(stream, CPU), task, part), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.skipif("inductor" not in BACKENDS, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("resident", [True, False])
def test_compiled_batches_are_the_same(resident: bool) -> None:
    torch.compiler.reset()
    streams = [
        permuted(source(side=5), Frame(6, 2, True, "mean"), tasks=2),
        rotated(source(), Frame(6, 1), angles=[0, 45]),
    ]
    for stream in streams:
        task = stream.tasks[1]
        compiled, eager = (DeviceImages(stream, CPU, resident=resident, compile=flag) for flag in (True, False))
        ours, theirs = (Shuffled(images, task, 8, torch.Generator().manual_seed(0)) for images in (compiled, eager))
        pairs = [(next(ours), next(theirs)) for _ in range(3)]
        pairs += zip(*(Batches(images, task, task.test, 9) for images in (compiled, eager)), strict=True)
        for (x, y), (exact, labels) in pairs:
            torch.testing.assert_close(x, exact)
            assert torch.equal(y, labels)


def test_batches_for_consolidation_are_repeatable() -> None:
    stream = stream_of()
    task, images = stream.tasks[0], DeviceImages(stream, CPU)
    batches = Batches(images, task, task.train, 10, seed=1)
    assert len(batches) == 3
    rounds = [torch.cat([y for _, y in batches]) for _ in range(2)]
    assert torch.equal(*rounds)
    assert not torch.equal(rounds[0], torch.cat([y for _, y in Batches(images, task, task.train, 10)]))
    rehearsal = Rehearsal(images, task, 10, seed=1)
    assert iter(rehearsal) is not rehearsal
    first, again = (next(iter(rehearsal)) for _ in range(2))
    assert torch.equal(first[0], again[0])


# ---- streams by name ----


@pytest.mark.parametrize(
    ("name", "shape", "tasks", "active"),
    [
        ("digits", (1, 8, 8), 5, (2, 3)),
        ("imnist", (1, 32, 32), 5, (2, 3)),
        ("icifar100", (3, 32, 32), 10, tuple(range(10, 20))),
        ("pmnist", (1, 32, 32), 10, tuple(range(10))),
        ("rmnist", (1, 32, 32), 10, tuple(range(10))),
    ],
)
def test_streams_by_name(
    name: str, shape: tuple[int, int, int], tasks: int, active: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    like = {
        "digits": source(10, 5, 8, 1),
        "mnist": source(10, 5, 28, 1),
        "cifar100": source(100, 5, 32, 3),
    }
    monkeypatch.setattr(streams, "load", lambda origin, data: like[origin])
    stream = build_stream(name)
    assert stream.shape == shape
    assert len(stream.tasks) == tasks
    assert stream.tasks[1].active == active
    x, y = next(Shuffled(DeviceImages(stream, CPU), stream.tasks[1], 4, torch.Generator()))
    assert x.shape == (4, *shape)
    assert y.max() < len(active)
    assert len(build_stream(name, tasks=2).tasks) == 2
    if name == "rmnist":
        assert [task.angle for task in stream.tasks] == list(range(0, 180, 18))
    assert stream.frame.mirror == (name == "icifar100")  # a digit in a mirror is another sign


def write_classes(folder: Path, names: str) -> None:
    for name in names:
        for i in range(5):
            file = folder / name / f"{i}.png"
            file.parent.mkdir(exist_ok=True)
            Image.new("RGB", (20 + i, 24), (60 * i, 10, 200)).save(file)


def test_a_stream_of_a_folder(tmp_path: Path) -> None:
    write_classes(tmp_path, "abcd")
    stream = build_stream(f"folder:{tmp_path}?size=16")
    assert stream.shape == (3, 16, 16)
    assert [task.name for task in stream.tasks] == ["a, b", "c, d"]


def test_options_of_the_stream_of_a_folder(tmp_path: Path) -> None:
    write_classes(tmp_path, "abcde")

    def tasks(options: str) -> list[str]:
        return [task.name for task in build_stream(f"folder:{tmp_path}?{options}").tasks]

    assert tasks("per_task=3") == ["a, b, c", "d, e"]
    assert tasks("order=e,a,d,c,b&size=8&per_task=3") == ["e, a, d", "c, b"]
    shuffled = tasks("order=3")
    assert shuffled == tasks("order=3") != tasks("size=32")
    assert sorted(", ".join(shuffled).split(", ")) == list("abcde")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("per-task=3", "has no option 'per-task'; available: size, per_task, order: did you mean per_task?"),
        ("per_task=", "needs one value of per_task, as in folder:PATH?per_task=5"),
        ("size=8&size=9", "needs one value of size"),
        ("per_task=many", "must be an integer from 1 to 4096, as in folder:PATH?per_task=5"),
        ("per_task=9", "has 3 classes, too few for 0 tasks of 9"),
        ("order=a,x,c", "has no class 'x'; available: a, b, c"),
        ("order=a,b", "leaves out the class 'c'; add it"),
        ("order=a,b,c,a", "each at most once"),
    ],
)
def test_wrong_options_of_the_stream_of_a_folder(tmp_path: Path, options: str, message: str) -> None:
    write_classes(tmp_path, "abc")
    with pytest.raises((ValueError, UserError), match=re.escape(message)):
        build_stream(f"folder:{tmp_path}?{options}")


def test_a_stream_prints_as_one_line() -> None:
    stream = build_stream("digits", tasks=2)
    assert str(stream) == "Stream(digits in 2 x 2: 2 tasks, 10 outputs, 1797 images, 1x8x8)"
    assert str(stream.tasks[1]) == "Task(name='2, 3', active=(2, 3), angle=0.0)"


def test_an_unknown_stream() -> None:
    with pytest.raises(ValueError, match=r"unknown stream 'imnst'; available: digits, imnist, .*, folder:PATH"):
        build_stream("imnst")
