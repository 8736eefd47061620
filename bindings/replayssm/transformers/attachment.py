"""attach(): the recurrence of a model of transformers, kept under a policy."""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from typing import Any, Callable

import torch

from replayssm._core import Error, check_layers
from replayssm.formats import Draw
from replayssm.policies import Policy
from replayssm.transformers import checks
from replayssm.transformers.cached import CachedStates
from replayssm.transformers.engine import Engine, HostEngine, LayerShape, Records
from replayssm.transformers.families import Call, find_mixers

_EXACT = Policy("exact")
_lock = threading.Lock()
_attached: Attachment | None = None
_running = threading.local()  # .call: the layer whose forward this thread is in


def attach(
    model: Any, policy: str | Policy = "exact", *, seed: int = 0, precision: str | None = None, threads: int = 0
) -> Attachment:
    """Keeps the recurrent state of a model of transformers under a policy, token by token, inside a `with` block.

        with replayssm.transformers.attach(model, "replay(L=16, state=e4m3:row)"):
            model.generate(...)

    `model` a PreTrainedModel in eval() mode, of a family that docs/transformers.md names, on any device: its mixers run
    as they are but for the recurrence between their convolution and their gated norm, in prefill and decode.
    `policy` is applied to every layer that it covers, the others are kept exactly; `layers=` counts the layers of the
    model from 0. `seed` is of stochastic rounding, which draws by sequence of the batch, layer, head and token.
    `precision`: what the recurrence and its gates are computed in, "fp32" or "fp64"; None for fp64 where the model is
    float64, else fp32. Only what the policy names is rounded, once, when it is stored. `threads`: 0 for as many as
    torch has. Tensors of a GPU are copied to the host and back.

    Tokens that attention_mask leaves out advance no state. A cache that was filled inside holds the states; it can be
    reset, reordered, copied and used inside this attachment alone, which may be entered again.

    Raises: replayssm.Error for a model, policy or precision that is not covered, for an attachment inside another one,
    and, when the model is called, for gradients, training mode, packed sequences, masks of more than two dimensions,
    torch.compile, caches of elsewhere or that record their past (crop), and tokens that go on behind right padding.
    Source: docs/transformers.md.
    """
    return Attachment(model, policy, seed=seed, precision=precision, threads=threads)


