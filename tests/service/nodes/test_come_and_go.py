"""Machines leave a cluster and join it in the middle of load, until none of the first ones is left."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

import pytest

from lookonce.service import running
from tests.service.nodes.kit import Cluster, Machine, cluster
from tests.service.nodes.test_nodes import asking, busiest, settings_on, where
from tests.service.scaling.kit import ask, within
from tests.service.scaling.load import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def leave(machine: Machine) -> None:
    """As ``ray stop`` does it on a machine that is being given back: asked first, killed when it has not gone."""
    machine.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    while machine.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    machine.kill()


def serve_from(url: str, made: Cluster, outcome: Outcome) -> float:
    """Waits until every replica runs on a machine that is there, and answers have come since; seconds."""
    begin = time.monotonic()

    def whole() -> bool:
        roles = [role for machine in made.machines for role in machine.roles()]
        return roles.count("encoder") == roles.count("language") == 2 and "ingress" in roles

    within(240, whole, f"every replica runs: {where(made)}")
    took, answered = time.monotonic() - begin, outcome.answered
    within(120, lambda: outcome.answered >= answered + 12, "answers afterwards")
    return took


def test_machines_leave_and_join_under_load() -> None:
    """One leaves, another joins, and the last of the first ones leaves: what joined has to do the work."""
    with (
        tempfile.TemporaryDirectory(prefix="lkn", dir="/tmp", ignore_cleanup_errors=True) as folder,
        cluster(Path(folder), isolated=False, head=2, workers=(4, 4)) as made,
        running(settings_on(made)) as url,
    ):
        outcome, first = Outcome(), busiest(made)
        with asking(url, outcome):
            within(60, lambda: outcome.answered >= 8, "answers before")
            leave(first)
            made.machines.remove(first)
            took = serve_from(url, made, outcome)
            print(f"one left: whole again after {took:.0f} s, {outcome.answered} answers; {where(made)}")
            newcomer = made.start_worker(4)
            made.wait_for_machines(3)
            second = made.machines[1]
            assert second is not newcomer
            leave(second)
            made.machines.remove(second)
            took = serve_from(url, made, outcome)
            print(f"the other left: whole again after {took:.0f} s, {outcome.answered} answers; {where(made)}")
            assert newcomer.roles(), where(made)
        assert outcome.faults == []
        assert ask(url, 1)["choices"][0]["message"]["content"]
