"""Thousands of requests of random lengths, cancelled at random moments, in a KV cache far too small for them.

    python benchmarks/soak.py MODEL [--requests 20000] [--kv-tokens 960]

Checks that every choice ends in exactly one terminal event, that what it has produced by then is what the
same request gives alone, that no block and no slot is lost, that memory stays flat, and that the engine idles
at the end. Exits with an error otherwise.
"""

from __future__ import annotations

import argparse
import random
import resource
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapless.config import EngineConfig
from gapless.engine import Engine, Request
from gapless.engine.events import FinishEvent, RequestEvent, TokenEvent
from gapless.engine.memory import GIB
from gapless.runtime import start
from gapless.sampling import SamplingParams

MAX_LEN = 240
NUM_SLOTS = 24
IDLE_S = 5.0


@dataclass(frozen=True)
class Template:
    """A request that occurs many times."""

    prompt: list[int]
    options: dict[str, Any]

    def params(self) -> SamplingParams:
        return SamplingParams(**self.options)


@dataclass
class Flight:
    """One occurrence of a template."""

    template: int
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    ends: dict[int, list[str]] = field(default_factory=dict)


def make_templates(count: int, vocab_size: int, rng: random.Random) -> list[Template]:
    prefixes = [[rng.randrange(vocab_size) for _ in range(100)] for _ in range(4)]
    templates = []
    for number in range(count):
        head = rng.choice(prefixes)[: rng.choice([0, 0, 20, 64, 100])]
        prompt = head + [rng.randrange(vocab_size) for _ in range(rng.choice([1, 3, 17, 40]))]
        options: dict[str, Any] = {
            "max_tokens": rng.choice([1, 2, 5, 12, 40]),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": number,
            "n": rng.choice([1, 1, 1, 1, 3]),
            "ignore_eos": rng.random() < 0.5,
        }
        if rng.random() < 0.2:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_p": 0.9}
        templates.append(Template(prompt, options))
    return templates


def alone(engine: Engine, template: Template) -> list[list[int]]:
    """The tokens of each choice."""
    result = engine.submit(template.prompt, template.params()).result(timeout=120)
    return [choice.token_ids for choice in result.outputs]


class Soak:
    def __init__(self, engine: Engine, templates: list[Template], seed: int) -> None:
        self.engine = engine
        self.templates = templates
        self.expected = [alone(engine, template) for template in templates]
        self.rng = random.Random(seed)
        self.flights: list[Flight] = []
        self.reasons: Counter[str] = Counter()
        self.num_open = 0
        self.changed = threading.Condition()
        self.victims: list[tuple[float, Request]] = []

    def launch(self) -> None:
        index = self.rng.randrange(len(self.templates))
        template, flight = self.templates[index], Flight(index)
        request = self.engine.make_request(
            template.prompt, template.params(), priority=self.rng.choice([0, 0, 0, 1, 2])
        )
        self.flights.append(flight)
        with self.changed:
            self.num_open += request.params.n

        def sink(_: Request, events: list[RequestEvent]) -> None:
            for event in events:
                if isinstance(event, TokenEvent):
                    flight.tokens.setdefault(event.choice, []).append(event.token_id)
                elif isinstance(event, FinishEvent):
                    flight.ends.setdefault(event.choice, []).append(event.reason.value)
                    with self.changed:
                        self.num_open -= 1
                        self.reasons[event.reason.value] += 1
                        self.changed.notify()

        self.engine.start(request, sink)
        if self.rng.random() < 0.25:
            self.victims.append((time.monotonic() + self.rng.expovariate(1 / 0.15), request))

    def cancel_some(self) -> None:
        now = time.monotonic()
        for when, request in self.victims:
            if when <= now:
                self.engine.cancel(request)
        self.victims = [victim for victim in self.victims if victim[0] > now]

    def run(self, num_requests: int) -> None:
        num_waves = 0
        while len(self.flights) < num_requests:
            while self.num_open < 3 * NUM_SLOTS and len(self.flights) < num_requests:
                self.launch()
            self.cancel_some()
            with self.changed:
                self.changed.wait(0.01)
            if len(self.flights) >= (num_waves + 1) * num_requests // 20:
                num_waves += 1
                stats = self.engine.stats()
                print(
                    f"  {len(self.flights):6d} requests, {dict(self.reasons)}, "
                    f"{stats['num_preemptions']} preemptions, {rss_bytes() / 2**20:.0f} MiB",
                    flush=True,
                )
        deadline = time.monotonic() + 120
        while self.num_open:
            self.cancel_some()
            with self.changed:
                self.changed.wait(0.05)
            assert time.monotonic() < deadline, f"{self.num_open} choices never end"

    def check(self) -> None:
        for flight in self.flights:
            expected = self.expected[flight.template]
            assert sorted(flight.ends) == list(range(len(expected))), "a choice has no end"
            for choice, ends in flight.ends.items():
                assert len(ends) == 1, f"{len(ends)} terminal events"
                tokens = flight.tokens.get(choice, [])
                if ends[0] == "abort":
                    assert tokens == expected[choice][: len(tokens)], "other tokens than alone"
                else:
                    assert ends[0] in ("stop", "length"), ends
                    assert tokens == expected[choice], "other tokens than alone"


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def idle_share() -> float:
    """CPU time that the idle process takes, as a share of one core."""
    before = time.process_time()
    time.sleep(IDLE_S)
    return (time.process_time() - before) / IDLE_S


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--kv-tokens", type=int, default=960, help="size of the KV cache")
    parser.add_argument("--templates", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    probe = start(EngineConfig(model=arguments.model, max_num_seqs=1, max_model_len=16))
    bytes_per_token = probe.kv_bytes // 16
    probe.close()
    gib = arguments.kv_tokens * bytes_per_token / GIB
    runtime = start(
        EngineConfig(
            model=arguments.model,
            max_num_seqs=NUM_SLOTS,
            max_model_len=MAX_LEN,
            kv_cache_gib=gib,
            max_step_tokens=256,
        )
    )
    engine = runtime.engine
    templates = make_templates(arguments.templates, engine.limits.vocab_size, random.Random(arguments.seed))
    print(f"{arguments.requests} requests, {NUM_SLOTS} slots, {engine.limits.num_blocks} blocks")
    soak = Soak(engine, templates, arguments.seed)
    soak.run(arguments.requests // 10)
    first_rss = rss_bytes()
    started = time.monotonic()
    soak.run(arguments.requests)
    elapsed = time.monotonic() - started
    soak.check()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0), stats
    assert stats["num_free_blocks"] == engine.limits.num_blocks, "blocks were lost"
    assert stats["num_preemptions"] > 0, "the cache was large enough: nothing was preempted"
    recorded = sum(len(tokens) for flight in soak.flights for tokens in flight.tokens.values()) * 40
    growth = rss_bytes() - first_rss
    idle = idle_share()
    print(
        f"{len(soak.flights)} requests, {dict(soak.reasons)}, {stats['num_preemptions']} preemptions, "
        f"{stats['num_cached_tokens']} of {stats['num_prompt_tokens']} prompt tokens hit, {elapsed:.0f} s, "
        f"memory + {growth / 2**20:.1f} MiB, of that up to {recorded / 2**20:.1f} MiB are kept "
        f"by this script; idle CPU {100 * idle:.2f}% of a core"
    )
    runtime.close()
    assert growth < recorded + (32 << 20), "memory grows"
    assert idle < 0.01, "the idle engine uses CPU"


if __name__ == "__main__":
    main()
