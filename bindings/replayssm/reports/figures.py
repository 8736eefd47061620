"""The figures of a report, as inline SVG: 4.6 inches wide, so that their text can be read on a phone."""

from __future__ import annotations

import functools
import io
import re
from typing import Any, Callable, Iterable

import matplotlib

matplotlib.use("Agg", force=False)
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

from replayssm.reports.run import Array, Run, RunPolicy  # noqa: E402

WIDTH = 4.6
# Okabe & Ito's palette, which people see apart who do not see all colours (yellow left out: too light on white).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = {"exact": "x", "eager": "o", "shared": "s", "split": "^"}
DASHES = ["-", "--", "-.", ":"]
SMALL_MULTIPLES = 12  # layers of the growth figure
DECADES = 5  # that an axis of errors shows
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "legend.frameon": False,
}


Draw = Callable[[Run], "Figure | None"]


def drawn(name: str) -> Callable[[Draw], Callable[[Run], str]]:
    """Makes a function that draws a figure, or None where there is nothing to show, one that gives its SVG, or ""."""

    def of(draw: Draw) -> Callable[[Run], str]:
        @functools.wraps(draw)
        def svg(run: Run) -> str:
            with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
                figure = draw(run)
                return "" if figure is None else _svg(figure, name)

        return svg

    return of


def colour(index: int) -> str:
    """The colour of policy `index`; beside it always stands its letter, marker or dash."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    return DASHES[index // len(COLOURS) % len(DASHES)]


def pareto_front(costs: Array, errors: Array) -> list[int]:
    """The policies that none beats in both bytes and KL, by bytes."""
    front: list[int] = []
    for i in np.lexsort((errors, costs)):
        if np.isfinite(errors[i]) and (not front or errors[i] < errors[front[-1]]):
            front.append(int(i))
    return front


@drawn("pareto")
def pareto(run: Run) -> Figure | None:
    """Mean KL against bytes moved, with the front."""
    shown = [p for p in run.policies if p.mean > 0 and np.isfinite(p.mean)]
    if not shown:
        return None
    figure, axes = _figure(3.3)
    for k, p in enumerate(run.policies):
        if p not in shown:
            continue
        sem = p.figures.get("kl_sem", float("nan"))
        sem = min(sem, 0.9 * p.mean) if np.isfinite(sem) else 0.0  # a bar that would reach below 0 has no logarithm
        axes.errorbar(p.moved / 1024, p.mean, yerr=sem, marker=MARKERS[p.policy.kind], color=colour(k), capsize=2)
        axes.annotate(p.letter, (p.moved / 1024, p.mean), xytext=(5, 3), textcoords="offset points")
    front = pareto_front(np.array([p.moved for p in shown]), np.array([p.mean for p in shown]))
    axes.step(
        [shown[i].moved / 1024 for i in front],
        [shown[i].mean for i in front],
        where="post",
        color="#555555",
        linestyle=":",
        zorder=0,
    )
    axes.set(xscale="log", yscale="log", xlabel="state bytes moved per token, KiB", ylabel="mean KL, nats")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=6)
    kinds = [k for k in MARKERS if any(p.policy.kind == k for p in shown)]
    axes.legend([Line2D([], [], marker=MARKERS[k], color="#555555", linestyle="") for k in kinds], kinds)
    return figure


@drawn("heat")
def heat_maps(run: Run) -> Figure | None:
    """Relative L2 error of y of every layer: local where it was measured, and propagated."""
    indices = sorted({int(i) for p in run.policies for i in p.layers})
    grids = {}
    for title, of in (
        ("local: fed by the reference's stream", "y_local"),
        ("propagated: in its own run", "y_propagated"),
    ):
        grid = np.full((len(run.policies), len(indices)), np.nan)
        for k, p in enumerate(run.policies):
            grid[k, [indices.index(int(i)) for i in p.layers]] = getattr(p, of)
        grid[grid <= 0] = np.nan
        if np.isfinite(grid).any():
            grids[title] = grid
    if not grids:
        return None
    every = np.concatenate([np.log10(g[np.isfinite(g)]) for g in grids.values()])
    figure, axes = _figure(0.55 + len(grids) * (0.5 + 0.2 * len(run.policies)), len(grids))
    for ax, (title, grid) in zip(np.ravel(np.array(axes, dtype=object)), grids.items()):
        mesh = ax.pcolormesh(np.log10(grid), cmap="cividis", vmin=every.min(), vmax=max(every.max(), every.min() + 0.1))
        ax.set_title(title, fontsize=8, loc="left")
        ax.set_yticks(np.arange(len(run.policies)) + 0.5, [p.letter for p in run.policies])
        step = -(-len(indices) // 16)
        ax.set_xticks(np.arange(0, len(indices), step) + 0.5, [str(i) for i in indices[::step]])
        ax.invert_yaxis()
        ax.grid(False)
        ax.set_ylabel("policy")
        figure.colorbar(mesh, ax=ax, label="log10 rel. L2 of y")
    ax.set_xlabel("layer")
    return figure


@drawn("growth")
def growth(run: Run) -> Figure | None:
    """Local error of the states over tokens, measured and predicted, one small chart a layer."""
    layers = sorted({e.layer for e in run.layers})[:SMALL_MULTIPLES]
    if not layers:
        return None
    rows = -(-len(layers) // 2)
    figure, grid = _figure(0.7 + 1.35 * rows, rows, 2, sharex=True, sharey=True)
    axes = np.ravel(np.array(grid, dtype=object))
    for ax in axes[len(layers) :]:
        ax.set_visible(False)
    for ax, layer in zip(axes, layers):
        for e in run.layers:
            if e.layer != layer:
                continue
            ax.plot(run.sample_tokens, _positive(e.state_local), color=colour(e.policy), marker=".")
            ax.plot(run.sample_tokens, _positive(e.law(run.sample_tokens)), color=colour(e.policy), linestyle="--")
        ax.set_yscale("log")
        ax.set_title(f"layer {layer}", fontsize=8, loc="left")
    _limit(axes[0], [e.state_local for e in run.layers if e.layer in layers])
    figure.supxlabel("tokens", fontsize=8)
    figure.supylabel("relative L2 of the state, local", fontsize=8)
    _legend(
        figure,
        [p for k, p in enumerate(run.policies) if any(e.policy == k for e in run.layers)],
        run,
        [Line2D([], [], color="#555555", marker="."), Line2D([], [], color="#555555", linestyle="--")],
        ["measured", "predicted law"],
    )
    return figure


@drawn("half-lives")
def half_lives(run: Run) -> Figure | None:
    """Error of each head's stored state against its half-life, measured and predicted."""
    if not run.layers:
        return None
    figure, axes = _figure(3.3)
    for k, p in enumerate(run.policies):
        mine = [e for e in run.layers if e.policy == k]
        if not mine:
            continue
        life = np.concatenate([e.half_life for e in mine])
        axes.scatter(
            life,
            _positive(np.concatenate([e.measured for e in mine])),
            s=12,
            color=colour(k),
            marker=MARKERS[p.policy.kind],
            linewidths=0,
        )
        axes.scatter(life, _positive(np.concatenate([e.predicted for e in mine])), s=14, marker="_", color=colour(k))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="half-life of the head, tokens",
        ylabel="relative L2 of the stored state, local",
    )
    _limit(axes, [e.measured for e in run.layers])
    _legend(
        figure,
        [p for k, p in enumerate(run.policies) if any(e.policy == k for e in run.layers)],
        run,
        [
            Line2D([], [], color="#555555", marker="o", linestyle=""),
            Line2D([], [], color="#555555", marker="_", linestyle=""),
        ],
        ["measured", "predicted law"],
    )
    return figure


