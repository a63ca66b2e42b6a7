"""Study files: what they say, and the one line that each mistake in them gets."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.methods import METHODS, Method
from holdfast.methods.anchor import Anchored
from holdfast.runs.plan import Plan
from holdfast.study.store import Run, StudyError
from holdfast.study.studyfile import check_settings, parse, read, setting, value

STUDY = """\
stream = "digits"          # for all runs
model = "mlp"
lr = 0.1
epochs = 5
epoch = "task"
seeds = 3

[[run]]
method = "npc"
settings = { rate = 1e-3 }

[[run]]
method = ["ewc", "mas", "si"]

[[run]]
method = "ewc"
name = "EWC, weak"
settings.strength = 1
seeds = [5, 6]
epochs = 10
stream = "imnist"
tasks = 2
"""

RUN = '[[run]]\nmethod = "ewc"\nstream = "digits"\n'


def message(text: str) -> str:
    """The message for a mistake, which is one line."""
    with pytest.raises(StudyError) as caught:
        parse(text, "study.toml")
    found = str(caught.value)
    assert len(found.splitlines()) == 1
    return found


# ---- what a file says ----


def test_methods_and_seeds_are_multiplied_out_in_the_order_of_the_file() -> None:
    runs = parse(STUDY, "study.toml")
    assert [run.label for run in runs] == [
        *(f"{name}, seed {seed}" for name in ("npc rate=0.001", "ewc", "mas", "si") for seed in range(3)),
        "EWC, weak, seed 5",
        "EWC, weak, seed 6",
    ]
    everywhere = {"model": "mlp", "lr": 0.1, "epochs": 5, "epoch": "task", "curve": 10}
    digits = {**everywhere, "batch": 16}  # the default for digits
    assert runs[0] == Run.of("digits", Plan("npc", {"rate": 1e-3}, seed=0, **digits))
    assert runs[5] == Run.of("digits", Plan("ewc", seed=2, **digits))
    weak = Plan("ewc", {"strength": 1}, seed=6, **{**everywhere, "epochs": 10})
    assert runs[-1] == Run.of("imnist", weak, tasks=2, name="EWC, weak")


def test_a_run_without_seeds_has_seed_0() -> None:
    assert [run.plan.seed for run in parse(RUN, "study.toml")] == [0]


def test_the_method_may_stand_above_and_settings_are_added_to_those_above() -> None:
    text = (
        'stream = "digits"\nmethod = "ewc"\nsettings = { form = "loss", strength = 5 }\n'
        "[[run]]\n[[run]]\n[run.settings]\nstrength = 7"
    )
    assert [run.plan.settings for run in parse(text, "study.toml")] == [
        {"form": "loss", "strength": 5},
        {"form": "loss", "strength": 7},
    ]


def test_every_key_of_a_plan_can_be_said() -> None:
    text = 'stream = "folder:~/birds?size=64"\nwidth = 0.5\nbatch = 8\nheads = "growing"\nevaluate_on = "validation"\n'
    text += 'model = "mlp"\nlr = 0.2\nepochs = 4\nepoch = "paper"\n'
    text += 'curve = 10\nneurons = true\nprecision = "bf16"\ncompile = true\ndeterministic = true\n'
    text += 'threads = 2\n[[run]]\nmethod="si"'
    plan = Plan("si", width=0.5, batch=8, heads="growing", evaluate_on="validation", curve=10, neurons=True,
                model="mlp", lr=0.2, epochs=4, epoch="paper", precision="bf16", compile=True,
                deterministic=True, threads=2)  # fmt: skip
    assert parse(text, "study.toml") == [Run.of("folder:~/birds?size=64", plan)]


def test_reading_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    parse(STUDY, "study.toml")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("encode", [str.encode, lambda text: text.encode("utf-8-sig")])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_file_is_read_as_its_text(tmp_path: Path, encode: Callable[[str], bytes], ending: str) -> None:
    path = tmp_path / "study.toml"
    path.write_bytes(encode(STUDY.replace("\n", ending)))
    assert read(path) == parse(STUDY, "study.toml")


# ---- the line of a mistake ----


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('stream = "digits"\nepochs = -1\n[[run]]\nmethod = "ewc"', 2),
        ("# epochs = 1\n\n\nepochs = [\n  1,\n\n  # so many\n  2,\n]\n" + RUN, 4),
        ('epochs = """\n[[run]]\nepochs = 1\n"""\n' + RUN, 1),
        (RUN + "\n# epochs = 1\n\n  epochs   =   -1 # too few\n", 7),
        (RUN + "\r\nepochs = -1\r\n", 5),
        (RUN + RUN.replace("ewc", "si") + "epochs = -1\n" + RUN.replace("ewc", "mas"), 7),
        ('run = [\n  { method = "ewc", stream = "digits", epochs = -1 },\n]', 1),
        (RUN + '"epochs" = -1', 4),
        (RUN + "[run.epochs]\nx = 1", 4),
    ],
)
def test_the_line_is_where_the_value_begins(text: str, line: int) -> None:
    assert message(text).startswith(f"study.toml:{line}: epochs must be ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (RUN + "settings = { samples = 3, strength = -1 }", 4),
        (RUN + "settings.samples = 3\nsettings.strength = -1", 5),
        (RUN + "settings.samples = 3\n\n[[run]]\nmethod = 'mas'\nstream = 'digits'\nsettings.strength = -1", 9),
        (RUN + "[run.settings]\nsamples = 3\n# weak\nstrength = -1\n", 7),
        ("settings.strength = -1\n" + RUN, 1),
        ("settings.strength = -1\n" + RUN + "settings.strength = -1", 5),
        ("[settings]\nstrength = -1\n" + RUN + "settings.samples = 1", 2),
    ],
)
def test_the_line_of_a_setting_of_the_method(text: str, line: int) -> None:
    assert message(text) == f"study.toml:{line}: strength must be at least 0, got -1"


GOOD = ["lr = 0.1", "batch = 8", "curve = 2", "seeds = [\n  0,  # the first\n\n  1,\n]", 'name = """\\\n  EWC"""']
BAD = {
    "epochs": ["epochs = -1", "epochs = [\n 1,\n\n]", 'epochs = """\nepochs = 1\n"""', "epochs.x = 1"],
    "strength": [
        "settings.strength = -1",
        "settings = { strength = [\n 1,\n] }",
        "settings = {strength=-1}",
        "settings.'strength' = '''\n\n'''",
    ],
}
SPACE = st.lists(st.sampled_from(["", "   ", "# epochs = -1", "#[[run]]", "\t# '''"]), max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_line_in_any_layout(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(BAD)))
    bad = data.draw(st.sampled_from(BAD[key]))
    statements = data.draw(st.permutations([*data.draw(st.sets(st.sampled_from(GOOD))), bad]))
    blocks = [RUN.replace("ewc", method) for method in data.draw(st.sets(st.sampled_from(["si", "mas", "npc"])))]
    lines, expected = [], 0
    for statement in [*blocks, RUN, *statements, "[[run]]"]:
        lines += data.draw(SPACE)
        if statement == bad:
            expected = len(lines) + 1
        lines += statement.splitlines()
    assert message("\n".join(lines)).startswith(f"study.toml:{expected}: {key} must be ")


# ---- composed methods ----

STACK = '[[run]]\nmethod = "lwf+npc"\nstream = "digits"\n'


@pytest.mark.parametrize(
    "written",
    [
        "settings.lwf.weight = 0.1\nsettings.npc.beta = 0.5",
        'settings."lwf.weight" = 0.1\nsettings."npc.beta" = 0.5',
        "settings = { lwf = { weight = 0.1 }, npc.beta = 0.5 }",
        "[run.settings.lwf]\nweight = 0.1\n[run.settings.npc]\nbeta = 0.5",
    ],
)
def test_settings_of_a_composed_method_are_named_by_part(written: str) -> None:
    (run,) = parse(STACK + written, "study.toml")
    assert run.plan.settings == {"lwf.weight": 0.1, "npc.beta": 0.5}
    assert run.id.startswith("digits-lwf+npc-0-")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("lr = 0.1\nsettings.npc.beta = -1", "study.toml:5: beta must be above 0, got -1"),
        ("settings.'npc.beta' = -1", "study.toml:4: beta must be above 0, got -1"),
        ("[run.settings.npc]\nrate = 1\nbeta = -1", "study.toml:6: beta must be above 0, got -1"),
        ("settings.beta = 1", "study.toml:4: lwf+npc has no setting 'beta'; name the part too, as in npc.beta"),
        ("settings.npc.bta = 1", "study.toml:4: npc has no setting 'bta'; it has beta, rate, gain: did you mean beta?"),
    ],
)
def test_the_line_of_a_setting_of_a_composed_method(written: str, expected: str) -> None:
    assert message(STACK + written) == expected


def test_methods_that_cannot_be_combined() -> None:
    found = message(STACK.replace("lwf+npc", "npc+cpc"))
    assert found == "study.toml:1: NPC and CPC cannot be combined: both control plasticity"


# ---- messages ----


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("epochs = 'five'", "epochs must be a number, got 'five'"),
        ("epochs = true", "epochs must be a number, got True"),
        ("lr = nan", "lr must be above 0, got nan"),
        ("width = 1979-05-27", r"width must be plain data, .* got datetime\.date\(1979, 5, 27\)"),
        ("batch = 1.5", "batch must be a whole number of at least 1, got 1.5"),
        ("curve = -1", r"curve must be a whole number of at least \d, got -1"),
        ("epoch = 'week'", "epoch must be one of paper, task; got 'week'"),
        ("evaluate_on = 'train'", "evaluate_on must be one of test, validation; got 'train'"),
        ("model = 'mpl'", r"unknown model 'mpl'; available: paper_cnn, small_cnn, mlp: did you mean mlp\?"),
        ("model = ['mlp']", r"model must be a name in quotes, got \['mlp'\]"),
        ("compile = 'yes'", "compile must be true or false, got 'yes'"),
        ("neurons = 1", "neurons must be true or false, got 1"),
        (
            "stream = 'digit'",
            r"unknown stream 'digit'; available: digits, imnist, .*, folder:PATH: did you mean digits\?",
        ),
        ("stream = 'folder:'", "unknown stream 'folder:'; .*"),
        ("stream = ['digits']", r"unknown stream \['digits'\]; .*"),
        ("tasks = 0", "tasks must be a whole number of at least 1, got 0"),
        ("tasks = true", "tasks must be a whole number of at least 1, got True"),
        ("settings = 3", "settings must be a table, as in settings = { strength = 10 }, got 3"),
        ("seeds = '3'", "seeds must be .*; got '3'"),
        ("seeds = []", r"seeds must be .*; got \[\]"),
        ("seeds = 0", "seeds must be .*; got 0"),
        ("seeds = 20240101", r"seeds must be a number of seeds, from 1 to 1000, or a list .*; got 20240101"),
        ("seeds = true", "seeds must be .*; got True"),
        ("seeds = [1, true]", r"seeds must be .*; got \[1, True\]"),
        ("seeds = [1, -1]", r"seeds must be .*; got \[1, -1\]"),
        ("seeds = [1, 2, 1]", r"seeds must be different from each other, got \[1, 2, 1\]"),
        ("seeds = [9223372036854775808]", "seeds has a whole number of more than 64 bits, which is not TOML"),
        (f"lr = 1{400 * '0'}", "lr has a whole number of more than 64 bits, which is not TOML"),
        ("seed = 3", "unknown field seed: use seeds, as in .*"),
        ("epohcs = 3", "unknown field 'epohcs'; available: stream, tasks, .*: did you mean epochs.*"),
        ('"a\\nb" = 3', r"unknown field 'a\\nb'; available: stream, .*"),
        ("strength = 3", "strength is a setting of ewc, kfac, mas, si, ssl: write settings.strength = ..."),
        (f"epochs{1500 * '.x'} = 1", ".*recursion.*"),
    ],
)
def test_a_mistake_is_one_line_above_the_runs_and_in_them(statement: str, expected: str) -> None:
    key = statement.split(" ")[0]
    bare = "\n".join(line for line in RUN.splitlines() if not line.startswith(f"{key} "))
    assert re.fullmatch(f"study.toml:1: {expected}", message(f"{statement}\n{RUN}"))
    assert re.fullmatch(f"study.toml:{bare.count(chr(10)) + 2}: {expected}", message(f"{bare}\n{statement}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "study.toml: there are no runs: .*"),
        ("lr = 0.1", "study.toml: there are no runs: .*"),
        ("run = []", "study.toml: there are no runs: .*"),
        ('stream = "digits"\n[run]\nmethod = "ewc"', r"study.toml:2: a run must be a table: write \[\[run\]\].*"),
        ("run = 'ewc'", "study.toml:1: a run must be a table.*"),
        ("run = [{}, 3]", "study.toml:1: a run must be a table.*"),
        ('[[runs]]\nmethod = "ewc"', "study.toml:1: unknown field 'runs'; .* run: did you mean run.*"),
        ('\n[[run]]\nstream = "digits"', 'study.toml:2: this run has no method: add one, as in method = "npc"'),
        ('\n[[run]]\nmethod = "npc"', 'study.toml:2: this run has no stream: add one, as in stream = "digits"'),
        ('[[run]]\nmethod = "ewk"', "study.toml:2: unknown method 'ewk'; available: npc, dpc, cpc, ewc, .*"),
        ('[[run]]\nmethod = ["ewc", "ewk"]', "study.toml:2: unknown method 'ewk'; available: npc, .*"),
        ("[[run]]\nmethod = 3", "study.toml:2: method must be a name in quotes, got 3"),
        ('[[run]]\nmethod = [["ewc"]]', r"study.toml:2: method must be a name in quotes, got \['ewc'\]"),
        ("[[run]]\nmethod = []", r"study.toml:2: method must be a name or a list of different names, got \[\]"),
        ('[[run]]\nmethod = ["si", "si"]', "study.toml:2: method must be a name or a list of different names, got .*"),
        ('name = "EWC"\n' + RUN, r"study.toml:1: a name belongs to one run: write it below its \[\[run\]\]"),
        (RUN + "name = 3", "study.toml:4: name must be a line of text, got 3"),
        (RUN + 'name = "a\\nb"', r"study.toml:4: name must be a line of text, got 'a\\nb'"),
        (RUN + "name = ' '", "study.toml:4: name must be a line of text, got ' '"),
        (RUN.replace('"ewc"', '["ewc", "si"]') + 'name = "both"', "study.toml:4: a name .* are ewc, si: write .* each"),
        (RUN + "[[run.run]]", "study.toml:4: unknown field 'run'; .*"),
        (RUN + "settings.rate = 1", "study.toml:4: ewc has no setting 'rate'; it has strength, .*"),
        (RUN + "settings.form = 'los'", 'study.toml:4: form must be "proximal" or "loss", got \'los\''),
        (RUN + "settings.strength = 10000000000000000000", "study.toml:4: settings has a whole number of more .*"),
        (RUN + f"settings.strength{1500 * '.x'} = 1", "study.toml:4: .*recursion.*"),
    ],
)
def test_other_mistakes_are_one_line_too(text: str, expected: str) -> None:
    assert re.fullmatch(expected, message(text))


def test_settings_that_one_of_the_methods_lacks() -> None:
    text = '[[run]]\nstream = "digits"\nmethod = ["ewc", "npc"]\nsettings = { strength = 1 }'
    assert message(text).startswith("study.toml:4: npc has no setting 'strength'; it has beta, rate, gain")


def test_the_same_run_twice_names_both_lines() -> None:
    other = '# again\n[[run]]\nmethod = ["si", "ewc"]\nname = "other"\nstream = "digits"\nseeds = [1, 0]\n'
    found = message(RUN + "\n" + other.replace('name = "other"\n', ""))
    assert found == "study.toml:6: ewc, seed 0 is the same run as one of line 1: leave one of them out"
    assert len(parse(RUN + other.replace('name = "other"\n', "tasks = 2\n"), "study.toml")) == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('lr = 0.1\nmodel = "mlp\n', r"study.toml:2: this is not TOML: Illegal character '\\n' \(column 13\)"),
        ("lr = 0.1\nlr = 0.2\n", r"study.toml:2: this is not TOML: .* \(column 9\)"),
        ("lr = 0.1\nseeds = [1,\n", r"study.toml:3: this is not TOML: .* \(end of file\)"),
        ("[[run]]\nmethod = ewc", r"study.toml:2: this is not TOML: Invalid value \(column 10\)"),
        (f"lr = {5000 * '1'}", "study.toml: this is not TOML: Exceeds the limit .*"),
        (f"lr = {5000 * '['}", "study.toml: this is not TOML: maximum recursion depth .*"),
    ],
)
def test_what_is_not_toml(text: str, expected: str) -> None:
    assert re.fullmatch(expected, message(text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"none\.toml: No such file or directory; a study file is TOML"):
        read(tmp_path / "none.toml")
    with pytest.raises(StudyError, match=rf"^{re.escape(str(tmp_path))}: Is a directory"):
        read(tmp_path)
    (tmp_path / "latin.toml").write_bytes('stream = "digits"\nname = "schön"'.encode("latin-1"))
    with pytest.raises(StudyError, match=r"latin\.toml:2: this is not UTF-8 text \(invalid .*; save it as UTF-8"):
        read(tmp_path / "latin.toml")


# ---- anything at all ----

WORDS = st.sampled_from(["", "ewc", "npc", "mlp", "digits", "folder:x", "task", "test", "loss", "true", "\\n", "é"])
SCALARS = st.one_of(
    st.integers().map(str),
    st.sampled_from(["0", "1", "3", "0x7fffffffffffffff", "0xffffffffffffffffff", "1e999", "-0.0", "inf", "nan"]),
    st.floats().map(str),
    st.booleans().map(lambda flag: str(flag).lower()),
    WORDS.map('"{}"'.format),
    st.sampled_from(["1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"]),
)
NAMES = st.sampled_from(["strength", "rate", "samples", "form", "observe", "free", "x", "method", "name"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(NAMES, inner, max_size=3).map(
            lambda table: "{" + ", ".join(f"{name} = {item}" for name, item in table.items()) + "}"
        )
    ),
    max_leaves=4,
)
KEYS = ["stream", "tasks", "seeds", "seed", "name", "run", "strength", "method", *Plan.__dataclass_fields__]
TABLES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)


def written(table: dict[str, str]) -> str:
    return "".join(f"{key} = {item}\n" for key, item in table.items())


@settings(max_examples=300, deadline=None)
@given(TABLES, TABLES)
def test_any_values_make_runs_or_one_line(above: dict[str, str], own: dict[str, str]) -> None:
    text = written({"stream": '"digits"', **above}) + "[[run]]\n" + written({"method": '"ewc"', **own})
    try:
        runs = parse(text, "study.toml")
    except StudyError:
        assert re.match(r"study\.toml(:\d+)?: ", message(text))
    else:
        assert runs
        assert all(Run.of(run.stream, run.plan, run.tasks, run.name) == run for run in runs)


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("[]{}run=\"e.,# \n\r\t1-\\'\ufeff\u2028")))
def test_any_text_makes_runs_or_one_line(text: str) -> None:
    message(text)


# ---- the command line ----


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("3", 3), ("-3", -3), ("1e-3", 1e-3), ("0.5", 0.5), ("true", True), ("false", False), ('"x"', "x"),
        ('"3"', "3"), ("'loss'", "loss"), ("loss", "loss"), ("", ""), ("True", "True"), ("1 2", "1 2"),
        ("[1]", "[1]"), ("{x = 1}", "{x = 1}"), ("1979-05-27", "1979-05-27"), ("1\nx = 2", "1\nx = 2"),
        (400 * "1", 400 * "1"), (5000 * "1", 5000 * "1"), (5000 * "[", 5000 * "["), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_values(text: str, meant: Any) -> None:
    found = value(text)
    assert (type(found), found) == (type(meant), meant)


@given(st.text())
def test_any_text_is_a_value(text: str) -> None:
    assert isinstance(value(text), bool | int | float | str)


def test_settings_of_the_command_line() -> None:
    assert setting("rate=1e-3") == ("rate", 1e-3)
    assert setting(" form = loss ") == ("form", "loss")
    assert setting("npc.beta=0.7") == ("npc.beta", 0.7)
    assert setting("labels=a=b") == ("labels", "a=b")
    for wrong in ("rate", "=3", "rate=", "", "a b=3", "1e-3", "npc.=3", ".beta=3"):
        with pytest.raises(StudyError, match=re.escape(f"name=value, as in rate=1e-3; got {wrong!r}")):
            setting(wrong)


# ---- settings of methods ----

SETTINGS = {
    "npc": {"beta": 0.5, "rate": 1e-3, "gain": 2},
    "dpc": {"beta": 0.5, "kappa": 10, "rate": 1e-3, "gain": 2, "samples": 5, "rank": 3, "every": 7, "sides": "inputs"},
    "cpc": {"beta": 0.5, "rate": 1e-3, "gain": 2, "normalize": "model"},
    "ewc": {"strength": 3, "labels": "exact", "samples": 5, "form": "loss"},
    "kfac": {"strength": 3, "samples": 5},
    "mas": {"strength": 3, "samples": 5, "form": "loss"},
    "si": {"strength": 3, "xi": 0.1, "form": "loss"},
    "ssl": {"sparsity": 0.1, "strength": 3, "samples": 5, "form": "loss"},
    "compact": {"weight": 3, "samples": 5},
    "lwf": {"weight": 3, "temperature": 4},
    "finetune": {},
    "joint": {},
    "separate": {},
}


@pytest.mark.parametrize("method", SETTINGS)
def test_a_method_has_these_settings_and_no_others(method: str) -> None:
    check_settings(method, SETTINGS[method])
    there_are = ", ".join(SETTINGS[method]) or "none"
    for name in ("nothing", "free", "example", "observe", "criterion", "model", "optimizer"):
        with pytest.raises(StudyError, match=f"^{method} has no setting '{name}'; it has {there_are}(:.*|)$"):
            check_settings(method, {name: 1})


def test_the_method_itself_refuses_a_value() -> None:
    for given_, expected in (
        ({"rate": 2}, "rate must be above 0 and at most 1, got 2"),
        ({"rate": "quick"}, "rate must be a number, got 'quick'"),
        ({"beta": 1, "gain": 0}, "gain must be above 0, got 0"),
        ({"gain": 10**400}, "int too large to convert to float"),
    ):
        with pytest.raises(StudyError, match=f"^{expected}$"):
            check_settings("npc", given_)
    with pytest.raises(StudyError, match=r"^unknown method 'ncp'; available: npc"):
        check_settings("ncp", {})


def test_a_method_without_types_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Anchored):
        def __init__(self, model, optimizer, *, strength=0.01):  # type: ignore[no-untyped-def]
            super().__init__(model, optimizer, strength=strength, form="loss")

        def _measure(self, batches: Any, active: Any) -> Any:
            raise AssertionError

    added: type[Method] = Plain
    monkeypatch.setitem(METHODS, "plain", added)
    check_settings("plain", {"strength": 2})
    with pytest.raises(StudyError, match=r"^plain has no setting 'strengt'; it has strength: did you mean strength"):
        check_settings("plain", {"strengt": 2})
