# The newcomer's two commands are `make demo` and `make test`; both prepare .venv on first use.
.DEFAULT_GOAL := help
.PHONY: help setup setup-oldest setup-newest demo test test-long test-oldest test-newest lint docs wheel format bench clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
DOCS := .venv-docs
WHEEL := .venv-wheel
TORCH := .venv-torch
STAMP := $(VENV)/.ready
DOCS_STAMP := $(DOCS)/.ready
OLDEST_STAMP := $(OLDEST)/.ready
NEWEST_STAMP := $(NEWEST)/.ready
BENCH_STAMP := $(VENV)/.bench-ready
TORCH_STAMP := $(TORCH)/.ready
TENSORFLOW := tensorflow-cpu~=2.21.0
# Always installed without its dependencies: it would bring a second TensorFlow.
TF_KERAS := 'tf-keras>=2.20,<2.22'
OLDEST_PAIR := tensorflow-cpu~=2.20.0 keras==3.12.0
NEWEST_TENSORFLOW := tensorflow-cpu>=2.22.0rc0,<2.23

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(STAMP) ## Make .venv with the newest supported TensorFlow and Keras

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "replicast needs Python 3.11 or newer; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)/bin/python -m pip install --quiet --editable '.[cpu,demo,page]' '$(TENSORFLOW)' --group dev
	$(VENV)/bin/python -m pip install --quiet --no-deps $(TF_KERAS)
	@touch $@

setup-oldest: $(OLDEST_STAMP)

$(OLDEST_STAMP): pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[cpu,demo,page]' $(OLDEST_PAIR) --group dev
	$(OLDEST)/bin/python -m pip install --quiet --no-deps $(TF_KERAS)
	@touch $@

setup-newest: $(NEWEST_STAMP)

# A release candidate of TensorFlow requires keras-nightly, whose files lie where those of keras do.
$(NEWEST_STAMP): pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(NEWEST)/bin/python -m pip install --quiet --editable '.[cpu,demo,page]' '$(NEWEST_TENSORFLOW)' --group dev
	$(NEWEST)/bin/python -m pip uninstall --quiet --yes keras keras-nightly
	$(NEWEST)/bin/python -m pip install --quiet --no-deps --upgrade keras keras-rs $(TF_KERAS)
	@touch $@

demo: $(STAMP) ## Two local workers train; the screen shows what happens when one of them writes
	$(VENV)/bin/replicast demo

# Debian's Chromium, for the tests of the page in a real browser. Package lists may be missing or old: then they are read first.
APT := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n) env DEBIAN_FRONTEND=noninteractive apt-get --yes --quiet
.PHONY: chromium
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  echo "Installing chromium, for the tests of the page"; \
	  $(APT) install chromium >/dev/null 2>&1 || { $(APT) update >/dev/null && $(APT) install chromium >/dev/null; }; } || { \
	  echo "The tests of the page need Chromium, which cannot be installed from here: apt-get install chromium"; exit 1; }

# What plays machines by namespaces, for the tests of several hosts. Without it, or without root, they are skipped and say so.
.PHONY: machines
machines:
	@{ command -v ip && command -v tc && command -v nft; } >/dev/null || { \
	  echo "Installing iproute2 and nftables, for the tests of several hosts"; \
	  $(APT) install iproute2 nftables >/dev/null 2>&1 || { $(APT) update && $(APT) install iproute2 nftables; } >/dev/null 2>&1; } || \
	  echo "They cannot be installed from here, and those tests are skipped: apt-get install iproute2 nftables"

# Four processes, also for two cores: half of the time of a test is waiting.
test: export PYTHONDONTWRITEBYTECODE :=  # without .pyc files every process that a test starts compiles replicast again
test: $(STAMP) chromium machines ## All tests: unit, real workers, several hosts, the page in a browser, faults, golden files
	$(VENV)/bin/python -m pytest --numprocesses 4 --dist loadgroup --no-loadscope-reorder

.PHONY: screenshots
screenshots: $(STAMP) chromium ## The pictures of the page in docs/images
	$(VENV)/bin/python -m tests.page.screenshots

test-long: $(STAMP) machines ## More of the same: restarts, examples, every training on three workers; takes much longer
	$(VENV)/bin/python -m pytest --numprocesses 2 --dist loadgroup tests/long --ignore tests/long/schedulers

.PHONY: test-keras
test-keras: $(STAMP) ## Keras' own tests in our scope and in plain Keras: what differs, and why
	$(VENV)/bin/python -m tests.long.keras_tests

SLURM := slurmctld slurmd slurm-client munge
RAY := .venv-ray
RAY_STAMP := $(RAY)/.ready
MANIFESTS := .venv-manifests
MANIFESTS_STAMP := $(MANIFESTS)/.ready
LOGGERS := .venv-loggers
LOGGERS_STAMP := $(LOGGERS)/.ready
# These environments have no pytest-xdist and no Hypothesis: the options of pyproject.toml do not fit.
ALONE := -m pytest -c /dev/null --rootdir . --import-mode importlib -ra
.PHONY: test-slurm test-ray test-manifests
test-slurm: $(STAMP) ## examples/slurm.sh on a real Slurm from Debian, on machines played by namespaces; needs root
	@command -v slurmctld >/dev/null && command -v munged >/dev/null || { \
	  echo "Installing $(SLURM)"; $(APT) install --no-install-recommends $(SLURM) >/dev/null || { \
	  $(APT) update >/dev/null && $(APT) install --no-install-recommends $(SLURM) >/dev/null; }; }
	$(VENV)/bin/python -m pytest tests/long/schedulers/test_slurm.py

