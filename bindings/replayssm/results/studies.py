"""What kl() and layers() give."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from replayssm._tables import flat, frame, token_frame

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Which model was studied. `sha256` is of its weight files."""

    path: str
    type: str
    layers: int
    ssm_layers: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Provenance:
    """What produced a report: revision of the source, compiler and flags, threads, seed of stochastic rounding."""

    git: str
    build: str
    threads: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Distribution over positions of a KL divergence, nats.

    `mean` over the positions that are not infinite, `sem` its standard error by means of batches of 64 tokens,
    quantiles by linear interpolation, `infinite` a count.
    """

    mean: float
    sem: float
    p50: float
    p90: float
    p99: float
    max: float
    infinite: int


@dataclasses.dataclass(frozen=True)
class ProbabilityChange:
    """Change of the next token's probability, run minus reference: root mean square and quantiles."""

    rms: float
    p1: float
    p99: float


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """Where a run first had an infinity or NaN; token from 0."""

    token: int
    layer: int
    head: int


@dataclasses.dataclass(frozen=True)
class StateFigures:
    """Cost of a state: bytes of one sequence over all layers, flushes and rounded reads of a layer in one sequence."""

    bytes_stored_per_sequence: float
    bytes_moved_per_token: float
    flushes: int
    rounded_reads: int


@dataclasses.dataclass(frozen=True)
class LayerError:
    """Relative L2 error of a layer: fed by the reference's stream (nan where not asked for), and in its own run."""

    local: float
    propagated: float


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """What a policy did to one layer. `y_rel_l2` of y = S c before D x; `overflows` None where they are not counted."""

    layer: int
    kind: str
    y_rel_l2: LayerError
    state_rel_l2: LayerError
    overflows: int | None
    saturations: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFigures:
    """The figures of every token, arrays [sequences, length]; nan where there is no next token."""

    kl: NDArray[np.float64]
    kl_reverse: NDArray[np.float64]
    nll: NDArray[np.float64]
    nll_reference: NDArray[np.float64]
    delta_p: NDArray[np.float64]
    top1_agrees: NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class KlResult:
    """One policy against the reference. `kl` is KL(reference || run); `control`: nothing that it names is rounded."""

    policy: str
    control: bool
    kl: Divergence
    kl_reverse: Divergence
    top1_agreement: float
    top1_ties: int
    delta_p: ProbabilityChange
    overflows: int | None
    saturations: int | None
    first_non_finite: NonFinite | None
    non_finite: int
    nll: float
    nll_reference: float
    nll_delta: float
    state: StateFigures
    layers: list[LayerFigures]
    tokens: TokenFigures


@dataclasses.dataclass(frozen=True, eq=False)
class KlReport:
    """What kl() gives: `results`, one a policy, and what was run. `json` is the program's report of it."""

    model: ModelFacts
    tokens_file: str
    tokens: int
    sequences: int
    device: str
    precision: str
    seconds: float
    provenance: Provenance
    results: list[KlResult]
    json: str = dataclasses.field(repr=False)

    def to_pandas(self) -> pd.DataFrame:
        """One row a policy: KL in nats, agreement, loss, bytes. Raises: nothing."""
        return frame({**flat(r, "layers", "tokens")} for r in self.results)

    def layers_to_pandas(self) -> pd.DataFrame:
        """One row a policy and layer: relative L2 errors. Raises: nothing."""
        return frame({"policy": r.policy, **flat(layer)} for r in self.results for layer in r.layers)

    def tokens_to_pandas(self) -> pd.DataFrame:
        """One row a policy, sequence and token: KL and NLL in nats. Raises: nothing."""
        return token_frame(self.results)

    def __repr__(self) -> str:
        return f"KlReport({self.model.path!r}, {self.sequences} x {self.tokens} tokens, {len(self.results)} policies)"


@dataclasses.dataclass(frozen=True)
class Moments:
    """An error beside what it is an error of: relative L2, mean and standard deviation over the root mean square,
    largest, and in units of the last place of bf16 (mean and largest). nan where nothing was sampled."""

    rel_l2: float
    bias: float
    spread: float
    max_abs: float
    bf16_ulps: float
    max_bf16_ulps: float


@dataclasses.dataclass(frozen=True)
class LocalMoments:
    """An error that was measured with the layer fed by the reference's stream alone."""

    local: Moments


@dataclasses.dataclass(frozen=True)
class BothMoments:
    """An error fed by the reference's stream, and in the policy's own run."""

    local: Moments
    propagated: Moments


