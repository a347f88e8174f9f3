"""What the processes that tests fork have imported already."""

import functools
import gc

import hdbcli.dbapi  # noqa: F401
import torch  # noqa: F401
import typer.main
import uvicorn.protocols.http.h11_impl  # noqa: F401

import app.src.api.server
import app.src.cli
import app.src.jobs
import app.src.service.service
import app.src.service.wiring

# One command for all forks: building it takes longer than many verbs.
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(app.src.cli.app)
gc.freeze()  # a collection in a fork would copy the memory that all share
