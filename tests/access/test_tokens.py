"""Tokens: honest ones pass under every preset, forged ones are refused, each for its own reason."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from app.src.access.authentication import Authentication
from app.src.access.keys import Grant, create
from app.src.access.principal import AccessUnusable, Principal, Unauthenticated
from app.src.access.rates import RateExceeded, Rates
from app.src.access.tokens import KeySet
from app.src.settings import AccessSettings
from app.src.settings.model import JwtSettings
from tests.access.issuer import (
    AUDIENCE,
    ISSUER,
    claims,
    ec_key,
    encoded,
    jwk,
    jwks,
    packed,
    rsa_key,
    signed,
    with_shared_secret,
)

RSA, EC, STRANGER = rsa_key(1), ec_key(1), rsa_key(2)
SHOWN = jwks(
    jwk(RSA, "one"),
    jwk(EC, "two"),
    jwk(rsa_key(3), "for-pss", alg="PS256"),
    jwk(rsa_key(4), "for-encryption", use="enc"),
    jwk(rsa_key(5, bits=1024), "short"),
    {"kty": "oct", "kid": "shared", "k": encoded(b"s" * 32)},
)


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Principal]:
    """`ask(token, **settings of jwt)`: whose it is."""
    shown = tmp_path / "jwks.json"
    shown.write_bytes(SHOWN)

    def principal(token: str, **jwt: Any) -> Principal:
        settings = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_path": shown} | jwt
        authentication = Authentication(AccessSettings.model_validate({"jwt": settings}))
        authentication.open()
        return asyncio.run(authentication.principal(token))

    return principal


def test_a_good_token(ask: Callable[..., Principal]) -> None:
    principal = ask(signed(claims(), RSA))
    assert (principal.name, principal.scopes, principal.every_row) == (
        "somebody",
        frozenset(("search", "embed")),
        False,
    )
    assert principal.claims["mandt"] == "100"


def test_by_an_elliptic_curve(ask: Callable[..., Principal]) -> None:
    assert ask(signed(claims(), EC, "two")).name == "somebody"


def test_audiences_may_be_several(ask: Callable[..., Principal]) -> None:
    assert ask(signed(claims(aud=["other", AUDIENCE]), RSA)).name == "somebody"
    assert ask(signed(claims(aud="third"), RSA), audience=("owl", "third")).name == "somebody"


@pytest.mark.parametrize("late", [{"exp": -20}, {"nbf": 20}, {"iat": 20}])
def test_clocks_may_differ_a_little(
    ask: Callable[..., Principal], late: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = signed(claims(**{name: int(time.time()) + seconds for name, seconds in late.items()}), RSA)
    assert ask(token).name == "somebody"
    monkeypatch.setattr(JwtSettings, "leeway", 0.0)
    with pytest.raises(Unauthenticated):
        ask(token)


# ---------------------------------------------------------------------------------------------------------- forged ones


def _changed(token: str, part: int, what: Callable[[dict[str, Any]], None]) -> str:
    """A part written anew, the signature kept."""
    parts = token.split(".")
    content = json.loads(base64.urlsafe_b64decode(parts[part] + "=="))
    what(content)
    parts[part] = packed(content)
    return ".".join(parts)


def _now(seconds: int) -> int:
    return int(time.time()) + seconds


FORGED: dict[str, tuple[Callable[[], str], str]] = {
    "no signature": (lambda: f"{packed({'alg': 'none', 'kid': 'one'})}.{packed(claims())}.", "algorithm"),
    "no signature, written otherwise": (
        lambda: f"{packed({'alg': 'nOnE', 'kid': 'one'})}.{packed(claims())}.",
        "algorithm",
    ),
    "no algorithm": (lambda: signed(claims(), RSA, alg=None), "algorithm"),
    "the signature cut off": (lambda: signed(claims(), RSA).rpartition(".")[0] + ".", "signature"),
    "HS256 with the public key": (lambda: with_shared_secret(claims(), RSA), "algorithm"),
    "HS256 with a key of the set": (lambda: with_shared_secret(claims(), RSA, "shared"), "algorithm"),
    "signed by a stranger": (lambda: signed(claims(), STRANGER), "signature"),
    "a key nobody knows": (lambda: signed(claims(), STRANGER, "elsewhere"), "unknown_kid"),
    "no key named": (lambda: signed(claims(), RSA, None), "malformed_token"),
    "an endless kid": (lambda: signed(claims(), RSA, "k" * 300), "malformed_token"),
    "a kid that is no text": (lambda: _with_kid(7), "malformed_token"),
    "a key for encryption": (lambda: signed(claims(), rsa_key(4), "for-encryption"), "unknown_kid"),
    "a short key": (lambda: signed(claims(), rsa_key(5, bits=1024), "short"), "algorithm"),
    "a key bound to another algorithm": (lambda: signed(claims(), rsa_key(3), "for-pss"), "unknown_kid"),
    "an algorithm that is not allowed": (lambda: signed(claims(), RSA, alg="RS512"), "algorithm"),
    "ES256 named for an RSA key": (lambda: signed(claims(), RSA, "one", alg="ES256"), "unknown_kid"),
    "an EC signature under an RSA key's name": (lambda: signed(claims(), EC, "one"), "unknown_kid"),
    "RS256 named for an EC key": (lambda: signed(claims(), RSA, "two"), "unknown_kid"),
    "expired": (lambda: signed(claims(exp=_now(-120)), RSA), "expired_token"),
    "not yet valid": (lambda: signed(claims(nbf=_now(120)), RSA), "early_token"),
    "issued in the future": (lambda: signed(claims(iat=_now(120)), RSA), "early_token"),
    "no end": (lambda: signed(claims(exp=None), RSA), "incomplete_token"),
    "an end that is true": (lambda: signed(claims(exp=True), RSA), "expired_token"),
    "an end that never comes": (lambda: signed(claims(exp=float("inf")), RSA), ""),
    "another issuer": (lambda: signed(claims(iss="https://issuer.example.evil"), RSA), "issuer"),
    "the issuer with a slash": (lambda: signed(claims(iss=ISSUER + "/"), RSA), "issuer"),
    "no issuer": (lambda: signed(claims(iss=None), RSA), "incomplete_token"),
    "another audience": (lambda: signed(claims(aud="other"), RSA), "audience"),
    "an audience that begins as ours": (lambda: signed(claims(aud=AUDIENCE + "2"), RSA), "audience"),
    "other audiences": (lambda: signed(claims(aud=["other", "third"]), RSA), "audience"),
    "no audience": (lambda: signed(claims(aud=None), RSA), "incomplete_token"),
    "no subject": (lambda: signed(claims(sub=None), RSA), "incomplete_token"),
    "an endless subject": (lambda: signed(claims(sub="s" * 300), RSA), "incomplete_token"),
    "a subject for the log": (lambda: signed(claims(sub="me\nadmin logged in"), RSA), "incomplete_token"),
    "a subject that is a list": (lambda: signed(claims(sub=["me"]), RSA), "malformed_token"),
    "a payload changed": (
        lambda: _changed(signed(claims(), RSA), 1, lambda payload: payload.update(scope="admin")),
        "signature",
    ),
    "a header changed": (lambda: _changed(signed(claims(), RSA), 0, lambda header: header.update(x=1)), "signature"),
    "a key set of the forger's (jku)": (
        lambda: signed(claims(), STRANGER, jku="https://evil.example/jwks"),
        "signature",
    ),
    "a certificate of the forger's (x5u)": (
        lambda: signed(claims(), STRANGER, x5u="https://evil.example/c"),
        "signature",
    ),
    "a key brought along (jwk)": (lambda: signed(claims(), STRANGER, jwk=jwk(STRANGER, "one")), "signature"),
    "an extension (crit)": (lambda: signed(claims(), RSA, crit=["exp"], exp=1), "malformed_token"),
    "the extension b64": (lambda: signed(claims(), RSA, crit=["b64"], b64=True), "malformed_token"),
    "not an access token (typ)": (lambda: signed(claims(), RSA, typ="logout+jwt"), "malformed_token"),
    "too long": (lambda: signed(claims(filler="f" * 20_000), RSA), "malformed_token"),
    "a payload that is a list": (lambda: signed([1, 2], RSA), "malformed_token"),  # type: ignore[arg-type]
    "five parts (JWE)": (lambda: ".".join(["e30"] * 5), "malformed_token"),
    "one word": (lambda: "secret", "malformed_token"),
    "dots": (lambda: "..", "malformed_token"),
    "no base64": (lambda: "!!!.???.***", "malformed_token"),
    "deep JSON": (lambda: f"{encoded(b'[' * 8_000)}.e30.e30", "malformed_token"),
    "bytes that are no text": (lambda: f"{encoded(bytes(range(128, 200)))}.e30.e30", "malformed_token"),
    "letters beyond ASCII": (lambda: "ë.ö.ü", "malformed_token"),
}


def _with_kid(kid: Any) -> str:
    return f"{packed({'alg': 'RS256', 'kid': kid})}.{packed(claims())}.e30"


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_token_is_refused_for_its_reason(ask: Callable[..., Principal], name: str) -> None:
    forge, code = FORGED[name]
    token = forge()
    with pytest.raises(Unauthenticated) as refused:
        ask(token)
    assert refused.value.code == code or not code
    assert token not in str(refused.value)


def test_the_forger_signs_well_when_he_has_the_key(ask: Callable[..., Principal]) -> None:
    """Or the table above proves nothing."""
    assert ask(signed(claims(), RSA, jku="https://evil.example/jwks", x=1)).name == "somebody"
    assert ask(signed(claims(), RSA, typ="at+JWT")).name == "somebody"
    assert ask(signed(claims(), RSA, typ=None)).name == "somebody"


# -------------------------------------------------------------------------------------------------------------- scopes


@pytest.mark.parametrize(
    ("given", "settings", "scopes", "every_row"),
    [
        ({"scope": "search admin unknown"}, {}, {"search", "admin"}, False),
        ({"scope": ["search", 7, None]}, {}, {"search"}, False),
        ({"scope": {"search": True}}, {}, set(), False),
        ({"scope": None}, {}, set(), False),
        ({"scope": "every_row"}, {}, set(), False),
        ({"roles": ["Viewer"]}, {"scope_claim": "roles", "scopes": {"Viewer": "search"}}, {"search"}, False),
        ({"scope": "search"}, {"scopes": {"Viewer": "embed"}}, set(), False),
        ({"realm": {"roles": ["V"]}}, {"scope_claim": "realm.roles", "scopes": "V=search, W=sync"}, {"search"}, False),
        ({"a.b": "search"}, {"scope_claim": "a.b"}, {"search"}, False),
        ({"scope": "All"}, {"scopes": {"All": "every_row"}}, set(), True),
    ],
)
def test_scopes(
    ask: Callable[..., Principal], given: dict[str, Any], settings: dict[str, Any], scopes: set[str], every_row: bool
) -> None:
    principal = ask(signed(claims(**given), RSA), **settings)
    assert principal.scopes == scopes
    assert principal.every_row is every_row


# ------------------------------------------------------------------------------------------------------------- presets

XSUAA = {
    "preset": "xsuaa",
    "issuer": "https://tenant.authentication.eu10.hana.ondemand.com",
    "tenant": "0000-zid",
    "xs_appname": "owl!t1234",
    "audience": (),
}


def xsuaa(**changes: Any) -> dict[str, Any]:
    good = {
        "iss": XSUAA["issuer"] + "/oauth/token",  # type: ignore[operator]
        "aud": ["sb-owl!t1234", "owl!t1234", "openid"],
        "zid": "0000-zid",
        "scope": ["openid", "owl!t1234.search"],
        "user_name": "ANNA",
        "xs.user.attributes": {"Country": ["DE", "AT"]},
    }
    return claims(**good | changes)


def test_xsuaa(ask: Callable[..., Principal]) -> None:
    principal = ask(
        signed(xsuaa(), RSA, jku="https://tenant.authentication.eu10.hana.ondemand.com/token_keys"), **XSUAA
    )
    assert principal.scopes == {"search"}
    assert principal.claims["xs.user.attributes.Country"] == ["DE", "AT"]
    newer = xsuaa(**{"xs.user.attributes": None}, ext_cxt={"xs.user.attributes": {"Country": ["DE"]}})
    assert ask(signed(newer, RSA), **XSUAA).claims["xs.user.attributes.Country"] == ["DE"]


def test_xsuaa_attributes_come_from_where_the_issuer_puts_them(ask: Callable[..., Principal]) -> None:
    planted = xsuaa(**{"xs.user.attributes": None, "xs.user.attributes.Country": "US"})
    assert "xs.user.attributes.Country" not in ask(signed(planted, RSA), **XSUAA).claims


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"zid": "another"}, "tenant"),
        ({"zid": None}, "tenant"),
        ({"aud": ["other!t1", "openid"]}, "audience"),
        ({"iss": "https://other.authentication.eu10.hana.ondemand.com/oauth/token"}, "issuer"),
    ],
)
def test_xsuaa_of_somebody_else(ask: Callable[..., Principal], change: dict[str, Any], code: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        ask(signed(xsuaa(**change), RSA), **XSUAA)
    assert refused.value.code == code


@pytest.mark.parametrize("scope", ["other!t1.search", "search", "owl!t1234.search.more", "owl!t12345.search"])
def test_xsuaa_scopes_of_other_applications_are_nothing(ask: Callable[..., Principal], scope: str) -> None:
    assert ask(signed(xsuaa(scope=[scope]), RSA), **XSUAA).scopes == set()


IAS = {
    "preset": "ias",
    "issuer": "https://tenant.accounts.ondemand.com/",
    "tenant": "app-tid",
    "scopes": {"Viewers": "search"},
}


def ias(**changes: Any) -> dict[str, Any]:
    good = {
        "iss": "https://tenant.accounts.ondemand.com",
        "app_tid": "app-tid",
        "groups": ["Viewers", "Everyone", "admin"],
        "scope": None,
    }
    return claims(**good | changes)


def test_ias(ask: Callable[..., Principal]) -> None:
    assert ask(signed(ias(), RSA), **IAS).scopes == {"search"}
    assert ask(signed(ias(groups="Viewers"), RSA), **IAS).scopes == {"search"}
    assert ask(signed(ias(app_tid=None, zone_uuid="app-tid"), RSA), **IAS).scopes == {"search"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"app_tid": "other"}, "tenant"),
        ({"app_tid": "other", "zone_uuid": "app-tid"}, "tenant"),
        ({"app_tid": None}, "tenant"),
        ({"iss": "https://other.accounts.ondemand.com"}, "issuer"),
        ({"aud": "another-client"}, "audience"),
    ],
)
def test_ias_of_somebody_else(ask: Callable[..., Principal], change: dict[str, Any], code: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        ask(signed(ias(**change), RSA), **IAS)
    assert refused.value.code == code


def test_presets_know_where_keys_are() -> None:
    from app.src.access.tokens import Tokens

    assert Tokens(JwtSettings.model_validate(XSUAA)).keys.source == XSUAA["issuer"] + "/token_keys"  # type: ignore[operator]
    known = Tokens(JwtSettings.model_validate(IAS | {"audience": "a"}))
    assert known.keys.source == "https://tenant.accounts.ondemand.com/oauth2/certs"


# --------------------------------------------------------------------------------------------------------- changed keys


def test_a_token_ends_with_its_key_and_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tmp_path / "jwks.json"
    shown.write_bytes(SHOWN)
    monkeypatch.setattr(JwtSettings, "leeway", 0.0)
    settings = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_path": shown}
    authentication = Authentication(AccessSettings.model_validate({"jwt": settings}))
    authentication.open()
    monkeypatch.setattr("app.src.access.files.LOOK_SECONDS", 0.0)
    token, short = signed(claims(), RSA), signed(claims(exp=_now(120)), RSA)

    async def asked() -> str:
        for each in (token, short):
            await authentication.principal(each)
        with monkeypatch.context() as clock:
            at(clock, time.time() + 121)
            with pytest.raises(Unauthenticated, match="expired"):
                await authentication.principal(short)
        shown.write_bytes(jwks(jwk(STRANGER, "one")))
        for _ in range(3000):
            try:
                await authentication.principal(token)
            except Unauthenticated as refused:
                return refused.code
            await asyncio.sleep(0.01)
        return "a key that was taken out is still believed"

    assert asyncio.run(asked()) == "signature"


def at(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """PyJWT's clock shows this time since the epoch."""

    class Then(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Then:
            return cls.fromtimestamp(seconds, tz)

    patch.setattr("jwt.api_jwt.datetime", Then)


@pytest.mark.parametrize(
    "content", [None, b"", b"[]", b'{"keys": []}', b'{"keys": {"a": 1}}', b"{" * 100, b" " * 300_000]
)
def test_a_key_set_that_is_none_ends_the_start(tmp_path: Path, content: bytes | None) -> None:
    shown = tmp_path / "jwks.json"
    if content is not None:
        shown.write_bytes(content)
    settings = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_path": shown}
    with pytest.raises(AccessUnusable, match="jwks_path"):
        Authentication(AccessSettings.model_validate({"jwt": settings})).open()


def from_file(path: Path) -> Authentication:
    settings = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_path": path}
    return Authentication(AccessSettings.model_validate({"jwt": settings}))


def test_an_unreadable_key_set_is_not_read_again_for_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "jwks.json"
    shown.write_bytes(SHOWN)
    keys = KeySet(shown, ["RS256"])
    keys.open()
    shown.write_bytes(jwks(jwk(STRANGER, "new")))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Path, "open", refuse)
    asked = 0
    for _ in range(50):
        if keys.due():
            asked += 1
            keys.refresh().result(10)
    assert asked == 1
    assert "Too many open files" in (keys.fault or "")
    monkeypatch.setattr("app.src.access.files.LOOK_SECONDS", 0.0)
    assert keys.due()


