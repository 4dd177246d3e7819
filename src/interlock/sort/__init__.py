"""The distributed sort: a master and workers that sample, sort, shuffle and merge, each phase a state."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.sort.api import sort

__all__ = ["sort"]

# gRPC reads it once, when it is imported; its errors are raised anyway. Set here, before any module imports gRPC.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def __getattr__(name: str) -> Any:
    """Import the function when it is used: it needs numpy and gRPC, which many modules of this package do not."""
    if name == "sort":
        return import_module("interlock.sort.api").sort
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
