"""Studies: policies against the exact state on a model and a text."""

from __future__ import annotations

import os
from typing import Any, Iterable, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replayssm import _core
from replayssm._tables import typed
from replayssm.models import Model, PathLike, Precision, open_model, token_ids, tokenize
from replayssm.policies import Policy, core_policies
from replayssm.results import KlReport, LayersReport

Policies = str | Policy | Iterable[str | Policy] | None
Device = Literal["cpu", "cuda"]


def kl(
    model: Model | PathLike,
    tokens: ArrayLike | PathLike | None = None,
    policies: Policies = None,
    *,
    text: str | None = None,
    max_tokens: int | None = None,
    sequences: int | None = None,
    local: bool = False,
    precision: Precision = "fp64",
    device: Device = "cpu",
    activations: str | None = None,
    seed: int = 0,
    threads: int = 0,
    output: PathLike | None = None,
    progress: bool | None = None,
) -> KlReport:
    """What each policy does to the next-token distributions of `model`.

        KL(p || q) = sum_v p_v (log p_v - log q_v), p of the exact state, q under the policy, full vocabulary, nats

    The reference is the same model in the same precision with a state that is never rounded; every step decodes from a
    zero state. `tokens` are ids [length] or [sequences, length], or a file of them; or give a `text`, which is
    tokenised whole. `max_tokens` of each sequence at most; `sequences`: so many of the array, or one cut into so many.
    `policies`: None for default_policies(). `local`: also the error of each layer when the reference's stream feeds it.
    `device` "cuda" advances the states of policies by the decode kernels, which are fed `activations` ("fp32" where not
    given, "fp16", "bf16"). `seed` is of stochastic rounding, `threads` 0 as many as the machine runs at once. `output`:
    an HDF5 file for every token's figures, as `replayssm kl --output` and report() have it. `progress`: a bar; None for
    one where standard error is a terminal.

    Everything is computed in `precision`, log-softmax and sums in binary64, and the state rounded once where the policy
    says so. The same bits as `replayssm kl`, for any number of threads. Without the GIL; Ctrl-C ends it at the next
    chunk of tokens, and nothing is kept (the program's --resume does that).

    Raises: replayssm.Error naming the file, tensor, policy or value; KeyboardInterrupt.
    """
    opened, ids, name = _input(model, tokens, text, max_tokens, sequences)
    request = _request(name, precision, device, activations, seed, threads, output)
    request.local = local
    with _Bar("kl", progress) as bar:
        request.progress = bar
        report, arrays = _core.kl(opened._core, ids, core_policies(policies), request)
    made: KlReport = _with_tokens(KlReport, report, arrays)
    return made


def layers(
    model: Model | PathLike,
    tokens: ArrayLike | PathLike | None = None,
    policies: Policies = None,
    *,
    text: str | None = None,
    max_tokens: int | None = None,
    sequences: int | None = None,
    attribution: bool = True,
    precision: Precision = "fp64",
    device: Device = "cpu",
    activations: str | None = None,
    seed: int = 0,
    threads: int = 0,
    output: PathLike | None = None,
    progress: bool | None = None,
) -> LayersReport:
    """Where the error comes from: every layer and head, local and propagated, beside bound and growth law.

        local: the layer fed by the reference's stream; propagated: in the policy's own run
        growth: predicted = sigma / sqrt(1 - a^(2 L)), a the decay per token, sigma the error of one store

    `attribution`: also runs each policy on each layer alone. `policies`: None for shared and split at 8 bits. `output`:
    an HDF5 file of curves and figures, as `replayssm layers --output` and report() have it. `model`, `tokens`, `text`,
    `max_tokens`, `sequences`, `precision`, `device`, `activations`, `seed`, `threads` and `progress` as in kl().

    Computed and rounded as in kl(); states are sampled every 128 tokens. The same bits as `replayssm layers`. Without
    the GIL; Ctrl-C ends it at the next chunk of tokens.

    Raises: replayssm.Error naming the file, tensor, policy or value; KeyboardInterrupt.
    """
    opened, ids, name = _input(model, tokens, text, max_tokens, sequences)
    request = _request(name, precision, device, activations, seed, threads, output)
    request.attribution = attribution
    with _Bar("layers", progress) as bar:
        request.progress = bar
        report, arrays, curves = _core.layers(opened._core, ids, core_policies(policies), request)
    made: LayersReport = _with_tokens(LayersReport, report, arrays, curves)
    return made


def _input(
    model: Model | PathLike,
    tokens: ArrayLike | PathLike | None,
    text: str | None,
    max_tokens: int | None,
    sequences: int | None,
) -> tuple[Model, NDArray[np.int32], str]:
    opened = open_model(model)
    if (tokens is None) == (text is None):
        raise _core.Error("expected either tokens or text")
    ids, name = token_ids(tokenize(opened, text) if text is not None else tokens, opened)  # type: ignore[arg-type]
    if text is not None:
        name = "text"
    for what, value in (("max_tokens", max_tokens), ("sequences", sequences)):
        if value is not None and value < 1:
            raise _core.Error(f"{what}: expected a number of at least 1, found {value}")
    return opened, _select(ids, name, max_tokens, sequences), name


def _select(ids: NDArray[np.int32], name: str, max_tokens: int | None, sequences: int | None) -> NDArray[np.int32]:
    """The program's --max-tokens and --sequences: rows of at most max_tokens; a single row is cut into sequences."""
    rows, length = ids.shape
    if sequences is not None and sequences > 1 and rows == 1:
        length //= sequences
        if length == 0:
            raise _core.Error(f"{name}: {ids.shape[1]} tokens are too few for {sequences} sequences")
        length = min(length, max_tokens or length)
        return np.ascontiguousarray(ids[0, : sequences * length].reshape(sequences, length))
    if sequences is not None and sequences > rows:
        raise _core.Error(f"{name}: holds {rows} sequences, {sequences} are asked for")
    return np.ascontiguousarray(ids[:sequences, :max_tokens])


def _request(
    name: str, precision: str, device: str, activations: str | None, seed: int, threads: int, output: PathLike | None
) -> _core.Request:
    request = _core.Request()
    request.tokens_name, request.precision, request.device = name, precision, device
    request.activations, request.seed, request.threads = activations or "", seed, threads
    request.output = "" if output is None else os.fspath(output)
    return request


def _with_tokens(cls: Any, text: str, arrays: list[dict[str, Any]], curves: Any = None) -> Any:
    """The report of that JSON, with the arrays that it lacks."""
    import json

    results = json.loads(text)["results"]
    for i, result in enumerate(results):
        result["tokens"] = arrays[i]
        for layer, more in zip(result["layers"], curves[i] if curves else []):
            layer.update(more)
    return typed(cls, text, results=results)


class _Bar:
    """A tqdm bar that is told how much is done of all."""

    def __init__(self, name: str, wanted: bool | None):
        from tqdm.auto import tqdm

        # None: tqdm shows nothing where standard error is no terminal. A notebook's bar does not ask.
        disable = None if wanted is None else not wanted
        self._bar = tqdm(desc=name, unit="step", disable=disable, leave=False)

    def __call__(self, done: int, all: int) -> None:
        self._bar.total = all
        self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
