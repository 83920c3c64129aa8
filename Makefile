# Every target sets up what it needs: `make demo` and `make test` work on a fresh machine with Python 3.11 or later.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# One thread for each test process: more threads than free cores slow torch down by an order of magnitude. Bytecode is kept,
# also where PYTHONDONTWRITEBYTECODE is set: tests start many processes, and pytest rewrites all assertions.
# Tests write tens of thousands of small files: into memory where there is room, and they remove them.
ROOM := $(shell df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)
FAST_FILES := $(shell test -w /dev/shm && test "$(ROOM)" -gt 4000000 && echo TMPDIR=/dev/shm)
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(FAST_FILES) $(BIN)/python -m pytest -n auto --dist loadfile -o tmp_path_retention_policy=failed

# The page is tested in headless Chromium where it is installed.
BROWSER := $(if $(and $(shell command -v chromium),$(shell command -v chromedriver)),,and not browser)

# Tests that import extras; others skip what they lack.
EXTRAS := $(addprefix --ignore=tests/,flower core/test_mixes.py methods/test_rules_of_others.py report/test_page_browser.py export/test_steps.py test_documents.py)

.PHONY: setup demo demo-segmentation claims lowest test coverage slow-test lint hooks picture guide benchmark mutations peers zoo structure \
	docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

demo: setup
	$(BIN)/fedshift compare --config examples/demo.toml

demo-segmentation: setup
	run=runs/segmentation-$$(date +%Y%m%d-%H%M%S); \
	$(BIN)/fedshift compare --config examples/segmentation.toml --out $$run && $(BIN)/python examples/worst_cases.py $$run

# What the README claims, on processors with AVX-512, with AVX2 and with neither: five minutes on two cores.
claims: setup
	rm -rf runs/processors
	$(BIN)/python benchmarks/processors.py

# The demo and the fast tests without extras, with the lowest versions that pyproject.toml allows; torch as in constraints.txt.
lowest: setup
	test -x .venv-lowest/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct --editable . "$$(grep '^torch==' constraints.txt)"
	$(BIN)/uv pip install --quiet --python .venv-lowest $$(grep -E '^(pytest|pytest-xdist|hypothesis)==' constraints.txt)
	.venv-lowest/bin/fedshift compare --config examples/demo.toml
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n auto -o filterwarnings= -m "not slow" $(EXTRAS)

test: setup
	$(TEST) -m "not slow $(BROWSER)"

# The same, and which lines no test runs; half as long again.
coverage: setup
	$(TEST) -m "not slow $(BROWSER)" --cov --cov-report=term

slow-test: setup
	$(TEST) -m "slow"

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# What `make lint` checks, and the pages, at each commit.
hooks: setup
	$(BIN)/pre-commit install

# The README's pictures, from the records of a demo run, and those of the pages on data and on feature maps.
picture: setup
	rm -rf runs/picture
	$(BIN)/fedshift compare --config examples/demo.toml --out runs/picture
	$(BIN)/fedshift report runs/picture --figures
	cp $(addprefix runs/picture/figures/,samples.png accuracy-macro.svg accuracy-bars.svg) docs/images/
	$(BIN)/fedshift data show digits --split "dirichlet(clients=8, alpha=0.3)" --out runs/picture/data
	cp runs/picture/data/classes.svg docs/images/
	rm -rf runs/seen
	$(BIN)/fedshift compare --config examples/demo.toml --methods fedavg,fedbn,fedwon,nonorm --out runs/seen
	$(BIN)/fedshift features runs/seen
	cp $(addprefix runs/seen/features/,maps-04-faded.png batchnorm-bn1.png) docs/images/features/

# The figures of docs/methods, about four minutes on one core.
guide: setup
	OMP_NUM_THREADS=1 $(BIN)/python examples/guide.py

# Measurements, some minutes each: memory of loading, and of data larger than memory, how often the diagnosis names the right shift, how often intervals are wrong, each engine against the
# plain loop, time and memory against the number of clients, and what Flower costs. Run them on a machine that does nothing
# else.
benchmark: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/loading.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/lazy.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/diagnose.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/coverage.py
	$(BIN)/python benchmarks/engines.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/flower.py

# Which tests notice seeded faults, about twenty minutes on one core.
mutations: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutations.py

# The same work on other simulators, in a virtual environment of its own that is made from PyPI: about ten minutes.
peers: setup
	$(BIN)/python benchmarks/peers.py --engine stacked

# The table of docs/zoo.md, networks of five libraries x methods x engines, and adapters against peft, in a virtual environment of its own
# (6 GB with torch's CUDA libraries). What build/zoo has is not checked again.
zoo:
	test -x .venv-zoo/bin/python || $(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/python -m pip install --quiet --constraint benchmarks/zoo.txt --requirement benchmarks/zoo.txt --editable .
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -m pytest -q -n 0 tests/nn/test_adapters.py tests/models/test_transformers.py
	OMP_NUM_THREADS=1 .venv-zoo/bin/python benchmarks/zoo.py build/zoo

# How the package is laid out, beside goals that nothing asserts: long files, imports between folders, the longest chain.
structure: setup
	$(BIN)/python benchmarks/structure.py
	$(BIN)/python benchmarks/structure.py --picture docs/images/structure.svg

# The documentation as a site in `site`, with an API reference and search, in a virtual environment that holds its tools.
docs:
	test -x .venv-docs/bin/mkdocs || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material "mkdocstrings[python]" latex2mathml ruff
	.venv-docs/bin/mkdocs build --strict

clean:
	rm -rf .venv .venv-docs .venv-lowest .venv-zoo site dist build .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
