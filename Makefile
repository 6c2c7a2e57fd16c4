# One folder, .venv, holds everything; nothing here needs root, a C compiler or a board.
# `make quickstart` and `make test` are all that a newcomer needs. See CONTRIBUTING.md for the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

# The first interpreter that the pins cover; set PYTHON to choose another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && { echo $$p; exit; }; \
	done; echo python3)
BIN := .venv/bin
STAMP := .venv/.complete
# Only `make lock` uses it; in a virtual environment of its own.
UV_VERSION := 0.13.8
# Only `make sbom` uses it, in the same way.
CYCLONEDX_VERSION := 7.5.0
# So many test files run beside each other. The core tests compute; the others mostly wait, on two cores, too.
JOBS ?= 2
MORE_JOBS ?= 4
# A file's tests stay together, and files come in the order of tests/conftest.py. What fails runs once more.
TOGETHER := --dist=loadfile --no-loadscope-reorder --reruns=1
SUITE := tests/acceptance tests/integration tests/contract tests/unit

.PHONY: help setup quickstart test test-shuffled test-all test-rest test-real-kernel test-real-kernel-core test-onnx gpu-bundle test-gpu test-torch \
	test-ray-floor check lint unit bench bench-long generated kept-emulations zoo-records docs pictures bench-pictures images dist dist-check sbom release lock clean

help:
	@echo "make quickstart   set up .venv, then tune, compile and time a real model on this machine"
	@echo "make test         set up .venv, then the core test suite, two files at a time (JOBS=2)"
	@echo "make test-shuffled  the same tests in a random order, none twice"
	@echo "make test-all     all tests but those below"
	@echo "make test-rest    what \`make test-all\` runs and \`make test\` does not"
	@echo "make test-real-kernel  the tests on a board with a real kernel; deploy/real-kernel-board/build makes it"
	@echo "make test-real-kernel-core  the quick core of them"
	@echo "make test-onnx    ONNX's own tests of its operators, against the verdicts that are expected"
	@echo "make gpu-bundle   build/gpu-bundle.tar.gz: kernels and models for a machine with an NVIDIA GPU"
	@echo "make test-gpu     build it, and run it on this machine"
	@echo "make test-torch   the tests with PyTorch: 5 GB to fetch on x86-64"
	@echo "make test-ray-floor  the tests of builds and of Ray with the oldest Ray: 70 MB to fetch; RAY=x.y.z for another"
	@echo "make check        lint, types, import directions and unit tests (what CI runs first)"
	@echo "make bench        what the speed claims rest on, as JSON; make bench-long: 10,000 trials of one model, 5,000 simulated farms"
	@echo "make setup        only .venv, with everything for the above"
	@echo "make generated    write JSON Schemas and tables of docs/ again"
	@echo "make docs         the documents as pages, in build/docs/html; 10 MB to fetch the first time"
	@echo "make pictures     follow docs/tutorial.md, and draw what its commands print"
	@echo "make bench-pictures  those of benches and programs, in a home of their own"
	@echo "make dist         wheel and source archive in dist/; make dist-check tries the wheel where it is alone"
	@echo "make images       images of coordinator, builder and agent, with buildah, podman or docker"
	@echo "make sbom         dist/sbom.cdx.json: all pinned packages of .venv with their licences"
	@echo "make release      check, build, write notes and tag; VERSION=x.y.z, ARGS=--dry-run"
	@echo "make lock         resolve requirements/ again from pyproject.toml"
	@echo "make clean        remove .venv and what tools left behind"

setup: $(STAMP)

# The stamp is the last thing written, so an interrupted or failed run starts over. Only wheels are taken and each must
# match its hash; where they come from is the user's own pip configuration.
$(STAMP): requirements/all.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null || { \
		echo "error: '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo no Python); tvm-farm needs Python 3.10 to 3.14." >&2; \
		echo "  Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
	@case "$$(uname -sm)" in "Linux x86_64"|"Linux aarch64") ;; *) \
		echo "error: tvm-farm runs on Linux x86-64 and aarch64, not on $$(uname -sm)." >&2; exit 2;; esac
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf .venv; $(PYTHON) -m venv .venv; } || { \
		rm -rf .venv; \
		echo "error: $(PYTHON) cannot make a virtual environment (on Debian and Ubuntu: the package python3-venv)." >&2; exit 2; }
	@echo "setup: installing the pinned wheels into .venv (560 MB to fetch the first time, 2 GB unpacked)"
	@( while sleep 10 >/dev/null 2>&1; do \
			megabytes=$$({ du -sm .venv 2>/dev/null || true; } | cut -f1); \
			test $$megabytes -lt 100 && echo "setup: fetching" || echo "setup: $$megabytes of about 2200 MB unpacked"; done ) & \
		ticker=$$!; trap 'kill $$ticker 2>/dev/null || true' EXIT; \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --only-binary=:all: \
			--no-deps --require-hashes --requirement requirements/all.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-index --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "setup: done, $$($(BIN)/python --version) in .venv"

