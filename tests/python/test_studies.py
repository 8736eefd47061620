"""Python and the command line give identical numbers: the same JSON but for the seconds, and the same HDF5."""

import json
import math

import h5py
import numpy as np
import pandas as pd
import pytest

import replayssm
from replayssm import Error

MODELS = ["mamba2-5m", "gdn-hybrid-8m"]
POLICIES = ["eager(state=bf16)", "replay(L=16, state=e4m3:row)", "replay(L=8, anchor=fp32, read=int8:row:sr)"]
TOKENS = 160


def words(policies=POLICIES):
    return [word for policy in policies for word in ("-p", policy)]


def without_seconds(text):
    report = json.loads(text)
    report.pop("seconds", None)
    return report


def same_file(a, b):
    """Every object, attribute and number of one HDF5 file in another, but for the seconds."""
    names = []
    with h5py.File(a) as one, h5py.File(b) as other:
        one.visit(names.append)
        others = []
        other.visit(others.append)
        assert names == others
        for name in names:
            for key, value in one[name].attrs.items():
                if key != "seconds":
                    np.testing.assert_array_equal(value, other[name].attrs[key], err_msg=f"{name} {key}")
            if isinstance(one[name], h5py.Dataset):
                np.testing.assert_array_equal(one[name][()], other[name][()], err_msg=name)
    return names


@pytest.mark.parametrize("name", MODELS)
def test_kl_is_that_of_the_program(name, data, run, tmp_path):
    model, tokens = data / name, data / "sherlock.safetensors"
    program = run(
        "kl",
        model,
        "--tokens",
        tokens,
        "--max-tokens",
        TOKENS,
        "--sequences",
        2,
        "--seed",
        5,
        "--local",
        "--json",
        "-",
        "--output",
        tmp_path / "program.h5",
        *words(),
    ).stdout
    report = replayssm.kl(
        model, tokens, POLICIES, max_tokens=TOKENS, sequences=2, seed=5, local=True, output=tmp_path / "python.h5"
    )
    assert without_seconds(report.json) == without_seconds(program)
    assert same_file(tmp_path / "program.h5", tmp_path / "python.h5")
    # The typed report says what the JSON says, and its arrays what the file holds.
    for result, expected in zip(report.results, json.loads(program)["results"], strict=True):
        assert (result.policy, result.kl.mean, result.kl.p99) == (
            expected["policy"],
            expected["kl"]["mean"],
            expected["kl"]["p99"],
        )
        assert result.layers[-1].y_rel_l2.local == expected["layers"][-1]["y_rel_l2"]["local"]
        assert result.tokens.kl.shape == (2, TOKENS)
    with h5py.File(tmp_path / "program.h5") as file:
        for i, result in enumerate(report.results):
            np.testing.assert_array_equal(file[f"policies/{i}/kl"][()], result.tokens.kl)
            np.testing.assert_array_equal(file[f"policies/{i}/top1_agrees"][()] == 1, result.tokens.top1_agrees)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_those_of_the_program(name, data, run, tmp_path):
    model, tokens = data / name, data / "sherlock.safetensors"
    program = run(
        "layers",
        model,
        "--tokens",
        tokens,
        "--max-tokens",
        48,
        "--no-attribution",
        "--precision",
        "fp32",
        "--json",
        "-",
        "--output",
        tmp_path / "program.h5",
        *words(POLICIES[1:2]),
    ).stdout
    report = replayssm.layers(
        model, tokens, POLICIES[1], max_tokens=48, attribution=False, precision="fp32", output=tmp_path / "python.h5"
    )
    assert without_seconds(report.json) == without_seconds(program)
    assert "layers/00/policy_0/predicted_by_head" in same_file(tmp_path / "program.h5", tmp_path / "python.h5")
    layer = json.loads(program)["results"][0]["layers"][1]
    typed = report.results[0].layers[1]
    assert typed.y.local.rel_l2 == layer["y"]["local"]["rel_l2"]
    assert math.isnan(typed.read_copy.local.rel_l2) == (layer["read_copy"]["local"]["rel_l2"] is None)
    assert [g.predicted for g in typed.growth] == [g["predicted"] for g in layer["growth"]]
    assert report.results[0].attribution is None
    frame = report.heads_to_pandas()
    assert len(frame) == sum(len(e.growth) for e in report.results[0].layers)


@pytest.mark.parametrize("name", MODELS)
def test_the_other_commands_are_those_of_the_program(name, data, run):
    model = data / name
    assert json.loads(replayssm.inspect(model).json) == json.loads(run("inspect", model, "--json", "-").stdout)
    assert json.loads(replayssm.traffic(model, batches=[1, 7], launch=3.3).json) == json.loads(
        run("traffic", model, "--batch", "1,7", "--launch", "3.3", "--json", "-").stdout
    )


def test_verify_is_that_of_the_program(fixtures, run):
    model, golden = fixtures / "models/mamba2", fixtures / "models/mamba2/golden.safetensors"
    program = run("verify", model, "--golden", golden, "--json", "-").stdout
    result = replayssm.verify(model, golden)
    assert json.loads(result.json) == json.loads(program)
    assert (
        result.passed
        and result.worst <= result.bound
        and len(result.to_pandas()) == len(result.logits) + len(result.layers) + len(result.others)
    )
    assert not replayssm.verify(model, golden, bound=0).passed


