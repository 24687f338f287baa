"""Tokens that are known by their text, because files often do not say what they are for: data only."""

from __future__ import annotations

# Each ends a turn or a document in every model that has it as a control token.
END_OF_TURN = frozenset(
    {
        "<|im_end|>",  # ChatML: Qwen, SmolLM, Yi
        "<|endoftext|>",
        "<end_of_turn>",  # Gemma
        "<|eot_id|>",  # Llama 3
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",  # Phi-3
        "<|END_OF_TURN_TOKEN|>",  # Command R
        "<|endofturn|>",
        "<end_of_utterance>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<｜end▁of▁sentence｜>",  # DeepSeek
    }
)

# Files mark some of these as ordinary text; no text that a user writes may become one of them.
ALWAYS_CONTROL = END_OF_TURN | {"</s>", "<|im_start|>", "<start_of_turn>", "<|start_header_id|>"}

FIM_PREFIX = (
    "<|fim_prefix|>",
    "<fim_prefix>",
    "<fim-prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "[PREFIX]",
)
FIM_SUFFIX = (
    "<|fim_suffix|>",
    "<fim_suffix>",
    "<fim-suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "[SUFFIX]",
)
FIM_MIDDLE = (
    "<|fim_middle|>",
    "<fim_middle>",
    "<fim-middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "[MIDDLE]",
)
