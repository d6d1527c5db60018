# Two commands for users: `make simulate` and `make test`. Everything runs inside .venv.
PYTHON ?= python3
BIN := .venv/bin
DEVICE ?= cpu
# Tests start many processes, each of which would compile the package, and pytest all tests twice.
unexport PYTHONDONTWRITEBYTECODE
# Tests wait a third of the time, and slow ones longer: for deadlines, and processes that were killed.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() * 3 // 2)")
SLOW_WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() * 2)")
# Most modules are never imported, so none is compiled before it is.
INSTALL := -m pip install --quiet --no-compile

.PHONY: simulate attack federation docs docs-build test test-fast test-slow test-search test-mutants house lint format bench bench-rivals suite proto dist dist-check clean

simulate: .venv/installed
	$(BIN)/fedpriv simulate digits

# Thousands of short runs that try to refute what the ledger says of DIGITS; exit code 3 if one does.
attack: .venv/installed
	$(BIN)/python -m simulations.attack

# One server and three nodes on loopback, with certificates.
federation: .venv/installed
	$(BIN)/python -m simulations.federation

# The documentation on http://127.0.0.1:8000, built anew when a page is changed.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict --dev-addr 127.0.0.1:8000

# The same as files in build/site, with both notebooks executed; a warning is an error.
docs-build: .venv/installed-docs
	rm -rf build/notebooks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Side by side, as the type checker keeps one core busy for a minute.
test: .venv/installed-test
	$(MAKE) --no-print-directory --jobs 2 lint test-fast

test-fast: .venv/installed-test
	$(BIN)/pytest -m "not slow" --numprocesses $(WORKERS) --dist worksteal

test-slow: .venv/installed-test
	$(BIN)/pytest -m slow --numprocesses $(SLOW_WORKERS) --maxschedchunk 1

# What is said of all values, tried with others than `make test` does, and with more where a test sets no
# number.
test-search: .venv/installed-test
	$(BIN)/pytest -m hypothesis --hypothesis-profile search --numprocesses auto

# The guarantee broken in many ways, one at a time: tests must notice each.
test-mutants: .venv/installed-test
	$(BIN)/python -m tests.mutants

# How large the house is, and how large it may be.
house: .venv/installed-test
	$(BIN)/python -m tests.house

lint: .venv/installed-test house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed-test bench-rivals
	$(BIN)/python -m simulations.benchmarks.digits
	$(BIN)/python -m simulations.throughput
	$(BIN)/python -m simulations.overheads
	$(BIN)/python -m simulations.randomness
	$(BIN)/python -m simulations.accounting_speed
	$(BIN)/python -m simulations.federation_load
	$(BIN)/python -m simulations.hostile_load
	$(BIN)/python -m simulations.flower_overhead
	$(BIN)/python -m simulations.scale users cohorts rounds adaptive-rounds arms

# Beside pfl, Flower on Ray and Opacus, which are installed apart from all else; DEVICE=cuda: on a GPU.
bench-rivals: .venv-rivals/installed
	.venv-rivals/bin/python -m simulations.benchmarks.compare --device $(DEVICE)

# Tasks of the field with fedpriv and with pfl, on data in the folder FEDPRIV_DATA: hours on a CPU.
suite: .venv-rivals/installed
	.venv-rivals/bin/python -m simulations.suite

# The messages between server and nodes; a test compares what this makes with what is committed.
proto: .venv/installed-test
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. fedpriv/wire/federation.proto

# The wheel and the source archive, checked, with hashes of all that is pinned and an SBOM.
dist: .venv-dist/installed
	rm -rf dist
	.venv-dist/bin/python -m build --no-isolation
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/python -m tests.release dist

# The wheel in an empty environment, of any Python: make dist-check PYTHON=python3.13.
dist-check:
	rm -rf build/check
	$(PYTHON) -m venv build/check
	build/check/bin/python $(INSTALL) --upgrade --constraint constraints.txt pip
	build/check/bin/python $(INSTALL) --constraint constraints.txt dist/*.whl
	build/check/bin/python -m pip check
	build/check/bin/fedpriv simulate digits --out build/check/run
	build/check/bin/fedpriv ledger verify build/check/run

clean:
	rm -rf .venv .venv-dist .venv-rivals

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) --upgrade --constraint constraints.txt pip
	$(BIN)/python $(INSTALL) --constraint constraints.txt torch==2.13.0
	PYTHONWARNINGS="ignore:Editable" $(BIN)/python $(INSTALL) --constraint constraints.txt --editable .
	touch $@

.venv/installed-test: .venv/installed
	PYTHONWARNINGS="ignore:Editable" $(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[test]'
	touch $@

.venv/installed-docs: .venv/installed
	PYTHONWARNINGS="ignore:Editable" $(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[docs]'
	touch $@

RIVALS := --constraint simulations/benchmarks/constraints.txt
.venv-rivals/installed: pyproject.toml simulations/benchmarks/constraints.txt
	$(PYTHON) -m venv .venv-rivals
	.venv-rivals/bin/python $(INSTALL) --upgrade $(RIVALS) pip
	.venv-rivals/bin/python $(INSTALL) $(RIVALS) torch==2.13.0
	PYTHONWARNINGS="ignore:Editable" .venv-rivals/bin/python $(INSTALL) $(RIVALS) \
		--editable '.[flower]' 'pfl[pytorch]' opacus
	touch $@

.venv-dist/installed: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(INSTALL) --upgrade --constraint constraints.txt pip
	.venv-dist/bin/python $(INSTALL) --constraint constraints.txt build setuptools twine
	touch $@
