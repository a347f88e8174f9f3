"""The section [access]: what does not fit together is refused when it is read, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.src.settings import AccessSettings, SettingsError, is_loopback, load, show

GENERIC = {"issuer": "https://i.example", "audience": ["owl"], "jwks_url": "https://i.example/keys"}
XSUAA = {"preset": "xsuaa", "issuer": "https://t.example", "tenant": "z", "xs_appname": "owl!t1"}


def loaded(folder: Path, text: str = "", **variables: str) -> Any:
    if text:
        (folder / "owl-sap.toml").write_text(text)
    return load(environ={f"OWL_SAP_ACCESS__{name}": value for name, value in variables.items()}, folder=folder)


@pytest.mark.parametrize(
    ("jwt", "why"),
    [
        ({}, "issuer is missing"),
        (GENERIC | {"issuer": None}, "issuer is missing"),
        (GENERIC | {"issuer": " https://i.example"}, "blanks"),
        (GENERIC | {"audience": []}, "audience is missing"),
        (GENERIC | {"jwks_url": None}, "jwks_url or jwks_path"),
        (GENERIC | {"jwks_path": "keys.json"}, "both set"),
        (GENERIC | {"jwks_url": "http://i.example/keys"}, "https://"),
        (GENERIC | {"jwks_url": "file:///etc/passwd"}, "https://"),
        (GENERIC | {"jwks_url": "http://localhost.evil.example/keys"}, "https://"),
        (GENERIC | {"jwks_url": "https://user:word@i.example/keys"}, "without user"),
        (GENERIC | {"jwks_url": "https:///keys"}, "plain address"),
        (GENERIC | {"jwks_url": "https://i.example:99999/keys"}, "plain address"),
        (GENERIC | {"jwks_url": "https://i.example:port/keys"}, "plain address"),
        (GENERIC | {"algorithms": ["HS256"]}, "Input should be 'RS256'"),
        (GENERIC | {"algorithms": ["none"]}, "Input should be 'RS256'"),
        (GENERIC | {"algorithms": ["RS256", "hs512"]}, "Input should be 'RS256'"),
        (GENERIC | {"algorithms": []}, "at least 1 item"),
        (GENERIC | {"algorithms": [["RS256"]]}, "Input should be 'RS256'"),
        (GENERIC | {"scopes": {"Viewer": "everything"}}, "Input should be 'embed'"),
        (GENERIC | {"tenant": "t"}, "tenant_claim"),
        (GENERIC | {"xs_appname": "owl!t1"}, "xsuaa"),
        (XSUAA | {"xs_appname": None}, "xs_appname"),
        (XSUAA | {"tenant": None}, "tenant"),
        (XSUAA | {"issuer": "http://t.example"}, "https://"),
        ({"preset": "ias", "issuer": "https://t.example"}, "audience is missing"),
        ({"preset": "ias", "issuer": "https://t.example", "audience": "client"}, "ias. needs scopes"),
        ({"preset": "okta", "issuer": "https://t.example"}, "ias"),
    ],
)
def test_what_does_not_fit(jwt: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        AccessSettings.model_validate({"jwt": jwt})


@pytest.mark.parametrize(
    "jwt",
    [
        GENERIC,
        XSUAA,
        GENERIC | {"jwks_url": "http://127.0.0.1:1234/keys"},
        GENERIC | {"jwks_url": "http://[::1]:1234/keys?a=b"},
        GENERIC | {"jwks_url": None, "jwks_path": "keys.json"},
        GENERIC | {"algorithms": ["PS256", "EdDSA"]},
        {"preset": "ias", "issuer": "https://t.example", "audience": "client", "scopes": {"Viewers": "search"}},
    ],
)
def test_what_does(jwt: dict[str, Any]) -> None:
    assert AccessSettings.model_validate({"jwt": jwt}).configured


def test_out_of_variables_alone(tmp_path: Path) -> None:
    jwt = loaded(
        tmp_path,
        JWT__ISSUER="https://i.example",
        JWT__AUDIENCE="owl, other",
        JWT__JWKS_PATH="keys.json",
        JWT__ALGORITHMS="PS256, ES256",
        JWT__SCOPES="Viewer=search, Operator = sync",
    ).settings.access.jwt
    assert (jwt.audience, jwt.algorithms) == (("owl", "other"), ("PS256", "ES256"))
    assert jwt.scopes == {"Viewer": "search", "Operator": "sync"}


def test_out_of_the_file(tmp_path: Path) -> None:
    text = '[access]\nkeys = "k.json"\nhosts = ["owl.example"]\n[access.jwt]\npreset = "ias"\nissuer = "https://t.example"\n'
    text += 'audience = ["client"]\nscopes = { "Owl Viewers" = "search" }\n'
    found = loaded(tmp_path, text)
    assert found.settings.access.jwt.scopes == {"Owl Viewers": "search"}
    rows = {row["setting"]: row for row in show(found)}
    assert rows["access.jwt.audience"]["value"] == "client"
    assert rows["access.jwt.scopes"]["value"] == "Owl Viewers=search"
    assert rows["access.hosts"] == {"setting": "access.hosts", "value": "owl.example", "origin": "owl-sap.toml"}


def test_messages_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"access\.jwt: audience is missing"):
        loaded(tmp_path, JWT__ISSUER="https://i.example", JWT__JWKS_PATH="keys.json")
    with pytest.raises(SettingsError, match=r"Viewer=search"):
        loaded(tmp_path, JWT__ISSUER="https://i.example", JWT__SCOPES="Viewer")
    with pytest.raises(SettingsError, match="did you mean"):
        loaded(tmp_path, "[access]\nkey = 'k.json'\n")


def test_no_variable_is_taken_for_a_file_with_its_value() -> None:
    """NAME_FILE names a file that holds the value of NAME; so no setting may end like that."""
    from app.src.settings.sources import OWN_VARIABLES

    assert [name for name in OWN_VARIABLES if name.endswith("_FILE")] == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.255.0.9", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", [None, "", "0.0.0.0", "::", "localhost.example", "127.0.0.1.nip.io", "2130706433", "127.1"]
)
def test_not_loopback(host: str | None) -> None:
    assert not is_loopback(host)
