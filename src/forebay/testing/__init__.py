"""Public tools for testing code that uses forebay, and pools that forebay runs on.

- `forebay.testing.conformance.PoolTests`: the contract of a pool, as inheritable tests.
- `forebay.testing.fake_device.FakeDevice`: a device that copies late, to test `device=` with.
- `forebay.testing.faults`: tasks that die, hang or raise on demand, and gates to hold them.
- `forebay.testing.leaks.no_leaks`: nothing is left behind by a block of code.
"""
