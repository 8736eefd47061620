"""replayssm.transformers on tiny random models of every family, and on the trained ones beside the program."""

import copy
import json
import re

import numpy as np
import pytest

import replayssm

torch = pytest.importorskip("torch", reason="replayssm.transformers needs torch, which the package does not install")
transformers = pytest.importorskip("transformers", reason="replayssm.transformers needs transformers")

import replayssm.transformers as attached  # noqa: E402
from replayssm.transformers import attach  # noqa: E402
from tiny_models import FAMILIES, tiny  # noqa: E402

torch.set_num_threads(1)  # tiny models: threads would wait for each other
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
F32, F64 = torch.float32, torch.float64
EXPERTS = ["granitemoehybrid", "qwen3_next", "qwen3_5_moe", "kimi_linear"]
POLICY = "replay(L=4, anchor=bf16, read=int8:row)"


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def tokens(rows, length, device="cpu", seed=1):
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed)).to(device)


def rms(x):
    return x.double().square().mean().sqrt().item()


def cache_name(model):
    return "cache_params" if isinstance(model, transformers.Mamba2ForCausalLM) else "past_key_values"


def step(model, ids, cache, start):
    """Logits of some tokens that follow a cache, and the cache behind them."""
    name, more = cache_name(model), {}
    if name == "past_key_values":  # some families count positions anew where they are not told
        more["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None].expand(len(ids), -1)
    out = model(input_ids=ids, use_cache=True, **{name: cache}, **more)
    return out.logits, out[name]


def in_pieces(model, ids, ends, after=lambda cache: None):
    """Logits, tokens going in up to each of `ends`; `after` is called behind each of them."""
    cache, start, parts = None, 0, []
    for end in ends:
        logits, cache = step(model, ids[:, start:end], cache, start)
        parts.append(logits)
        after(cache)
        start = end
    return torch.cat(parts, 1), cache


def held(cache, layer):
    return cache.layers[layer].recurrent_states[0]


def noise(family, ids, **more):
    """What fp32 rounding does to the logits of the model as it is: the measure of what is equal but for rounding."""
    return rms(tiny(family, F32, ids.device)(ids, **more).logits - tiny(family, F64, ids.device)(ids, **more).logits)


# ---- exact: the model as it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_exact_is_the_model_but_for_rounding(family, device, dtype):
    """Both against the model in float64: ours may err twice as much as the model as it is."""
    if dtype == torch.bfloat16 and family in EXPERTS:
        pytest.skip("a rounding in bf16 may turn the choice of an expert, in either")
    ids, model = tokens(2, 37, device), tiny(family, dtype, device)
    right = tiny(family, F64, device)
    for a, b in zip(model.parameters(), right.parameters()):
        b.copy_(a)  # the same numbers, rounded to dtype
    expected = right(ids).logits
    plain = model(ids).logits
    with attach(model) as run:
        ours, _ = in_pieces(model, ids, [20, 21, 22, 37])
    assert run.covered == FAMILIES[family][3]
    assert rms(ours - expected) <= 2 * rms(plain - expected)
    assert torch.equal(model(ids).logits, plain)  # and it is left as it was


def test_greedy_generation_is_the_models(family, device):
    """In float64, where the best two of 97 logits do not come as near as the noise of the scans that stay in fp32."""
    ids, model = tokens(3, 13, device), tiny(family, F64, device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    how = dict(attention_mask=mask, max_new_tokens=9, do_sample=False)
    for more in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        expected = model.generate(ids, **how, **more)
        with attach(model):
            first, second = (model.generate(ids, **how, **more) for _ in range(2))
        assert torch.equal(first, expected) and torch.equal(second, expected), more


# ---- policies -----------------------------------------------------------------------------------------------------


def test_an_eager_state_is_the_models_own_rounded_behind_each_token(family, device):
    """The oracle is the model as it is, a token at a time, its cached state rounded to bf16 behind each.

    Its states are computed in fp32, ours in fp64. Noise of some 10 * 2^-24 of a state turns one rounding to the next
    (2^-8 apart) in about 10 * 2^-24 / 2^-9 = 3e-4 of all cases, by a whole unit, where roundings have 1/12 of its square:
    12 * 3e-4 of the squared error, 6 % of the error. A quarter leaves room for the noise that grows through the layers.
    """
    ids, model = tokens(2, 24, device), tiny(family, F64, device)
    layers = FAMILIES[family][3]

    def round_states(cache):
        for layer in layers:
            held(cache, layer).copy_(held(cache, layer).to(torch.bfloat16))

    each = range(1, 25)
    exact, _ = in_pieces(model, ids, each)
    oracle, cache = in_pieces(model, ids, each, round_states)
    with attach(model, "eager(state=bf16)"):
        ours, kept = in_pieces(model, ids, [17, 18, 24])  # windows and single tokens
    assert 0 < rms(oracle - exact) and rms(ours - oracle) <= rms(oracle - exact) / 4
    for layer in layers:
        stored = held(kept, layer).effective()
        assert torch.equal(stored, stored.to(torch.bfloat16).to(F64))  # L = 1: what is stored is all there is
        assert stored.shape == held(cache, layer).shape  # as transformers lays it out


def test_layers_are_those_of_the_model(family):
    ids, model = tokens(1, 24), tiny(family, F64)
    first, last = FAMILIES[family][3][0], FAMILIES[family][3][-1]
    report = attached.kl(model, ids, f"eager(state=e4m3:row, layers={last})", chunk_tokens=10)
    errors = {e.layer: e.y_rel_l2.propagated for e in report.results[0].layers}
    assert list(errors) == FAMILIES[family][3]
    assert errors[first] == 0 and errors[last] > 0
    with pytest.raises(replayssm.Error, match="the model has no layer 3"):
        attach(model, "eager(state=bf16, layers=3)")
    if 1 not in FAMILIES[family][3]:
        with pytest.raises(replayssm.Error, match="layer 1 is .* and keeps no recurrent state"):
            attach(model, "eager(state=bf16, layers=1)")


def test_stochastic_rounding_draws_by_seed_and_sequence():
    ids, model = tokens(1, 20).repeat(2, 1), tiny("mamba2", F64)

    def run(seed):
        with attach(model, "eager(state=e4m3:row:sr)", seed=seed):
            return model(ids).logits

    a = run(1)
    assert torch.equal(a, run(1)) and not torch.equal(a, run(2)) and not torch.equal(a[0], a[1])


# ---- padding, batches, caches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_advances_no_state(family, device, side):
    ids, model = tokens(3, 19, device), tiny(family, F64, device)
    lengths = [19, 12, 18]
    real = [slice(19 - n, 19) if side == "left" else slice(0, n) for n in lengths]
    mask = torch.zeros_like(ids)
    for row, where in enumerate(real):
        mask[row, where] = 1
    limit = noise(family, ids)
    positions = {}
    if cache_name(model) == "past_key_values":  # as generate() has them
        positions["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    with attach(model, POLICY):
        out = model(ids, attention_mask=mask, use_cache=True, **positions)
        for row, where in enumerate(real):
            alone = model(ids[row : row + 1, where], use_cache=True)
            assert rms(out.logits[row, where] - alone.logits[0]) <= limit
            for layer in FAMILIES[family][3]:
                one, other = (held(o[cache_name(model)], layer) for o in (out, alone))
                assert rms(one.effective()[row] - other.effective()[0]) <= limit
                assert one.states._states[row].tokens == lengths[row] == other.states._states[0].tokens


def test_a_window_is_its_pieces(family, device):
    ids, model = tokens(2, 19, device), tiny(family, F64, device)
    with attach(model, POLICY):
        whole, _ = in_pieces(model, ids, [19])
        pieces, _ = in_pieces(model, ids, [5, 6, 14, 19])
    assert rms(whole - pieces) <= noise(family, ids)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_5", "kimi_linear"])
def test_caches_are_copied_reordered_and_reset_with_their_states(family, device):
    ids, model = tokens(2, 19, device), tiny(family, F64, device)
    limit = noise(family, ids)
    with attach(model, POLICY):
        _, cache = in_pieces(model, ids, [14])
        kept = copy.deepcopy(cache)
        expected, _ = step(model, ids[:, 14:], cache, 14)
        other = copy.deepcopy(kept)
        again, _ = step(model, ids[:, 14:], kept, 14)
        assert torch.equal(again, expected)  # the first one advanced its own states alone

        rows = torch.tensor([1, 1], device=device)
        other.reorder_cache(rows)
        y, other = step(model, ids[:, 14:], other, 14)
        assert rms(y[0] - y[1]) > limit  # of one past, each with its own tokens
        assert rms(y[1] - expected[1]) <= limit
        same = step(model, ids[[1, 0], 14:], _reordered(in_pieces(model, ids, [14])[1], [1, 0], device), 14)[0]
        assert rms(same - expected[[1, 0]]) <= limit

        if family == "mamba2":  # attention's reset keeps its keys
            other.reset()
            fresh, _ = step(model, ids[:, :14], other, 0)
            assert torch.equal(fresh, in_pieces(model, ids, [14])[0])


def _reordered(cache, rows, device):
    cache.reorder_cache(torch.tensor(rows, device=device))
    return cache


def test_an_attachment_is_entered_again_with_its_caches():
    ids, model = tokens(1, 19), tiny("qwen3_5", F64)
    run = attach(model, POLICY)
    with run:
        whole, _ = in_pieces(model, ids, [10, 19])
        first, cache = in_pieces(model, ids, [10])
    model(ids)
    with run:
        assert torch.equal(step(model, ids[:, 10:], cache, 10)[0], whole[:, 10:])


# ---- what is refused, and what is left as it was --------------------------------------------------------------------


def functions():
    """The modeling functions that attachments stand in for, of all families that are loaded."""
    from replayssm.transformers.families import FAMILIES as covered

    return [original for family in covered for original in family.originals().values()]


def test_other_models_run_as_they_are():
    ids, model, other = tokens(1, 12), tiny("mamba2"), tiny("mamba2")
    expected, before = other(ids).logits, functions()
    with attach(model, "eager(state=e2m1)"):
        assert torch.equal(other(ids).logits, expected)
        assert not torch.equal(model(ids).logits, expected)
    assert functions() == before
    assert not model._forward_pre_hooks and "_valid_auto_compile_criteria" not in vars(model)


def test_the_model_is_restored_behind_an_exception():
    ids, model = tokens(1, 12), tiny("qwen3_next")
    expected, before = model(ids).logits, functions()
    with pytest.raises(KeyError):
        with attach(model, "eager(state=e2m1)"):
            raise KeyError
    with pytest.raises(TypeError):
        with attach(model, "eager(state=e2m1)"):
            model(ids, attention_mask=3.5)
    assert functions() == before and torch.equal(model(ids).logits, expected)
    with attach(model):  # and can be attached again
        model(ids)


def refused(match, **how):
    return pytest.raises(replayssm.Error, match=match, **how)


def test_models_and_policies_that_are_not_covered_are_refused_by_name():
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    llama = transformers.LlamaForCausalLM(config)
    with refused(r"LlamaForCausalLM \(model_type llama\): no layer of a recurrence that attach covers, .*Zamba2"):
        attach(llama)
    with pytest.raises(TypeError, match="model: expected a model of transformers, found str"):
        attach("mamba2")
    model = tiny("mamba2")
    with refused("lazy"):
        attach(model, "lazy")
    with refused("precision: expected fp32 or fp64, found 'bf16'"):
        attach(model, precision="bf16")
    with refused("threads"):
        attach(model, threads=-1)


def test_nesting_is_refused():
    model, other = tiny("mamba2"), tiny("kimi_linear")
    with attach(model):
        for inner in (model, other):
            with refused(r"attach inside attach: attach\(Mamba2ForCausalLM, 'exact'\) has not ended"):
                with attach(inner):
                    pass


def test_calls_that_would_give_wrong_figures_are_refused():
    model, ids = tiny("qwen3_5"), tokens(1, 8)
    with refused("training mode"), attach(tiny("mamba2").train()):
        pass
    with attach(model):
        with refused("gradients do not go through"), torch.enable_grad():
            model(ids)
        with refused(r"attention_mask: expected the shape \[sequences, tokens\], found \[1, 1, 8, 8\]"):
            model(ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
        with refused("cu_seq_lens_q: packed sequences"):
            model(ids, cu_seq_lens_q=torch.tensor([0, 3, 8]))
        with refused("position_ids: expected ascending"):
            model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))
        model.train()
        with refused("training mode"):
            model(ids)


def test_compiled_models_are_refused():
    with refused("is compiled"), attach(torch.compile(tiny("mamba2"))):
        pass


def test_caches_of_elsewhere_are_refused():
    model, ids = tiny("mamba2"), tokens(1, 8)
    _, plain = in_pieces(model, ids, [8])
    with attach(model, POLICY):
        _, ours = in_pieces(model, ids, [8])
        with refused("layer 0: the cache was filled under no attachment"):
            step(model, ids[:, :1], plain, 8)
    with attach(model):
        with refused(re.escape(f"layer 0: the cache was filled under attach(Mamba2ForCausalLM, '{POLICY}')")):
            step(model, ids[:, :1], copy.deepcopy(ours), 8)
    with refused("can be used under that one alone"):  # the model as it is would read elements
        step(model, ids[:, :1], ours, 8)
    with attach(model):
        _, two = in_pieces(model, tokens(2, 8), [8])
        with refused("holds 2 sequences"):
            held(two, 0).owner  # noqa: B018
            call = dict(cache_params=two, use_cache=True)
            two.layers[0].conv_states[0] = two.layers[0].conv_states[0][:1]
            model(ids[:, :1], **call)


def test_taking_tokens_back_is_refused():
    model, ids = tiny("qwen3_5"), tokens(1, 8)
    with attach(model):
        _, cache = in_pieces(model, ids, [8])
        with pytest.raises(RuntimeError, match="crop"):  # transformers' own
            cache.crop(-2)
        cache.activate_past_recording()
        with refused("records its past for crop"):
            step(model, ids[:, :2], cache, 8)


def test_going_on_behind_right_padding_is_refused():
    model, ids = tiny("mamba2"), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    with attach(model):
        cache = model(ids, attention_mask=mask, use_cache=True).cache_params
        with refused("layer 0: sequence 1 of the batch goes on behind right padding"):
            step(model, ids[:, :1], cache, 8)


# ---- kl -----------------------------------------------------------------------------------------------------------

# Policies whose figures hang on few single roundings: the arithmetic around them differs (norms in fp32 there).
KL_POLICIES = [
    "replay(L=16, state=e4m3:row)",
    "replay(L=16, anchor=fp32, read=int8:row)",
    "replay(L=16, anchor=fp32, read=e4m3:row)",
]


@pytest.mark.parametrize("name", ["mamba2-5m", "gdn-hybrid-8m"])
def test_kl_is_that_of_the_program(data, device, name):
    """Two implementations of all but the states; figures of 512 tokens stand within 5 % of each other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(data / name, dtype=F32).eval().to(device)
    text = data / "sherlock.safetensors"
    theirs = replayssm.kl(data / name, text, KL_POLICIES, max_tokens=512)
    ours = attached.kl(model, text, KL_POLICIES, max_tokens=512)
    for a, b in zip(ours.results, theirs.results):
        assert a.policy == b.policy and a.state == b.state
        assert abs(a.kl.mean / b.kl.mean - 1) <= 0.05, (a.policy, a.kl.mean, b.kl.mean)
        for one, other in zip(a.layers, b.layers):
            assert (one.layer, one.kind, one.overflows) == (other.layer, other.kind, other.overflows)
            assert abs(one.y_rel_l2.propagated / other.y_rel_l2.propagated - 1) <= 0.05
            assert abs(one.state_rel_l2.propagated / other.state_rel_l2.propagated - 1) <= 0.05
    assert shape_of(json.loads(ours.json)) == shape_of(json.loads(theirs.json))  # the same report
    assert ours.to_pandas().columns.equals(theirs.to_pandas().columns)
    assert (ours.model.layers, ours.model.ssm_layers) == (theirs.model.layers, theirs.model.ssm_layers)
    assert ours.precision == "fp32" and ours.device == device


def shape_of(report):
    """Keys of a report, in order, numbers and null alike."""
    if isinstance(report, dict):
        return {key: shape_of(value) for key, value in report.items()}
    return [shape_of(value) for value in report] if isinstance(report, list) else isinstance(report, str)


def test_kl_of_the_reference_is_nothing_and_chunks_do_not_matter():
    ids, model = tokens(2, 30), tiny("kimi_linear", F64)
    control, rounded = attached.kl(model, ids, ["eager(state=exact)", POLICY], chunk_tokens=7).results
    assert control.control and control.kl.max == 0 and control.layers[0].y_rel_l2.propagated == 0
    whole = attached.kl(model, ids, POLICY, chunk_tokens=30).results[0]
    assert rounded.tokens.kl.shape == (2, 30) and rounded.kl.mean > 0
    # Noise of the logits moves KL by about its square root times the noise, twice, for each of them.
    limit = 4 * noise("kimi_linear", ids) * (2 * whole.tokens.kl.max()) ** 0.5
    assert np.abs(rounded.tokens.kl - whole.tokens.kl).max() <= limit


def test_kl_refuses_what_the_program_refuses():
    model, ids = tiny("mamba2"), tokens(1, 8)
    with refused("reads nothing rounded back in 8 tokens"):
        attached.kl(model, ids, "replay(L=16, state=bf16)")
    with refused("no ring of this model holds the field 'beta'"):
        attached.kl(model, ids, "replay(L=4, state=bf16, ring.beta=bf16)")
    with refused(r"token 97 at \[0, 2\] is not in the vocabulary of 97"):
        attached.kl(model, [1, 2, 97], "eager(state=bf16)")
    with pytest.raises(TypeError, match="tokens: expected integers, found float64"):
        attached.kl(model, [1.5, 2.0])
    with refused("chunk_tokens: expected a number of at least 1"):
        attached.kl(model, ids, chunk_tokens=0)
    with refused("max_tokens: expected a number of at least 1"):
        attached.kl(model, ids, max_tokens=0)