@dataclasses.dataclass(frozen=True)
class Bound:
    """First-order bound of the local relative L2 error of y, over all tokens: of all heads and of each."""

    y_local: float
    y_local_by_head: list[float]


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the error of a head's stored state grew beside predicted = sigma / sqrt(1 - decay^(2 L)).

    `decay` is the geometric mean per token, `half_life` in tokens, `sigma` the relative error of one store, `still`
    the share of the state that stands still though it should have moved. `holds`: the law within a factor of 2, or
    not to be asked of this head; `stalls`: most of it stands still.
    """

    decay: float
    half_life: float
    sigma: float
    predicted: float
    measured: float
    holds: bool
    still: float
    stalls: bool


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStudy:
    """One policy in one layer: moments of the errors of y, of the state that a flush would rebuild, of the stored
    checkpoint and of the read copy, and their curves. Samples of states are `LayersReport.sample_tokens` apart;
    `y_local_by_token` and `y_propagated_by_token` [sequences, length] are relative L2 over heads."""

    layer: int
    kind: str
    y: BothMoments
    state: BothMoments
    checkpoint: LocalMoments
    read_copy: LocalMoments
    bound: Bound
    growth: list[Growth]
    lawless_heads: list[int]
    stalled_heads: list[int]
    y_local_by_head: list[float]
    y_propagated_by_head: list[float]
    state_local_by_head: list[float]
    state_local_by_sample: list[float]
    state_propagated_by_sample: list[float]
    y_local_by_token: NDArray[np.float64]
    y_propagated_by_token: NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class LayerShare:
    """Mean KL, nats, with the policy on that layer alone."""

    layer: int
    kl_alone: float


@dataclasses.dataclass(frozen=True)
class HeadShare:
    """KL of a layer times the head's share of its squared local error of y, nats."""

    layer: int
    head: int
    kl: float


@dataclasses.dataclass(frozen=True)
class Attribution:
    """What each layer alone contributes to the KL: `whole` of all together, `sum` of the layers alone, nats."""

    whole: float
    sum: float
    layers: list[LayerShare]
    heads: list[HeadShare]


@dataclasses.dataclass(frozen=True, eq=False)
class LayersResult:
    """One policy, layer by layer, beside what KlResult says of it. `attribution` None where it was not asked for."""

    policy: str
    control: bool
    kl: Divergence
    kl_reverse: Divergence
    top1_agreement: float
    nll_delta: float
    state: StateFigures
    layers: list[LayerStudy]
    attribution: Attribution | None
    tokens: TokenFigures


@dataclasses.dataclass(frozen=True, eq=False)
class LayersReport:
    """What layers() gives: `results`, one a policy, and what was run. `sample_tokens` says after how many tokens of
    each sequence the states were sampled. `json` is the program's report of it."""

    model: ModelFacts
    tokens_file: str
    tokens: int
    sequences: int
    device: str
    precision: str
    seconds: float
    provenance: Provenance
    sample_tokens: list[int]
    results: list[LayersResult]
    json: str = dataclasses.field(repr=False)

    def to_pandas(self) -> pd.DataFrame:
        """One row a policy and layer: errors (relative L2), bound, and the KL of the layer alone. Raises: nothing."""
        rows = []
        for r in self.results:
            alone = {share.layer: share.kl_alone for share in r.attribution.layers} if r.attribution else {}
            for e in r.layers:
                rows.append(
                    {
                        "policy": r.policy,
                        "layer": e.layer,
                        "kind": e.kind,
                        "y_local": e.y.local.rel_l2,
                        "y_bound": e.bound.y_local,
                        "y_propagated": e.y.propagated.rel_l2,
                        "state_local": e.state.local.rel_l2,
                        "state_propagated": e.state.propagated.rel_l2,
                        "checkpoint_local": e.checkpoint.local.rel_l2,
                        "read_copy_local": e.read_copy.local.rel_l2,
                        "kl_alone": alone.get(e.layer, float("nan")),
                    }
                )
        return frame(rows)

    def heads_to_pandas(self) -> pd.DataFrame:
        """One row a policy, layer and head: half-life in tokens, error, and the growth law. Raises: nothing."""
        return frame(
            {
                "policy": r.policy,
                "layer": e.layer,
                "head": h,
                **dataclasses.asdict(g),
                "y_local": e.y_local_by_head[h],
                "y_propagated": e.y_propagated_by_head[h],
                "state_local": e.state_local_by_head[h],
            }
            for r in self.results
            for e in r.layers
            for h, g in enumerate(e.growth)
        )

    def tokens_to_pandas(self) -> pd.DataFrame:
        """One row a policy, sequence and token: KL and NLL in nats. Raises: nothing."""
        return token_frame(self.results)

    def __repr__(self) -> str:
        return (
            f"LayersReport({self.model.path!r}, {self.sequences} x {self.tokens} tokens, {len(self.results)} policies)"
        )
