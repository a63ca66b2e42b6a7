"""The page of a study, as text and in a real browser."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from holdfast import cli
from holdfast.runs.plan import Plan
from holdfast.runs.record import Record
from holdfast.study import figures, page
from holdfast.study.figures import Drawing, style
from holdfast.study.figures.subject import Subject
from holdfast.study.store import Run, Study
from holdfast.study.tables import compare
from test_exports import entry, record_of

HOSTILE = [
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=2</script>",
    "<svg onload='window.hacked=3'>",
    "\"><b class='injected'>bold</b>",
    "--><i class=injected>{{ 7 * 7 }}</i>\nnew line $x^2$",
]


def keep(study: Study, run: Run, record: Record | None) -> None:
    study.add(run)
    if record is not None:
        study.finish(run, record)


def a_run(name: str, seed: int, **knobs: Any) -> Run:
    stream, method = knobs.pop("stream", "digits"), knobs.pop("method", "npc")
    return Run.of(stream, Plan(method, seed=seed, **knobs), name=name)


def matrix(first: float, second: float) -> list[list[float]]:
    return [[0.95, 0.5], [first, second]]


NAMES = ["0, 1", "2, 3"]
FINALS = {"ten 10": (0.6, 0.9), "ten 9": (0.8, 0.9), "alpha": (0.5, 0.6), "zeta": (0.7, 0.95)}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Methods with two seeds each, one of which has only failed, and a run that waits."""
    made = Study(tmp_path_factory.mktemp("studies") / "ours")
    for number, (name, (first, second)) in enumerate(FINALS.items(), 1):
        for seed in (0, 1):
            run = a_run(name, seed, lr=number / 10)
            keep(made, run, record_of(run, matrix(first + seed / 100, second), names=NAMES))
    run = a_run("broken", 0, lr=9.0)
    failure = {"task": 1, "step": 7, "why": "the loss was not finite"}
    keep(made, run, record_of(run, [[0.9, 0.5]], names=NAMES, failure=failure))
    keep(made, a_run("waits", 0), None)
    page.write(made)
    return made


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of which all names are HTML."""
    made = Study(tmp_path_factory.mktemp("studies") / "<b class=injected>study")
    for number, name in enumerate(HOSTILE, 1):
        run = Run(HOSTILE[number // 4], replace(a_run("", 0).plan, lr=number / 10), None, name, f"run-{number}")
        fields = {"device": name, "versions": {name: name}, "settings": {name: name}}
        keep(made, run, record_of(run, matrix(0.7, 0.8), names=HOSTILE[:2], **fields))
    run = Run("digits", a_run("", 0).plan, None, HOSTILE[0], "failed")
    keep(made, run, record_of(run, [], names=HOSTILE, failure={"task": 0, "step": 0, "why": HOSTILE[1]}))
    return page.write(made)


# ---- as text ----


def test_files_of_a_report(study: Study) -> None:
    assert (study.folder / "index.html").read_text().startswith("<!doctype html>")
    assert {"runs.csv", "runs.jsonl", "table.csv"} <= {path.name for path in study.folder.iterdir()}
    drawn = [drawing.key for comparison in compare(study.entries) for drawing in figures.draw(comparison)]
    assert drawn
    wanted = {f"{key}.{ending}" for key in drawn for ending in ("pdf", "png")}
    assert {path.name for path in (study.folder / "figures").iterdir()} == wanted


def test_a_registered_kind_of_figure_is_saved_shown_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_pair(key: str, subject: Subject) -> Drawing | None:
        return Drawing(key, "A pair", "Two methods.", Figure()) if len(subject.comparison.rows) == 2 else None

    first, *others = figures.COMPARISON_KINDS
    monkeypatch.setattr(figures, "COMPARISON_KINDS", (first, figures.Kind("pair", draw_pair), *others))
    made = Study(tmp_path)
    for name, lr in (("left", 0.1), ("right", 0.2)):
        run = a_run(name, 0, lr=lr)
        keep(made, run, record_of(run, matrix(0.6, 0.9), names=NAMES))
    titles = re.compile(r"<figcaption><strong>(.*?)\.</strong>")
    default = ["Average accuracy over time", "Accuracy on each task", "Forgetting versus plasticity"]
    assert titles.findall(page.write(made).read_text()) == [default[0], "A pair", *default[1:]]
    assert {path.name for path in tmp_path.glob("figures/pair*")} == {
        "pair-digits-2-test.pdf",
        "pair-digits-2-test.png",
    }
    shutil.rmtree(made.folder_of(run))
    assert titles.findall(page.write(made).read_text()) == default
    kinds = {path.name.split("-")[0] for path in tmp_path.glob("figures/*")}
    assert kinds == {"average", "tasks", "balance"}


def test_a_page_needs_no_torch(study: Study) -> None:
    code = (
        "import sys; from holdfast.study import page, store; "
        "page.render('x', store.Study(sys.argv[1]).entries); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(study.folder)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ("", "There are no runs in this study yet."),
        ("f", "1 method on digits with 1 seed: 1 run, finished."),
        ("fff", "1 method on digits with 3 seeds: 3 runs, all finished."),
        ("x", "1 method on digits with 1 seed: 1 run, failed."),
        ("uu", "1 method on digits with 2 seeds: 2 runs, all unfinished."),
        ("fxu", "1 method on digits with 3 seeds: 3 runs, 1 finished, 1 failed and 1 unfinished."),
    ],
)
def test_a_sentence_says_what_was_done(tmp_path: Path, states: str, expected: str) -> None:
    made = {
        "f": lambda seed: entry(tmp_path, "npc", seed, [[0.9]]),
        "x": lambda seed: entry(tmp_path, "npc", seed, [], names=["one"], failure={"task": 0, "step": 1, "why": "odd"}),
        "u": lambda seed: entry(tmp_path, "npc", seed, None),
    }
    entries = [made[state](seed) for seed, state in enumerate(states)]
    assert page.summarize(entries) == expected
    text = page.render("a study", entries)
    assert expected in text
    assert ("holdfast run" in text) == bool(states)
    assert ("odd" in text) == ("x" in states)


def test_streams_are_named_or_counted(tmp_path: Path) -> None:
    entries = [entry(tmp_path, "npc", 0, None, stream=f"s{number}") for number in range(5)]
    assert page.summarize(entries[:3]).startswith("1 method on s0, s1 and s2 with")
    assert page.summarize(entries).startswith("1 method on 5 streams with")


@pytest.mark.parametrize(
    ("memory", "shown"), [(None, "unknown"), ({}, "0 B"), ({"importance": 500, "anchor": 524}, "1.0 KiB")]
)
def test_the_memory_of_a_method(tmp_path: Path, memory: dict[str, int] | None, shown: str) -> None:
    text = page.render("a study", [entry(tmp_path, "npc", 0, [[0.9]], memory=memory)])
    assert f"<td>512 MiB<td>{shown}<td>" in text


def test_odd_values(tmp_path: Path) -> None:
    odd = {"device": None, "versions": {}, "settings": {"a": None, "b": [1, 2], "c": float("inf"), "d": True}}
    odd |= {"seconds": {"training": 0.0, "evaluation": "?"}, "peak_bytes": -1, "images": 0, "failure": {}}
    text = page.render("\ud83d \x00", [entry(tmp_path, "", 0, [], names=["one"], **odd)])
    assert "reason unknown" in text
    for name, value in {"a": "none", "b": "[1, 2]", "c": "inf", "d": "yes", "device": "none"}.items():
        assert f"<dt>{name}</dt> <dd>{value}</dd>" in text


def test_the_best_is_the_best_of_the_rivals(tmp_path: Path) -> None:
    entries = [
        entry(tmp_path, "upper", 0, matrix(0.9, 0.9), method="joint"),
        entry(tmp_path, "good", 0, matrix(0.7, 0.8)),
        entry(tmp_path, "as good", 0, matrix(0.8, 0.7)),
        entry(tmp_path, "bad", 0, matrix(0.6, 0.7)),
    ]
    (comparison,) = compare(entries)
    assert {row.name for row in page.best(comparison)} == {"good", "as good"}
    text = page.render("x", entries)
    assert text.count('<span class="tag best">') == 2
    assert re.search(r'data-value="upper">upper <span class="tag">bound</span></th>', text)
    assert not page.best(compare([entries[0]])[0])


def test_who_has_no_rivals_is_not_the_best(tmp_path: Path) -> None:
    bound = entry(tmp_path, "upper", 0, matrix(0.9, 0.9), method="joint")
    failed = entry(tmp_path, "broken", 0, [], names=["task 1", "task 2"], failure={"why": "odd"})
    (comparison,) = compare([bound, failed, entry(tmp_path, "alone", 0, matrix(0.7, 0.8))])
    assert page.best(comparison) == []


def test_a_thousand_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "draw", lambda _: [])
    ten = [[0.5 + 0.01 * number] * 10 for number in range(10)]
    names = [f"task {number}" for number in range(10)]
    where = {"names": names, "device": "NVIDIA H200", "versions": {"torch": "2.13.0+cu130"}}
    entries = [entry(tmp_path, f"npc {n}", seed, ten, lr=n / 7, **where) for n in range(1, 251) for seed in range(4)]
    text = page.render("large", entries)
    assert len(text.encode()) < 3_000_000
    assert text.count("<dt>device</dt>") == text.count("NVIDIA H200") == 1
    assert text.count("2.13.0+cu130") == 1
    assert text.count("<dt>model</dt>") == 1
    assert text.count("<dt>lr</dt>") == 250
    assert text.count('class="matrix"') == 1000


def test_what_one_run_does_not_share_is_said_of_it_alone(tmp_path: Path) -> None:
    entries = [
        entry(tmp_path, "npc", seed, [[0.9]], device=f"card {seed // 2}", versions={"torch": "2.8"})
        for seed in range(3)
    ]
    text = page.render("x", entries)
    assert text.count("<dt>torch</dt>") == 1
    assert text.count("<dt>device</dt>") == 3
    assert re.search(r"Only seed 2:</p>\s*<dl[^>]*>\s*<div><dt>device</dt> <dd>card 1</dd>", text)


def test_runs_are_listed_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    names = ["method 2", "method 10", "METHOD 20", "x lr=1e-05", "x lr=0.05", "x lr=0.1", "x lr=2.0"]
    entries = [entry(tmp_path, name, 0, [[0.9]], lr=float(number)) for number, name in enumerate(sorted(names), 1)]
    shown = re.findall(r'<summary><span class="name">(.*?)</span>', page.render("x", entries))
    assert shown == names


def test_neurons_that_cannot_be_read_do_not_end_a_report(tmp_path: Path) -> None:
    made = Study(tmp_path / "ours")
    run = a_run("npc", 0)
    keep(made, run, record_of(run, matrix(0.7, 0.8), names=NAMES))
    (made.folder_of(run) / "neurons.json").write_text("{")
    with pytest.warns(UserWarning, match=r"skipped.*neurons\.json"):
        assert page.write(made).exists()


# ---- how to run it again ----


@pytest.mark.parametrize(
    ("plan", "seeds", "more", "expected"),
    [
        (Plan("npc", curve=10), [0], {}, "imnist npc --seeds 1"),
        (Plan("ewc", curve=10), [2, 0, 1], {"tasks": 3}, "imnist ewc --tasks 3 --seeds 3"),
        (Plan("ewc", curve=10, evaluate_on="validation"), [0], {}, "imnist ewc --seeds 1 --validation"),
        (Plan("ewc", curve=10), [3, 5], {}, "imnist ewc --seed 3 --seed 5"),
        (Plan("npc", curve=10), [0], {"name": "it's\nours"}, "imnist npc --seeds 1 --name 'it'\"'\"'s\nours'"),
        (
            Plan("npc", {"rate": 0.001, "beta": 1e12}, "mlp", 0.5, epochs=20.0, curve=10),
            [0],
            {},
            "imnist npc --seeds 1 --model mlp --width 0.5 --epochs 20 --set rate=0.001 --set beta=1000000000000.0",
        ),
        (
            Plan("ssl", {"form": "proximal"}, lr=1e-05, batch=64, epoch="task", heads="growing", curve=1),
            [0],
            {"stream": "folder:/my images"},
            "'folder:/my images' ssl --seeds 1 --model paper_cnn --lr 1e-05 --batch 64 --heads growing --curve 1 "
            "--set form=proximal",
        ),
        (
            Plan("mas", neurons=True, precision="bf16", compile=True, deterministic=True, curve=10),
            [0],
            {},
            "imnist mas --seeds 1 --neurons --precision bf16 --compile --deterministic",
        ),
    ],
)
def test_commands(plan: Plan, seeds: Sequence[int], more: dict[str, Any], expected: str) -> None:
    run = Run.of(more.pop("stream", "imnist"), plan, **more)
    assert page.command(run, seeds) == f"holdfast run {expected} --out DIR"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["x86_64 CPU", "arm64 CPU"], " --device cpu"),
        (["x86_64 CPU", "NVIDIA H200"], ""),
        (["NVIDIA H200"], ""),
        ([], ""),
    ],
)
def test_what_ran_on_a_cpu_runs_on_a_cpu_again(tmp_path: Path, devices: list[str], expected: str) -> None:
    entries = [entry(tmp_path, "npc", seed, [[0.9]], device=device) for seed, device in enumerate(devices)]
    entries.append(entry(tmp_path, "npc", len(devices), None))
    text = page.render("x", entries)
    assert re.search(rf'<pre class="command" tabindex="0">holdfast run [^<]*\d{expected} --out DIR</pre>', text)
    assert "give <code>--data</code>" in text


@pytest.mark.parametrize("stream", ["digits", "imnist", "folder:/my images; rm -rf $HOME"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan("npc"),
        Plan("npc", {"rate": 1e-5, "beta": 1e12}, "mlp", 0.5, lr=0.1, batch=16, epochs=0.5, epoch="task", curve=3),
        Plan("ewc", {"samples": 3}, heads="growing", evaluate_on="validation", curve=7, neurons=True),
        Plan("ssl", {"form": "proximal"}, precision="bf16", compile=True, deterministic=True),
    ],
)
def test_the_command_does_the_same_runs(stream: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Run.of(stream, Plan(**{**vars(plan), "seed": seed}), 2, "a 'name' $x") for seed in (0, 4)]
    done: list[tuple[Run, str]] = []
    monkeypatch.setattr(cli, "_execute", lambda _study, runs, how: done.extend((run, how.device) for run in runs))
    monkeypatch.setattr(cli, "_conclude", lambda *_, **__: None)
    _, *words = shlex.split(page.command(wanted[0], [0, 4], "cpu"))
    cli.app(words, standalone_mode=False)
    assert done == [(run, "cpu") for run in wanted]


@pytest.mark.parametrize(
    "value", ["proximal", "3", "true", "", " a ", 'a "b"\n\\', "é😀", 3, 3.0, 1e-5, 1e22, True, False]
)
def test_settings_are_read_as_they_were_written(value: Any) -> None:
    run = Run.of("digits", Plan("ewc", {"a": value}), name="x")
    words = shlex.split(page.command(run, [0]))
    name, read = page.studyfile.setting(words[words.index("--set") + 1])
    assert (name, read, type(read)) == ("a", value, type(value))


# ---- in a browser ----


class Browser:
    """A headless Chromium, and what the tests ask it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, *, width: int = 1280, media: dict[str, str] | None = None, on: str = "screen") -> None:
        self.cdp("Emulation.setScriptExecutionDisabled", value=False)
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
        features = [{"name": name, "value": value} for name, value in (media or {}).items()]
        self.cdp("Emulation.setEmulatedMedia", media=on, features=features)
        self.driver.get("about:blank")
        self.messages(), self.requested()
        self.driver.get(path.as_uri())

    def cdp(self, command: str, **options: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, options)

    def ask(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *values)

    def messages(self) -> list[str]:
        return [line["message"] for line in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        messages = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if not each["request"]["url"].startswith("data:")]

    def names(self) -> list[str]:
        return self.ask("[...document.querySelectorAll('.results tbody th')].map(cell => cell.dataset.value)")

    def header(self, text: str) -> Any:
        headers = self.driver.find_elements("css selector", ".results th[scope=col]")
        return next(header for header in headers if header.text.startswith(text))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium or no chromedriver on this machine: the page was not opened in a browser")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with Chrome(options, Service(driver)) as opened:
        yield Browser(opened)


