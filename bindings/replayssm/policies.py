"""State policies: how a model keeps its recurrent state."""

from __future__ import annotations

import re
from typing import Iterable

from replayssm import _core
from replayssm.formats import Format


class Policy:
    """How a state is kept: `exact`, `eager(state=F)`, `replay(L=16, state=F)`, `replay(L=16, anchor=F, read=F)`.

    eager rounds the state after every token. A replay rewrites its checkpoint every L tokens and computes the outputs
    between from checkpoint and ring; with `read` outputs read a second copy, whose rounding never enters the anchor.
    Optional: `ring=F`, `ring.FIELD=F`, `order=closed|sequential`, `loop=closed|open`, `layers=0-3+7`. Only what is
    named is rounded, once, when it is stored. `str(policy)` is the canonical text; two policies are equal where it is.

    Raises: replayssm.Error that quotes the text and names the word that is wrong.
    Source: README.md, Policies.
    """

    def __init__(self, text: str | Policy):
        """Reads the text of a policy. Raises: replayssm.Error naming the word that is wrong."""
        self._core: _core.Policy = text._core if isinstance(text, Policy) else _core.Policy(text)

    @property
    def text(self) -> str:
        """The canonical text: parsing it gives the same policy."""
        return self._core.text

    @property
    def kind(self) -> str:
        """`exact`, `eager`, `shared` or `split`."""
        if self.text == "exact" or (self._core.eager and self._core.state == "exact"):
            return "exact"
        return "eager" if self._core.eager else "shared" if self._core.read is None else "split"

    @property
    def exact(self) -> bool:
        """Whether no format that it names rounds anything: a control."""
        return self._core.exact

    @property
    def length(self) -> int:
        """L: tokens from one checkpoint to the next; 1 of an eager state."""
        return self._core.length

    @property
    def state(self) -> Format:
        """The format of the state, the checkpoint or, of a split one, the anchor."""
        return Format(self._core.state)

    @property
    def read(self) -> Format | None:
        """The format of the copy that outputs read; None where there is none."""
        return None if self._core.read is None else Format(self._core.read)

    @property
    def ring(self) -> dict[str, Format]:
        """The formats of recorded inputs that are named: `*` of activations, or of x, B, dt, k, v, u, g, beta."""
        return {field: Format(text) for field, text in self._core.ring.items()}

    @property
    def order(self) -> str:
        """`closed` (sums with suffix decays, as kernels do) or `sequential` (the steps run again)."""
        return self._core.order

    @property
    def loop(self) -> str:
        """`closed` (a flush of the delta rule computes u anew from the anchor) or `open` (from the read copy, once)."""
        return self._core.loop

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Inclusive ranges of model layers that it holds for; empty: every layer."""
        return list(self._core.layers)

    def covers(self, layer: int) -> bool:
        """Whether it holds for layer `layer` of the model; the others run exact. Raises: nothing."""
        return self._core.covers(layer)

    def with_length(self, length: int) -> Policy:
        """The same replay with `length` >= 1 for L. Raises: replayssm.Error for a policy that is no replay."""
        if self._core.eager:
            raise _core.Error(f"policy '{self}': only a replay has a length")
        return Policy(re.sub(r"\bL=\d+", f"L={length}", self.text, count=1))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Policy({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[type[Policy], tuple[str]]:
        return Policy, (self.text,)


def default_policies() -> list[Policy]:
    """What kl() compares where it is told none: eager, shared and split at bf16, e4m3:row and int8:row.

    Raises: nothing.
    """
    return [Policy(p.text) for p in _core.default_policies()]


def core_policies(policies: str | Policy | Iterable[str | Policy] | None) -> list[_core.Policy]:
    """Policies as the extension module takes them; none for None."""
    if policies is None:
        return []
    if isinstance(policies, (str, Policy)):
        policies = [policies]
    return [Policy(p)._core for p in policies]
