import copy
import pickle

import pytest

from replayssm import Error, Format, Policy, default_policies


def test_fields_of_a_split_policy():
    p = Policy(" replay(read=e4m3:row, anchor=fp32,  ring=bf16, ring.dt=fp16, loop=open, layers=0-3+7) ")
    assert str(p) == "replay(L=16, anchor=fp32, read=e4m3:row, ring=bf16, ring.dt=fp16, loop=open, layers=0-3+7)"
    assert (p.kind, p.length, p.order, p.loop, p.exact) == ("split", 16, "closed", "open", False)
    assert (p.state, p.read) == (Format("fp32"), Format("e4m3:row"))
    assert p.ring == {"*": Format("bf16"), "dt": Format("fp16")}
    assert p.layers == [(0, 3), (7, 7)]
    assert [p.covers(i) for i in (3, 4, 7)] == [True, False, True]


@pytest.mark.parametrize(
    "text, kind, length",
    [("exact", "exact", 1), ("eager(state=bf16)", "eager", 1), ("replay(L=4, state=bf16)", "shared", 4)],
)
def test_kinds(text, kind, length):
    p = Policy(text)
    assert (p.kind, p.length, p.read, p.layers, p.ring) == (kind, length, None, [], {})
    assert p.exact == (kind == "exact")


def test_texts_come_back_and_equal_policies_are_equal():
    for p in default_policies():
        assert Policy(str(p)) == p and hash(Policy(p)) == hash(p)
        assert pickle.loads(pickle.dumps(p)) == p == copy.deepcopy(p)
    assert len(set(default_policies())) == 9
    assert Policy("replay(L=16, state=bf16)").with_length(64) == Policy("replay(L=64, state=bf16)")


def test_errors_quote_the_text():
    with pytest.raises(Error, match="L=0"):
        Policy("replay(L=0, state=bf16)")
    with pytest.raises(Error, match="only a replay has a length"):
        Policy("eager(state=bf16)").with_length(4)
    with pytest.raises(TypeError):
        Policy(3)
