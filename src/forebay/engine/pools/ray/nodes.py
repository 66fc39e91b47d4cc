"""Choose the node for the next worker: a pure function of plain records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster when it was last polled.

    Attributes:
        id: Ray's name for it.
        name: Name for messages: its address, and the start of its ID.
        total: The amount of each resource.
        free: The unused part of that.
    """

    id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def fitting(resources: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Return how many workers fit into resources."""
    # With a tolerance, because thirds of a GPU do not add up to exactly one.
    return min(int(resources.get(name, 0.0) / each + 1e-9) for name, each in need.items())


def place(
    wanted: int,
    nodes: Sequence[Node],
    need: Mapping[str, float],
    placed: Mapping[str, int],
    fresh: Mapping[str, int],
) -> list[str]:
    """Choose nodes for new workers, those with the most room first.

    Args:
        wanted: How many workers to place.
        nodes: Those that may be used.
        need: The amount of each resource that one worker needs; not empty, and no amount is 0.
        placed: How many of forebay's workers each node has, by its ID.
        fresh: How many of them were placed after the nodes were polled, so that `free` still
            includes their resources.

    Returns:
        The ID of a node for each worker that there is room for.
    """
    left = {}
    held = {}
    for node in nodes:
        held[node.id] = placed.get(node.id, 0)
        ours = fitting(node.total, need) - held[node.id]
        left[node.id] = min(ours, fitting(node.free, need) - fresh.get(node.id, 0))
    chosen: list[str] = []
    while len(chosen) < wanted:
        open_ones = [each for each in left if left[each] > 0]
        if not open_ones:
            break
        best = min(open_ones, key=lambda each: (held[each], -left[each]))
        left[best] -= 1
        held[best] += 1
        chosen.append(best)
    return chosen


def capacity(nodes: Iterable[Node], need: Mapping[str, float]) -> int:
    """Return how many workers the nodes could hold if nothing else ran on them."""
    return sum(max(fitting(node.total, need), 0) for node in nodes)


def why_waiting(nodes: Sequence[Node], need: Mapping[str, float], wanted: int) -> str:
    """Return a message that says what workers without a node are waiting for."""
    wish = _amounts(need)
    if not any(fitting(node.total, need) for node in nodes):
        hint = "No node has that much: start a larger one, or ask for less."
    else:
        hint = "All of it is in use: the run continues when resources are freed or a node joins."
    lines = [f"  {node.name}: {_free(node, need)}" for node in nodes] or ["  there are no nodes"]
    plural = "s wait" if wanted != 1 else " waits"
    return "\n".join(
        [f"{wanted} worker{plural} for room on the cluster; each needs {wish}", *lines, f"  {hint}"]
    )


def _free(node: Node, need: Mapping[str, float]) -> str:
    return ", ".join(
        f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free"
        for name in need
    )


def _amounts(need: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in need.items())
