"""Recurrences step by step: inputs of a layer, and the state that a policy keeps of them.

All of them are S <- S decay + u w^T, y = S c, with S [heads, head_dim, state_dim], state_dim contiguous: P = head_dim
(V of the delta rule), N = state_dim (K of the delta rule). `groups` sets of w and c are shared by heads / groups
consecutive heads each. T is the number of tokens.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replayssm import _core
from replayssm._arrays import real_array, real_type
from replayssm.formats import Draw, Format
from replayssm.policies import Policy

Recurrence = Literal["mamba2", "gated_delta", "kda"]
Layout = Literal["PN", "NP"]


class Inputs:
    """What some tokens bring to the recurrence of one layer, gates applied, nothing rounded.

    Made by mamba2(), gated_delta(), kda() or from_records(). Holds its own copies: later changes of the arrays that it
    was made from are not seen. Everything is in `dtype`, float32 or float64.
    """

    def __init__(self, core: _core.Inputs32 | _core.Inputs64):
        """Private: use mamba2(), gated_delta(), kda() or from_records()."""
        self._core = core

    @staticmethod
    def from_records(
        recurrence: Recurrence,
        v: ArrayLike,
        w: ArrayLike,
        c: ArrayLike,
        log_decay: ArrayLike,
        gain: ArrayLike,
        *,
        dtype: Any = None,
    ) -> Inputs:
        """Inputs whose gates are applied already: S' = S e^log_decay, u = gain v or, delta rule, gain (v - S' w).

        `recurrence` "mamba2", "gated_delta" or "kda"; `v` [T, heads, head_dim] x or v; `w` and `c` [T, groups,
        state_dim] B and C, or k and q as they are (not normalised here); `log_decay` [T, heads], of kda [T, heads, state_dim]; `gain` [T, heads] dt or beta. `dtype`:
        None for float32 where all arrays are no wider, else float64; where it is given, arrays are rounded to it,
        to nearest.

        Raises: replayssm.Error for a shape that does not fit; TypeError for numbers that `dtype` does not hold and
        another name of a recurrence.
        """
        arrays = {"v": v, "w": w, "c": c, "log_decay": log_decay, "gain": gain}
        real, read = _reader(arrays, dtype)
        return Inputs(_inputs_class(real).records(_recurrence(recurrence), *read))

    @property
    def recurrence(self) -> str:
        """`mamba2`, `gated_delta` or `kda`."""
        return self._core.shape.recurrence

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return self._core.tokens

    @property
    def heads(self) -> int:
        """Heads, of the delta rule value heads."""
        return self._core.shape.heads

    @property
    def groups(self) -> int:
        """Sets of w and c, of the delta rule key heads."""
        return self._core.shape.groups

    @property
    def head_dim(self) -> int:
        """P: rows of a head's state."""
        return self._core.shape.head_dim

    @property
    def state_dim(self) -> int:
        """N: columns of a head's state."""
        return self._core.shape.state_dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """What everything is computed in: float32 or float64."""
        return np.dtype(np.float32 if isinstance(self._core, _core.Inputs32) else np.float64)

    @property
    def v(self) -> NDArray[Any]:
        """x or v, [T, heads, head_dim]. A read-only view that keeps the inputs alive, as the other fields are."""
        return self._core.v

    @property
    def w(self) -> NDArray[Any]:
        """B or the normalised k, [T, groups, state_dim]."""
        return self._core.w

    @property
    def c(self) -> NDArray[Any]:
        """C or the normalised and scaled q, [T, groups, state_dim]."""
        return self._core.c

    @property
    def log_decay(self) -> NDArray[Any]:
        """The logarithm of the decay, [T, heads] or, of kda, [T, heads, state_dim]."""
        return self._core.log_decay

    @property
    def gain(self) -> NDArray[Any]:
        """The gain of u: dt behind its clamp or beta, [T, heads]."""
        return self._core.gain


def mamba2(
    x: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    dt: ArrayLike,
    A_log: ArrayLike,
    dt_bias: ArrayLike,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    dtype: Any = None,
) -> Inputs:
    """Inputs of a Mamba-2 layer, behind its causal convolution and SiLU.

        dt = clamp(softplus(dt + dt_bias), dt_limit),  log decay = -e^A_log dt,  u = dt x,  w = B,  c = C

    `x` [T, heads, head_dim]; `B` and `C` [T, groups, state_dim]; `dt` [T, heads] before bias and softplus; `A_log` and
    `dt_bias` [heads]; `dt_limit` the least and the largest dt. D x is not part of the recurrence. `dtype`: None for
    float32 where all arrays are no wider, else float64; where it is given, arrays are rounded to it, to nearest. Every
    operation is computed in it, each rounded to nearest; deterministic.

    Raises: replayssm.Error for a shape that does not fit; TypeError for numbers that `dtype` does not hold.
    Source: Dao & Gu, Transformers are SSMs (2024), section 3.
    """
    arrays = {"x": x, "B": B, "C": C, "dt": dt, "A_log": A_log, "dt_bias": dt_bias}
    real, read = _reader(arrays, dtype)
    return Inputs(_inputs_class(real).mamba2(*read, *dt_limit))


