"""Long work runs without the GIL, says how far it is, and hears Ctrl-C."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import replayssm


@pytest.fixture(autouse=True)
def listening():
    """Python hears Ctrl-C, even where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def for_a_minute():
    """Loops that only an interrupt ends, but not for ever."""
    start = time.monotonic()
    while time.monotonic() - start < 60:
        yield


def interrupting(seconds):
    """Ctrl-C, once, after some seconds."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.parametrize("study", [replayssm.kl, replayssm.layers])
def test_ctrl_c_ends_a_study_and_leaves_no_file(study, data, tmp_path):
    timer = interrupting(0.3)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        study(data / "mamba2-5m", data / "sherlock.safetensors", output=tmp_path / "run.h5")  # takes minutes
    timer.join()
    assert time.monotonic() - start < 60
    assert not list(tmp_path.iterdir())


def ones(tokens):
    """Inputs that add 1 to a state of one element."""
    one = np.ones((tokens, 1, 1))
    return replayssm.Inputs.from_records("mamba2", one, one, one, np.zeros((tokens, 1)), one[..., 0])


def test_ctrl_c_leaves_a_state_as_it_was():
    inputs = ones(100_000)
    state = replayssm.State(inputs, "replay(L=64, anchor=fp32, read=bf16)")
    timer = interrupting(0.1)
    with pytest.raises(KeyboardInterrupt):
        for _ in for_a_minute():
            state.advance(inputs)
    timer.join()
    assert state.tokens % inputs.tokens == 0  # whole calls alone
    assert state.effective().item() == state.tokens
    memory = np.full((1, 1, 1), 7.0)
    timer = interrupting(0.1)
    with pytest.raises(KeyboardInterrupt):
        for _ in for_a_minute():
            replayssm.step_in_place(memory, inputs)
    timer.join()
    assert (memory.item() - 7) % inputs.tokens == 0


def test_other_threads_run_meanwhile(data):
    ticks, done = 0, threading.Event()

    def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    replayssm.kl(data / "mamba2-5m", np.arange(400), threads=1)
    seconds = time.monotonic() - start
    done.set()
    thread.join()
    assert ticks > 10 * seconds  # with the GIL held there would be one or two


def test_progress_is_told_in_order_and_its_errors_come_out(data, monkeypatch):
    seen = []

    class Bar:
        def __init__(self, *args, **options):
            self.n, self.total = 0, None

        def update(self, n):
            self.n += n
            seen.append((self.n, self.total))
            if stop and len(seen) > 2:
                raise RuntimeError("the bar broke")

        def close(self):
            pass

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    stop = False
    replayssm.kl(data / "mamba2-5m", np.arange(60), "eager(state=bf16)")
    done = [n for n, _ in seen]
    assert done == sorted(done) and seen[-1][0] == seen[-1][1] > 0
    seen.clear()
    stop = True
    with pytest.raises(RuntimeError, match="the bar broke"):
        replayssm.kl(data / "mamba2-5m", np.arange(60), "eager(state=bf16)")


def test_a_state_is_advanced_by_one_thread_at_a_time():
    inputs = ones(20_000)
    state = replayssm.State(inputs)
    threads = [threading.Thread(target=state.advance, args=(inputs,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state.effective().item() == 4 * 20_000 == state.tokens
