#!/usr/bin/env bash
# A short training run under Nsight Systems: kernels, graphs and the ranges tlt/<part>/<step>.
#
#   profiling/kernels/nsys.sh                                   # three steps of the small model
#   profiling/kernels/nsys.sh preset=smollm2 model.dtype=bfloat16 run.steps=2
#
# Writes profiling/out/run.nsys-rep and prints what the ranges and kernels took. Not run on a card yet.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
if ! command -v nsys >/dev/null; then
  echo "nsys.sh: no nsys: it comes with the CUDA toolkit, package cuda-nsight-systems-13-0" >&2
  exit 127
fi
mkdir -p profiling/out
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# `preset=` must come first; settings of the caller follow the defaults and replace them.
preset=preset=tiny
if [[ ${1:-} == preset=* ]]; then
  preset=$1
  shift
fi
nsys profile --force-overwrite true --output profiling/out/run --trace cuda,nvtx,cublas \
  --cuda-graph-trace node --sample none --cpuctxsw none \
  "$python" -m driver.train "$preset" run.device=cuda run.steps=3 run.eval_prompts=0 \
  run.root="$scratch" run.name=nsys "$@"
nsys stats --force-export true --report nvtx_sum,cuda_gpu_kern_sum profiling/out/run.nsys-rep
cp "$scratch/nsys/trace.json" profiling/out/trace.json
echo "wrote profiling/out/run.nsys-rep and profiling/out/trace.json (ui.perfetto.dev)"
echo "next: nsys-ui profiling/out/run.nsys-rep    or profiling/kernels/ncu.sh attention for one op"
