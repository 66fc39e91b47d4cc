"""Workers on the nodes of a Ray cluster; see `pool.py`. No other part of forebay uses Ray."""
