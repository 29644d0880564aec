PYTHON ?= python3
PIP := bin/pip install --quiet --constraint constraints.txt

.PHONY: help demo explore test browser lint types contracts mutate interpret bench reproduce reproduce-quick clean

help:
	@echo "make demo       train a network on handwritten digits"
	@echo "make explore    open a trained network in the browser"
	@echo "make test       run the test suite; make browser: the explorer's, in headless Chromium if there is one"
	@echo "make lint       check style and formatting; make types, make contracts: types and import layers"
	@echo "make mutate     inject defects and see that the tests notice"
	@echo "make bench      time solving, training and certifying against their peers"
	@echo "make reproduce  make the paper's tables and figures; make reproduce-quick: a smoke run of minutes"

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.package: pyproject.toml constraints.txt | .venv/bin/python
	.venv/$(PIP) --editable .
	@touch $@

.venv/.test: pyproject.toml constraints.txt | .venv/bin/python
	.venv/$(PIP) --editable '.[test]'
	@touch $@ .venv/.package

.venv/.explore: pyproject.toml constraints.txt | .venv/bin/python
	.venv/$(PIP) --editable '.[explore]'
	@touch $@ .venv/.package

.venv/.lint: pyproject.toml constraints.txt | .venv/bin/python
	.venv/$(PIP) --editable '.[lint]'
	@touch $@ .venv/.package

# torchattacks asks for torchvision and for an old requests, neither of which its attacks import; qpth for a NumPy below 2,
# which its solver does not need
.venv-bench/.bench: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/$(PIP) --editable '.[bench]'
	.venv-bench/$(PIP) --no-deps qpth torchattacks
	@touch $@

# pcx needs a jax below 0.5, so it has an environment of its own, which the benchmark calls
.venv-pcx/.pcx:
	$(PYTHON) -m venv .venv-pcx
	.venv-pcx/bin/pip install --quiet pcx==0.6.3 jax==0.4.38 jaxlib==0.4.38 equinox==0.11.12 optax==0.2.5 chex==0.1.90 \
		jaxtyping==0.3.11 numpy==2.4.6 scipy==1.17.1
	@touch $@

demo: .venv/.package
	.venv/bin/lrrn demo

explore: .venv/.explore
	.venv/bin/lrrn explore

test: .venv/.test
	.venv/bin/python -m pytest --cov --cov-report=term --ignore=tests/browser

# screenshots and the log of requests go to out/browser
browser: .venv/.test
	.venv/bin/python -m pytest -q tests/browser

lint: .venv/.lint
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

types: .venv/.lint
	.venv/bin/mypy

contracts: .venv/.lint
	.venv/bin/lint-imports --no-logo

mutate: .venv/.test
	.venv/bin/python scripts/mutate.py

bench: .venv-bench/.bench .venv-pcx/.pcx
	mkdir -p out
	.venv-bench/bin/lrrn bench --json out/bench.json --page out/bench.html

# the GPU's kernels, interpreted: slow, so on the solver's own tests only
interpret: .venv/.test
	.venv/$(PIP) --no-deps triton
	TRITON_INTERPRET=1 .venv/bin/python -m pytest -q tests/test_accelerated.py tests/test_solver_contract.py -k "accelerated or kernel"

reproduce: .venv/.package
	.venv/bin/lrrn reproduce all --output docs/reproduction

reproduce-quick: .venv/.package
	.venv/bin/lrrn reproduce all --quick --no-download

clean:
	rm -rf .venv .venv-bench .venv-pcx
