"""What `/api/tags`, `/api/show` and `/api/ps` tell of the one model that there is."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from typing import Any

from gapless.server.chat import ChatStyle
from gapless.server.messages import ModelFacts
from gapless.server.ollama.answers import timestamp
from gapless.server.ollama.fields import tagged_name
from gapless.server.service import Service

_NEVER = "2999-12-31T23:59:59Z"
# What the numbers in `general.file_type` of a GGUF file stand for.
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    32: "BF16",
}


def tags(service: Service) -> dict[str, Any]:
    """The models on this server. NotReadyError while it is not known what is in the file."""
    return {"models": [{**_entry(service), "modified_at": _modified_at(service)}]}


def running(service: Service) -> dict[str, Any]:
    """The models in memory."""
    context_length = service.require_ready().max_model_len
    entry = {"expires_at": _NEVER, "size_vram": 0, "context_length": context_length}
    return {"models": [{**_entry(service), **entry}]}


def show(service: Service) -> dict[str, Any]:
    """All that is known of the model."""
    facts = service.require_ready()
    parameters = [f"{name:<30} {value:g}" for name, value in sorted(facts.generation_defaults.items())]
    return {
        "modelfile": f"FROM {tagged_name(service)}\n",
        "parameters": "\n".join(parameters),
        "template": ChatStyle(service).template,
        "details": _details(service, facts),
        "model_info": _model_info(facts),
        "capabilities": _capabilities(service),
        "modified_at": _modified_at(service),
    }


def _entry(service: Service) -> dict[str, Any]:
    facts = service.require_ready()
    name = tagged_name(service)
    # Clients tell models apart by it; to hash gigabytes for that would take longer than to load them.
    digest = hashlib.sha256(f"{name} {facts.file_bytes}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "size": facts.file_bytes,
        "digest": digest,
        "details": _details(service, facts),
    }


def _details(service: Service, facts: ModelFacts) -> dict[str, Any]:
    file_type = facts.metadata.get("general.file_type", -1)
    return {
        "parent_model": "",
        "format": "gguf" if service.model_path.suffix == ".gguf" else "safetensors",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": _parameter_size(facts.num_parameters),
        "quantization_level": _FILE_TYPES.get(file_type, facts.quantization),
    }


def _parameter_size(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def _model_info(facts: ModelFacts) -> dict[str, Any]:
    architecture = facts.architecture
    return {
        **facts.metadata,
        "general.architecture": architecture,
        "general.parameter_count": facts.num_parameters,
        # Clients fit their prompts into it: what counts is how much this server takes.
        f"{architecture}.context_length": facts.max_model_len,
        f"{architecture}.embedding_length": facts.hidden_size,
    }


def _capabilities(service: Service) -> list[str]:
    style, facts = ChatStyle(service), service.tokenizer_facts
    found = {
        "completion": True,
        "embedding": True,
        "insert": facts is not None and facts.can_fill_in,
        "tools": style.shows_tools,
        "thinking": style.reasoning is not None,
    }
    return [name for name, is_there in found.items() if is_there]


def _modified_at(service: Service) -> str:
    return timestamp(datetime.fromtimestamp(service.model_path.stat().st_mtime, timezone.utc))