def test_a_key_set_that_could_not_be_read_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The issuer's keys have changed just when too many files are open: the new one is taken soon, the old one not."""
    shown = tmp_path / "jwks.json"
    shown.write_bytes(SHOWN)
    made = from_file(shown)
    made.open()
    monkeypatch.setattr("app.src.access.files.LOOK_SECONDS", 0.0)
    shown.write_bytes(jwks(jwk(STRANGER, "new")))

    async def too_many() -> None:
        """The keys are read in a thread while the token is checked by those in hand."""
        for _ in range(3):
            assert (await made.principal(signed(claims(), RSA))).name == "somebody"
            assert made._tokens is not None
            await asyncio.wrap_future(made._tokens.keys.refresh())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        asyncio.run(too_many())
    assert len(caplog.records) == 1, "once, and not at each look"
    assert asyncio.run(made.principal(signed(claims(), STRANGER, "new"))).name == "somebody"
    with pytest.raises(Unauthenticated):
        asyncio.run(made.principal(signed(claims(), RSA)))


def test_a_token_is_not_the_key_of_the_same_name(ask: Callable[..., Principal], tmp_path: Path) -> None:
    """Whoever chooses users' names at the issuer could otherwise take a key's requests away."""
    key, _ = create(tmp_path / "keys.json", Grant("web", ("search",), rate="1/minute", concurrency=1))
    token = ask(signed(claims(sub=key.id), RSA))
    assert token.name == key.principal.name
    assert token.identity != key.principal.identity
    assert (token.credential, key.principal.credential) == ("token", "key")
    rates = Rates("2/minute", 1)
    rates.enter(key.principal)
    rates.enter(token)
    for each in (key.principal, token):
        with pytest.raises(RateExceeded, match="concurrency"):
            rates.enter(each)
        rates.leave(each)
    with pytest.raises(RateExceeded, match="1/minute"):
        rates.enter(key.principal)
    rates.enter(token)
