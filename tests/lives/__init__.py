"""Lives: histories of forebay as users have them, made from a seed and judged by an oracle.

A life is a setup (a value of each axis) and a history of steps. It uses public names and files
alone, so that it survives any redesign; its oracle knows what should come and nothing of how.

    covering   PURE: few setups and histories in which every pair of values, or of steps, occurs
    life       a life, and what a domain is: axes, steps, and how to live one
    drawing    PURE: the lives of a domain, by seed
    host       runs each life in a process of its own: hangs, leaks, stacks
    shrinking  the shortest life that still fails
    left       what a process has open
    planted    faults that are planted in a copy of the source, to prove that lives find them

`loader_*` and `run_*` are the two domains. `python -m lives --help`, in `tests/`, runs them.
"""
