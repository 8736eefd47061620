"""Correct digits of layers on the decode kernels beside those of the CPU in double and float.

    gpu_oracle.py PROGRAM FOLDER

Runs `PROGRAM oracle --device cuda` on the first and the last SSM layer of the models in data/, fed fp32 and fed bf16,
prints the tables and puts the reports into FOLDER. Ends with 1 where a run fails, a value is not finite, or the kernels
are far from the CPU's float: beyond twice its error, as sums may run in another order, and half an ulp of what y is
written in, or an ulp of a stored state. Also where a policy that the kernels do not know is not refused by name.
"""

import json
import os
import subprocess
import sys

LAYERS = {"mamba2-5m": (0, 7), "gdn-hybrid-8m": (0, 6)}
TOKENS = "256"
HALF_ULP = {"fp32": 2.0**-24, "bf16": 2.0**-8}
SERVED = "replay(L=16, anchor=fp32, read=int8:row, ring=bf16)"  # rounded: only shown
REFUSED = {
    "replay(L=16, state=fp32, order=sequential)": "order=closed",
    "exact": "fp32",
    "eager(state=tf32)": "found tf32",
}


def command(program, model, layer, *more):
    base = [program, "oracle", f"data/{model}", "--layer", str(layer), "--tokens", "data/sherlock.safetensors"]
    return [*base, "--max-tokens", TOKENS, "--digits", "20", "--device", "cuda", *more]


def error(digits):
    """Relative, over all tokens, of the digits of the worst head of each; None where a value is not finite."""
    if any(d is None for d in digits):
        return None
    return (sum(10 ** (-2 * d) for d in digits) / len(digits)) ** 0.5


def far(run, cpu, activations):
    """What is wrong with a run of the kernels, given the one of the CPU's float beside it."""
    for what, rounding in ("y", HALF_ULP[activations]), ("state", 2 * HALF_ULP["fp32"]):
        found, naive = (error(r[what]["least_of_heads"]) for r in (run, cpu))
        if found is None:
            yield f"{what} is not finite"
        # Inputs in bf16 are others than the CPU's: what they lose in S is not comparable.
        elif (what == "y" or activations == "fp32") and not found <= 2 * naive + rounding:
            yield f"error of {what} {found:.3e}, of the CPU's float {naive:.3e}"


def check(path, activations):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    cpu = {r["policy"]: r for r in report["results"] if r["device"] == "cpu" and r["precision"] == "fp32"}
    runs = [r for r in report["results"] if r["device"] == "cuda"]
    wrong = [] if runs else ["no run of the kernels"]
    for run in runs:
        beside = cpu["exact" if run["policy"].startswith("eager") else "replay(L=16, state=exact)"]
        if "int8" not in run["policy"]:
            wrong += [f"{run['policy']}: {what}" for what in far(run, beside, activations)]
    return wrong


def main(program, folder):
    os.makedirs(folder, exist_ok=True)
    wrong = 0
    for model, layers in LAYERS.items():
        for layer in layers:
            for activations in "fp32", "bf16":
                path = os.path.join(folder, f"{model}_{layer}_{activations}.json")
                more = ["--activations", activations, "--json", path]
                if activations == "bf16":
                    more += ["-p", "eager(state=fp32)", "-p", "replay(L=16, state=fp32)", "-p", SERVED]
                print(flush=True)
                failed = subprocess.run(command(program, model, layer, *more), check=False).returncode
                for what in [f"exit {failed}"] if failed else check(path, activations):
                    print(f"FAR: {model}, layer {layer}, {activations}: {what}")
                    wrong += 1
    for policy, part in REFUSED.items():
        refused = command(program, "mamba2-5m", 0, "-p", policy)
        run = subprocess.run(refused, capture_output=True, text=True, check=False)
        if run.returncode != 2 or policy not in run.stderr or part not in run.stderr:
            print(f"NOT REFUSED: {policy}: exit {run.returncode}, {run.stderr}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
