"""Run a function on a Ray cluster of one node, with what is installed."""

import os

os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"

import forebay
import ray


def size(row):
    """Return a row of the table."""
    return {"size": len(row["text"])}


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    rows = [{"text": "a" * number} for number in range(20)]
    report = forebay.preprocess(size, rows, "on-ray", backend="ray", num_workers=1, progress=False)
    print(report)
    assert (report.done, report.failed) == (20, 0)
    ray.shutdown()
