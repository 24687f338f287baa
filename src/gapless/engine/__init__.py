"""Decides who runs: requests wait, take a slot and blocks of the KV cache, and end in exactly one terminal
event.

Sends commands to the native executor and reads its events; never computes anything of the model itself.
"""

from gapless.engine.engine import Engine, EngineLimits
from gapless.engine.events import FinishReason
from gapless.engine.handle import RequestHandle
from gapless.engine.request import Request, SequenceState

__all__ = ["Engine", "EngineLimits", "FinishReason", "Request", "RequestHandle", "SequenceState"]