quickstart: setup
	@$(BIN)/farm quickstart

test: setup
	@$(BIN)/python -m pytest $(TOGETHER) --numprocesses=$(JOBS) -m core $(SUITE) $(ARGS)

# In another order each time; ARGS=--random-order-seed=N repeats one.
test-shuffled: setup
	@$(BIN)/python -m pytest $(TOGETHER) --reruns=0 --random-order --numprocesses=$(JOBS) -m core $(SUITE) $(ARGS)

test-all: setup
	@$(BIN)/python -m pytest $(TOGETHER) --numprocesses=$(MORE_JOBS) $(SUITE) $(ARGS)

test-rest: setup
	@$(BIN)/python -m pytest $(TOGETHER) --numprocesses=$(MORE_JOBS) -m "not core" $(SUITE) $(ARGS)

# By themselves, one after the other: deadlines of a second are kept on the board, whose processors are this machine's.
test-real-kernel: setup
	@$(BIN)/python -m pytest -v tests/real_kernel $(ARGS)

# Without images the tests fail instead of being skipped; what fails runs once more.
test-real-kernel-core: setup
	@FARM_REQUIRE_REAL_KERNEL=1 $(BIN)/python -m pytest -v --reruns=1 -m core tests/real_kernel $(ARGS)

# All of ONNX's own tests of its operators, by two processes; ARGS='--only resize' for some of them.
test-onnx: setup
	@$(BIN)/python -m tests.onnx_suite.suite $(ARGS)

# A folder that runs on any machine with an NVIDIA GPU and its driver (docs/gpu.md).
gpu-bundle: setup
	@$(BIN)/python -m tests.gpu.bundle $(ARGS)

test-gpu: gpu-bundle
	@$(BIN)/python build/gpu-bundle/run

# The oldest Ray that pyproject.toml takes, in place of the pinned one, which all other tests run with; ARGS goes to pytest.
RAY ?= $(shell sed -n 's/^ *"ray>=\([0-9.]*\)",$$/\1/p' pyproject.toml)
test-ray-floor: setup
	@test -d build/ray/$(RAY)/ray || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input \
		--only-binary=:all: --no-deps --upgrade --target build/ray/$(RAY) ray==$(RAY)
	@export PYTHONPATH=$(CURDIR)/build/ray/$(RAY); \
		$(BIN)/python -c 'import ray; print("Ray", ray.__version__, "from", ray.__path__[0])'; \
		$(BIN)/python -m pytest -q --numprocesses=1 --dist=loadfile --reruns=1 tests/unit/test_ray_private.py \
			tests/integration/test_ray_loopback.py tests/integration/test_build_farm.py tests/integration/test_ray_cluster.py $(ARGS)

# With PyTorch, in an environment of its own: on x86-64 its wheel brings 5 GB of CUDA.
test-torch: setup
	@test -x build/torch/bin/python || $(PYTHON) -m venv build/torch
	@build/torch/bin/python -m pip install -qq --disable-pip-version-check --no-input --only-binary=:all: \
		--no-deps --require-hashes --requirement requirements/torch.txt
	@FARM_TORCH=build/torch $(BIN)/python -m pytest -v tests/torch $(ARGS)

# Side by side, for two cores; what each says comes in one piece.
check: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit:
	$(BIN)/python -m pytest -q --numprocesses=$(JOBS) --dist=loadfile tests/unit

