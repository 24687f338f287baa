"""Text to token ids and back: tokenizers of GGUF files and tokenizer.json, chat templates, streaming."""

from gapless.tokenizer.chat_template import ChatTemplate
from gapless.tokenizer.detokenizer import Detokenizer, StopStringMatcher
from gapless.tokenizer.load import load_tokenizer, tokenizer_from_gguf, tokenizer_from_hf
from gapless.tokenizer.tokenizer import FimTokens, Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "FimTokens",
    "StopStringMatcher",
    "Tokenizer",
    "load_tokenizer",
    "tokenizer_from_gguf",
    "tokenizer_from_hf",
]
