"""`gapless run` and `gapless bench` over the scripted model."""

import json

import pytest
from fake_executor import FakeExecutor
from toy import say, toy_llm
from typer.testing import CliRunner

import gapless.cli.bench
import gapless.cli.run
from gapless.cli.app import app
from gapless.cli.run import RunOptions, _Session

runner = CliRunner()


@pytest.fixture
def executor(monkeypatch):
    """The executor of a model that says "Hello!"; the commands find it under any name."""
    executor = FakeExecutor(script=say("Hello!"), max_num_seqs=1)
    with toy_llm(executor) as llm:
        monkeypatch.setattr(gapless.cli.run, "start", lambda config, progress: llm.runtime)
        monkeypatch.setattr(gapless.cli.bench, "start", lambda config, progress, tracer: llm.runtime)
        yield executor


def test_one_shot(executor):
    result = runner.invoke(app, ["run", "toy", "Hi", "--system", "Be kind", "--stats"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello!\n"
    assert "23 prompt tokens, 7 new tokens, TTFT" in result.stderr
    assert "ended by stop" in result.stderr


def test_the_prompt_comes_through_a_pipe(executor):
    result = runner.invoke(app, ["run", "toy", "--raw", "--max-tokens", "2"], input="a long text\n")
    assert result.stdout == "He\n"
    assert result.stderr == ""


def test_stop_option(executor):
    result = runner.invoke(app, ["run", "toy", "Hi", "--stop", "l", "--stop", "x"])
    assert result.stdout == "He\n"


def test_an_answer_that_matches_an_expression(executor):
    result = runner.invoke(app, ["run", "toy", "Hi", "--regex", "Help|Held"])
    assert result.stdout == "Help\n", result.output


def test_an_answer_that_satisfies_a_schema(executor, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["Hello?", "Bye"]}')
    result = runner.invoke(app, ["run", "toy", "Hi", "--json-schema", str(file)])
    assert result.stdout == '"Hello?"\n', result.output


def test_constraints_that_are_wrong(executor, tmp_path):
    file = tmp_path / "schema.json"
    file.write_bytes(b"\xff")
    assert "cannot be read" in runner.invoke(app, ["run", "toy", "Hi", "--json-schema", str(file)]).stderr
    file.write_text("{")
    result = runner.invoke(app, ["run", "toy", "Hi", "--json-schema", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "not JSON" in result.stderr
    assert "unclosed group" in runner.invoke(app, ["run", "toy", "Hi", "--regex", "("]).stderr
    file.write_text("{}")
    both = runner.invoke(app, ["run", "toy", "Hi", "--json-schema", str(file), "--regex", "a"])
    assert "exactly one" in both.stderr


def test_a_prompt_that_is_too_long(executor):
    result = runner.invoke(app, ["run", "toy", "x" * 300])
    assert result.exit_code == 2
    assert "length is 256 tokens (max_model_len)" in result.stderr


def test_a_model_without_a_chat_template(monkeypatch):
    with toy_llm(template=None) as llm:
        monkeypatch.setattr(gapless.cli.run, "start", lambda config, progress: llm.runtime)
        result = runner.invoke(app, ["run", "toy", "Hi"])
    assert result.exit_code == 1
    assert "toy has no chat template. Use --raw" in result.stderr


def options(**changes):
    sampling = {"max_tokens": 20, "temperature": 0, "top_k": None, "top_p": None}
    return RunOptions(
        **{"prompt": None, "system": None, "raw": False, "sampling": sampling, "stats": False} | changes
    )


def chat(monkeypatch, llm, lines, **changes):
    """A chat in which the user types `lines` (an exception stands for a key); its messages at the end."""
    lines = iter(lines)

    def typed(prompt):
        line = next(lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    session = _Session(llm, options(**changes))
    session.chat()
    return session._messages


def test_chat_remembers_and_clears(monkeypatch, capsys):
    with toy_llm(FakeExecutor(script=say("Hello!"))) as llm:
        messages = chat(monkeypatch, llm, ["Hi", "", KeyboardInterrupt(), "Again"], system="Be kind")
        assert [message["role"] for message in messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert messages[2]["content"] == "Hello!"
        assert chat(monkeypatch, llm, ["Hi", "/clear"]) == []
    assert capsys.readouterr().out == "Hello!\n\nHello!\n\nHello!\n\n"


def test_ctrl_c_stops_the_answer_and_not_the_chat(monkeypatch, capsys):
    executor = FakeExecutor(script=say("la", end=False), max_num_seqs=1)
    with toy_llm(executor) as llm:
        shown = []

        def write(text):
            shown.append(text)
            if len(shown) == 4:
                raise KeyboardInterrupt

        monkeypatch.setattr("sys.stdout.write", write)
        sampling = {**options().sampling, "max_tokens": 200}
        messages = chat(monkeypatch, llm, ["Sing", "More"], sampling=sampling)
    assert messages[1]["content"].startswith("lala")
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2


def test_a_turn_that_does_not_fit_leaves_the_chat_as_it_was(monkeypatch, capsys):
    with toy_llm(FakeExecutor(script=say("Hello!"))) as llm:
        messages = chat(monkeypatch, llm, ["Hi", "x" * 300])
    assert [message["content"] for message in messages] == ["Hi", "Hello!"]
    assert "/clear" in capsys.readouterr().err


def test_bench(executor):
    arguments = ["bench", "toy", "--prompt-tokens", "50", "--new-tokens", "20", "--repeat", "2"]
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["pp_tokens_per_s"] > 0
    assert report["tg_tokens_per_s"] > 0
    assert len(report["pp_runs"]) == len(report["tg_runs"]) == 2
    assert report["settings"]["prompt_tokens"] == 50
    assert report["isa"] == "generic"
    assert len(executor.admissions) == 6


def test_bench_as_text(executor):
    result = runner.invoke(
        app, ["bench", "toy", "--prompt-tokens", "5", "--new-tokens", "2", "--repeat", "1"]
    )
    assert "prefill of 5 tokens" in result.stdout
