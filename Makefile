# One local verb equals CI: `make check test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo console test check ready extras arm64 compat conformance fuzz faults powercuts linearizability bench site images e2e reference format clean
help:            ## what each verb does
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 17

# Tests start hundreds of daemons: compiling the modules anew for each is half a second of each start.
export PYTHONDONTWRITEBYTECODE =

# What pip's configuration says; uv, which installs faster, does not read it. Where it fails, pip
# does the same. All indexes are equal, as they are for pip.
PIP_HAS = $$($(BIN)/python -m pip config list | sed -nE "s/^[^=]*\.$(1)='(.*)'$$/\1/p" | head -n 1)
WANTED := --editable '.[server]' --editable ./tools --group dev
# A plain `pip install torch` would take the newest CUDA build; the dev group pins the CPU one. What is imported is
# compiled when it is imported: compiling all of it takes a third of the installation.
$(STAMP): pyproject.toml tools/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing shardmesh and its development tools into $(VENV): 2.5 GB, some minutes"
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=25.1' 'uv>=0.9'
	@export UV_INDEX_STRATEGY=unsafe-best-match UV_FIND_LINKS="$(call PIP_HAS,find-links)" UV_CONSTRAINT="$(call PIP_HAS,constraint)" UV_INDEX="$(call PIP_HAS,extra-index-url)"; \
	index="$(call PIP_HAS,index-url)"; [ -z "$$index" ] || export UV_DEFAULT_INDEX="$$index"; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(WANTED) || $(BIN)/python -m pip install -qq --no-compile $(WANTED)
	@touch $(STAMP)

# The web console is built, not committed: docs/decisions/0063-web-console.md. Where npm's packages cannot be had,
# everything else works without it.
CONSOLE := meshd/server/console/files/index.html
$(CONSOLE): console/build.py console/index.html console/package-lock.json console/vite.config.ts $(shell find console/src -type f) | $(STAMP)
	@$(BIN)/python console/build.py --optional

console: $(STAMP) ## the web console, of console/, into the package: see docs/console.md
	@$(BIN)/python console/build.py

demo: $(STAMP) $(CONSOLE) ## the main job on one node: store, preprocess, train, resume, share (one to three minutes); STAY=1 keeps it up
	@$(BIN)/mesh demo $(if $(STAY),--stay)

$(BIN)/helm: | $(STAMP)
	@$(BIN)/python -m tests.kubernetes.helm_binary $(BIN) >/dev/null || echo "no helm: tests of the chart are skipped, or fail in CI"

# Files of tests go to JOBS processes, each file to one; JOBS=0: one after the other, in this process. No test is
# tried again: one that fails now and then has found a race, in itself or in what it tests.
JOBS ?= 4
test: $(STAMP) $(BIN)/helm $(CONSOLE) ## every test that runs without foreign servers, JOBS=n files at a time
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# What `test` needs beside the environment. What tests import is compiled by the one process that collects them.
ready: $(STAMP) $(BIN)/helm $(CONSOLE)

check: $(STAMP)  ## lint, types, architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.vocabulary

compat: $(STAMP) ## fifteen S3 clients over HTTP and TLS, suites of others (SUITES=folder of their checkouts); writes docs/compatibility.md
	@$(BIN)/python -m tests.compat; clients=$$?; \
	$(BIN)/python -m tests.compat.suites $(if $(SUITES),--suites $(SUITES)) && exit $$clients

conformance: $(STAMP) ## SUITE=path of a checkout of ceph's s3-tests, over HTTP and TLS, against the known failures
	@$(BIN)/python -m tests.compat.conformance $(SUITE)

MINUTES ?= 5
fuzz: $(STAMP)   ## the parsers, for MINUTES=n altogether; guided by coverage where atheris has a wheel
	@$(BIN)/python -m pip install --quiet --only-binary :all: --group fuzz || true
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

extras: $(STAMP) ## each extra with its lowest and its newest versions, in empty environments, used a little: EXTRAS="server tracing"
	@$(BIN)/python -m pip install --quiet --group extras
	@$(BIN)/python -m tests.extras $(EXTRAS)

arm64: $(STAMP)  ## the wheel on an emulated arm64: ops, a daemon and an epoch give the same bytes as here; as root
	@$(BIN)/python -m tests.arm64 $(ARGS)

FIRST ?= 1
SEEDS ?= 5
LENGTH ?= 8
faults: $(STAMP) ## nodes of a mesh killed, stopped, parted, lost … under clients; FAULTS=1000 for so many: see docs/faults.md
	@$(BIN)/python -m tests.faults --first $(FIRST) --seeds $(SEEDS) --length $(LENGTH) $(if $(FAULTS),--mixed --faults $(FAULTS)) $(ARGS)

CUTS ?= 20
powercuts: $(STAMP) ## the power fails under a daemon and its writers, on a file system that forgets what was not synced: CUTS=1000
	@$(BIN)/python -m tests.powercuts --first $(FIRST) --cuts $(CUTS) $(if $(BUG),--bug $(BUG)) $(ARGS)

linearizability: $(STAMP) ## many clients on few names under faults, every history checked: see docs/linearizability.md
	@$(BIN)/python -m tests.linearizability --first $(FIRST) --seeds $(SEEDS) $(ARGS)

bench: $(STAMP)  ## side by side with SeaweedFS, nginx and the peer loaders; keeps bench/figures, writes docs/benchmarks.md
	@$(BIN)/python -m pip install --quiet --group bench
	@$(BIN)/python -m bench $(ARGS)

SITE := .venv-site
site:            ## the documentation as a web site in .site, its links checked; VERSION=0.1: as a commit on branch gh-pages
	@test -x $(SITE)/bin/mike || { $(PYTHON) -m venv $(SITE) && $(SITE)/bin/pip install -qq --upgrade 'pip>=25.1' && $(SITE)/bin/pip install -qq --group site; }
	@$(SITE)/bin/python docs/site/pages.py .site-pages
ifdef VERSION
	@export NO_MKDOCS_2_WARNING=1 SITE_VERSIONS=mike PATH="$(CURDIR)/$(SITE)/bin:$$PATH" \
		&& mike -q deploy --update-aliases $(VERSION) $(ALIAS) && mike -q set-default latest --allow-undefined
else
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet
endif

images:          ## both container images, by docker, podman or buildah: TAG=, REGISTRY=, PYTHON=, OUT=
	@docker/build

e2e: $(STAMP) $(BIN)/helm ## what `make images` built, and the chart on the cluster of KUBECONFIG; ARGS=--help says what it needs
	@$(BIN)/python -m tests.e2e.images
	@$(BIN)/python -m tests.e2e $(ARGS)

reference: $(STAMP) ## write what is generated: a part of docs/ops.md, the chart's CRDs, docs/resources.md, docs/api.md, the types of the console
	@$(BIN)/python tests/docs/ops_page.py
	@$(BIN)/python tests/docs/api_page.py
	@$(BIN)/python tests/docs/kubernetes_pages.py
	@$(BIN)/python tests/docs/console_types.py
	@$(BIN)/python tests/docs/values_page.py

format: $(STAMP) ## apply the formatter
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:           ## remove environments and scratch data
	rm -rf $(VENV) .venv-compat .venv-site .site .site-pages .fuzz .demo .bench .linearizability
