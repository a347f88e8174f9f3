"""What the processes that tests fork have imported already."""

import hdbcli.dbapi  # noqa: F401
import torch  # noqa: F401
import uvicorn.protocols.http.h11_impl  # noqa: F401

import app.src.api.server
import app.src.cli
import app.src.jobs
import app.src.service.service
import app.src.service.wiring  # noqa: F401
