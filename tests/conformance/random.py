"""Random programs, whose invariants are checked."""

from tests import random_programs
from tests.conformance.lots import Lots

LOTS = Lots("random", 10, random_programs.programs, random_programs.check)
all_jobs, run = LOTS.all_jobs, LOTS.run
