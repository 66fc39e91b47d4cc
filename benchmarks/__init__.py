"""Compare forebay with other libraries, in one run on one machine: `python -m benchmarks`."""

import sys
from pathlib import Path

# The server of buckets, `kit.range_server`, is that of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
