"""Prints a table of docs/formats-arbiter.md from the JSON report of `replayssm kl`.

usage: arbiter_tables.py formats|modifiers|lengths FILE

formats: one row a format, one column a schedule; modifiers: one row a format and schedule, one column a modifier (the
last part of the format's name, if it is sr, sr=B, rz, hadamard or ef=F); lengths: one row a format and kind of state,
one column a length L.
"""

import json
import re
import sys

MODIFIER = re.compile(r":(sr(?:=\d+)?|rz|hadamard|ef=[a-z0-9:]+)$")
POLICY = re.compile(r"(?:eager|replay)\((?:L=(\d+), )?(?:anchor=\S+, )?(?:state|read)=([^,)]+)\)")


def table(corner, rows, columns, cells, extra=None):
    extra = extra or {}
    print("| " + " | ".join([corner] + list(extra) + columns) + " |")
    print("| --- |" + " ---: |" * (len(extra) + len(columns)))
    for row in rows:
        numbers = [column.get(row, "") for column in extra.values()]
        print("| " + " | ".join([row] + numbers + [cells.get((row, c), "") for c in columns]) + " |")
    print()


def unique(items):
    return list(dict.fromkeys(items))


def kl(result):
    mean = result["kl"]["mean"]
    return "not finite" if mean is None else f"{mean:.2e}"


def main(mode, path):
    with open(path, encoding="utf-8") as file:
        results = json.load(file)["results"]
    parsed = []
    for result in results:
        text = result["policy"]
        length, form = POLICY.fullmatch(text).groups()
        kind = "eager" if text.startswith("eager") else "split" if "read=" in text else "shared"
        parsed.append((kind, int(length or 1), form, result))
    if mode == "formats":
        stored = {f: r["state"]["bytes_stored_per_sequence"] for k, _, f, r in parsed if k == "eager"}
        bf16 = stored["bf16"] / 16
        rows = sorted(unique(p[2] for p in parsed), key=lambda f: -stored[f])
        columns = unique(p[0] for p in parsed)
        bits = {f: f"{stored[f] / bf16:.2f}" for f in rows}
        table("format", rows, columns, {(f, k): kl(r) for k, _, f, r in parsed}, {"bits an element": bits})
    elif mode == "modifiers":
        split = [(MODIFIER.sub("", f), (MODIFIER.search(f) or [None, "none"])[1], k, r) for k, _, f, r in parsed]
        rows, columns = unique(f"{f}, {k}" for f, _, k, _ in split), unique(m for _, m, _, _ in split)
        table("format", rows, columns, {(f"{f}, {k}", m): kl(r) for f, m, k, r in split})
    else:
        named = [(f"{f}, {'shared' if k == 'eager' else k}", f"L = {n}", r) for k, n, f, r in parsed]
        table("format", unique(n[0] for n in named), unique(n[1] for n in named), {n[:2]: kl(n[2]) for n in named})


if len(sys.argv) != 3 or sys.argv[1] not in ("formats", "modifiers", "lengths"):
    sys.exit(__doc__)
main(*sys.argv[1:])
