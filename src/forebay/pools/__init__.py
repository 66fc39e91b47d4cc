"""Where workers run: threads, processes, a Ray cluster, all behind the contract in `base.py`."""
