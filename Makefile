# Each target does the set-up it needs, into .venv; a set-up that is up to date takes no time.
#
#   make serve                      an OpenAI API on a real vLLM; MODEL=id-or-folder for another model than quickstart
#   make check                      lint, and the unit tests that the branch's changes touch: before every commit;
#                                   CHANGED=all for all, CHANGED='path ...' for what a change of these touches
#   make test                       lint, unit, integration and end-to-end tests; ARGS='tests/unit -k name' for some
#   make nightly                    all that runs in turn beside them; SLICE=3 for one slice of three minutes
#   make chaos SECONDS=600          faults at random under load; SEED=... to repeat, ENGINE=vllm for real workers
#   make soak                       chaos until there were 10,000 faults, or 300 with ENGINE=vllm; goes on where it was
#   make families                   a model of each kind that vLLM runs on a CPU: serves, is killed, moves
#   make clients                    real clients, each in an environment of its own; ARGS='--only openai' for some
#   make conformance                vLLM's own API tests; ARGS='--server vllm' to compare with vLLM's own server
#   make reference                  the pages of docs/reference that come from the code
#   make mutants                    changes at random that tests should notice; SEED=... for others, after make mutants-watch
#   make lint | bench | setup | lock
#
#   EXTRA=cuda      vLLM's CUDA build instead of the CPU one (kept from then on)
#   PYTHON=...      the Python to use (3.11, 3.12 or 3.13)
#   ARGS=...        more arguments for `dynamo serve`, pytest or the benchmarks

BIN := .venv/bin

export PYTHON SLICE

.PHONY: setup serve check test nightly lint format reference bench chaos soak families clients conformance lock mutants mutants-watch

setup:
	@scripts/setup $(if $(EXTRA),--extra $(EXTRA))

serve: setup
	@exec $(BIN)/dynamo serve '$(or $(MODEL),quickstart)' $(ARGS)

# What each runs, side by side or in turn: scripts/run_tests.py.
check: setup
	@exec $(BIN)/python -m scripts.run_tests --changed '$(or $(CHANGED),git)' lint unit

test: setup
	@exec $(BIN)/python -m scripts.run_tests $(if $(ARGS),lint -- $(ARGS))

nightly: setup
	@exec $(BIN)/python -m scripts.run_tests --repeat-failed nightly

lint: setup
	@exec $(BIN)/python -m scripts.run_tests lint

format: setup
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

reference: setup
	@exec $(BIN)/python -m scripts.reference

bench: setup
	@if [ -e benchmarks/__main__.py ]; then exec $(BIN)/python -m benchmarks $(ARGS); \
	else echo "There are no benchmarks yet: benchmarks/__main__.py is missing."; fi

chaos: setup
	@exec $(BIN)/python -m tests.chaos $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

soak: setup
	@exec $(BIN)/python -m tests.chaos.soak $(if $(FAULTS),--faults $(FAULTS)) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(SEED),--seed $(SEED)) $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

families: setup
	@exec $(BIN)/python -m pytest tests/e2e -m families $(ARGS)

# These need a network with package registries.
clients: setup
	@exec $(BIN)/python -m tests.clients $(ARGS)

conformance: setup
	@exec $(BIN)/python -m tests.conformance $(ARGS)

lock: setup
	@$(BIN)/python -m scripts.lock $(ARGS)

mutants: setup
	@exec $(BIN)/python -m scripts.mutants run $(if $(SEED),--seed $(SEED)) $(ARGS)

mutants-watch: setup
	@exec $(BIN)/python -m scripts.mutants watch $(if $(SEED),--seed $(SEED)) $(or $(ARGS),tests -n 2)
