"""Who may talk to etcd, and what a user is told who has named it wrongly: one line, at once, with the option to set."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from etcd_server import BINARIES, NO_SERVER, Cluster, free_ports, run_cluster
from store_contract import Watcher, answer
from waiting import wait_until

from elastictrain.clock import SystemClock
from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.etcd.settings import EtcdSettings, read_etcd_settings
from elastictrain.rendezvous.store import Inbox, WatchFailed

CLOCK = SystemClock()
PASSWORD = "pa55-w0rd-nobody-may-see"
pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates: one authority and its server and client, and an authority that signed nothing here."""
    folder = tmp_path_factory.mktemp("certificates")
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    other.cert_pem.write_to_path(str(folder / "other-ca.pem"))
    for name, identities in (("server", ("localhost", "127.0.0.1")), ("client", ("trainer",))):
        issued = authority.issue_cert(*identities)
        issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
        issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    return folder


@pytest.fixture(scope="module", params=sorted(BINARIES))
def secure(request: pytest.FixtureRequest, folder: Path) -> Iterator[Cluster]:
    """An etcd that asks its clients for a certificate."""
    ca, cert, key = (str(folder / name) for name in ("ca.pem", "client.pem", "client.key"))
    credentials = grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in (ca, key, cert)))
    options = ["--client-cert-auth", "--trusted-ca-file", ca]
    options += ["--cert-file", str(folder / "server.pem"), "--key-file", str(folder / "server.key")]
    conf = {"cacert": ca, "cert": cert, "key": key}
    with run_cluster(request.param, options=options, credentials=credentials, conf=conf) as running:
        yield running


