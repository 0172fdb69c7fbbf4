#!/usr/bin/env bash
# Kernels of one op under Nsight Compute: time, share of DRAM and tensor peaks, registers, occupancy.
#
#   profiling/kernels/ncu.sh attention                          # the cases of the targets
#   profiling/kernels/ncu.sh attention --only 'tree16 b1 kv8192'
#
# Profiles the launches inside the range `profile_target`, one call a case.
# Writes profiling/out/<op>.ncu-rep and .csv. Run on an H100 for attention (6ecb0d9): a table of 6 launches.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if [ $# -lt 1 ]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0"
  exit 2
fi
op=$1
shift
if ! command -v ncu >/dev/null; then
  echo "ncu.sh: no ncu: it comes with the CUDA toolkit, package cuda-nsight-compute-13-0" >&2
  exit 127
fi
mkdir -p profiling/out
report=profiling/out/$op
metrics=$("$python" -m profiling.kernels.ncu_table --metrics)
# Unlocked clocks, as in the benchmarks.
ncu --force-overwrite --export "$report.ncu-rep" --target-processes all --clock-control none \
  --nvtx --nvtx-include "profile_target/" --metrics "$metrics" \
  "$python" -m profiling.bench "$op" --quick --profile "$@"
ncu --import "$report.ncu-rep" --csv --page raw --print-units base >"$report.csv"
"$python" -m profiling.kernels.ncu_table "$report.csv"
echo "wrote $report.ncu-rep and $report.csv"
echo "next: ncu-ui $report.ncu-rep    or, for every section of one case:"
echo "  ncu --set full --nvtx --nvtx-include profile_target/ $python -m profiling.bench $op --profile --only CASE"
