# Every command of the project. The targets that need packages install them into .venv on first use.
# Paths are relative throughout, so a checkout path with spaces works.

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
INSTALL := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt

# The tests and the demo choose between a GPU, the CPU and Triton's interpreter; a setting left over in the
# caller's shell must not choose for them.
unexport TRITON_INTERPRET

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo demo-distributed test test-all test-integrations test-versions test-triton lint docs accuracy codegen compiled fuzz mutants soak package prebuilt first gpu sanitize bench clean gpu-check

help: ## list the targets
	@echo "usage: make <target> [PYTHON=python3] [ARGS=...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' Makefile

demo: .venv/.demo ## fuse the reference Transformer and show the difference; ARGS go to the demo
	@$(VENV_PYTHON) -m fusedattn demo $(ARGS)

# torchrun warns if it chooses the number of threads itself; the processes share out the cores.
PROCESSES ?= 2
demo-distributed: .venv/.demo ## train one GPT by PROCESSES=2 processes, each with some of the tokens; ARGS go to the example
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(PROCESSES) \
	    -m fusedattn.distributed.example $(ARGS)

PYTEST := $(VENV_PYTHON) -m pytest -n 2 --dist worksteal --maxfail=0 --durations=10

# tests/helpers/quick.py says how a test names its quick cases.
test: .venv/.test ## run the quick tests (no GPU needed); ARGS go to pytest, e.g. ARGS="-k rope"
	@$(PYTEST) -m "not thorough" --ignore=tests/integrations $(ARGS)

test-all: .venv/.test ## run every test of the package, the quick ones too; ARGS go to pytest
	@$(PYTEST) --ignore=tests/integrations $(ARGS)

test-integrations: .venv/.test ## run the tests beside torch.nn, transformers and other libraries; ARGS go to pytest
	@$(PYTEST) tests/integrations $(ARGS)

# The oldest and the newest supported pair of torch and Triton; under them run the tests that interpret kernels, and those
# of torch.compile, which traces other code with every torch.
PAIRS ?= 2.11.0-3.6.0 2.15.0-3.9.0
OF_VERSIONS := $(addprefix tests/public/test_,attention.py biases.py learned.py fuzz.py fuzz_cached.py masking.py varlen.py \
    rope.py qk_norm.py fp8.py fp8_hostile.py weights.py reference.py gradcheck.py float64.py determinism.py \
    compile.py compile_cached.py compile_packed.py masks.py default_device.py) \
    $(addprefix tests/kernels/test_,decode.py interpreter.py one_pass.py) \
    $(addprefix tests/integrations/test_,torch_functions.py replace_sdpa.py)
test-versions: $(PAIRS:%=.versions/%/.installed) ## run tests of the interpreter and of torch.compile under each of PAIRS of torch and Triton (gigabytes)
	@status=0; \
	for pair in $(PAIRS); do \
	    .versions/$$pair/bin/python -m pytest -n 2 --dist worksteal --maxfail=0 $(OF_VERSIONS) $(ARGS) || status=1; \
	done; \
	exit $$status

# The newest Triton beside the pinned torch runs a choice of those tests, without gigabytes to install; the oldest, whose
# interpreter takes no newer NumPy, those of arguments that it may lose.
NEWEST_TRITON ?= 3.9.0
OLDEST_TRITON ?= 3.6.0
test-triton: .venv/.test .triton/$(NEWEST_TRITON)/.installed .triton/$(OLDEST_TRITON)/.installed ## run a choice of them under NEWEST_TRITON and OLDEST_TRITON, with the torch of .venv
	@status=0; \
	PYTHONPATH=.triton/$(NEWEST_TRITON) $(VENV_PYTHON) -m pytest -n 2 --dist worksteal --maxfail=0 \
	    $(addprefix tests/public/test_,biases.py learned.py gradcheck.py ones.py) tests/kernels/test_interpreter.py \
	    tests/bench/test_versions.py \
	    -k "not of_a_pair" $(ARGS) || status=1; \
	PYTHONPATH=.triton/$(OLDEST_TRITON) $(VENV_PYTHON) -m pytest --maxfail=0 tests/public/test_ones.py \
	    tests/bench/test_versions.py || status=1; \
	exit $$status

