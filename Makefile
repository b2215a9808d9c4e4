# make demo: set up and show what weft does.  make test: set up and run every check.
# make test-ecosystem: the tests with peft, accelerate, torchao, ONNX and x-transformers.
# make test-oldest: the same with the oldest supported versions, on part of the tests.
# make test-cluster: the slow tests with several processes, and a Ray cluster.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: env demo test test-ecosystem test-oldest test-cluster docs check-pages wheel

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e ".[all,graphs,test]"
	touch $@

test: env
	$(BIN)/ruff check weft tests benchmarks experiments
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
	$(BIN)/python benchmarks/faults.py --skip rank,ray

# Libraries that are used together with weft; the tests skip what is not installed.
ECOSYSTEM := .venv-ecosystem
ECOSYSTEM_TESTS := $(addprefix tests/test_,adapt_ecosystem.py adapt_guard.py adapt_x_transformers.py conversion.py)

$(ECOSYSTEM)/.ready: pyproject.toml
	$(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/pip install --quiet --upgrade pip
	$(ECOSYSTEM)/bin/pip install --quiet -e ".[all,test,ecosystem]"
	touch $@

test-ecosystem: $(ECOSYSTEM)/.ready
	OMP_NUM_THREADS=1 $(ECOSYSTEM)/bin/python -m pytest $(ECOSYSTEM_TESTS)

# The oldest versions that pyproject.toml allows, with the tests that depend on them most. timm is left out: its
# torchvision does not exist for every build of torch.
OLDEST := .venv-oldest
OLDEST_TESTS := $(addprefix tests/test_,promises.py refusals.py layers.py backends.py adapt_huggingface.py adapt_guard.py lab.py)

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --upgrade pip
	grep -oE '[a-z-]+>=[0-9.]+' pyproject.toml | grep -v setuptools | sed 's/>=/==/' > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/pip install --quiet -c $(OLDEST)/oldest.txt -e ".[lab,huggingface,tensorboard,test]"
	touch $@

test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n auto --dist worksteal $(OLDEST_TESTS)

# Slow tests with several processes: torchrun with a killed process, two data ranks of two processes each, and a sweep on
# a local Ray cluster that loses a machine.
test-cluster: env
	$(BIN)/pip install --quiet -e ".[ray]"
	WEFT_TEST_CLUSTER=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_lab_context.py tests/test_ray.py

demo: env
	$(BIN)/weft demo

# The documentation site, in build/site; warnings are errors.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet "mkdocs-material>=9.5" "mkdocstrings[python]>=0.26"
	touch $@

# The HTML pages in Chromium, at two widths and in both colour schemes, with an accessibility check (needs npm).
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
check-pages: env build/browser/node_modules
	$(BIN)/python tests/example_pages.py build/browser/pages
	cd build/browser && node ../../tests/check_pages.mjs $(CHROMIUM) pages/*.html

build/browser/node_modules:
	npm install --silent --no-audit --no-fund --prefix build/browser playwright-core@1 axe-core@4

# Wheel and sdist in dist/, checked and imported in an environment of their own.
wheel:
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/pip install --quiet build twine
	rm -rf dist && build/wheel/bin/python -m build --outdir dist
	build/wheel/bin/twine check --strict dist/*
	build/wheel/bin/pip install --quiet dist/*.whl
	cd build && wheel/bin/python -c "import weft; print(weft.__version__, len(weft.attentions()), 'mechanisms')"
	build/wheel/bin/weft --version
