# One command from a clean clone to records, tables and figures: `make reproduce`. `make help` lists the rest.
#
# Settings reach Python through the environment only and are never pasted into shell text, so a value with a ; or
# a $( in it is an unknown GPU or model, not a command. What is measured is decided by the records that are there,
# never by file times; and nothing runs in parallel, because two measurements on one machine disturb each other.

override SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

SETTINGS := GPU MODELS CONTEXTS SESSIONS EXPERIMENTS WEIGHTS REQUIRE MODEL CTX ARM TRACE STRICT FROM PIP_ARGS PYTHON FILE CASES SECONDS KERNELS BITS WRITE

# A name that is no setting would be ignored in silence, and `gpu=h100` would measure something else.
strange := $(strip $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
strange := $(firstword $(filter-out $(SETTINGS),$(strange)))
ifneq ($(strange),)
small = $(shell name=$(1); echo "$${name,,}")
alike := $(strange) $(strange)s $(strange)S $(patsubst %s,%,$(patsubst %S,%,$(strange)))
meant := $(firstword $(foreach name,$(SETTINGS),$(if $(filter $(alike),$(name) $(call small,$(name))),$(name))))
hint := $(if $(meant),and $(meant)= is,and `make help` lists those there are)
$(error decode-gap: $(strange)= is no setting, $(hint); what is meant for other programs goes before `make`)
endif

# Which targets read a setting; PYTHON and PIP_ARGS say how to run any of them. A setting on the command line that none
# of the call's targets reads would be ignored in silence too. What comes from the environment is there for every call.
PLANNED := reproduce measure status summary
READ_GPU := $(PLANNED) verify figures tables paper publish export import anatomy kernels tune bench-kernels doctor
READ_MODELS := $(PLANNED)
READ_CONTEXTS := $(PLANNED)
READ_SESSIONS := $(PLANNED)
READ_EXPERIMENTS := $(PLANNED)
READ_WEIGHTS := $(PLANNED) anatomy
READ_REQUIRE := reproduce summary
READ_STRICT := verify
READ_MODEL := anatomy tune bench-kernels
READ_CTX := anatomy tune bench-kernels
READ_ARM := anatomy
READ_TRACE := anatomy
READ_BITS := tune bench-kernels
READ_SECONDS := tune
READ_KERNELS := tune
READ_WRITE := tune
READ_FROM := import
READ_FILE := provenance
READ_CASES := fuzz
CHOOSING := $(filter-out PYTHON PIP_ARGS,$(SETTINGS))
goals := $(or $(MAKECMDGOALS),help)
unread = $(and $(filter command,$(origin $(1))),$(value $(1)),$(if $(filter help $(READ_$(1)),$(goals)),,$(1)))
idle := $(firstword $(foreach name,$(CHOOSING),$(call unread,$(name))))
ifneq ($(idle),)
$(error decode-gap: $(idle)= is read by $(READ_$(idle)), and not by $(goals), which would ignore it; leave it out)
endif

GPU ?= auto
WEIGHTS ?= synthetic

# The text that was typed, unexpanded: $(value ...) keeps make itself from running a $(shell ...) in it.
define literal
override $(1) := $$(value $(1))
endef
$(foreach setting,$(SETTINGS),$(eval $(call literal,$(setting))))
export $(SETTINGS)

# Which interpreter. A given one, or that of an active conda environment, is used as it is: a cluster's or a
# container's torch stays the one that is measured. Conda's base is nobody's choice, so it does not count.
ifneq ($(PYTHON),)
PY := $(PYTHON)
else ifneq ($(and $(CONDA_PREFIX),$(filter-out base,$(or $(CONDA_DEFAULT_ENV),base))),)
PY := $(CONDA_PREFIX)/bin/python
else
PY := .venv/bin/python
OWN_VENV := yes
endif
export PY
given := command -v "$$PY" >/dev/null && [ ! -d "$$PY" ] || { why="there is no program $$PY"; \
	[[ "$$PY" != */* || ! -f "$$PY" ]] || why="$$PY is there but may not be run; chmod +x lets it, if it is one"; \
	echo "decode-gap: PYTHON: $$why" >&2; exit 2; }
need = $(if $(OWN_VENV),requirements/install.sh,$(given); "$$PY" requirements/interpreter.py) $(1)
# Sources of kernels, only where there is a CUDA compiler for them; without them their paths are unsupported, no more.
kernels = $(if $(OWN_VENV),if command -v nvcc "$${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" >/dev/null; \
	then requirements/install.sh quant || true; fi,true)

# A checkout works uninstalled, nothing phones home, and only WEIGHTS=hub may download a model.
export PYTHONPATH := $(CURDIR)/artifact$(if $(PYTHONPATH),:$(PYTHONPATH))
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
export TOKENIZERS_PARALLELISM := false
ifneq ($(WEIGHTS),hub)
export HF_HUB_OFFLINE := 1
endif

# Tests and linters see the project, not the settings of one call.
unset = env $(addprefix --unset=,$(SETTINGS))

.PHONY: help
help: ## this list
	@echo "usage: make TARGET [SETTING=value ...]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile
	@sed -n 's/^#: /  /p' Makefile
	@echo; echo "Which targets read which; on the command line, one that none of the call's targets reads is refused:"
	@printf '  %-12s %s\n' $(foreach name,$(CHOOSING),'$(name)=' '$(READ_$(name))') 'PYTHON=' any 'PIP_ARGS=' any

#:
#: GPU=auto            h100, a100, l40s, l4, h200, ..., cpu; auto is the card found, else cpu
#: MODELS= CONTEXTS=   narrow the grid: comma-separated names, comma-separated numbers
#: SESSIONS=           fresh processes per cell
#: EXPERIMENTS=        narrow to these experiments
#: WEIGHTS=synthetic   or hub, or the path of a checkpoint
#: figure-NAME table-NAME   one figure or table, such as figure-anatomy or table-grid
#: REQUIRE=measured    reproduce and summary fail if anything is replayed or missing
#: STRICT=1            verify fails on a claim that is not reproduced
#: SECONDS= KERNELS= BITS= WRITE=1   how long to tune each model, which kernels, in 16 bits or 4; keep the tiles
#: FILE= CASES=        what to trace, for provenance; how much bad input, for fuzz
#: PYTHON=python3      use this interpreter as it is and install nothing (an active conda environment likewise)
#: PIP_ARGS=           more options for pip, split at spaces, such as another index for torch

.PHONY: reproduce
reproduce: ## measure what is missing if this machine can, else replay the shipped records; rebuild everything
	@$(call need,analysis)
	@mode=$$("$$PY" -m decodegap mode); \
	if [ "$$mode" = measure ]; then $(call need,analysis measure); $(kernels); fi
	@"$$PY" -m decodegap reproduce

.PHONY: measure
measure: ## only measure: on the GPU that GPU= names or not at all; without GPU= on the card here, else the CPU
	@$(call need,analysis)
	@"$$PY" -m decodegap mode --must-measure >/dev/null
	@$(call need,analysis measure)
	@$(kernels)
	@"$$PY" -m decodegap measure

.PHONY: status
status: ## every cell, and why it will or will not be measured
	@$(call need,analysis)
	@"$$PY" -m decodegap status

.PHONY: publish
publish: ## make the local records of GPU the shipped ones
	@$(call need,analysis)
	@"$$PY" -m decodegap publish

.PHONY: figures
figures: ## every figure, from the records: the paper's, and those of your records (of GPU, or of all)
	@$(call need,analysis)
	@"$$PY" -m decodegap figures

.PHONY: tables
tables: ## every table, from the records: likewise
	@$(call need,analysis)
	@"$$PY" -m decodegap tables

.PHONY: provenance
provenance: ## which records, hosts, versions and commit are behind FILE=figures/fraction.pdf
	@$(call need,analysis)
	@"$$PY" -m decodegap provenance

figure-%: export NAME = $*
figure-%:
	@$(call need,analysis)
	@"$$PY" -m decodegap figure

table-%: export NAME = $*
table-%:
	@$(call need,analysis)
	@"$$PY" -m decodegap table

.PHONY: paper
paper: ## the paper from the records: paper/main.pdf where TeX is installed, and paper/paper.html
	@$(call need,analysis)
	@"$$PY" -m decodegap paper

.PHONY: export
export: ## pack the records of GPU, local or else shipped, for someone else
	@$(call need,analysis)
	@"$$PY" -m decodegap export

.PHONY: import
import: ## take in records that someone exported, once they are checked: FROM=their.tar
	@$(call need,analysis)
	@"$$PY" -m decodegap import

.PHONY: archive
archive: ## a tarball of everything for a DOI archive, with its checksum
	@$(call need,analysis)
	@"$$PY" -m decodegap archive

.PHONY: summary
summary: ## what was measured and where the files are
	@$(call need,analysis)
	@"$$PY" -m decodegap summary

.PHONY: verify
verify: ## a verdict for each claim, by your records of GPU or the shipped ones: STRICT=1 fails on one not reproduced
	@$(call need,analysis)
	@"$$PY" -m decodegap verify

.PHONY: anatomy
anatomy: ## where one cell's step goes, measured now: MODEL= CTX= ARM= TRACE=1
	@$(call need,analysis)
	@"$$PY" -m decodegap mode --must-measure --settings-of anatomy >/dev/null
	@$(call need,analysis measure)
	@"$$PY" -m decodegap anatomy

.PHONY: kernels
kernels: ## compile the quantised paths' kernels for this machine's card, once (measuring does it too)
	@$(call need,analysis)
	@"$$PY" -m decodegap mode --on-a-card >/dev/null
	@$(call need,analysis measure)
	@$(kernels)
	@"$$PY" -m decodegap.quant_kernels

.PHONY: tune
tune: ## the fastest tiles of the fused step on this card: MODEL= CTX= SECONDS=120 KERNELS= BITS=16 WRITE=1
	@$(call need,analysis)
	@"$$PY" -m decodegap mode --must-measure --on-a-card --settings-of tune >/dev/null
	@$(call need,analysis measure)
	@"$$PY" -m decodegap tune

.PHONY: bench-kernels
bench-kernels: ## each kernel of the fused step: bytes, time, bandwidth, target, registers: MODEL= CTX= BITS=16
	@$(call need,analysis)
	@"$$PY" -m decodegap mode --must-measure --on-a-card --settings-of bench-kernels >/dev/null
	@$(call need,analysis measure)
	@"$$PY" -m decodegap bench-kernels

.PHONY: doctor
doctor: ## whether this machine is fit to measure on, and what to do if not
	@$(call need,analysis)
	@"$$PY" -m decodegap doctor

.PHONY: lab
lab: ## JupyterLab on the notebooks, with the right kernel
	@$(call need,analysis)
	@"$$PY" -m decodegap lab

.PHONY: bench
bench: ## what the bundle itself costs a session
	@$(call need,analysis measure)
	@"$$PY" -m decodegap bench

in_two := -m "not gpu" --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: test
test: ## the tests that need no GPU, in two processes, each file in one of them
	@$(call need,analysis measure dev)
	@$(unset) "$$PY" -m pytest $(in_two)

.PHONY: test-faults
test-faults: ## inject every fault in full, with 200 kills; under 15 minutes
	@$(call need,analysis measure dev)
	@$(unset) "$$PY" -m pytest tests/faults --kills 100

.PHONY: faults-table
faults-table: ## the same, and write what was seen to docs/faults.md
	@$(call need,analysis measure dev)
	@$(unset) "$$PY" -m pytest tests/faults --kills 100 --faults-table docs/faults.md

.PHONY: fuzz
fuzz: ## bad input of every kind: CASES=10000
	@[[ "$${CASES:-10000}" =~ ^[1-9][0-9]{0,8}$$ ]] || { shown=$${CASES:0:60}; \
	echo "decode-gap: CASES: $${shown@Q} is not a whole number from 1 to 999999999" >&2; exit 2; }
	@$(call need,analysis measure dev)
	@$(filter-out --unset=CASES,$(unset)) "$$PY" -m pytest tests/fuzz --cases "$${CASES:-10000}"

.PHONY: coverage
coverage: ## branch coverage of the library in all, and what is not covered, as docs/coverage.md
	@$(call need,analysis measure dev)
	@$(unset) "$$PY" -m pytest $(in_two) --cov --cov-report=json:build/coverage.json
	@"$$PY" tests/uncovered.py build/coverage.json docs/coverage.md

.PHONY: test-gpu
test-gpu: ## the tests that need one, with the interpreter there is; nothing is installed
	@$(given); $(unset) "$$PY" -m pytest -m gpu

.PHONY: lint
lint: ## ruff, mypy, sp-repo-review, and whether the locks and environment.yml agree
	@$(call need,analysis measure dev)
	@$(unset) "$$PY" -m ruff check .
	@$(unset) "$$PY" -m ruff format --check .
	@$(unset) "$$PY" -m mypy
	@$(unset) "$$PY" -m repo_review --show err .
	@$(unset) "$$PY" requirements/compile.py --check

.PHONY: licences
licences: ## the licences of what is installed, as docs/licences.md
	@$(call need,analysis measure dev quant)
	@"$$PY" requirements/licences.py

.PHONY: sizes
sizes: ## what the locked packages take on this disk, as requirements/sizes.toml
	@$(call need,analysis measure dev)
	@"$$PY" requirements/sizes.py

.PHONY: lock
lock: ## make requirements/*.lock and environment.yml from pyproject.toml (asks the registry)
	@$(call need,analysis measure dev)
	@"$$PY" requirements/compile.py

.PHONY: schema
schema: ## export the JSON Schema of a record from the code
	@$(call need,analysis)
	@"$$PY" -m decodegap.schema >artifact/schema/record.schema.json

.PHONY: clean
clean: ## remove caches and scratch; records, shipped or local, stay
	@rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist
	@find . \( -name .venv -o -name .git \) -prune -o -name __pycache__ -prune -exec rm -rf {} +
	@if "$$PY" -c 'import decodegap, pydantic' 2>/dev/null; then "$$PY" -m decodegap clean; fi
	@echo "decode-gap: caches and scratch are gone; records and .venv are not"

.PHONY: distclean
distclean: clean ## the same, .venv, and compiled kernels
	@rm -rf .venv .cache artifact/*.egg-info
