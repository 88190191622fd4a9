# make demo: install into .venv and run an example.  make test: install and run the tests.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
FOR_DEMO := $(if $(wildcard $(INSTALLED)),$(INSTALLED),.venv/.installed-for-demo)
CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dmlkit needs Python 3.11 or later; set PYTHON, e.g. make PYTHON=python3.12")'
EXTRAS := transport,torchcodec,timm,hf,excel,lite,cluster,tsne,video,onnx,tensorboard,ray,lancedb,serve,qdrant,pgvector
COMMA := ,
PIP_INSTALL := pip install --quiet --disable-pip-version-check -c constraints.txt
# uv takes 50 s of a processor where pip takes 215; pip knows the indexes and certificates of its own configuration.
INSTALL = $(PYTHON) -m venv .venv && $(BIN)/$(PIP_INSTALL) uv && \
  { $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[$(1)]' || $(BIN)/$(PIP_INSTALL) -e '.[$(1)]'; }

.PHONY: setup demo test test-heavy test-oldest lock test-gpu test-postgres test-browser test-trackers lint audit bench clean docs papers fuzz wheel gpu-hour
.DEFAULT_GOAL := setup
unexport PYTHONDONTWRITEBYTECODE # some environments turn compiled files off: each command of the demo would take 6 s longer

setup: $(INSTALLED)  ## Install dmlkit and its development tools into .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(call INSTALL,$(EXTRAS)$(COMMA)docs$(COMMA)dev)
	@touch $@

.venv/.installed-for-demo: pyproject.toml constraints.txt
	@$(CHECK_PYTHON)
	$(call INSTALL,onnx)
	@touch $@

demo: $(FOR_DEMO)  ## Install what the demo needs, then train, evaluate, embed and export: 2 minutes on 2 cores
	$(BIN)/dmlkit train recipes/glyphs/proxy_anchor.yaml --output runs/demo --overwrite
	$(BIN)/dmlkit eval runs/demo
	$(BIN)/dmlkit embed runs/demo --split test
	$(BIN)/dmlkit export runs/demo/embeddings/test --format faiss
	$(BIN)/dmlkit export runs/demo --format onnx
	@echo
	@echo 'Model:      runs/demo/checkpoints/best.pt, as ONNX in runs/demo/exports/model.onnx'
	@echo 'Curves:     runs/demo/curves.png'
	@echo 'Embeddings: runs/demo/embeddings/test, with a FAISS index in index.faiss'
	@echo 'Next: put your own images into one folder per class and run'
	@echo '  .venv/bin/dmlkit train recipes/glyphs/proxy_anchor.yaml -o runs/mine --set "dataset={name: folder, root: PATH}"'

# Stealing tests leaves no long file for the end; the heaviest files are kept whole, since their tests share wheels and runs.
RUN_TESTS := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --durations 20

test: setup  ## Run all tests except the heaviest: 7 minutes on 2 cores
	$(RUN_TESTS) --dist worksteal -m 'not heavy'

test-heavy: setup  ## Run the heaviest tests (clusters, ranks, installed wheels and plug-ins, kills, compilers, fuzzing, whole pages): 9 minutes on 2 cores
	$(RUN_TESTS) --dist loadfile --no-loadscope-reorder -m heavy

OLDEST := .venv-oldest/bin
test-oldest:  ## Run the quick tests with the oldest versions that pyproject.toml allows, in .venv-oldest
	$(PYTHON) -m venv --clear .venv-oldest
	$(OLDEST)/$(PIP_INSTALL) uv
	$(OLDEST)/uv pip install --python $(OLDEST)/python --resolution lowest-direct -e '.[$(EXTRAS),dev]'
	$(OLDEST)/python -m pytest --numprocesses auto --maxprocesses 8 -m 'not slow and not heavy'

test-gpu: setup  ## Compare a CUDA GPU with the CPU
	$(BIN)/python -m pytest -m cuda -rs

test-postgres: setup  ## Run the tests that need PostgreSQL with pgvector; set PG_CONFIG unless it is Debian's package
	$(BIN)/python -m pytest -m postgres -rs tests/export

test-browser: setup  ## Install Playwright and axe-core, find or install chromium, and run the tests that click through pages
	$(BIN)/pip install --quiet --disable-pip-version-check 'playwright>=1.40' axe-playwright-python
	@command -v chromium >/dev/null || $(BIN)/playwright install --with-deps chromium
	$(BIN)/python -m pytest -m browser -rs

# On top of .venv, since PyTorch alone has gigabytes; their other requirements are there or not needed here. BoxMOT would
# install this version of ONNX Runtime itself.
TRACKERS := build/trackers
test-trackers: setup  ## Install Ultralytics and BoxMOT into an environment of their own, and run exported models in them
	$(BIN)/python -m venv $(TRACKERS)
	$(BIN)/python -c 'import site, sys; print(*site.getsitepackages())' > $$(echo $(TRACKERS)/lib/python*/site-packages)/dmlkit.pth
	$(TRACKERS)/bin/pip install --quiet --disable-pip-version-check --no-deps ultralytics==8.4.190 boxmot==25.0.0 lapx==0.11.1 onnxruntime==1.24.3 opencv-python-headless==5.0.0.93
	$(TRACKERS)/bin/python -c 'import ultralytics.trackers.bot_sort, boxmot'  # without them the tests would be skipped
	$(TRACKERS)/bin/python -m pytest -rs tests/export/test_trackers.py

docs: setup  ## Build the documentation site into site/; fails for broken links and references
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

papers: setup  ## Regenerate the results in docs/papers from docs/studies
	for study in cars caltech_claims glyphs_claims modes_claims photos_claims photos_network_claims; do \
	  $(BIN)/python -m dmlkit plot results docs/studies/$$study -o docs/papers/$$study.png || exit 1; done
	$(BIN)/python -m dmlkit report docs/results/manifolds_clip docs/results/manifolds_learned docs/results/product_hierarchy docs/results/hierarchical_clustering -o docs/spaces.md
	for study in which_loss which_loss_glyphs which_loss_modes hard_classes; do \
	  $(BIN)/python -m dmlkit plot results docs/results/$$study -o docs/results/$$study.png || exit 1; done
	for paper in proxy_gml proxy_isa cgml grouplet mpa; do \
	  $(BIN)/python -m dmlkit report docs/studies/* --paper $$paper -o docs/papers/$$paper.md || exit 1; done

fuzz: setup  ## Test thousands of mutated recipes, damaged files and galleries, command lines, kills and signals: about 20 minutes on 2 cores
	DMLKIT_FUZZ=1 $(BIN)/python -m pytest tests/fuzz tests/gallery/test_damage.py \
	  tests/serve/test_reviewing.py --numprocesses auto --maxprocesses 8

lint: setup  ## Check style, types and declared dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/deptry --no-ansi .
	$(BIN)/pyright

lock: setup  ## Write requirements.lock: the versions of constraints.txt with the hashes of their files, for all systems
	$(BIN)/uv pip compile pyproject.toml -o requirements.lock --quiet --universal --python-version 3.11 --no-annotate \
	  $(patsubst %,--extra %,$(subst $(COMMA), ,$(EXTRAS))) -c constraints.txt --generate-hashes --custom-compile-command 'make lock'

audit: setup  ## List the licenses of installed packages and known vulnerabilities of the pinned versions
	$(BIN)/python .ci/audit.py

bench: setup  ## Run the benchmarks and write benchmarks/results; PHOTOS=FOLDER adds those that read photos
	for part in times memory million; do $(BIN)/python benchmarks/losses.py $$part || exit 1; done
	for name in training_loop kept_memory compile evaluation reranking gallery look manifolds scale gradient_checkpointing; do \
	  $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/data.py $(PHOTOS)
	for name in $(if $(PHOTOS),calibration embed align teachers matryoshka serve shell); do $(BIN)/python benchmarks/$$name.py $(PHOTOS) || exit 1; done
	$(if $(PHOTOS),$(BIN)/python benchmarks/serve.py $(PHOTOS) soak 30)

ifdef PHOTOS
IMAGES := --set "dataset={name: folder, root: $(PHOTOS), split: reality_check}"
else
IMAGES := --set dataset.root=$(or $(CUB),data/cub200)
endif
GPU_STUDY := $(BIN)/dmlkit study recipes/study/claims_gpu.yaml -o runs/study/claims_gpu --workers $(or $(WORKERS),4) $(IMAGES) $(SETTINGS)

gpu-hour: setup  ## Spend an hour of a GPU in order of worth, and resume: 12 minutes of tables (QUICK=1: only these), 40 of the claims, the other tables, the claims again; CUB=FOLDER or PHOTOS=FOLDER
	-DONE=runs/gpu_hour QUICK=1 benchmarks/gpu.sh $(TINY)
ifndef QUICK
	$(GPU_STUDY) --budget $(or $(BUDGET),40m) || [ $$? -eq 75 ]
	DONE=runs/gpu_hour benchmarks/gpu.sh $(TINY)
	$(GPU_STUDY) --budget $(or $(BUDGET),40m) || [ $$? -eq 75 ]
endif

wheel: setup  ## Build wheel and sdist into dist/, and test the wheel in a fresh environment without extras (8 GB of disk)
	PYTHON=$(PYTHON) .ci/wheel

clean:  ## Remove the environment and all build output; runs are kept
	rm -rf .venv .venv-oldest build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
