"""The peers, one file each: `run(task, sources, folder)` returns the number of results.

Importing a peer's file imports its library, so a call's time never includes the import. Each is
tuned as its documentation advises for many small inputs, and all have two workers.
"""

WORKERS = 2

# By file.
NAMES = {
    "loop": "plain loop, one process",
    "halves": "two bare processes, half each",
    "pool": "multiprocessing.Pool.imap_unordered, chunksize 32",
    "executor": "concurrent.futures.ProcessPoolExecutor.map",
    "joblib": "joblib.Parallel",
    "dataloader": "torch DataLoader(batch_size=None)",
    "datasets": "datasets.map(num_proc=2)",
    "litdata": "litdata.map",
    "forebay": "forebay.preprocess",
}