bench: setup
	@for script in $(filter-out benchmarks/tables.py,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$script" >&2; $(BIN)/python $$script; done

# Hours: latency over 10,000 trials on a simulated Nano's processor and GPU. FARM_BENCH_HOME=FOLDER keeps what was measured.
bench-long: setup
	@$(BIN)/python -m farm.testing.simulation --seeds 10000
	@$(BIN)/python benchmarks/trials_over_time.py --trials 10000 $(ARGS)

# Files that are generated from the code and checked in. Unit tests fail where they are not current.
generated: setup
	@$(BIN)/python deploy/release/reference.py
	@$(BIN)/python benchmarks/tables.py
	@for kind in campaign fleet; do $(BIN)/farm init --schema $$kind > inventory/schemas/$$kind.schema.json; done

# What makes the pages lies beside .venv and shares its farm, whose docstrings are the Python pages.
build/docs/packages: requirements/docs.txt | setup
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: the pages take Python 3.11 or later in .venv: make clean setup PYTHON=python3.11" >&2; exit 2; }
	@rm -rf $@ && $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --only-binary=:all: \
		--no-deps --require-hashes --requirement requirements/docs.txt --target $@

# What the emulator finds in quickstart's sweep, which is the same everywhere. A unit test fails where the emulator changed.
zoo-records: setup
	@$(BIN)/python deploy/release/shipped.py zoo

kept-emulations: setup
	@$(BIN)/python deploy/release/shipped.py emulations

docs: build/docs/packages
	@rm -rf build/docs/html build/docs/trees
	@PYTHONPATH=$< $(BIN)/python -m sphinx -W --keep-going -q -E -b html -c docs -d build/docs/trees . build/docs/html
	@echo '<!doctype html><meta charset="utf-8"><title>tvm-farm</title><meta http-equiv="refresh" content="0; url=docs/index.html">' \
		> build/docs/html/index.html
	@! grep -rnE "<(script|img|iframe|link)[^>]*(src|href)=\"(https?:)?//|(url\(|@import )['\"]?(https?:)?//" \
		--include=*.html --include=*.css build/docs/html || { echo "error: pages would fetch from elsewhere" >&2; exit 1; }
	@echo build/docs/html/docs/index.html

pictures: setup
	@$(BIN)/python deploy/release/tutorial.py --pictures docs/images

# The first needs PyTorch as well; ARGS names one of runs, batches, program.
bench-pictures: setup
	@set -e; out=build/pictures; export FARM_HOME=$$PWD/$$out/home; farm=$(BIN)/farm; mkdir -p $$FARM_HOME; \
	for name in $(or $(ARGS),runs batches program); do case $$name in \
	runs) FARM_MODEL_RUNS=40 $$farm model bench squeezenet1.1 --against onnxruntime,ncnn,pytorch,rule,untuned --out $$out; \
		cp $$out/runs-squeezenet1.1.png docs/images/bench-runs.png;; \
	program) $$farm board add sim-nano --virtual jetson-nano; \
		sed -n '/spin.c/,/^gcc/p' docs/howto/sweep-any-program.md | (cd $$out && sh -e); \
		$$farm sweep run --program './spin 20' --file $$out/spin --board sim-nano --exhaustive --out $$out; \
		cp $$out/clock-a57.png docs/images/program-clocks.png;; \
	batches) $$farm model bench squeezenet1.1 --batch 1,2,4,8 --against onnxruntime --out $$out; \
		cp $$out/batches-squeezenet1.1.png docs/images/bench-batches.png;; \
	esac; done

# ARGS goes to the builder, such as --build-arg BASE=NAME; docs/howto/run-in-containers.md. OCI's format has no health checks.
images:
	@builder=$$(command -v buildah || command -v podman || command -v docker) || { \
		echo "error: no buildah, podman or docker (on Debian: apt-get install buildah)." >&2; exit 2; }; \
	case "$$builder" in *docker) format= ;; *) format=--format=docker ;; esac; \
	for image in coordinator builder agent; do \
		$$builder build $$format --target $$image --tag localhost/tvm-farm-$$image --file deploy/images/Containerfile $(ARGS) .; \
	done

# The same sources make the same bytes, here and by `python -m build`.
dist: setup
	@rm -rf dist && $(BIN)/python -m hatchling build --directory dist

dist-check: dist
	@$(BIN)/python deploy/release/check.py dist/*.whl

sbom: setup
	@test -x build/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv build/sbom && build/sbom/bin/python -m pip install -qq \
		--disable-pip-version-check cyclonedx-bom==$(CYCLONEDX_VERSION); }
	@mkdir -p dist && PYTHONWARNINGS=ignore build/sbom/bin/cyclonedx-py environment $(BIN)/python \
		--pyproject pyproject.toml --spec-version 1.6 --output-reproducible --output-file dist/sbom.cdx.json

release: setup
	@$(BIN)/python deploy/release/release.py $(VERSION) $(ARGS)

# pip's and uv's own settings are kept out: neither an index address nor a local path may reach the files.
lock:
	@$(PYTHON) -m venv build/lock && build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@compile() { env -u UV_INDEX -u UV_INDEX_URL -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS -u UV_CONFIG_FILE \
		build/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.10 \
		--generate-hashes --only-binary :all: --no-header --no-annotate "$$@"; }; \
	compile pyproject.toml --extra emulator --extra evaluate --extra gpu --extra postgresql --extra rivals --extra tflite --extra web --extra dev --output-file requirements/all.txt; \
	compile --group torch --constraint requirements/all.txt --output-file requirements/torch.txt; \
	compile --group docs --constraint requirements/all.txt --output-file requirements/docs.txt; \
	compile --group agent --constraint requirements/all.txt --output-file requirements/agent.txt
	@! grep -nE '://|^-|@ ' requirements/*.txt || { echo "error: requirements/ must hold pins and hashes only" >&2; exit 1; }

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
