"""Drive loaders of several libraries through the same histories, and check what came.

    driver ─> life: one run of a training program ─> record ─> checker ─> cell ─> table

A driver says how a library is used (drivers/), a history what happens to the program
(histories.py). Each life of a program is a process of its own, or one for each rank, which notes
every batch in a file. The checker compares what the files have; it knows nothing of loaders.
"""
