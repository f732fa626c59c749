from __future__ import annotations

import dataclasses
import pickle
import traceback

import pytest

from elastictrain.errors import ConfigError
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.etcd.settings import (
    CONF_KEYS,
    EtcdSettings,
    parse_endpoints,
    read_etcd_settings,
)
from elastictrain.rendezvous.secret import Secret

PASSWORD = "pa55-w0rd"


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("etcd", ["etcd:2379"]),
        ("etcd:12379", ["etcd:12379"]),
        (" etcd-0.etcd:2379 , etcd-1.etcd ,", ["etcd-0.etcd:2379", "etcd-1.etcd:2379"]),
        ("10.0.0.1:2379,10.0.0.2:2379,10.0.0.1", ["10.0.0.1:2379", "10.0.0.2:2379"]),
        ("http://etcd:2379/", ["etcd:2379"]),
        ("under_score", ["under_score:2379"]),
        ("[::1]", ["[::1]:2379"]),
        ("[2001:db8::1]:1", ["[2001:db8::1]:1"]),
        ("2001:db8::1", ["[2001:db8::1]:2379"]),
        ("::1:2379", ["[::1]:2379"]),
        ("2001:db8:0:0:0:0:0:1:2379", ["[2001:db8:0:0:0:0:0:1]:2379"]),
        ("https://[fe80::1%eth0]:2379", ["[fe80::1%eth0]:2379"]),
    ],
)
def test_endpoint_is_read_when_written_in_any_usual_way(text: str, addresses: list[str]) -> None:
    endpoints, _ = parse_endpoints(text)
    assert [endpoint.address for endpoint in endpoints] == addresses


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ",
        "etcd:",
        "etcd:0",
        "etcd:65536",
        "etcd:port",
        "[::1",
        "[::1]2379",
        "[etcd]:2379",
        "ftp://etcd",
        "a b",
        "etcd/path",
        "-etcd",
        "http://a,https://b",
        ":2379",
    ],
)
def test_endpoint_is_refused_when_it_names_no_server(text: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-endpoint: expected HOST:PORT") as caught:
        parse_endpoints(text)
    assert caught.value.field == "--rdzv-endpoint"


def test_password_is_not_repeated_when_it_stands_in_an_address() -> None:
    with pytest.raises(ConfigError, match="write no password") as caught:
        parse_endpoints(f"http://root:{PASSWORD}@etcd:2379")
    assert PASSWORD not in "".join(traceback.format_exception_only(caught.value))
    assert PASSWORD not in str(caught.value.seen)


def test_password_is_not_shown_when_settings_are_printed() -> None:
    settings = read_etcd_settings("etcd", {"user": "root"}, password=PASSWORD)
    assert settings.password is not None
    assert settings.password.reveal() == PASSWORD
    for text in (repr(settings), str(settings), f"{settings.password}", repr(settings.password)):
        assert PASSWORD not in text
    assert PASSWORD not in repr(dataclasses.asdict(settings))


@pytest.mark.parametrize(
    ("endpoint", "conf", "protocol"),
    [
        ("etcd", {}, "http"),
        ("https://etcd", {}, "https"),
        ("etcd", {"protocol": "https"}, "https"),
        ("http://etcd", {"protocol": "http"}, "http"),
        ("etcd", {"cacert": "ca.pem"}, "https"),
        ("etcd", {"cert": "c.pem", "key": "k.pem"}, "https"),
    ],
)
def test_protocol_follows_from_what_was_given(endpoint: str, conf: dict[str, str], protocol: str) -> None:
    assert read_etcd_settings(endpoint, conf).protocol == protocol


def test_conf_is_read_when_it_has_the_names_of_either_etcd_backend_of_torch() -> None:
    settings = read_etcd_settings("etcd", {"cacert": "a", "cert": "b", "key": "c", "read_timeout": "3", "x": "y"})
    other = read_etcd_settings("etcd", {"ca_cert": "a", "ssl_cert": "b", "ssl_cert_key": "c", "read_timeout": "3"})
    assert settings == other
    assert (settings.cacert, settings.cert, settings.key, settings.attempt_timeout_s) == ("a", "b", "c", 3.0)
    assert {"ca_cert", "ssl_cert_key", "user", "password_file"} <= CONF_KEYS


@pytest.mark.parametrize(
    ("endpoint", "conf", "password", "field"),
    [
        ("etcd", {"protocol": "grpc"}, None, "--rdzv-conf protocol"),
        ("https://etcd", {"protocol": "http"}, None, "--rdzv-conf protocol"),
        ("http://etcd", {"cacert": "ca.pem"}, None, "--rdzv-conf protocol"),
        ("etcd", {"cert": "c.pem"}, None, "--rdzv-conf cert"),
        ("etcd", {"key": "k.pem"}, None, "--rdzv-conf key"),
        ("etcd", {"cacert": "a", "ca_cert": "b"}, None, "--rdzv-conf cacert"),
        ("etcd", {"user": "root"}, None, "--rdzv-conf user"),
        ("etcd", {}, PASSWORD, "--rdzv-conf user"),
        ("etcd", {"password_file": "f"}, None, "--rdzv-conf user"),
        ("etcd", {"user": "root", "password": PASSWORD}, None, "--rdzv-conf password"),
        ("etcd", {"read_timeout": "soon"}, None, "--rdzv-conf read_timeout"),
        ("etcd", {"read_timeout": "0"}, None, "--rdzv-conf read_timeout"),
    ],
)
def test_conf_is_refused_when_it_contradicts_itself(
    endpoint: str, conf: dict[str, str], password: str | None, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_etcd_settings(endpoint, conf, password=password)
    assert caught.value.field == field
    assert "; " in str(caught.value)  # what to do
    assert PASSWORD not in str(caught.value)


def test_file_wins_when_the_variable_is_set_as_well() -> None:
    settings = read_etcd_settings("etcd", {"user": "root", "password_file": "f"}, password=PASSWORD)
    assert settings.password is None
    assert settings.password_file == "f"


def test_settings_are_refused_when_they_have_no_endpoint() -> None:
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        EtcdSettings(endpoints=())
    assert EtcdSettings(endpoints=(Endpoint("a", 2379), Endpoint("::1", 5))).names == "a:2379, [::1]:5"


def test_secret_is_not_in_the_file_of_a_run_when_it_is_dumped_by_accident() -> None:
    assert PASSWORD not in f"{Secret(PASSWORD)!r} {Secret(PASSWORD)!s}"
    assert Secret(PASSWORD) == Secret(PASSWORD)
    with pytest.raises(TypeError):
        pickle.dumps(Secret(PASSWORD))
