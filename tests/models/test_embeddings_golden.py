"""Embeddings are the states that the network has by definition, on tiny and on real models, with the same
bits in every company."""

import json

import numpy as np
import pytest

from gapless import LLM, SamplingParams
from helpers_gguf_models import convert
from helpers_golden import GOLDEN
from helpers_models import NAMES, TINY, expected, reference_states, relative_error
from helpers_native_models import native_embeddings

POOLINGS = ["last", "mean", "cls"]
MODELS = ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"]
# Least cosine with PyTorch's vectors. Measured on these prompts: 0.999998 at least with exact activations
# (what is left are the cache's f16 and that of the stored vectors), 0.9992 with int8 ones.
LEAST_COSINE = {"a16": 0.99999, "a8": 0.998}


def pooled(states):
    return {"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_agree_with_the_definition(name):
    tokens, _ = expected(name)
    wanted = pooled(reference_states(TINY / name, tokens, cache_type=np.float16))
    found = native_embeddings(TINY / name, tokens)
    for pooling in POOLINGS:
        assert relative_error(found[pooling], wanted[pooling]) < 5e-4
    unit = native_embeddings(TINY / name, tokens, normalize=True)
    for pooling in POOLINGS:
        assert np.linalg.norm(unit[pooling]) == pytest.approx(1, abs=1e-6)
        assert cosine(unit[pooling], found[pooling]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("quant", "activations"), [("int8", "a16"), ("int8", "a8")])
@pytest.mark.parametrize("name", NAMES)
def test_tiny_quantized_models_stay_close(name, quant, activations):
    tokens, _ = expected(name)
    wanted = pooled(reference_states(TINY / name, tokens))
    found = native_embeddings(TINY / name, tokens, quant=quant, activations=activations)
    for pooling in POOLINGS:
        assert cosine(found[pooling], wanted[pooling]) > 0.995


@pytest.mark.parametrize("activations", ["a8", "a16"])
@pytest.mark.parametrize("name", NAMES)
def test_small_steps_give_the_same_bits(name, activations):
    tokens, _ = expected(name)
    options = {"quant": "int8", "activations": activations}
    whole = native_embeddings(TINY / name, tokens, **options)
    cut = native_embeddings(TINY / name, tokens, step_tokens=7, **options)
    for pooling in POOLINGS:
        np.testing.assert_array_equal(cut[pooling], whole[pooling])


def test_gguf_gives_the_same_vectors(tmp_path):
    convert(TINY / "llama", tmp_path / "model.gguf")
    tokens, _ = expected("llama")
    from_gguf = native_embeddings(tmp_path / "model.gguf", tokens)
    for pooling, vector in native_embeddings(TINY / "llama", tokens).items():
        assert relative_error(from_gguf[pooling], vector) < 1e-5


@pytest.mark.models
@pytest.mark.parametrize("activations", ["a16", "a8"])
@pytest.mark.parametrize("name", MODELS)
def test_real_models_agree_with_pytorch(name, activations, model_path):
    """The vectors are made by tests/data/make_embeddings.py."""
    prompts = [
        case["token_ids"] for case in json.loads((GOLDEN / f"{name}-dev.json").read_text())["cases"].values()
    ]
    golden = np.load(GOLDEN / f"embeddings-{name}.npz")
    with LLM(model_path(name), activations=activations, max_model_len=1024, max_num_seqs=8) as llm:
        for pooling in POOLINGS:
            outputs = llm.embed(prompts, pooling=pooling, normalize=False, use_tqdm=False)
            cosines = [
                cosine(output.outputs.embedding, wanted)
                for output, wanted in zip(outputs, golden[pooling], strict=True)
            ]
            print(f"{name} {activations} {pooling}: cosine {min(cosines):.6f} at least")
            assert min(cosines) >= LEAST_COSINE[activations]
            norms = [np.linalg.norm(output.outputs.embedding) for output in outputs]
            wanted_norms = np.linalg.norm(golden[pooling].astype(np.float64), axis=1)
            np.testing.assert_allclose(norms, wanted_norms, rtol=0.05)


@pytest.mark.models
@pytest.mark.parametrize("name", MODELS)
def test_texts_of_one_subject_lie_closer_than_those_of_two(name, model_path):
    texts = [
        "The cat sleeps on the sofa.",
        "A kitten is napping on the couch.",
        "Income tax law changed in parliament.",
        "The government passed a bill on taxes.",
    ]
    with LLM(model_path(name), max_model_len=256) as llm:
        cat, kitten, tax, bill = (output.outputs.embedding for output in llm.embed(texts, pooling="mean"))
    assert min(cat @ kitten, tax @ bill) > max(cat @ tax, cat @ bill, kitten @ tax, kitten @ bill)


@pytest.mark.models
def test_alone_in_company_in_chunks_and_with_other_threads(model_path):
    settings = [
        {"num_threads": 2, "max_num_seqs": 32, "max_step_tokens": 512},
        {"num_threads": 1, "max_num_seqs": 2, "max_step_tokens": 512},
        {"num_threads": 2, "max_num_seqs": 16, "max_step_tokens": 16},
    ]
    seen = []
    for setting in settings:
        with LLM(model_path("smollm2-135m"), max_model_len=1024, **setting) as llm:
            seen.append(vectors(llm))
            if setting["max_num_seqs"] == 32:
                seen.append(vectors(llm))  # the last token's with the help of the prefix cache
                params = SamplingParams(max_tokens=None, ignore_eos=True)
                streams = [llm.submit(f"{number} little ducks", params) for number in range(30)]
                for stream in streams:
                    next(iter(stream))
                seen.append(vectors(llm))
                assert llm.engine.stats()["num_running"] == len(streams)
                for stream in streams:
                    stream.cancel()
    for other in seen[1:]:
        np.testing.assert_array_equal(other, seen[0])


def vectors(llm):
    texts = ["The cat sat on the mat. " * 20, "Tax law.", "A component that stores data. " * 8]
    return [
        [output.outputs.embedding for output in llm.embed(texts, pooling=pooling)] for pooling in POOLINGS
    ]
