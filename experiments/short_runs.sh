#!/usr/bin/env bash
# The sweeps of docs/results.md, each cut to the steps that fit into some twenty minutes of one GPU which they share:
#
#     bash experiments/short_runs.sh DATA RUNS          DATA with listops, imdb and cifar10; RUNS for the runs
#
# The text tasks' learning rate does not depend on the last step: a short run is the beginning of a long one. That of the
# pictures falls to zero at its end. Run it again to go on with what was cut.
data=$1 runs=$2
weft=${WEFT:-python3 -m weft.cli}
sweep() { # folder/file, steps, runs at a time, cells …
  local file=$1 steps=$2 jobs=$3 only=()
  shift 3
  for cell; do only+=(--only "$cell"); done
  $weft sweep "experiments/$file.py" --seeds 0 --steps "$steps" --jobs "$jobs" --data "$data" --out "$runs" "${only[@]}" \
    > "$runs/${file/\//-}.log" 2>&1
  echo "$file: exit $?, $SECONDS s"
}
mkdir -p "$runs"
sweep wide/listops 1500 4 &
(
  sweep cached/listops 1000 1 'full/*'
  sweep combiner/cifar10_grey 1000 1 'full/mean*' 'combiner-axial/mean*'
  sweep wide/imdb_byte 1000 1 'full/*' 'linear/*' 'combiner-fixed/*'
) &
wait
for folder in wide cached combiner; do
  $weft report "experiments/$folder" --runs "$runs" --out "$runs/report/$folder" > "$runs/report-$folder.log" 2>&1
done
