"""What a user can ask for: InstantQuant of plain weights, without calibration."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.errors import InvalidRequestError

WHOLE_ROW = -1
GROUP_SIZES = (32, 64, 128, WHOLE_ROW)


@dataclass(frozen=True)
class QuantConfig:
    """Weights of `bits` bits with a scale for each `group_size` values of a row (WHOLE_ROW: one per row)."""

    bits: int
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise InvalidRequestError(f"Weights of {self.bits} bits; supported: 4 and 8.", "quant")
        if self.group_size not in GROUP_SIZES:
            raise InvalidRequestError(
                f"Group size {self.group_size}; supported: 32, 64, 128, and -1 or channel for whole rows.",
                "quant",
            )

    @property
    def name(self) -> str:
        """The packed type, as the native core calls it."""
        return f"int{self.bits}"

    @staticmethod
    def parse(text: str) -> QuantConfig:
        """From "int8" or "int4", optionally with ":<group size>" ("int4:64", "int8:channel").

        InvalidRequestError says what is wrong and what is possible.
        """
        kind, colon, group = text.strip().lower().partition(":")
        if kind not in ("int4", "int8"):
            raise InvalidRequestError(
                f"Quantization {text!r:.100} is not known; use int8 or int4, or with a group size int4:64.",
                "quant",
            )
        if not colon:
            return QuantConfig(int(kind[3:]))
        if group == "channel":
            return QuantConfig(int(kind[3:]), WHOLE_ROW)
        try:
            return QuantConfig(int(kind[3:]), int(group))
        except ValueError as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"Group size {group!r:.100} is not a number.", "quant") from None
