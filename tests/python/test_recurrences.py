"""Recurrences step by step: exact cases, layouts, lifetimes."""

import gc

import ml_dtypes
import numpy as np
import pytest

import replayssm
from replayssm import Error, Inputs, Policy, State


def tags(tokens, dtype=np.float64):
    """Mamba-2 whose state is the sum of the tags 2^t of the tokens that it has seen: decay 1, everything else 1."""
    one = np.ones((len(tokens), 1, 1))
    return Inputs.from_records(
        "mamba2", np.reshape(tokens, (-1, 1, 1)), one, one, np.zeros((len(tokens), 1)), one[..., 0], dtype=dtype
    )


@pytest.mark.parametrize(
    "policy",
    [
        "exact",
        "replay(L=3, state=fp32)",
        "replay(L=4, anchor=fp32, read=bf16)",
        "replay(L=5, state=bf16, order=sequential)",
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tags_of_tokens_add_up(policy, dtype):
    state = State(tags([0], dtype), policy)
    y = state.advance(tags([1, 2, 4], dtype))
    assert y[:, 0, 0].tolist() == [1, 3, 7]
    assert state.advance(tags([8], dtype))[0, 0, 0] == 15
    assert (state.tokens, state.effective().item()) == (4, 15)
    assert state.held == (Policy(policy).length > 1) * (4 % Policy(policy).length)
    assert state.first_non_finite is None and state.overflows == 0


def test_rounding_of_each_token_stalls_and_that_of_checkpoints_less():
    # A = -1, dt = 2^-9, x = 1, 2000 steps: 0.98084 exactly; bf16 stalls at 0.5, rewritten every L tokens at 0.75 ...
    T = 2000
    one = np.ones((T, 1, 1))
    inputs = Inputs.from_records("mamba2", one, one, one, np.full((T, 1), -(2.0**-9)), np.full((T, 1), 2.0**-9))
    ends = {}
    for policy in [
        "exact",
        "eager(state=bf16)",
        "replay(L=4, state=bf16)",
        "replay(L=16, state=bf16)",
        "replay(L=64, state=bf16)",
    ]:
        state = State(inputs, policy)
        state.advance(inputs)
        ends[policy] = state.effective().item()
    q = np.exp(-(2.0**-9))
    # Round-off of 2000 steps, each of relative eps; far below the last digit of the published figures.
    assert abs(ends["exact"] - 2.0**-9 * (1 - q**T) / (1 - q)) < T * np.finfo(float).eps
    assert [ends[p] for p in list(ends)[1:4]] == [0.5, 0.75, 0.9375]
    assert round(ends["replay(L=64, state=bf16)"], 5) == 0.98110


@pytest.mark.parametrize("dtype, first", [(np.float32, 43), (np.float64, None)])
def test_growth_without_normalised_keys_names_the_first_step_that_is_not_finite(dtype, first):
    # S_t = -8 S_{t-1} + 3: the 44th step, token 43 from 0, is infinite in fp32.
    T = 64
    k = np.full((T, 1, 1), 3.0)
    c = np.ones((T, 1, 1))
    inputs = Inputs.from_records("gated_delta", c, k, c, np.zeros((T, 1)), np.ones((T, 1)), dtype=dtype)
    state = State(inputs)
    state.advance(inputs)
    assert state.first_non_finite == (None if first is None else (first, 0))
    if first is None:
        assert state.effective().item() == pytest.approx(-(2**192 - 1) / 3, rel=64 * 2 * np.finfo(float).eps)


def test_small_parameters_are_not_rounded_before_they_are_used():
    zero = np.zeros((1, 1, 1))
    delta = replayssm.gated_delta(zero, zero, zero, [[0.0]], [[3.0]], [0.0], [0.0])
    assert delta.gain.item() == pytest.approx(1 / (1 + np.exp(-3.0)), rel=2 * np.finfo(float).eps)
    keys = replayssm.gated_delta(
        np.zeros((1, 1, 128)), np.full((1, 1, 128), 1e-4), np.zeros((1, 1, 1)), [[0.0]], [[0.0]], [0.0], [0.0]
    )
    assert round(keys.w[0, 0, 0], 6) == 0.066227  # the epsilon is added to the sum, not to the mean
    assert not keys.c.any()
    mamba = replayssm.mamba2(zero, zero, zero, [[0.7]], [np.log(16)], [0.0])
    dt = np.log1p(np.exp(0.7))
    assert mamba.gain.item() == pytest.approx(dt, rel=4 * np.finfo(float).eps)
    assert mamba.log_decay.item() == pytest.approx(-16 * dt, rel=8 * np.finfo(float).eps)
    capped = replayssm.mamba2(zero, zero, zero, [[0.7]], [0.0], [0.0], dt_limit=(0.0, 0.5))
    assert capped.gain.item() == 0.5


def test_states_come_in_and_go_out_in_a_named_layout():
    none = np.zeros((1, 1, 2))
    inputs = Inputs.from_records(
        "gated_delta", none, none, [[[1.0, 0.0]]], [[0.0]], [[0.0]]
    )  # q = (1, 0), nothing written
    stored = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    for layout, expected in [("PN", [1, 3]), ("NP", [1, 2])]:  # [V, K], [K, V]
        state = State(inputs)
        state.set(stored, layout=layout)
        assert state.advance(inputs)[0, 0].tolist() == expected
        np.testing.assert_array_equal(state.effective(layout=layout), stored)
    wide = Inputs.from_records("gated_delta", np.zeros((1, 1, 3)), none, none, [[0.0]], [[0.0]])  # V 3, K 2
    with pytest.raises(Error, match=r"state: expected the shape \[1, 3, 2\], found float64 \[1, 2, 3\]"):
        State(wide).set(np.zeros((1, 2, 3)))
    State(wide).set(np.zeros((1, 2, 3)), layout="NP")
    with pytest.raises(Error, match="layout: expected 'PN' or 'NP', found 'VK'"):
        State(wide).set(np.zeros((1, 2, 3)), layout="VK")


def random_arrays(T=5, H=4, G=2, P=3, N=6, dtype=np.float64):
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    return {
        "x": draw(T, H, P),
        "B": draw(T, G, N),
        "C": draw(T, G, N),
        "dt": draw(T, H),
        "A_log": draw(H),
        "dt_bias": draw(H),
    }


def y_of(arrays, **more):
    inputs = replayssm.mamba2(**arrays, **more)
    return State(inputs, "replay(L=3, state=int8:row)").advance(inputs)


def test_inputs_of_any_layout_give_the_same_bits():
    arrays = random_arrays()
    expected = y_of(arrays)
    changes = {
        "Fortran order": np.asfortranarray,
        "big-endian": lambda a: a.astype(">f8"),
        "every second": lambda a: np.repeat(a, 2, axis=0)[::2],
        "transposed": lambda a: np.ascontiguousarray(a.T).T,
        "negative stride": lambda a: np.ascontiguousarray(a[::-1])[::-1],
        "read-only": lambda a: np.broadcast_to(a, a.shape),
        "misaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
        "lists": lambda a: a.tolist(),
    }
    for name, change in changes.items():
        for key in arrays:
            np.testing.assert_array_equal(y_of({**arrays, key: change(arrays[key])}), expected, err_msg=f"{name} {key}")


def test_narrowing_is_done_on_request_alone():
    wide, narrow = random_arrays(), random_arrays(dtype=np.float32)
    assert replayssm.mamba2(**narrow).dtype == np.float32
    assert replayssm.mamba2(**{**narrow, "x": wide["x"]}).dtype == np.float64
    half = {k: a.astype(ml_dtypes.bfloat16) for k, a in wide.items()}
    assert replayssm.mamba2(**half).dtype == np.float32
    np.testing.assert_array_equal(y_of(half), y_of({k: a.astype(np.float32) for k, a in half.items()}))
    np.testing.assert_array_equal(
        y_of(wide, dtype=np.float32), y_of({k: a.astype(np.float32) for k, a in wide.items()})
    )
    with pytest.raises(TypeError, match="state: expected numbers that float32 holds exactly, found float64"):
        State(replayssm.mamba2(**narrow)).set(np.zeros((4, 3, 6)))
    with pytest.raises(TypeError, match="inputs: expected those of a state in float32, found float64"):
        State(replayssm.mamba2(**narrow)).advance(replayssm.mamba2(**wide))
    with pytest.raises(TypeError, match="out: expected a C-contiguous writable array of float64"):
        State(replayssm.mamba2(**wide)).advance(replayssm.mamba2(**wide), out=np.zeros((5, 4, 3), np.float32))


def test_inputs_hold_what_they_were_made_from_and_views_hold_the_inputs():
    arrays = random_arrays(T=64)
    expected = y_of(arrays)
    inputs = replayssm.mamba2(**{k: a.copy() for k, a in arrays.items()})
    v, decay = inputs.v, inputs.log_decay
    gc.collect()
    _ = [np.full(4096, np.nan) for _ in range(64)]  # what was freed would be written over
    np.testing.assert_array_equal(State(inputs, "replay(L=3, state=int8:row)").advance(inputs), expected)
    del inputs
    gc.collect()
    _ = [np.full(4096, np.nan) for _ in range(64)]
    np.testing.assert_array_equal(v, arrays["x"])
    assert np.all(decay < 0)
    with pytest.raises(ValueError, match="read-only"):
        v[0] = 0


def test_results_do_not_depend_on_how_tokens_are_cut_into_calls():
    arrays = random_arrays(T=600)  # more than are run between two looks at Ctrl-C
    whole = replayssm.mamba2(**arrays)
    for policy in ["eager(state=bf16:sr)", "replay(L=7, anchor=fp32, read=e4m3:row, ring=bf16)"]:
        expected = State(whole, policy).advance(whole)
        state, parts = State(whole, policy), []
        for first in range(0, 600, 100):
            part = {k: a[first : first + 100] if len(a) == 600 else a for k, a in arrays.items()}
            parts.append(state.advance(replayssm.mamba2(**part)))
        np.testing.assert_array_equal(np.concatenate(parts), expected)


def test_delta_rules_by_hand():
    # k = e_t, beta = 1, no decay, q all ones: S[t] = v_t exactly.
    T = 5
    eye = np.eye(T)[:, None, :]
    for kind, decay in [("gated_delta", np.zeros((T, 1))), ("kda", np.zeros((T, 1, T)))]:
        inputs = Inputs.from_records(
            kind, 2.0 ** np.arange(T).reshape(T, 1, 1), eye, np.ones((T, 1, T)), decay, np.ones((T, 1))
        )
        state = State(inputs, "replay(L=3, state=fp16)")
        assert state.advance(inputs)[:, 0, 0].tolist() == [1, 3, 7, 15, 31]
        assert state.effective()[0, 0].tolist() == [1, 2, 4, 8, 16]


def test_errors_name_what_is_wrong():
    arrays = random_arrays()
    with pytest.raises(Error, match=r"C: expected the shape \[5, 2, 6\], found float64 \[5, 2, 5\]"):
        replayssm.mamba2(**{**arrays, "C": arrays["C"][..., :5]})
    with pytest.raises(Error, match="heads a multiple of groups"):
        replayssm.mamba2(**{**arrays, "B": np.zeros((5, 3, 6)), "C": np.zeros((5, 3, 6))})
    with pytest.raises(Error, match=r"x: expected the shape \[tokens, heads, head_dim\]"):
        replayssm.mamba2(**{**arrays, "x": np.zeros((5, 3))})
    inputs = replayssm.mamba2(**arrays)
    with pytest.raises(Error, match="inputs: expected those of mamba2:heads=4.*found mamba2:heads=1"):
        State(inputs).advance(tags([1]))
    with pytest.raises(Error, match="unknown policy"):
        State(inputs, "sometimes(L=3)")
    with pytest.raises(TypeError, match="recurrence: expected mamba2"):
        Inputs.from_records("rwkv", *[np.zeros((1, 1, 1))] * 3, np.zeros((1, 1)), np.zeros((1, 1)))