lint: .venv/.test ## ruff check, ruff format --check and mypy
	@status=0; \
	$(VENV_PYTHON) -m ruff check . || status=1; \
	$(VENV_PYTHON) -m ruff format --check . || status=1; \
	$(VENV_PYTHON) -m mypy || status=1; \
	exit $$status

docs: .venv/.docs ## build the documentation into build/site; ARGS go to mkdocs, e.g. make docs ARGS="--site-dir /tmp/site"
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict $(ARGS)

accuracy: .venv/.test ## measure the error budget beside torch's functions on the CPU; rewrite docs/accuracy.md
	@$(VENV_PYTHON) -m fusedattn check --json --device cpu --against sdpa-math --against sdpa-flash --against flex \
	    > docs/results/accuracy.json.new && mv docs/results/accuracy.json.new docs/results/accuracy.json
	@$(VENV_PYTHON) -m bench.accuracy

TRITONS ?= 3.6.0 3.7.1 3.9.0
codegen: .venv/.test $(TRITONS:%=.triton/%/.installed) ## compile the kernels for every target GPU, under each of TRITONS (hours; no GPU needed)
	@status=0; \
	for version in $(TRITONS); do \
	    PYTHONPATH=.triton/$$version $(VENV_PYTHON) -m bench.codegen $(ARGS) || status=1; \
	done; \
	exit $$status

compiled: .venv/.test $(TRITONS:%=.triton/%/.installed) ## run the compiled kernels on a CPU, under each of TRITONS (an hour; no GPU needed)
	@status=0; \
	for version in $(TRITONS); do \
	    PYTHONPATH=.triton/$$version $(VENV_PYTHON) -m tests.tools.compiled $(ARGS) || status=1; \
	done; \
	$(VENV_PYTHON) -m tests.tools.figures || status=1; \
	exit $$status

N ?= 1000
fuzz: .venv/.test ## check the kernels on N new problems, hostile ones among them, then on N with caches, of linear attention and in 8 bits
	@status=0; \
	for of in calls caches linear fp8; do $(VENV_PYTHON) -W ignore -m tests.tools.fuzz $(N) --of $$of || status=1; done; \
	exit $$status

mutants: .venv/.test ## plant faults in the code, and see whether the tests notice
	@$(VENV_PYTHON) -m tests.mutation $(ARGS)

soak: .venv/.test ## train the reference GPT for 2,000 steps, fused and eager, and compare
	@$(VENV_PYTHON) -m tests.tools.soak $(ARGS)

# Each Python that is found, with the oldest and the newest torch, from the wheel and from the source distribution.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
package: .venv/.release ## build the wheel and the sdist into dist/, and try them under each of PYTHONS (gigabytes)
	@$(VENV_PYTHON) -m tests.tools.release --python $(PYTHONS) $(ARGS)

# What a machine with a GPU need not compile. The name of a kernel depends on Triton's files, one of which is another
# for each version of Python.
TRITON ?= 3.6.0
ARCH ?= sm_90
FOR_PYTHON ?= 3.12
LIBTRITON = .triton/$(TRITON)-for-python-$(FOR_PYTHON)/triton/_C/libtriton.so
prebuilt: .venv/.test .triton/$(TRITON)/.installed $(LIBTRITON) ## compile beforehand, for TRITON, ARCH and FOR_PYTHON, what first launches, into prebuilt/ (long)
	@PYTHONPATH=.triton/$(TRITON) $(VENV_PYTHON) -m bench prebuilt --arch $(ARCH) --libtriton $(LIBTRITON) $(ARGS)

FOLDER ?= first
first: gpu-check ## on a machine with a GPU: what it is asked first, into FOLDER=first, e.g. ARGS="--budget 540"
	@"$(PYTHON)" -m bench first --out "$(FOLDER)" $(ARGS)

gpu: gpu-check ## on a machine with a GPU: tests by WORKERS=4 processes, then timings; installs nothing
	@"$(PYTHON)" -m pytest $(PYTEST_WORKERS) --maxfail=0 --durations=10 tests
	@"$(PYTHON)" -m bench run $(ARGS)

sanitize: gpu-check ## on a machine with an NVIDIA GPU: memcheck, racecheck, initcheck, synccheck; installs nothing
	@"$(PYTHON)" -m tests.tools.sanitize

