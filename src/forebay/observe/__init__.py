"""Progress, summaries and statistics of a run."""
