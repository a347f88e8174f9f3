"""Fixtures of the command line that these tests share with others."""

from tests.surface.conftest import hashing, make_scene

__all__ = ["hashing", "make_scene"]
