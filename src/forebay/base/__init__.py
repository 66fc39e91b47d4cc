"""What everything stands on: randomness, trees, batches, processes, libraries, files and URLs."""
