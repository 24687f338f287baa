"""Where the golden data are: what PyTorch in f32 gives for the same weights."""

from pathlib import Path

GOLDEN = Path(__file__).parent / "data" / "golden"
