#!/usr/bin/env bash
# The table of the serving issue: 60M and 1B Llama shapes, jserve against vllm and llama.cpp's server.
# Usage: MODELS=dir [VLLM_PYTHON=..] [VLLM_PRELOAD=..] [LLAMACPP_SERVER=..] [LLAMACPP_SOURCE=..] bench/baseline.sh
# A peer without its variables is skipped. See bench/README.md for how to get them.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${MODELS:?a folder for the dummy models, outside the repository}"
PYTHON=${PYTHON:-python3} ROUNDS=${ROUNDS:-2} DEVICE=${DEVICE:-cpu$(nproc)} STAMP=$(date -u +%F)
VLLM_PYTHON=${VLLM_PYTHON:-} LLAMACPP_SERVER=${LLAMACPP_SERVER:-} LLAMACPP_SOURCE=${LLAMACPP_SOURCE:-}

peers=(--engine vllm --engine llamacpp)
if [ -n "$VLLM_PYTHON" ]; then peers+=(--vllm-python "$VLLM_PYTHON" --vllm-preload "${VLLM_PRELOAD:-}"); fi

one() { # model, scale
  local model=$1 scale=$2 more=()
  [ -e "$MODELS/$model/model.safetensors" ] || "$PYTHON" -m bench.models "$model" --out "$MODELS"
  if [ -n "$LLAMACPP_SERVER" ]; then
    if [ ! -e "$MODELS/$model.gguf" ] && [ -n "$LLAMACPP_SOURCE" ] && [ -n "$VLLM_PYTHON" ]; then
      "$VLLM_PYTHON" -m bench.to_gguf "$MODELS/$model" "$MODELS/$model.gguf" --llamacpp-source "$LLAMACPP_SOURCE"
    fi
    [ -e "$MODELS/$model.gguf" ] && more=(--llamacpp-server "$LLAMACPP_SERVER" --gguf "$MODELS/$model.gguf")
  fi
  # The first start of jserve finds an empty compile cache (cold), the later ones a warm one.
  "$PYTHON" -m bench.serving "$MODELS/$model" --engine jserve "${peers[@]}" "${more[@]}" \
    --rounds "$ROUNDS" --scale "$scale" \
    --json "bench/results/$STAMP-$DEVICE-serving-$model.json" || echo "$model: not every request was served" >&2
}

one llama-60m 1
one llama-1b 0.5
"$PYTHON" -m bench.headline "bench/results/$STAMP-$DEVICE-serving-"{llama-60m,llama-1b}.json
