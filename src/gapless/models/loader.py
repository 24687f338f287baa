"""From a path to a Program: the one entry that the engine uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.config import ACTIVATIONS, KV_DTYPES
from gapless.errors import InvalidRequestError
from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import Domain, Graph
from gapless.graph.memory_plan import plan_memory
from gapless.graph.passes import fuse
from gapless.loading import Checkpoint, open_checkpoint
from gapless.models.config import ModelConfig
from gapless.models.kv_cache import kv_bytes_per_token, layer_kv_dtypes
from gapless.models.registry import Architecture, find_architecture, read_config
from gapless.models.tensors import resolve
from gapless.quantization import QuantConfig, load_weights
from gapless.quantization.load import read_f32
from gapless.quantization.policy import Packing, choose_packing
from gapless.quantization.source import TensorSource
from gapless.sampling import check

if TYPE_CHECKING:
    from gapless import _native

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Network:
    """A model as its checkpoint describes it, before any weight is read."""

    checkpoint: Checkpoint
    architecture: Architecture
    config: ModelConfig
    graph: Graph  # not fused
    sources: Mapping[str, TensorSource]


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run. The checkpoint stays open: tokenizers read their vocabulary from it."""

    program: _native.Program
    config: ModelConfig
    checkpoint: Checkpoint
    architecture: str
    weight_types: Mapping[str, int]  # packed type → bytes
    kv_bytes_per_token: int


@dataclass(frozen=True)
class MemoryEstimate:
    """What running a model needs, in bytes; weights and arena within a few percent."""

    weight_bytes: int
    kv_bytes_per_token: int
    arena_bytes: int


def describe(checkpoint: Checkpoint, max_model_len: int | None = None) -> Network:
    """Reads the configuration, builds the graph and finds the tensors. LoadError if anything is amiss.

    `max_model_len` (tokens; None: the model's own) matters for models with other frequencies for long
    contexts. InvalidRequestError if it is more than the model was made for.
    """
    architecture = find_architecture(checkpoint)
    config = read_config(checkpoint, architecture)
    if max_model_len is not None:
        if not 0 < max_model_len <= config.context_length:
            raise InvalidRequestError(
                f"max_model_len is {max_model_len}; the model's context is {config.context_length} tokens.",
                "max_model_len",
            )
        config = replace(config, context_length=max_model_len)
    graph = architecture.build(GraphBuilder(), config)
    sources = resolve(graph.weights, architecture.tensors(checkpoint.kind), checkpoint, config.head_dim)
    return Network(checkpoint, architecture, config, graph, sources)


def load_model(
    path: str | os.PathLike[str] | Checkpoint,
    quant: str | QuantConfig | None = None,
    activations: str = "a8",
    num_threads: int | None = None,
    max_step_tokens: int = 512,
    max_logit_rows: int = 32,
    max_model_len: int | None = None,
    kv_dtype: str = "f16",
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Loads a GGUF file or Hugging Face folder for steps of at most `max_step_tokens` tokens.

    A checkpoint that is open already is taken over: it is closed if this fails.

    `quant` ("int8", "int4:64", …) quantizes plain weights. `activations`: "a8" rounds what integer weights
    multiply to int8, "a16" does not. `num_threads` is for packing. `kv_dtype`: "f16", "bf16" or
    "int8"; layers whose keys are too large for int8 stay f16, with a warning. `progress(bytes_done,
    bytes_total)`. Raises LoadError for what the checkpoint, InvalidRequestError for what the caller got
    wrong.
    """
    from gapless import _native
    from gapless.graph.lowering import lower

    check.one_of("activations", activations, ACTIVATIONS)
    check.one_of("kv_dtype", kv_dtype, KV_DTYPES)
    if isinstance(quant, str):
        quant = QuantConfig.parse(quant)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(Path(path))
    try:
        network = describe(checkpoint, max_model_len)
        packings = choose_packing(network.graph, network.sources, quant)
        threads = num_threads or int(_native.cpu_info()["num_threads"])
        weights = load_weights(checkpoint, network.sources, packings, threads, progress)
        graph = fuse(network.graph, integer_weights(packings, activations))
        kv_dtypes = _kv_dtypes(network, kv_dtype, lambda name: weights[name])
        program = lower(
            graph,
            weights,
            max_step_tokens=max_step_tokens,
            max_logit_rows=max_logit_rows,
            kv_dtypes=kv_dtypes,
        )
    except BaseException:
        checkpoint.close()
        raise
    types: dict[str, int] = {}
    for name in packings:
        types[weights[name].type] = types.get(weights[name].type, 0) + weights[name].nbytes
    logger.info(
        "%s: %s, weights %s, activations %s", checkpoint.path, network.architecture.name, types, activations
    )
    return LoadedModel(
        program, network.config, checkpoint, network.architecture.name, types, _kv_bytes(network, kv_dtypes)
    )


def integer_weights(packings: Mapping[str, Packing], activations: str) -> frozenset[str]:
    """Names of the matrices whose inputs are to be quantized."""
    if activations == "a16":
        return frozenset()
    return frozenset(name for name, packing in packings.items() if packing.is_integer)


def estimate_memory(
    checkpoint: Checkpoint,
    quant: QuantConfig | None = None,
    activations: str = "a8",
    max_step_tokens: int = 512,
    max_logit_rows: int = 32,
    kv_dtype: str = "f16",
) -> MemoryEstimate:
    """What `load_model` with these arguments would need, without reading more than biases. Errors as
    there."""
    check.one_of("kv_dtype", kv_dtype, KV_DTYPES)
    network = describe(checkpoint)
    packings = choose_packing(network.graph, network.sources, quant)
    weight_bytes = 0.0
    for name, source in network.sources.items():
        num_values = 1
        for size in source.weight.shape:
            num_values *= size
        weight_bytes += num_values * (packings[name].bytes_per_value if name in packings else 4)
    plan = plan_memory(
        fuse(network.graph, integer_weights(packings, activations)),
        {Domain.TOKEN: max_step_tokens, Domain.LOGIT: max_logit_rows},
        lambda width: -(-width // 32) * 48,  # the native core's own figure is not needed for an estimate
    )
    kv_dtypes = _kv_dtypes(network, kv_dtype, lambda name: read_f32(checkpoint, network.sources[name]))
    return MemoryEstimate(int(weight_bytes), _kv_bytes(network, kv_dtypes), plan.arena_bytes)


def _kv_dtypes(network: Network, kv_dtype: str, read: Callable[[str], Any]) -> tuple[str, ...]:
    """The type of each layer's cache; `read` gives a weight by its name."""
    num_layers = network.config.num_layers
    names = {layer: f"layers.{layer}.k.bias" for layer in range(num_layers)}
    biases = {layer: read(name) for layer, name in names.items() if name in network.sources}
    dtypes = layer_kv_dtypes(kv_dtype, num_layers, biases)
    others = [layer for layer, dtype in enumerate(dtypes) if dtype != kv_dtype]
    if others:
        logger.warning(
            "%s: the KV cache of the layers %s stays f16, their keys are too large for %s.",
            network.checkpoint.path,
            ", ".join(map(str, others)),
            kv_dtype,
        )
    return dtypes


def _kv_bytes(network: Network, kv_dtypes: Sequence[str]) -> int:
    return kv_bytes_per_token(kv_dtypes, network.config.num_kv_heads, network.config.head_dim)
