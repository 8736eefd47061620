"""What traffic(), verify() and inspect() give."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from replayssm._tables import flat, frame

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that one token moves in one layer, the mean over layers and over a cycle of L tokens."""

    state_read: float
    state_write: float
    scales: float
    residuals: float
    ring_read: float
    ring_append: float
    activations: float
    total: float


@dataclasses.dataclass(frozen=True)
class BatchTime:
    """Time of a step of all layers, microseconds, and how it compares; `fastest` is the policy with such a state."""

    batch: int
    step_us: float
    eager_over_step: float
    eager_fp32_over_step: float
    best_length: int
    best_step_us: float
    fastest: str


@dataclasses.dataclass(frozen=True)
class TrafficResult:
    """What one policy stores and moves, and the time that follows from it."""

    policy: str
    bytes_stored_per_sequence: float
    bytes_per_token_and_layer: StepBytes
    batches: list[BatchTime]


@dataclasses.dataclass(frozen=True, eq=False)
class TrafficReport:
    """What traffic() gives: `results`, one a policy. GB/s are 10^9 bytes. `json` is the program's report of it."""

    ssm_layers: int
    bandwidth_gb_per_s: float
    launch_us: float
    replay_launch_us: float
    results: list[TrafficResult]
    json: str = dataclasses.field(repr=False)

    def to_pandas(self) -> pd.DataFrame:
        """One row a policy and batch size: bytes, microseconds, ratios. Raises: nothing."""
        return frame({**flat(r, "batches"), **flat(b)} for r in self.results for b in r.batches)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Agreement of one array with a framework's: its name, what of ours it was compared with, relative L2, largest."""

    name: str
    matches: str
    rel_l2: float
    max_abs: float


@dataclasses.dataclass(frozen=True, eq=False)
class Verification:
    """What verify() gives: agreement of logits (`against` names which), hidden states and losses; `passed` where the
    `worst` relative L2 is at most `bound`. `json` is the program's report of it."""

    model: str
    golden: str
    tokens: int
    sequences: int
    against: str
    max_abs: float
    rel_l2: float
    argmax_agreement: float
    logits: list[Agreement]
    layers: list[Agreement]
    others: list[Agreement]
    worst: float
    bound: float
    passed: bool
    json: str = dataclasses.field(repr=False)

    def to_pandas(self) -> pd.DataFrame:
        """One row an array. Raises: nothing."""
        return frame(flat(a) for group in (self.logits, self.layers, self.others) for a in group)


@dataclasses.dataclass(frozen=True)
class InspectedModel:
    """Which model was inspected. `sha256` is of its weight files."""

    path: str
    type: str
    layers: int
    ssm_layers: int
    hidden: int
    vocabulary: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class InspectedLayer:
    """One layer: its kind and, of layers with a recurrent state, dimensions, bytes in fp32, and for each head the
    tokens until half of its state is gone when the gate's input is 0; else None."""

    layer: int
    kind: str
    heads: int | None = None
    groups: int | None = None
    head_dim: int | None = None
    state_dim: int | None = None
    state_bytes_fp32: float | None = None
    half_lives: list[float] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """What inspect() gives: the layers of a model, and bytes of a sequence's state in fp32. `json` is the program's."""

    model: InspectedModel
    state_bytes_fp32: float
    layers: list[InspectedLayer]
    json: str = dataclasses.field(repr=False)

    def to_pandas(self) -> pd.DataFrame:
        """One row a layer. Raises: nothing."""
        return frame(dataclasses.asdict(layer) for layer in self.layers)
