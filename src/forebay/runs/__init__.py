"""One run on an output folder: its loop, the job of its workers, its report, changed code."""
