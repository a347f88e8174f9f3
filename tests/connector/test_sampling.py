"""Texts from all over a table: which are taken, and that they are those of a sync."""

from __future__ import annotations

from typing import Any

import pytest

from connector.embedding import VectorCache
from connector.model import CollectionSpec, TableRef
from connector.sampling import SPARE, sample_texts

assert VectorCache is not None
