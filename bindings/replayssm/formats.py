"""Number formats: what a stored number becomes, and the bits that it is stored in."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from replayssm import _core
from replayssm._arrays import real_array

# What NumPy and ml_dtypes call an element; one code an item, in the low bits where it has fewer than eight.
_DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "e3m2": np.dtype(ml_dtypes.float6_e3m2fn),
    "e2m3": np.dtype(ml_dtypes.float6_e2m3fn),
    "e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
}
_SCALE_DTYPES = {
    "amax": np.dtype("<f4"),
    "floor": np.dtype(ml_dtypes.float8_e8m0fnu),
    "ceil": np.dtype(ml_dtypes.float8_e8m0fnu),
    "nvfp4": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """What stochastic rounding draws from: Philox4x32-10 with `seed` as its key.

    The counter words of element i of a head are i // 4, `token`, `slot` and `layer` * 65536 + head, so that the same
    place and token give the same bits on every thread and device. `seed` is in 0 .. 2^64 - 1, `slot` (the sequence)
    and `token` in 0 .. 2^32 - 1, `layer` in 0 .. 65535. Looked at by formats with `sr` alone.

    Raises: replayssm.Error, when it is used, for a layer out of range; TypeError for what is no such number.
    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """

    seed: int = 0
    slot: int = 0
    layer: int = 0
    token: int = 0

    def _place(self) -> _core.StatePlace:
        return _core.StatePlace(self.seed, self.slot, self.layer)


class RangeLoss(NamedTuple):
    """Elements that a store did not keep: `overflows`, finite ones that became infinite or NaN, and NaN where the
    element has none; `saturations`, finite ones beyond the range, by more than rounding, that became the largest value.
    """

    overflows: int
    saturations: int


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """Numbers as a format stores them: codes, and the scales that they are multiplied by.

    `codes` uint8 [..., rows, bytes of a row], packed from the lowest bit up, 16- and 32-bit codes little-endian, each
    row by itself. `scales` uint8 [..., bytes of the scales of a head]: the fp32 scale of the head first (nvfp4), then
    one scale after the other, fp32, E8M0 or e4m3, then the zero points in two's complement, where the format has them;
    no bytes without scales. A scale of `tensor` stands with every head. `shape` is that of the numbers, `format`
    what they were stored in. value = code's value times scale, in the precision that decode() is asked for.
    """

    format: Format
    shape: tuple[int, ...]
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together, the scale of a tensor once."""
        return self.format.bytes(self.shape)

    def elements(self) -> NDArray[Any]:
        """The codes as an array of the type that NumPy or ml_dtypes has for the element, of `shape`, without scales.

        Codes of whole bytes are a view of `codes`, which it keeps alive; packed ones (6 and 4 bits) are unpacked into
        one item each. Nothing is rounded.

        Raises: TypeError for an element that neither has (tf32, the element of mxint8, those of one's own).
        """
        name = self.format.element
        if name not in _DTYPES:
            raise TypeError(f"format '{self.format}': NumPy and ml_dtypes have no type for the element {name}")
        dtype = _DTYPES[name]
        if self.format.storage_bits >= 8:
            return self.codes.view(dtype.newbyteorder("<") if dtype.kind in "fi" else dtype).reshape(self.shape)
        bits = np.unpackbits(self.codes, axis=-1, bitorder="little")
        bits = bits[..., : self.shape[-1] * self.format.storage_bits].reshape(*self.shape, self.format.storage_bits)
        return np.packbits(bits, axis=-1, bitorder="little")[..., 0].view(dtype)

    def scale_values(self) -> NDArray[Any]:
        """The scales as numbers: float32, or ml_dtypes' float8_e8m0fnu or float8_e4m3fn, [..., scales of a head].

        Without the fp32 scale of the head, which nvfp4 has beside them (see head_scales()).

        Raises: TypeError for a format without scales.
        """
        if self.format.scale == "none":
            raise TypeError(f"format '{self.format}' has no scales")
        return self._scales()[0].view(_SCALE_DTYPES[self.format.rule])

    def zero_points(self) -> NDArray[Any]:
        """The zero points of an asymmetric format, int8 or int16, one for each scale, [..., scales of a head].

        Raises: TypeError for another format.
        """
        if not self.format.asymmetric:
            raise TypeError(f"format '{self.format}' has no zero points")
        return self._scales()[1].view(f"<i{self.format._core.zero_width}")

    def _scales(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The bytes of the scales without that of the head, and of the zero points behind them."""
        core = self.format._core
        own = self.scales[..., core.head_scale_bytes :]
        scales = own.shape[-1] // (core.scale_width + core.zero_width) * core.scale_width
        return np.ascontiguousarray(own[..., :scales]), np.ascontiguousarray(own[..., scales:])

    def head_scales(self) -> NDArray[np.float32]:
        """The fp32 scale of each head, which nvfp4 has beside those of its blocks, [...].

        Raises: TypeError for another format.
        """
        if self.format._core.head_scale_bytes == 0:
            raise TypeError(f"format '{self.format}' has no scale of a head beside the others")
        return self.scales[..., : self.format._core.head_scale_bytes].view("<f4")[..., 0]

    def decode(self, dtype: Any = np.float64) -> NDArray[Any]:
        """The numbers: value = code's value times scale, computed in `dtype`, float32 or float64.

        Returns an array of `shape`. The product is rounded to `dtype`, nothing else; the same bits as
        `format.round()` of the original in that dtype.

        Raises: TypeError for another dtype.
        """
        return self.format.decode(self.codes, self.scales, self.shape[-1], dtype=dtype).reshape(self.shape)


class Format:
    """How the numbers of a state or a record are stored: an element and what it is scaled by.

    `text` is what policies take: `bf16`, `e4m3:row`, `int8:group32`, `mxfp4:ceil`, `int8:row:sr=16`,
    `int8:row:hadamard`, `custom(e=3,m=4)`, `exact`. Elements x that share a scale s are stored as

        c = round_to(element, x / s),   value = c s

    with s = float32(amax / max) for an fp32 scale, 2^e for a power of two, and s b for nvfp4. Two formats are equal
    where their canonical texts are.

    Arrays: the last two axes are the rows of one head, [..., rows, n]; a vector is one row. Scales reach over rows with
    `tile`, `head` and nvfp4 alone, and over heads, which are those of one state, with `tensor`.

    Raises: replayssm.Error for a name or modifier that is unknown.
    Source: OCP Microscaling Formats (MX) Specification 1.0; IEEE 754-2019 for fp32, fp16.
    """

    def __init__(self, text: str | Format):
        """Reads the text of a format. Raises: replayssm.Error naming the word that is wrong."""
        self._core: _core.Format = text._core if isinstance(text, Format) else _core.Format(text)

    @property
    def text(self) -> str:
        """The canonical text."""
        return self._core.text

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded."""
        return self._core.exact

    @property
    def element(self) -> str:
        """The name of the element, `custom` for one of one's own."""
        return self._core.element

    @property
    def bits(self) -> int:
        """Bits of a code: sign, exponent, mantissa."""
        return self._core.bits

    @property
    def storage_bits(self) -> int:
        """Bits of a code in memory."""
        return self._core.storage_bits

    @property
    def exponent_bits(self) -> int:
        """Bits of the exponent field; 0 of an integer type."""
        return self._core.exponent_bits

    @property
    def mantissa_bits(self) -> int:
        """Bits of the mantissa without the leading one; of magnitude, of an integer type."""
        return self._core.mantissa_bits

    @property
    def integer(self) -> bool:
        """Whether codes are two's complement integers."""
        return self._core.integer

    @property
    def largest(self) -> float:
        """The largest finite value of the element, before its scale."""
        return self._core.largest

    @property
    def scale(self) -> str:
        """Which elements share a scale: `none`, `row`, `group`, `tile`, `head`, or all: `tensor`."""
        return self._core.scale

    @property
    def rule(self) -> str:
        """What a scale is: `none`, `amax` (fp32), `floor` or `ceil` (powers of two), `nvfp4`."""
        return self._core.rule

    @property
    def extent(self) -> int:
        """Elements of a group or rows of a tile; 0 of another scale."""
        return self._core.extent

    @property
    def rounding(self) -> str:
        """`nearest` (ties to even), `toward_zero` or `stochastic`."""
        return self._core.rounding

    @property
    def random_bits(self) -> int:
        """Random bits of a stochastic rounding, 1 .. 32; else 0."""
        return self._core.random_bits

    @property
    def hadamard(self) -> bool:
        """Whether rows are rotated by an orthonormal Hadamard matrix before rounding, and back when read."""
        return self._core.hadamard

    @property
    def asymmetric(self) -> bool:
        """Whether an integer zero point stands beside each scale."""
        return self._core.asymmetric

    @property
    def residual(self) -> Format | None:
        """How the error of a store is kept and fed back by State; None where it is not. Nothing here reads it."""
        return None if self._core.residual is None else Format(self._core.residual)

    @property
    def cap(self) -> float:
        """What takes the place of the element's largest value in an amax scale; 0: nothing."""
        return self._core.cap

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The type that NumPy or ml_dtypes has for the element; None where neither has one."""
        return _DTYPES.get(self.element)

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of codes and scales of an array of `shape`, [..., rows, n].

        Raises: replayssm.Error for `exact`, which has no codes.
        """
        if self.exact:
            raise _core.Error("format 'exact': a double as it is has no codes")
        return self._core.state_bytes(*_heads(tuple(shape)))

    def decode_code(self, code: int) -> float:
        """The value of one `code`, in its low `bits` bits, before its scale; exact.

        Raises: replayssm.Error for `exact`; TypeError for a number outside 0 .. 2^32 - 1.
        """
        return self._core.decode_code(code)

    def round(self, array: ArrayLike, *, draw: Draw = Draw()) -> NDArray[Any]:
        """Stores and reads back: Q(array), as a new array of the same shape.

        `array` [..., rows, n] of any layout and byte order. float32 is rounded in float32, everything else that
        float64 holds exactly (integers up to 2^53, float16, ml_dtypes' types) in float64; quotient by the scale
        and product with it are rounded in that type, and the element once, as `rounding` says. `draw` is looked at by
        stochastic rounding alone, whose heads are counted over the leading axes, and its `token` is the same for all.
        Deterministic. The same bits as `encode(array).decode(dtype)`.

        Raises: TypeError for an array whose numbers float64 does not hold (complex, long double, integers beyond 2^53).
        """
        out = real_array(array, "array", copy=True)
        self.round_in_place(out, draw=draw)
        return out

    def round_in_place(self, array: NDArray[Any], *, draw: Draw = Draw()) -> RangeLoss:
        """Stores and reads back in the caller's memory: array <- Q(array). See round().

        `array` [..., rows, n], float32 or float64, C-contiguous, aligned, writable, of the machine's byte order; `draw`
        as there. Returns how many elements were not kept.

        Raises: TypeError for an array of another type or layout, which is left as it was: nothing is copied.
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(f"array: expected a numpy.ndarray, found {type(array).__name__}")
        if array.dtype not in (np.float32, np.float64) or not array.flags.carray:
            raise TypeError(
                "array: expected a C-contiguous, aligned, writable array of float32 or float64 in the machine's byte "
                f"order, found {array.dtype.str} {list(array.shape)} with strides {list(array.strides)}"
                f"{'' if array.flags.writeable else ', read-only'}"
            )
        return RangeLoss(
            *_core.round_in_place(self._core, array.reshape(_heads(array.shape)), draw._place(), draw.token)
        )

    def encode(self, array: ArrayLike, *, draw: Draw = Draw()) -> Encoded:
        """Stores: codes and scales of `array`, [..., rows, n].

        `array` and `draw` are those of round(), and so are the roundings.

        Raises: replayssm.Error for `exact`, which has no codes; TypeError as round() does.
        """
        if self.exact:
            raise _core.Error("format 'exact': a double as it is has no codes")
        values = real_array(array, "array")
        heads, rows, n = _heads(values.shape)
        codes = np.zeros((heads, rows, self._core.code_bytes(n)), np.uint8)
        scales = np.zeros((heads, self._core.scale_bytes(rows, n)), np.uint8)
        _core.encode_into(self._core, values.reshape(heads, rows, n), codes, scales, draw._place(), draw.token)
        lead = values.shape[:-2]
        return Encoded(
            self,
            values.shape,
            codes.reshape(*values.shape[:-1], codes.shape[-1]),
            scales.reshape(*lead, scales.shape[-1]),
        )

    def decode(self, codes: ArrayLike, scales: ArrayLike, n: int, *, dtype: Any = np.float64) -> NDArray[Any]:
        """Reads what encode() stored: value = code's value times scale, computed in `dtype`, float32 or float64.

        `codes` uint8 [..., rows, bytes of a row of n], `scales` uint8 [..., bytes of a head's scales], `n` numbers in
        a row. Returns [..., rows, n].

        Raises: replayssm.Error for `exact` and for a shape that does not fit; TypeError for another type.
        """
        code_bytes, scale_bytes = _bytes(codes, "codes"), _bytes(scales, "scales")
        if code_bytes.ndim == 0:
            raise _core.Error("codes: expected the shape [..., rows, bytes], found []")
        heads, rows, width = _heads(code_bytes.shape)
        per_head = scale_bytes.shape[-1] if scale_bytes.ndim else 0
        out = np.empty((heads, rows, n), _real_dtype(dtype))
        _core.decode_into(
            self._core,
            code_bytes.reshape(heads, rows, width),
            scale_bytes.reshape(heads if per_head == 0 else -1, per_head),
            out,
        )
        return out.reshape(*code_bytes.shape[:-1], n)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Format({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[type[Format], tuple[str]]:
        return Format, (self.text,)


def format_names() -> list[str]:
    """The names that Format() takes, without modifiers: `exact`, every element, every format with scales of its own.

    Integers need a scale, such as `int8:row`. Raises: nothing.
    """
    return list(_core.format_names())


def format_of(dtype: Any) -> Format:
    """The unscaled format whose element is `dtype`, a type of NumPy or ml_dtypes such as `ml_dtypes.bfloat16`.

    Raises: TypeError for a type that no unscaled format stores (integers need a scale).
    """
    wanted = np.dtype(dtype)
    for name, known in _DTYPES.items():
        if known == wanted and not name.startswith("int"):
            return Format(name)
    raise TypeError(
        f"dtype {wanted}: expected one of {', '.join(str(d) for n, d in _DTYPES.items() if 'int' not in n)}"
    )


def _heads(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """[heads, rows, n] of [..., rows, n]."""
    if len(shape) == 0:
        raise _core.Error("array: expected the shape [..., rows, n], found a scalar")
    rows = shape[-2] if len(shape) > 1 else 1
    return int(np.prod(shape[:-2], dtype=np.int64)), rows, shape[-1]


def _real_dtype(dtype: Any) -> np.dtype[Any]:
    real: np.dtype[Any] = np.dtype(dtype)
    if real not in (np.float32, np.float64) or not real.isnative:
        raise TypeError(f"dtype: expected float32 or float64, found {real}")
    return real


def _bytes(array: ArrayLike, name: str) -> NDArray[np.uint8]:
    values = np.asarray(array)
    if values.dtype != np.uint8:
        raise TypeError(f"{name}: expected uint8, found {values.dtype}")
    return np.ascontiguousarray(values)
