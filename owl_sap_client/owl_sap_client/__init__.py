"""A typed client of owl-sap-connector's REST API, on httpx."""

import sys

try:
    from owl_sap_client.client import AsyncClient, Client
except ModuleNotFoundError as error:
    if error.name != "httpx":
        raise
    raise ModuleNotFoundError(
        f'owl_sap_client needs httpx, which is not installed: {sys.executable} -m pip install "httpx>=0.27"',
        name=error.name,
    ) from None
from owl_sap_client.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    JobFailed,
    NotFound,
    NotReached,
    OwlSapError,
    ProblemError,
    ServerError,
    TooLarge,
    TooMany,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
    Unprocessable,
    WaitTimeout,
)
from owl_sap_client.sending import Retries

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Client",
    "Conflict",
    "Forbidden",
    "JobFailed",
    "NotFound",
    "NotReached",
    "OwlSapError",
    "ProblemError",
    "Retries",
    "ServerError",
    "TooLarge",
    "TooMany",
    "Unauthorized",
    "Unavailable",
    "UnexpectedAnswer",
    "Unprocessable",
    "WaitTimeout",
]
