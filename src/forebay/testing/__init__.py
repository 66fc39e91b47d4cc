"""Public tools for testing: a conformance suite for pools, faults to inject, leak checks."""
