# make demo: install into .venv and run the main job.  make test: install and run the tests.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup demo test test-heavy test-gpu test-postgres test-browser lint audit bench clean docs papers fuzz wheel
.DEFAULT_GOAL := setup

setup: $(INSTALLED)  ## Install dmlkit and its development tools into .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dmlkit needs Python 3.11 or later; set PYTHON, e.g. make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[transport,timm,lite,onnx,tensorboard,ray,gallery,qdrant,pgvector,docs,dev]'
	@touch $@

demo: setup  ## Train, evaluate, embed and export: about 2 minutes on 2 cores
	$(BIN)/dmlkit train recipes/glyphs/proxy_anchor.yaml --output runs/demo --overwrite
	$(BIN)/dmlkit eval runs/demo
	$(BIN)/dmlkit embed runs/demo --split test
	$(BIN)/dmlkit export runs/demo/embeddings/test --format faiss
	$(BIN)/dmlkit export runs/demo --format onnx
	@echo
	@echo 'The model      runs/demo/checkpoints/best.pt, as ONNX in runs/demo/exports/model.onnx'
	@echo 'The curves     runs/demo/curves.png'
	@echo 'The embeddings runs/demo/embeddings/test, as a FAISS index in index.faiss there'
	@echo 'Next: put your own images into one folder per class and try'
	@echo '  .venv/bin/dmlkit train recipes/glyphs/proxy_anchor.yaml -o runs/mine --set "dataset={name: folder, root: PATH}"'

RUN_TESTS := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --durations 20

test: setup  ## Run the tests, but for the heaviest: 7 to 10 minutes on 2 cores
	$(RUN_TESTS) -m 'not heavy'

test-heavy: setup  ## Run the heaviest: clusters, ranks, installed wheels and plugins, kills, compilers, fuzzing, whole pages: 8 to 11 minutes on 2 cores
	$(RUN_TESTS) -m heavy

test-gpu: setup  ## Run the tests that need a CUDA GPU
	$(BIN)/python -m pytest -m cuda

test-postgres: setup  ## Run the tests that need PostgreSQL with pgvector; PG_CONFIG names one that is not Debian's
	$(BIN)/python -m pytest -m postgres -rs tests/export

test-browser: setup  ## Install Playwright, look for chromium, and run the tests that click through pages
	$(BIN)/pip install --quiet --disable-pip-version-check 'playwright>=1.40'
	@command -v chromium >/dev/null || $(BIN)/playwright install --with-deps chromium
	$(BIN)/python -m pytest -m browser -rs

docs: setup  ## Build the documentation site into site/; broken links and references fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

papers: setup  ## Write the figures of docs/papers anew, from docs/studies
	$(BIN)/python -m dmlkit report docs/studies/*_claims docs/studies/manifolds -o docs/papers.md
	for paper in proxy_gml proxy_isa cgml grouplet mpa; do \
	  $(BIN)/python -m dmlkit report docs/studies/* --paper $$paper -o docs/papers/$$paper.md || exit 1; done

fuzz: setup  ## Mutated recipes, damaged files and random command lines by the thousand, kills and signals: about 30 minutes on 2 cores
	DMLKIT_FUZZ=1 $(BIN)/python -m pytest tests/fuzz --numprocesses auto --maxprocesses 8

lint: setup  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

audit: setup  ## The licences of what is installed, and known vulnerabilities of the pinned versions
	$(BIN)/python .ci/audit.py

bench: setup  ## Measure side by side with peers; writes benchmarks/results. With PHOTOS=FOLDER also what reads photos
	for part in times memory million; do $(BIN)/python benchmarks/losses.py $$part || exit 1; done
	for name in start training_loop transport grouplet evaluation gallery look manifolds scale gradient_checkpointing; do \
	  $(BIN)/python benchmarks/$$name.py || exit 1; done
	$(BIN)/python benchmarks/data.py $(PHOTOS)
	for name in $(if $(PHOTOS),calibration embed frozen); do $(BIN)/python benchmarks/$$name.py $(PHOTOS) || exit 1; done

wheel: setup  ## Build wheel and sdist into dist/, and try the wheel in a fresh environment without extras: 8 GB of disk
	PYTHON=$(PYTHON) .ci/wheel

clean:  ## Remove the environment and all that was built; runs stay
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
