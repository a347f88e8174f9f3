"""Registries: dictionaries of functions that decorators fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Function = TypeVar("Function", bound=Callable[..., Any])


class Registry(dict[Key, Function], Generic[Key, Function]):
    """Functions by key. The decorator `@REGISTRY(key, ...)` adds a function under each key."""

    def __call__(self, *keys: Key) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            self.update(dict.fromkeys(keys, function))
            return function

        return register
