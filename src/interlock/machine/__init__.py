"""The machine kernel: lifecycles as data, and things that live through them. No I/O in here."""

from interlock.machine.definition import Machine, Phrases
from interlock.machine.instance import Move, Observer, StateMachine

__all__ = ["Machine", "Move", "Observer", "Phrases", "StateMachine"]
