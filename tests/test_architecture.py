"""The structure of the package: imports point down, and the rules of CONTRIBUTING.md hold. Each rule can fail."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.methods import METHODS

ROOT = Path(__file__).parent.parent
architecture = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "architecture.py")))
MODULES: dict[str, ast.Module] = architecture.modules()
IMPORTS = architecture.imports(MODULES)

Rule = Callable[[ast.AST], Iterator[ast.AST]]
"""Finds the nodes of a module that break a rule."""


# ---- imports ----


def test_imports_point_down() -> None:
    assert architecture.upward(IMPORTS) == []


def test_there_is_no_cycle() -> None:
    assert architecture.cycle(IMPORTS) == []


@pytest.mark.parametrize(
    ("importer", "imported", "immediate", "allowed"),
    [
        ("runs.training", "methods.building", True, True),
        ("methods.npc", "methods.plastic", True, True),
        ("runs.training", "gpu.graphs", False, True),
        ("gpu.fused", "taps", True, True),
        ("__main__", "cli", True, True),
        ("methods.npc", "runs.training", True, False),
        ("methods.npc", "runs.training", False, False),
        ("methods.npc", "streams", True, False),
        ("runs.training", "__init__", True, False),
        ("runs.training", "gpu.graphs", True, False),
        ("methods.npc", "gpu.fused", False, False),
        ("taps.hooks", "gpu.fused", False, False),
        ("neurons.layers", "gpu.fused", False, False),
    ],
)
def test_an_import_is_allowed_or_refused(importer: str, imported: str, immediate: bool, allowed: bool) -> None:
    each = architecture.Import(importer, imported, immediate)
    assert architecture.upward([each]) == ([] if allowed else [each])


def test_a_cycle_is_found() -> None:
    Import = architecture.Import  # noqa: N806
    circle = [Import("runs.a", "runs.b"), Import("runs.b", "runs.c"), Import("runs.c", "runs.a")]
    assert set(architecture.cycle([*circle, Import("runs.c", "errors")])) == {"runs.a", "runs.b", "runs.c"}
    assert architecture.cycle([*circle[:2], Import("runs.c", "runs.a", immediate=False)]) == []


def test_imports_are_read_from_the_source() -> None:
    tree = ast.parse(
        "import torch\n"
        "from holdfast import atomic\n"
        "from holdfast.study.page import write\n"
        "from holdfast import __version__\n"
        "if TYPE_CHECKING:\n    from holdfast.cli import app\n"
        "class C:\n    import holdfast.errors\n"
        "    def f(self):\n        from holdfast.gpu import fuse_modules\n"
    )
    parsed = dict.fromkeys(MODULES, ast.parse("")) | {"runs.new": tree}
    assert architecture.imports(parsed) == [
        ("runs.new", "atomic", True),
        ("runs.new", "study.page", True),
        ("runs.new", "__init__", True),
        ("runs.new", "errors", True),
        ("runs.new", "gpu", False),
    ]
    assert architecture.imports({"runs.new": ast.parse("import holdfast.gpu.graphs")}) == [("runs.new", "gpu", True)]
    with pytest.raises(ValueError, match="line 1: relative import; use the full name"):
        architecture.imports({"runs.new": ast.parse("from . import plan")})


def test_a_new_package_needs_a_level() -> None:
    with pytest.raises(ValueError, match="extras has no level: add it to LEVELS"):
        architecture.upward([architecture.Import("extras.more", "errors")])


def test_the_examples_of_the_script() -> None:
    subprocess.run([sys.executable, "-m", "doctest", str(ROOT / "scripts" / "architecture.py")], check=True)


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, holdfast.runs.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the drawing ----


@pytest.mark.skipif(
    not set(architecture.LEAVES) <= MODULES.keys(), reason="the drawing shows a package that is deleted here"
)
def test_the_drawing_is_up_to_date() -> None:
    text = architecture.DOCUMENT.read_text("utf-8")
    assert text.count(architecture.BEGIN) == text.count(architecture.END) == 1
    assert architecture.updated(text) == text, "run python scripts/architecture.py --write"


def test_the_drawing_follows_the_imports() -> None:
    """An edge that follows from others is left out, and so are imports within a package."""
    pairs = [
        ("runs.a", "runs.b"),
        ("runs.a", "methods"),
        ("methods.b", "taps"),
        ("runs.b", "taps"),
        ("__main__", "cli"),
    ]
    assert architecture.edges([architecture.Import(*pair) for pair in pairs]) == [
        ("runs", "methods"),
        ("methods", "taps"),
    ]
    text = f"before\n{architecture.BEGIN}\nan old drawing\n{architecture.END}\nafter\n"
    assert (
        architecture.updated(text)
        == f"before\n{architecture.BEGIN}\n{architecture.drawing()}\n{architecture.END}\nafter\n"
    )


def test_the_lines_of_the_document_are_short() -> None:
    assert [
        line for line in architecture.DOCUMENT.read_text("utf-8").splitlines() if len(line) > architecture.WIDTH
    ] == []


# ---- rules about methods and hooks ----


def method_classes() -> set[str]:
    """The names of all classes derived from `Method`, directly or not."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for name, tree in MODULES.items()
        if architecture.package_of(name) == "methods"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    while new := {name for name, its in bases.items() if its & (found | {"Method"})} - found:
        found |= new
    return found


