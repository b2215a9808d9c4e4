#!/usr/bin/env bash
# A portion of GPU time for training and timings: cells of the queue train, kernels are tested and compiled beside them,
# and the runs stand still while times are taken.
#
#     bash benchmarks/gpu_portion.sh OUT COMMIT MINUTES [CELL ...]   # cells as in experiments.queue --only
#
# OUT gets the runs, the logs and the results. TESTS, a pytest expression (-k), chooses the tests of kernels.
out=$(realpath -m "$1") commit=$2 minutes=$3
shift 3
export PYTHONPATH=$PWD:$PYTHONPATH WEFT_COMMIT=$commit TORCHINDUCTOR_COMPILE_THREADS=4 OMP_NUM_THREADS=2
python=${PYTHON:-python3 -W ignore}
mkdir -p "$out/mps" "$out/log"

say() { echo "$SECONDS s  $*"; }

alone() { # name, command: compile beside the runs, then take times with the GPU alone
  local name=$1 began=$SECONDS
  shift
  "$@" --when "$out/$name.go" > "$out/log/$name" 2>&1 &
  local job=$!
  until grep -q "^ready" "$out/log/$name" || ! kill -0 $job 2> /dev/null; do sleep 0.2; done
  touch "$out/alone" && sleep 1
  touch "$out/$name.go"
  local ready=$SECONDS
  wait $job
  say "$name: exit $?, compiled in $((ready - began)) s, timed in $((SECONDS - ready)) s"
  rm "$out/alone"
}

$python -m weft.cli data make listops --data "$out/data" > "$out/log/data" 2>&1
(
  export CUDA_MPS_PIPE_DIRECTORY=$out/mps CUDA_MPS_LOG_DIRECTORY=$out/log
  nvidia-cuda-mps-control -d
  $python -m experiments.queue --minutes "$minutes" --jobs 6 --seeds 0 --hold "$out/alone" --data "$out/data" \
    --out "$out/runs" --only "${@:-*}" > "$out/log/queue" 2>&1
  say "queue: exit $?"
) &
WEFT_TEST_DEVICE=cuda $python -m pytest -o addopts= -v -n 8 tests/kernels -k "${TESTS:-combiner-fixed}" > "$out/log/tests" 2>&1
say "tests: $(tail -n 1 "$out/log/tests")"
alone tune $python -m benchmarks.gpu_tune --only combiner-fixed --out "$out/tune.json"
alone attention $python -m benchmarks.gpu_attention --modes eager --lengths 16384 2048 512 4096 65536 --out "$out/gpu_attention.json"
wait
