"""In place means the caller's memory: it is updated or TypeError is raised, and nothing is copied in secret."""

import numpy as np
import pytest

import replayssm
from replayssm import Format


def layouts(dtype):
    """Arrays [heads, rows, n] that no in-place function may take, by what is wrong with them."""
    whole = np.arange(48, dtype=dtype).reshape(4, 3, 4) + 0.3
    read_only = whole.copy()
    read_only.flags.writeable = False
    misaligned = np.frombuffer(bytearray(1 + whole.nbytes), np.uint8)[1:].view(dtype).reshape(whole.shape)
    misaligned[:] = whole
    other = np.float32 if dtype == np.float64 else np.float64
    return {
        "Fortran order": np.asfortranarray(whole),
        "every second": whole[::2],
        "transposed": whole.transpose(0, 2, 1),
        "negative stride": whole[::-1],
        "read-only": read_only,
        "big-endian": whole.astype(np.dtype(dtype).newbyteorder(">")),
        "misaligned": misaligned,
        "integers": whole.astype(np.int32),
        "half": whole.astype(np.float16),
        "another float": whole.astype(other),
    }


WRONG = sorted(layouts(np.float32))


@pytest.mark.parametrize("kind", [k for k in WRONG if k != "another float"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_refuses_what_it_cannot_do_in_place(kind, dtype):
    array = layouts(dtype)[kind]
    before = array.copy()
    with pytest.raises(TypeError, match="C-contiguous"):
        Format("bf16").round_in_place(array)
    np.testing.assert_array_equal(array, before)
    with pytest.raises(TypeError, match="numpy.ndarray"):
        Format("bf16").round_in_place([1.0])


def inputs(dtype, heads=4, tokens=2):
    rng = np.random.default_rng(1)
    return replayssm.Inputs.from_records(
        "mamba2",
        rng.normal(size=(tokens, heads, 3)),
        rng.normal(size=(tokens, 1, 4)),
        rng.normal(size=(tokens, 1, 4)),
        -rng.random((tokens, heads)),
        rng.random((tokens, heads)),
        dtype=dtype,
    )


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_refuses_a_state_that_it_cannot_update_where_it_lies(kind, dtype):
    state = layouts(dtype)[kind]
    before = state.copy()
    with pytest.raises(TypeError, match=f"state: expected a C-contiguous writable array of {np.dtype(dtype)}, found"):
        replayssm.step_in_place(state, inputs(dtype, heads=len(state)))
    np.testing.assert_array_equal(state, before)
    good = np.zeros((4, 3, 4), dtype)
    with pytest.raises(TypeError, match="out: expected a C-contiguous writable array"):
        replayssm.step_in_place(good, inputs(dtype), out=np.asfortranarray(np.ones((2, 4, 3), dtype)))
    assert not good.any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_updates_the_memory_that_it_was_given(dtype):
    state = np.zeros((4, 3, 4), dtype)
    address = state.ctypes.data
    given = inputs(dtype)
    out = np.empty((2, 4, 3), dtype)
    assert replayssm.step_in_place(state, given, out=out) is out
    assert state.ctypes.data == address
    # By hand, in the same precision: sums of two terms of a state have one order, dot products of four do not.
    expected = np.zeros_like(state)
    for t in range(2):
        decay = np.exp(given.log_decay[t])[:, None, None]
        u = given.gain[t][:, None] * given.v[t]
        expected = expected * decay + u[:, :, None] * given.w[t, 0][None, None, :]
        terms = np.abs(expected * given.c[t, 0]).sum(-1)
        # Four products and their sum: at most 4 roundings of partial sums and one of each product; exp and the two
        # operations of the state before them, each within an ulp of its own.
        bound = 16 * np.finfo(dtype).eps * terms
        assert np.all(np.abs(out[t] - (expected * given.c[t, 0]).sum(-1)) <= bound)
    assert np.all(np.abs(state - expected) <= 8 * np.finfo(dtype).eps * (np.abs(expected) + 1))
    view = np.zeros((8, 3, 4), dtype)
    replayssm.step_in_place(view[2:6], given)  # a contiguous part of something larger
    np.testing.assert_array_equal(view[2:6], state)
    assert not view[:2].any() and not view[6:].any()


def test_wrong_shapes_and_no_tokens():
    given = inputs(np.float64)
    with pytest.raises(replayssm.Error, match="keeps no residual"):
        replayssm.step_in_place(np.zeros((4, 3, 4)), given, "int8:row:ef=int4")
    with pytest.raises(replayssm.Error, match=r"state: expected the shape \[4, 3, 4\], found float64 \[4, 4, 3\]"):
        replayssm.step_in_place(np.zeros((4, 4, 3)), given)
    with pytest.raises(TypeError, match="numpy.ndarray"):
        replayssm.step_in_place([[0.0]], given)
    none = replayssm.Inputs.from_records(
        "mamba2", np.zeros((0, 1, 3)), np.zeros((0, 1, 4)), np.zeros((0, 1, 4)), np.zeros((0, 1)), np.zeros((0, 1))
    )
    state = np.ones((1, 3, 4))
    assert replayssm.step_in_place(state, none).shape == (0, 1, 3)
    assert np.all(state == 1)
    assert Format("bf16").round_in_place(np.zeros((0, 3))) == (0, 0)
