# The commands of this repository. PIP_* variables and PYTHON are honoured; TORCH_INDEX is an extra index for torch alone.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
PY := $(BIN)/python
INSTALL := $(PY) -m pip install --constraint constraints.txt

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all test-page test-ray test-clients gpu-check image-check lint style format mutants lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  ARGS='...'          more arguments for serve, test and gpu-check"
	@echo "  PYTHON=python3.12   the Python that makes .venv (3.11 to 3.13)"
	@echo "  TORCH_INDEX=URL     where else to look for torch, such as the index of its CPU builds"

# The lock keeps two makes apart. A stamp of another folder or Python, or one whose Python has gone, counts as none.
setup: ## make .venv, install the locked dependencies, compile kernels
	@exec 9< Makefile; if command -v flock > /dev/null; then flock 9; fi; \
	$(stamp_is_ours) || rm -f $(STAMP); \
	$(MAKE) --question $(STAMP) 2> /dev/null || $(MAKE) --no-print-directory $(STAMP)

stamp_is_ours = { grep -qsxF '$(CURDIR)' $(STAMP) \
	&& { [ '$(origin PYTHON)' = file ] || grep -qsxF '$(PYTHON)' $(STAMP); } && $(PY) -c ''; }

# Without a stamp everything is made anew: an interrupted pip can leave half a package that it takes for a whole one.
# torch goes first, so that no other package chooses its build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "$$CHECK_PYTHON"
	[ -f $@ ] || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $@
	$(INSTALL) --upgrade pip
	$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url '$(TORCH_INDEX)') torch
	$(INSTALL) --no-build-isolation --editable . --group dev
	$(PY) -m compileall -q aserve kernels
	$(PY) -m aserve kernels build
	@printf '%s\n' '$(CURDIR)' '$(PYTHON)' > $@

export define CHECK_PYTHON
import sys
v = sys.version_info
if not (3, 11) <= v[:2] <= (3, 13):
    sys.exit("aserve needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d: make ... PYTHON=/path/to/python" % v[:2])
endef

serve: setup ## start the server on http://127.0.0.1:8000 with the bundled model
	@exec $(PY) -m aserve serve $(ARGS)

# As many processes as there are cores, each with whole files; ARGS='-n 0' runs all tests in one.
PYTEST = $(PY) -m pytest -q --durations=15 -n auto --maxprocesses=8 --dist loadgroup --no-loadscope-reorder

# mypy uses one core for a minute, so it runs beside the tests, and is heard of when it complains.
# Tests that fail are run again alone: one that then passes depends on what ran beside it. It is listed, and does not fail the run.
test: style ## what CI does: lint, type checks, tests
	@complaints=$$(mktemp); $(BIN)/mypy > "$$complaints" 2>&1 & mypy=$$!; \
	failed=0; $(PYTEST) $(ARGS) || failed=$$?; \
	if [ $$failed = 1 ]; then echo 'once more, alone:'; \
		$(PY) -m pytest -v --last-failed --last-failed-no-failures none && failed=0; fi; \
	wait $$mypy || { cat "$$complaints"; failed=1; }; rm -f "$$complaints"; exit $$failed

# The tests that run an engine on a device which they do not name.
ENGINE_TESTS = tests/parity/test_real_model.py tests/grammar/test_outputs.py tests/e2e/test_lora.py tests/e2e/test_weights.py \
	$(addprefix tests/gpu/,test_executor.py test_drafter.py test_logprobs.py test_result_counts.py \
	test_teacher_forcing.py test_trained_models.py test_trained_blocks_and_pictures.py test_drafters_by_system.py \
	test_pictures.py test_traces.py test_replayed_step.py diffusion spec lora/test_merged.py)

test-all: lint ## the same with the large profiles and a fresh seed, which ASERVE_TEST_SEED=N repeats, and the engine on a device of another package
	ASERVE_TEST_PROFILE=large $(PYTEST) --timeout=3600 $(ARGS)
	$(PYTEST) --timeout=600 --device example-npu $(ENGINE_TESTS)
	$(PY) -m tests.clients.run schemathesis_client

# Not in `test`: it needs a browser, which pip does not bring.
test-page: setup ## the web page in Chromium; CHROMIUM=file of the browser, ARGS=folder for screenshots
	@$(PY) -m tests.page.in_browser $(ARGS)

# Not in `test`: Ray and what it needs go to an environment of their own, which sees the packages of .venv as well.
RAY_VENV := .venv-ray
SITE_PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
test-ray: setup ## ranks that Ray places on the two machines of a cluster, which are processes
	[ -d $(RAY_VENV) ] || $(PY) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet 'ray>=2.50'
	$(PY) $(SITE_PACKAGES) > "$$($(RAY_VENV)/bin/python $(SITE_PACKAGES))/main.pth"
	$(RAY_VENV)/bin/python -m pytest -q -n 0 tests/parallel/test_ray.py $(ARGS)

# Not in `test`: it installs the clients, each in an environment of its own.
test-clients: setup ## clients that nobody here wrote (LangChain, Anthropic, Ollama, ...) against a server; ARGS=names
	@$(PY) -m tests.clients.run $(ARGS)

# Not in `test`: it takes a quarter of an hour, root, buildah and debootstrap.
image-check: setup ## build the CPU image without Docker and try it; docker/check.sh lists its variables
	@docker/check.sh

# Not with setup: on such a machine torch is there already, and what is missing comes from WHEELS.
gpu-check: ## what only a GPU can show, resumable; WHEELS=dir has packages that are missing
	@$(if $(wildcard $(STAMP)),$(PY),$(PYTHON)) -m tools.gpu_check $(if $(WHEELS),--wheels '$(WHEELS)') $(ARGS)

lint: style ## ruff, codespell, mypy
	$(BIN)/mypy

style: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/codespell

format: setup ## format the code and mend what ruff can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

mutants: setup ## break the code on purpose: the tests must notice
	$(PY) -m tests.mutants $(ARGS)

LOCK_VENV := .venv-lock
lock: ## write constraints.txt anew: the newest versions that fit its torch and triton (with Python 3.11)
	@$(PYTHON) -c "$$CHECK_PYTHON"
	$(PYTHON) -m venv --clear $(LOCK_VENV)
	grep -E '^(torch|triton)==' constraints.txt > $(LOCK_VENV)/pins.txt
	$(LOCK_VENV)/bin/pip install --upgrade pip
	$(LOCK_VENV)/bin/pip install --constraint $(LOCK_VENV)/pins.txt torch triton
	$(LOCK_VENV)/bin/pip install --constraint $(LOCK_VENV)/pins.txt --editable . --group dev
	{ grep '^#' constraints.txt; $(LOCK_VENV)/bin/pip freeze --all --exclude-editable \
		| sed -E 's/\+[A-Za-z0-9.]+$$//' | grep -viE '^(nvidia|cuda)-' | LC_ALL=C sort -f; } > $(LOCK_VENV)/constraints.txt
	mv $(LOCK_VENV)/constraints.txt constraints.txt
	rm -rf $(LOCK_VENV)

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) $(LOCK_VENV) .venv-clients $(RAY_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find aserve kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