def test_traffic_of_shapes_by_hand():
    # A state of 2 x 4 x 8 in bf16: 128 bytes, read and written by every step of the eager policy.
    report = replayssm.traffic(
        shapes="mamba2:heads=2,head_dim=4,state_dim=8,groups=1,layers=3", policies="eager(state=bf16)"
    )
    moved = report.results[0].bytes_per_token_and_layer
    assert (report.ssm_layers, moved.state_read, moved.state_write) == (3, 128, 128)
    assert report.results[0].bytes_stored_per_sequence == 3 * 128
    assert report.to_pandas()["batch"].tolist() == [1, 32, 256]


def test_tables(data):
    report = replayssm.kl(data / MODELS[0], np.arange(40), POLICIES[:2])
    frame = report.to_pandas()
    assert isinstance(frame, pd.DataFrame) and frame["policy"].tolist() == POLICIES[:2]
    assert frame["kl_mean"].tolist() == [r.kl.mean for r in report.results]
    assert frame["state_bytes_moved_per_token"].tolist() == [r.state.bytes_moved_per_token for r in report.results]
    tokens = report.tokens_to_pandas()
    assert len(tokens) == 80 and tokens["token"].tolist() == 2 * list(range(40))
    for policy, group in tokens.groupby("policy"):
        mean = next(r.kl.mean for r in report.results if r.policy == policy)
        assert group["kl"].mean() == pytest.approx(mean, rel=40 * np.finfo(float).eps)  # two orders of one sum
    assert len(report.layers_to_pandas()) == 2 * 8
    assert math.isnan(report.layers_to_pandas()["y_rel_l2_local"][0])  # it was not asked for
    assert report.results[0].tokens.nll[0, -1] != report.results[0].tokens.nll[0, -1]  # no next token


def test_a_control_gives_exactly_zero(data):
    report = replayssm.kl(data / MODELS[0], np.arange(30), "replay(L=4, state=exact, order=sequential)")
    result = report.results[0]
    assert result.control and result.kl.max == 0 and not result.tokens.kl.any() and result.nll_delta == 0


def test_results_outlive_the_model_and_the_report(data):
    kl = replayssm.kl(data / MODELS[0], np.arange(20), POLICIES[0]).results[0].tokens.kl
    _ = [np.full((1, 20), np.nan) for _ in range(100)]
    assert np.isfinite(kl).all() and kl.any()


def test_bad_input_is_one_error_that_names_it(data, tmp_path):
    model = replayssm.Model(data / MODELS[0])
    ids = np.arange(20)
    for arguments, options, message in [
        ((ids, "eager(state=e9)"), {}, "e9"),
        ((ids, "eager(state=bf16, layers=99)"), {}, "99"),
        ((np.array([1, 4096]),), {}, r"token 4096 at \[0, 1\] is not in the vocabulary of 4096"),
        ((np.array([1, -1]),), {}, r"token -1 at \[0, 1\]"),
        ((np.zeros((0,), int),), {}, "not empty"),
        ((np.zeros((1, 1, 1), int),), {}, r"\[1, 1, 1\]"),
        ((tmp_path / "none.npy",), {}, "none.npy"),
        ((ids,), {"precision": "fp16"}, "precision: expected fp64 or fp32"),
        ((ids,), {"device": "tpu"}, "device: expected cpu or cuda"),
        ((ids,), {"activations": "bf16"}, "needs --device cuda"),
        ((ids,), {"max_tokens": 0}, "max_tokens: expected a number of at least 1"),
        ((ids,), {"sequences": 21}, "20 tokens are too few for 21 sequences"),
        ((ids,), {"output": tmp_path / "no" / "run.h5"}, "run.h5"),
        ((ids,), {"text": "both"}, "expected either tokens or text"),
        ((), {}, "expected either tokens or text"),
        ((ids[:4], "replay(L=16, state=bf16)"), {}, "replay"),  # nothing rounded would be read back
    ]:
        with pytest.raises(Error, match=message) as caught:
            replayssm.kl(model, *arguments, **options)
        assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="tokens: expected integers, found float64"):
        replayssm.kl(model, [0.5])
    with pytest.raises(Error, match="config.json"):
        replayssm.kl(tmp_path, ids)
    with pytest.raises(Error, match="expected either a model or shapes"):
        replayssm.traffic()
    with pytest.raises(Error, match="bandwidth: expected a number in"):
        replayssm.traffic(model, bandwidth=float("nan"))
    assert not list(tmp_path.iterdir())


def test_a_failed_study_leaves_the_earlier_file_alone(data, tmp_path):
    file = tmp_path / "run.h5"
    file.write_text("of an earlier run")
    with pytest.raises(Error):
        replayssm.kl(data / MODELS[0], [1, 5000], output=file)
    assert file.read_text() == "of an earlier run" and list(tmp_path.iterdir()) == [file]
