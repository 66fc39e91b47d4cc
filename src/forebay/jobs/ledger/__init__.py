"""The ledger: what is known of each input, in one SQLite file with one writer."""
