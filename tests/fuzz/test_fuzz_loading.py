"""A short run of the fuzzer; the long one is a command (see fuzz_loading.py)."""

from __future__ import annotations

from pathlib import Path

from fuzz_loading import Fuzzer
from mutations import Format


def test_mutated_files_load_or_end_in_a_typed_error(tmp_path: Path) -> None:
    fuzzer = Fuzzer(seed=2, folder=tmp_path)
    for number in range(2000):
        fuzzer.run_case(number)
    outcomes = fuzzer.report.outcomes
    for kind in Format:
        # Neither so tame that nothing breaks, nor so wild that nothing gets past the first check.
        assert outcomes[f"{kind.value} FormatError"] > 20
        assert outcomes[f"{kind.value} loaded"] > 0
