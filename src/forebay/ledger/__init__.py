"""The ledger: the state of each input, in one SQLite file with one writer."""
