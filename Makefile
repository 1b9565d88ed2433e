# make demo: set up and run the main job.  make test: set up and pass the tests on three backends.

PYTHON ?= python3
BACKENDS ?= torch jax tensorflow
BIN := .venv/bin
READY := .venv/.ready
export TF_CPP_MIN_LOG_LEVEL := 3

.PHONY: setup demo lint test test-deep clean $(BACKENDS)

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[tensorflow,jax,torch,test]"
	touch $@

demo: setup
	KERAS_BACKEND=$${KERAS_BACKEND:-jax} $(BIN)/python recipes/translate.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Two workers with one thread each; little optimisation, as tiny shapes compile longer than they run.
# What JAX compiled is kept, for the processes of this run and for the next one. TensorFlow never
# lets go of what it compiled, so the tests are run in parts.
PARTS := [a-c] [d-e] f [g-l] [m-p] [q-s] t
$(BACKENDS): setup
	rm -f .coverage.$@
	@for part in $(PARTS); do \
	KERAS_BACKEND=$@ OMP_NUM_THREADS=1 COVERAGE_FILE=.coverage.$@ \
	XLA_FLAGS="--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false" \
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax_cache \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1 \
	$(BIN)/python -m pytest tests/test_$$part*.py -n 2 --cov=kformer --cov-append --cov-report= \
	$(TEST_FLAGS) || exit 1; done

test: lint
	@for backend in $(BACKENDS); do $(MAKE) --no-print-directory $$backend || exit 1; done
	$(BIN)/coverage combine --keep .coverage.*
	$(BIN)/coverage report
	$(BIN)/python tests/coverage_floor.py

test-deep:
	$(MAKE) test TEST_FLAGS=--deep

clean:
	rm -rf .venv .jax_cache build dist out runs .coverage .coverage.* *.egg-info
