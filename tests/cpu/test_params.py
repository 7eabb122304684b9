"""The kernels' parameter struct: ``kernels_cu/params.cuh`` and ``cumha/params.py`` say the same."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cumha import emulate, masks, params, sources
from cumha.launch import pack
from cumha.masks import MAX_ARRAY_NDIM, MAX_ARRAYS, MAX_NUMBERS
from cumha.plan import Choice, workspace_parts
from cumha.problem import describe
from cumha.state import State
from tests.macros import define_lines

WORD = 8  # bytes of every field

STRIDES = ("batch", "head", "row", "element")

#: C++ types by the code that packs them.
CODES = {"long long": "q", "double": "d", "Strides": "4q"}


def members(struct_name: str) -> dict[str, str]:
    """Fields of a struct in ``params.cuh``, in order: name to C++ type."""
    text = re.sub(r"//.*", "", sources.read("params.cuh"))
    body = re.search(rf"(?:struct|union) {struct_name} \{{(.*?)\}};", text, re.DOTALL)
    assert body, struct_name
    declarations = [d.strip() for d in body[1].split(";") if d.strip()]
    found = (re.fullmatch(r"(.*?[\s*])(\w+)(\[\w+(?:\(\w+\))?\])?", d) for d in declarations)
    return {m[2]: m[1].replace(" *", "*").strip() + (m[3] or "") for m in found if m}


def test_core_has_the_same_fields_in_the_same_order() -> None:
    core = members("Core")
    assert list(core) == list(params.CORE_FIELDS)
    for name, kind in core.items():
        wanted = "Q" if kind.endswith("*") else CODES[kind]
        assert params.CORE_FIELDS[name] == wanted, name
    pointers = tuple(name for name, kind in core.items() if kind.endswith("*"))
    assert params.POINTERS == pointers == tuple(core)[: len(pointers)]


def test_strides_are_four_integers() -> None:
    assert members("Strides") == dict.fromkeys(STRIDES, "long long")


def test_mask_arguments_have_the_same_layout() -> None:
    assert members("MaskNumber") == {"i": "long long", "f": "double"}
    assert members("MaskArray") == {
        "data": "const void*",
        "extent": f"long long[{MAX_ARRAY_NDIM}]",
        "stride": f"long long[{MAX_ARRAY_NDIM}]",
    }
    assert list(members("MaskArgsOf")) == ["numbers", "arrays"]
    assert list(members("Params")) == ["core", "mask"]


def packed_example() -> tuple[dict[str, Any], bytes]:
    fields = {
        name: tuple(range(10 * i, 10 * i + 4)) if code == "4q" else 1000 + i
        for i, (name, code) in enumerate(params.CORE_FIELDS.items())
    }
    fields["scale"] = 0.125
    fields["q_stride"] = (-(2**40), 0, 2**62, -1)
    return fields, pack_core(fields)


def pack_core(fields: dict[str, Any]) -> bytes:
    return params.pack_pointers(*(fields[n] for n in params.POINTERS)) + params.pack_sizes(fields)


def unpack_core(packed: bytes) -> dict[str, Any]:
    """Read a struct field by field, without a format for the whole."""
    found: dict[str, Any] = {}
    position = 0
    for name, code in params.CORE_FIELDS.items():
        values = struct.unpack_from(f"<{code}", packed, position)
        found[name] = values if code == "4q" else values[0]
        position += WORD * len(values)
    assert position == params.CORE_BYTES
    return found


def test_core_is_packed_word_by_word() -> None:
    fields, packed = packed_example()
    assert len(packed) == params.CORE_BYTES
    assert unpack_core(packed) == fields


def test_a_missing_field_and_one_that_does_not_fit_are_errors() -> None:
    fields, _ = packed_example()
    with pytest.raises(struct.error):
        params.pack_sizes({**fields, "batch": 2**63})
    with pytest.raises(struct.error):
        params.pack_pointers(*range(len(params.POINTERS) - 1))
    del fields["total_keys"]
    with pytest.raises(KeyError, match="total_keys"):
        params.pack_sizes(fields)


def test_no_mask_is_one_empty_number_and_array() -> None:
    assert params.pack_mask(None) == bytes(WORD + WORD * (1 + 2 * MAX_ARRAY_NDIM))
    assert params.params_bytes(None) == params.CORE_BYTES + len(params.pack_mask(None))


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.window(3, 5),
        masks.dense(np.ones((2, 1, 3, 4), bool)),
        masks.window(7, -1) & masks.key_padding(np.ones((2, 9), bool)),
        masks.segments(np.zeros((2, 4), int), np.zeros((2, 4), int)),
    ],
    ids=repr,
)
def test_sizes(mask: masks.Expr) -> None:
    packed = params.pack_mask(mask)
    assert params.params_bytes(mask) == params.CORE_BYTES + len(packed)
    numbers, arrays = max(len(mask.numbers), 1), max(len(mask.arrays), 1)
    assert len(packed) == WORD * numbers + WORD * (1 + 2 * MAX_ARRAY_NDIM) * arrays


def test_the_largest_struct_fits_a_kernel_argument() -> None:
    largest = params.CORE_BYTES + WORD * MAX_NUMBERS + WORD * (1 + 2 * MAX_ARRAY_NDIM) * MAX_ARRAYS
    assert largest <= 4096  # of every architecture; 12.1 and later take more from sm_70 on


def test_numbers_and_arrays_are_packed_in_slot_order() -> None:
    table = np.zeros((6, 8), np.int32)[::2, ::-1]
    keep = np.zeros(5, bool)
    x, y = masks.array(table), masks.array(keep)
    mask = masks.where(lambda b, h, q, k: (x[q, k] < -3) & y[k] & (q * 0.5 < 2**40))
    assert mask.numbers == (-3, 0.5, 2**40)
    packed = params.pack_mask(mask)
    assert struct.unpack_from("<qdq", packed) == (-3, 0.5, 2**40)
    first = struct.unpack_from("<Q8q", packed, 3 * WORD)
    assert first == (table.ctypes.data, 3, 8, 1, 1, 16, -1, 0, 0)
    second = struct.unpack_from("<Q8q", packed, 3 * WORD + 9 * WORD)
    assert second == (keep.ctypes.data, 5, 1, 1, 1, 1, 0, 0, 0)
    assert len(packed) == (3 + 2 * 9) * WORD


def choice(splits: int = 1, keys_per_split: int | None = None, workspace: int = 0) -> Choice:
    """A choice as far as the struct depends on it."""
    return Choice(
        path="tiled", backend="emulate", device=None, tile_q=64, tile_k=64, splits=splits,
        split_by="tiles", keys_per_split=keys_per_split, grid=1, threads=128, shared_bytes=0,
        workspace_bytes=workspace, rejected=(),
    )  # fmt: skip


def test_the_struct_says_what_the_problem_is() -> None:
    """Strides are in elements, of [batch, heads, len, dim] axes whatever the layout."""
    q = np.zeros((2, 3, 4, 16), ml_dtypes.bfloat16)[:, :, :, ::2]
    k = np.zeros((2, 5, 2, 8), ml_dtypes.bfloat16)
    v = np.broadcast_to(np.zeros((1, 1, 1, 6), ml_dtypes.bfloat16), (2, 5, 2, 6))
    out = np.zeros((2, 3, 4, 6), ml_dtypes.bfloat16)
    lse = np.zeros((2, 4, 3), np.float32)
    problem, arrays = describe(
        q, k, v, layout="BLHD", out=out, lse=lse, return_lse=True, key_lengths=[3, 5], scale=0.5,
        mask=masks.window(1, 2),
    )  # fmt: skip
    packed = pack(choice(), problem, arrays, None, arrays.mask)
    assert len(packed) == params.params_bytes(arrays.mask)
    assert packed[params.CORE_BYTES :] == params.pack_mask(arrays.mask)
    fields = unpack_core(packed)
    assert fields["q_stride"] == (3 * 4 * 16, 16, 4 * 16, 2)
    assert fields["k_stride"] == (5 * 2 * 8, 8, 2 * 8, 1)
    assert fields["v_stride"] == (0, 0, 0, 1)
    assert fields["out_stride"] == (3 * 4 * 6, 6, 4 * 6, 1)
    assert fields["lse_stride"] == (12, 3, 1, 0)
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("lse", lse)):
        assert fields[name] == x.ctypes.data
    assert fields["state_o"] == fields["state_m"] == fields["state_l"] == 0
    sizes = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "key_offset", "total_keys")
    assert [fields[name] for name in sizes] == [2, 4, 2, 3, 5, 0, 5]
    assert fields["scale"] == 0.5
    assert fields["key_lengths"] == arrays.key_lengths.ctypes.data
    assert fields["key_length_stride"] == 1
    assert fields["split_o"] == fields["split_m"] == fields["split_l"] == 0
    assert (fields["splits"], fields["keys_per_split"]) == (1, 0)


def test_the_struct_of_a_split_call_points_into_its_workspace() -> None:
    q, k = np.zeros((2, 4, 3, 8), np.float32), np.zeros((2, 2, 90, 8), np.float32)
    workspace = np.zeros(8192, np.uint8)
    workspace = workspace[-workspace.ctypes.data % 128 :][:4096]
    mask = masks.window(1, 2)
    problem, arrays = describe(q, k, k, mask=mask, workspace=workspace)
    arrays = arrays._replace(out=np.zeros_like(q))
    o, m, l, size = workspace_parts(problem, 3)  # noqa: E741
    made = choice(splits=3, keys_per_split=30, workspace=size)
    packed = pack(made, problem, arrays, None, arrays.mask)
    fields = unpack_core(packed)
    start = workspace.ctypes.data
    assert [fields[f"split_{part}"] for part in "oml"] == [start + o, start + m, start + l]
    assert (fields["splits"], fields["keys_per_split"]) == (3, 30)
    # The merge gets the same struct without the mask.
    merging = pack(made, problem, arrays, None, None)
    assert merging == packed[: params.CORE_BYTES] + params.pack_mask(None)


def test_the_struct_of_a_partial_call_points_at_its_state() -> None:
    q, k = np.zeros((2, 4, 3, 8), np.float32), np.zeros((2, 2, 5, 8), np.float32)
    problem, arrays = describe(q, k, k, store_state=True, key_offset=7, total_keys=20)
    state = State.empty(2, 4, 3, 8)
    fields = unpack_core(pack(choice(), problem, arrays, state, None))
    for name, x in (("state_o", state.o), ("state_m", state.m), ("state_l", state.l)):
        assert fields[name] == x.ctypes.data
    assert fields["out"] == fields["lse"] == fields["key_lengths"] == 0
    assert fields["out_stride"] == fields["lse_stride"] == (0, 0, 0, 0)
    assert (fields["key_offset"], fields["total_keys"], fields["len_k"]) == (7, 20, 5)
    assert fields["split_o"] == fields["split_m"] == fields["split_l"] == 0


def test_a_compiler_puts_every_field_where_python_does(tmp_path: Path) -> None:
    try:
        compiler = emulate.host_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    numbers, arrays = 3, 2
    size = params.CORE_BYTES + WORD * numbers + WORD * (1 + 2 * MAX_ARRAY_NDIM) * arrays
    defines = define_lines(
        ELEMENT="__half", HEAD_DIM=8, HEAD_DIM_V=8, KEY_LENGTH_BITS=64, STORE_LSE=1,
        MASK_NUMBERS=numbers, MASK_ARRAYS=arrays, PARAMS_BYTES=size,
    )  # fmt: skip
    text = [defines]
    text += ["#include <cstddef>", "#include <cstdio>"]
    text += ['#include "emulate.hpp"', '#include "params.cuh"']
    text += ["using namespace cumha;", "int main() {"]
    show = '  std::printf("{0} %zu\\n", {1});'
    text += [show.format(n, f"offsetof(Core, {n})") for n in params.CORE_FIELDS]
    text += [show.format(f".{n}", f"offsetof(Strides, {n})") for n in STRIDES]
    text += [show.format(f"+{n}", f"offsetof(MaskArray, {n})") for n in members("MaskArray")]
    text += [
        show.format("Core", "sizeof(Core)"),
        show.format("MaskArray", "sizeof(MaskArray)"),
        show.format("numbers", "offsetof(Params, mask) + offsetof(MaskArgs, numbers)"),
        show.format("arrays", "offsetof(Params, mask) + offsetof(MaskArgs, arrays)"),
        show.format("Params", "sizeof(Params)"),
        "}",
    ]
    (tmp_path / "layout.cpp").write_text("\n".join(text))
    folders = [sources.root(), *compiler.includes]
    command = [compiler.command, "-std=c++17", *(f"-I{folder}" for folder in folders)]
    command += ["-Wno-invalid-offsetof", "layout.cpp", "-o", "layout"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True)
    found = {name: int(n) for name, n in (line.split() for line in printed.stdout.splitlines())}
    position = 0
    for name, code in params.CORE_FIELDS.items():
        assert found[name] == position, name
        position += struct.calcsize(f"<{code}")
    assert [found[f".{n}"] for n in STRIDES] == [0, 8, 16, 24]
    assert [found[f"+{n}"] for n in ("data", "extent", "stride")] == [0, 8, 40]
    assert found["Core"] == params.CORE_BYTES == found["numbers"]
    assert found["MaskArray"] == WORD * (1 + 2 * MAX_ARRAY_NDIM)
    assert found["arrays"] == params.CORE_BYTES + WORD * numbers
    assert found["Params"] == size
