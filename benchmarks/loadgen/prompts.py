"""Prompts that no prefix cache has seen, as text of about so many tokens for any tokenizer."""

from __future__ import annotations

import random

# Most tokenizers have a token of its own for each of these, with the space before it.
_TEXT = (
    "able again allow also answer army bad beat been being between blood book box brought business "
    "capital case center chance chief city close color complete control corner course current daughter "
    "decide desert difference divide done dream dry earth effect else enough event except express fall "
    "fast fell figure finger five fly foreign four fruit gave give government ground hair hard heat hill "
    "home house hunt imagine inside job keep king large lay left letter like live love major mark "
    "measure"
)


class RandomPrompts:
    """Words in random order. `words_per_token` fits them to a tokenizer: see `fit`."""

    def __init__(self, seed: int | None = None) -> None:
        self._rng = random.Random(seed)
        self._words = _TEXT.split()
        self._words_per_token = 1.0

    def fit(self, num_tokens: int, counted: int) -> None:
        """A prompt that was to have `num_tokens` tokens had `counted`, by the server's count."""
        self._words_per_token *= num_tokens / max(1, counted)

    def texts(self, count: int, num_tokens: int) -> list[str]:
        num_words = max(1, round(num_tokens * self._words_per_token))
        return [" ".join(self._rng.choices(self._words, k=num_words)) for _ in range(count)]