test-ray: $(RAY_STAMP) ## examples/ray_train.py on a real Ray, in an environment of its own: a kill, SIGTERM, max_failures
	PYTHONPATH=. $(RAY)/bin/python $(ALONE) tests/long/schedulers/test_ray.py

test-manifests: $(MANIFESTS_STAMP) ## The Kubernetes, Kubeflow and Vertex AI examples against the schemas of their packages
	PYTHONPATH=. $(MANIFESTS)/bin/python $(ALONE) tests/long/schedulers/test_manifests.py

$(RAY_STAMP): pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(RAY)/bin/python -m pip install --quiet --editable '.[cpu,demo]' '$(TENSORFLOW)' --group ray
	@touch $@

$(MANIFESTS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(MANIFESTS)
	$(MANIFESTS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(MANIFESTS)/bin/python -m pip install --quiet --group manifests
	@touch $@

.PHONY: test-loggers
test-loggers: $(LOGGERS_STAMP) ## W&B and MLflow themselves, offline, in an environment of their own: one run of a job
	PYTHONPATH=. $(LOGGERS)/bin/python $(ALONE) tests/long/test_loggers.py

$(LOGGERS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(LOGGERS)
	$(LOGGERS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(LOGGERS)/bin/python -m pip install --quiet --editable '.[cpu,demo]' '$(TENSORFLOW)' --group loggers
	@touch $@

test-oldest: $(OLDEST_STAMP) ## The worker tests on the oldest supported TensorFlow and Keras
	$(OLDEST)/bin/python -m pytest --numprocesses 2 --dist loadgroup tests/workers

test-newest: $(NEWEST_STAMP) ## The worker tests on the newest TensorFlow, release candidates included, and the newest Keras; keras_rs
	$(NEWEST)/bin/python -m pytest --numprocesses 2 --dist loadgroup tests/workers tests/long/test_keras_rs.py

.PHONY: soak
soak: $(STAMP) ## Jobs with random faults for MINUTES=5 or until KILLS=20: what fired, and what was lost (SEED=… repeats a run)
	$(VENV)/bin/python -m tests.soak --minutes $(or $(MINUTES),$(if $(KILLS),0,5)) $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))

.PHONY: simulate
simulate: $(STAMP) ## Simulated jobs in virtual time, SEEDS=10000: what happened, which faults fired, what was lost (SEED=… shows one)
	$(VENV)/bin/python -m tests.simulator $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),10000))

.PHONY: host-faults
host-faults: $(STAMP) machines ## Links that fail, lose packets, and stopped workers on two and three hosts: the table of docs/faults.md, in 25 minutes
	$(VENV)/bin/python -m tests.hosts.faults

lint: $(STAMP) docs ## ruff, mypy --strict, and the documentation with all its links
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(DOCS_STAMP) ## Build the documentation into site/
	$(DOCS)/bin/mkdocs build --quiet --strict

# Its own environment: the tests do not wait for what they do not need.
$(DOCS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(DOCS)/bin/python -m pip install --quiet --editable '.[page]' --group docs  # mkdocs_reference.py reads the commands and the table
	@touch $@

wheel: ## Build the wheel into dist/ and test it as users get it, in an environment of its own
	rm -rf dist $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet --upgrade 'pip>=25.1' build
	$(WHEEL)/bin/python -m build --outdir dist .
	cd dist && ../$(WHEEL)/bin/python -m pip install --quiet *.whl
	cd dist && ../$(WHEEL)/bin/replicast --help > /dev/null
	cd dist && ../$(WHEEL)/bin/python -c 'import replicast; replicast.Update().scale("a", 0.5); print(replicast.__version__)'
	cd dist && ../$(WHEEL)/bin/python -m pip install --quiet "$$(ls replicast-*.whl)[cpu,demo]" '$(TENSORFLOW)'
	cd dist && ../$(WHEEL)/bin/replicast demo

format: $(STAMP) ## Let ruff rewrite what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: bench-setup ## Measure against peers, interleaved, in 25 minutes: results, pictures, docs/performance.md
	$(VENV)/bin/python -m benchmarks --publish

.PHONY: bench-quick bench-setup
bench-quick: bench-setup ## The same in two minutes: fewer questions and rounds, and nothing in docs/ changes
	$(VENV)/bin/python -m benchmarks --quick

bench-setup: $(BENCH_STAMP)
	@$(MAKE) --no-print-directory $(TORCH_STAMP) || echo "torch could not be installed: its rows will be missing"

$(BENCH_STAMP): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet --no-deps --group bench  # tf-keras would bring a second TensorFlow
	$(VENV)/bin/python -m pip install --quiet --group bench-pictures
	@touch $@

# Its own environment: torch and TensorFlow bring different copies of the same libraries.
$(TORCH_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(TORCH)/bin/python -m pip install --quiet --group bench-torch
	@touch $@

clean: ## Remove what the other targets made
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(DOCS) $(WHEEL) $(TORCH) $(RAY) $(MANIFESTS) $(LOGGERS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
