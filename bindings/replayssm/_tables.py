"""Reports in JSON as dataclasses, and dataclasses as tables."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


def typed(cls: type[T], text: str, **more: Any) -> T:
    """The report `cls` from a report in JSON, with fields that the JSON lacks."""
    report: T = _build(cls, {**json.loads(text), **more, "json": text})
    return report


def _build(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build(next(a for a in arguments if a is not type(None)), value)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        make: Any = kind
        return make(
            **{
                f.name: _build(hints[f.name], value[f.name]) if f.name in value else None
                for f in dataclasses.fields(kind)
            }
        )
    if origin is list:
        return [_build(arguments[0], item) for item in value]
    if kind is float:
        return float("nan") if value is None else float(value)
    return value


def flat(value: Any, *without: str) -> dict[str, Any]:
    """A dataclass as one row: names of nested fields joined by an underscore."""
    row: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        if field.name in without:
            continue
        item = getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            row.update({f"{field.name}_{name}": v for name, v in flat(item).items()})
        else:
            row[field.name] = item
    return row


def frame(rows: Any) -> pd.DataFrame:
    """Rows as a DataFrame. pandas is loaded here, when it is asked for: it takes longer than everything else."""
    import pandas as pd

    return pd.DataFrame(list(rows))


def token_frame(results: Any) -> pd.DataFrame:
    """One row a policy, sequence and token."""
    import pandas as pd

    parts = []
    for r in results:
        sequence, token = np.indices(r.tokens.kl.shape)
        parts.append(
            pd.DataFrame(
                {
                    "policy": r.policy,
                    "sequence": sequence.ravel(),
                    "token": token.ravel(),
                    **{f.name: getattr(r.tokens, f.name).ravel() for f in dataclasses.fields(r.tokens)},
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
