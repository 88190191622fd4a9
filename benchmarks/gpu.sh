#!/usr/bin/env bash
# Every table of a GPU, each part within 10 minutes: benchmarks/gpu.sh [--tiny]. A part that fails stops no other.
# With DONE=FOLDER the parts that are finished are noted there and left out the next time (make gpu-hour).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
failed=()
run() {  # NAME COMMAND...
  local name=$1; shift
  if [ -n "${DONE:-}" ] && [ -e "$DONE/$name" ]; then return; fi
  echo "== $name"
  if timeout 600 "$@"; then
    if [ -n "${DONE:-}" ]; then mkdir -p "$DONE" && touch "$DONE/$name"; fi
  else
    failed+=("$name")
  fi
}
for part in losses training loader evaluation embed compile; do
  run "$part" "$python" benchmarks/gpu.py "$part" "$@"
done
if [ $# -eq 0 ]; then  # it has no small sizes
  run gradient_checkpointing "$python" benchmarks/gradient_checkpointing.py
fi
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
