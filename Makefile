# One command for each thing that people do here. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup vision demo test test-tools lint guard-table test-cluster bench-startup bench-launch bench-overhead bench-checkpoint bench-guard clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv with instep in it, editable, and all that its tests need

# Done once, and again when the dependencies change.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

vision: $(VENV)-vision/.installed ## make .venv-vision: torchvision and a newer torch, for the recipes that train on images; other trainers

$(VENV)-vision/.installed: pyproject.toml Makefile
	test -x $(VENV)-vision/bin/python || $(PYTHON) -m venv $(VENV)-vision
	$(VENV)-vision/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[recipes,vision]' \
		torch==2.14.1 torchvision==0.29.1 accelerate lightning
	@touch $@

demo: setup ## train a small ResNet on real images, on two ranks of this machine
	$(BIN)/instep run --nproc 2 recipes/digits.py

test: ## lint, then all tests (what cannot run on this machine is skipped, and says why)
	$(MAKE) --jobs=3 --output-sync=target lint test-tools vision
	scripts/run-tests $(BIN)/python $(PYTEST_ARGS)

test-cluster: test-tools ## of the tests those on real machines: they make a practice cluster, and end with the table of faults
	$(BIN)/python -m pytest tests/sandbox tests/cluster $(PYTEST_ARGS)

test-tools: setup ## install the real launchers that the tests start: Slurm, Open MPI, MPICH
	scripts/install-test-tools $(BIN)/python

lint: setup ## ruff, mypy --strict, and the floors of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

guard-table: setup vision ## run all programs that fall out of step, and those that do not: is the rank right, is the line right?
	$(BIN)/python -m tests.guard.table

bench-startup: setup ## how long a job takes that only joins and leaves, beside torchrun
	$(BIN)/python benchmarks/startup.py

bench-launch: setup ## the same on three machines over ssh, beside torchrun typed on each (root; makes a practice cluster)
	$(BIN)/python benchmarks/launch.py

bench-checkpoint: setup ## how long a checkpoint holds the training thread, beside torch.save
	$(BIN)/python benchmarks/checkpoint.py

bench-guard: setup ## what it costs to be watched: a step with 50 collectives, recorded and not
	$(BIN)/python benchmarks/guard.py

bench-overhead: $(VENV)-peers/.installed ## what a step costs beside a hand-written loop, ignite, Accelerate and Lightning
	$(VENV)-peers/bin/python benchmarks/overhead.py

# Other trainers, to be measured beside: an environment of their own.
$(VENV)-peers/.installed: pyproject.toml
	test -x $(VENV)-peers/bin/python || $(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python -m pip install --quiet --disable-pip-version-check --editable . \
		torch==2.13.0 numpy accelerate lightning pytorch-ignite
	@touch $@

clean: ## remove what these commands have made, but not runs/
	rm -rf $(VENV) $(VENV)-vision $(VENV)-peers build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
