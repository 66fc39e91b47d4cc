"""Workers on the nodes of a Ray cluster; see `pool.py`. Nothing else in forebay knows Ray."""
