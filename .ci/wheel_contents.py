"""Check what a wheel contains, and write the README's program to a file.

.ci/wheel_contents.py WHEEL README PROGRAM
"""

import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

# A wheel is read by people who look for what they install.
MOST_BYTES = 1_500_000


def main(wheel: str, readme: str, program: str) -> None:
    """Stop with a message at the first thing that is wrong."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = (each for each in names if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    folders = sorted({each.partition("/")[0] for each in names})
    assert folders == sorted(["forebay", name.partition("/")[0]]), folders
    assert {"forebay/py.typed", "forebay/__init__.pyi", "forebay/show/page.html"} <= {*names}
    assert Path(wheel).stat().st_size < MOST_BYTES, f"more than {MOST_BYTES:,} bytes"
    assert {"audio", "bucket", "frameworks", "ray"} == {*metadata.get_all("Provides-Extra")}
    links = re.findall(r"\]\(([^)#][^)]*)\)", metadata.get_payload())
    assert links and all(each.startswith("https://") for each in links), links
    print(f"wheel: {len(names)} files; {', '.join(metadata.get_all('Project-URL'))}")
    blocks = re.findall(r"^```python\n(.*?)^```", Path(readme).read_text(), re.M | re.S)
    Path(program).write_text("\n".join(blocks))


main(*sys.argv[1:])