def gated_delta(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    a: ArrayLike,
    b: ArrayLike,
    A_log: ArrayLike,
    dt_bias: ArrayLike,
    *,
    beta_scale: float = 1.0,
    dtype: Any = None,
) -> Inputs:
    """Inputs of a Gated DeltaNet layer, behind its causal convolution and SiLU.

        q, k <- x / sqrt(sum x^2 + 1e-6),  q <- q state_dim^-1/2
        log decay = -e^A_log softplus(a + dt_bias),  beta = beta_scale sigmoid(b),  w = k,  c = q

    `q` and `k` [T, groups, state_dim] before normalisation; `v` [T, heads, head_dim]; `a` and `b` [T, heads] before
    bias and activation; `A_log` and `dt_bias` [heads]; `beta_scale` 1, or 2 in OLMo-Hybrid. `dtype` as in mamba2().
    Every operation is computed in it, each rounded to nearest; deterministic.

    Raises: replayssm.Error for a shape that does not fit; TypeError for numbers that `dtype` does not hold.
    Source: Yang et al., Gated Delta Networks (2024).
    """
    return _delta(_core.Recurrence.gated_delta, q, k, v, a, b, A_log, dt_bias, beta_scale, dtype)


def kda(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    b: ArrayLike,
    A_log: ArrayLike,
    dt_bias: ArrayLike,
    *,
    beta_scale: float = 1.0,
    dtype: Any = None,
) -> Inputs:
    """Inputs of a Kimi Delta Attention layer: gated_delta() with a gate for every key channel.

        log decay = -e^A_log softplus(g + dt_bias), per channel

    `q` and `k` [T, groups, state_dim] before normalisation; `v` [T, heads, head_dim]; `g` [T, heads, state_dim] and
    `b` [T, heads] before bias and activation; `A_log` [heads]; `dt_bias` [heads, state_dim]; `beta_scale`, `dtype` and
    rounding as in gated_delta().

    Raises: replayssm.Error for a shape that does not fit; TypeError for numbers that `dtype` does not hold.
    Source: Kimi Linear (2025).
    """
    return _delta(_core.Recurrence.kda, q, k, v, g, b, A_log, dt_bias, beta_scale, dtype)


