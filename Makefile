# `make serve` and `make test` set up what they need in .venv and reuse it afterwards.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/llama.yaml
# A model instead of a configuration: a folder, a GGUF file, a name of the hub, or smollm2.
MODEL ?=
# auto: torch with CUDA only where there is an NVIDIA GPU. Or: cpu, cuda.
TORCH ?= auto
SUM := $(shell cat pyproject.toml constraints.txt setup.py | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(SUM)
DEV_STAMP := $(VENV)/.installed-dev-$(SUM)

.DELETE_ON_ERROR:
.PHONY: serve test test-fast test-unit test-extended test-matrix test-models test-gpu test-mutations test-triton chaos starts fuzz k8s-emulate record-clients lint bench bench-gpu \
	install install-dev clean

# What running needs.
install: $(STAMP)
# What tests and lint need, too.
install-dev: $(DEV_STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: Manta needs Python 3.11 or newer, and there is none on \
	the PATH; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python
	$(BIN)/python scripts/install.py --torch $(TORCH)
	touch $@

$(DEV_STAMP): $(BIN)/python
	$(BIN)/python scripts/install.py --torch $(TORCH) --extras dev
	touch $@ $(STAMP)

serve: install
	@exec $(BIN)/manta serve $(or $(MODEL),$(CONFIG)) $(ARGS)

# Pure scheduler, cache, sampler, protocol: under a minute.
test-fast: install-dev
	$(BIN)/python -m pytest -q $(addprefix tests/unit/,scheduler kvcache sampling protocol speculative \
		test_layout.py)

# All tests that start no server, each file in one of two processes: some eight minutes on 2 cores.
# The kernels are built before: that takes minutes, which no test's time limit allows for.
test-unit: install-dev
	-$(BIN)/python -m engine.native.build
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit benchmarks/tests -q

# Tests of engines without a server: they compute all the time, where servers wait for half of it.
IN_PROCESS := $(addprefix tests/integration/test_,adapters.py embeddings.py expert_metrics.py \
	families.py local_batch.py parallel.py shares.py speculative.py structured_output.py \
	token_exact.py windows.py)
EXTENDED_IN_PROCESS := $(addprefix tests/extended/test_,kernel_sanitizers.py smollm2_oracle.py \
	gguf_fuzz.py load_memory.py peft.py divided_architectures.py)

# Everything that needs nothing but Python, real processes included: those of servers one at a time,
# beside the other tests. Some fifteen minutes behind the unit tests; at most 15 in all is the aim.
test: test-unit
	$(BIN)/python -m tests.side_by_side \
		"$(BIN)/python -m pytest tests -q --ignore=tests/unit --ignore=tests/extended \
			--ignore=tests/chaos --ignore=tests/models $(addprefix --ignore=,$(IN_PROCESS))" \
		"$(BIN)/python -m pytest -q --timeout=1200 $(IN_PROCESS)"

# What takes longer or needs more: a clean environment, Debian packages. Installs what it needs.
test-extended: install-dev
	$(BIN)/python -m tests.side_by_side \
		"$(BIN)/python -m pytest tests/extended tests/chaos -q \
			$(addprefix --ignore=,$(EXTENDED_IN_PROCESS))" \
		"$(BIN)/python -m pytest -q --timeout=1200 $(EXTENDED_IN_PROCESS)" \
		"$(BIN)/python -m tests.mutations -q" \
		"$(MAKE) test-triton"

# Our kernels for GPUs, by Triton's interpreter, and compiled for Hopper: some four minutes. Triton (a
# gigabyte) is put beside the environment.
test-triton: install-dev
	test -d build/triton/triton || $(BIN)/python -m pip install -q --no-deps -c constraints.txt \
		--target build/triton triton
	PYTHONPATH=build/triton $(BIN)/python -m pytest -q -n 2 --dist loadfile $(addprefix tests/unit/, \
		sampling/test_triton_sampling.py attention/test_triton_kernels.py \
		layers/test_gpu_kernel.py layers/test_gpu_experts.py layers/test_triton_adapters.py)

# The full token-exact product (architectures x tp x pp x page x chunk x cache x retraction), and
# that of speculation (models x drafters x drafts x page x tp x pp), and other architectures' ranks.
test-matrix: install-dev
	$(BIN)/python -m pytest $(addprefix tests/integration/,test_token_exact.py test_speculative.py \
		test_shares.py test_families.py test_windows.py) -q --full-matrix

# Every type of model that transformers knows, tiny, against transformers; also over two ranks, with
# drafts, as embeddings, in int8 and in bfloat16: some eight minutes.
# WRITE=1: the results become the table that is shipped, and docs/models.md. TYPES="llama": only
# these, by pytest's -k.
test-models: install-dev
	$(BIN)/python -m pytest tests/models -q -k "$(TYPES)" $(if $(WRITE),--write; \
		status=$$?; $(BIN)/python scripts/models_page.py; exit $$status)

# Takes out the guards of tests/mutations, one by one: the tests that rely on them must fail.
test-mutations: install-dev
	$(BIN)/python -m tests.mutations -v

# What only a GPU can show; everything is skipped without one.
test-gpu: install-dev
	$(BIN)/python -m pytest tests/gpu -q -rs

# Every role killed and stopped under load, scaling, updates, cut clients: some 20 minutes.
# Clients that leave in every way, 200 at once, ten times: some 20 minutes for each of four servers.
# And what `make test-extended` does less of: the Python proxy, more random calls and files.
chaos: install-dev
	$(BIN)/python -m pytest tests/chaos tests/integration/test_proxies.py tests/extended \
		$(addprefix --ignore=tests/extended/,test_starts.py test_openapi_fuzz.py \
		test_k8s_emulator.py) -m full_chaos -q -s --full-chaos

# Thirty starts and stops in a row: some 15 minutes.
starts: install-dev
	$(BIN)/python -m pytest tests/extended/test_starts.py -m full_chaos -q -s --full-chaos

# Thousands of requests made from the OpenAPI document: some 20 minutes.
fuzz: install-dev
	$(BIN)/python -m pytest tests/extended/test_openapi_fuzz.py -q -s --full-chaos

# The Kubernetes manifests in pods made of namespaces, and all that happens to pods: some 20 minutes. As root.
k8s-emulate: install-dev
	$(BIN)/python -m pytest tests/extended/test_k8s_emulator.py -q -s --full-chaos

# What client libraries and agents send, in their newest versions (NAMES="codex aider": only these).
# Needs npm and package registries; some 15 minutes the first time.
record-clients: install-dev
	$(BIN)/python -m tests.recorded.record $(NAMES)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy engine

bench: install-dev
	$(BIN)/python benchmarks/radix.py
	$(BIN)/python benchmarks/serving.py

# Needs a GPU of 80 GB; some three minutes.
bench-gpu: install-dev
	$(BIN)/python benchmarks/gpu.py --save

clean:
	rm -rf $(VENV) build *.egg-info
