"""Random calls on every path: any shapes, strides, values and poison.

A kernel is built per mask structure, so that kernels take a fixed list of them with random numbers
and arrays inside; the host takes random mask expressions. Emulated kernels run each example in an
order of blocks and threads of its own. HYPOTHESIS_PROFILE=fuzz tries new examples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cumha
from cumha import emulate, testing
from cumha.testing.strategies import Call, MaskSizes, problems
from tests.kernels.structures import STRUCTURES

QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


DTYPES = ("float16", "float32", "bfloat16", "float64")
HEAD_DIMS = (8, 5, 33, 1)


def check(runner: Any, call: Call) -> None:
    arguments = call.arguments()
    del arguments["return_lse"]
    out, lse = runner.attention(**arguments)
    testing.expect(**arguments).check(out, lse)


ORDERS = st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 3))  # seed, CPU threads


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=50, suppress_health_check=QUIET)
@given(data=st.data())
def test_fixed_mask_structures(runner: Any, name: str, data: st.DataObject) -> None:
    position = list(STRUCTURES).index(name)
    build = STRUCTURES[name]

    def mask(sizes: MaskSizes) -> st.SearchStrategy[Any]:
        return st.integers(0, 2**16).map(lambda seed: build(np.random.default_rng(seed), sizes))

    call = data.draw(
        problems(
            mask=mask,
            most_len=40,
            head_dims=[HEAD_DIMS[position % len(HEAD_DIMS)]],
            dtypes=[DTYPES[(position // 2) % len(DTYPES)]],
            key_lengths=position % 2 == 1,
            causal=name == "blocks",
        )
    )
    seed, workers = data.draw(ORDERS) if runner.emulated else (0, 1)
    with emulate.using(seed=seed, workers=workers):
        check(runner, call)


SPLITS = ({}, {"splits": 2}, {"splits": 5, "split_by": "length"}, {"keys_per_split": 3})


@settings(max_examples=1000, suppress_health_check=QUIET)
@given(call=problems(), split=st.sampled_from(SPLITS))
def test_any_mask_on_the_host(call: Call, split: dict[str, Any]) -> None:
    arguments = call.arguments()
    result = cumha.attention(**arguments, **split)
    out, lse = result if arguments.pop("return_lse") else (result, None)
    testing.expect(**arguments).check(out, lse)
