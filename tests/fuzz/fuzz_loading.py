"""Feeds mutated model files to the loaders; each must load or end in a LoadError, fast and in little memory.

    python tests/fuzz/fuzz_loading.py --iterations 1000000 --seed 1
    python tests/fuzz/fuzz_loading.py --seconds 3600
    python tests/fuzz/fuzz_loading.py --seed 1 --only 4711      # one case again

A case depends only on the seed and its number. What fails is written to `--failures`.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutations import Format, all_seeds, mutate, split_gguf

from gapless.errors import LoadError
from gapless.loading import StringArray, TensorInfo, open_checkpoint
from gapless.loading.gguf import parse_gguf
from gapless.loading.safetensors import parse_safetensors
from helpers_gguf import safetensors

MAX_CASE_S = 0.25  # of CPU; a case takes about 0.1 ms, the rest is for a noisy machine
MAX_EXTRA_BYTES = 1 << 20  # beyond the file's size
ADDRESS_SPACE_BYTES = 256 << 20  # more than the process has at its start
MEMORY_EVERY = 64  # tracing memory makes a case several times slower
FILE_EVERY = 16  # as does going through a file

SHARES = {Format.GGUF: 8, Format.SAFETENSORS: 8, Format.INDEX: 1}  # an index always goes through files


def use(tensors: dict[str, TensorInfo], size: int) -> None:
    """What any caller relies on after a success."""
    for name, info in tensors.items():
        assert info.name == name
        assert 0 <= info.offset <= info.offset + info.nbytes <= size, info
        assert info.nbytes == info.type.nbytes(info.num_values), info


def load_gguf(data: bytes) -> None:
    parsed = parse_gguf(memoryview(data), "fuzz.gguf")
    use(parsed.tensors, len(data))
    for value in parsed.metadata.values():
        if isinstance(value, StringArray):
            assert sum(1 for _ in value) == len(value)


def load_safetensors(data: bytes) -> None:
    use(parse_safetensors(memoryview(data), "fuzz.safetensors"), len(data))


class Folder:
    """A place for files, with what stands around the mutated one."""

    def __init__(self, root: Path) -> None:
        single, sharded = root / "single", root / "sharded"
        for folder in (single, sharded):
            folder.mkdir()
            (folder / "config.json").write_text("{}")
        for name, tensor in (("a", "w"), ("b", "v")):
            header = {tensor: {"dtype": "F16", "shape": [3], "data_offsets": [0, 6]}}
            (sharded / f"{name}.safetensors").write_bytes(safetensors(header, bytes(6)))
        for number in (0, 2):
            (root / f"m-{number + 1:05}-of-00003.gguf").write_bytes(split_gguf(number))
        self.mutated = {
            Format.GGUF: root / "m-00002-of-00003.gguf",
            Format.SAFETENSORS: single / "model.safetensors",
            Format.INDEX: sharded / "model.safetensors.index.json",
        }

    def load(self, data: bytes, kind: Format) -> None:
        path = self.mutated[kind]
        path.write_bytes(data)
        with open_checkpoint(path if kind is Format.GGUF else path.parent) as checkpoint:
            for name, info in checkpoint.tensors.items():
                assert checkpoint.raw(name).nbytes == info.nbytes
                checkpoint.release(name)


@dataclass
class Report:
    """How the cases ended."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    largest_bytes: int = 0  # memory beyond the file's size
    elapsed_s: float = 0.0

    def __str__(self) -> str:
        num_cases = sum(self.outcomes.values())
        rate = num_cases / max(self.elapsed_s, 1e-9)
        lines = [f"{num_cases} cases in {self.elapsed_s:.0f} s ({rate:.0f}/s)"]
        lines += [f"  {outcome}: {number}" for outcome, number in sorted(self.outcomes.items())]
        lines += [f"  slowest: {self.slowest_s * 1e3:.1f} ms"]
        lines += [f"  most memory beyond the file's size: {self.largest_bytes >> 10} KiB"]
        return "\n".join(lines)


class Fuzzer:
    """Runs numbered cases; `run_case` raises AssertionError (or what the loader raised) for a failure."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.folder = Folder(folder)
        self.seeds = all_seeds()
        self.report = Report()

    def case(self, number: int) -> tuple[bytes, Format]:
        rng = random.Random(self.seed << 40 | number)
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        return mutate(rng, self.seeds[kind], kind is Format.SAFETENSORS), kind

    def run_case(self, number: int) -> None:
        data, kind = self.case(number)
        through_file = kind is Format.INDEX or number % FILE_EVERY == 0
        outcome, elapsed_s = self._timed(data, kind, through_file)
        if elapsed_s > MAX_CASE_S:  # once may be the machine's fault, not three times
            elapsed_s = min(self._timed(data, kind, through_file)[1] for _ in range(2))
        assert elapsed_s <= MAX_CASE_S, f"{elapsed_s} s for {len(data)} bytes"
        self.report.outcomes[f"{kind.value} {outcome}"] += 1
        self.report.slowest_s = max(self.report.slowest_s, elapsed_s)
        if number % MEMORY_EVERY == 0:
            self._check_memory(data, kind, through_file)

    def _timed(self, data: bytes, kind: Format, through_file: bool) -> tuple[str, float]:
        begin_s = time.process_time()
        outcome = self._load(data, kind, through_file)
        return outcome, time.process_time() - begin_s

    def _load(self, data: bytes, kind: Format, through_file: bool) -> str:
        try:
            if through_file:
                self.folder.load(data, kind)
            elif kind is Format.GGUF:
                load_gguf(data)
            else:
                load_safetensors(data)
        except LoadError as error:
            str(error).encode()  # can be printed
            return type(error).__name__
        return "loaded"

    def _check_memory(self, data: bytes, kind: Format, through_file: bool) -> None:
        tracemalloc.start()
        self._load(data, kind, through_file)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes <= len(data) + MAX_EXTRA_BYTES, f"{peak_bytes} bytes of memory for {len(data)}"
        self.report.largest_bytes = max(self.report.largest_bytes, peak_bytes - len(data))


def limit_memory() -> None:
    """An allocation beyond this raises MemoryError, which counts as a failure."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run only the case of this number")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    arguments = parser.parse_args()
    num_failures = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        fuzzer = Fuzzer(arguments.seed, Path(folder))
        if arguments.only is not None:
            fuzzer.run_case(arguments.only)
            print(fuzzer.report)
            return 0
        limit_memory()
        begin_s = time.monotonic()
        for number in count():
            fuzzer.report.elapsed_s = time.monotonic() - begin_s
            if number >= arguments.iterations or fuzzer.report.elapsed_s >= arguments.seconds:
                break
            try:
                fuzzer.run_case(number)
            except Exception as error:
                num_failures += 1
                arguments.failures.mkdir(exist_ok=True)
                (arguments.failures / f"{arguments.seed}-{number}").write_bytes(fuzzer.case(number)[0])
                print(f"case {number}: {type(error).__name__}: {error}", file=sys.stderr)
            if number and number % 50_000 == 0:
                print(f"{number} cases, {num_failures} failures", flush=True)
    print(fuzzer.report)
    print(f"{num_failures} failures")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
