"""Draws the structure of the package: who imports whom, and the contents of each module.

    python scripts/architecture.py          # print the drawing
    python scripts/architecture.py --write  # update the drawing in CONTRIBUTING.md

The tests compare CONTRIBUTING.md with this drawing. They also refuse imports that point up, and cycles.
"""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "holdfast"
DOCUMENT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- architecture: begin -->", "<!-- architecture: end -->"
WIDTH = 120
"""The length of a line in CONTRIBUTING.md."""

LEVELS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("study",),
    ("runs",),
    ("forgetting", "methods", "models", "streams", "gpu"),
    ("taps",),
    ("neurons", "samples"),
    ("importance", "plasticity", "directions"),
    ("atomic", "compiling", "errors", "registry", "text", "version"),
)
"""Packages and single modules, from top to bottom. A package imports only from lower levels, and from itself."""
ENTRIES = ("__init__", "__main__")
"""Modules that may import from every level. No module imports them."""
LEAVES = ("gpu",)
"""Packages that may be deleted. They are imported inside functions only."""


class Import(NamedTuple):
    """An import of one module of Holdfast by another. It is immediate if it is executed at module level."""

    importer: str
    imported: str
    immediate: bool = True


# ---- imports ----


def modules() -> dict[str, ast.Module]:
    """Parse all modules. Names are dotted and relative to the package."""
    names = {
        path: path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".") for path in SOURCE.rglob("*.py")
    }
    parsed = {name.removesuffix(".__init__"): ast.parse(path.read_text("utf-8")) for path, name in names.items()}
    return dict(sorted(parsed.items(), key=lambda item: (_level(item[0]), item[0])))


def imports(parsed: dict[str, ast.Module]) -> list[Import]:
    """Find all imports of one module by another, except those for type checkers."""
    found = [
        Import(name, _module(target, parsed), immediate)
        for name, tree in parsed.items()
        for target, immediate in targets(tree)
        if target.partition(".")[0] == "holdfast"
    ]
    return [each for each in found if each.importer != each.imported]


def targets(node: ast.AST, immediate: bool = True) -> Iterator[tuple[str, bool]]:
    r"""Yield the full name of each import below a node, and whether it is executed at module level.

    >>> list(targets(ast.parse("import a.b\ndef f(): from c import d")))
    [('a.b', True), ('c.d', False)]
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, immediate) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            if child.level:
                raise ValueError(f"line {child.lineno}: relative import; use the full name")
            yield from ((f"{child.module}.{alias.name}", immediate) for alias in child.names)
        else:
            yield from targets(child, immediate and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _module(target: str, parsed: Iterable[str]) -> str:
    """Find the module that defines an imported name: the longest prefix that is a module. A leaf may be deleted."""
    parts = target.split(".")[1:]
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in prefixes if name in parsed or name in LEAVES), "__init__")


# ---- rules ----


def package_of(module: str) -> str:
    return module.partition(".")[0]


def _level(module: str) -> int:
    package = package_of(module)
    if package in ENTRIES:
        return -1
    for number, packages in enumerate(LEVELS):
        if package in packages:
            return number
    raise ValueError(f"{package} has no level: add it to LEVELS in scripts/architecture.py")


def upward(found: Iterable[Import]) -> list[Import]:
    """Find the imports that break a rule: up, to the side, or from a leaf at module level."""
    return [each for each in found if package_of(each.importer) != package_of(each.imported) and not _is_allowed(each)]


def _is_allowed(each: Import) -> bool:
    from_leaf = package_of(each.imported) in LEAVES
    return _level(each.importer) < _level(each.imported) and not (from_leaf and each.immediate)


def cycle(found: Iterable[Import]) -> list[str]:
    """Find modules that import each other in a circle at module level."""
    graph: dict[str, set[str]] = {}
    for each in found:
        if each.immediate:
            graph.setdefault(each.importer, set()).add(each.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


# ---- the drawing ----


def drawing() -> str:
    """Draw the packages as a diagram and the modules as a table, in Markdown."""
    parsed = modules()
    arrows = [f"    {a} {'-.->' if b in LEAVES else '-->'} {b}" for a, b in edges(imports(parsed))]
    rows = [row(name, tree) for name, tree in parsed.items()]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", "", "| module | contents |", "|---|---|", *rows])


def edges(found: Iterable[Import]) -> list[tuple[str, str]]:
    """List which package imports which, from top to bottom, without the edges that follow from others."""
    below: dict[str, set[str]] = {}
    for each in found:
        a, b = package_of(each.importer), package_of(each.imported)
        if a != b and not {a, b} & set(ENTRIES):
            below.setdefault(a, set()).add(b)

    def reach(package: str) -> set[str]:
        direct = below.get(package, set())
        return direct.union(*map(reach, direct))

    kept = [(a, b) for a, direct in below.items() for b in direct if not any(b in reach(c) for c in direct)]
    return sorted(kept, key=lambda edge: (_level(edge[0]), _level(edge[1]), edge))


def row(name: str, tree: ast.Module) -> str:
    """Return a row of the table: the first sentence of the docstring, cut at a colon or comma if the row is long.

    >>> row("study.page", ast.parse('"The page of a study: one file. It needs no other."'))
    '| `study.page` | The page of a study: one file |'
    """
    contents = re.split(r"\.(?:\s|$)", ast.get_docstring(tree) or "", maxsplit=1)[0].replace("\n", " ")
    for mark in (": ", ", "):
        if len(f"| `{name}` | {contents} |") > WIDTH:
            contents = contents.partition(mark)[0]
    return f"| `{name}` | {contents} |"


def updated(text: str) -> str:
    """Replace the drawing in a document by the present one."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{drawing()}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the drawing in CONTRIBUTING.md")
    if parser.parse_args().write:
        DOCUMENT.write_text(updated(DOCUMENT.read_text("utf-8")), "utf-8")
    else:
        print(drawing())


if __name__ == "__main__":
    main()
