"""Run every benchmark of `amp`'s own cost: `python -m benchmarks`, or `make bench`."""

import sys

from benchmarks import overhead, trace_cost

sys.exit(trace_cost.main() or overhead.main())
