import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from gapless import __version__, hub
from gapless.cli.app import app
from gapless.errors import LoadError

runner = CliRunner()


def run_python(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "gapless", *arguments], capture_output=True, text=True, check=False, **options
    )


def test_version_is_quick():
    times = []
    for _ in range(3):
        started = time.perf_counter()
        result = run_python("--version")
        times.append(time.perf_counter() - started)
        assert result.stdout == f"gapless {__version__}\n"
        assert result.returncode == 0
    assert min(times) < 0.3


def test_version_among_other_options():
    result = runner.invoke(app, ["--debug", "--version"])
    assert result.output == f"gapless {__version__}\n"


@pytest.mark.parametrize("command", ["run", "inspect", "bench"])
def test_a_missing_model_is_one_line_without_traceback(command):
    result = run_python(command, "no-such-model.gguf", *(["hi"] if command == "run" else []))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("gapless: There is no model 'no-such-model.gguf'")
    assert result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr  # no colours in a pipe


def test_a_traceback_when_asked_for():
    result = run_python("--debug", "inspect", "no-such-model.gguf")
    assert "Traceback" in result.stderr


def test_wrong_parameters_are_reported_before_the_model_is_loaded():
    result = runner.invoke(app, ["run", "no-such-model.gguf", "hi", "--top-p", "7"])
    assert result.exit_code == 2
    assert "top_p must be a number from 0.0 to 1.0, but it is 7.0" in result.output


def test_an_empty_prompt_on_standard_input():
    result = run_python("run", "no-such-model.gguf", input="")
    assert result.returncode == 2
    assert "empty" in result.stderr


def test_pull_prints_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "pull", lambda name, report: tmp_path / name)
    result = runner.invoke(app, ["pull", "toy"])
    assert result.output == f"{tmp_path / 'toy'}\n"


def test_pull_says_what_went_wrong(monkeypatch):
    def fail(name, report):
        raise LoadError("offline")

    monkeypatch.setattr(hub, "pull", fail)
    result = runner.invoke(app, ["pull", "toy"])
    assert result.exit_code == 1
    assert "gapless: offline" in result.output


def test_inspect(tiny_gguf):
    result = runner.invoke(app, ["inspect", str(tiny_gguf)])
    assert result.exit_code == 0, result.output
    for words in ("general.architecture", "blk.0.attn_q.weight", "KV cache per 1024 tokens"):
        assert words in result.output


def test_inspect_json(tiny_gguf):
    result = runner.invoke(app, ["inspect", str(tiny_gguf), "--json"])
    report = json.loads(result.stdout)
    assert report["metadata"]["general.architecture"] == "llama"
    assert report["tensors"][0]["name"]
    assert report["memory"]["kv_bytes_per_1k_tokens"] == 1024 * 2 * 2 * 1 * 32 * 2
    assert report["metadata"]["tokenizer.ggml.tokens"] == "[64 items]"
    report = json.loads(
        runner.invoke(app, ["inspect", str(tiny_gguf), "--json", "--kv-dtype", "int8"]).stdout
    )
    assert report["memory"]["kv_dtype"] == "int8"
    assert report["memory"]["kv_bytes_per_1k_tokens"] == 1024 * 2 * 2 * 1 * (32 + 4)
    result = runner.invoke(app, ["inspect", str(tiny_gguf), "--kv-dtype", "fp8"])
    assert result.exit_code == 2
    assert "fp8" in result.output


def test_inspect_of_an_architecture_that_cannot_be_run(tmp_path):
    path = write_tiny_gguf(tmp_path / "other.gguf", architecture="mamba")
    result = runner.invoke(app, ["inspect", str(path), "--json"])
    assert "mamba" in json.loads(result.stdout)["memory"]["unsupported"]


def test_a_reader_that_leaves_early_is_no_error(tiny_gguf):
    command = f"{sys.executable} -m gapless inspect {tiny_gguf} --json | head -n 1"
    result = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr


@pytest.fixture
def tiny_gguf(tmp_path):
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def write_tiny_gguf(path, architecture="llama"):
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{number}" for number in range(64)])
    shapes = {"token_embd": (64, 64), "output_norm": (64,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_q": (64, 64),
            f"blk.{layer}.attn_k": (32, 64),
            f"blk.{layer}.attn_v": (32, 64),
            f"blk.{layer}.attn_output": (64, 64),
            f"blk.{layer}.ffn_gate": (128, 64),
            f"blk.{layer}.ffn_up": (128, 64),
            f"blk.{layer}.ffn_down": (64, 128),
            f"blk.{layer}.attn_norm": (64,),
            f"blk.{layer}.ffn_norm": (64,),
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
