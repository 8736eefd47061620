"""What a run's HDF5 file holds, as the page needs it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from replayssm import _core
from replayssm.models import PathLike
from replayssm.policies import Policy

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class RunPolicy:
    """One policy: its text and letter, the group's attributes, KL of every token, errors of its layers."""

    letter: str
    policy: Policy
    figures: dict[str, float]
    kl: Array  # [sequences, length]
    layers: NDArray[np.int64]
    y_local: Array
    y_propagated: Array

    @property
    def mean(self) -> float:
        return self.figures["kl_mean"]

    @property
    def moved(self) -> float:
        return self.figures["bytes_moved_per_token"]


@dataclasses.dataclass(frozen=True)
class RunLayer:
    """One policy in one layer of a layer study. By head and, of states, by sample of the first sequence."""

    layer: int
    policy: int
    length: int
    decay: Array
    half_life: Array
    sigma: Array
    predicted: Array
    measured: Array
    y_local: Array
    state_local: Array

    def law(self, tokens: Array) -> Array:
        """The predicted error after so many tokens, root mean square over heads: sigma sqrt((1 - a^(2 L n)) /
        (1 - a^(2 L))) behind n stores."""
        with np.errstate(divide="ignore", invalid="ignore"):
            a = self.decay[None, :] ** (2 * self.length)
            stores = np.floor(tokens / self.length)[:, None]
            grown = np.where(a < 1, (1 - a**stores) / (1 - a), stores)
        return np.asarray(np.sqrt(np.mean(self.sigma**2 * grown, axis=1)))


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: attributes of /run, its policies, of a layer study its layers, and the text token by token."""

    path: str
    facts: dict[str, Any]
    policies: list[RunPolicy]
    layers: list[RunLayer]
    sample_tokens: Array
    words: list[list[str]]

    @staticmethod
    def read(path: PathLike) -> Run:
        """Reads a file. Raises: replayssm.Error where it is not one that a finished study wrote."""
        name = os.fspath(path)
        try:
            with h5py.File(name) as file:
                if "run" not in file or "policies" not in file:
                    raise _core.Error(
                        f"{name}: expected the groups run and policies, which kl and layers write with "
                        f"--output, found {', '.join(file) or 'nothing'}"
                    )
                return _run(name, file)
        except OSError as error:
            raise _core.Error(f"{name}: cannot be read as HDF5: {error}") from None
        except KeyError as error:
            raise _core.Error(f"{name}: expected what this version of kl or layers writes: {error}") from None


def letter_of(index: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    return (letter_of(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _run(name: str, file: h5py.File) -> Run:
    facts = dict(file["run"].attrs)
    policies = []
    for k in range(len(file["policies"])):
        group = file[f"policies/{k}"]
        policies.append(
            RunPolicy(
                letter_of(k),
                Policy(group.attrs["policy"]),
                {key: float(value) for key, value in group.attrs.items() if key != "policy"},
                group["kl"][()],
                group["layers/index"][()],
                group["layers/y_rel_l2_local"][()],
                group["layers/y_rel_l2_propagated"][()],
            )
        )
        for needed in ("kl_mean", "bytes_moved_per_token"):
            if needed not in policies[-1].figures:
                raise KeyError(f"the attribute {needed} of policies/{k}")
    layers = []
    for layer in sorted(file.get("layers", {})):
        for k in range(len(policies)):
            group = file.get(f"layers/{layer}/policy_{k}")
            if group is None:
                continue
            of = {
                key: group[f"{key}_by_head"][()]
                for key in ("decay", "half_life", "sigma", "predicted", "measured", "y_local")
            }
            layers.append(
                RunLayer(int(layer), k, int(group.attrs["length"]), **of, state_local=group["state_local_by_sample"][0])
            )
    samples = file["run/sample_tokens"][()].astype(float) if "sample_tokens" in file["run"] else np.zeros(0)
    return Run(name, facts, policies, layers, samples, _words(file["run/input_ids"][()], Path(facts["model"])))


def _words(ids: NDArray[np.int64], model: Path) -> list[list[str]]:
    """The text of every token, or its id where the tokenizer is not there or another's."""
    file = model / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(file))
            return [[_text(tokenizer, int(i)) for i in row] for row in ids]
        except Exception:  # what the package raises is a plain Exception; the ids say it too
            pass
    return [[f" {i}" for i in row] for row in ids]


def _text(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False) or f" {token}"
