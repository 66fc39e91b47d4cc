"""Who works on inputs, one file each, with `run(task, sources, folder)` -> how many results.

The process is connected to the cluster already, and importing a peer's file imports its library,
so neither is in a call's time.
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
