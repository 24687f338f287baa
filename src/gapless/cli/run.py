"""`gapless run`: one answer, or a chat."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from gapless.config import EngineConfig
from gapless.engine.handle import RequestHandle
from gapless.errors import GaplessError, InvalidRequestError, TemplateError
from gapless.llm import LLM
from gapless.progress import bytes_bar
from gapless.runtime import start
from gapless.sampling import RequestMetrics, SamplingParams, StructuredOutputs

# Used where neither the user nor the model says: small models wander at higher temperatures and repeat at 0.
_DEFAULTS = {"temperature": 0.2, "top_p": 0.95, "top_k": 0}

_CHAT_HELP = "Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D ends."


@dataclass(frozen=True)
class RunOptions:
    """`sampling` holds fields of SamplingParams; None: not said."""

    prompt: str | None
    system: str | None
    raw: bool
    sampling: Mapping[str, Any]
    stats: bool


def run_model(config: EngineConfig, options: RunOptions) -> None:
    """Loads the model, then answers the prompt (or standard input, if piped) or chats."""
    prompt = options.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise InvalidRequestError("The prompt on standard input is empty.", param="prompt")
    SamplingParams(**options.sampling)  # a wrong option is reported before the model is loaded
    with bytes_bar() as report:
        runtime = start(config, lambda done, total: report(f"Loading {config.model}", done, total))
    with LLM.from_runtime(runtime) as llm:
        if not options.raw and llm.tokenizer.chat_template is None:
            raise TemplateError(f"{config.model} has no chat template. Use --raw to complete a text instead.")
        session = _Session(llm, options)
        if prompt is None:
            session.chat()
        else:
            session.answer(prompt)


def structured_outputs(json_schema: Path | None, regex: str | None) -> StructuredOutputs | None:
    """What the options ask of the answer, if anything. InvalidRequestError for a file that is no schema."""
    if json_schema is None and regex is None:
        return None
    try:
        schema = None if json_schema is None else json_schema.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"{json_schema} cannot be read: {error}", param="json_schema") from None
    return StructuredOutputs(json=schema, regex=regex)


class _Session:
    def __init__(self, llm: LLM, options: RunOptions) -> None:
        self._llm = llm
        self._options = options
        self._params = _sampling_params(options.sampling, llm.runtime.model.checkpoint.generation_config)
        self._messages: list[dict[str, str]] = []
        self._clear()

    def answer(self, prompt: str) -> None:
        """Streams one answer to standard output."""
        handle = self._submit(prompt)
        text = self._show(handle)
        if not text.endswith("\n"):
            print(flush=True)
        if self._options.stats:
            _print_stats(handle)

    def chat(self) -> None:
        """Reads lines until the end of input, and answers each."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives `input` editing and history

        typer.secho(_CHAT_HELP, dim=True, err=True)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line == "/clear":
                self._clear()
            elif line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        """One question and its answer. Both are remembered, also when the answer was stopped."""
        try:
            handle = self._submit(line)
        except GaplessError as error:  # too long, or refused by the template: the chat goes on without it
            if not self._options.raw:
                self._messages.pop()
            typer.secho(f"{error} (/clear forgets the conversation)", fg="red", err=True)
            return
        try:
            text = self._show(handle)
        except KeyboardInterrupt:
            handle.cancel()
            text = handle.output.outputs[0].text
        print(flush=True)
        if self._options.stats:
            _print_stats(handle)
        self._messages.append({"role": "assistant", "content": text})

    def _submit(self, prompt: str) -> RequestHandle:
        if self._options.raw:
            return self._llm.submit(prompt, self._params)
        self._messages.append({"role": "user", "content": prompt})
        return self._llm.submit(self._messages, self._params)

    def _show(self, handle: RequestHandle) -> str:
        for chunk in handle:
            if chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        return handle.output.outputs[0].text

    def _clear(self) -> None:
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]


def _sampling_params(asked: Mapping[str, Any], of_model: Mapping[str, Any]) -> SamplingParams:
    """The user's wishes, else what the model's generation configuration recommends, else our defaults."""
    chosen = dict(asked)
    for name, default in _DEFAULTS.items():
        if chosen[name] is None:
            recommended = of_model.get(name)
            chosen[name] = recommended if isinstance(recommended, (int, float)) else default
    return SamplingParams(**chosen)


def _print_stats(handle: RequestHandle) -> None:
    typer.secho(_stats_line(handle.stats, handle.output.outputs[0].finish_reason), dim=True, err=True)


def _stats_line(stats: RequestMetrics, finish_reason: str | None) -> str:
    parts = [f"{stats.num_prompt_tokens} prompt tokens", f"{stats.num_output_tokens} new tokens"]
    if stats.ttft_s:
        parts.append(
            f"TTFT {stats.ttft_s * 1e3:.1f} ms ({stats.num_prompt_tokens / stats.ttft_s:.0f} tokens/s)"
        )
    if stats.tpot_s:
        parts.append(f"TPOT {stats.tpot_s * 1e3:.2f} ms ({1 / stats.tpot_s:.1f} tokens/s)")
    parts.append(f"ended by {finish_reason or 'Ctrl-C'}")
    return ", ".join(parts)
