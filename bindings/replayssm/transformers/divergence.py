"""kl() for a model that torch computes."""

from __future__ import annotations

import inspect
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from replayssm import _core
from replayssm.models import PathLike, token_ids
from replayssm.policies import Policy, core_policies, default_policies
from replayssm.results import KlReport
from replayssm.studies import Bar, Policies, select_tokens, with_tokens
from replayssm.transformers.attachment import Attachment, attach


def kl(
    model: Any,
    tokens: ArrayLike | PathLike,
    policies: Policies = None,
    *,
    max_tokens: int | None = None,
    sequences: int | None = None,
    seed: int = 0,
    precision: str | None = None,
    threads: int = 0,
    chunk_tokens: int = 256,
    progress: bool | None = None,
) -> KlReport:
    """What each policy does to the next-token distributions of `model`, as replayssm.kl() says it of a folder.

        KL(p || q) = sum_v p_v (log p_v - log q_v), p of the exact state, q under the policy, full vocabulary, nats

    `model` as attach() takes it; the reference is the same model under attach(model, "exact"), so that projections,
    convolutions and norms are those of torch in the model's own dtype, on its device, and differ in nothing else.
    `tokens` are ids [length] or [sequences, length], or a file of them; `max_tokens` of each sequence at most;
    `sequences`: so many of the array, or one cut into so many. `policies`: None for default_policies(). `seed`,
    `precision` and `threads` as in attach(). Reference and policies go over `chunk_tokens` tokens at a time, each from
    its own cache: logits [chunk_tokens, vocabulary] exist of one policy and the reference at once. `progress`: a bar;
    None for one where standard error is a terminal.

    Log-softmax and sums are computed in binary64. In the report `model.path` is the model's name, `model.sha256` empty
    (what lies in memory is no file), `precision` the dtype of the logits, and the errors of y and state are propagated
    ones, those of the run. Ctrl-C ends it, and nothing is kept.

    Raises: replayssm.Error naming the policy, token or value, and as attach() says; KeyboardInterrupt.
    """
    config: Any = model.config.get_text_config()
    ids, name = token_ids(tokens, config.vocab_size)
    ids = select_tokens(ids, name, max_tokens, sequences)
    if chunk_tokens < 1:
        raise _core.Error(f"chunk_tokens: expected a number of at least 1, found {chunk_tokens}")
    chosen = [
        Policy(p) for p in ([policies] if isinstance(policies, (str, Policy)) else policies or default_policies())
    ]
    runs = [_Run(attach(model, p, seed=seed, precision=precision, threads=threads)) for p in ["exact", *chosen]]
    threads = threads or torch.get_num_threads()
    start, study = time.monotonic(), None
    with torch.no_grad(), Bar("kl", progress) as shown:
        for sequence, row in enumerate(ids):
            for run in runs:
                run.begin(sequence)
            for first in range(0, len(row), chunk_tokens):
                chunk = row[first : first + chunk_tokens]
                for k, run in enumerate(runs):
                    logits = run.advance(chunk)
                    if study is None:  # shapes are known once the layers ran
                        study = _core.Comparison(runs[0].layers(config), core_policies(chosen), ids)
                    if k == 0:
                        reference = logits
                    else:
                        study.compare(k - 1, sequence, first, reference, logits, threads)
                        run.add_errors(runs[0])
                    done = sequence * len(row) + first + len(chunk) * (k + 1) / len(runs)
                    shown(int(done), ids.size)
            for run in runs[1:]:
                run.end(runs[0])
    assert study is not None  # ids are not empty
    for k, run in enumerate(runs[1:]):
        for layer, error in run.errors.items():
            study.layer(k, layer, error.y.relative(), error.state.relative(), error.events)
    report, arrays = study.report(
        getattr(model, "name_or_path", "") or type(model).__name__,
        getattr(config, "model_type", ""),
        name,
        next(model.parameters()).device.type,
        runs[0].precision,
        seed,
        threads,
        time.monotonic() - start,
    )
    made: KlReport = with_tokens(KlReport, report, arrays)
    return made


_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Relative:
    """A relative L2 error that is summed up in binary64."""

    def __init__(self) -> None:
        self.difference = self.reference = 0.0

    def add(self, values: torch.Tensor, reference: torch.Tensor) -> None:
        values, reference = values.double(), reference.double()
        self.difference += float((values - reference).square().sum())
        self.reference += float(reference.square().sum())

    def relative(self) -> float:
        with np.errstate(divide="ignore"):
            return 0.0 if self.difference == 0 else float(np.sqrt(np.float64(self.difference) / self.reference))


class _LayerErrors:
    def __init__(self) -> None:
        self.y, self.state, self.events = _Relative(), _Relative(), _core.RangeEvents()


class _Run:
    """The model under one policy, over one sequence after the other."""

    def __init__(self, attachment: Attachment):
        self._attached = attachment
        self._model = attachment.model
        attachment.observe = self._observe
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._positions = "position_ids" in parameters  # some families count them anew in each call where not told
        self.errors = {layer: _LayerErrors() for layer in attachment.covered}
        self.precision = ""

    def begin(self, sequence: int) -> None:
        self._cache: Any = None
        self._tokens = 0
        self._attached.first_slot = sequence

    def advance(self, tokens: NDArray[np.int32]) -> NDArray[Any]:
        """Logits [tokens, vocabulary] of the next tokens, as float32 or float64."""
        self._y: dict[int, torch.Tensor] = {}
        device = next(self._model.parameters()).device
        given: dict[str, Any] = {"input_ids": torch.from_numpy(tokens.astype(np.int64))[None].to(device)}
        if self._positions:
            given["position_ids"] = torch.arange(self._tokens, self._tokens + len(tokens), device=device)[None]
        with self._attached:
            out = self._model(**given, use_cache=True, **{self._cache_name: self._cache})
        self._cache = out[self._cache_name]
        self._tokens += len(tokens)
        self.precision = _PRECISIONS.get(out.logits.dtype, str(out.logits.dtype))
        wide = torch.float64 if out.logits.dtype == torch.float64 else torch.float32
        logits: NDArray[Any] = out.logits[0].to("cpu", wide).contiguous().numpy()
        return logits

    def _observe(self, layer: int, y: torch.Tensor) -> None:
        self._y[layer] = y

    def add_errors(self, reference: _Run) -> None:
        """Adds the errors of y in the tokens that were advanced last."""
        for layer, y in self._y.items():
            self.errors[layer].y.add(y, reference._y[layer])

    def end(self, reference: _Run) -> None:
        """Adds the errors of the states behind a sequence."""
        for layer, errors in self.errors.items():
            held = self._held(layer)
            errors.state.add(held.effective(), reference._held(layer).effective())
            errors.events.merge(held.states.events())

    def layers(self, config: Any) -> list[tuple[str, Any]]:
        """Kind and shape of every layer of the model."""
        layers = self._attached.layers()
        for layer in self._attached.covered:
            shape = self._held(layer).states.shape
            layers[layer] = (shape.recurrence, shape.core())
        return layers

    def _held(self, layer: int) -> Any:
        return self._cache.layers[layer].recurrent_states[0]
