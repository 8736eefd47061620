"""What an attachment refuses: calls that it would give wrong figures for."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from replayssm._core import Error
from replayssm.transformers.engine import Records
from replayssm.transformers.families import describe

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


def check_mode(model: torch.nn.Module) -> None:
    """Raises: replayssm.Error for a model in training mode or a compiled one."""
    if model.training:
        raise Error(f"{describe(model)}: is in training mode; call eval() first")
    if torch.compiler.is_compiling() or hasattr(model, "_orig_mod"):
        raise Error(f"{describe(model)}: is compiled; attach runs the recurrence outside of torch.compile")


def check_call(model: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """A pre-hook of models. Raises: replayssm.Error for what attach() does not cover."""
    check_mode(model)
    given = {**inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments, **kwargs}
    for name in _PACKED:
        if given.get(name) is not None:
            raise Error(f"{name}: packed sequences are not covered; give one sequence a row, padded, and its mask")
    mask = given.get("attention_mask")
    if isinstance(mask, dict):  # generate() prepares one a kind of layer
        mask = mask.get("linear_attention")
    if isinstance(mask, torch.Tensor) and mask.ndim != 2:
        raise Error(
            f"attention_mask: expected the shape [sequences, tokens], found {list(mask.shape)}; masks of blocks or "
            "chunks say nothing of which tokens advance a state"
        )
    positions = given.get("position_ids")
    if mask is None and isinstance(positions, torch.Tensor) and positions.shape[-1] > 1:
        if bool((positions.diff(dim=-1) <= 0).any()):
            raise Error("position_ids: expected ascending ones; packed sequences are not covered")


def check_cache(cache: Any, layer: int) -> None:
    """Raises: replayssm.Error for a cache that is to take tokens back."""
    held = cache.layers[layer] if layer < len(cache.layers) else None
    if getattr(held, "record_past", False):
        raise Error(f"layer {layer}: the cache records its past for crop(), which takes no recurrent state back")


def check_gradients(records: Records, layer: int) -> None:
    """Raises: replayssm.Error where gradients are wanted."""
    if torch.is_grad_enabled() and (records.v.requires_grad or records.gain.requires_grad or records.w.requires_grad):
        raise Error(f"layer {layer}: gradients do not go through a state under a policy; use torch.no_grad()")


def check_padding(padded: list[bool | None], mask: torch.Tensor | None, layer: int) -> list[bool | None]:
    """Which sequences end in padding behind these tokens, None for one without a token so far.

    `padded` says it of the tokens before these, `mask` of these. Raises: replayssm.Error for tokens that follow padding
    in an earlier call: the convolution's window holds the padding in the place of the tokens before it.
    """
    if mask is None:
        mask = torch.ones(len(padded), 1, dtype=torch.bool)
    out: list[bool | None] = []
    for row, (before, some, last) in enumerate(zip(padded, mask.any(-1).tolist(), mask[:, -1].tolist())):
        if before and some:
            raise Error(f"layer {layer}: sequence {row} of the batch goes on behind right padding; pad on the left")
        out.append(None if before is None and not some else not last)
    return out
