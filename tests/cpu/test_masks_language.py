"""The mask language: what may be written, what it means, what is refused and with which hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cumha import UnsupportedError, masks
from cumha.masks import Expr

INT64_MAX = 2**63 - 1


def index() -> dict[str, Expr]:
    """The expressions b, h, q, k, as a function given to `masks.where` gets them."""
    found: dict[str, Expr] = {}

    def look(b: Expr, h: Expr, q: Expr, k: Expr) -> bool:
        found.update(b=b, h=h, q=q, k=k)
        return True

    masks.where(look)
    return found


INDEX = index()
B, H, Q, K = (INDEX[name] for name in "bhqk")


def at(expr: Expr, *, b: Any = 0, h: Any = 0, q: Any = 0, k: Any = 0, len_q=1, len_k=1) -> Any:
    return masks.evaluate(expr, b=b, h=h, q=q, k=k, len_q=len_q, len_k=len_k)


def number_at(expr: Expr, **where: Any) -> int:
    """Value of a numeric expression at one cell."""
    return at(expr, **where).item()


# --- what leaves the language


def statement(b: Expr, h: Expr, q: Expr, k: Expr) -> Any:
    if k <= q:
        return k > 3
    return k > 5


def loop(b: Expr, h: Expr, q: Expr, k: Expr) -> Any:
    while k < q:
        k = k + 1
    return k == q


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda b, h, q, k: (k <= q) and (q < 9), id="and"),
        pytest.param(lambda b, h, q, k: (k <= q) or (q < 9), id="or"),
        pytest.param(lambda b, h, q, k: not (k <= q), id="not"),
        pytest.param(lambda b, h, q, k: 0 <= k <= q, id="chained comparison"),
        pytest.param(lambda b, h, q, k: min(k, q) < 3, id="min"),
        pytest.param(lambda b, h, q, k: max(k, q) < 3, id="max"),
        pytest.param(lambda b, h, q, k: k < 3 if b == 0 else k < 5, id="conditional expression"),
        pytest.param(lambda b, h, q, k: any([k < 3, k > 5]), id="any"),
        pytest.param(lambda b, h, q, k: k in (3, 5), id="in"),
        pytest.param(lambda b, h, q, k: bool(k), id="bool of a number"),
        pytest.param(statement, id="if"),
        pytest.param(loop, id="while"),
    ],
)
def test_truth_values_are_refused_with_the_right_spelling(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError) as refused:
        masks.where(function)
    message = str(refused.value)
    for spelling in ("& | ~", "`and` `or` `not`", "(a <= b) & (b < c)", "masks.minimum", "`if`"):
        assert spelling in message


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, q, k: k / 2 < q, r"no true division: use //"),
        (lambda b, h, q, k: 2 / k < q, r"no true division: use //"),
        (lambda b, h, q, k: k // 2.0 < q, r"// in a mask needs integers, got k // 2\.0"),
        (lambda b, h, q, k: 7.5 % k < q, r"% in a mask needs integers, got 7\.5 % k"),
        (lambda b, h, q, k: (k < q) + 1, r"`add` needs numbers, got .*\(k < q\).*& \| ~"),
        (lambda b, h, q, k: -(k < q), r"needs numbers, got the boolean"),
        (lambda b, h, q, k: (k < q) * (q < 3), r"needs numbers, got the boolean"),
        (lambda b, h, q, k: (k < q) // 2 == 1, r"needs numbers, got the boolean"),
        (lambda b, h, q, k: masks.minimum(k < q, 1), r"needs numbers, got the boolean"),
        (lambda b, h, q, k: True + k < 2, r"needs numbers, got the boolean expression True"),
        (lambda b, h, q, k: (k < q) < (q < 3), r"cannot compare .*booleans compare by == and !="),
        (lambda b, h, q, k: (k < q) == 1, r"cannot compare .*booleans compare by =="),
        (lambda b, h, q, k: k & 1, r"combine boolean expressions, got the number k"),
        (lambda b, h, q, k: (k < q) & 1, r"combine boolean expressions, got the number 1"),
        (lambda b, h, q, k: ~k, r"combine boolean expressions, got the number k"),
        (lambda b, h, q, k: k < "3", r"str is not part of the mask language"),
        (lambda b, h, q, k: k < None, r"NoneType is not part of the mask language"),
        (lambda b, h, q, k: k < 3j, r"complex is not part of the mask language"),
        (lambda b, h, q, k: k < [3], r"list is not part of .*masks\.array\(x\)"),
        (lambda b, h, q, k: k < np.arange(3), r"ndarray is not part of .*masks\.array\(x\)"),
        (lambda b, h, q, k: np.arange(3) <= k, r"ndarray is not part of .*masks\.array\(x\)"),
        (lambda b, h, q, k: np.arange(3) + k < 3, r"ndarray is not part of"),
        (lambda b, h, q, k: np.ones(3, bool) & (k < q), r"ndarray is not part of"),
        (lambda b, h, q, k: np.minimum(k, q) < 3, r"."),
        (lambda b, h, q, k: np.arange(9)[k] < 3, r"."),
        (lambda b, h, q, k: masks.array(np.arange(3)) < k, r"."),
        (lambda b, h, q, k: k < masks.array(np.arange(3)), r"needs an index, one expression"),
        (lambda b, h, q, k: k**2 < q, r"unsupported operand"),
        (lambda b, h, q, k: k << 1 < q, r"unsupported operand"),
        (lambda b, h, q, k: range(k), r"."),
        (lambda b, h, q, k: k.astype(int) < q, r"."),
    ],
)
def test_operations_outside_the_language(function: Callable[..., Any], message: str) -> None:
    with pytest.raises((TypeError, AttributeError, IndexError), match=message):
        masks.where(function)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda b, h, q, k: None, TypeError, r"returned None: it must return the mask"),
        (lambda b, h, q, k: k - q, TypeError, r"returned the int expression \(k - q\)"),
        (lambda b, h, q, k: 1, TypeError, r"returned the int expression 1"),
        (lambda b, h, q, k: k * 0.5, TypeError, r"returned the float expression"),
        (lambda b, h, q, k: "yes", TypeError, r"str is not part of the mask language"),
        (lambda b, h, q, k: (k < q,), TypeError, r"tuple is not part of the mask language"),
        (lambda b, h, q, k: np.ones((2, 2), bool), TypeError, r"ndarray is not part of"),
        (lambda b, h: b < h, TypeError, r"positional argument"),
        (lambda b, h, q, k: k // 0 < 1, ValueError, r"division by zero in a mask: k // 0"),
        (lambda b, h, q, k: k % 0 < 1, ValueError, r"division by zero in a mask: k % 0"),
        (lambda b, h, q, k: k < float("nan"), ValueError, r"must not be NaN"),
        (lambda b, h, q, k: k < 2**63, ValueError, r"9223372036854775808 .*64-bit"),
    ],
)
def test_functions_that_return_something_else(
    function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        masks.where(function)


@pytest.mark.parametrize("thing", [None, 3, "causal", np.ones((2, 2), bool), masks.causal()])
def test_where_needs_a_function(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"masks\.where needs a function of \(b, h, q, k\), got"):
        masks.where(thing)


# --- arrays


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([1, 2], TypeError, r"must be a NumPy or CuPy array, got list"),
        (3, TypeError, r"must be a NumPy or CuPy array, got int"),
        (np.arange(3, dtype=np.uint64), TypeError, r"uint64 is not supported: use one of bool"),
        (np.arange(3, dtype=np.complex64), TypeError, r"dtype complex64 is not supported"),
        (np.arange(3, dtype=">i4"), TypeError, r"dtype >i4 is not supported.*native byte order"),
        (np.array(["a"]), TypeError, r"is not supported"),
        (np.array(3), ValueError, r"1 to 4 axes, got shape \(\)"),
        (np.zeros((1, 1, 1, 1, 1)), ValueError, r"1 to 4 axes, got shape \(1, 1, 1, 1, 1\)"),
        (np.ma.masked_array([1]), TypeError, r"numpy\.ma\.MaskedArray"),
    ],
)
def test_arrays_that_are_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        masks.array(data)


def test_array_indices() -> None:
    x = masks.array(np.zeros((2, 3), int))
    assert masks.array(x) is x
    for wrong in (lambda: x[K], lambda: x[B, Q, K], lambda: x[()]):
        with pytest.raises(TypeError, match=r"shape \(2, 3\) needs 2 indices, got"):
            wrong()
    with pytest.raises(TypeError, match=r"index must be an integer expression, got"):
        x[B, K * 0.5]
    with pytest.raises(TypeError, match=r"index must be an integer expression, got \(k < q\)"):
        x[B, K < Q]
    with pytest.raises(TypeError, match=r"slice is not part of the mask language"):
        x[B, :]
    with pytest.raises(TypeError, match=r"ellipsis is not part of"):
        x[..., K]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.dense(np.ones((2, 2))), TypeError, r"needs dtype bool, got float64.*bias"),
        (lambda: masks.dense(np.ones((2, 2), int)), TypeError, r"needs dtype bool, got int64"),
        (lambda: masks.dense([[True]]), TypeError, r"dense needs a NumPy or CuPy array, got list"),
        (lambda: masks.dense(None), TypeError, r"dense needs a NumPy or CuPy array, got NoneType"),
        (lambda: masks.dense(np.ones((1,) * 5, bool)), ValueError, r"heads_q, len_q, len_k\]"),
        (lambda: masks.key_padding(np.ones((2, 3))), TypeError, r"key_padding needs dtype bool"),
        (lambda: masks.key_padding(np.ones(3, bool)), ValueError, r"\[batch, len_k\], got \(3,\)"),
        (lambda: masks.key_padding(np.ones((1, 1, 3), bool)), ValueError, r"\[batch, len_k\]"),
        (
            lambda: masks.segments(np.zeros((2, 3)), np.zeros((2, 3), int)),
            TypeError,
            r"segments q_ids needs dtype int8 or .*got float64",
        ),
        (
            lambda: masks.segments(np.zeros((2, 3), int), np.zeros((2, 3), np.uint64)),
            TypeError,
            r"segments k_ids needs dtype .*got uint64",
        ),
        (
            lambda: masks.segments(np.zeros(3, int), np.zeros((2, 3), int)),
            ValueError,
            r"segments q_ids needs shape \[batch, len_q\]",
        ),
        (lambda: masks.causal("middle"), ValueError, r"bottom_right.*top_left.*got 'middle'"),
        (lambda: masks.window(1, 1, align=None), ValueError, r"got None"),
        (lambda: masks.window(2.0, 0), TypeError, r"window left must be an integer, got 2\.0"),
        (lambda: masks.window(0, True), TypeError, r"window right must be an integer, got True"),
        (lambda: masks.window(-2, 0), ValueError, r"-1 \(open\) or at least 0, got -2"),
    ],
)
def test_built_in_masks_check_their_arguments(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


# --- limits


def test_too_many_numbers_arrays_and_nodes() -> None:
    fits = masks.where(lambda b, h, q, k: _chain(k == 3, *(k == i for i in range(15))))
    assert len(fits.numbers) == 16
    over = masks.where(lambda b, h, q, k: _chain(k == 3, *(k == i for i in range(16))))
    with pytest.raises(UnsupportedError, match=r"17 numbers, at most 16 .*masks\.array"):
        _ = over.numbers
    arrays = [masks.array(np.ones(3, bool)) for _ in range(9)]
    assert len(_chain(*(x[K] for x in arrays[:8])).arrays) == 8
    with pytest.raises(UnsupportedError, match=r"9 arrays, at most 8 .*stack them"):
        _ = _chain(*(x[K] for x in arrays)).structure
    deep = K
    for _ in range(300):
        deep = deep + Q
    with pytest.raises(UnsupportedError, match=r"\d{3} nodes, at most 256 .*masks\.array"):
        _ = (deep < 3).structure


def _chain(first: Expr, *rest: Expr) -> Expr:
    for term in rest:
        first = first | term
    return first


def test_one_array_or_number_used_twice_takes_one_slot_where_it_is_one_object() -> None:
    x = masks.array(np.arange(5))
    assert len((x[K] == x[Q]).arrays) == 1
    other = masks.array(x.data)
    assert len((x[K] == other[Q]).arrays) == 2


# --- what works


def test_numpy_numbers_on_either_side() -> None:
    for three in (np.int64(3), np.int8(3), np.uint8(3), np.float32(3), np.float64(3)):
        for expr in (three <= K, K >= three, ~(K < three), ~(three > K)):
            assert at(expr, k=np.arange(6)).tolist() == [False] * 3 + [True] * 3
        assert number_at(three + K, k=4) == number_at(K + three, k=4) == 7
        assert number_at(three - K, k=4) == -1
        assert number_at(three * K, k=4) == 12
    assert number_at(np.int32(7) // K, k=2) == 3
    assert number_at(np.int32(7) % K, k=4) == 3
    for yes in (True, np.True_):
        assert bool(at(yes & (K == 0)))
        assert bool(at((K == 1) | yes))
        assert not bool(at(yes ^ (K == 0)))
    assert masks.where(lambda b, h, q, k: np.bool_(False)).op == "const"


def test_every_operator() -> None:
    k = np.arange(-6, 7)
    q = np.arange(1, 8)[:, None]
    for expr, wanted in (
        (K + Q, k + q),
        (K - Q, k - q),
        (2 - K, 2 - k + 0 * q),
        (K * Q, k * q),
        (K // Q, k // q),
        (K % Q, k % q),
        (-K, -k + 0 * q),
        (abs(K), abs(k) + 0 * q),
        (masks.minimum(K, Q), np.minimum(k, q)),
        (masks.maximum(K, 3), np.maximum(k, 3) + 0 * q),
        (K < Q, k < q),
        (K <= Q, k <= q),
        (K > Q, k > q),
        (K >= Q, k >= q),
        (K == Q, k == q),
        (K != Q, k != q),
        ((K < Q) & (K > 0), (k < q) & (k > 0)),
        ((K < Q) | (K > 3), (k < q) | (k > 3)),
        ((K < Q) ^ (K > 0), (k < q) ^ (k > 0)),
        (~(K < Q), ~(k < q)),
        ((K < Q) == (K > 0), (k < q) == (k > 0)),
        ((K < Q) != (K > 0), (k < q) != (k > 0)),
        (K * 0.5 < Q, k * 0.5 < q),
        (K + 0.25 == Q, k + 0.25 == q),
    ):
        found = at(expr, k=k, q=q)
        np.testing.assert_array_equal(np.broadcast_to(found, np.shape(wanted)), wanted, repr(expr))


def test_lengths_and_all_indices() -> None:
    b, h = np.arange(2)[:, None, None, None], np.arange(3)[:, None, None]
    expr = masks.where(
        lambda b, h, q, k: (b + 2 * h + 3 * q + 5 * k) % 7 < masks.len_k - masks.len_q
    )
    q, k = np.arange(4)[:, None], np.arange(5)
    found = at(expr, b=b, h=h, q=q, k=k, len_q=4, len_k=7)
    np.testing.assert_array_equal(found, (b + 2 * h + 3 * q + 5 * k) % 7 < 3)


@given(st.integers(-(2**63), INT64_MAX), st.integers(-20, 20))
def test_floor_division_and_modulo_are_those_of_numpy(x: int, y: int) -> None:
    divisor = masks.array(np.array([y]))[B]
    with np.errstate(all="ignore"):
        quotient, rest = np.int64(x) // np.array(y), np.int64(x) % np.array(y)
    assert number_at((K + x) // divisor) == quotient
    assert number_at((K + x) % divisor) == rest


@pytest.mark.parametrize(
    ("x", "y", "quotient", "rest"),
    [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (-7, -2, 3, -1), (5, 0, 0, 0), (-5, 0, 0, 0)],
)
def test_division_rounds_down_and_zero_gives_zero(x: int, y: int, quotient: int, rest: int) -> None:
    divisor = masks.array(np.array([y]))[B]
    assert number_at((K + x) // divisor) == quotient
    assert number_at((K + x) % divisor) == rest


def test_integers_wrap_at_64_bits() -> None:
    assert number_at(K + INT64_MAX, k=1) == -(2**63)
    assert number_at(Q - (K + INT64_MAX), k=0, q=-2) == INT64_MAX
    assert number_at(K * (2**62), k=4) == 0
    assert number_at(-(K + (-(2**63)))) == -(2**63)
    assert number_at((K + (-(2**63))) // masks.array(np.array([-1]))[B]) == -(2**63)


def test_integers_become_reals_only_beside_reals() -> None:
    big = 2**53 + 1
    assert bool(at(K == big, k=big)) and not bool(at(K == big, k=big - 1))
    assert bool(at(K == float(2**53), k=big))  # as doubles they are equal


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
def test_look_ups_of_narrow_integers_do_not_wrap(dtype: str) -> None:
    top = min(int(np.iinfo(dtype).max), 2**61)
    x = masks.array(np.array([top], dtype))
    assert number_at(x[K] + x[K]) == 2 * top
    assert number_at(-x[K]) == -top


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_look_ups_of_reals(dtype: str) -> None:
    x = masks.array(np.array([1.5, np.nan, np.inf], dtype))
    k = np.arange(3)
    assert at(x[K] > 1, k=k).tolist() == [True, False, True]
    assert at(x[K] == x[K], k=k).tolist() == [True, False, True]
    assert at(x[K] != x[K], k=k).tolist() == [False, True, False]
    assert at(masks.minimum(x[K], 9) < 10, k=k).tolist() == [True, False, True]


def test_look_ups_outside_the_array_raise() -> None:
    x = masks.array(np.arange(6).reshape(2, 3))
    for expr, where in (
        (x[B, K - 1] == 0, {"k": np.arange(3)}),
        (x[B, K] == 0, {"k": np.arange(4)}),
        (x[B, K] == 0, {"b": 2}),
        (x[B - 1, K] == 0, {}),
    ):
        with pytest.raises(IndexError, match=r"look-up .*leaves axis \d of size \d"):
            at(expr, **where)
    with pytest.raises(IndexError, match=r"index 0…6 leaves axis 0 of size 4"):
        short = masks.array(np.arange(4))
        masks.materialize(short[K] >= 0, batch=1, heads_q=1, len_q=1, len_k=7)


def test_a_look_up_sees_values_written_later() -> None:
    keep = np.zeros((1, 4), bool)
    mask = masks.key_padding(keep)
    keep[0, 2] = True
    assert at(mask, k=np.arange(4)).tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    "shape", [(), (5,), (3, 5), (1, 5), (3, 1), (4, 3, 5), (2, 1, 1, 5), (2, 4, 3, 5)]
)
def test_dense_masks_broadcast_like_numpy(shape: tuple[int, ...]) -> None:
    keep = np.random.default_rng(0).random(shape) < 0.5
    found = masks.materialize(masks.dense(np.asarray(keep)), batch=2, heads_q=4, len_q=3, len_k=5)
    np.testing.assert_array_equal(found, np.broadcast_to(keep, (2, 4, 3, 5)))


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("sides", [(0, 0), (2, 1), (-1, 0), (3, -1), (-1, -1), (100, 100)])
def test_windows_are_inclusive_on_both_sides(align: str, sides: tuple[int, int]) -> None:
    left, right = sides
    found = masks.materialize(
        masks.window(left, right, align=align), batch=1, heads_q=1, len_q=4, len_k=9
    )[0, 0]
    for q in range(4):
        position = q + 5 if align == "bottom_right" else q
        for k in range(9):
            wanted = (left < 0 or k >= position - left) and (right < 0 or k <= position + right)
            assert found[q, k] == wanted


def test_causal_is_anchored_at_the_valid_length() -> None:
    sizes = {"batch": 3, "heads_q": 1, "len_q": 2, "len_k": 5}
    found = masks.materialize(masks.causal(), **sizes, key_lengths=[5, 3, 1])
    assert found[:, 0].astype(int).tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]],
    ]


# --- text and structure


def test_expressions_print_as_python_writes_them() -> None:
    assert repr(masks.causal()) == "(k <= (q + (len_k - len_q)))"
    assert repr((K < 3) & ~(Q == K)) == "((k < 3) & ~(q == k))"
    assert repr(masks.minimum(-K, 2) % 5) == "(min(-k, 2) % 5)"
    assert repr(masks.array(np.zeros((2, 3), np.int8))) == "array<int8 [2, 3]>"
    assert repr(masks.dense(np.ones((3, 1), bool))) == "array<bool [3, 1]>[q, 0]"


def test_values_are_not_structure() -> None:
    assert masks.window(7, 0).structure == masks.window(4000, 11).structure
    assert masks.window(7, 0).numbers == (7, 0)
    assert masks.window(7, -1).structure != masks.window(7, 0).structure
    assert masks.window(7, 0, align="top_left").structure != masks.window(7, 0).structure
    assert masks.causal("top_left").structure != masks.causal().structure
    ids = np.zeros((1, 4), np.int32)
    more = np.zeros((1, 9), np.int32)
    assert masks.segments(ids, ids).structure == masks.segments(more, more).structure
    wider = more.astype(np.int64)
    assert masks.segments(ids, ids).structure != masks.segments(ids, wider).structure
    assert (K < 3).structure != (K < 3.0).structure
    assert (K < 3).structure != (K < 2**40).structure  # 64-bit arithmetic
    assert (K < 3).structure == (K < -(2**28)).structure


def test_the_same_tree_has_the_same_structure_and_code() -> None:
    def make(n: int) -> Expr:
        x = masks.array(np.arange(n + 3))
        return masks.where(lambda b, h, q, k: (k <= q) & ((q - k < n) | (x[k] == n)))

    assert make(3).structure == make(99).structure
    assert masks.cuda_source(make(3)) == masks.cuda_source(make(99))
    assert make(3).numbers == (3, 3) and make(99).numbers == (99, 99)


def test_expressions_are_neither_hashable_nor_iterable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(K < 3)
    with pytest.raises(TypeError):
        list(K)  # type: ignore[call-overload]


# --- decode


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        (masks.causal(), "True"),
        (masks.causal() & masks.causal(), "True"),
        (masks.window(-1, 0), "(k <= ((q + (len_k - len_q)) + 0))"),
        (masks.causal() | (K == 3), "True"),
        (~masks.causal(), "False"),
        (masks.causal() & (K > 3), "(3 < k)"),
        ((K > 3) & masks.causal(), "(3 < k)"),
        (masks.where(lambda b, h, q, k: k < masks.len_k), "True"),
        (masks.causal("top_left"), "(k <= q)"),
    ],
    ids=repr,
)
def test_decode_drops_what_one_row_always_sees(mask: Expr, left: str) -> None:
    assert repr(masks.specialise(mask, len_q=1)) == left
    assert masks.specialise(mask, len_q=2) is mask


def test_decode_keeps_the_keys_of_the_mask() -> None:
    for mask in (masks.causal(), masks.causal() & masks.window(2, -1), ~masks.causal() | (K == 1)):
        sizes = {"batch": 2, "heads_q": 1, "len_q": 1, "len_k": 6, "key_lengths": [6, 2]}
        np.testing.assert_array_equal(
            masks.materialize(masks.specialise(mask, len_q=1), **sizes),
            masks.materialize(mask, **sizes),
        )