def blocks(run: Run, most: int = 64) -> tuple[Array, list[Array]]:
    """Middles of at most `most` blocks of tokens of all sequences in order, and each policy's mean KL in them."""
    tokens = run.policies[0].kl.size
    edges = np.unique(np.linspace(0, tokens, min(most, tokens) + 1).astype(int))
    means = []
    for p in run.policies:
        kl = np.where(np.isfinite(p.kl), p.kl, np.nan).ravel()
        with np.errstate(invalid="ignore"):
            means.append(
                np.array(
                    [
                        np.nanmean(kl[a:b]) if np.isfinite(kl[a:b]).any() else np.nan
                        for a, b in zip(edges[:-1], edges[1:])
                    ]
                )
            )
    return (edges[:-1] + edges[1:]) / 2, means


@drawn("text")
def over_text(run: Run) -> Figure | None:
    """KL over the text, block means."""
    middles, means = blocks(run)
    if not any((m > 0).any() for m in means):
        return None
    figure, axes = _figure(3.1)
    for k, mean in enumerate(means):
        axes.plot(middles, _positive(mean), color=colour(k), linestyle=dash(k))
        last = np.flatnonzero(mean > 0)
        if last.size:
            axes.annotate(
                run.policies[k].letter,
                (middles[last[-1]], mean[last[-1]]),
                xytext=(3, -2),
                textcoords="offset points",
                color=colour(k),
                annotation_clip=True,
            )
    axes.set(yscale="log", xlabel="token", ylabel="KL, nats, means of blocks")
    _limit(axes, means)
    return figure


def _positive(values: Array) -> Array:
    return np.where(values > 0, values, np.nan)


def _figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def _limit(axes: Axes, values: Iterable[Array]) -> None:
    """Shows at most DECADES below the largest value: an fp32 anchor would press the rest flat."""
    positive = np.concatenate([v[v > 0] for v in values])
    if positive.size:
        top = positive.max()
        axes.set_ylim(max(positive.min(), top / 10**DECADES) / 1.5, top * 1.5)


def _legend(figure: Figure, policies: list[RunPolicy], run: Run, more: list[Line2D], names: list[str]) -> None:
    lines = [Line2D([], [], color=colour(run.policies.index(p)), linewidth=4) for p in policies]
    figure.legend(
        lines + more,
        [p.letter for p in policies] + names,
        loc="outside upper left",
        ncols=6,
        fontsize=7,
        frameon=False,
        columnspacing=1.0,
    )


def _svg(figure: Figure, name: str) -> str:
    """The <svg> alone, without prologue, metadata and fixed size; the same for the same figure."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    tag = text.index(">")
    text = re.sub(r' (?:id|width|height)="[^"]*"', "", text[:tag]) + text[tag:]
    # Ids are those of one figure: on a page of several they need its name.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg", f'<svg role="img" aria-labelledby="{name}-caption"', 1)
