"""Draws docs/kernels.svg from two JSON reports of `replayssm bench --suite sweep`: one over batch sizes at one length of
the ring, one over lengths at one batch size. Needs matplotlib.

usage: kernels_curves.py BATCHES.json LENGTHS.json FIGURE.svg DATE
"""

import json
import re
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers say the same once more.
STYLE = {
    "fp32": ("#0072B2", "o"),
    "bf16": ("#D55E00", "s"),
    "e4m3:row": ("#009E73", "^"),
    "fp32+e4m3:row": ("#CC79A7", "D"),
}


def stored(policy):
    """The state's formats as a label, and whether the policy is eager."""
    split = re.search(r"anchor=([^,)]+), read=([^,)]+)", policy)
    if split:
        return f"{split[1]}+{split[2]}", False
    return re.search(r"state=([^,)]+)", policy)[1], policy.startswith("eager")


def length(policy):
    return int(re.search(r"L=(\d+)", policy)[1])


def curves(report, x_of):
    """{(label, eager): sorted (x, microseconds, share)}"""
    found = {}
    for result in report["results"]:
        step = result["step"]
        point = (x_of(result), step["us"], step["share_of_read_ceiling"])
        found.setdefault(stored(result["policy"]), []).append(point)
    return {key: sorted(points) for key, points in found.items()}


def draw(axes, lines, y_index, **extra):
    for (label, eager), points in lines.items():
        colour, marker = STYLE[label]
        axes.plot(
            [p[0] for p in points],
            [p[y_index] for p in points],
            color=colour,
            marker=marker,
            linestyle="--" if eager else "-",
            label=("eager " if eager else "split " if "+" in label else "replay ") + label,
            **extra,
        )


def main(batches_path, lengths_path, figure_path, date):
    with open(batches_path) as file:
        batches = json.load(file)
    with open(lengths_path) as file:
        lengths = json.load(file)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    over_batch = curves(batches, lambda r: r["batch"])
    draw(left, over_batch, 1)
    left.set(xscale="log", yscale="log", xlabel="batch", ylabel="microseconds a step", title="Time, L = 16")
    draw(middle, over_batch, 2)
    middle.set(xscale="log", xlabel="batch", ylabel="share of the read ceiling", title="Floor over time, L = 16", ylim=(0, 1))
    replayed = [r for r in lengths["results"] if not r["policy"].startswith("eager")]
    draw(right, curves({"results": replayed}, lambda r: length(r["policy"])), 1)
    right.set(xscale="log", xlabel="L", ylabel="microseconds a step", title="Time, batch 256", ylim=(0, None))
    for axes, ticks in ((left, over_batch), (middle, over_batch), (right, None)):
        values = sorted({p[0] for line in (ticks or curves({"results": replayed}, lambda r: length(r["policy"]))).values() for p in line})
        axes.set_xticks(values, [str(v) for v in values])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    figure.suptitle(f"Mamba-2, 128 heads of 64 x 128, 8 groups; {batches['device']}, {date}", fontsize=10)
    figure.savefig(figure_path, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
