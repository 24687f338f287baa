"""What a model's files say about embeddings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gapless.loading import Checkpoint, CheckpointKind
from gapless.models.keys import Keys
from gapless.sampling import Pooling

logger = logging.getLogger(__name__)

DEFAULT = Pooling.LAST  # of a causal decoder that says nothing: only its last token has seen the whole text

_GGUF_KINDS = {0: DEFAULT, 1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}  # 4 ranks pairs of texts
# sentence-transformers' `1_Pooling/config.json` has had two spellings: a word, and a flag for each kind.
_HF_KINDS = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST}
_HF_FLAG = "pooling_mode_"


def read_pooling(checkpoint: Checkpoint, keys: Keys) -> Pooling | None:
    """How the model's texts are to be embedded; None, with a warning, for a way that Gapless lacks.

    `keys`: those of the checkpoint. FormatError for a malformed value.
    """
    asked: Any
    if checkpoint.kind is CheckpointKind.GGUF:
        asked = keys.integer("pooling_type", 0, minimum=0)
        pooling = _GGUF_KINDS.get(asked)
    else:
        asked = _hf_kind(checkpoint.pooling_config, f"{checkpoint.path}/1_Pooling/config.json")
        pooling = DEFAULT if asked is None else _HF_KINDS.get(asked)
    if pooling is None:
        logger.warning(
            "%s: its embeddings want pooling %r, which Gapless does not have; requests must choose another.",
            checkpoint.path,
            asked,
        )
    return pooling


def _hf_kind(config: Mapping[str, Any], source: str) -> str | None:
    """The kind in sentence-transformers' words, several joined by "+"; None if nothing is said."""
    keys = Keys(config, source)
    if keys.has("pooling_mode"):
        return keys.text("pooling_mode")
    chosen = [name for name in config if name.startswith(_HF_FLAG) and keys.flag(name)]
    kinds = [name.removeprefix(_HF_FLAG).removesuffix("_tokens").removesuffix("_token") for name in chosen]
    return "+".join(kinds) or None
