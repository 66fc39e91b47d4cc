"""What everything stands on: randomness, batches, tables, processes, libraries, files, URLs."""
