"""A thread that polls the nodes of the cluster and checks new ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay.engine.pools.ray import cluster
from forebay.engine.pools.ray.node_checks import NodeCheck, check_nodes
from forebay.engine.pools.ray.nodes import Node, fitting
from forebay.errors import ForebayError
from forebay.options import Ray, worker_resources

# How often the cluster is polled for new nodes and free resources.
PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The nodes of the cluster now.

    Attributes:
        nodes: The nodes that may be used, and those that are too small.
        refused: Why new nodes may not be used, by their IDs.
    """

    nodes: list[Node]
    refused: dict[str, ForebayError]


@dataclass(frozen=True, slots=True)
class ClusterLost:
    """The cluster does not answer, or this process disconnected from it."""

    why: str


class ClusterMonitor:
    """Polls the cluster every PERIOD_S, in a separate thread, because it may answer slowly.

    Args:
        where: What a worker needs; smaller nodes are not checked.
        check: What is checked on a node, once, before it is used.
        report: Called in the monitor's thread with each `ClusterState`, and at the end with a
            `ClusterLost`.

    Attributes:
        nodes: The nodes at the start.

    Raises:
        ForebayError: One of the first nodes does not pass its check.
    """

    def __init__(
        self, where: Ray, check: NodeCheck, report: Callable[[ClusterState | ClusterLost], None]
    ) -> None:
        """Poll once, and check every node."""
        self._need = worker_resources(where)
        self._environment: dict[str, Any] = environment_of(where)
        self._check = check
        self._report = report
        self._good: set[str] = set()
        self._bad: set[str] = set()
        self._over = threading.Event()
        self._session = cluster.session()
        self.nodes = cluster.nodes()
        for error in self._check_new(self.nodes).values():
            raise error
        self._thread = threading.Thread(target=self._run, name="forebay-monitor", daemon=True)
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            try:
                nodes = cluster.nodes()
                if cluster.session() != self._session:
                    raise ConnectionError("Ray was shut down, and connected again")
                refused = self._check_new(nodes)
            except Exception as error:  # noqa: BLE001 - whatever Ray raises when the cluster is gone
                if not self._over.is_set():
                    self._report(
                        ClusterLost(f"the Ray cluster is gone: {cluster.first_line(error)}")
                    )
                return
            self._report(
                ClusterState([node for node in nodes if node.id not in self._bad], refused)
            )

    def _check_new(self, nodes: list[Node]) -> dict[str, ForebayError]:
        """Check the nodes that are large enough and new."""
        known = self._good | self._bad
        new = [node for node in nodes if node.id not in known and fitting(node.total, self._need)]
        if not new:
            return {}
        refused = check_nodes(new, self._check, self._environment, self._over)
        self._bad.update(refused)
        self._good.update(node.id for node in new if node.id not in refused)
        return refused


def environment_of(where: Ray) -> dict[str, Any]:
    """Return the option of Ray's that sets the runtime environment, if one is asked for."""
    return {} if where.runtime_env is None else {"runtime_env": dict(where.runtime_env)}
