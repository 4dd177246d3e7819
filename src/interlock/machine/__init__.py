"""The state machine kernel: lifecycles as data, and instances that follow them. No I/O."""

from interlock.machine.definition import Machine, Phrases
from interlock.machine.instance import Move, Observer, StateMachine

__all__ = ["Machine", "Move", "Observer", "Phrases", "StateMachine"]
