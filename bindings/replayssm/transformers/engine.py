"""What advances the states of a layer. The attachment knows LayerStates alone; an engine supplies them."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Sequence

import numpy as np
import torch

from replayssm import _core
from replayssm.formats import Draw
from replayssm.policies import Policy
from replayssm.recurrences import Recurrence, core_recurrence


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The recurrence of a layer and its dimensions; a state is [heads, head_dim, state_dim]."""

    recurrence: Recurrence
    heads: int
    groups: int
    head_dim: int
    state_dim: int

    def core(self) -> _core.RecurrenceShape:
        """As the extension module takes it."""
        return _core.RecurrenceShape(
            core_recurrence(self.recurrence), self.heads, self.groups, self.head_dim, self.state_dim
        )


@dataclasses.dataclass(frozen=True)
class Records:
    """What some tokens of some sequences bring to one layer, gates applied, nothing rounded; all in one dtype.

    `v` [sequences, tokens, heads, head_dim] x or v; `w` and `c` [sequences, tokens, groups, state_dim] B and C, or the
    normalised k and the normalised and scaled q; `log_decay` [sequences, tokens, heads], of kda [..., state_dim];
    `gain` [sequences, tokens, heads] dt or beta; `rate` [heads], log_decay = rate gain, of mamba2 alone, whose record
    holds dt in the decay's place.
    """

    recurrence: Recurrence
    v: torch.Tensor
    w: torch.Tensor
    c: torch.Tensor
    log_decay: torch.Tensor
    gain: torch.Tensor
    rate: torch.Tensor | None = None

    @property
    def shape(self) -> LayerShape:
        """Dimensions of the layer."""
        heads, head_dim = self.v.shape[2:]
        groups, state_dim = self.w.shape[2:]
        return LayerShape(self.recurrence, heads, groups, head_dim, state_dim)


class LayerStates(Protocol):
    """The states of one layer, one for each sequence of a batch, as a policy keeps them."""

    shape: LayerShape

    def __len__(self) -> int:
        """Sequences."""

    def advance(self, records: Records, mask: torch.Tensor | None) -> torch.Tensor:
        """Advances them; returns y = S c [sequences, tokens, heads, head_dim], of the records' dtype and device.

        Tokens at which `mask` [sequences, tokens] is False advance nothing; there y is 0.
        """

    def select(self, rows: Sequence[int]) -> LayerStates:
        """Copies of the states of those sequences, in that order."""

    def effective(self) -> torch.Tensor:
        """What a flush would rebuild, unrounded: [sequences, heads, head_dim, state_dim], on the host."""

    def events(self) -> _core.RangeEvents:
        """What went out of range, of all sequences."""


class Engine(Protocol):
    """Makes states. `dtype` is what they are computed in."""

    dtype: torch.dtype

    def states(self, shape: LayerShape, policy: Policy, draws: Sequence[Draw]) -> LayerStates:
        """Zero states, one for each of `draws`."""


class HostStates:
    """LayerStates that the package's own states keep, in the host's memory; other tensors are copied there and back."""

    def __init__(self, shape: LayerShape, states: list[Any], threads: int):
        """`states`: _core.State32 or _core.State64, all of that shape."""
        self.shape = shape
        self._states = states
        self._threads = threads

    def __len__(self) -> int:
        return len(self._states)

    def advance(self, records: Records, mask: torch.Tensor | None) -> torch.Tensor:
        """See LayerStates. Without the GIL; Ctrl-C is heard every 256 tokens and leaves the states in the middle."""
        arrays = (records.v, records.w, records.c, records.log_decay, records.gain)
        out = np.zeros(records.v.shape, _host(records.v[:0]).dtype)
        type(self._states[0]).advance_all(
            self._states,
            *map(_host, arrays),
            None if records.rate is None else _host(records.rate),
            None if mask is None else _host(mask),
            out,
            self._threads,
        )
        return torch.from_numpy(out).to(records.v.device)

    def select(self, rows: Sequence[int]) -> HostStates:
        """See LayerStates."""
        return HostStates(self.shape, [self._states[row].copy() for row in rows], self._threads)

    def effective(self) -> torch.Tensor:
        """See LayerStates."""
        return torch.from_numpy(np.stack([state.effective() for state in self._states]))

    def events(self) -> _core.RangeEvents:
        """See LayerStates."""
        all = _core.RangeEvents()
        for state in self._states:
            all.merge(state.events)
        return all


@dataclasses.dataclass(frozen=True)
class HostEngine:
    """Computes on the CPU, with `threads` threads, in `dtype` float32 or float64, for tensors of any device."""

    dtype: torch.dtype
    threads: int

    def states(self, shape: LayerShape, policy: Policy, draws: Sequence[Draw]) -> HostStates:
        """See Engine."""
        cls: Any = _core.State64 if self.dtype == torch.float64 else _core.State32
        core = shape.core()
        return HostStates(shape, [cls(core, policy._core, draw._place()) for draw in draws], self.threads)


def _host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().to("cpu").contiguous().numpy()
    return array