class State:
    """The recurrent state of one layer and one sequence as a policy keeps it: checkpoint (or anchor and copy) and ring.

    Starts from zero with an empty ring. `inputs` (Inputs) says the recurrence, dimensions and dtype of the layer, and
    is not advanced; `policy` how the state is kept: what it names is rounded once, when it is stored, the rest never;
    `draw` what stochastic rounding draws from, tokens counted from the zero state. All arithmetic is in `inputs.dtype`.
    Results do not depend on how tokens are cut into calls. One thread at a time: calls from others wait.

    Raises: replayssm.Error for a policy that is none; TypeError for inputs that are none.
    Source: README.md, Policies.
    """

    def __init__(self, inputs: Inputs, policy: str | Policy = "exact", *, draw: Draw = Draw()):
        """The zero state of the layer that `inputs` belong to. Raises: see the class."""
        if not isinstance(inputs, Inputs):
            raise TypeError(f"inputs: expected replayssm.Inputs, found {type(inputs).__name__}")
        self.policy = Policy(policy)
        self.dtype = inputs.dtype
        cls: Any = _core.State32 if self.dtype == np.float32 else _core.State64
        self._core: _core.State32 | _core.State64 = cls(inputs._core.shape, self.policy._core, draw._place())
        self._lock = threading.Lock()

    def advance(self, inputs: Inputs, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Advances the state by the tokens of `inputs`; returns y = S c before D x, [T, heads, head_dim].

        `inputs` of the recurrence, dimensions and dtype that the state was made for; `out` an array for y, of that
        dtype and C-contiguous. Without the GIL; Ctrl-C is heard every 256 tokens and leaves the state as it was.

        Raises: replayssm.Error for inputs of another shape; TypeError for inputs or `out` of another dtype or layout,
        into which nothing is written; KeyboardInterrupt.
        """
        if not isinstance(inputs, Inputs) or inputs.dtype != self.dtype:
            found = inputs.dtype if isinstance(inputs, Inputs) else type(inputs).__name__
            raise TypeError(f"inputs: expected those of a state in {self.dtype}, found {found}")
        if out is None:
            out = np.empty((inputs.tokens, inputs.heads, inputs.head_dim), self.dtype)
        with self._lock:
            self._core.advance(inputs._core, out)  # type: ignore[arg-type]  # of one dtype, see above
        return out

    def set(self, state: ArrayLike, *, layout: Layout = "PN") -> None:
        """Starts from a state that is stored as it is, without rounding; empties the ring.

        `state` [heads, head_dim, state_dim] in layout "PN", which for the delta rule is [heads, V, K], or
        [heads, state_dim, head_dim] in `layout` "NP", as transformers' caches of the delta rule have it.

        Raises: replayssm.Error for another shape (so a wrong layout passes unseen where head_dim = state_dim alone);
        TypeError for numbers that the state's dtype does not hold.
        """
        values = real_array(state, "state", self.dtype)
        if _layout(layout) == "NP":
            values = np.ascontiguousarray(np.swapaxes(values, -1, -2)) if values.ndim > 1 else values
        with self._lock:
            self._core.set(values)

    def effective(self, *, layout: Layout = "PN") -> NDArray[Any]:
        """What a flush behind the last record would rebuild, unrounded: a new array in `layout` (see set()).

        Raises: ValueError for another layout.
        """
        with self._lock:
            return _laid(self._core.effective(), layout)

    def checkpoint(self, *, layout: Layout = "PN") -> NDArray[Any]:
        """The stored state, checkpoint or anchor: a new array in `layout` (see set()).

        Raises: ValueError for another layout.
        """
        with self._lock:
            return _laid(self._core.checkpoint(), layout)

    def read_copy(self, *, layout: Layout = "PN") -> NDArray[Any]:
        """What output-only steps read: the read copy of a split state, else the checkpoint; a new array in `layout`.

        Raises: ValueError for another layout.
        """
        with self._lock:
            return _laid(self._core.read_copy(), layout)

    @property
    def tokens(self) -> int:
        """Tokens that it was advanced by."""
        return self._core.tokens

    @property
    def held(self) -> int:
        """Records in the ring, 0 .. L - 1."""
        return self._core.held

    @property
    def overflows(self) -> int:
        """Finite values that became infinite or NaN when they were stored, counted."""
        return self._core.overflows

    @property
    def saturations(self) -> int:
        """Finite values beyond the format's range that became its largest value when they were stored, counted."""
        return self._core.saturations

    @property
    def first_overflow(self) -> tuple[int, int] | None:
        """Token (from 0) and head of the first of them."""
        event: tuple[int, int] | None = self._core.first_overflow
        return event

    @property
    def first_non_finite(self) -> tuple[int, int] | None:
        """Token (from 0) and head of the first infinity or NaN in an output or a stored state."""
        event: tuple[int, int] | None = self._core.first_non_finite
        return event


def step_in_place(
    state: NDArray[Any],
    inputs: Inputs,
    format: str | Format = "exact",
    *,
    draw: Draw = Draw(),
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Eager steps on the caller's memory: for every token S <- Q(S decay + u w^T), y = S c from the unrounded S.

    `state` [heads, head_dim, state_dim], of the dtype of `inputs` (Inputs, T tokens), C-contiguous, aligned, writable:
    it is updated where it lies. `format` is what S is rounded to behind every token, without error feedback; `draw` what stochastic rounding
    draws from, whose tokens are counted from 0 in each call; `out` an array for y. Returns y, [T, heads, head_dim].
    Without the GIL; Ctrl-C leaves `state` as it was.

    Raises: TypeError for a state or `out` of another dtype or layout, replayssm.Error for another shape; both leave
    them as they were: nothing is ever copied in their place. KeyboardInterrupt.
    """
    if not isinstance(inputs, Inputs):
        raise TypeError(f"inputs: expected replayssm.Inputs, found {type(inputs).__name__}")
    for array, name in ((state, "state"), (out, "out")):
        if not isinstance(array, np.ndarray) and (name == "state" or array is not None):
            raise TypeError(f"{name}: expected a numpy.ndarray, found {type(array).__name__}")
    if out is None:
        out = np.empty((inputs.tokens, inputs.heads, inputs.head_dim), inputs.dtype)
    _core.step_in_place(state, inputs._core, Format(format)._core, draw._place(), out)
    return out


def _delta(
    recurrence: _core.Recurrence,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    gate: ArrayLike,
    b: ArrayLike,
    A_log: ArrayLike,
    dt_bias: ArrayLike,
    beta_scale: float,
    dtype: Any,
) -> Inputs:
    arrays = {"q": q, "k": k, "v": v, "gate": gate, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    real, read = _reader(arrays, dtype)
    return Inputs(_inputs_class(real).delta(recurrence, *read, beta_scale))


def _reader(arrays: dict[str, ArrayLike], dtype: Any) -> tuple[np.dtype[Any], list[NDArray[Any]]]:
    real = real_type(arrays, dtype)
    return real, [real_array(a, name, real, cast=dtype is not None) for name, a in arrays.items()]


def _inputs_class(real: np.dtype[Any]) -> Any:
    return _core.Inputs32 if real == np.float32 else _core.Inputs64


def _recurrence(name: str) -> _core.Recurrence:
    if name not in ("mamba2", "gated_delta", "kda"):
        raise TypeError(f"recurrence: expected mamba2, gated_delta or kda, found {name!r}")
    found: _core.Recurrence = getattr(_core.Recurrence, name)
    return found


def _layout(layout: str) -> str:
    if layout not in ("PN", "NP"):
        raise _core.Error(f"layout: expected 'PN' or 'NP', found {layout!r}")
    return layout


def _laid(state: NDArray[Any], layout: str) -> NDArray[Any]:
    return state if _layout(layout) == "PN" else np.ascontiguousarray(np.swapaxes(state, 1, 2))
