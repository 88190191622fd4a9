#!/usr/bin/env bash
# Every table of a GPU, each part within 10 minutes: benchmarks/gpu.sh [--tiny]. A part that fails stops no other.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
failed=()
for part in losses training loader evaluation embed; do
  echo "== $part"
  timeout 600 "$python" benchmarks/gpu.py "$part" "$@" || failed+=("$part")
done
if [ $# -eq 0 ]; then  # it has no small sizes
  timeout 600 "$python" benchmarks/gradient_checkpointing.py || failed+=(gradient_checkpointing)
fi
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