class Attachment:
    """What attach() gives: a context manager, which may be entered again but not inside itself or another one.

    Raises: as attach() says.
    """

    def __init__(self, model: Any, policy: str | Policy, *, seed: int, precision: str | None, threads: int):
        """See attach(), which says what `model`, `policy`, `seed`, `precision` and `threads` are. Raises: see there."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a model of transformers, found {type(model).__name__}")
        self.policy = Policy(policy)
        self.first_slot = 0  # of stochastic rounding: the sequence that the first row of a batch is
        self.observe: Callable[[int, torch.Tensor], None] | None = None  # is told each layer's y
        self.model = model
        self._seed = seed
        self._families, self._mixers = find_mixers(model)
        check_layers(self.layers(), self.policy._core)
        dtype = {"fp32": torch.float32, "fp64": torch.float64, None: None}.get(precision, precision)
        if isinstance(dtype, str):
            raise Error(f"precision: expected fp32 or fp64, found {dtype!r}")
        if threads < 0:
            raise Error(f"threads: expected a number from 0, found {threads}")
        if dtype is None:
            wide = any(p.dtype == torch.float64 for p in next(iter(self._mixers.values())).parameters())
            dtype = torch.float64 if wide else torch.float32
        self.engine: Engine = HostEngine(dtype, threads or torch.get_num_threads())
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> Attachment:
        """Puts the recurrences of the package in place. Raises: replayssm.Error inside another attachment."""
        global _attached
        checks.check_mode(self.model)
        with _lock:
            if _attached is not None:
                raise Error(f"attach inside attach: {_attached!r} has not ended")
            _attached = self
        try:
            self._install()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Puts everything back as it was."""
        global _attached
        while self._undo:
            self._undo.pop()()
        with _lock:
            _attached = None

    def __repr__(self) -> str:
        return f"attach({type(self.model).__name__}, {str(self.policy)!r})"

    @property
    def covered(self) -> list[int]:
        """Layers of the model that keep a recurrent state, by index."""
        return list(self._mixers)

    def layers(self) -> list[tuple[str, Any]]:
        """Kind of each layer of the model and, where one keeps a state, some shape: what a policy is checked with."""
        config: Any = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        count = max(getattr(config, "num_hidden_layers", 0) or 0, 1 + max(self._mixers))
        some = LayerShape("mamba2", 1, 1, 1, 1).core()
        kinds = getattr(config, "layer_types", None) or []
        return [
            ("recurrent", some) if i in self._mixers else (str(kinds[i]) if i < len(kinds) else "another kind", None)
            for i in range(count)
        ]

    def _install(self) -> None:
        for family in self._families:
            module = importlib.import_module(family.module)
            for name, original in family.originals().items():
                setattr(module, name, _stand_in(original, family.functions[name]))
                self._undo.append(functools.partial(setattr, module, name, original))
        for module in self.model.modules():
            if module is self.model or hasattr(module, "config") and hasattr(module, "generation_config"):
                handle = module.register_forward_pre_hook(checks.check_call, with_kwargs=True)
                self._undo.append(handle.remove)
        for layer, mixer in self._mixers.items():
            before = mixer.register_forward_pre_hook(functools.partial(self._before, layer), with_kwargs=True)
            self._undo.append(before.remove)
            after = mixer.register_forward_hook(functools.partial(self._after, layer), always_call=True)
            self._undo.append(after.remove)
        if hasattr(self.model, "_valid_auto_compile_criteria"):  # generate() compiles what has a static cache
            self.model._valid_auto_compile_criteria = lambda *_, **__: False
            self._undo.append(functools.partial(delattr, self.model, "_valid_auto_compile_criteria"))

    def _before(self, layer: int, mixer: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(mixer.forward).bind_partial(*args, **kwargs).arguments
        cache = given.get("cache_params")
        if cache is not None:
            checks.check_cache(cache, layer)
        _running.call = LayerCall(self, layer, mixer, given.get("attention_mask"))

    def _after(self, layer: int, mixer: Any, args: Any, output: Any) -> None:
        call, _running.call = getattr(_running, "call", None), None
        if output is not None and not (call and call.done):  # None: it raised
            raise Error(
                f"layer {layer}: {type(mixer).__name__} did not come by the recurrence that is attached; are kernels "
                "of the hub in its place?"
            )


class LayerCall(Call):
    """One forward of a layer that is attached."""

    def __init__(self, owner: Attachment, layer: int, mixer: Any, mask: torch.Tensor | None):
        """`mask` [sequences, tokens], nonzero for real tokens; None where all are."""
        self.dtype = owner.engine.dtype
        self.mixer = mixer
        self.done = False
        self._owner, self._layer, self._mask = owner, layer, mask

    def advance(self, initial: Any, records: Records) -> tuple[torch.Tensor, CachedStates]:
        """See Call. Raises: replayssm.Error as attach() says."""
        owner, layer, shape = self._owner, self._layer, records.shape
        sequences, tokens = records.v.shape[:2]
        checks.check_gradients(records, layer)
        mask = None if self._mask is None else self._mask.to(torch.bool)
        if mask is not None and mask.shape != (sequences, tokens):
            raise Error(
                f"layer {layer}: expected an attention mask of the shape {[sequences, tokens]}, found {list(mask.shape)}"
            )
        if initial is not None and not (isinstance(initial, CachedStates) and initial.owner is owner):
            whose = repr(initial.owner) if isinstance(initial, CachedStates) else "no attachment"
            raise Error(f"layer {layer}: the cache was filled under {whose}; {owner!r} goes on from its own alone")
        states = None if initial is None else initial.states
        if states is None:
            policy = owner.policy if owner.policy.covers(layer) else _EXACT
            draws = [Draw(owner._seed, owner.first_slot + row, layer) for row in range(sequences)]
            states = owner.engine.states(shape, policy, draws)
            padded = [None] * sequences
        else:
            padded = list(initial.ends_padded)
        if len(states) != sequences or states.shape != shape:
            raise Error(
                f"layer {layer}: the cache holds {len(states)} sequences of {states.shape}, called are {sequences} of "
                f"{shape}"
            )
        padded = checks.check_padding(padded, mask, layer)
        y = states.advance(records, mask)
        self.done = True
        if owner.observe is not None:
            owner.observe(layer, y)
        P, N = shape.head_dim, shape.state_dim
        like = ((sequences, shape.heads, *((P, N) if shape.recurrence == "mamba2" else (N, P))), y.dtype, y.device)
        return y, CachedStates(owner, like, states, padded)


def _stand_in(original: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` where the layer that runs is attached, else `original`: other models of the family stay as they are."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        call = getattr(_running, "call", None)
        if call is None:
            return original(*args, **kwargs)
        return ours(call, *args, **kwargs)

    return function
