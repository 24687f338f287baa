"""What a user asks of a generation and what comes back: plain data, without an engine."""

from gapless.sampling.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from gapless.sampling.params import SamplingParams
from gapless.sampling.structured import StructuredOutputs

__all__ = [
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamChunk",
    "StructuredOutputs",
]