bench: gpu-check ## on a machine with a GPU: the timings alone, written to bench/results/, e.g. ARGS="--budget 600"
	@"$(PYTHON)" -m bench run $(ARGS)

clean: ## remove caches and build outputs (.venv, .triton and .versions stay; delete them to install afresh)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find fusedattn kernels tests bench docs -type d -name __pycache__ -prune -exec rm -rf {} +

# Each stamp is newer than what it was installed from, or the install runs again. The test extra contains
# the demo extra, so installing the first satisfies the second.
.venv/.demo .venv/.test .venv/.docs .venv/.release: .venv/.%: .venv/.created pyproject.toml constraints.txt
	@echo "installing fusedattn[$*] into .venv (the first time downloads torch: some minutes)"
	@$(INSTALL) -e '.[$*]'
	@touch $@ $(if $(filter test,$*),.venv/.demo)

# Triton alone, in front of the packages of .venv; nothing where .venv has that version.
.triton/%/.installed: .venv/.test
	@rm -rf .triton/$*
	@mkdir -p .triton/$*
	@$(VENV_PYTHON) -c 'import sys; from importlib.metadata import version; sys.exit(version("triton") != "$*")' || \
	    { echo "installing Triton $* into .triton/$*"; \
	      $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
	          --target .triton/$* triton==$*; }
	@touch $@

# The compiled part of Triton for another Python.
.triton/$(TRITON)-for-python-$(FOR_PYTHON)/triton/_C/libtriton.so:
	@echo "fetching Triton $(TRITON) for Python $(FOR_PYTHON)"
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input --no-deps --only-binary=:all: \
	    --implementation cp --python-version $(FOR_PYTHON) \
	    $(addprefix --platform manylinux_2_,27_x86_64 28_x86_64 17_x86_64 34_x86_64) \
	    --target .triton/$(TRITON)-for-python-$(FOR_PYTHON) triton==$(TRITON)

.versions/%/.installed: pyproject.toml
	@$(CHECK_PYTHON)
	@echo "installing torch and Triton $* into .versions/$* (some gigabytes)"
	@rm -rf .versions/$*
	@"$(PYTHON)" -m venv .versions/$*
	@.versions/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	    torch==$(firstword $(subst -, ,$*)) 'numpy$(if $(filter 3.6.%,$(lastword $(subst -, ,$*))),<2.4)' \
	    pytest pytest-xdist pytest-benchmark hypothesis
	@.versions/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
	    triton==$(lastword $(subst -, ,$*)) -e .
	@touch $@

# Not .venv/bin/python: an interrupted `python -m venv` leaves that file behind without pip.
.venv/.created:
	@$(CHECK_PYTHON)
	@"$(PYTHON)" -m venv .venv || \
	    { echo "error: '$(PYTHON)' cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; \
	      exit 1; }
	@touch $@

CHECK_PYTHON = command -v "$(PYTHON)" >/dev/null || \
    { echo "error: there is no '$(PYTHON)'; name a Python >= 3.10 with PYTHON=/path/to/python3" >&2; exit 1; }; \
    "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
    { echo "error: fusedattn needs Python >= 3.10, but '$(PYTHON)' is" \
           "$$("$(PYTHON)" --version 2>&1); name another with PYTHON=/path/to/python3" >&2; exit 1; }

# A machine with a GPU often has its own torch and no package registry, and not always pytest-xdist. Most of the time of
# the tests there is that of compilers: with many cores, and memory of the GPU for each, WORKERS may be many.
WORKERS ?= 4
PYTEST_WORKERS = $$("$(PYTHON)" -c 'import xdist' 2>/dev/null && printf -- '-n %s' $(WORKERS))

define GPU_CHECK
import sys
try:
    import torch, triton
except ImportError as error:
    sys.exit(f"error: {sys.executable} has no torch and triton ({error}); name one that has with PYTHON=...")
if not torch.cuda.is_available():
    sys.exit(f"error: no CUDA device for the torch {torch.__version__} of {sys.executable}; this target needs a GPU")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
endef
export GPU_CHECK

gpu-check:
	@$(CHECK_PYTHON)
	@"$(PYTHON)" -c "$$GPU_CHECK"
