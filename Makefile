# Every target makes .venv first when it is missing or older than pyproject.toml or constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test lint clean help

help:
	@echo "make demo   set up, run the paper's ablation in a short version, write its report"
	@echo "            (the full one, for a GPU: make demo FULL=1 DATA=path/to/wikitext-2/train.txt)"
	@echo "make test   set up, run ruff, mypy and all tests (what CI runs)"
	@echo "make lint   set up, run ruff and mypy only"
	@echo "make clean  remove .venv and everything the tools cached"

demo: $(READY)
	$(BIN)/meta-attention check
	$(BIN)/meta-attention ablate $(if $(FULL),--out runs/ablation,--short --out runs/ablation-short) \
	  $(if $(DATA),--data $(DATA))

test: lint
	$(BIN)/pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the marker is written last, so an interrupted set-up starts over
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Python 3.11 or newer is needed; run make PYTHON=python3.12 (or similar)"; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
