# make demo   a real 2-rank fine-tune as a Prefect flow        make demo PRESET=zero3
# make test   the test suite                                   make check   lint, types, fast tests
# make test-engines   one contract for the engines, with a real Slurm (apt-get install slurm-wlm munge; root) and Ray ([ray])
# make bench  measure throughput, start-up, memory, scale again: hours (docs/benchmarks.md)
# make fuzz      thirty times the random inputs of `make check`, new ones   make mutation   changed code that no test notices
# make coverage  what the fast tests run of the core, with a floor
# make test-long   what `make test` leaves out: drills with a server, kills and resumes under every strategy, all methods
PYTHON ?= python3
VENV ?= .venv
PRESET ?= zero2
BIN := $(VENV)/bin

# The default of 20 s is too short on a loaded machine for Prefect's own server to start.
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 300
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-long test-engines bench check coverage fuzz mutation lint types docs clean

demo: $(VENV)/installed
	$(BIN)/soup-flows demo $(PRESET)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not long" -n 2 --dist loadfile $(ARGS)

test-long: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m long --ignore=tests/engines $(ARGS)

test-engines: $(VENV)/installed-ray
	$(BIN)/python -m pytest tests/engines $(ARGS)

bench: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks $(ARGS)

check: lint types
	$(BIN)/python -m pytest -m "not ranks and not server" -q -n 2 $(ARGS)

coverage: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not ranks and not server and not long" -q -n 2 --cov $(ARGS)

fuzz: $(VENV)/installed-dev
	SOUP_FLOWS_FUZZ=30 $(BIN)/python -m pytest tests/fuzz -q -n 2 $(ARGS)

mutation: $(VENV)/installed-dev
	$(BIN)/python -m tests.mutation $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini -p tests -p benchmarks

# torch comes first, so that the pinned build is there before anything asks for another. pip compiles one file after
# another, every one of them; this compiles on all cores what the demo imports.
SELDOM := /(transformers/models|torch/testing|torch/_inductor|torch/_dynamo|tests?|inference|sympy|pandas|pip|setuptools)/
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/pip install -q --no-compile -c constraints.txt -e ".[train]"
	$(BIN)/python -m compileall -q -j 0 -x '$(SELDOM)' $(VENV)/lib || true
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install -q --no-compile -c constraints.txt -r requirements-dev.txt
	touch $@

$(VENV)/installed-ray: $(VENV)/installed-dev
	$(BIN)/pip install -q --no-compile -c constraints.txt -e ".[ray]"
	touch $@

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

$(VENV)/installed-docs: $(VENV)/installed requirements-docs.txt
	$(BIN)/pip install -q --no-compile -r requirements-docs.txt
	touch $@

clean:
	rm -rf $(VENV) demo-output dist build
