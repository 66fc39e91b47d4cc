"""The watch over a cluster: which nodes there are, and which of them may be used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.engine.pools.ray import cluster
from forebay.engine.pools.ray.node_checks import NodeCheck, check_nodes
from forebay.engine.pools.ray.nodes import Node, room
from forebay.errors import ForebayError
from forebay.options import Ray

# How often the cluster is looked at, for nodes that joined and for room.
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the cluster found.

    Attributes:
        nodes: The nodes that may be used, and those that are too small.
        refused: What is wrong with those that joined and may not, by their ids.
    """

    nodes: list[Node]
    refused: dict[str, ForebayError]


@dataclass(frozen=True, slots=True)
class Gone:
    """The cluster does not answer, or this process left it."""

    why: str


class Watch:
    """Looks at the cluster now and then, in a thread of its own: it may be slow to answer.

    Args:
        where: What a worker needs; smaller nodes need not prove anything.
        check: What a node must prove before it is used, once.
        tell: Called in the watch's thread with each `Look`, and at the end with a `Gone`.

    Attributes:
        nodes: All, as the first look found them.

    Raises:
        ForebayError: Of the nodes that are there from the start, one cannot prove itself.
    """

    def __init__(self, where: Ray, check: NodeCheck, tell: Callable[[Look | Gone], None]) -> None:
        """Look once; have every node prove itself."""
        self._need = where.need()
        self._environment: dict[str, Any] = environment_of(where)
        self._check = check
        self._tell = tell
        self._proven: set[str] = set()
        self._bad: set[str] = set()
        self._over = threading.Event()
        self._session = cluster.session()
        self.nodes = cluster.nodes()
        for error in self._check_new(self.nodes).values():
            raise error
        self._thread = threading.Thread(target=self._look_on, name="forebay-watch", daemon=True)
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join(patience_s)

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                nodes = cluster.nodes()
                if cluster.session() != self._session:
                    raise ConnectionError("Ray was shut down, and connected to anew")
                refused = self._check_new(nodes)
            except Exception as error:  # noqa: BLE001 - whatever Ray raises when it is gone
                if not self._over.is_set():
                    self._tell(Gone(f"the Ray cluster is gone: {cluster.first_line(error)}"))
                return
            self._tell(Look([node for node in nodes if node.id not in self._bad], refused))

    def _check_new(self, nodes: list[Node]) -> dict[str, ForebayError]:
        """Have those nodes prove themselves that are large enough and new."""
        known = self._proven | self._bad
        new = [node for node in nodes if node.id not in known and room(node.total, self._need)]
        if not new:
            return {}
        refused = check_nodes(new, self._check, self._environment)
        self._bad.update(refused)
        self._proven.update(node.id for node in new if node.id not in refused)
        return refused


def environment_of(where: Ray) -> dict[str, Any]:
    """Return the option of Ray's that sets the runtime environment, if one is asked for."""
    return {} if where.runtime_env is None else {"runtime_env": dict(where.runtime_env)}
