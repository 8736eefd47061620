"""What lies in a cache of transformers in the place of the recurrent state."""

from __future__ import annotations

from typing import Any, NoReturn, Sequence

import torch

from replayssm._core import Error
from replayssm.transformers.engine import LayerStates


class CachedStates(torch.Tensor):  # type: ignore[misc]  # torch is not looked into
    """The states of one layer, where a cache of transformers has the tensor of its recurrent state.

    A tensor without elements of its own, so that what moves caches moves the states: index_select (reorder_cache),
    zero_ (reset), copy_, to, clone and deepcopy. Whatever would read elements is refused: the state under a policy is
    more than one tensor. effective() gives the state that it stands for. `owner` is the attachment that it belongs to,
    `states` None for zero states, `ends_padded` says of each sequence whether its last token was padding (None: it had
    none).
    """

    owner: Any
    states: LayerStates | None
    ends_padded: list[bool | None]

    @staticmethod
    def __new__(
        cls: type[CachedStates],
        owner: Any,
        like: Any,
        states: LayerStates | None,
        ends_padded: Sequence[bool | None] = (),
    ) -> CachedStates:
        """`like`: shape, dtype and device that it shows."""
        shape, dtype, device = like
        made: CachedStates = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.owner, made.states, made.ends_padded = owner, states, list(ends_padded)
        return made

    def _as(self, **changed: Any) -> CachedStates:
        like = [changed.get("shape", self.shape), changed.get("dtype", self.dtype), changed.get("device", self.device)]
        states = changed.get("states", self.states)
        return CachedStates(self.owner, like, states, changed.get("ends_padded", self.ends_padded))

    def _rows(self, rows: Sequence[int]) -> CachedStates:
        return self._as(
            shape=(len(rows), *self.shape[1:]),
            states=None if self.states is None else self.states.select(rows),
            ends_padded=[self.ends_padded[row] for row in rows] if self.ends_padded else [],
        )

    def effective(self) -> torch.Tensor:
        """The states, unrounded, as transformers has them: [sequences, heads, P, N], of the delta rule [..., N, P]."""
        if self.states is None:
            return torch.zeros(self.shape, dtype=self.dtype)
        values = self.states.effective()
        return values if self.states.shape.recurrence == "mamba2" else values.transpose(-1, -2)

    def __repr__(self, **_: Any) -> str:
        return f"CachedStates({list(self.shape)}, {str(self.owner.policy)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedStates:
        return self._rows(range(self.shape[0]))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name in ("__get__", "size", "dim", "ndimension", "numel", "stride", "is_floating_point"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        move = _MOVES.get(name)
        if move is None or not isinstance(args[0], CachedStates):
            _refuse(name)
        return move(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(func.__name__)


def _refuse(name: str) -> NoReturn:
    raise Error(
        f"torch's {name} on a state that a policy keeps: the cache was filled under replayssm.transformers.attach "
        "and can be used under that one alone"
    )


def _index_select(self: CachedStates, dim: int, index: torch.Tensor) -> CachedStates:
    if dim != 0:
        raise Error(f"index_select on dimension {dim} of states under a policy: expected 0, the sequences")
    return self._rows(index.tolist())


def _to(self: CachedStates, *where: Any, **kwargs: Any) -> CachedStates:
    changed = {"dtype": kwargs.get("dtype"), "device": kwargs.get("device")}
    for word in where:
        if isinstance(word, torch.dtype):
            changed["dtype"] = word
        elif isinstance(word, (str, torch.device, int)) and not isinstance(word, bool):
            changed["device"] = torch.device(word)
    return self._as(**{name: value for name, value in changed.items() if value is not None})


def _copy(self: CachedStates, source: Any, non_blocking: bool = False) -> CachedStates:
    if not isinstance(source, CachedStates) or source.owner is not self.owner or source.shape != self.shape:
        raise Error(f"a cache that {self!r} belongs to: expected states of the same attachment and shape to take over")
    self.states, self.ends_padded = source.states, source.ends_padded
    return self


def _zero(self: CachedStates) -> CachedStates:
    self.states, self.ends_padded = None, []
    return self


_MOVES = {
    "clone": lambda self, **_: self._rows(range(self.shape[0])),
    "copy_": _copy,
    "detach": lambda self: self,
    "index_select": _index_select,
    "to": _to,
    "zero_": _zero,
    "zeros_like": lambda self, **_: self._as(states=None, ends_padded=[]),
}
