"""Makes tests/data/golden/embeddings-*.npz: pooled states of real models after their last norm.

They are PyTorch's, in f32, kept as f16, not normalized. The weights are those of the GGUF files, dequantized
by transformers; the prompts are those of the *-dev.json beside the results. Needs torch and transformers
(made with 2.13 and 5.24); the tests themselves do not. Run it as
`python tests/data/make_embeddings.py FOLDER_OF_THE_GGUF_FILES`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

GOLDEN = Path(__file__).parent / "golden"
MODELS = {
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m.Q4_K_M.gguf",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
}


def make(name: str, folder: Path) -> None:
    cases = json.loads((GOLDEN / f"{name}-dev.json").read_text())["cases"]
    model = transformers.AutoModel.from_pretrained(
        folder, gguf_file=MODELS[name], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    pooled: dict[str, list[torch.Tensor]] = {"last": [], "mean": [], "cls": []}
    for case in cases.values():
        with torch.no_grad():
            states = model(torch.tensor([case["token_ids"]])).last_hidden_state[
                0
            ]  # [num_tokens, hidden_size]
        pooled["last"].append(states[-1])
        pooled["mean"].append(states.mean(dim=0))
        pooled["cls"].append(states[0])
    arrays = {kind: torch.stack(vectors).numpy() for kind, vectors in pooled.items()}
    for kind, vectors in arrays.items():
        print(name, kind, vectors.shape, "up to", abs(vectors).max())
    halves = {kind: vectors.astype(np.float16) for kind, vectors in arrays.items()}
    assert all(np.isfinite(vectors).all() for vectors in halves.values())
    np.savez_compressed(GOLDEN / f"embeddings-{name}.npz", cases=list(cases), **halves)


if __name__ == "__main__":
    for model_name in sys.argv[2:] or MODELS:
        make(model_name, Path(sys.argv[1]))
