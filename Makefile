PYTHON ?= python3
PIP := bin/pip install --quiet --constraint constraints.txt

.PHONY: help demo explore test test-studies coverage browser lint types contracts wheel mutate interpret docs notebooks scale-out faults fuzz bench \
	portable portable-quick \
	reproduce reproduce-quick record clean

help:
	@echo "make demo       train a network on handwritten digits"
	@echo "make explore    open a trained network in the browser"
	@echo "make test       run the test suite; make test-studies: the tests of what makes the figures"
	@echo "make browser    test the explorer's page, in headless Chromium if there is one"
	@echo "make lint       check style and formatting; make types, make contracts: types and import layers"
	@echo "make wheel      build the wheel and the source distribution, and use the wheel in an empty environment"
	@echo "make docs       build the documentation, offline, and run every code block in it"
	@echo "make notebooks  write the gallery of the documentation as Jupyter notebooks to out/notebooks"
	@echo "make mutate     inject defects and see that the tests notice"
	@echo "make scale-out  two ranks against one, ranks killed and restarted, twice the memory scored: in short"
	@echo "make faults     a process killed and restarted, damaged files, inferences of every scale: in short; make fuzz: in full"
	@echo "make portable   the numerical tests under other machines' arithmetic and the oldest versions; portable-quick: in short"
	@echo "make bench      time solving, training and certifying against their peers"
	@echo "make reproduce  make the paper's tables and figures; make reproduce-quick: a smoke run of minutes"
	@echo "make record     certified accuracy of our networks and of baselines on MNIST and Fashion-MNIST"

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

.venv-docs/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/$(PIP) --editable '.[docs]'
	@touch $@

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

# what the documentation promises is tested by make docs, the explorer's page by make browser, ranks by make scale-out, and what
# makes the figures of the paper, the record and the benchmarks, and the models that ship, by make test-studies
test: .venv/.test
	.venv/bin/python -m pytest -n 2 --dist worksteal --durations 25 --ignore=tests/repository/test_docs.py --ignore=tests/browser \
		--ignore=tests/runtime/test_ranks.py --ignore=tests/estimators/test_cluster.py --ignore=tests/studies \
		--ignore=tests/kernels/test_compiled.py --ignore=tests/reports/test_verification.py

# the studies, the models that ship, and what a first use compiles
test-studies: .venv/.test
	.venv/bin/python -m pytest -q -n 2 --dist worksteal --durations 10 tests/studies tests/reports/test_verification.py \
		tests/kernels/test_compiled.py

# which lines the same tests reach
coverage: .venv/.test
	.venv/bin/python -m pytest -q --cov --cov-report=term --ignore=tests/repository/test_docs.py --ignore=tests/browser

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

# what people get from pip install: built, installed and used outside this folder
wheel: .venv/.lint
	.venv/bin/python scripts/gates/wheel.py

mutate: .venv/.test
	.venv/bin/python scripts/gates/mutate.py

docs: .venv-docs/.docs .venv/.test
	rm -rf docs/_build docs/api docs/pictures
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going -d docs/_build/doctrees -b html docs docs/_build/html
	.venv/bin/python -m pytest -q -n 2 --dist worksteal tests/repository/test_docs.py

# the code of the gallery with its text; run them in an environment with lrrn, matplotlib and Jupyter
notebooks: .venv-docs/.docs
	rm -rf out/notebooks
	mkdir -p out/notebooks
	cp docs/gallery/*.py out/notebooks
	.venv-docs/bin/sphinx_gallery_py2jupyter out/notebooks/*.py
	rm out/notebooks/*.py

bench: .venv-bench/.bench .venv-pcx/.pcx
	mkdir -p out
	.venv-bench/bin/lrrn bench --json out/bench.json --page out/bench.html

# the GPU's kernels, interpreted: slow, so on the solver's own tests only; and compiled, for which no GPU is needed
interpret: .venv/.test
	.venv/$(PIP) --no-deps triton
	TRITON_INTERPRET=1 .venv/bin/python -m pytest -q -n 2 --dist worksteal \
		tests/solvers/test_accelerated.py tests/solvers/test_half_operators.py tests/solvers/test_solver_contract.py \
		tests/learning/test_triton_step.py \
		tests/learning/test_flat_adam.py tests/learning/test_clock.py \
		tests/linalg/test_split_products.py tests/energy/test_unit_adjoint.py \
		-k "accelerated or half or triton or kernel or adam or clock or split"
	TRITON_DEFAULT_FP_FUSION=1 .venv/bin/python scripts/gates/compile_kernels.py

# results that must not depend on the make of the processor, its BLAS, threads or versions
portable: .venv/.test
	mkdir -p out
	.venv/bin/python scripts/gates/portable.py --json out/portable.json

portable-quick: .venv/.test
	.venv/bin/python scripts/gates/portable.py --quick

# bounded versions; benchmarks/results holds what the full ones found
scale-out: .venv/.test
	.venv/bin/python -m pytest -q tests/runtime/test_ranks.py tests/estimators/test_cluster.py
	.venv/bin/python scripts/gates/scale_out.py --quick
	.venv/bin/python scripts/gates/kill_ranks.py --kills 2
	.venv/bin/python scripts/gates/out_of_core.py --quick
	.venv/bin/python examples/dask_grid_search.py

# bounded versions, as above
faults: .venv/.test
	.venv/bin/python scripts/gates/kill_process.py --kills 3
	.venv/bin/python scripts/gates/fuzz.py --inputs 4000
	.venv/bin/python scripts/gates/soak.py --solves 100000

fuzz: .venv/.test
	mkdir -p out
	.venv/bin/python scripts/gates/fuzz.py --json out/fuzz.json

reproduce: .venv/.package
	.venv/bin/lrrn reproduce all --output docs/reproduction

record: .venv-bench/.bench
	for data in mnist fashion_mnist; do \
		.venv-bench/bin/lrrn record $$data --device auto --output docs/record/$$data || exit 1; \
	done

reproduce-quick: .venv/.package
	.venv/bin/lrrn reproduce all --quick --no-download
	.venv/bin/lrrn record mnist --quick --no-download --rows wide,logistic,prototypes

clean:
	rm -rf .venv .venv-bench .venv-docs .venv-oldest .venv-pcx docs/_build docs/api docs/pictures