A4 = 718
"""The width of its text, in pixels."""


@pytest.fixture
def opened(browser: Browser, study: Study) -> Browser:
    browser.open(study.folder / "index.html")
    return browser


def test_nothing_is_wrong_and_nothing_is_fetched(opened: Browser, study: Study) -> None:
    assert opened.messages() == []
    assert opened.requested() == [(study.folder / "index.html").as_uri()]
    assert opened.ask("document.documentElement.lang") == "en"
    levels = opened.ask("[...document.querySelectorAll('h1, h2, h3, h4')].map(each => +each.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_what_the_policy_forbids_does_not_happen(opened: Browser) -> None:
    opened.ask("document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    opened.ask("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    opened.ask("fetch('https://example.org').catch(() => 0)")
    assert opened.ask("window.hacked") is None
    lines = opened.messages()
    assert all("Content Security Policy" in line for line in lines)
    assert all(any(what in line for line in lines) for what in ("img-src", "script-src", "connect-src"))


def test_figures_are_seen(opened: Browser, study: Study) -> None:
    (comparison,) = compare(study.entries)
    sizes = opened.ask("[...document.querySelectorAll('figure svg')].map(svg => svg.getBoundingClientRect().toJSON())")
    assert len(sizes) == len(figures.draw(comparison)) > 0
    assert all(size["width"] > 200 and size["height"] > 100 for size in sizes)
    ids = opened.ask("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))
    captions = opened.ask("[...document.querySelectorAll('figcaption')].map(each => each.textContent)")
    assert all(len(caption) > 20 for caption in captions)


def by(column: str, *, descending: bool) -> list[str]:
    """The order of the rows, worked out from the numbers they were made of; what has failed is last."""
    value = {
        "Average": lambda name: sum(FINALS[name]) / 2,
        "Task 1": lambda name: FINALS[name][0],
        "Task 2": lambda name: FINALS[name][1],
        "Forgetting": lambda name: -FINALS[name][0],
    }[column]
    return [*sorted(FINALS, key=value, reverse=descending), "broken"]


@pytest.mark.parametrize("column", ["Task 1", "Forgetting"])
def test_sorting_by_a_click(opened: Browser, column: str) -> None:
    button = opened.header(column).find_element("tag name", "button")
    assert opened.header(column).get_attribute("aria-sort") is None
    for direction in ("descending", "ascending", "descending"):
        button.click()
        assert opened.names() == by(column, descending=direction == "descending")
        assert opened.header(column).get_attribute("aria-sort") == direction
    assert opened.ask("document.querySelectorAll('[aria-sort]').length") == 1


def test_sorting_by_the_keyboard(opened: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    assert opened.names() == by("Average", descending=True)
    assert opened.header("Average").get_attribute("aria-sort") == "descending"
    opened.ask("document.querySelector('.results button').focus()")
    names = ["alpha", "broken", "ten 9", "ten 10", "zeta"]
    for key, order in ((Keys.ENTER, names), (Keys.SPACE, names[::-1])):
        opened.driver.switch_to.active_element.send_keys(key)
        assert opened.names() == order
    opened.driver.switch_to.active_element.send_keys(Keys.TAB)
    assert opened.ask("document.activeElement.textContent") == "Average"
    assert opened.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert opened.names() == by("Average", descending=True)


def test_the_table_says_what_was_found(opened: Browser) -> None:
    rows = opened.ask("[...document.querySelectorAll('.results tbody tr')].map(row => row.innerText.split('\\t'))")
    over_all = ["85.25(0.25)", "92.50(0.00)", "14.50(0.50)", "90.12(0.12)"]
    assert rows[0] == ["ten 9 best", *over_all, "2", "80.50(0.50)", "90.00(0.00)"]
    none = "\N{EN DASH}"
    assert rows[-1] == ["broken", none, none, none, none, "0 of 1", none, none]


def test_runs_open_and_say_all(opened: Browser) -> None:
    opened.ask("document.querySelectorAll('details').forEach(each => { each.open = true })")
    groups = opened.ask("[...document.querySelectorAll('.group')].map(each => each.innerText)")
    assert len(groups) == 6
    alpha, broken, _, _, waits, _ = groups  # in the order of their names
    assert "Seed 0 failed in task 2, step 7: the loss was not finite" in broken
    assert "holdfast run digits npc --seeds 1" in broken
    assert "2 runs, all finished" in alpha
    assert all(
        text in alpha for text in ("lr 0.3", "beta 0.7", "512 MiB", "500.00", "finished", "51.0", "digits-npc-1-")
    )
    assert "1 run, unfinished" in waits
    assert "waiting" in waits


def test_commands_are_copied(opened: Browser) -> None:
    opened.cdp("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    opened.ask("document.querySelector('#commands button').click()")
    opened.ask("new Promise(done => setTimeout(done, 100))")
    copied = opened.ask("navigator.clipboard.readText()")
    assert len(copied.splitlines()) == 6
    assert all(line.startswith("holdfast run digits npc") for line in copied.splitlines())


def test_names_are_shown_and_never_run(browser: Browser, hostile: Path) -> None:
    browser.open(hostile)
    browser.ask("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert browser.messages() == []
    assert browser.requested() == [hostile.as_uri()]
    assert browser.ask("window.hacked") is None
    assert browser.ask("document.querySelectorAll('img, .injected, [onload], [onerror]').length") == 0
    assert browser.ask("document.querySelectorAll('script').length") == 1
    assert browser.ask("document.title") == "<b class=injected>study"
    text = browser.ask("document.body.textContent")
    assert all(text.count(name) >= 4 for name in HOSTILE)
    assert set(browser.names()) == set(HOSTILE)


@pytest.mark.parametrize("which", ["study", "hostile"])
def test_a_phone_scrolls_tables_and_not_the_page(which: str, browser: Browser, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(which)
    browser.open(made.folder / "index.html" if isinstance(made, Study) else made, width=360)
    browser.ask("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert browser.ask("innerWidth") == 360
    assert browser.ask("document.documentElement.scrollWidth") <= 360
    moved = browser.ask(
        "(() => { const box = document.querySelector('.scroll'); box.scrollLeft = 150;"
        " const [name, value] = box.querySelectorAll('tbody tr:first-child > *');"
        " return [box.scrollLeft, name.getBoundingClientRect().left, value.getBoundingClientRect().left]; })()"
    )
    assert moved[0] == 150
    assert 0 <= moved[1] < 20  # the name stays
    assert moved[2] < 100


def test_figures_can_be_read_on_a_phone(browser: Browser, study: Study) -> None:
    browser.open(study.folder / "index.html", width=360)
    sizes = browser.ask(
        "[...document.querySelectorAll('.drawing')].map(box => { box.focus(); box.scrollLeft = 9999;"
        " const svg = box.querySelector('svg'), unit = svg.clientWidth / svg.viewBox.baseVal.width;"
        " return [document.activeElement === box, box.scrollLeft > 0, unit]; })"
    )
    assert sizes
    for focused, scrolled, unit in sizes:
        assert focused
        assert scrolled
        assert unit * style.RC["xtick.labelsize"] >= 9.5  # pixels


def test_a_lone_figure_is_no_poster(browser: Browser, tmp_path: Path) -> None:
    made = Study(tmp_path / "lone")
    run = a_run("npc", 0)
    curve = {"task": 0, "step": 5, "accuracy": [0.5]}
    keep(made, run, record_of(run, [[0.9]], curves=[curve]))
    browser.open(page.write(made))
    (width,) = browser.ask("[...document.querySelectorAll('figure svg')].map(svg => svg.clientWidth)")
    assert 400 < width < 750


def test_dark_is_never_printed(browser: Browser, study: Study) -> None:
    browser.open(study.folder / "index.html", media={"prefers-color-scheme": "dark"}, on="print")
    assert browser.ask("getComputedStyle(document.documentElement).colorScheme") == "light"
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for what in ("body", "figure svg", ".results td", "figcaption"):
        assert luminance(browser.ask("getComputedStyle(document.querySelector(arguments[0])).color", what)) < 0.15


@pytest.mark.parametrize(("tasks", "shown"), [(8, True), (9, False), (14, False)])
def test_a_printed_table_fits(browser: Browser, tmp_path: Path, tasks: int, shown: bool) -> None:
    made = Study(tmp_path / "wide")
    names = [f"a long name of task {number}" for number in range(tasks)]
    for seed in (0, 1):
        run = a_run("npc beta=0.5 rate=0.001", seed)
        keep(made, run, record_of(run, [[1.0 - seed / 100] * tasks for _ in names], names=names))
    browser.open(page.write(made), width=A4, on="print")
    assert browser.ask("document.querySelector('.results').getBoundingClientRect().width") <= A4
    assert browser.ask("document.documentElement.scrollWidth") <= A4
    assert browser.ask("document.querySelector('.results tbody th').clientWidth") >= 100
    cells = browser.ask("[...document.querySelectorAll('.results tbody td')].filter(each => each.offsetWidth).length")
    assert cells == 5 + tasks * shown
    assert ("table.csv" in browser.ask("document.querySelector('caption').innerText")) == (not shown)


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_by_day_and_by_night(browser: Browser, study: Study, scheme: str) -> None:
    browser.open(study.folder / "index.html", media={"prefers-color-scheme": scheme})
    background = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.05) == (scheme == "dark")
    pairs = browser.ask(
        "[...document.querySelectorAll('body, .results *, summary *, dt, dd, p, pre, figcaption, button, .failure, a')]"
        ".filter(each => each.textContent.trim()).map(each => { let box = each;"
        " while (getComputedStyle(box).backgroundColor === 'rgba(0, 0, 0, 0)') box = box.parentElement;"
        " return [getComputedStyle(each).color, getComputedStyle(box).backgroundColor]; })"
    )
    assert len(pairs) > 100
    for text, behind in {tuple(pair) for pair in pairs}:
        darker, lighter = sorted([luminance(text), luminance(behind)])
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (text, behind)
    ink = browser.ask("getComputedStyle(document.querySelector('figure svg')).color")
    assert (luminance(ink) > 0.5) == (scheme == "dark")


def test_without_javascript(browser: Browser, study: Study) -> None:
    browser.open(study.folder / "index.html")
    browser.cdp("Emulation.setScriptExecutionDisabled", value=True)
    browser.driver.refresh()
    assert browser.driver.find_elements("tag name", "button") == []
    assert browser.header("Average").text == "Average"
    summary = browser.driver.find_element("css selector", ".group summary")
    summary.click()
    assert browser.driver.find_element("css selector", ".group pre").is_displayed()
    browser.cdp("Emulation.setScriptExecutionDisabled", value=False)


def test_the_paper_s_table_stands_beside_ours(browser: Browser, tmp_path: Path) -> None:
    made = Study(tmp_path / "imnist")
    for seed, average in enumerate((0.90, 0.91)):
        run = a_run("npc", seed, stream="imnist")
        keep(made, run, record_of(run, [[average] * 5] * 5))
    browser.open(page.write(made))
    cells = browser.ask(
        "[...document.querySelectorAll('.printed-there tbody td')].map(each => each.innerText.split('\\n'))"
    )
    assert cells[0] == ["*90.50(0.50)", "98.45(0.13)"]
    assert cells[-1] == ["*90.50(0.50)", "99.63(0.02)"]
    assert len(cells) == 6


def test_there_is_no_such_table_for_other_streams(study: Study) -> None:
    assert "Table 1" not in page.render("x", study.entries)
