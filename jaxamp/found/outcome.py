"""Regions of a program, found and refused, as plain data of the core."""

from jaxamp.core.features import Outcome as Outcome
from jaxamp.core.features import Refused as Refused
