"""Makes tests/data/tiny: small random models with transformers, and their logits for one prompt, in f32.

Needs torch and transformers (made with 2.13 and 5.24); the tests themselves do not. Run it as
`python tests/data/make_tiny_models.py`; the result does not depend on the machine, up to rounding.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

OUTPUT = Path(__file__).parent / "tiny"
NUM_TOKENS = 40  # more than the windows below
VOCAB_SIZE = 256
GAIN = 1.2  # standard deviation of weights, times the square root of their number of inputs

BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name → (model_type, dtype, what differs from BASE)
MODELS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama": (
        "llama",
        torch.float32,
        {
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    # Sizes that are no multiple of 32, three query heads for each key-value head, linear rope scaling.
    "llama-odd": (
        "llama",
        torch.bfloat16,
        {
            "hidden_size": 72,
            "intermediate_size": 100,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": 250,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "mistral": ("mistral", torch.bfloat16, {"head_dim": 32, "sliding_window": 16}),
    "qwen2": (
        "qwen2",
        torch.float16,
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", torch.bfloat16, {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        torch.bfloat16,
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        torch.bfloat16,
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    # The prompt is longer than the original context, so that the long factors apply.
    "phi3": (
        "phi3",
        torch.bfloat16,
        {
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "sliding_window": 24,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0 + 0.05 * j for j in range(24)],
                "long_factor": [1.0 + 0.25 * j for j in range(24)],
            },
        },
    ),
}


def make(name: str, seed: int) -> None:
    kind, dtype, changes = MODELS[name]
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **changes}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Large enough that every part shows in the logits, norms and biases included; not so large that
            # scores of 20 and more turn the rounding of a key to f16 in the cache into more than 1e-3.
            is_norm = "norm" in parameter_name
            mean = 0.0 if not is_norm or kind.startswith("gemma") else 1.0
            parameter.normal_(mean, 0.2 if parameter.dim() == 1 else GAIN / parameter.shape[1] ** 0.5)
    folder = OUTPUT / name
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    token_ids = np.random.default_rng(seed).integers(3, config.vocab_size, NUM_TOKENS)
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids)[None]).logits[0].numpy()
    np.savez(folder / "expected.npz", token_ids=token_ids.astype(np.int32), logits=logits.astype(np.float32))
    print(
        name, sum(path.stat().st_size for path in folder.iterdir()), "bytes, logits up to", abs(logits).max()
    )


if __name__ == "__main__":
    for index, model_name in enumerate(MODELS):
        make(model_name, 1000 + index)
