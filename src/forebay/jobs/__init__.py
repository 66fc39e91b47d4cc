"""preprocess's own rooms: what comes in, what goes out, and the ledger that remembers both."""
