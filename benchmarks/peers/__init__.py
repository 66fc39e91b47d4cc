"""The peers, one file each, with `NAME` and `run(task, sources, folder)` -> results that came back.

Importing a peer's file imports its library, so a call's time never has the import in it. Each is
tuned as its documentation advises for many small inputs, and all have two workers.
"""

WORKERS = 2
