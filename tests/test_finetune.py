"""The fine-tuning experiment: its stored numbers, and the page that shows them."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "results" / "finetune.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the results are not part of what is here")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "finetune" / "runs.json").read_text())
    return found


@pytest.mark.parametrize("key", ["turned", "upright"])
def test_the_page_has_the_table_of_the_runs(script: dict[str, Any], stored: dict[str, Any], key: str) -> None:
    assert script["table"](stored[key]) in (ROOT / "docs" / "finetune.md").read_text()


@pytest.mark.parametrize(("key", "group"), [("turned", "CONTENDERS"), ("upright", "UPRIGHT")])
def test_the_settings_are_the_best_of_the_search(
    script: dict[str, Any], stored: dict[str, Any], key: str, group: str
) -> None:
    contenders = script[group]
    assert [run["name"] for run in stored[key]] == list(contenders)
    for run in stored[key]:
        assert len(run["test"]) == len(script["TESTED"])
        assert [each["settings"] for each in run["search"]] == list(contenders[run["name"]].settings())
        best = max(run["search"], key=lambda each: each["old"] + each["new"])
        assert run["settings"] == best["settings"]


@pytest.mark.parametrize("name", ["EWC, old images", "DPC, photographs"])
def test_a_short_run(script: dict[str, Any], name: str) -> None:
    contender = script["CONTENDERS"][name]
    names = type(contender).run.__globals__
    names["EPOCHS"] = 2
    old, new = contender.run(0, next(contender.settings()), "validation")
    assert 20 < old <= 100
    assert 20 < new <= 100
