"""Ray's autoscaler takes no machine that is in use, however idle what runs there is."""

from __future__ import annotations

import time

import pytest

from lookonce.service import ray_running
from tests.service.conftest import service_settings
from tests.service.nodes.launcher import IDLE, head_without_room, machines, on_cluster
from tests.service.scaling.kit import within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_machine_whose_only_actor_is_idle_stays() -> None:
    """A7: an actor without CPUs, as an ingress replica is, counts as use; the machine goes after it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Actor:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    with head_without_room() as made, ray_running(on_cluster(service_settings(), made)):
        worker = ray.remote(num_cpus=2)(Actor).remote()
        machine = ray.get(worker.node.remote(), timeout=120)
        there = NodeAffinitySchedulingStrategy(machine, soft=False)
        idle = ray.remote(num_cpus=0)(Actor).options(scheduling_strategy=there).remote()
        assert ray.get(idle.node.remote(), timeout=60) == machine
        ray.kill(worker)
        time.sleep(3 * 60 * IDLE)
        assert machines() == 1
        assert ray.get(idle.node.remote(), timeout=60) == machine
        ray.kill(idle)
        within(90, lambda: machines() == 0, "the machine has gone")
