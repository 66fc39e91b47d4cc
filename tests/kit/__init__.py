"""What tests of several rooms share.

- `kit.conformance.PoolTests`: the contract of a pool, as inheritable tests.
- `kit.fake_device.FakeDevice`: a device that copies late, to test `device=` with.
- `kit.faults`: tasks that die, hang or raise on demand, and gates to hold them.
- `kit.leaks.no_leaks`: nothing is left behind by a block of code.
- `kit.range_server.RangeServer`: a server of buckets with scripted latency, rates and faults.
"""
