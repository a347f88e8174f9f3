"""What the commands that tests fork have imported already."""

import hdbcli.dbapi  # noqa: F401
import torch  # noqa: F401

import app.src.cli
import app.src.service.service
import app.src.service.wiring  # noqa: F401