@pytest.fixture(scope="module", params=sorted(BINARIES))
def guarded(request: pytest.FixtureRequest, folder: Path) -> Iterator[Cluster]:
    """An etcd without TLS that asks for a password, and whose tokens live for four seconds."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / "jwt.key").write_bytes(pem)
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "jwt.pub").write_bytes(public)
    token = f"jwt,pub-key={folder / 'jwt.pub'},priv-key={folder / 'jwt.key'},sign-method=RS256,ttl=4s"
    with run_cluster(request.param, options=["--auth-token", token]) as running:
        running.enable_auth("trainer", PASSWORD, prefix="/run/")
        yield running


def failure_of(settings: EtcdSettings, lines: list[str] | None = None) -> BaseException:
    """What a store fails with, by a write and by a watch alike."""
    store = open_etcd_store(settings, CLOCK, on_trouble=(lines if lines is not None else []).append)
    inbox = Inbox()
    try:
        store.watch("/run/", inbox)
        error = store.put("/run/a", {}).exception(10)
        assert error is not None
        items = wait_until(inbox.drain)
        assert isinstance(items[-1], WatchFailed)
        assert str(items[-1].error) == str(error)
        assert "\n" not in str(error)
        return error
    finally:
        store.close()
        inbox.close()


def check_store_works(settings: EtcdSettings) -> None:
    store = open_etcd_store(settings, CLOCK)
    try:
        watcher = Watcher(store, "/run/")
        watcher.snapshot()
        lease = store.lease(5.0)
        answer(store.put("/run/a", {"n": 1}, lease=lease))
        assert watcher.event().value == {"n": 1}
        answer(lease.revoke())
        assert watcher.event().value is None
        watcher.close()
    finally:
        store.close()


# ---------------------------------------------------------------- TLS


def test_store_works_when_both_sides_show_certificates(secure: Cluster) -> None:
    check_store_works(secure.settings())


def test_store_works_when_the_name_is_in_the_certificate(secure: Cluster) -> None:
    port = secure.members[0].client_port
    check_store_works(read_etcd_settings(f"https://localhost:{port}", secure.conf))


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"cacert": "other-ca.pem"}, "--rdzv-conf cacert", ["not trusted", "cacert=FILE"]),
        ({"cert": "", "key": ""}, "--rdzv-conf cert", ["certificate", "cert=FILE,key=FILE"]),
        ({"cacert": "", "cert": "", "key": ""}, "--rdzv-conf protocol", ["protocol=https"]),
    ],
    ids=["wrong authority", "no client certificate", "no TLS"],
)
def test_user_is_told_at_once_when_certificates_do_not_fit(
    secure: Cluster, folder: Path, changes: dict[str, str], field: str, words: Sequence[str]
) -> None:
    conf = {**secure.conf, **{name: str(folder / value) for name, value in changes.items()}}
    conf = {name: value for name, value in conf.items() if changes.get(name) != ""}
    address = secure.members[0].endpoint.address
    began_s = CLOCK.now_s()
    error = failure_of(read_etcd_settings(address, conf))
    assert CLOCK.now_s() - began_s < 60
    assert isinstance(error, ConfigError)
    assert error.field == field
    for word in [address, *words]:
        assert word in str(error)


def test_user_is_told_at_once_when_there_is_no_tls(folder: Path) -> None:
    with run_cluster() as plain:
        address = plain.members[0].endpoint.address
        error = failure_of(read_etcd_settings(address, {"cacert": str(folder / "ca.pem")}))
        assert isinstance(error, ConfigError)
        assert error.field == "--rdzv-conf protocol"
        assert "protocol=http" in str(error)
        assert address in str(error)


@pytest.mark.parametrize("name", ["cacert", "cert"])
def test_opening_is_refused_when_a_certificate_cannot_be_read(folder: Path, tmp_path: Path, name: str) -> None:
    paths = {"cacert": folder / "ca.pem", "cert": folder / "client.pem", "key": folder / "client.key"}
    for bad in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
        (tmp_path / "empty.pem").write_text("no certificate\n")
        conf = {key: str(path) for key, path in {**paths, name: bad}.items()}
        with pytest.raises(ConfigError, match=f"--rdzv-conf {name}.*{bad.name}"):
            open_etcd_store(read_etcd_settings("localhost:1", conf), CLOCK)


# ---------------------------------------------------------------- passwords


def test_store_works_when_it_logs_in_without_tls(guarded: Cluster) -> None:
    check_store_works(guarded.settings())


def test_store_goes_on_when_its_login_expires(guarded: Cluster, tmp_path: Path) -> None:
    """The password comes from a file, and the token is good for four seconds only."""
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    lines: list[str] = []
    settings = guarded.settings(password=None, conf={"password_file": str(secret)})
    store = open_etcd_store(settings, CLOCK, on_trouble=lines.append)
    try:
        watcher = Watcher(store, "/run/")
        watcher.snapshot()
        lease = store.lease(30.0)
        answer(store.put("/run/a", {"n": 0}, lease=lease))
        until_s = CLOCK.now_s() + 5.0
        wait_until(lambda: CLOCK.now_s() > until_s)
        answer(store.put("/run/a", {"n": 1}, lease=lease))
        lease.keep_alive()
        wait_until(lambda: lease.expires_at_s() > until_s + 29.0)
        # A stream that breaks now is opened with the new login.
        (watch,) = store._watches
        broken = watch._stream
        assert broken is not None
        store.post(broken.close)
        wait_until(lambda: watch._stream not in (None, broken))
        answer(store.put("/run/a", {"n": 2}, lease=lease))
        values = [watcher.event().value for _ in range(3)]
        assert values == [{"n": 0}, {"n": 1}, {"n": 2}]
        assert lines == []
        answer(lease.revoke())
        watcher.close()
    finally:
        store.close()


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("trainer", "wr0ng-pa55", "authentication failed"),
        ("nobody", PASSWORD, "authentication failed"),
        (None, None, "asks for a user"),
    ],
)
def test_user_is_told_at_once_when_the_password_is_wrong(
    guarded: Cluster, user: str | None, password: str | None, words: str
) -> None:
    address = guarded.members[0].endpoint.address
    settings = read_etcd_settings(address, {"user": user} if user else {}, password=password)
    error = failure_of(settings)
    assert isinstance(error, ConfigError)
    assert error.field == "--rdzv-conf user"
    for word in (address, words, "ELASTICTRAIN_ETCD_PASSWORD"):
        assert word in str(error)
    assert password is None or password not in f"{error!r} {error} {settings!r}"


def test_user_is_told_at_once_when_the_keys_are_not_his(guarded: Cluster) -> None:
    store = open_etcd_store(guarded.settings(), CLOCK)
    try:
        error = store.put("/elsewhere/a", {}).exception(10)
        assert isinstance(error, ConfigError)
        assert "permission denied" in str(error)
        assert "grant the user" in str(error)
    finally:
        store.close()


def test_store_works_when_a_password_is_given_that_etcd_does_not_ask_for() -> None:
    with run_cluster() as plain:
        check_store_works(plain.settings(conf={"user": "trainer"}, password=PASSWORD))


# ---------------------------------------------------------------- addresses


class _Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def test_user_is_told_at_once_when_the_port_is_no_etcd() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            address = f"127.0.0.1:{server.server_address[1]}"
            error = failure_of(read_etcd_settings(address, {}))
            assert isinstance(error, ConfigError)
            assert error.field == "--rdzv-endpoint"
            for word in (address, "seen a server that answers", "usually 2379"):
                assert word in str(error)
        finally:
            server.shutdown()
            thread.join()


def test_store_works_when_one_of_its_addresses_is_wrong() -> None:
    with run_cluster() as plain, http.server.HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            good = plain.members[0].endpoint.address
            (dead,) = free_ports(1)
            wrong = f"127.0.0.1:{server.server_address[1]},127.0.0.1:{dead}"
            for _ in range(3):  # each store begins with another of them
                check_store_works(read_etcd_settings(f"{wrong},{good}", {}))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_store_gives_up_when_nobody_answers_within_the_join_timeout(host: str) -> None:
    """A refused connection or an unknown name may be a Kubernetes service that is not there yet."""
    (port,) = free_ports(1)
    settings = EtcdSettings(
        endpoints=read_etcd_settings(f"{host}:{port}", {}).endpoints, join_timeout_s=2.0, report_every_s=1.0
    )
    lines: list[str] = []
    began_s = CLOCK.now_s()
    error = failure_of(settings, lines)
    assert 2.0 <= CLOCK.now_s() - began_s < 60.0
    assert isinstance(error, StoreError)
    assert not error.retryable
    cause = "connection refused" if host == "127.0.0.1" else "the name is not known (DNS)"
    for word in (f"{host}:{port}", "join time-out of 2 s", "--rdzv-endpoint"):
        assert word in str(error)
    assert lines
    assert "waiting for etcd" in lines[0]
    if host == "127.0.0.1":  # how long a resolver takes to say that it does not know a name is its own affair
        assert cause in str(error)
        assert cause in lines[0]


def test_store_works_when_etcd_comes_late() -> None:
    with run_cluster() as plain:
        plain.kill()
        lines: list[str] = []
        store = open_etcd_store(plain.settings(), CLOCK, on_trouble=lines.append)
        try:
            waiting = store.put("/run/a", {})
            wait_until(lambda: lines)
            plain.start()
            waiting.result(30)
            wait_until(lambda: "answers again" in lines[-1])
        finally:
            store.close()


def test_store_warns_when_other_nodes_cannot_reach_its_address() -> None:
    with run_cluster() as plain:
        port = plain.members[0].client_port
        lines: list[str] = []
        settings = read_etcd_settings(f"localhost:{port}", {}, is_multi_node=True)
        store = open_etcd_store(settings, CLOCK, on_trouble=lines.append)
        try:
            answer(store.put("/run/a", {}))
            wait_until(lambda: lines)
            assert f"--rdzv-endpoint localhost:{port}" in lines[0]
            assert "an address that all nodes can reach" in lines[0]
        finally:
            store.close()


@pytest.mark.parametrize("text", ["[::1]:{port}", "::1:{port}"])
def test_store_works_when_its_address_is_ipv6(text: str) -> None:
    with run_cluster() as plain:
        (member,) = plain.members
        url = f"http://[::1]:{member.client_port}"
        plain.kill()
        place = member.command.index("--listen-client-urls") + 1
        member.command[place] += f",{url}"
        plain.start()
        check_store_works(read_etcd_settings(text.format(port=member.client_port), {}))


def test_grpc_writes_no_lines_of_its_own_when_certificates_do_not_fit(secure: Cluster, folder: Path) -> None:
    code = (
        "import os, sys\n"
        "from elastictrain.clock import SystemClock\n"
        "from elastictrain.rendezvous.etcd.opening import open_etcd_store\n"
        "from elastictrain.rendezvous.etcd.settings import read_etcd_settings\n"
        f"settings = read_etcd_settings({secure.members[0].endpoint.address!r}, "
        f"{{'cacert': {str(folder / 'other-ca.pem')!r}}})\n"
        "before = dict(os.environ)\n"
        "store = open_etcd_store(settings, SystemClock())\n"
        "assert dict(os.environ) == before\n"
        "print(type(store.put('/run/a', {}).exception(10)).__name__)\n"
        "store.close()\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "ConfigError\n", "")
