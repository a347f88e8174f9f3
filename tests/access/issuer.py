"""An issuer of tokens: keys of its own, honest tokens, and whatever a forger would put together."""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "owl"


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def packed(part: Any) -> str:
    return encoded(json.dumps(part).encode())


@functools.cache
def rsa_key(number: int, bits: int = 2048) -> rsa.RSAPrivateKey:
    """Made once in a run: that takes a while."""
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@functools.cache
def ec_key(number: int) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def jwk(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, kid: str, **more: Any) -> dict[str, Any]:
    if isinstance(key, rsa.RSAPrivateKey):
        public = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        public = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**public, "kid": kid, "use": "sig"} | more


def jwks(*keys: Mapping[str, Any]) -> bytes:
    return json.dumps({"keys": keys}).encode()


def claims(**changes: Any) -> dict[str, Any]:
    """Good ones; a change to None takes a claim out."""
    now = int(time.time())
    good = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "somebody",
        "iat": now,
        "exp": now + 300,
        "scope": "search embed",
        "mandt": "100",
    }
    return {name: value for name, value in (good | changes).items() if value is not None}


def signed(
    payload: Mapping[str, Any],
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey,
    kid: str | None = "one",
    **header: Any,
) -> str:
    """By hand, so that nothing stops a forger: `alg` says one thing in the header, the key signs as it can."""
    algorithm = "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"
    head = {"alg": algorithm, "typ": "JWT", "kid": kid} | header
    head = {name: value for name, value in head.items() if value is not None}
    body = f"{packed(head)}.{packed(payload)}"
    return f"{body}.{encoded(_signature(body.encode(), key))}"


def _signature(body: bytes, key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(key, rsa.RSAPrivateKey):
        return key.sign(body, padding.PKCS1v15(), hashes.SHA256())
    r, s = decode_dss_signature(key.sign(body, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def with_shared_secret(payload: Mapping[str, Any], key: rsa.RSAPrivateKey, kid: str = "one") -> str:
    """HS256 with the public key, which everybody has, as the secret."""
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    body = f"{packed({'alg': 'HS256', 'typ': 'JWT', 'kid': kid})}.{packed(payload)}"
    return f"{body}.{encoded(hmac.digest(public, body.encode(), hashlib.sha256))}"
