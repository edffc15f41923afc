PYTHON ?= python3
BIN = .venv/bin

all: test lint

venv: .venv/installed

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# One worker: without a token configured each would make its own.
SERVER = gunicorn
gunicorn = gunicorn
granian = granian --interface wsgi --blocking-threads 300 --workers-kill-timeout 30 app:app

run: venv
	exec $(BIN)/$($(SERVER))

test: venv
	$(BIN)/pytest --numprocesses auto --cov

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m bench.throughput
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.hostile

.PHONY: all venv run test lint bench
