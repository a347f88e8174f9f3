"""What the tests of monitoring share."""

from tests.surface.conftest import hashing as hashing
from tests.surface.conftest import make_scene as make_scene
