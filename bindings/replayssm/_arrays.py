"""How arrays that are only read come in: widened where that is exact, never narrowed without being asked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def _holds(real: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Whether `real` holds every one of the numbers; ml_dtypes' types, of kind V or f, are numbers too."""
    if values.dtype.kind in "iu":  # by value: what is written 1 is a 64-bit integer
        limit = 2 ** (np.finfo(real).nmant + 1)
        return values.size == 0 or -limit <= int(values.min()) and int(values.max()) <= limit
    return values.dtype.kind in "fbV" and np.can_cast(values.dtype, real, "safe")


def real_type(arrays: dict[str, Any], dtype: Any = None) -> np.dtype[Any]:
    """What to compute in: float32 where all arrays are float32 or narrower floats, else float64; or `dtype`."""
    if dtype is not None:
        real: np.dtype[Any] = np.dtype(dtype)
        if real not in (np.float32, np.float64):
            raise TypeError(f"dtype: expected float32 or float64, found {real}")
        return real
    values = [np.asarray(a) for a in arrays.values()]
    floats = [v.dtype for v in values if v.dtype.kind in "fV"]
    narrow = floats and all(np.can_cast(dtype, np.float32, "safe") for dtype in floats)
    return np.dtype(np.float32 if narrow else np.float64)


def real_array(
    array: ArrayLike, name: str, dtype: Any = None, *, cast: bool = False, copy: bool = False
) -> NDArray[Any]:
    """A C-contiguous array of `dtype` (where None, float32 of float32 and else float64) with the same numbers.

    `cast`: numbers may be rounded to nearest on the way; else TypeError where they would have to be.
    """
    values = np.asarray(array)
    if dtype is None:
        dtype = np.float32 if values.dtype == np.float32 else np.float64
    real = np.dtype(dtype)
    if not _holds(real, values) and not (cast and values.dtype.kind in "fiub"):
        raise TypeError(f"{name}: expected numbers that {real} holds exactly, found {values.dtype}")
    if copy:
        return np.array(values, dtype=real, order="C")
    return np.require(values, real, ["C_CONTIGUOUS", "ALIGNED"])
