PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test lint docs clean

help:
	@echo "make demo   demonstrate forgetting and its remedies in a minute"
	@echo "make test   lint, types and tests"
	@echo "make docs   build the documentation into site/"
	@echo "make clean  remove the virtual environment and all caches"

# One virtual environment; each set of extras is installed once, with the tested versions.
.venv/%.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$*]"
	@touch $@

demo: .venv/study.installed
	$(BIN)/holdfast demo

lint: .venv/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest --cov --cov-report=term

docs: .venv/docs.installed
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage site
