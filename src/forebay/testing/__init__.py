"""Public tools for testing what runs on forebay, and what forebay runs on.

- `forebay.testing.conformance.PoolTests`: what every pool promises, as inheritable tests.
- `forebay.testing.faults`: tasks that die, hang or raise on demand, and gates to hold them.
- `forebay.testing.leaks.no_leaks`: nothing is left behind by a block of code.
"""
