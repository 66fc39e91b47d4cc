"""What happened in a loader or a run, and why training waits."""
