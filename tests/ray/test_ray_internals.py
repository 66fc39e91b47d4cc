"""The parts of Ray that forebay uses and Ray does not promise: a sentence for each that changes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from ray._private import auto_init_hook, node, state, worker
from ray.actor import ActorMethod

import ray
from forebay.pools import ray_internals

pytestmark = pytest.mark.usefixtures("no_cluster")


def test_ray_holds_one_lock_while_it_connects_and_shuts_down():
    """`ray.init` and `ray.shutdown` take `_connect_or_shutdown_lock`, which can be replaced."""
    lock = getattr(worker, "_connect_or_shutdown_lock", None)
    assert lock is not None, "Ray has no _connect_or_shutdown_lock any more; see shutdown_guard.py"
    for function in (worker.connect, worker.disconnect, worker.shutdown, worker.init):
        if "_connect_or_shutdown_lock" in inspect.getsource(function):
            return
    source = inspect.getsource(worker)
    assert "_connect_or_shutdown_lock" in source.replace("_connect_or_shutdown_lock =", ""), (
        "Ray does not take _connect_or_shutdown_lock any more; see shutdown_guard.py"
    )


def test_ray_can_be_kept_from_connecting_by_itself():
    """While that is off, a call without a cluster raises instead of starting one."""
    assert isinstance(getattr(auto_init_hook, "enable_auto_connect", None), bool), (
        "Ray's switch enable_auto_connect is not a bool any more; see ray_internals.py"
    )
    was = ray_internals.set_auto_connect(False)
    try:
        with pytest.raises(Exception, match=r"ray\.init|not been started|must be"):
            ray.put(1)
        assert not ray.is_initialized(), "Ray connects by itself though it was told not to"
    finally:
        assert ray_internals.set_auto_connect(was) is False


def test_ray_tells_what_is_free_on_each_node():
    """By the node's ID."""
    assert callable(getattr(state, "available_resources_per_node", None)), (
        "Ray's state has no available_resources_per_node any more; see ray_internals.py"
    )


def test_ray_holds_up_a_call_whose_results_are_not_fetched():
    """A method of an actor takes the option."""
    (name,) = ray_internals.stream_options(2)
    assert name in inspect.signature(ActorMethod.__init__).parameters or name in (
        inspect.getsource(ActorMethod)
    ), f"Ray does not know the option {name} any more; see ray_internals.py"


@pytest.mark.parametrize("name", ray_internals.TRAIN)
def test_ray_train_asks_for_the_sampler_and_puts_a_wrapper_around_a_loader(name):
    """It is read, not imported, which needs packages that Ray itself does not."""
    path = Path(ray.__file__).parents[1] / f"{name.replace('.', '/')}.py"
    source = path.read_text(encoding="utf-8")
    for part in (
        "def prepare_data_loader(",
        "add_dist_sampler: bool = True",
        "isinstance(data_loader.sampler, DistributedSampler)",
        "data_loader = _WrappedDataLoader(data_loader, device, auto_transfer)",
    ):
        assert part in source, f"Ray Train has no {part!r} any more; see loading/ray_train.py"


def test_ray_tells_where_the_raylet_of_this_machine_listens():
    """A connection there fails at once when it has ended, which calls of Ray do not."""
    assert isinstance(getattr(node.Node, "raylet_socket_name", None), property), (
        "Ray's Node has no raylet_socket_name any more; see ray_internals.py"
    )
    assert hasattr(worker, "_global_node"), "Ray's worker has no _global_node any more"
    assert not ray_internals.is_raylet_gone()
