"""Random programs with large offsets, which lose no more than rounding the products costs."""

from tests.conformance.lots import Lots
from tests.fields import random

LOTS = Lots("offsets", 20, random.programs, random.check)
all_jobs, run = LOTS.all_jobs, LOTS.run
