"""preprocess on a cluster whose nodes share no folder but a bucket, on loopback.

What a bucket's client keeps open it keeps for its process, so the driver is one of its own.
"""

from __future__ import annotations

import pytest
from clusters import start_driver
from driving import WORKS, finish, make_inputs, published

from forebay.outputs.ledger_copy import LEDGER, RUN
from runs import table

pytestmark = pytest.mark.slow

DRIVER = f"""
import os, sys
sys.path.insert(0, {str(WORKS.parent)!r})
import forebay
from works import split

source, bucket = os.environ["INPUTS"], os.environ["BUCKET"]
names = [name for name in os.environ if name.startswith("AWS_")] + ["NO_PROXY"]
nodes = forebay.Ray(runtime_env={{"env_vars": {{name: os.environ[name] for name in names}}}})
local = forebay.preprocess(split, source, "local", num_workers=2, progress=False)
for turn in range(2):
    report = forebay.preprocess(split, source, bucket, backend=nodes, progress=False)
    print(report.done, report.failed, report.resumed, report.metadata.equals(local.metadata))
"""


@pytest.mark.parametrize("source", ["folder", "bucket"])
def test_a_bucket_gets_the_files_and_the_table_of_a_local_run(cluster, bucket, tmp_path, source):
    """From wherever the inputs come; nodes leave nothing else, and a second run does nothing."""
    inputs = str(make_inputs(tmp_path / "in", 30, lines=2))
    if source == "bucket":
        for path in (tmp_path / "in").iterdir():
            bucket.client.upload_file(str(path), bucket.name, f"in/{path.name}")
        inputs = f"s3://{bucket.name}/in"
    settings = {
        "INPUTS": inputs,
        "BUCKET": f"s3://{bucket.name}/out",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    code, out, err = finish(start_driver(cluster, DRIVER, tmp_path, **settings))
    assert code == 0, err
    assert out.splitlines() == ["30 0 0 True", "30 0 30 True"]
    assert len(bucket.outputs()) == 60
    assert bucket.outputs() == published(tmp_path / "local")
    assert bucket.read("out/metadata.parquet") == table(tmp_path / "local")
    own = {name for name in bucket.names() if name.startswith("out/.forebay/")}
    assert own == {f"out/{LEDGER}", f"out/{RUN}"}
