"""Types of the native core (built from csrc/)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]

def cpu_info() -> dict[str, Any]:
    """`isa` (chosen), `isas` (all this host can run), `num_threads` (default pool size),
    `cgroup_cpu_quota` (CPUs; infinity without one)."""

def a8_row_bytes(cols: int) -> int:
    """Bytes of one quantized activation row of `cols` values."""

class PackedWeight:
    """A weight matrix [rows = output features, cols = input features] in the layout the kernels read."""

    @staticmethod
    def pack(
        raw: U8,
        ggml_type: int,
        rows: int,
        cols: int,
        quant: str = "none",
        group_size: int = 32,
        row_map: I32 | None = None,
        num_threads: int = 1,
        release_source: bool = False,
    ) -> PackedWeight:
        """Packs ggml blocks (or plain f32/f16/bf16 rows).

        `rows` counts the packed rows; `row_map[rows]` names the source row of each (default: the same).
        `quant` "int8" or "int4" quantizes plain sources (InstantQuant); `group_size` 32, 64, 128 or -1 for a
        whole row. `release_source` gives the pages of `raw` back while packing: only for read-only file
        mappings, which can be read again (not with a `row_map`). Releases the GIL. Raises ValueError on sizes
        that do not fit `raw`.
        """
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def type(self) -> str:
        """f32, bf16, f16, int4, int5, int6 or int8."""
    @property
    def nbytes(self) -> int: ...
    def dequantize(self) -> F32:
        """The exact values, [rows, cols]."""

def linear(
    weight: PackedWeight, x: F32, activations: str = "a8", isa: str | None = None, num_threads: int = 1
) -> F32:
    """x [M, cols] times the transposed weight: [M, rows]. For tests and benchmarks."""

class ProgramBuilder:
    """Takes the flat list of ops. Buffers are named by the integer that `buffer` returns; -1 is "none".

    `kv_dtypes` ("f16", "bf16" or "int8") has one entry for each layer of the KV cache; all layers share
    `num_kv_heads` and `head_dim`.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_logit_rows: int,
        vocab_size: int,
        kv_dtypes: Sequence[str],
        num_kv_heads: int,
        head_dim: int,
    ) -> None: ...
    def buffer(self, domain: str, row_bytes: int, offset: int) -> int:
        """A planned activation buffer: `domain` "token" (max_tokens rows) or "logit" (max_logit_rows rows),
        at byte `offset` (multiple of 64) of the arena; `row_bytes` a multiple of 4. Row r starts at offset +
        r * row_bytes."""
    def rope(self, inv_freq: F32, scale: float = 1.0) -> int:
        """A rope table (one pair of cos/sin rows per token and step): `inv_freq` [rotary_dim / 2]; cos and
        sin are multiplied by `scale`. Returns its id."""
    # Ops, in order of execution; those on "token" buffers form the body, those on "logit" buffers the head.
    def embed(self, weight: PackedWeight, scale: float, out: int) -> None:
        """out[r] = scale * weight[token_id[r]]"""
    def rms_norm(self, x: int, weight: F32, eps: float, out: int = -1, out_quantized: int = -1) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight, as f32 and/or as a8 rows (row_bytes =
        a8_row_bytes(width))."""
    def add_rms_norm(self, x: int, weight: F32, eps: float, residual: int) -> None:
        """residual += rms_norm(x) (Gemma's post-norms)."""
    def add(self, x: int, residual: int) -> None:
        """residual += x"""
    def quantize(self, x: int, out_quantized: int) -> None: ...
    def linear(
        self,
        x: int,
        x_quantized: int,
        segments: Sequence[tuple[PackedWeight, F32 | None, int, int, bool]],
    ) -> None:
        """For each (weight, bias, out, out_column, accumulate): out[:, out_column:] (+)= x @ weight.T + bias.

        Integer weights read `x_quantized` when it is given (a8), all others `x` (a16)."""
    def gated_linear(
        self, x: int, x_quantized: int, gate: PackedWeight, up: PackedWeight, activation: str, out: int
    ) -> None:
        """out = act(x @ gate.T) * (x @ up.T); activation: silu, gelu_tanh, gelu, relu."""
    def rope_cache(
        self,
        qkv: int,
        layer: int,
        num_heads: int,
        rope: int,
        q_scale: float,
        q_norm: F32 | None = None,
        k_norm: F32 | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        """Per token row [q heads | k heads | v heads] of head_dim each: optional per-head RMS norm of q and
        k, rope (halves), q *= q_scale in place, k and v go into the layer's cache."""
    def attention(
        self, qkv: int, layer: int, num_heads: int, out: int, window: int = 0, softcap: float = 0.0
    ) -> None:
        """Causal attention of the q heads over the cache -> out [num_heads * head_dim]. A token at position p
        sees positions > p - window (0: all)."""
    def gather(self, x: int, out: int) -> None:
        """Copies the rows that need logits from a token buffer to a logit buffer."""
    def softcap(self, x: int, cap: float) -> None:
        """x = cap * tanh(x / cap) in place."""
    def states(self, x: int) -> None:
        """Tells that the ops so far leave the final states of the head's rows, as f32, in logit buffer `x`.
        Embeddings are pooled from them; without it there are none."""
    def part(self, x: int) -> None:
        """Tells that rows may go through the token ops so far in one step and through those that follow in
        another, and that all the latter need of them is their rows of token buffer `x`."""
    def build(self, arena_bytes: int, logits: int) -> Program:
        """Checks every op and ends the list. `logits` is the logit buffer [vocab_size] that the sampler
        reads."""

class Program:
    @property
    def arena_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def num_ops(self) -> int: ...

class Sampling:
    """What is to come of one slot; see gapless.SamplingParams for the meaning of most fields.

    `pooling` "last", "mean" or "cls": nothing is sampled, the prompt is embedded; `max_tokens` may be 0.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        num_logprobs: int = -1,
        num_prompt_logprobs: int = -1,
        logit_bias: dict[int, float] | None = None,
        constrained: bool = False,
        pooling: str = "none",
        normalize: bool = True,
    ) -> None: ...

class Executor:
    """The loop: its own thread, no GIL. All methods are thread-safe and return at once, but for `wait` and
    `close`."""

    def __init__(
        self,
        program: Program,
        *,
        num_blocks: int,
        max_num_seqs: int,
        max_seq_len: int,
        max_step_tokens: int,
        num_threads: int,
        trace: bool = False,
    ) -> None: ...
    block_size: int
    @property
    def kv_bytes(self) -> int: ...
    @property
    def num_threads(self) -> int: ...
    def admit(
        self,
        slot: int,
        sequence_id: int,
        token_ids: I32,
        blocks: I32,
        sampling: Sampling,
        num_cached: int = 0,
        num_prompt: int = -1,
        priority: int = 0,
    ) -> None:
        """Occupies `slot` with a sequence; `blocks` cover at least the prompt plus one token, or the slot
        waits for `extend`. The first `num_cached` tokens are already in the cache. Tokens after the first
        `num_prompt` (-1: all) are output of a preempted sequence, which goes on. Lower `priority` prefills
        first. Nothing can be cached of a prompt that is pooled by "mean" or "cls"."""
    def extend(self, slot: int, sequence_id: int, blocks: I32) -> None: ...
    def cancel(self, slot: int, sequence_id: int) -> None:
        """Ends with an `abort` event, unless the sequence has ended by then."""
    def preempt(self, slot: int, sequence_id: int) -> None:
        """Ends with a `preempted` event, unless the sequence has ended by then."""
    def set_mask(self, slot: int, sequence_id: int, output_index: int, mask: U32) -> None:
        """The tokens that output number `output_index` (0 is the first) of a constrained sequence may be: bit
        t % 32 of word t / 32 for token t. The slot waits for it; the others do not."""
    def set_target_tpot(self, seconds: float) -> None:
        """How long a step with prefill may take while other sequences decode; 0: 1.6 times as long as
        without, more while more sequences wait for their prompts than decode."""
    def wait(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """Blocks (without the GIL) until there are events or the time is over. Events, in order:

        ("token", sequence_id, token_id, logprob | None, rank | None, top: list[(token_id, logprob)])
        ("prompt_logprobs", sequence_id, position, logprob, rank, top)      for prompt token `position` (1...)
        ("embedding", sequence_id, vector)      of a prompt that is pooled: f32 [hidden_size]; "stop" follows
        ("prefilled", sequence_id, num_computed)  more blocks of a prompt are filled
        ("finished", sequence_id, reason, num_computed)   reason: "stop" | "length" | "abort" | "error" |
                                                "preempted"; the slot is free, the keys and values of the
                                                first num_computed tokens are in its blocks
        ("blocks_low", sequence_id, num_blocks) the slot needs that many more blocks to go on
        ("failed", message)                     the loop has died; nothing more comes
        A stop token is reported as a "token" event before "finished".
        """
    def stats(self) -> dict[str, Any]:
        """num_steps, num_rows, num_prefill_rows, num_sliced_steps (in which prompts went through a part of
        the layers), busy_s (in steps), work_s (with the gaps, of work that has ended), gap_p50_us, gap_p99_us
        (of the latest 4096), gap_histogram (of all: counts of gaps in [2^i, 2^(i+1)) us)."""
    def take_trace(self) -> list[tuple[float, float, float, int, int, int]]:
        """(begin_s, forward_end_s, end_s, num_decode_rows, num_prefill_rows, num_sliced_rows) of each step
        since the last call, by `time.perf_counter`. Sliced rows have not come through the last layer. Empty
        without `trace`."""
    def close(self) -> None: ...
