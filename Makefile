# The two commands to know are `make demo` and `make test`. Both make their own virtual environment
# in .venv from the pinned versions in requirements.lock; a second run installs nothing.
#
# ARGS goes to the command behind a target: make demo ARGS="--kills 10", make test ARGS="-k story".

ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

# The first Python that is new enough; python3 itself where it is. Asked only when .venv is made.
find_python = for python in python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo $$python; break; \
	  fi; \
	done

define LOCK_HEADER
# Every package that `make` installs, pinned; written by `make lock` from pyproject.toml.
#
# Without hashes: pip wants them for all packages or for none, and PySpark is published as source
# only. With its hash pip builds it anew (42 s) even where a wheel built before is offered (6 s).
endef
export LOCK_HEADER

# Where it is set, each of the hundreds of processes that tests start compiles our code for itself.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo playground e3 e4 e5 e6 test quick soak versitygw check lint format lock vendor pictures clean

help:
	@echo 'make demo     a stateful stream job on local Spark that kills its own workers and proves its counts'
	@echo 'make playground  a job to break by hand, beside a board that knows the truth (ARGS=--tour: without a browser)'
	@echo 'make e3       page views from Kafka: a crash between two checkpoints (starts a broker; so does e4)'
	@echo 'make e4       the same from two partitions: with alignment exact, without it 45 too many'
	@echo 'make e5       a sink that commits between checkpoints leaves duplicates in MySQL (starts one), ours does not'
	@echo 'make e6       the snapshot of Chandy and Lamport, with three processes'
	@echo 'make test     every test'
	@echo 'make quick    the tests that need no JVM and no server, in less than three minutes'
	@echo 'make soak     the long stories: twenty kills each, also of databases and a broker, PySpark 4.0 to 4.2, two thousand simulated schedules'
	@echo 'make check    lint, formatting, types and imports'
	@echo 'make format   put the code into its format'
	@echo 'make lock     write requirements.lock anew after a change of pyproject.toml (ARGS=--upgrade for newer versions)'
	@echo 'make vendor   fetch the libraries of the page again, after a change of tools/vendor_page.py (needs npm)'
	@echo 'make pictures take the pictures in docs/pictures/ again'
	@echo 'make clean    remove .venv and everything that tools left behind'

demo: $(VENV)/project
	@$(BIN)/stillframe demo $(ARGS)

playground: $(VENV)/project
	@$(BIN)/stillframe playground $(ARGS)

# The broker is the one of the tests. With your own: docs/explain/checkpoints.md.
with_kafka = $(BIN)/python tests/shared/kafka_broker.py $(BIN)/stillframe run --quiet $(1) -- \
  --bootstrap-servers

e3: $(VENV)/project
	@$(call with_kafka,examples/e3_page_views_from_kafka.py)

e4: $(VENV)/project
	@$(call with_kafka,examples/e4_with_and_without_alignment.py)

e5: $(VENV)/project
	@$(BIN)/python tests/shared/database_servers.py $(BIN)/stillframe run --quiet \
	  examples/e5_duplicates_in_mysql.py -- --user root --url

e6: $(VENV)/project
	@$(BIN)/python examples/e6_chandy_lamport.py

# Two files at a time, the long ones first (tests/conftest.py); ARGS="-n 0" for one after the other
# in this process, as a debugger wants it. A worker that dies ends the run, and is not tried again.
test: $(VENV)/quick-java/bin/java
	@$(BIN)/python -m compileall -q src # once, and not in each of the processes that begin together
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

# A Java that starts Spark in half of the processor time: it takes half a minute once.
$(VENV)/quick-java/bin/java: $(VENV)/packages tests/shared/quick_java.py | $(VENV)/project
	@echo 'Keeping the classes of Spark for the JVMs of the tests ...'
	@$(BIN)/python tests/shared/quick_java.py $(VENV)/quick-java

