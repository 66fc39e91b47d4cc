"""The metadata table: rows from what functions return, columns, files."""
