PYTHON ?= python3
BIN = .venv/bin
# Every program runs as a module: the scripts in .venv/bin name the directory where the
# environment was made, and fail after the checkout was moved.
RUN = $(BIN)/python -m
INSTALL = $(RUN) pip install --quiet --disable-pip-version-check
PEERS = bench/peers

# Four processes, also on two cores, because many tests wait for a timeout. worksteal keeps
# the tests of a module together, because they share a database or a browser.
TEST = $(RUN) pytest --numprocesses 4 --dist worksteal

# Where the environment forbids to write bytecode, every server, command and process of
# pytest would compile all that it imports, again and again. Empty means not set.
export PYTHONDONTWRITEBYTECODE =

# gunicorn would listen on all addresses at this port. That is for the container.
unexport PORT

all: test lint

run: .venv/run
	exec $(RUN) gunicorn

test: .venv/test
	$(TEST)

# Prints the branches that no test takes. Servers and commands are traced too, so this
# takes twice as long as make test.
coverage: .venv/test
	$(TEST) --cov

# Tries every state that a crash may leave; make test tries a sample.
crash: .venv/test
	CRASH_STATES=all $(RUN) pytest --numprocesses 3 tests/store/test_crash_states.py

lint: .venv/test
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

venv: .venv/run

# The check runs under any Python. --clear removes the packages of earlier versions and
# of other Pythons.
.venv/run: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; \
	v = sys.version_info[:2]; \
	v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is %d.%d" % v); \
	sys.platform == "linux" or sys.exit("Linux is needed, this is " + sys.platform)'
	@echo 'Installing the packages into .venv, once. It may take a minute or two.'
	$(PYTHON) -m venv --clear .venv
	$(INSTALL) -r requirements.txt
	touch $@

.venv/test: .venv/run requirements-test.txt
	@echo 'Installing the packages of the tests, once. It may take a minute or two.'
	$(INSTALL) -r requirements-test.txt
	touch $@

# Pins the newest versions of what the requirements need in turn, for every supported
# Python: `pip freeze` would name versions that only the current Python can install.
constraints: .venv/test
	$(INSTALL) uv
	: > constraints.txt
	$(RUN) uv pip compile --quiet --universal --python-version 3.11 \
		--custom-compile-command 'make constraints' \
		--output-file constraints.txt requirements-test.txt

bench: .venv/test $(PEERS)/.venv/installed
	$(RUN) bench $(BENCH)

# The servers that make bench compares with. npm compiles better-sqlite3.
$(PEERS)/.venv/installed: $(PEERS)/requirements.txt $(PEERS)/package-lock.json
	$(PYTHON) -m venv $(PEERS)/.venv
	$(PEERS)/.venv/bin/pip install --quiet --disable-pip-version-check \
		-r $(PEERS)/requirements.txt
	npm ci --prefix $(PEERS) --no-audit --no-fund --loglevel error
	touch $@

bench-scale bench-hostile: bench-%: .venv/test
	$(RUN) bench.$* $(BENCH)

.PHONY: all run test coverage crash lint venv constraints bench bench-scale bench-hostile
