PYTHON ?= python3
BIN = .venv/bin
# Every program runs as a module: the scripts in .venv/bin name the directory where the
# environment was made, and fail after the checkout was moved.
RUN = $(BIN)/python -m
PEERS = bench/peers

# Of the command line alone: in an environment these may be of another program.
TEST =
BENCH =

# If the environment forbids to write bytecode, every server, command and process of
# pytest compiles its imports again. An empty value means that the variable is not set.
export PYTHONDONTWRITEBYTECODE =

NO_PYTHON = $(PYTHON) was not found: install Python 3.11 or newer with pip and venv, or \
	name one with "make PYTHON=/path/to/python".
BROKEN = .venv does not work: its Python is gone or of another version, or packages are \
	missing. Remove it with "rm -r .venv", then repeat the command.

# With PORT in its environment gunicorn would listen on all addresses.
unexport PORT

# gunicorn takes an empty value for a number of workers, and ends with a traceback.
ifeq ($(strip $(WEB_CONCURRENCY)),)
unexport WEB_CONCURRENCY
endif

all: test lint

run: .venv/run .venv/works
	exec $(RUN) gunicorn $(if $(PORT),--bind '127.0.0.1:$(PORT)')

# Four processes, also on two cores, because many tests wait for a timeout. worksteal keeps
# the tests of a module together, because they share a database or a browser.
test: .venv/test
	$(RUN) pytest --numprocesses 4 --dist worksteal $(TEST)

# Prints the branches that no test takes. Servers and commands are traced too, so this
# takes twice as long as make test.
coverage: TEST = --cov
coverage: test

# Tries many states that a crash may leave, and an error at every event of a use; make
# test tries a few.
crash: .venv/test
	CRASH_STATES=15000 $(RUN) pytest --numprocesses 3 \
		tests/store/test_crash_states.py tests/store/test_sweep.py

lint: .venv/test
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) mypy --platform darwin --cache-dir .mypy_cache/darwin

# The check runs under any Python. On macOS gevent has no wheel for 3.11.
.venv/run: requirements.txt constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo '$(NO_PYTHON)' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; \
	v, mac = sys.version_info[:2], sys.platform == "darwin"; \
	mac or sys.platform[:5] == "linux" or \
	sys.exit("Linux or macOS is needed, this is " + sys.platform); \
	v >= (3, 11 + mac) or sys.exit("Python 3.%d or newer is needed%s, this is %d.%d" \
	% ((11 + mac, " on macOS" if mac else "") + v))'
	@$(PYTHON) .ci/install.py $@ requirements.txt constraints.txt

.venv/test: .venv/run requirements-test.txt | .venv/works
	@$(BIN)/python .ci/install.py $@ requirements-test.txt .venv/run

# This file is never made, so the check runs each time.
.venv/works: .venv/run
	@$(BIN)/python -c 'import gunicorn' 2>/dev/null || { echo '$(BROKEN)' >&2; exit 1; }

# Pins the newest versions of all packages that are needed, for every supported
# Python: `pip freeze` would name versions that only the current Python can install.
constraints: .venv/test
	$(RUN) pip install --quiet --disable-pip-version-check uv
	: > constraints.txt
	$(RUN) uv pip compile --quiet --universal --python-version 3.11 \
		--custom-compile-command 'make constraints' \
		--output-file constraints.txt requirements-test.txt

bench: .venv/test $(PEERS)/.venv/installed
	$(RUN) bench $(BENCH)

bench-paired bench-scale bench-hostile: bench-%: .venv/test
	$(RUN) bench.$* $(BENCH)

# The servers that make bench compares with. npm compiles better-sqlite3.
$(PEERS)/.venv/installed: $(PEERS)/requirements.txt $(PEERS)/package-lock.json
	$(PYTHON) .ci/install.py $(PEERS)/.venv/python $(PEERS)/requirements.txt
	npm ci --prefix $(PEERS) --no-audit --no-fund --loglevel error
	touch $@

.PHONY: all run test coverage crash lint constraints bench \
	bench-paired bench-scale bench-hostile
