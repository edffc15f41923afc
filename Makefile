PYTHON ?= python3
BIN = .venv/bin
PEERS = bench/peers

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

# Three at once, also on two cores: many tests wait for a time-out to pass. Neighbours
# stay together, for they share a database or a browser.
test: venv
	$(BIN)/pytest --numprocesses 3 --dist worksteal --cov

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: venv $(PEERS)/.venv/installed
	$(BIN)/python -m bench $(BENCH)

# What it is measured against. npm compiles better-sqlite3.
$(PEERS)/.venv/installed: $(PEERS)/requirements.txt $(PEERS)/package-lock.json
	$(PYTHON) -m venv $(PEERS)/.venv
	$(PEERS)/.venv/bin/pip install --quiet --disable-pip-version-check \
		-r $(PEERS)/requirements.txt
	npm ci --prefix $(PEERS) --no-audit --no-fund --loglevel error
	touch $@

bench-scale bench-hostile: bench-%: venv
	$(BIN)/python -m bench.$* $(BENCH)

.PHONY: all venv run test lint bench bench-scale bench-hostile
