#!/usr/bin/env bash
# Builds what a GPU is needed for, then runs it: tests of the kernels, the same under compute-sanitizer on small shapes,
# the errors and the correct digits of the trained models' layers, and the benchmark. Writes logs and summary.json into
# $OUT (build-gpu/out). Ends with 1 if anything failed.
#
#   tests/gpu.sh [CMAKE ARGUMENT]...
#
# BUILD: build folder (build-gpu). JOBS: parallel jobs (all cores). LIMIT: seconds for everything (510). SKIP: stages to
# leave out, in one word list of: build tests sanitize layers oracle bench. SUITE: of the benchmark (quick).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
build=${BUILD:-build-gpu} jobs=${JOBS:-$(nproc)} limit=${LIMIT:-510} skip=" ${SKIP:-} "
out=${OUT:-$build/out}
mkdir -p "$out"
command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer >/dev/null || PATH=$PATH:/usr/local/cuda/compute-sanitizer

results=() failed=0

# stage NAME SECONDS LOG COMMAND...: one entry of the summary. Output goes to the log, its end to the terminal.
stage() {
  local name=$1 most=$2 log=$out/$3 begin=$SECONDS rc
  shift 3
  local left=$((limit - SECONDS))
  if ((left < 5)); then
    echo "== $name: no time left"
    results+=("{\"stage\": \"$name\", \"rc\": null, \"seconds\": 0}")
    failed=1
    return 1
  fi
  echo "== $name: $*"
  { echo "== $name: $*"; timeout --kill-after=5 $((most < left ? most : left)) "$@"; } >>"$log" 2>&1
  rc=$?
  tail -c 2500 "$log"
  echo "== $name: rc $rc after $((SECONDS - begin)) s"
  results+=("{\"stage\": \"$name\", \"rc\": $rc, \"seconds\": $((SECONDS - begin))}")
  ((rc == 0)) || failed=1
  return "$rc"
}

wanted() { [[ $skip != *" $1 "* ]]; }

# shellcheck disable=SC2317  # run by the trap
summarise() {
  local device
  device=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
  local IFS=,
  printf '{"device": "%s", "revision": "%s", "failed": %s, "stages": [%s]}\n' "$device" \
    "$(git describe --always --dirty 2>/dev/null)" "$failed" "${results[*]}" >"$out/summary.json"
  cat "$out/summary.json"
}
trap summarise EXIT

rm -f "$out"/{build,cuda_tests,sanitizer,layers,oracle,bench}.log
if wanted build; then
  generator=()
  [[ -f $build/CMakeCache.txt ]] || ! command -v ninja >/dev/null || generator=(-G Ninja)
  stage configure 60 build.log cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DREPLAYSSM_CUDA=ON -DREPLAYSSM_BENCH=OFF "$@" || exit 1
  stage build 400 build.log cmake --build "$build" --parallel "$jobs" --target replayssm cuda_tests || exit 1
fi

tests=$build/tests/cuda_tests
if wanted tests; then
  stage tests 240 cuda_tests.log "$tests" --gtest_output="json:$out/cuda_tests.json"
  if grep -q "no CUDA device" "$out/cuda_tests.log"; then
    echo "gpu.sh: the tests found no device that the kernels run on"
    failed=1
  fi
fi
if wanted sanitize; then
  for tool in memcheck racecheck initcheck; do
    filter='*Small*'
    # Racecheck does not see that what a warp did before it synchronised is done when one lane of it arrives at a barrier:
    # it would take every second use of a buffer, which is what the machine of one block is for, for a race.
    [[ $tool != racecheck ]] || filter='*Small*-*Small*/2'
    stage "$tool" 60 sanitizer.log compute-sanitizer --tool "$tool" --error-exitcode 3 --print-limit 10 \
      "$tests" --gtest_filter="$filter"
  done
fi
if wanted layers; then  # local errors, layer by layer, of the CPU and of the kernels
  stage layers 60 layers.log python3 tests/gpu_layers.py "$build/replayssm" "$build/layers"
fi
if wanted oracle; then  # correct digits of layers, of the CPU and of the kernels
  stage oracle 60 oracle.log python3 tests/gpu_oracle.py "$build/replayssm" "$build/oracle"
fi
if wanted bench && "$build/replayssm" bench --help >/dev/null 2>&1; then
  stage bench 120 bench.log "$build/replayssm" bench --suite "${SUITE:-quick}" --json "$out/bench.json"
fi
exit "$failed"
