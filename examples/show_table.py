"""Show where a run put its files, and the first rows of its table.

python examples/show_table.py build/demo/
"""

import sys
from pathlib import Path

from pyarrow import parquet


def show(output, rows=8):
    """Print the folder, the path of the table, and its first rows."""
    path = Path(output, "metadata.parquet")
    table = parquet.read_table(path)
    pieces = sorted({Path(output, name).suffix for name in table["destination"].to_pylist()})
    print(f"pieces  {output}  ({table.num_rows} {' and '.join(pieces)} files)")
    print(f"table   {path}  ({table.num_rows} rows)")
    print()
    head = [table.column_names, *(row.values() for row in table.slice(0, rows).to_pylist())]
    cells = [[str(value) for value in row] for row in head]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    if table.num_rows > rows:
        print(f"… and {table.num_rows - rows} more rows")


if __name__ == "__main__":
    show(sys.argv[1])
