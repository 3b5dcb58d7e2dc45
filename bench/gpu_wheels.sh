#!/usr/bin/env bash
# Collects the wheels that bench.gpu takes to a machine without network (Linux x86-64, CPython 3.12) into
# bench/wheels/, which git ignores, and says how large they and the sources are: 64 MiB in all may travel.
#
#   bench/gpu_wheels.sh                what jserve needs
#   bench/gpu_wheels.sh flashinfer     and a peer of the stage attention_peers (or flash-attn3)
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=bench/wheels
mkdir -p "$FOLDER"
rm -f "$FOLDER"/*.whl
NAMES=$(python3 -m bench.gpu_wheels "$@")
PLATFORMS=()
for glibc in 2_28 2_27 2_24 2_17; do PLATFORMS+=(--platform "manylinux_${glibc}_x86_64"); done
xargs <<<"$NAMES" python3 -m pip download -q --no-deps --only-binary :all: -d "$FOLDER" \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${PLATFORMS[@]}" --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform any
KIB=$( (git ls-files -z; printf '%s\0' "$FOLDER"/*.whl) | du -ck --files0-from=- | tail -1 | cut -f1)
echo "$(ls "$FOLDER" | wc -l) wheels in $FOLDER, $((KIB / 1024)) MiB with the sources"
[ "$KIB" -lt 65536 ] || { echo "more than 64 MiB" >&2; exit 1; }
