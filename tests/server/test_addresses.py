"""Addresses: what is one, how it is written, and whether only this machine reaches it."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.errors import InvalidValueError
from fedpriv.wire.naming import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7443", "127.0.0.1", 7443),
        ("fl.example.org:0", "fl.example.org", 0),
        ("localhost:65535", "localhost", 65535),
        ("[::1]:7443", "::1", 7443),
        ("[::]:1", "::", 1),
        ("0.0.0.0:80", "0.0.0.0", 80),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    address = Address.parse(text, "key")
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "host", "host:", ":7443", "host:65536", "host:-1", "host:+1", "host: 1", "host:1 ",
        "host:1_0", "host:٣", "host:²", "::1:7443", "[::1]", "[]:1", "[a]:1", "[::1", "a:b:1",
        "[[::1]]:1", "host:" + "1" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"^the key is .*must be HOST:PORT or "):
        Address.parse(text, "the key")


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = Address.parse(text, "key")
    except InvalidValueError:
        return
    assert 0 <= address.port < 2**16
    assert address.host
    assert Address.parse(str(address), "key") == address


@pytest.mark.parametrize(
    ("host", "on_loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.7", False),
        ("2001:db8::1", False),
        ("no-such-host.invalid", False),
        ("a" * 70 + ".example", False),
        ("a\0b", False),
    ],
)
def test_only_what_nobody_else_reaches_is_on_loopback(host: str, on_loopback: bool) -> None:
    legal = nullcontext() if on_loopback else pytest.raises(InvalidValueError, match="loopback")
    with legal:
        Address(host, 7443).check_loopback("key")
