#!/usr/bin/env bash
# Every kernel on small shapes under compute-sanitizer: memcheck, racecheck, synccheck, initcheck.
#
#   profiling/kernels/sanitize.sh                 # all four
#   profiling/kernels/sanitize.sh memcheck        # one
#
# Runs every op on CuPy arrays and the tests marked `sanitize`. They launch every kernel that the
# card's dispatch can choose, not each template instance, on arrays without spare memory behind them.
# No loop of a graph is among them: the code that the tools insert fails in the body of a
# conditional node (2025.3: an illegal address without a report).
# Writes profiling/out/sanitize-<tool>.log; fails if any tool finds anything.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if ! command -v compute-sanitizer >/dev/null; then
  echo "sanitize.sh: no compute-sanitizer: it comes with the CUDA toolkit, package cuda-sanitizer-13-0" >&2
  exit 127
fi
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
tools=("$@")
if [ $# -eq 0 ]; then tools=(memcheck racecheck synccheck initcheck); fi
mkdir -p profiling/out

run() {
  # The default number of barriers of synccheck counts instructions; barriers are made per lane.
  local sanitizer=(compute-sanitizer --tool "$1" --num-cuda-barriers 256 --error-exitcode 9
    --print-limit 20)
  "${sanitizer[@]}" "$python" -m tests.csrc.plain_arrays cupy &&
    "${sanitizer[@]}" "$python" -m pytest -q -x -m "sanitize and gpu" tests/csrc
}

# In parallel: each tool mostly uses one core, to import torch.
declare -A pids
for tool in "${tools[@]}"; do
  run "$tool" >"profiling/out/sanitize-$tool.log" 2>&1 &
  pids[$tool]=$!
done
failed=0
for tool in "${tools[@]}"; do
  if wait "${pids[$tool]}"; then
    echo "sanitize.sh: $tool: clean"
  else
    failed=1
    echo "sanitize.sh: $tool: FAILED, profiling/out/sanitize-$tool.log ends in"
    tail -n 40 "profiling/out/sanitize-$tool.log"
  fi
done
echo "wrote profiling/out/sanitize-*.log"
echo "next: $python -m pytest -m gpu"
exit $failed
