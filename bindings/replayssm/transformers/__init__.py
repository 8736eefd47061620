"""Models of transformers whose recurrent state is kept under a policy: generate, perplexity and lm-eval under it.

attach() replaces the recurrence of a model while a `with` block runs; kl() is replayssm.kl() for a model that torch
computes. Needs torch and transformers (5.17), which the package does not install. docs/transformers.md names the
families that are covered, and what is refused.
"""

from replayssm.transformers.attachment import Attachment, attach
from replayssm.transformers.divergence import kl

__all__ = ["Attachment", "attach", "kl"]
