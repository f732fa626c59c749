"""What a user is told who has named etcd wrongly, before anything happens, and how a run waits for an etcd to come."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from etcd_server import BINARIES, NO_SERVER, free_ports, run_cluster
from support_nodes import Site
from support_runs import finish, one_line, started
from waiting import wait_until

from elastictrain.rendezvous.etcd.settings import PASSWORD_VARIABLE

PASSWORD = "pa55-w0rd-nobody-may-see"
pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)

# A name that DNS will know soon: a file of its own in the place of /etc/hosts. The command keeps the pid.
OWN_HOSTS = ["unshare", "--mount", "sh", "-c", 'mount --bind "$1" /etc/hosts && shift && exec "$@"', "enter"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to start in. What runs the script leaves a file there."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "train.py").write_text("open('started', 'w').close()\n")
    return inside


def options(endpoint: str, conf: str = "", *, join_timeout_s: int = 60) -> list[str]:
    head = ["run", "--nnodes", "1:2", "--rdzv-backend", "etcd3", "--rdzv-id", "job", "--rdzv-endpoint", endpoint]
    return [*head, "--rdzv-conf", f"join_timeout={join_timeout_s}{conf and ','}{conf}"]


def refuse(folder: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """Run a command that must be refused before anything has happened; gives its last line, the error."""
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    job = finish(folder.parent, *words, "--run-dir", "run", "train.py", cwd=folder, timeout_s=40, env=env)
    assert job.process.returncode == 2, job.err()
    assert job.out() == ""
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before, "something was written"
    lines = job.err().splitlines()
    assert "Traceback" not in job.err()
    assert [line for line in lines if line.startswith("elastictrain: error: ")] == lines[-1:], job.err()
    assert PASSWORD not in job.err()
    return lines[-1]


@contextmanager
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_user_is_told_the_address_and_the_option_when_there_is_no_etcd(folder: Path, host: str) -> None:
    address = f"{host}:{free_ports(1)[0]}"
    line = refuse(folder, *options(address, join_timeout_s=2))
    for word in (address, "connection refused", "join time-out of 2 s", "--rdzv-endpoint"):
        assert word in line


def test_address_of_ipv6_may_be_written_without_brackets(folder: Path) -> None:
    assert "[::1]:2379" in refuse(folder, *options("::1", "read_timeout=0.2", join_timeout_s=1))


def test_user_is_told_the_name_and_the_option_when_dns_does_not_know_it(folder: Path) -> None:
    line = refuse(folder, *options("etcd.invalid:2379", join_timeout_s=1))
    for word in ("etcd.invalid:2379", "DNS", "--rdzv-endpoint"):
        assert word in line


def test_user_is_told_at_once_when_the_port_is_no_etcd(folder: Path) -> None:
    with web_server() as address:
        line = refuse(folder, *options(address))
    for word in (address, "expected etcd", "2379"):
        assert word in line


def test_user_is_told_at_once_when_certificates_do_not_fit(folder: Path) -> None:
    made, other, own = trustme.CA(), trustme.CA(), folder.parent
    server = made.issue_cert("127.0.0.1")
    server.private_key_pem.write_to_path(str(own / "server.key"))
    server.cert_chain_pems[0].write_to_path(str(own / "server.pem"))
    made.cert_pem.write_to_path(str(own / "ca.pem"))
    other.cert_pem.write_to_path(str(own / "other.pem"))
    credentials = grpc.ssl_channel_credentials((own / "ca.pem").read_bytes())
    files = ["--cert-file", str(own / "server.pem"), "--key-file", str(own / "server.key")]
    with run_cluster(options=files, credentials=credentials) as etcd:
        address = etcd.members[0].endpoint.address
        wrong = refuse(folder, *options(address, f"cacert={own / 'other.pem'}"))
        without = refuse(folder, *options(address))
        missing = refuse(folder, *options(address, f"cacert={own / 'nowhere.pem'}"))
    assert address in wrong
    assert "not trusted" in wrong
    assert "cacert=FILE in --rdzv-conf" in wrong
    assert address in without
    assert "protocol=https" in without
    assert str(own / "nowhere.pem") in missing


def test_user_is_told_at_once_when_the_password_is_wrong(folder: Path) -> None:
    with run_cluster() as etcd:
        etcd.enable_auth("trainer", "another")
        address = etcd.members[0].endpoint.address
        line = refuse(folder, *options(address, "user=trainer"), env={PASSWORD_VARIABLE: PASSWORD})
    for word in (address, PASSWORD_VARIABLE):
        assert word in line


def test_user_is_told_when_its_own_address_is_none_of_this_machine(folder: Path) -> None:
    with run_cluster() as etcd:
        words = options(etcd.members[0].endpoint.address)
        job = finish(folder.parent, *words, "--local-addr", "192.0.2.7", "train.py", cwd=folder, timeout_s=40)
    assert job.process.returncode == 2
    line = one_line("".join(line for line in job.err().splitlines(keepends=True) if "error" in line))
    assert "--local-addr" in line
    assert "192.0.2.7" in line
    assert not (folder / "started").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_nothing_is_left_when_the_wait_for_etcd_is_ended_by_a_signal(
    folder: Path, number: signal.Signals, code: int
) -> None:
    words = options(f"127.0.0.1:{free_ports(1)[0]}")
    with started(folder.parent, *words, "train.py", cwd=folder) as job:
        wait_until(lambda: "waiting for etcd" in job.err(), 20, job.err)
        job.process.send_signal(number)
        assert job.wait(20) == code, job.err()
        wait_until(lambda: not job.pids(), 10)
        assert "Traceback" not in job.err()
    assert not (folder / "started").exists()


def test_run_that_has_met_before_may_be_tried_again_when_its_etcd_is_gone(tmp_path: Path) -> None:
    with run_cluster() as etcd:
        site = Site(etcd, tmp_path, epochs=1, nnodes="1:2", pause_s=0.0)
        try:
            site.start("a")
            assert site.ends("a") == 0, site.logs()
        finally:
            site.close()
    site.start("again", conf={"join_timeout": "1"})
    assert site.ends("again") == 1, site.logs()
    assert "no etcd answered within the join time-out of 1 s" in site.log("again")


# ---------------------------------------------------------------- an etcd that comes late, or by IPv6


def own_hosts() -> Callable[[Path], list[str]]:
    """A wrapper that gives a command a /etc/hosts of its own, which may change meanwhile."""
    allowed = ["true"] if shutil.which("unshare") else ["false"]
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", *allowed], check=False).returncode:
        pytest.skip("needs root and unshare for a file of its own in the place of /etc/hosts")
    return lambda path: [*OWN_HOSTS, str(path)]


def test_run_waits_and_says_so_when_dns_knows_its_etcd_late(tmp_path: Path) -> None:
    wrapper, hosts = own_hosts(), tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    with run_cluster() as etcd:
        site = Site(etcd, tmp_path, epochs=2, nnodes="1:2", pause_s=0.0)
        site.endpoint = f"etcd.late.internal:{etcd.members[0].client_port}"
        try:
            site.start("a", wrapper=wrapper(hosts), conf={"join_timeout": "80"})
            wait_until(lambda: site.log("a").count("the name is not known (DNS)") >= 2, 40, site.logs)
            assert "etcd.late.internal" in site.log("a")
            assert not site.run_dir.exists(), "nothing has begun"
            hosts.write_text("127.0.0.1 localhost etcd.late.internal\n")
            assert site.ends("a") == 0, site.logs()
            assert "answers again" in site.log("a"), "it is said that the waiting is over"
            site.prove(2)
        finally:
            site.close()


def has_ipv6() -> bool:
    return "::1" in subprocess.run(["ip", "-6", "addr"], capture_output=True, text=True, check=False).stdout


@pytest.mark.skipif(not shutil.which("ip") or not has_ipv6(), reason="this machine has no IPv6, not even to itself")
def test_nodes_train_together_when_all_addresses_are_ipv6(tmp_path: Path) -> None:
    with run_cluster() as etcd:
        (member,) = etcd.members
        site = Site(etcd, tmp_path, epochs=6, nnodes="1:2")
        site.endpoint = f"[::1]:{member.client_port}"
        etcd.kill()
        member.command[member.command.index("--listen-client-urls") + 1] += f",http://{site.endpoint}"
        etcd.start()
        try:
            for name in ("a", "b"):
                site.start(name)
            generation = site.wait_round(2)
            site.wait_steps(3)
            made = next(one for one in site.ledger("round") if one["generation"] == generation)
            assert made["store"][0] == "::1"
            first = made["seats"][0][2]
            site.kill("a" if first in site.log("a") else "b")
            site.wait_round(1, after=generation)
            assert [site.ends(name) for name in site.nodes] == [0], site.logs()
            site.prove(6)
        finally:
            site.close()
