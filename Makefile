# Verbs of the project. What a target needs, the target starts and installs; nothing is skipped for lack of a server.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
PYTHON ?= python3
# Whatever the machine's environment says, bytecode is kept, outside the checkout: tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(or $(OUTBOX_CACHE),$(HOME)/.cache/outbox-operator)/bytecode

help: ## Show the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

init: ## Install the Python environment from the lock
	@tests/tools/cluster/setup.sh python

lint: init ## Format, lint, types and import rules
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	$(PY) -m yamllint -s crds charts/outbox-operator/values.yaml examples

check: lint ## Lint, and the unit tests (no server), shuffled
	$(PY) -m pytest -q tests/unit tests/property -p no:cacheprovider

format: init ## Rewrite the sources in the project's format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

crds: init ## Generate crds/, the chart's copy and its admission policies from the operator's models and rules
	$(PY) -m outbox_operator.crd

lock: ## Recompute the locked requirements (hashes, no addresses)
	tests/tools/cluster/lock.sh

model: ## Model-check the checkpoint and epoch protocol (docs/model); larger than make test does
	@tests/tools/cluster/setup.sh python model
	@$(PY) -m tests.model

chaos: ## Faults by a seed, and a ledger at the end (SEED=n SECONDS=1800 CASE=name,name)
	@tests/tools/chaos/run.sh $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(CASE),--case '$(CASE)') $(if $(SABOTAGE),--sabotage $(SABOTAGE))

scale: ## Measure what the operator costs with many resources (SUSPENDED=2000 RUNNING=300 SECONDS=300 FORCE=1)
	@tests/tools/cluster/setup.sh python cluster
	@$(PY) -m tests.tools.load.scale $(if $(SUSPENDED),--suspended $(SUSPENDED)) $(if $(RUNNING),--running $(RUNNING)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(FORCE),--force)

bench: ## Measure the worker beside its peers on the same rows (CASE=name,name SECONDS=10 RUNS=5 FORCE=1 TO=folder); docs/performance
	@tests/tools/cluster/setup.sh python postgres rabbitmq kafka spark bench
	@$(PY) -m tests.tools.bench $(if $(CASE),--case '$(CASE)') $(if $(SECONDS),--seconds $(SECONDS)) $(if $(RUNS),--runs $(RUNS)) $(if $(FORCE),--force) $(if $(TO),--to '$(TO)')

mutants: ## Plant known faults into a copy, and see the tests catch them (ONLY='word,word')
	@tests/tools/cluster/setup.sh python postgres rabbitmq kafka spark cluster
	@$(PY) -m tests.tools.mutants $(if $(ONLY),--only '$(ONLY)')

follow: ## Count what one batch costs in calls of our own functions, in each mode
	@tests/tools/cluster/setup.sh python postgres
	@$(PY) -m tests.tools.follow_batch

up: ## Start the local cluster
	@tests/tools/cluster/setup.sh python cluster images
	@tests/tools/cluster/up.sh

images: ## Build the images and load them into the local cluster (make up)
	@tests/tools/cluster/images.sh

push: ## Build the images and push them to a registry of yours: make push TO=registry.mycompany.net/outbox (TAG=dev)
	@tests/tools/cluster/images.sh --push '$(TO)' $(TAG)

try: ## Watch processors work on an embedded PostgreSQL, with a ledger at the end (ARGS='--seconds 30')
	@$(PYTHON) -S worker/try.py $(ARGS)

demo: ## Run the main job on a local cluster, with a ledger at the end
	@tests/tools/demo/run.sh

down: ## Remove everything that up, demo and test started
	@tests/tools/cluster/down.sh

test: ## Test every promise (sets up what that needs)
	@tests/run.sh

test-all: ## Before a release: every test, on every version of PostgreSQL; the longer chaos, sabotage, the large models, upgrades
	@tests/run.sh --nightly

.PHONY: help init lint check format crds lock model chaos scale bench mutants follow up images push try demo down test test-all