METHOD_CLASSES = method_classes()


def registers_hooks(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if re.fullmatch(r"register_\w*hook\w*", name):
            yield node
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and "_hooks'" in ast.dump(node.value):
            yield node


def asks_for_a_method(tree: ast.AST) -> Iterator[ast.AST]:
    """Tests by `isinstance`, `issubclass`, `is`, `==`, `in` or `match` for a particular method, by class or name."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        values: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            asked = node.args[1:] if node.func.id in ("isinstance", "issubclass") else []
        elif isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
            values = [item for each in asked for item in _items(each)]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.MatchValue):
            values = [node.value]
        names = {value.value for value in values if isinstance(value, ast.Constant)}
        if names & set(METHODS) or any(_is_method_class(inner) for each in asked for inner in ast.walk(each)):
            yield node


def _items(node: ast.AST) -> list[ast.AST]:
    """The items of a tuple, list or set that is written out; otherwise the node itself."""
    return [*node.elts] if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]


def _is_method_class(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    looked_up = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    return name in METHOD_CLASSES or (looked_up and "METHODS" in ast.dump(node.value))


def reads_private_attributes(tree: ast.AST) -> Iterator[ast.AST]:
    """Attributes such as `method._taps` or `self.method._taps`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name == "method":
                yield node


@pytest.mark.parametrize(
    ("rule", "owner"),
    [(registers_hooks, "taps"), (asks_for_a_method, "methods"), (reads_private_attributes, "methods")],
)
def test_a_rule_holds_outside_one_package(rule: Rule, owner: str) -> None:
    broken = [
        f"{name}: {ast.unparse(node)}"
        for name, tree in MODULES.items()
        if architecture.package_of(name) != owner
        for node in rule(tree)
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (registers_hooks, "module.register_forward_hook(tap)"),
        (registers_hooks, "parameter.register_post_accumulate_grad_hook(tap)"),
        (registers_hooks, "add = module.register_full_backward_pre_hook"),
        (registers_hooks, "register_module_forward_hook(tap)"),
        (registers_hooks, "module._forward_hooks[0] = tap"),
        (asks_for_a_method, "isinstance(method, NPC)"),
        (asks_for_a_method, "isinstance(method, (Method, holdfast.Joint))"),
        (asks_for_a_method, "issubclass(kind, Plastic)"),
        (asks_for_a_method, "type(method) is LwF"),
        (asks_for_a_method, "kind is not Separate"),
        (asks_for_a_method, "kind is METHODS['npc']"),
        (asks_for_a_method, "kind in (EWC, MAS)"),
        (asks_for_a_method, "match method:\n    case SSL(): pass"),
        (asks_for_a_method, "name == 'npc'"),
        (asks_for_a_method, "plan.method not in ('npc', 'dpc')"),
        (asks_for_a_method, "match name:\n    case 'lwf': pass"),
        (reads_private_attributes, "method._taps"),
        (reads_private_attributes, "self.method._layers[0].name"),
        (reads_private_attributes, "run.method._close()"),
    ],
)
def test_a_rule_can_fail(rule: Rule, code: str) -> None:
    assert len(list(rule(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "taps.on_output(module, tap)",
        "any(module._forward_hooks.values())",
        "isinstance(method, Method)",
        "kind = METHODS[name]",
        "name in BOUNDS",
        "settings['npc'] == known",
        "NPC(model, optimizer)",
        "method.importance",
        "self._method",
        "method.__class__.__name__",
    ],
)
def test_no_rule_is_too_strict(code: str) -> None:
    rules = registers_hooks, asks_for_a_method, reads_private_attributes
    assert [node for rule in rules for node in rule(ast.parse(code))] == []


def test_the_method_classes_are_found() -> None:
    assert {"NPC", "CPC", "Plastic", "Anchored", "EWC", "LwF", "Joint", "Separate", "FineTune"} <= METHOD_CLASSES
    assert "Method" not in METHOD_CLASSES
