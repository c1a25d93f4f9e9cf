"""Run every benchmark: `python -m benchmarks`, or `make bench`."""

import sys

from benchmarks import trace_cost

sys.exit(trace_cost.main())
