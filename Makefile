# make run    set up everything, fetch the default model and answer PROMPT
# make serve  the same, and serve it: a chat page and the APIs on http://127.0.0.1:8000
# make test   set up everything and run all tests, those on real models and the native ones included
# make lint   formatting, style and types
# make bench  prefill and decode speed of the default model
# make sanitize   native tests under ASan+UBSan, then TSan
# make arm    native tests for aarch64 under qemu-user (needs g++-aarch64-linux-gnu and qemu-user)
# make avx512 AVX-512 linear kernels under emulation (needs libsimde-dev)
# make fuzz   malformed model files for ten minutes

VENV ?= .venv
MODEL ?= smollm2-135m
PROMPT ?= Why is the sky blue?
TEST_MODELS ?= smollm2-135m gemma3-270m qwen2.5-coder-0.5b
PYTHON ?= python3
JOBS ?= $(shell nproc)
BIN := $(VENV)/bin
SOURCES := $(shell find src csrc -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml

.PHONY: run serve test lint bench sanitize arm avx512 fuzz native models clean

run: $(VENV)/.installed
	@test -e "$(MODEL)" || $(BIN)/gapless pull "$(MODEL)" > /dev/null
	$(BIN)/gapless run "$(MODEL)" "$(PROMPT)" --stats

serve: $(VENV)/.installed
	@test -e "$(MODEL)" || $(BIN)/gapless pull "$(MODEL)" > /dev/null
	$(BIN)/gapless serve "$(MODEL)"

bench: $(VENV)/.installed
	@test -e "$(MODEL)" || $(BIN)/gapless pull "$(MODEL)" > /dev/null
	$(BIN)/gapless bench "$(MODEL)"

models: $(VENV)/.installed
	for model in $(TEST_MODELS); do $(BIN)/gapless pull $$model || exit 1; done

test: $(VENV)/.installed-dev models native
	$(BIN)/python -m pytest

native: $(VENV)/.installed-dev
	$(BIN)/cmake -S . -B build/native -DGAPLESS_PYTHON=OFF -DGAPLESS_TESTS=ON > /dev/null
	$(BIN)/cmake --build build/native --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/native --output-on-failure

sanitize: $(VENV)/.installed-dev
	for kind in address,undefined thread; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -DGAPLESS_PYTHON=OFF -DGAPLESS_TESTS=ON -DGAPLESS_SANITIZE=$$kind \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo > /dev/null && \
	  $(BIN)/cmake --build build/sanitize-$$kind --parallel $(JOBS) && \
	  $(BIN)/ctest --test-dir build/sanitize-$$kind --output-on-failure || exit 1; \
	done

arm: $(VENV)/.installed-dev
	$(BIN)/cmake -S . -B build/arm -DGAPLESS_PYTHON=OFF -DGAPLESS_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
	  -DCMAKE_CROSSCOMPILING_EMULATOR="$$(command -v qemu-aarch64 || command -v qemu-aarch64-static)" > /dev/null
	$(BIN)/cmake --build build/arm --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/arm --output-on-failure

avx512: $(VENV)/.installed-dev
	$(BIN)/cmake -S . -B build/avx512 -DGAPLESS_PYTHON=OFF -DGAPLESS_TESTS=ON -DGAPLESS_EMULATE_AVX512=ON > /dev/null
	$(BIN)/cmake --build build/avx512 --parallel $(JOBS) --target test_linear_avx512
	build/avx512/test_linear_avx512

fuzz: $(VENV)/.installed-dev
	$(BIN)/python tests/fuzz/fuzz_loading.py --seconds 600

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	find csrc tests benchmarks \( -name '*.cpp' -o -name '*.h' \) -print0 | xargs -0 $(BIN)/clang-format --dry-run -Werror

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "Building Gapless (a few minutes the first time) ..."
	$(BIN)/pip install --quiet .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python $(SOURCES)
	@echo "Building Gapless (a few minutes the first time) ..."
	$(BIN)/pip install --quiet '.[test,lint]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf build $(VENV)
