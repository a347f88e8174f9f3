"""Sentence encoders as ONNX graphs, also in calibrated INT8. Needs the extra `onnx`, imported only when used."""

from __future__ import annotations

from importlib.util import find_spec

from connector.extras import install_command

from ..backends import DeviceUnavailable


def needs(*libraries: str) -> None:
    """Raise DeviceUnavailable if one of these libraries is not installed."""
    for name in libraries:
        if find_spec(name) is None:
            raise DeviceUnavailable(
                f"ONNX graphs need the library {name}, which is not installed: {install_command('onnx')}"
            )
