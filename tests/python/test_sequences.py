"""Many states of one layer at once: what replayssm.transformers runs on."""

import numpy as np
import pytest

import replayssm
from replayssm import _core

SEQUENCES, TOKENS, HEADS, GROUPS, P, N = 3, 11, 4, 2, 6, 16
POLICY = "replay(L=4, anchor=bf16, read=int8:row, ring=fp16)"
MASK = np.ones((SEQUENCES, TOKENS), bool)
MASK[0, :4] = MASK[1, 8:] = MASK[2, 3:6] = False  # on the left, on the right, and a hole


def records(recurrence, real=np.float32, seed=3):
    """Random records of all sequences, and the rates of mamba2."""
    draw = np.random.default_rng(seed)
    columns = (N,) if recurrence == "kda" else ()
    of = {
        "v": draw.normal(size=(SEQUENCES, TOKENS, HEADS, P)),
        "w": draw.normal(size=(SEQUENCES, TOKENS, GROUPS, N)) / N**0.5,
        "c": draw.normal(size=(SEQUENCES, TOKENS, GROUPS, N)),
        "log_decay": -draw.exponential(0.2, size=(SEQUENCES, TOKENS, HEADS, *columns)),
        "gain": draw.uniform(0.1, 1, size=(SEQUENCES, TOKENS, HEADS)),
    }
    return {name: values.astype(real) for name, values in of.items()}


def states(recurrence, policy=POLICY, count=SEQUENCES, cls=_core.State32):
    shape = _core.RecurrenceShape(getattr(_core.Recurrence, recurrence), HEADS, GROUPS, P, N)
    return [cls(shape, _core.Policy(policy), _core.StatePlace(0, slot, 0)) for slot in range(count)]


def advance(held, of, mask=None, rate=None, out=None, threads=1, cls=_core.State32):
    out = np.full(of["v"].shape, 7, of["v"].dtype) if out is None else out
    cls.advance_all(held, *of.values(), rate, mask, out, threads)
    return out


@pytest.mark.parametrize("recurrence", ["mamba2", "gated_delta", "kda"])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_sequence_advances_by_its_own_tokens_alone(recurrence, threads):
    of, held = records(recurrence), states(recurrence)
    y = advance(held, of, MASK, threads=threads)
    for b in range(SEQUENCES):
        own = replayssm.Inputs.from_records(recurrence, **{name: a[b, MASK[b]] for name, a in of.items()})
        state = replayssm.State(own, POLICY)
        assert np.array_equal(y[b, MASK[b]], state.advance(own))
        assert np.array_equal(held[b].effective(), state.effective())
        assert held[b].tokens == MASK[b].sum()
        assert (y[b, ~MASK[b]] == 7).all()  # nothing is written where nothing advances


def test_a_copy_goes_its_own_way():
    of, held = records("gated_delta"), states("gated_delta")
    advance(held, of)
    copies = [state.copy() for state in held]
    before = [state.effective() for state in held]
    y = advance(copies, of)
    assert all(np.array_equal(state.effective(), then) for state, then in zip(held, before))
    assert np.array_equal(advance(held, of), y)


def test_a_ring_holds_dt_where_the_rate_is_given():
    """log decay = rate dt: a record of mamba2 keeps dt, which ring.dt rounds; by hand for one head and one column."""
    rate, dt, x = np.float32(-0.7), np.array([0.3, 0.2, 0.1], np.float32), np.array([1.0, 2.0, 3.0], np.float32)
    shape = _core.RecurrenceShape(_core.Recurrence.mamba2, 1, 1, 1, 1)
    state = _core.State64(shape, _core.Policy("replay(L=8, state=exact, ring.dt=bf16)"), _core.StatePlace(0, 0, 0))
    wide = [a.astype(np.float64).reshape(1, 3, 1) for a in (rate * dt, dt)]
    ones, out = np.ones((1, 3, 1, 1)), np.zeros((1, 3, 1, 1))
    wide[0] = np.float64(rate) * wide[1]
    rates = np.array([rate], np.float64)
    _core.State64.advance_all([state], x.astype(np.float64).reshape(1, 3, 1, 1), ones, ones, *wide, rates, None, out, 1)
    kept = replayssm.Format("bf16").round(wide[1].ravel())
    # The step that appends a record uses the unrounded values; those before it come from the ring.
    last = wide[1].ravel()[2]
    expected = np.exp(float(rate) * last) * (
        np.exp(float(rate) * kept[1]) * kept[0] * x[0] + kept[1] * x[1]
    ) + last * float(x[2])
    # Sums of three terms in binary64: some roundings of 2^-53 each.
    assert abs(out[0, 2, 0, 0] - expected) <= 8 * 2.0**-53 * abs(expected)


@pytest.mark.parametrize("name", ["v", "w", "c", "log_decay", "gain"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.astype(np.float64),
        lambda a: np.asfortranarray(a),
        lambda a: a[::-1],
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: a.astype(">f4"),
    ],
    ids=["float64", "fortran", "negative stride", "strided", "big-endian"],
)
def test_records_of_another_type_or_layout_are_refused(name, spoil):
    of, held = records("mamba2"), states("mamba2")
    of[name] = spoil(of[name])
    out = np.full((SEQUENCES, TOKENS, HEADS, P), 7, np.float32)
    with pytest.raises(TypeError, match=f"{name}: expected a C-contiguous array of float32"):
        advance(held, of, out=out)
    assert (out == 7).all() and not any(state.tokens for state in held)


def test_outputs_that_cannot_be_written_where_they_lie_are_refused():
    of, held = records("mamba2"), states("mamba2")
    fixed = np.zeros_like(of["v"])
    fixed.flags.writeable = False
    for out in (fixed, np.zeros(of["v"].shape), np.zeros((*of["v"].shape, 2), np.float32)[..., 0]):
        with pytest.raises(TypeError, match="out: expected a C-contiguous writable array of float32"):
            advance(held, of, out=out)
    assert not any(state.tokens for state in held)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda of, held: of.update(gain=of["gain"][:, :5].copy()), "gain: expected the shape"),
        (lambda of, held: held.append(held[0]), "each of them once"),
        (lambda of, held: held.pop(), r"v: expected the shape \[2, 11"),
        (lambda of, held: held.clear(), "at least one"),
        (lambda of, held: held.__setitem__(1, states("kda", count=1)[0]), "of one shape"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    of, held = records("mamba2"), states("mamba2")
    change(of, held)
    with pytest.raises(replayssm.Error, match=message):
        advance(held, of)


def test_masks_are_of_bool_and_of_the_tokens():
    of, held = records("mamba2"), states("mamba2")
    with pytest.raises(TypeError, match="mask: expected a C-contiguous array of bool"):
        advance(held, of, MASK.astype(np.int64))
    with pytest.raises(replayssm.Error, match=r"mask: expected the shape \[3, 11\]"):
        advance(held, of, MASK[:, :5].copy())


def test_no_tokens_advance_nothing():
    of = {name: np.ascontiguousarray(a[:, :0]) for name, a in records("mamba2").items()}
    held = states("mamba2")
    assert advance(held, of).size == 0 and held[0].tokens == 0
