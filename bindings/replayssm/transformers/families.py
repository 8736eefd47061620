"""The model families that are covered, and the functions of transformers that ours stand in for.

transformers keeps the recurrence of every family in functions of the family's modeling module, which the layer calls
behind its convolution and before its gated norm: one for a whole window of tokens, one for a single token. Families
with the same functions share an adapter.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Callable

import torch
import torch.nn.functional as F

from replayssm._core import Error
from replayssm.transformers.cached import CachedStates
from replayssm.transformers.engine import Records


class Call:
    """What an adapter asks of the layer whose forward is running."""

    dtype: torch.dtype  # what states are computed in
    mixer: Any

    def advance(self, initial: Any, records: Records) -> tuple[torch.Tensor, CachedStates]:
        """y and the states behind these records, which go on from `initial`."""
        raise NotImplementedError


def _mamba2(
    call: Call, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any, softplus: bool, limit: Any, initial: Any
) -> tuple[Any, CachedStates]:
    """x [sequences, tokens, H, P], dt [sequences, tokens, H], A, D and dt_bias [H], B and C [sequences, tokens, G, N]."""
    x, dt, A, B, C = (t.to(call.dtype) for t in (x, dt, A, B, C))
    if dt_bias is not None:
        dt = dt + dt_bias.to(call.dtype)
    if softplus:
        dt = torch.logaddexp(dt, dt.new_zeros(()))  # log1p(e^dt), without the cut-off of torch's softplus
    if limit is not None:
        dt = dt.clamp(*limit)
    y, states = call.advance(initial, Records("mamba2", v=x, w=B, c=C, log_decay=A * dt, gain=dt, rate=A))
    return (y if D is None else y + D.to(call.dtype)[:, None] * x), states


def _mamba2_chunk_scan(
    call: Call,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: Any = None,
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    y, states = _mamba2(call, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit, initial_states)
    if z is not None:
        y = y * F.silu(z)
    return (y, states) if return_final_states else y


def _mamba2_selective_state_update(
    call: Call,
    state: Any,
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    **_: Any,
) -> Any:
    # One token, whose parameters are expanded over the state; transformers clamps dt in windows alone.
    D, dt_bias = (None if t is None else t[:, 0] for t in (D, dt_bias))
    x, dt, B, C = (t.unsqueeze(1) for t in (hidden_states, dt[..., 0], B, C))
    y, states = _mamba2(call, x, dt, A[:, 0, 0], B, C, D, dt_bias, dt_softplus, None, state)
    state.copy_(states)
    y = y.squeeze(1)
    if z is not None:
        y = y * F.silu(z)
    return y.to(hidden_states.dtype)


def _delta(recurrence: Any) -> Callable[..., Any]:
    def rule(
        call: Call,
        query: Any,
        key: Any,
        value: Any,
        g: Any,
        beta: Any,
        chunk_size: int = 64,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> Any:
        # Key heads come repeated for their value heads: a ring holds each of them once.
        mixer = call.mixer
        shared = getattr(mixer, "num_v_heads", 1) // getattr(mixer, "num_k_heads", 1)
        q, k = (t[:, :, ::shared].to(call.dtype) for t in (query, key))
        if use_qk_l2norm_in_kernel:
            q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        v, g, beta = (t.to(call.dtype) for t in (value, g, beta))
        scaled = q * q.shape[-1] ** -0.5
        y, states = call.advance(initial_state, Records(recurrence, v=v, w=k, c=scaled, log_decay=g, gain=beta))
        return y.to(query.dtype), states if output_final_state else None

    return rule


_MAMBA2 = {
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "mamba2_selective_state_update": _mamba2_selective_state_update,
}
_GATED_DELTA = {
    "torch_chunk_gated_delta_rule": _delta("gated_delta"),
    "torch_recurrent_gated_delta_rule": _delta("gated_delta"),
}
_KDA = {
    "chunk_kimi_delta_attention": _delta("kda"),
    "recurrent_kimi_delta_attention": _delta("kda"),
}


@dataclasses.dataclass(frozen=True)
class Family:
    """One module of transformers: `name` of its folder, `mixer` the class of the layers that keep a state,
    `functions` what stands in for which of its functions, `title` as its models are known."""

    title: str
    name: str
    mixer: str
    functions: dict[str, Callable[..., Any]]

    @property
    def module(self) -> str:
        """The modeling module's name."""
        return f"transformers.models.{self.name}.modeling_{self.name}"

    def originals(self) -> dict[str, Any]:
        """The functions of transformers, by name. Raises: replayssm.Error where this version has them not."""
        module = importlib.import_module(self.module)
        missing = [name for name in self.functions if not hasattr(module, name)]
        if missing:
            import transformers

            raise Error(
                f"transformers {transformers.__version__}: {self.module} has no {' and no '.join(missing)}; "
                "replayssm.transformers is written for 5.17"
            )
        return {name: getattr(module, name) for name in self.functions}


FAMILIES = [
    Family("Mamba-2", "mamba2", "Mamba2Mixer", _MAMBA2),
    Family("Nemotron-H", "nemotron_h", "NemotronHMamba2Mixer", _MAMBA2),
    Family("Bamba", "bamba", "BambaMixer", _MAMBA2),
    Family("Falcon-H1", "falcon_h1", "FalconH1Mixer", _MAMBA2),
    Family("Granite 4", "granitemoehybrid", "GraniteMoeHybridMambaLayer", _MAMBA2),
    Family("Zamba2", "zamba2", "Zamba2MambaMixer", _MAMBA2),
    Family("Qwen3-Next", "qwen3_next", "Qwen3NextGatedDeltaNet", _GATED_DELTA),
    Family("Qwen3.5", "qwen3_5", "Qwen3_5GatedDeltaNet", _GATED_DELTA),
    Family("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", _GATED_DELTA),
    Family("OLMo-Hybrid", "olmo_hybrid", "OlmoHybridGatedDeltaNet", _GATED_DELTA),
    Family("Kimi-Linear", "kimi_linear", "KimiLinearDeltaAttention", _KDA),
]


def find_mixers(model: torch.nn.Module) -> tuple[list[Family], dict[int, Any]]:
    """The families of a model and its layers that keep a recurrent state, by their index in the model.

    Raises: replayssm.Error naming the model's type where no layer is covered, or two layers of one index.
    """
    by_class = {(family.module, family.mixer): family for family in FAMILIES}
    families: list[Family] = []
    mixers: dict[int, Any] = {}
    for module in model.modules():
        for cls in type(module).__mro__:
            family = by_class.get((cls.__module__, cls.__name__))
            if family is None:
                continue
            if module.layer_idx in mixers and mixers[module.layer_idx] is not module:
                raise Error(f"{describe(model)}: two layers of index {module.layer_idx} keep a recurrent state")
            mixers[module.layer_idx] = module
            families += [] if family in families else [family]
            break
    if not mixers:
        covered = ", ".join(family.title for family in FAMILIES)
        raise Error(f"{describe(model)}: no layer of a recurrence that attach covers, which are those of {covered}")
    return families, dict(sorted(mixers.items()))


def describe(model: torch.nn.Module) -> str:
    """A model in a message: its class and, where it has a config, its type."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return type(model).__name__ + (f" (model_type {kind})" if kind else "")
