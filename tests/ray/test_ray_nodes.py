"""Which node gets a worker, what is said where none can, and Ray's options: no cluster needed."""

from __future__ import annotations

import pytest

from forebay.errors import OptionError
from forebay.options import PreprocessOptions, Ray, cluster_of, worker_resources
from forebay.pools.ray_cluster import Node, capacity, fitting, place, why_waiting

ONE = {"CPU": 1.0}


def node(name, cpus, free=None, **others):
    total = {"CPU": float(cpus), **others}
    left = total if free is None else {**total, "CPU": float(free)}
    return Node(name, f"10.0.0.{name} ({name})", total, left)


def placed(wanted, nodes, need=ONE, held=None, fresh=None):
    return place(wanted, nodes, need, held or {}, fresh or {})


# ---- places -------------------------------------------------------------------------------------


def test_the_emptiest_node_comes_first():
    """Workers are spread, the larger of two empty nodes first."""
    assert placed(4, [node("a", 2), node("b", 3)]) == ["b", "a", "b", "a"]


def test_no_more_are_placed_than_there_is_room_for():
    """The others wait."""
    assert sorted(placed(9, [node("a", 1), node("b", 2), node("c", 0)])) == ["a", "b", "b"]


def test_nothing_is_placed_without_nodes_or_wishes():
    """No room, no places."""
    assert placed(3, []) == []
    assert placed(0, [node("a", 4)]) == []


def test_what_others_use_is_theirs():
    """Only what is free counts, whatever a node has."""
    assert placed(4, [node("a", 4, free=1)]) == ["a"]


def test_workers_placed_since_the_last_look_take_room():
    """The look does not know them yet; neither is more placed than the node has in all."""
    nodes = [node("a", 4)]
    assert placed(4, nodes, held={"a": 3}, fresh={"a": 3}) == ["a"]
    assert placed(4, nodes, held={"a": 4}) == []


def test_the_node_with_fewest_of_ours_comes_first():
    """Also where it has less room."""
    assert placed(1, [node("a", 8), node("b", 2)], held={"a": 1}) == ["b"]


def test_thirds_of_a_gpu_make_three():
    """Fractions that do not add up to one exactly still fit."""
    need = {"CPU": 1.0, "GPU": 1 / 3}
    assert placed(5, [node("a", 8, GPU=1.0)], need) == ["a"] * 3
    assert fitting({"GPU": 0.3 + 0.3 + 0.3}, {"GPU": 0.3}) == 3


def test_every_resource_has_to_be_there():
    """A node that lacks one of them gets nothing."""
    assert placed(2, [node("a", 8), node("b", 8, disk=1.0)], {"CPU": 1.0, "disk": 1.0}) == ["b"]


def test_capacity_counts_what_nodes_have_and_not_what_is_free():
    """It is how many workers there will be when others let go."""
    assert capacity([node("a", 4, free=0), node("b", 1), node("c", 0)], ONE) == 5


# ---- what is said -------------------------------------------------------------------------------


def test_it_says_who_waits_for_what_and_where_it_went():
    """How many, what each needs, and what each node has free."""
    text = why_waiting([node("a", 4, free=0), node("b", 2, free=0.5)], ONE, 3)
    first, *nodes, hint = text.splitlines()
    assert first == "3 workers wait for room on the cluster; each needs 1 CPU"
    assert nodes == [
        "  10.0.0.a (a): 0 of 4 CPU free",
        "  10.0.0.b (b): 0.5 of 2 CPU free",
    ]
    assert (
        hint == "  All of it is in use: the run continues when resources are freed or a node joins."
    )


def test_it_says_when_no_node_could_ever_do():
    """That is no matter of waiting for others."""
    text = why_waiting([node("a", 4)], {"CPU": 1.0, "GPU": 0.5}, 1)
    assert text.startswith("1 worker waits for room on the cluster; each needs 1 CPU, 0.5 GPU\n")
    assert "4 of 4 CPU free, 0 of 0 GPU free" in text
    assert text.endswith("No node has that much: start a larger one, or ask for less.")


def test_it_says_when_there_are_no_nodes():
    """As after the loss of the last one."""
    assert "  there are no nodes\n" in why_waiting([], ONE, 2)


# ---- options ------------------------------------------------------------------------------------

WRONG = {
    "CPUs": ({"num_cpus": -1}, r"^Ray\(num_cpus=\)=-1 is not valid; it must be 0 or more"),
    "CPUs, yes": ({"num_cpus": True}, r"^Ray\(num_cpus=\)=True"),
    "GPUs": ({"num_gpus": "2"}, r"^Ray\(num_gpus=\)='2'"),
    "resources": ({"resources": {"disk": -2}}, r"^Ray\(resources='disk'\)=-2"),
    "nothing": ({"num_cpus": 0}, "it must be above 0, unless GPUs or resources are given"),
    "no workers": ({"max_workers": 0}, r"^Ray\(max_workers=\)=0 .* 1, 2, 3, … or None"),
    "half a worker": ({"max_workers": 1.5}, r"^Ray\(max_workers=\)=1\.5"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_impossible_settings_are_refused(arguments, words):
    """By name, before anything starts."""
    with pytest.raises(OptionError, match=words):
        Ray(**arguments)


def test_a_worker_needs_what_was_asked_for_and_nothing_that_is_zero():
    """By Ray's own names."""
    assert worker_resources(Ray()) == {"CPU": 1}
    where = Ray(num_cpus=0, num_gpus=0.5, resources={"disk": 2, "tape": 0})
    assert worker_resources(where) == {"GPU": 0.5, "disk": 2}


def options(**settings):
    return PreprocessOptions(**{"backend": "ray"} | settings)


def test_the_shorthand_is_the_plain_cluster():
    """`backend="ray"` is `backend=Ray()`."""
    assert cluster_of("ray") == Ray()
    assert cluster_of(Ray(num_cpus=2)) == Ray(num_cpus=2)
    assert cluster_of("process") is None


def test_no_workers_on_a_cluster_are_refused():
    """They would be this very process."""
    with pytest.raises(OptionError, match=r"^num_workers=0 works in this process"):
        options(num_workers=0)


def test_a_trial_is_made_in_this_process_unless_workers_are_named():
    """`limit` is for looking at a real traceback."""
    assert options(limit=3).cluster is None
    assert options(limit=3).workers == 0
    assert options(limit=3, num_workers=2).cluster == Ray()
