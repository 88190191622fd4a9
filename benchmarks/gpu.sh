#!/usr/bin/env bash
# Every table of a GPU, each part within its minutes: benchmarks/gpu.sh [--tiny]. A part that fails stops no other.
# The parts that are missing most come first, and QUICK=1 runs only these.
# With DONE=FOLDER the parts that are finished are noted there and left out the next time (make gpu-hour).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
failed=()
run() {  # NAME MINUTES COMMAND...
  local name=$1 minutes=$2; shift 2
  if [ -n "${DONE:-}" ] && [ -e "$DONE/$name" ]; then return; fi
  echo "== $name"
  if timeout "${minutes}m" "$@"; then
    if [ -n "${DONE:-}" ]; then mkdir -p "$DONE" && touch "$DONE/$name"; fi
  else
    failed+=("$name")
  fi
}
echo "at most 12 minutes: training of three backbones (8), the share of Proxy-Anchor in a step (2), tests of a GPU (2)"
if [ -z "${QUICK:-}" ]; then
  echo "then at most 50 minutes: losses, readers of images, evaluation, embed, gradient checkpointing (10 each)"
fi
run training 8 "$python" benchmarks/gpu.py training "$@"
run share 2 "$python" benchmarks/gpu.py share "$@"
run tests 2 "$python" -m pytest -q -m cuda -rs
if [ -z "${QUICK:-}" ]; then
  for part in losses loader evaluation embed; do
    run "$part" 10 "$python" benchmarks/gpu.py "$part" "$@"
  done
  if [ $# -eq 0 ]; then  # it has no small sizes
    run gradient_checkpointing 10 "$python" benchmarks/gradient_checkpointing.py
  fi
fi
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
