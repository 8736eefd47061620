#!/usr/bin/env bash
# Builds the Python package in a build folder and runs the tests of replayssm.transformers, which take CUDA tensors too
# where torch finds a device. For a machine with a GPU, whose Python has torch, transformers, pybind11 and pytest and
# what pyproject.toml names. Ends with 1 if anything failed, or if there was no device.
#
#   tests/gpu_python.sh [CMAKE ARGUMENT]...
#
# BUILD: build folder (build-gpu-python). JOBS: parallel jobs (all cores). PYTHON: (python3). OUT: folder of the log and
# of JUnit XML (BUILD/out). TESTS: words for pytest (tests/python/test_sequences.py tests/python/test_transformers.py).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${BUILD:-build-gpu-python} python=$(command -v "${PYTHON:-python3}") jobs=${JOBS:-$(nproc)}
out=${OUT:-$build/out}
read -ra tests <<<"${TESTS:-tests/python/test_sequences.py tests/python/test_transformers.py}"
mkdir -p "$out"

"$python" -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__, torch.cuda.get_device_name())' ||
  { echo "gpu_python.sh: torch finds no CUDA device"; exit 1; }
generator=()
[[ -f $build/CMakeCache.txt ]] || ! command -v ninja >/dev/null || generator=(-G Ninja)
cmake -S . -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DREPLAYSSM_CUDA=OFF -DREPLAYSSM_PYTHON=ON \
  -DPython_EXECUTABLE="$python" "$@" >"$out/build.log"
cmake --build "$build" --parallel "$jobs" --target replayssm_python replayssm_python_files >>"$out/build.log" ||
  { tail -n 40 "$out/build.log"; exit 1; }

parallel=()
"$python" -c 'import xdist' 2>/dev/null && parallel=(-n "$((jobs < 8 ? jobs : 8))")
PYTHONPATH=$build/python "$python" -m pytest -p no:cacheprovider -q -rs "${parallel[@]}" --durations=10 \
  --junitxml="$out/transformers.xml" "${tests[@]}" 2>&1 | tee "$out/transformers.log"
