"""The orchestrator process: consumes step results, activates the next steps and finalizes jobs.

Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlock.orchestrator.process import Orchestrator
    from interlock.orchestrator.run import orchestrating, run_orchestrator
    from interlock.orchestrator.settings import OrchestratorSettings
    from interlock.orchestrator.stats import EventStatistics

_MODULES = {
    "EventStatistics": "stats",
    "Orchestrator": "process",
    "OrchestratorSettings": "settings",
    "orchestrating": "run",
    "run_orchestrator": "run",
}

__all__ = ["EventStatistics", "Orchestrator", "OrchestratorSettings", "orchestrating", "run_orchestrator"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'interlock.orchestrator' has no attribute {name!r}")
    return getattr(import_module(f"interlock.orchestrator.{_MODULES[name]}"), name)
