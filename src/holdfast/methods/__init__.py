"""The methods: one file each."""

from holdfast.methods.method import Method
from holdfast.methods.npc import NPC

__all__ = ["NPC", "Method"]
