"""Formats on NumPy arrays. Oracles: ml_dtypes, which was written by others, and NumPy's own types."""

import ml_dtypes
import numpy as np
import pytest

import replayssm
from replayssm import Draw, Error, Format

# The element of a format and a type that ml_dtypes or NumPy has for it.
FLOATS = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
# One of every kind: what encode() and decode() have to agree on with round().
EVERY_KIND = [name for name in replayssm.format_names() if name != "exact" and not name.startswith("int")] + [
    "int16:row",
    "int8:row",
    "int4:row",
    "int8:group4",
    "int4:tile2",
    "e4m3:head",
    "e4m3:row:cap=240",
    "e2m1:row:ceil",
    "int8:row:hadamard",
    "int8:tensor",
    "int8:row:asym",
    "int4:group16:asym",
    "int8:row:ef=int4",
    "fp16:sr",
    "e4m3:row:rz",
    "custom(e=3,m=4)",
]


def numbers(shape=(2, 3, 40), dtype=np.float64, seed=0):
    """Normal numbers over many binades, zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 5, shape))
    x[..., ::11] = 0
    return x.astype(dtype)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.filterwarnings("ignore:invalid value")  # NaN to NaN
def test_every_code_has_the_value_that_ml_dtypes_gives_it(name):
    form = Format(name)
    codes = np.arange(2**form.bits, dtype=np.uint32)
    theirs = codes.astype(np.uint16 if form.bits > 8 else np.uint8).view(FLOATS[name]).astype(np.float64)
    ours = np.array([form.decode_code(int(code)) for code in codes])
    np.testing.assert_array_equal(ours, theirs)  # a NaN for a NaN
    np.testing.assert_array_equal(np.signbit(ours[theirs == 0]), np.signbit(theirs[theirs == 0]))
    assert form.largest == np.max(theirs[np.isfinite(theirs)])
    assert form.dtype == np.dtype(FLOATS[name])
    assert replayssm.format_of(FLOATS[name]) == form


@pytest.mark.parametrize("name", FLOATS)
def test_rounds_as_ml_dtypes_does_within_the_range(name):
    form = Format(name)
    x = numbers((1000,), np.float32)
    x = x[np.abs(x) <= form.largest]
    np.testing.assert_array_equal(form.round(x), x.astype(FLOATS[name]).astype(np.float32))
    assert form.round(x).dtype == np.float32
    np.testing.assert_array_equal(
        form.encode(x).elements().astype(np.float32), x.astype(FLOATS[name]).astype(np.float32)
    )


@pytest.mark.parametrize("name", EVERY_KIND)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_encoded_decodes_to_what_round_gives(name, dtype):
    form = Format(name)
    x = numbers(dtype=dtype)
    stored = form.encode(x, draw=Draw(seed=7))
    rounded = form.round(x, draw=Draw(seed=7))
    np.testing.assert_array_equal(stored.decode(dtype), rounded)
    bytes_here = stored.codes.nbytes + stored.scales.nbytes
    assert stored.nbytes == form.bytes(x.shape) == bytes_here - (4 if name == "int8:tensor" else 0)  # of two heads
    assert np.any(rounded != x) or name == "fp32" and dtype == np.float32
    in_place = x.copy()
    overflows = form.round_in_place(in_place, draw=Draw(seed=7))
    np.testing.assert_array_equal(in_place, rounded)
    assert min(overflows) >= 0


def test_elements_and_scales_as_types_of_ml_dtypes():
    x = numbers()
    for name, scale_type in [
        ("int8:row", np.float32),
        ("mxfp4", ml_dtypes.float8_e8m0fnu),
        ("nvfp4", ml_dtypes.float8_e4m3fn),
    ]:
        form = Format(name)
        stored = form.encode(x)
        elements, scales = stored.elements(), stored.scale_values()
        assert elements.dtype == form.dtype and elements.shape == x.shape
        assert scales.dtype == np.dtype(scale_type)
        per_row = scales.reshape(2, 3, -1).astype(np.float64)
        if name == "nvfp4":
            per_row = per_row * stored.head_scales().astype(np.float64)[:, None, None]
        extent = form.extent or x.shape[-1]
        wide = np.repeat(per_row, extent, axis=-1)[..., : x.shape[-1]]
        np.testing.assert_array_equal(elements.astype(np.float64) * wide, stored.decode())


def test_elements_of_whole_bytes_are_a_view_that_outlives_its_owner():
    x = numbers((4, 8), np.float32)
    expected = x.astype(ml_dtypes.bfloat16)
    elements = Format("bf16").encode(x).elements()  # nothing else holds the codes
    _ = [np.zeros((4, 8)) for _ in range(100)]
    assert elements.tobytes() == expected.tobytes()
    assert elements.base is not None


def test_int8_row_by_hand():
    # scale = float32(amax / 127); codes are round(x / scale), ties to even.
    x = np.array([[127.0, 0.5, 1.5, -126.5], [0.0, 0.0, 0.0, 0.0]])
    stored = Format("int8:row").encode(x)
    assert stored.elements().tolist() == [[127, 0, 2, -126], [0, 0, 0, 0]]
    assert stored.scale_values().tolist() == [1.0, 1.0]


def test_a_scale_of_all_heads_and_zero_points_by_hand():
    x = np.array([[[127.0, 3.0]], [[254.0, 2.0]]])  # two heads; the scale is 254 / 127
    stored = Format("int8:tensor").encode(x)
    assert stored.scale_values().tolist() == [[2.0], [2.0]]
    assert stored.elements().tolist() == [[[64, 2]], [[127, 1]]]  # ties to even
    assert Format("int8:head").round(x)[0, 0, 0] == 127
    # scale (high - low) / 255 = 1, zero point -128 - low / scale = -127
    stored = Format("int8:row:asym").encode([-1.0, 0.0, 2.0, 254.0])
    assert (stored.scale_values().tolist(), stored.zero_points().tolist()) == ([1.0], [-127])
    assert stored.elements().tolist() == [-128, -127, -125, 127]
    assert stored.decode().tolist() == [-1, 0, 2, 254]
    with pytest.raises(TypeError, match="no zero points"):
        Format("int8:row").encode([1.0]).zero_points()


def test_what_is_not_kept_is_counted():
    assert Format("fp16").round_in_place(np.array([65520.0, 1.0])) == (1, 0)
    assert Format("e4m3").round_in_place(np.array([1000.0, -1000.0, 448.0])) == (0, 2)


def test_fields():
    form = Format("int8:row:ef=int4")
    assert (form.residual, form.asymmetric) == (Format("int4:row"), False)
    assert Format("int8:row:asym").asymmetric and Format("bf16").residual is None


def test_inputs_of_any_type_and_layout_are_read_as_they_are():
    form = Format("e4m3:row")
    x = numbers((4, 6), np.float32)
    expected = form.round(x.astype(np.float64))
    for same in [
        x.astype(">f4"),
        np.asfortranarray(x.astype(np.float64)),
        x.astype(np.float64)[::-1][::-1],
        x.astype(np.float64).tolist(),
    ]:
        np.testing.assert_array_equal(form.round(same), expected)
    half = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(form.round(half), form.round(half.astype(np.float64)))
    np.testing.assert_array_equal(form.round(np.arange(5)[::-2]), form.round(np.array([4.0, 2.0, 0.0])))
    before = x.copy()
    form.round(x)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("bad", [[1 + 1j], ["a"], np.array([1], np.longdouble), [2**53 + 1], np.array([1], "M8[s]")])
def test_numbers_that_a_double_does_not_hold_are_refused(bad):
    with pytest.raises(TypeError, match="array: expected numbers that float64 holds exactly"):
        Format("bf16").round(bad)
    assert Format("bf16").round([2**53]).item() == 2.0**53


def test_stochastic_rounding_draws_by_place_and_token():
    form = Format("bf16:sr")
    x = np.full((1, 10000), 1 + 2.0**-9)  # a quarter of a step above 1
    a = form.round(x, draw=Draw(seed=1))
    np.testing.assert_array_equal(a, form.round(x, draw=Draw(seed=1)))
    for other in [Draw(seed=2), Draw(seed=1, slot=1), Draw(seed=1, layer=1), Draw(seed=1, token=1)]:
        assert np.any(a != form.round(x, draw=other))
    up = np.mean(a > 1)
    assert abs(up - 0.25) < 4 * np.sqrt(0.25 * 0.75 / x.size)  # four standard errors
    with pytest.raises(Error, match="layer: expected a number below 65536"):
        form.round(x, draw=Draw(layer=65536))


def test_errors_name_what_is_wrong():
    with pytest.raises(Error, match="e9m9"):
        Format("e9m9")
    with pytest.raises(ValueError):
        Format("int8")
    with pytest.raises(Error, match="'exact'.*no codes"):
        Format("exact").encode(np.zeros(3))
    with pytest.raises(Error, match=r"codes: expected the shape \[1, 1, 3\]"):
        Format("int8:row").decode(np.zeros(4, np.uint8), np.zeros(4, np.uint8), 3)
    with pytest.raises(Error, match=r"scales: expected the shape \[1, 4\]"):
        Format("int8:row").decode(np.zeros(3, np.uint8), np.zeros(8, np.uint8), 3)
    with pytest.raises(TypeError, match="codes: expected uint8"):
        Format("int8:row").decode(np.zeros(3), np.zeros(4, np.uint8), 3)
    with pytest.raises(TypeError, match="no type for the element tf32"):
        Format("tf32").encode(np.zeros(3)).elements()
    with pytest.raises(Error, match="scalar"):
        Format("bf16").round(1.0)


def test_empty_arrays():
    for shape in [(0, 3), (3, 0), (0,)]:
        assert Format("int8:row").round(np.zeros(shape)).shape == shape
        assert Format("int8:row").encode(np.zeros(shape)).decode().shape == shape
