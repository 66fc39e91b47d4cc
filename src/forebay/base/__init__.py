"""What everything stands on: randomness, trees, batches, processes, libraries, remote files."""
