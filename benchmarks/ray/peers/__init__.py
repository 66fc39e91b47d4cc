"""The peers, one file each: `run(task, sources, folder)` returns the number of results.

The process is already connected to the cluster, and importing a peer's file imports its library, so
a call's time includes neither.
"""

# By file.
NAMES = {
    "forebay": "forebay.preprocess(backend='ray')",
    "local": "forebay.preprocess, local processes",
    "tasks": "Ray tasks, one a call",
    "groups": "Ray tasks, 100 inputs a call",
    "data": "ray.data.from_items().map()",
    "blocks": "ray.data, override_num_blocks=8",
}
