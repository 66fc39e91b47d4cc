"""Compare forebay with other libraries, in one run on one machine: `python -m benchmarks`."""
