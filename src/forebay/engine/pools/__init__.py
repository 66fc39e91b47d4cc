"""Where workers run: one file per kind of worker, all behind the contract in `base.py`."""
