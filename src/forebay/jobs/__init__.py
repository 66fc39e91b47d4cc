"""What preprocess, predict and cache do with inputs and outputs, and the ledger of both."""
