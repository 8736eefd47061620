"""The page: a key of policies, five figures with their tables, and where in the text it hurts."""

from __future__ import annotations

import html
from typing import Any, Iterable

import numpy as np

from replayssm.reports import figures
from replayssm.reports.run import Run, RunPolicy

# Nothing is loaded: a page that tried would be stopped by its own policy and say so in the console.
_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; padding: 1rem;
  max-width: 44rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
figure {{ margin: 1rem 0; }} figure svg {{ width: 100%; max-width: 40rem; height: auto; display: block; }}
figcaption {{ font-size: .9rem; color: #444; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
th.text, td.text {{ text-align: left; }}
summary {{ cursor: pointer; padding: .4rem 0; }}
code {{ font-size: .92em; }}
.key {{ display: inline-block; width: .8em; height: .8em; }}
.passage {{ font-family: Georgia, serif; line-height: 1.9; overflow-wrap: anywhere; white-space: pre-wrap; }}
.passage span, .key {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
@media print {{ body {{ max-width: none; font-size: 10pt; }} figure, tr {{ break-inside: avoid; }} }}
</style>
</head>
<body>
"""
_SHADES = ["#fff", "#fdf0d9", "#fbdcae", "#f7c077", "#f0a03c", "#d97a12"]  # one hue, light to dark
_LOW = f"What is less than 10^-{figures.DECADES} of the largest stands in the table alone."
_PASSAGE = 600  # tokens of text that are shown
_WORST = 15


def page(run: Run) -> str:
    """The page of a run. Raises: nothing."""
    name = str(run.facts["model"])
    parts = [_HEAD.format(title=_text(f"replayssm: {name}")), f"<h1>{_text(name)}</h1>\n", _facts(run), _key(run)]
    parts += [
        _section(
            "pareto",
            "KL against bytes moved",
            figures.pareto(run),
            "Each letter is a policy; the bars are standard errors of the mean, the dotted line is the Pareto "
            "front: what none beats in both. A policy with a mean KL of exactly 0 has no place on a logarithmic "
            "axis and stands in the table alone.",
            _pareto_table(run),
        ),
        _section(
            "heat",
            "Errors of the layers",
            figures.heat_maps(run),
            "Relative L2 error of y = S C over all tokens and heads. Local: what the layer adds itself. "
            "Propagated: with what it inherited. Brighter is more.",
            _layer_table(run),
        ),
        _section(
            "growth",
            "Growth of the error, and the law",
            figures.growth(run),
            "Error of the state that a flush would rebuild, with the reference's layer inputs, beside sigma "
            "sqrt((1 - a^(2 L n)) / (1 - a^(2 L))) behind n stores, root mean square over heads. Policies by "
            f"colour, as in the key. {_LOW}",
            _growth_table(run),
        ),
        _section(
            "half-lives",
            "Half-life and error of each head",
            figures.half_lives(run),
            "Heads of all layers: error of the stored state, and the law's prediction sigma / "
            f"sqrt(1 - a^(2 L)). {_LOW}",
            _head_table(run),
        ),
        _section(
            "text",
            "KL over the text",
            figures.over_text(run),
            f"Means of blocks of tokens, all sequences one after the other. {_LOW}",
            _block_table(run),
        ),
        _passages(run),
        "</body>\n</html>\n",
    ]
    return "".join(parts)


def _section(name: str, title: str, svg: str, caption: str, table: str) -> str:
    if not svg:
        return ""
    return (
        f'<section id="{name}">\n<h2>{title}</h2>\n<figure>\n{svg}\n<figcaption id="{name}-caption">{caption}'
        f"</figcaption>\n</figure>\n<details>\n<summary>The numbers</summary>\n{table}</details>\n</section>\n"
    )


def _facts(run: Run) -> str:
    f = run.facts
    kernels = f", kernels fed {f['activations']}" if "activations" in f else ""
    return (
        f"<p>{f['model_type']}, {f['sequences']} &times; {f['tokens']} tokens of "
        f"<code>{_text(f['tokens_file'])}</code>, {f['precision']} on {f['device']}{kernels}; each policy against "
        f"the exact state. KL in nats.</p>\n<p><small>replayssm {f['version']}, {_text(f['git'])}, "
        f"{_text(f['build'])}; weights SHA-256 <code>{str(f['model_sha256'])[:16]}</code>; seed {f['seed']}; "
        f"{float(f['seconds']):.3g} s.</small></p>\n"
    )


def _key(run: Run) -> str:
    rows = []
    for k, p in enumerate(run.policies):
        f = p.figures
        swatch = f'<span class="key" style="background:{figures.colour(k)}"></span> {p.letter}'
        infinite = f" ({f['kl_infinite']:.0f} infinite)" if f.get("kl_infinite") else ""
        rows.append(
            [
                _Html(swatch),
                _Html(f"<code>{_text(str(p.policy))}</code>"),
                _number(p.mean) + infinite,
                _number(f.get("kl_p99")),
                f"{100 * f.get('top1_agreement', np.nan):.2f}",
                f"{f.get('nll_delta', np.nan):+.6f}",
                _kib(f["bytes_stored_per_sequence"]),
                _kib(p.moved),
            ]
        )
    return "<h2>Policies</h2>\n" + _table(
        ["", "policy", "mean KL", "p99", "top-1 %", "loss change", "stored, KiB", "moved per token, KiB"], rows, text=2
    )


def _pareto_table(run: Run) -> str:
    front = figures.pareto_front(np.array([p.moved for p in run.policies]), np.array([p.mean for p in run.policies]))
    order = sorted(range(len(run.policies)), key=lambda k: run.policies[k].moved)
    return _table(
        ["", "policy", "moved per token, KiB", "mean KL", "standard error", "front"],
        [
            [
                (p := run.policies[k]).letter,
                str(p.policy),
                _kib(p.moved),
                _number(p.mean),
                _number(p.figures.get("kl_sem")),
                "yes" if k in front else "",
            ]
            for k in order
        ],
        text=2,
    )


def _layer_table(run: Run) -> str:
    return _table(
        ["", "layer", "local", "propagated"],
        [
            [p.letter, str(i), _number(a), _number(b)]
            for p in run.policies
            for i, a, b in zip(p.layers, p.y_local, p.y_propagated)
        ],
        text=1,
    )


def _growth_table(run: Run) -> str:
    rows = []
    for e in run.layers:
        for t, measured, predicted in zip(run.sample_tokens, e.state_local, e.law(run.sample_tokens)):
            rows.append(
                [run.policies[e.policy].letter, str(e.layer), f"{t:.0f}", _number(measured), _number(predicted)]
            )
    return _table(["", "layer", "tokens", "measured", "predicted"], rows, text=1)


def _head_table(run: Run) -> str:
    rows = [
        [
            run.policies[e.policy].letter,
            str(e.layer),
            str(h),
            f"{e.half_life[h]:.4g}",
            _number(e.measured[h]),
            _number(e.predicted[h]),
            _number(e.y_local[h]),
        ]
        for e in run.layers
        for h in range(len(e.half_life))
    ]
    return _table(["", "layer", "head", "half-life, tokens", "stored state", "predicted", "y, local"], rows, text=1)


def _block_table(run: Run) -> str:
    middles, means = figures.blocks(run)
    return _table(
        ["token"] + [p.letter for p in run.policies],
        [[f"{m:.0f}"] + [_number(mean[i]) for mean in means] for i, m in enumerate(middles)],
        text=0,
    )


def _passages(run: Run) -> str:
    """The tokens that suffer most under each policy, and a passage shaded by the policy that does most to it."""
    out = ['<section id="tokens">\n<h2>Where in the text</h2>\n']
    worst = max(run.policies, key=lambda p: p.mean if np.isfinite(p.mean) else np.inf)
    out.append(
        f"<p>The distribution behind each token, shaded by its KL under {worst.letter}, "
        f"<code>{_text(str(worst.policy))}</code>: {_scale(worst)}.</p>\n{_passage(run, worst)}"
    )
    for p in run.policies:
        out.append(
            f"<details>\n<summary>The {min(_WORST, p.kl.size)} largest of {p.letter}, "
            f"<code>{_text(str(p.policy))}</code></summary>\n{_worst(run, p)}</details>\n"
        )
    return "".join(out) + "</section>\n"


def _edges(p: RunPolicy) -> Any:
    """KL from which each shade begins: quantiles, so that a few large ones do not leave the rest white."""
    return np.quantile(np.nan_to_num(p.kl, nan=0, posinf=np.finfo(float).max), [0.5, 0.75, 0.9, 0.97, 0.99])


def _scale(p: RunPolicy) -> str:
    return ", ".join(
        f'<span class="key" style="background:{c}"></span> from {_number(e)}' for c, e in zip(_SHADES[1:], _edges(p))
    )


def _passage(run: Run, p: RunPolicy) -> str:
    edges, spans = _edges(p), []
    for word, kl in zip(run.words[0][:_PASSAGE], p.kl[0]):
        shade = int(np.searchsorted(edges, kl, side="right")) if kl > 0 else 0
        spans.append(f'<span style="background:{_SHADES[shade]}">{_text(word)}</span>' if shade else _text(word))
    return f'<p class="passage">{"".join(spans)}</p>\n'


def _worst(run: Run, p: RunPolicy) -> str:
    rows = []
    length = p.kl.shape[1]
    for i in np.argsort(-np.nan_to_num(p.kl, nan=np.inf).ravel(), kind="stable")[:_WORST]:
        b, t = divmod(int(i), length)
        words = run.words[b]
        following = words[t + 1] if t + 1 < length else ""
        context = f"{_text(''.join(words[max(0, t - 8) : t]))}<b>{_text(words[t])}</b> &rarr; {_text(following)}"
        rows.append([str(b), str(t), _number(p.kl[b, t]), _Html(context)])
    return _table(["sequence", "token", "KL", "behind which token, and what came"], rows, text=0, last=True)


class _Html(str):
    """Text that is HTML already."""


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]], *, text: int, last: bool = False) -> str:
    """A table whose first `text` columns (and the last) are words, to the left."""
    heads = list(heads)
    kind = [' class="text"' if i < text or (last and i == len(heads) - 1) else "" for i in range(len(heads))]
    out = [
        '<div class="wide"><table>\n<thead><tr>',
        *(f'<th{k} scope="col">{_text(h)}</th>' for k, h in zip(kind, heads)),
        "</tr></thead>\n<tbody>\n",
    ]
    for row in rows:
        out += [
            "<tr>",
            *(f"<td{k}>{c if isinstance(c, _Html) else _text(c)}</td>" for k, c in zip(kind, row)),
            "</tr>\n",
        ]
    return "".join(out) + "</tbody></table></div>\n"


def _number(value: float | None) -> str:
    return "" if value is None or np.isnan(value) else "0" if value == 0 else f"{value:.3e}"


def _kib(value: float) -> str:
    return f"{value / 1024:,.1f}"


def _text(value: Any) -> str:
    return html.escape(str(value))
