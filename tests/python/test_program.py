"""The command `replayssm` of the package."""

import json
import os
import signal
import subprocess
import sysconfig
import time

import numpy as np
import pytest

import replayssm

TEXT = "It was the best of times.\nIt was the worst of times, and nobody knew which.\n" * 3


def test_version_is_the_one_of_the_package(run):
    assert run("--version").stdout.startswith(f"replayssm {replayssm.__version__} (")
    assert "--text FILE" in run("--help").stdout


def test_text_is_tokenised_whole_by_the_models_tokenizer(data, run, tmp_path):
    from tokenizers import Tokenizer

    (tmp_path / "a text.txt").write_text(TEXT)
    model = data / "mamba2-5m"
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    np.save(tmp_path / "ids.npy", np.array(ids))
    assert replayssm.tokenize(model, TEXT).tolist() == ids
    options = ["-p", "eager(state=bf16)", "--json", "-"]
    by_text = json.loads(run("kl", model, *options, "--text", "a text.txt", cwd=tmp_path).stdout)
    by_ids = json.loads(run("kl", model, *options, "--tokens", tmp_path / "ids.npy").stdout)
    assert by_text["tokens"] == len(ids)
    assert by_text["results"] == by_ids["results"]
    assert by_text["tokens_file"] == "a text.txt"
    same = json.loads(run("kl", "--text=a text.txt", model, *options, cwd=tmp_path).stdout)
    assert same["results"] == by_ids["results"]
    drafting = ["--draft", data / "gdn-hybrid-8m", "--prompts", "1", "--prompt-tokens", "8", "--new-tokens", "4"]
    spec = run("spec", *drafting, model, "-p", "exact", "--json", "-", "--text", "a text.txt", cwd=tmp_path).stdout
    assert json.loads(spec)["tokens_file"] == "a text.txt"
    report = replayssm.kl(model, text=TEXT, policies="eager(state=bf16)")
    assert [r.kl.mean for r in report.results] == [r["kl"]["mean"] for r in by_ids["results"]]


def test_bad_input_is_one_line_and_two(data, run, tmp_path):
    model, text = data / "mamba2-5m", tmp_path / "t.txt"
    text.write_text("words")
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / "empty").write_text("")
    for words, named in [
        (["kl", model, "--text"], "--text: expected the name of a file"),
        (["kl", model, "--text", tmp_path / "none"], "none: cannot be read as text in UTF-8"),
        (["kl", model, "--text", tmp_path / "latin"], "latin: cannot be read as text in UTF-8"),
        (["kl", model, "--text", tmp_path / "empty"], "expected some tokens"),
        (["kl", model, "--text", text, "--text", text], "expected once"),
        (["kl", model, "--text", text, "--tokens", text], "expected one of them"),
        (["kl", "--text", text], "expected one MODEL"),
        (["kl", tmp_path, "--text", text], "tokenizer.json: expected the model's tokenizer"),
        (["kl", model, "--text", text, "-p", "eager(state=e9)"], "e9"),
        (["frobnicate"], "frobnicate"),
        (["report"], "RUN.h5"),
        (["report", tmp_path / "none.h5", "-o", tmp_path / "r.html"], "none.h5"),
        (["report", text, "-o", tmp_path / "r.html"], "t.txt"),
    ]:
        done = run(*words, check=False)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert named in done.stderr and done.stderr.startswith("replayssm: ") and done.stderr.count("\n") == 1, (
            done.stderr
        )


def test_ctrl_c_ends_the_program_with_130(data):
    program = os.path.join(sysconfig.get_path("scripts"), "replayssm")
    with subprocess.Popen(
        [program, "kl", str(data / "mamba2-5m"), "--text", __file__, "--json", os.devnull],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # Until its Python is replaced by the program, which then notes interrupts.
        while os.path.basename(os.readlink(f"/proc/{process.pid}/exe")) != "replayssm":
            time.sleep(0.02)
        time.sleep(0.3)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 130 and "interrupted" in errors.lower()
        else:
            pytest.fail("the study was done before it could be interrupted")
