#!/usr/bin/env bash
# Collects the wheels that bench.gpu takes to a machine without network (Linux x86-64, CPython 3.12) into
# bench/wheels/, which git ignores, and says how large they are: 64 MiB is what may travel.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=bench/wheels
mkdir -p "$FOLDER"
PLATFORMS=()
for glibc in 2_28 2_27 2_24 2_17; do PLATFORMS+=(--platform "manylinux_${glibc}_x86_64"); done
python3 -m bench.gpu_wheels | xargs python3 -m pip download -q --no-deps --only-binary :all: -d "$FOLDER" \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${PLATFORMS[@]}" --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform any
SIZE=$(du -sk "$FOLDER" | cut -f1)
echo "$(ls "$FOLDER" | wc -l) wheels, $((SIZE / 1024)) MiB in $FOLDER"
[ "$SIZE" -lt 65536 ] || { echo "more than 64 MiB" >&2; exit 1; }
