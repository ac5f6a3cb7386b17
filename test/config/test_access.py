"""Keys, tenants and origins that could never work are refused at start, without showing a key."""

from __future__ import annotations

import pytest

from radixpd.config.access import access_notes, check_access
from radixpd.config.cli import parse
from radixpd.config.secret import Secret
from radixpd.config.settings import ServerSettings
from radixpd.errors import ConfigError


def fault(**fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_access(ServerSettings(**fields))  # type: ignore[arg-type]
    return str(caught.value)


def test_keys_that_no_client_can_send() -> None:
    for key in ("two words", "new\nline", "schlüssel", " sesame"):
        assert "--api-key: " in fault(api_key=(Secret("fine"), Secret(key)))
        text = fault(admin_api_key=(Secret(key),))
        assert "--admin-api-key: " in text
        assert key not in text
    check_access(ServerSettings(api_key=(Secret("sk-A_b.9+/="),)))


def test_an_administrators_key_is_no_clients_key() -> None:
    assert "--admin-api-key" in fault(api_key=(Secret("a"), Secret("b")), admin_api_key=(Secret("c"), Secret("b")))
    check_access(ServerSettings(api_key=(Secret("a"),), admin_api_key=(Secret("b"),)))


def test_tenants_need_keys() -> None:
    assert "--salt-from-key" in fault(salt_from_key=True)
    assert "--salt-from-key" in fault(salt_from_key=True, admin_api_key=(Secret("a"),))
    check_access(ServerSettings(api_key=(Secret("a"),), salt_from_key=True))


@pytest.mark.parametrize("origin", ["*", "https://app.example", "http://localhost:3000", "http://[::1]:80", "https://a-b.example"])
def test_origins_that_browsers_send(origin: str) -> None:
    check_access(ServerSettings(allowed_origins=(origin,)))


@pytest.mark.parametrize(
    "origin", ["", "null", "app.example", "https://app.example/", "https://App.example", "ftp://x", "https://*.x", "a b"]
)
def test_origins_that_none_sends(origin: str) -> None:
    assert "--allowed-origins" in fault(allowed_origins=("https://fine.example", origin))


def test_what_may_not_be_meant_is_said() -> None:
    key, admin = (Secret("a"),), (Secret("b"),)
    assert access_notes(ServerSettings()) == access_notes(ServerSettings(host="localhost")) == ()
    (open_to_all,) = access_notes(ServerSettings(host="0.0.0.0", admin_api_key=admin))
    assert "--host 0.0.0.0 without --api-key" in open_to_all
    assert access_notes(ServerSettings(host="0.0.0.0", api_key=key)) == ()
    (orders,) = access_notes(ServerSettings(api_key=key, salt_from_key=True))
    assert "--admin-api-key" in orders
    assert access_notes(ServerSettings(api_key=key, salt_from_key=True, admin_api_key=admin)) == ()


def test_flags_may_repeat() -> None:
    flags = [
        "--model-path",
        "demo",
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--admin-api-key",
        "c",
        "--allowed-origins",
        "http://a",
        "http://b",
    ]
    server = parse(flags).server
    assert [key.reveal() for key in server.api_key] == ["a", "b"]
    assert [key.reveal() for key in server.admin_api_key] == ["c"]
    assert server.allowed_origins == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("flag", "low", "high"),
    [("max-body-size", 1023, 2**30 + 1), ("max-header-size", 1023, 2**20 + 1), ("max-concurrent-requests", 0, 2**20 + 1)],
)
def test_limits_have_closed_ranges(flag: str, low: int, high: int) -> None:
    for value in (low, high, "many", ""):
        with pytest.raises(ConfigError, match=f"--{flag} {value}"):
            parse(["--model-path", "demo", f"--{flag}", str(value)])
    for value in (low + 1, high - 1):
        assert getattr(parse(["--model-path", "demo", f"--{flag}", str(value)]).server, flag.replace("-", "_")) == value


@pytest.mark.parametrize("flag", ["request-timeout", "body-timeout"])
def test_deadlines_are_finite_and_above_zero(flag: str) -> None:
    for value in ("0", "-1", "nan", "inf", "1e9"):
        with pytest.raises(ConfigError, match=f"--{flag}"):
            parse(["--model-path", "demo", f"--{flag}", value])
    assert getattr(parse(["--model-path", "demo", f"--{flag}", "1.5"]).server, flag.replace("-", "_")) == 1.5
