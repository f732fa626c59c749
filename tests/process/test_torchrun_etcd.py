"""`torchrun --rdzv-backend=etcd3`: torch's own agent, unchanged, on our rendezvous and a real etcd."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import BINARIES, NO_SERVER, Cluster, run_cluster
from waiting import wait_until

PLAIN = Path(__file__).with_name("support_plain.py")
TTL_S = 2

pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)


@pytest.fixture
def etcd() -> Iterator[Cluster]:
    with run_cluster() as cluster:
        yield cluster


class Machine:
    """One torchrun in a process group of its own."""

    def __init__(self, etcd: Cluster, folder: Path, name: str, *, nnodes: str, steps: int, pause_s: float) -> None:
        self.log = folder / f"{name}.log"
        words = ["-m", "torch.distributed.run", "--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", "3"]
        words += ["--rdzv-backend", "etcd3", "--rdzv-endpoint", etcd.members[0].endpoint.address, "--rdzv-id", "job"]
        words += ["--rdzv-conf", f"ttl={TTL_S},last_call_timeout=1,join_timeout=30", str(PLAIN)]
        environ = {
            **os.environ,
            "PLAIN_FOLDER": str(folder),
            "PLAIN_STEPS": str(steps),
            "PLAIN_PAUSE_S": str(pause_s),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def kill(self) -> None:
        """The agent and its worker, which torch starts in a session of its own: the machine is gone."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in (self.process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ends(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.kill()


def test_two_machines_train_together_and_leave_only_the_closed_record_behind(etcd: Cluster, tmp_path: Path) -> None:
    machines = [Machine(etcd, tmp_path, name, nnodes="2:2", steps=5, pause_s=0.0) for name in "ab"]
    codes = [machine.ends() for machine in machines]
    assert codes == [0, 0], "".join(machine.log.read_text() for machine in machines)
    assert {path.name for path in tmp_path.glob("end-*")} == {"end-0-0", "end-1-0"}
    assert list(etcd.values("/elastictrain/")) == ["/elastictrain/job/closed"]


def test_the_other_machine_trains_on_when_one_is_lost_with_its_store(etcd: Cluster, tmp_path: Path) -> None:
    machines = [Machine(etcd, tmp_path, name, nnodes="1:2", steps=40, pause_s=0.1) for name in "ab"]
    try:
        wait_until(lambda: len(list(tmp_path.glob("trains-[01]-0"))) == 2, 60, lambda: machines[0].log.read_text())
        (first,) = (machine for machine in machines if _holds_rank_0(machine, tmp_path))
        first.kill()  # and with it the store through which the workers had met
        (survivor,) = (machine for machine in machines if machine is not first)
        assert survivor.ends() == 0, survivor.log.read_text()
        assert [path.name[:5] for path in tmp_path.glob("end-*")] == ["end-0"], "alone, as rank 0"
    finally:
        for machine in machines:
            if machine.process.poll() is None:
                machine.kill()


def _holds_rank_0(machine: Machine, folder: Path) -> bool:
    pid = json.loads((folder / "given-0-0.json").read_text())["pid"]
    children = Path(f"/proc/{machine.process.pid}/task/{machine.process.pid}/children").read_text().split()
    return str(pid) in children
