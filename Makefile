# The environment is .venv; every target sets up what it needs.
PYTHON ?= python3
PROFILE ?= cpu
REPOSITORY ?= artifacts/$(PROFILE)
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
HOST ?= 0.0.0.0
VERIFY ?= auto
PROMPT ?= a red circle on the left and a blue square on the right, white background
# Further arguments for pip, such as another index that has a CPU build of torch.
PIP_ARGS ?=

BIN := .venv/bin
STAGES = --verify "$(VERIFY)" $(if $(CHECKPOINT),--checkpoint "$(CHECKPOINT)") \
    $(if $(ONNX),--onnx "$(ONNX)") $(if $(CALIBRATION),--calibration "$(CALIBRATION)") \
    $(if $(DIT_PRECISION),--dit-precision "$(DIT_PRECISION)")
MODELS := tokenize denoise encode_image

.PHONY: help setup demo test lint format onnx export calibrate serve quality verify bench clean

help:  ## what there is
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

setup: .venv/.installed  ## make .venv with everything in it

.venv/.installed: requirements.txt client/pyproject.toml
	$(PYTHON) serving/preflight.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable client
	touch $@

demo: OUT ?= demo.png
demo: export DEMO_PROMPT = $(value PROMPT)
demo: setup  ## export a small checkpoint, serve it, write demo.png [PROMPT= SEED= OUT=]
	$(BIN)/python -m serving.demo --prompt "$$DEMO_PROMPT" --output "$(OUT)" $(if $(SEED),--seed "$(SEED)")

test: setup  ## run all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy export build serving quality verification training bench client/qwen_image_client tests/make_checkpoint.py
	@for model in $(MODELS); do \
	    folder=model_repository/$$model/1; \
	    (cd $$folder && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml *.py) || exit 1; \
	done
	@cd backend/engine && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml model.py runtimes hopper

format: setup  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

onnx: setup  ## CHECKPOINT=<dir> PROFILE=<name> [ONNX=<dir>] [VERIFY=full] [CALIBRATION=<file>] [DIT_PRECISION=<recipe>]: up to the engines
	@$(BIN)/python -m build onnx --profile "$(PROFILE)" --repository "$(REPOSITORY)" $(STAGES)

export: setup  ## PROFILE=<name> CHECKPOINT=<dir> and the like of onnx, or its ONNX=<dir>; [REPOSITORY=<dir>] [TARGET=<sm>]
	@$(BIN)/python -m build export --profile "$(PROFILE)" --repository "$(REPOSITORY)" $(STAGES) \
	    $(if $(TARGET),--target "$(TARGET)")

calibrate: setup  ## CHECKPOINT=<dir> CALIBRATION=<file> [PROMPTS=<file>]: ranges for quantized engines
	@test -n "$(CHECKPOINT)" -a -n "$(CALIBRATION)" || \
	    { echo "name both: make calibrate CHECKPOINT=<dir> CALIBRATION=<file>" >&2; exit 1; }
	@$(BIN)/python -m export.calibrate --checkpoint "$(CHECKPOINT)" --out "$(CALIBRATION)" \
	    $(if $(PROMPTS),--prompts "$(PROMPTS)")

serve: setup  ## PROFILE=<name> [REPOSITORY=<dir>] [HTTP_PORT= GRPC_PORT= METRICS_PORT= HOST=]
	@exec $(BIN)/python -m serving --repository "$(REPOSITORY)" --profile "$(PROFILE)" --host "$(HOST)" \
	    --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)

quality: OUT ?= artifacts/quality
quality: setup  ## measure the pictures [OUT= SERVER=<host:port> | REPOSITORY= PROFILE=] [GATE= REFERENCE=]
	@$(BIN)/python -m quality run --out "$(OUT)" $(if $(SERVER),--server "$(SERVER)") \
	    $(if $(filter-out file,$(origin REPOSITORY) $(origin PROFILE)),--repository "$(REPOSITORY)" --profile "$(PROFILE)") \
	    $(if $(GATE),--gate "$(GATE)") $(if $(REFERENCE),--reference "$(REFERENCE)")

verify: setup  ## build, serve, check engines, pictures and speed: CHECKPOINT=<dir> PROFILE=<name> [GATE= OUT= and those of export]
	@test -n "$(CHECKPOINT)" || { echo "name the checkpoint: make verify CHECKPOINT=<dir>" >&2; exit 1; }
	@$(BIN)/python -m verification --profile "$(PROFILE)" --repository "$(REPOSITORY)" $(STAGES) \
	    $(if $(TARGET),--target "$(TARGET)") $(if $(GATE),--gate "$(GATE)") $(if $(OUT),--out "$(OUT)")

bench: setup  ## overwrite bench/results/{serving,export_memory}.json: ten minutes, 13 GB of disk, 12 GB of memory
	$(BIN)/python -m bench.serving
	$(BIN)/python -m bench.export_memory

clean:  ## remove the environment and everything exported
	rm -rf .venv artifacts demo.png .pytest_cache .mypy_cache .ruff_cache
