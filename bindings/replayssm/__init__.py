"""What a state format, a replay length and shared or split precision do to a state-space language model.

Formats: Format, Encoded, Draw, format_names, format_of. Policies: Policy, default_policies. Recurrences step by step:
mamba2, gated_delta, kda, Inputs, State, step_in_place. Models and studies: Model, tokenize, read_tokens, inspect,
verify, traffic, kl, layers, whose results (replayssm.results) have to_pandas(); report makes a page of them.

Bad input raises Error, a ValueError of one line that says what was expected and what was found; an array or argument of
a wrong type TypeError. Long work runs without the GIL, shows a bar and hears Ctrl-C.
"""

from replayssm import results
from replayssm._core import Error, __version__
from replayssm.formats import Draw, Encoded, Format, RangeLoss, format_names, format_of
from replayssm.models import Model, inspect, read_tokens, tokenize, traffic, verify
from replayssm.policies import Policy, default_policies
from replayssm.recurrences import Inputs, State, gated_delta, kda, mamba2, step_in_place
from replayssm.reports import report
from replayssm.studies import kl, layers

__all__ = [
    "Draw",
    "Encoded",
    "Error",
    "Format",
    "Inputs",
    "Model",
    "Policy",
    "RangeLoss",
    "State",
    "__version__",
    "default_policies",
    "format_names",
    "format_of",
    "gated_delta",
    "inspect",
    "kda",
    "kl",
    "layers",
    "mamba2",
    "read_tokens",
    "report",
    "results",
    "step_in_place",
    "tokenize",
    "traffic",
    "verify",
]