# While you work: everything but what starts a JVM, a server or whole jobs.
quick: $(VENV)/project
	@$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 \
	  -m 'not spark and not cluster and not s3 and not kafka and not database and not hdfs and not browser and not slow' \
	  $(addprefix --ignore=tests/,scenarios simulation cli rest bench) $(ARGS)

# What `make test` does once or five times, done many times: kills of the driver, of slots, of
# databases, of a broker, of HDFS and of an S3 server that keeps files (`make versitygw` builds one; without it
# moto stands in), batches through Spark's evaluator, the playground's tour, simulated schedules,
# examples that hypothesis draws.
soak: $(VENV)/quick-java/bin/java
	@STILLFRAME_DRIVER_KILLS=20 $(BIN)/python -m pytest -n 0 tests/spark/test_driver_loss.py $(ARGS)
	@STILLFRAME_SOAK=1 $(BIN)/python -m pytest -n 0 tests/scenarios/test_storage_server_killed.py \
	  tests/scenarios/test_hdfs.py tests/spark/soak_bucket_on_a_cluster.py $(ARGS)
	@STILLFRAME_SOAK=1 $(BIN)/python -m pytest -n 0 -m 'soak or hypothesis' $(ARGS)
	@STILLFRAME_KILLS=20 $(BIN)/python -m pytest -n 0 -k kills tests/scenarios/test_databases.py \
	  tests/scenarios/soak_lakes_killed.py tests/scenarios/test_kafka.py \
	  tests/spark/soak_kafka_on_a_cluster.py $(ARGS)
	@STILLFRAME_KILLS=5 $(BIN)/python -m pytest -n 0 tests/spark/test_program_kills.py $(ARGS)
	@STILLFRAME_BATCHES=100000 $(BIN)/python -m pytest -n 0 --timeout 3600 -k leave_nothing_behind \
	  tests/spark/test_evaluator.py $(ARGS)
	@STILLFRAME_SOAK=1 $(BIN)/python tools/spark_versions.py $(ARGS)
	@$(BIN)/stillframe playground --tour
	@$(BIN)/stillframe simulate --seeds 2000

# Takes some minutes the first time and needs a Go toolchain.
versitygw: $(VENV)/project
	@$(BIN)/python tests/shared/s3_servers.py

check: lint
	@$(BIN)/mypy
	@$(BIN)/lint-imports

lint: $(VENV)/project
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(VENV)/project
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

lock: $(VENV)/made
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --no-header \
	  --no-emit-index-url --no-emit-find-links --no-annotate $(ARGS) \
	  --output-file requirements.lock pyproject.toml > /dev/null
	@printf '%s\n' "$$LOCK_HEADER" | cat - requirements.lock > $(VENV)/lock
	@mv $(VENV)/lock requirements.lock

vendor: $(VENV)/project
	@$(BIN)/python tools/vendor_page.py

pictures: $(VENV)/project
	@STILLFRAME_PICTURES=build/pictures $(BIN)/python -m pytest -n 0 tests/page tests/playground $(ARGS)
	@for each in docs/pictures/*.png; do cp build/pictures/$${each##*/} $$each; done

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
	  .ruff_cache artifacts derby.log metastore_db spark-warehouse
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Three stamps, so that only what changed is done again: the environment, the pinned packages, the
# project itself (editable: a change of its code needs no install).
$(VENV)/made:
	@python=$$($(find_python)); \
	if [ -z "$$python" ]; then \
	  echo 'Stillframe needs Python 3.11 or newer, but python3 is' \
	    "$$(python3 --version 2>/dev/null || echo 'not installed'): install a newer one." >&2; \
	  exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$python --version) ..."; \
	$$python -m venv --clear $(VENV)
	@touch $@

$(VENV)/packages: requirements.lock $(VENV)/made
	@echo 'Installing the packages of requirements.lock (PySpark is large; the first time takes a minute) ...'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@touch $@

$(VENV)/project: pyproject.toml $(VENV)/packages
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --editable .
	@touch $@
