#!/usr/bin/env bash
# Every GPU timing in one go, each with a limit: bash benchmarks/gpu_all.sh OUT COMMIT
out=$1 commit=$2
export PYTHONPATH=$PWD WEFT_COMMIT=$commit
step() { # name, limit in seconds, command: what it printed goes to OUT/name.log
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $((SECONDS - began)) s"
}
step attention 400 python3 -W ignore -m benchmarks.gpu_attention --out "$out/gpu_attention.json"
step compiled 240 python3 -W ignore -m benchmarks.gpu_compiled
step training 400 python3 -W ignore -m benchmarks.gpu_training --out "$out/gpu_training.json"
step tokens 85 python3 -W ignore benchmarks/train_throughput.py --attentions all --no-compile --rounds 1 --steps 20 \
  --warmup 3 --seconds 70 --out "$out/tokens.json"
bench() { step "$1" "$2" python3 -W ignore -m weft.cli bench "$1" --device cuda --out "$out/$1.json" "${@:3}"; }
bench latency 45 --precision tf32 --tasks listops,imdb-byte --repeats 6 --budget 0.4
bench scaling 30 --precision bf16-true --lengths 1024,2048,4096,8192,16384,32768 --budget 1
bench cost 40 --precision bf16-mixed --budget 2
bench throughput 40 --precision bf16-mixed --models pvt-tiny,pvt-small,pvt-medium --batch 256 --budget 1
bench generation 90 --precision bf16-true --lengths 1024,8192,65536,262144 --limit 1 --budget 0.04 --repeats 5
step transformers 60 python3 -W ignore benchmarks/hf_generation.py --device cuda --rounds 2 --out "$out/transformers.json"
