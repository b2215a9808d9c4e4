#!/usr/bin/env bash
# A portion of GPU time for training and timings: cells of the queue train, kernels are tested and compiled beside them,
# and the runs stand still while times are taken, once for all benchmarks.
#
#     bash benchmarks/gpu_portion.sh OUT COMMIT MINUTES [CELL ...]   # cells as in experiments.queue --only
#
# OUT gets the runs, the logs and the results. TESTS, a pytest expression (-k), chooses the tests of kernels; TIMES, the
# benchmarks (eager, compiled, training, tune); JOBS, how many cells train at a time: small models of one layer need two
# or three to use the whole GPU.
out=$(realpath -m "$1") commit=$2 minutes=$3
shift 3
export PYTHONPATH=$PWD:$PYTHONPATH WEFT_COMMIT=$commit TORCHINDUCTOR_COMPILE_THREADS=4 OMP_NUM_THREADS=2
python=${PYTHON:-python3 -W ignore}
mkdir -p "$out/mps" "$out/log"
declare -A jobs

say() { echo "$SECONDS s  $*"; }

compile() { # name, command: compile beside the runs; times are taken once there is a file OUT/name.go
  local name=$1
  shift
  nice "$@" --when "$out/$name.go" > "$out/log/$name" 2>&1 &
  jobs[$name]=$!
}

ready() { grep -q "^ready" "$out/log/$1" || ! kill -0 "${jobs[$1]}" 2> /dev/null; }

take_times() { # names: one after the other, with the GPU alone
  local name began
  for name; do until ready "$name"; do sleep 0.2; done; done
  say "compiled: $*"
  touch "$out/alone" && sleep 1
  for name; do
    began=$SECONDS
    touch "$out/$name.go"
    wait "${jobs[$name]}"
    say "$name: exit $?, timed in $((SECONDS - began)) s"
  done
  rm "$out/alone"
}

run_tests() { # name, processes, expression
  WEFT_TEST_DEVICE=cuda nice $python -m pytest -o addopts= -v -n "$2" tests/kernels -k "$3" > "$out/log/$1" 2>&1
  say "$1: $(tail -n 1 "$out/log/$1")"
}

$python -m weft.cli data make listops --data "$out/data" > "$out/log/data" 2>&1
(
  export CUDA_MPS_PIPE_DIRECTORY=$out/mps CUDA_MPS_LOG_DIRECTORY=$out/log
  nvidia-cuda-mps-control -d
  $python -m experiments.queue --minutes "$minutes" --jobs "${JOBS:-3}" --seeds 0 --hold "$out/alone" \
    --data "$out/data" --out "$out/runs" --only "${@:-*}" > "$out/log/queue" 2>&1
  say "queue: exit $?"
) &
attention="$python -m benchmarks.gpu_attention"
times=${TIMES:-eager compiled training tune} # last what may end with an error of the GPU
for name in $times; do
  case $name in
    eager) compile eager $attention --modes eager --lengths 16384 2048 512 4096 65536 --out "$out/gpu_attention.json" ;;
    compiled) compile compiled $attention --modes compiled reduced --lengths 16384 --out "$out/gpu_compiled.json" \
      --only full combiner-fixed linear local longformer sparse subsampled ;;
    training) compile training $python -m benchmarks.gpu_training --lengths 8192 2048 512 32768 131072 \
      --out "$out/gpu_training.json" ;;
    tune) compile tune $python -m benchmarks.gpu_tune --only combiner-fixed --lengths 16384 --out "$out/tune.json" ;;
  esac
done
tests=${TESTS:-combiner-fixed}
run_tests tests 6 "($tests) and not span_more"
run_tests far 1 "span_more and ($tests)" # 16 GB each
take_times $times
wait
