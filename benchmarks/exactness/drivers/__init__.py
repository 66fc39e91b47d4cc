"""How each library is used, one file each, of at most 100 lines.

Each has `TITLE`, `NEEDS` (distributions), `DOCS` (where the library says what it promises), `LACKS`
(what there is not in it, by the names of histories, or "resume" for all that begin from a state),
`UNCLAIMED` (what it does not promise, which is measured, but not counted as wrong), and `Loader`
(see `life.Loader`) or, where the library owns the loop, `run(task, record)`. `prepare` writes
files.
"""
