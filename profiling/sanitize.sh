#!/usr/bin/env bash
# Every kernel on small shapes under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.
#
#   profiling/sanitize.sh                 # all four
#   profiling/sanitize.sh memcheck        # one
#
# Runs every op on CuPy arrays and the tests marked `sanitize`, with arrays that end where their
# memory ends. Fails at the first tool that finds anything. Not run on a card yet.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if ! command -v compute-sanitizer >/dev/null; then
  echo "sanitize.sh: no compute-sanitizer: it comes with the CUDA toolkit, package cuda-sanitizer-13-0" >&2
  exit 127
fi
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
tools=("$@")
if [ $# -eq 0 ]; then tools=(memcheck racecheck synccheck initcheck); fi
for tool in "${tools[@]}"; do
  sanitizer=(compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20)
  echo "sanitize.sh: $tool"
  "${sanitizer[@]}" "$python" -m tests.csrc.plain_arrays cupy
  "${sanitizer[@]}" "$python" -m pytest -q -x -m "sanitize and gpu" tests/csrc
done
