"""The inputs and outputs of preprocess, predict and cache, and the ledger of both."""
