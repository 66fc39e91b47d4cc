"""Table formats: the types of columns, and how CSV, JSONL and Parquet are read and written."""
