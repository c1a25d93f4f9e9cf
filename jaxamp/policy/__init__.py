"""Policies: which kind of operation runs in which precision, and how a user says so."""

from jaxamp.policy import presets as presets
from jaxamp.policy.policy import PrecisionPolicy as PrecisionPolicy
