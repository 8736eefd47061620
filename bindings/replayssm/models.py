"""Models and what is asked of them without a study: layers, agreement with a framework, bytes, tokens."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Iterable, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from replayssm import _core
from replayssm._tables import typed
from replayssm.policies import Policy, core_policies
from replayssm.results import Inspection, TrafficReport, Verification

PathLike = str | os.PathLike[str]
Precision = Literal["fp64", "fp32"]


class Model:
    """A language model from a Hugging Face folder: config.json and safetensors. Weights stay mapped from their files.

    Opening checks presence and shape of every tensor. What is odd about the folder but not wrong is a warning. The
    functions that take a model take the path of its folder too.

    Raises: replayssm.Error naming the file, the key or the tensor.
    """

    def __init__(self, path: PathLike):
        """Opens the folder `path`. Raises: replayssm.Error naming the file, the key or the tensor."""
        self._core = _core.Model(os.fspath(path))
        for notice in self._core.notices:
            warnings.warn(f"replayssm: {notice}", stacklevel=2)

    @property
    def path(self) -> str:
        """The folder."""
        return self._core.path

    @property
    def type(self) -> str:
        """Its model_type, such as `mamba2` or `qwen3_5`."""
        return self._core.type

    @property
    def vocabulary(self) -> int:
        """Token ids are below that."""
        return self._core.vocabulary

    def __repr__(self) -> str:
        return f"Model({self.path!r})"


def tokenize(model: Model | PathLike, text: str) -> NDArray[np.int32]:
    """The token ids of `text`, [length], by the tokenizer.json in the folder of `model`.

    The text is tokenised whole, without special tokens at its ends; what `--text FILE` of the program does with a
    file. (The shipped ids were made line by line.)

    Raises: replayssm.Error where there is no tokenizer.json or it cannot be read, and for a text without tokens.
    """
    from tokenizers import Tokenizer

    file = Path(model.path if isinstance(model, Model) else model) / "tokenizer.json"
    if not file.is_file():
        raise _core.Error(f"{file}: expected the model's tokenizer, found no such file")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # what the package raises is a plain Exception
        raise _core.Error(f"{file}: cannot be read as a tokenizer: {error}") from None
    ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    if ids.size == 0:
        raise _core.Error("text: expected some tokens, found none")
    return ids


def read_tokens(path: PathLike) -> NDArray[np.int32]:
    """Token ids of the file `path`, [sequences, length]: .safetensors with `input_ids`, .npy, or text of ids.

    Raises: replayssm.Error that names the file and, where there is one, the position and the value.
    """
    return _core.read_tokens(os.fspath(path))


def inspect(model: Model | PathLike) -> Inspection:
    """Layers, kinds, dimensions, state bytes of `model` and the half-lives of its heads.

        half-life = ln 2 / (e^A_log softplus(dt_bias)) tokens, of the slowest column of a head

    that is, when the gate's input is 0: real inputs move it up and down from there. Computed in binary64 from the
    weights; the same figures as `replayssm inspect`.

    Raises: replayssm.Error where the model cannot be opened.
    """
    return typed(Inspection, open_model(model)._core.inspect_json())


def verify(
    model: Model | PathLike, golden: PathLike, *, bound: float = 1e-4, precision: Precision = "fp64", threads: int = 0
) -> Verification:
    """Compares the logits and hidden states of `model` with those that a framework computed.

    `golden` is a safetensors file of `input_ids`, `logits` and perhaps `hidden_i`; it `passed` where no relative L2
    error is above `bound`, at least 0. Everything is computed in `precision`; `threads` 0 is as many as the machine runs
    at once, and results do not depend on it. Without the GIL; Ctrl-C is heard before every layer.

    Raises: replayssm.Error naming the file or tensor; KeyboardInterrupt.
    """
    _one_of("precision", precision, ("fp64", "fp32"))
    return typed(Verification, _core.verify_json(open_model(model)._core, os.fspath(golden), bound, precision, threads))


def traffic(
    model: Model | PathLike | None = None,
    policies: str | Policy | Iterable[str | Policy] | None = None,
    *,
    shapes: str | Iterable[str] = (),
    batches: Iterable[int] = (1, 32, 256),
    bandwidth: float = 4520.0,
    launch: float = 0.0,
    replay_launch: float = 0.0,
    activations: Literal["bf16", "fp16", "fp32"] = "bf16",
    longest: int = 64,
) -> TrafficReport:
    """Bytes that each policy stores and moves, the time that follows from them, and the best replay length.

        step time = sum over layers of batch (state + ring + activation bytes) / bandwidth + launch

    Either `model` or `shapes`, such as "mamba2:heads=128,head_dim=64,state_dim=128,groups=8" or "gdn:...,layers=36".
    `policies`: None for the program's own eight. `batches` sequences of a step; `bandwidth` GB/s (10^9 bytes), an
    H200's where not given; `launch` and `replay_launch` microseconds of a layer's step, and more of a replay's; `activations`
    the type of inputs and outputs; `longest` the largest L that is looked at. Counted from the schedule in binary64;
    the same figures as `replayssm traffic`.

    Raises: replayssm.Error for a shape, policy or value that cannot be used, or where not one of model and shapes is
    given.
    """
    question = _core.TrafficQuestion()
    question.batches, question.bandwidth, question.launch = list(batches), bandwidth, launch
    question.replay_launch, question.activations, question.longest = replay_launch, activations, longest
    texts = [shapes] if isinstance(shapes, str) else list(shapes)
    opened = None if model is None else open_model(model)._core
    return typed(TrafficReport, _core.traffic_json(opened, texts, core_policies(policies), question))


def open_model(model: Model | PathLike) -> Model:
    """A model, opened where it is a path."""
    return model if isinstance(model, Model) else Model(model)


def token_ids(tokens: ArrayLike | PathLike, model: Model) -> tuple[NDArray[np.int32], str]:
    """Ids [sequences, length] within the vocabulary, from an array or a file, and what to call them."""
    name = "array"
    if isinstance(tokens, (str, os.PathLike)):
        name = os.fspath(tokens)
        ids: NDArray[Any] = read_tokens(name)
    else:
        ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, found {ids.dtype}")
    if ids.ndim not in (1, 2) or ids.size == 0:
        raise _core.Error(
            f"tokens: expected the shape [length] or [sequences, length], not empty, found {list(ids.shape)}"
        )
    ids = ids.reshape(-1, ids.shape[-1])
    wrong = np.argwhere((ids < 0) | (ids >= model.vocabulary))
    if wrong.size:
        at = tuple(int(i) for i in wrong[0])
        raise _core.Error(f"{name}: token {ids[at]} at {list(at)} is not in the vocabulary of {model.vocabulary}")
    return np.ascontiguousarray(ids, np.int32), name


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _core.Error(f"{name}: expected {' or '.join(known)}, found {value!r}")
