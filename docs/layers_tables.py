"""Prints the tables of docs/layers.md from the JSON report of `replayssm layers`: python3 layers_tables.py FILE"""

import json
import math
import re
import sys


def rms(values):
    return math.sqrt(sum(v * v for v in values) / len(values))


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|" + " ---: |" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def number(x):
    return f"{x:.2e}" if x else "0"


def errors(results):
    rows = []
    for length, result in results:
        for layer in result["layers"]:
            y, state, growth = layer["y"], layer["state"], layer["growth"]
            local, bound = y["local"]["rel_l2"], layer["bound"]["y_local"]
            rows.append(
                [length, str(layer["layer"]), number(local), number(bound), f"{bound / local:.1f}"]
                + [number(y["propagated"]["rel_l2"]), number(state["local"]["rel_l2"])]
                + [number(rms([g[field] for g in growth])) for field in ("predicted", "measured")]
                + [" ".join(str(h) for h in layer["lawless_heads"])]
            )
    header = ["L", "layer", "y local", "bound", "bound / local", "y propagated", "state local", "growth: law", "measured"]
    table(header + ["heads off the law"], rows)


def leak(results):
    anchors = {}
    for length, _, form, loop, result in results:
        for layer in result["layers"]:
            anchors[length, layer["layer"], form, loop] = layer["checkpoint"]["local"]["rel_l2"]
    forms = sorted({key[2] for key in anchors})
    rows = [
        [length, str(layer)] + [number(anchors[length, layer, f, loop]) for f in forms for loop in ("closed", "open")]
        for length, layer in sorted({key[:2] for key in anchors}, key=lambda k: (int(k[0]), k[1]))
    ]
    table(["L", "layer"] + [f"{f}, {loop} loop" for f in forms for loop in ("closed", "open")], rows)


def main(path):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    pattern = r"replay\(L=(\d+), (state|anchor=fp32, read)=([^,]+?)(?:, loop=(open))?\)"
    parsed = [(*re.fullmatch(pattern, r["policy"]).groups(default="closed"), r) for r in report["results"]]
    for kind, name in (("state", "shared"), ("anchor=fp32, read", "split, anchor in fp32")):
        for form in sorted({p[2] for p in parsed}):
            print(f"#### {form}, {name}\n")
            errors([(p[0], p[4]) for p in parsed if p[1:4] == (kind, form, "closed")])
    if any(p[3] == "open" for p in parsed):
        print("#### Relative error of the anchor, split, anchor in fp32\n")
        leak([p for p in parsed if p[1] != "state"])


main(sys.argv[1])
