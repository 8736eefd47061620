"""Local errors of layers on the decode kernels beside those of the reference, policy by policy.

    gpu_layers.py PROGRAM FOLDER

Runs `PROGRAM layers` on the models in data/ with --device cpu and --device cuda and prints a table: for every layer
the local relative L2 error of y of the CPU and of the kernels. The reports go into FOLDER. `exact`: nothing but the
state is rounded and the kernels are fed fp32; `served`: rings in bf16, and the kernels fed bf16, which they write y
in. Ends with 1 where a run fails, an error is not finite, or an exact one is far from the CPU's: beyond twice what
the format makes on the CPU and a rounding of fp32 for each of the terms of a sum.
"""

import json
import math
import os
import subprocess
import sys

MODELS = ("mamba2-5m", "gdn-hybrid-8m")
FORMATS = ("fp32", "bf16", "e4m3:row", "int8:row")
TOKENS = "512"
TERMS = 128 + 16  # of a sum: state_dim and records, at most


def policies(ring):
    for form in FORMATS:
        yield f"eager(state={form})"
        # Shared states fold the cached u in, split ones compute it again, as serving does.
        yield f"replay(L=16, state={form}{ring}, loop=open)"
        yield f"replay(L=16, anchor=fp32, read={form}{ring})"


def start(program, folder, model, kind, device):
    """A run of the program, and where its report will be."""
    served = kind == "served"
    path = os.path.join(folder, f"{model}_{kind}_{device}.json")
    command = [program, "layers", f"data/{model}", "--tokens", "data/sherlock.safetensors", "--max-tokens", TOKENS]
    command += ["--no-attribution", "--device", device, "--json", path]
    if served and device == "cuda":
        command += ["--activations", "bf16"]
    for policy in policies(", ring=bf16" if served else ""):
        command += ["-p", policy]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL), path


def errors(path):
    """Of every policy and layer; None where it is not finite."""
    with open(path, encoding="utf-8") as report:
        results = json.load(report)["results"]
    error = {}
    for result in results:
        for layer in result["layers"]:
            error[result["policy"], layer["layer"]] = layer["y"]["local"]["rel_l2"]
    return error


def main(program, folder):
    os.makedirs(folder, exist_ok=True)
    tables = [(kind, model) for kind in ("exact", "served") for model in MODELS]
    # A study keeps a few cores busy: all of them side by side.
    runs = {(t, device): start(program, folder, t[1], t[0], device) for t in tables for device in ("cpu", "cuda")}
    if any([run.wait() for run, _ in runs.values()]):
        return 1
    wrong = 0
    for table in tables:
        kind, model = table
        cpu, cuda = (errors(runs[table, device][1]) for device in ("cpu", "cuda"))
        print(f"\n{model}, {kind}, {TOKENS} tokens: local relative L2 error of y\n")
        print(f"{'policy':<58} layer        CPU       CUDA  CUDA/CPU")
        for (policy, layer), a in cpu.items():
            b = cuda[policy, layer]
            if a is None or b is None:
                print(f"{policy:<58} {layer:5}  not finite")
                wrong += 1
                continue
            far = kind == "exact" and not b <= 2 * a + TERMS * 2.0**-24
            wrong += far
            ratio = b / a if a > 0 else math.inf
            print(f"{policy:<58} {layer:5}  {a:9.3e}  {b:9.3e}  {ratio:8.3f}{'  FAR' if far else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
