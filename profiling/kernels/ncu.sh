#!/usr/bin/env bash
# Kernels of one op under Nsight Compute: time, share of DRAM and tensor peaks, registers, occupancy.
#
#   profiling/kernels/ncu.sh attention                          # the cases of the targets
#   profiling/kernels/ncu.sh attention --only 'tree16 b1 kv8192'
#
# Profiles the launches inside the range `profile_target`, one call a case. Writes profiling/out/<op>.ncu-rep.
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
report=profiling/out/$op.ncu-rep
# Unlocked clocks, as in the benchmarks.
ncu --force-overwrite --export "$report" --target-processes all --clock-control none \
  --nvtx --nvtx-include "profile_target/" --section SpeedOfLight --section ComputeWorkloadAnalysis \
  --section LaunchStats --section Occupancy "$python" -m profiling.bench "$op" --quick --profile "$@"
ncu --import "$report" --page details
echo "wrote $report"
echo "next: ncu-ui $report    or, for every section of one case:"
echo "  ncu --set full --nvtx --nvtx-include profile_target/ $python -m profiling.bench $op --profile --only CASE"
