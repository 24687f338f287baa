"""Small made-up vocabularies, as GGUF metadata and as tokenizer.json."""

from __future__ import annotations

from typing import Any

from gapless.tokenizer.vocabulary import TokenKind, byte_level_alphabet

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

BYTE_LEVEL_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "i m", "< |"]
BYTE_LEVEL_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_metadata(pre: str = "gpt-2", **more: Any) -> dict[str, Any]:
    """All bytes, a few words, ChatML's control tokens, and `<tool_call>` as user-defined."""
    alphabet = [byte_level_alphabet()[byte] for byte in range(256)]
    merged = [merge.replace(" ", "") for merge in BYTE_LEVEL_MERGES]
    tokens = [*alphabet, *merged, *BYTE_LEVEL_CONTROL, "<tool_call>", "[PAD]"]
    kinds = [TokenKind.NORMAL] * (256 + len(merged))
    kinds += [TokenKind.CONTROL] * 3 + [TokenKind.USER_DEFINED, TokenKind.UNUSED]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": BYTE_LEVEL_MERGES,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.chat_template": CHATML,
    }
    return {**metadata, **more}


SENTENCEPIECE_PIECES = [
    *("▁t", "he", "▁the", "▁a", "in", "▁", "t", "h", "e", "a", "i", "n", "b", "<", "/", "s", ">", "é", "</s"),
    *("▁▁", "▁▁▁▁", "|", "</"),
]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """Llama-2's layout: `<unk>`, `<s>`, `</s>`, 256 bytes, then pieces from the best score to the worst."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SENTENCEPIECE_PIECES]
    kinds = [TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.CONTROL] + [TokenKind.BYTE] * 256
    kinds += [TokenKind.NORMAL] * len(SENTENCEPIECE_PIECES)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(SENTENCEPIECE_PIECES))],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**metadata, **more}


def byte_level_json(metadata: dict[str, Any], pattern: str | None = None) -> dict[str, Any]:
    """The tokenizer.json of a byte-level vocabulary; `pattern` is the split expression, GPT-2's if None."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    kinds = list(map(int, metadata["tokenizer.ggml.token_type"]))
    added = {TokenKind.CONTROL, TokenKind.USER_DEFINED}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = (
        [{**byte_level, "use_regex": True}]
        if pattern is None
        else [split, {**byte_level, "use_regex": False}]
    )
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i, "content": str(token), "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": kind == TokenKind.CONTROL,
            }
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in added
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {
                token: i
                for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind == TokenKind.NORMAL
            },
            "merges": list(metadata["tokenizer.ggml.merges"]),
        },
    }  # fmt: skip


def sentencepiece_json() -> dict[str, Any]:
    """The tokenizer.json that transformers' converter makes of `sentencepiece_metadata`."""
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [
        f"{piece[:cut]} {piece[cut:]}"
        for piece in SENTENCEPIECE_PIECES
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True,
            }
            for i in range(3)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": ids, "merges": merges,
        },
    }  # fmt: skip
