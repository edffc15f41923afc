PYTHON ?= python3
BIN = .venv/bin

all: test lint

venv: .venv/installed

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

run: venv
	exec $(BIN)/gunicorn

test: venv
	$(BIN)/pytest --cov --cov-report=term

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: all venv run test lint
