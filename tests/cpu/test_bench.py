"""``python -m cumha bench``: what is counted, timed, compared and reported; without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import cumha
from cumha import cli, masks
from cumha import compile as compiler
from cumha.bench import (
    SUITES,
    Case,
    HostClock,
    Result,
    Sample,
    Session,
    Suite,
    ceilings,
    gpu,
    peers,
    progress,
    report,
    work_of,
)
from cumha.problem import LAYOUTS

SMALL = Case("small", 2, 4, 2, 3, 40, head_dim=8, head_dim_v=16, dtype="float32")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command in this process."""
    try:
        code = cli.main(["bench", *arguments])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    return code, *capsys.readouterr()


FAST = ("--host", "--warmups", "1", "--repeats", "2")
TINY = ("--heads", "2", "--len-k", "32", "--head-dim", "8")


class FakeClock(HostClock):
    """The host's arrays, but with a cache, ceilings and copies, as a GPU has them.

    A call takes a millisecond each time it is run by `kernel`, a read one microsecond.
    """

    l2_bytes = 4096

    def __init__(self, free: int | None = None) -> None:
        super().__init__()
        self.free = free
        self.reads: list[float] = []
        self.matmuls: list[int] = []
        self.timed: list[int] = []

    def free_bytes(self) -> int | None:
        return self.free

    def kernel(self, calls: Sequence[Callable[[], Any]], warmups: int, repeats: int) -> Sample:
        for call in calls:
            call()
        self.timed.append(len(calls))
        reading = getattr(calls[0], "__name__", "") == "read"
        return Sample.of([1e-6 if reading else 1e-3] * repeats)

    def eager(self, call: Callable[[], Any]) -> Sample | None:
        call()
        return Sample.of([2e-5])

    def end_to_end(
        self, inputs: Sequence[Any], out: Any, call: Callable[[], Any], repeats: int
    ) -> Sample | None:
        call()
        return Sample.of([5e-3] * repeats)

    def readers(self, sets: Sequence[tuple[Any, Any]], share: float) -> list[Any] | None:
        self.reads.append(share)

        def read() -> None:
            pass

        return [read for _ in sets]

    def matmul(self, size: int, warmups: int, repeats: int) -> Sample | None:
        self.matmuls.append(size)
        return Sample.of([1.0])


def session(clock: Any, **options: Any) -> Session:
    return Session(clock, **{"warmups": 1, "repeats": 3, **options})


# --- what is counted


def counted(case: Case) -> tuple[int, float]:
    """Visible pairs and the share of keys that are seen, from the whole mask."""
    valid = case.len_k if case.key_lengths is None else case.key_lengths
    keep = np.ones((case.batch, case.heads_q, case.len_q, valid), bool)
    mask = masks.causal() if case.causal else None
    if case.mask is not None:
        mask = case.mask if mask is None else mask & case.mask
    if mask is not None:
        keep = masks.materialize(
            mask, batch=case.batch, heads_q=case.heads_q, len_q=case.len_q, len_k=valid
        )
    return int(keep.sum()), keep.any(axis=(1, 2)).sum() / (case.batch * case.len_k)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"causal": True, "len_q": 40},
        {"key_lengths": 10},
        {"key_lengths": 0},
        {"key_lengths": 10, "causal": True},
        {"mask": masks.window(2, 0)},
        {"mask": masks.key_padding(np.arange(80).reshape(2, 40) % 3 == 0)},
        {"mask": masks.where(lambda b, h, q, k: k <= h + 4 * b), "causal": True},
        {"len_q": 0},
    ],
    ids=str,
)
def test_work_counts_visible_pairs_and_keys(changes: dict[str, Any]) -> None:
    case = dataclasses.replace(SMALL, **changes)
    pairs, keys = counted(case)
    work = work_of(case)
    assert work.pairs == pairs
    assert work.operations == 2 * pairs * (8 + 16)
    if case.len_q:
        assert work.keys == keys
        assert work.kv_bytes == round(keys * 2 * 2 * 40 * (8 + 16) * 4)
    assert work.bytes - work.kv_bytes == 2 * 4 * case.len_q * (8 + 16) * 4


def test_too_many_pairs_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(SMALL, len_q=40, causal=True)
    exact = work_of(case).pairs
    monkeypatch.setattr(cumha.bench.cases, "MOST_PAIRS", 40 * 40 // 5)
    assert work_of(case).pairs == pytest.approx(exact, rel=0.05)
    near = dataclasses.replace(case, causal=False, mask=masks.window(0, 0))
    assert work_of(near).keys == 1  # a sample of rows does not tell which keys are seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_and_bytes_of_a_case(layout: str) -> None:
    case = dataclasses.replace(SMALL, layout=layout)
    result = session(HostClock()).measure(case)
    assert result.seconds is not None and result.seconds > 0
    assert case.array_bytes == 4 * (2 * 4 * 3 * (8 + 16) + 2 * 2 * 40 * (8 + 16))


# --- how cases are measured


def test_the_statistics_of_a_sample() -> None:
    sample = Sample.of([*range(100), 1000])
    assert sample == Sample(50, 5, 95, 101)


def test_input_sets_exceed_the_cache() -> None:
    clock = FakeClock()
    result = session(clock).measure(SMALL)
    read = work_of(SMALL).bytes
    assert (clock.timed[0] - 1) * read < 4 * clock.l2_bytes <= clock.timed[0] * read
    assert result.inputs == f"{clock.timed[0]} x 0.0177 MB"
    large = dataclasses.replace(SMALL, len_k=4000)
    assert session(clock).measure(large).inputs.startswith("1 x")


def test_short_memory_means_fewer_sets_and_is_said() -> None:
    assert SMALL.array_bytes == 17664
    tight = dataclasses.replace(SMALL, key_lengths=1)
    plenty = session(FakeClock()).measure(tight)
    assert plenty.inputs.startswith("7 x") and "below" not in plenty.inputs
    short = session(FakeClock(free=4 * SMALL.array_bytes)).measure(tight)
    assert short.inputs == "2 x 0.0177 MB, below 4 x L2"
    refused = session(FakeClock(free=SMALL.array_bytes - 1)).measure(tight)
    assert refused.seconds is None
    assert refused.refused.startswith("one set of inputs takes 1.77e-05 GB")


def test_every_call_writes_its_own_output() -> None:
    """All sets are computed, splits share one workspace, lse is written."""
    seen = []

    class Watching(FakeClock):
        def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
            x = np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 0).astype(dtype)
            seen.append(x)
            return x

    clock = Watching()
    case = dataclasses.replace(SMALL, key_lengths=20, return_lse=True, splits=1)
    session(clock, parts=()).measure(case)
    outs = [x for x in seen if x.ndim == 4]
    assert len(outs) == clock.timed[0] > 1
    assert all(np.isfinite(x).all() for x in seen)
    assert not np.array_equal(outs[0], outs[1])


def test_ceilings_are_measured_once_for_the_same_arrays() -> None:
    clock = FakeClock()
    measuring = session(clock)
    first = measuring.measure(SMALL)
    measuring.measure(dataclasses.replace(SMALL, name="again", splits=1))
    assert clock.reads == [1.0] and clock.matmuls == [ceilings.MATMUL_SIZES[0]]
    measuring.measure(dataclasses.replace(SMALL, name="half", key_lengths=20))
    assert clock.reads == [1.0, 0.5]
    measuring.measure(dataclasses.replace(SMALL, name="other", dtype="float16"))
    assert clock.reads == [1.0, 0.5, 1.0] and len(clock.matmuls) == 1

    work = work_of(SMALL)
    assert first.ceilings.read == pytest.approx(work.kv_bytes / 1e-6)
    assert first.ceilings.matmul == 2 * ceilings.MATMUL_SIZES[0] ** 3
    assert first.bytes_per_second == pytest.approx(work.bytes / 1e-3)
    assert first.operations_per_second == pytest.approx(work.operations / 1e-3)
    assert first.of_ceiling == pytest.approx(1e-3 * work.bytes / work.kv_bytes)


def test_the_larger_floor_counts() -> None:
    work = dataclasses.replace(work_of(SMALL), bytes=100, operations=1000)
    assert ceilings.Ceilings(read=10.0).floor(work) == 10
    assert ceilings.Ceilings(read=10.0, matmul=10.0).floor(work) == 100
    assert ceilings.Ceilings().floor(work) is None


@pytest.mark.parametrize(("operations", "size"), [(0, 4096), (2 * 6144**3, 6144), (10**15, 8192)])
def test_the_product_is_about_as_much_work(operations: int, size: int) -> None:
    clock = FakeClock()
    work = dataclasses.replace(work_of(SMALL), operations=operations, kv_bytes=0)
    ceilings.Store(clock, 1, 1).of(SMALL, work, None, [])
    assert clock.matmuls == [size]


def test_a_missing_product_is_said_in_the_report() -> None:
    class NoLibrary(FakeClock):
        def matmul(self, size: int, warmups: int, repeats: int) -> Sample | None:
            raise ImportError("libcublas.so.13: cannot open\nmore")

    result = session(NoLibrary()).measure(SMALL)
    assert result.ceilings.note == "no matrix product: libcublas.so.13: cannot open"
    assert result.of_ceiling is not None
    assert "no matrix product" in report.cases_table([result])


def test_refused_cases_say_why_and_single_ones_raise() -> None:
    case = dataclasses.replace(SMALL, path="gemv")
    assert session(HostClock()).measure(case).refused.startswith("it takes CuPy arrays")
    with pytest.raises(cumha.UnsupportedError):
        session(HostClock(), strict=True).measure(case)
    case = dataclasses.replace(SMALL, path="host", settings=(("tile_keys", 64),))
    assert session(HostClock()).measure(case).refused == "it has no setting tile_keys"
    with pytest.raises(ValueError, match="multiple"):
        session(HostClock()).measure(dataclasses.replace(SMALL, heads_kv=3))


def test_splits_that_are_clamped_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = cumha.plan

    def clamped(*arrays: Any, **options: Any) -> Any:
        plan = real(*arrays, **options)
        return dataclasses.replace(plan, choice=dataclasses.replace(plan.choice, splits=2))

    monkeypatch.setattr(cumha, "plan", clamped)
    result = session(HostClock()).measure(dataclasses.replace(SMALL, splits=8))
    assert result.refused == "clamped to 2 splits" and result.kernel is None


# --- suites


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda s: s.name)
def test_suites_are_sound(suite: Suite) -> None:
    """Names are unique for different cases, and a case is against one that comes before it."""
    seen: dict[str, Case] = {}
    for case in suite.cases():
        assert seen.setdefault(case.name, case) == case
        assert case.against is None or (case.against in seen and case.against != case.name)
        assert case.heads_q % case.heads_kv == 0
        assert set(dict(case.settings)) <= {f.name for f in dataclasses.fields(cumha.tuning.Tuning)}
        assert case.mask is None or case.mask_name
    assert seen and suite.table in report.TABLES


def test_splits_leaves_out_what_is_too_large() -> None:
    cases = list(SUITES["splits"].cases())
    assert max(case.array_bytes for case in cases) <= 8e9
    shapes = {(c.batch, c.heads_q, c.len_k) for c in cases}
    assert (64, 8, 16384) in shapes and (64, 8, 65536) not in shapes
    assert {c.splits for c in cases if c.batch == 1 and c.len_k == 512} >= {None, 1, 48, 64}


def test_masks_of_the_suite_keep_what_their_names_say() -> None:
    share = {case.name: work_of(case) for case in SUITES["masks"].cases()}
    full = share["full"].pairs
    assert share["segments"].pairs == full // 32
    assert share["key_padding"].pairs == share["key_lengths"].pairs == full // 2
    assert share["key_padding"].keys == share["key_lengths"].keys == 0.5
    assert share["window"].pairs == 16 * (1024 * 16384 - 1023 * 1024 // 2)
    assert share["causal"].pairs == 16 * 16384 * 16385 // 2


# --- reports


def made(name: str, seconds: float, **changes: Any) -> Result:
    case = dataclasses.replace(SMALL, name=name, **changes)
    plan = {"path": "gemv", "splits": case.splits or 1}
    return Result(case, work_of(case), plan=plan, kernel=Sample(seconds, seconds, seconds, 3))


def rows(text: str) -> list[list[str]]:
    """Cells of a table, the heading first."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_compares_with_the_row_it_names() -> None:
    text = report.cases_table(
        [made("a", 2e-3), made("b", 5e-4, against="a"), made("c", 1e-3, against="gone")]
    )
    heading, _, *lines = rows(text)
    column = heading.index("time over that of")
    assert [line[column] for line in lines] == ["", "a: 0.25", ""]
    assert "host call us" not in heading and "mask" not in heading  # nothing was measured


def test_the_splits_table_finds_the_best() -> None:
    results = [
        made("p", 1.1e-3, splits=None),
        made("p1", 1.06e-3, splits=1, against="p"),
        made("p4", 1e-3, splits=4, against="p"),
        Result(dataclasses.replace(SMALL, name="p8", splits=8, against="p"), refused="clamped"),
    ]
    text = report.splits_table(results)
    heading, _, line = rows(text)
    assert heading[-1] == "plan / best"
    assert line == ["gemv", "2", "4:2", "3", "40", "1", "1060", "4", "1000", "1.060"]
    assert text.endswith("at most 1.060; above 1.05 in 1 of 1.")


def test_the_claims_table_pairs_settings() -> None:
    a = made("A", 2e-3, settings=(("padding", 0),))
    b = made("B", 1e-3, settings=(("padding", 16),), against="A", claim="S10 rows padded")
    refused = Result(
        dataclasses.replace(SMALL, name="C", against="A", claim="S9"), refused="it has no setting x"
    )
    _, _, *lines = rows(report.claims_table([a, b, refused]))
    assert [line[0] for line in lines] == ["S10 rows padded", "S9"]
    assert lines[0][4:] == ["padding=0", "padding=16", "2000", "1000", "2.000"]
    assert lines[1][7:] == ["refused: it has no setting x", ""]


def test_peers_get_columns_with_ratios() -> None:
    result = made("a", 2e-3)
    result.peers = {"torch": {"FAST": {"median": 1e-3}, "OTHER": "no kernel for this"}}
    heading, _, line = rows(report.cases_table([result, made("b", 1.0)]))[:3]
    cells = dict(zip(heading, line, strict=True))
    assert cells["torch FAST us (time here over it)"] == "1000 (2.00)"
    assert cells["torch OTHER us (time here over it)"] == "refused"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (1234567.0, "1234567"), (123.4, "123"), (12.34, "12.3"), (0.001234, "0.00123")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert report._number(value, 1.0) == text


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert report._lines(["x"], [["a | b"]]).endswith("| a \\| b |")


def test_progress_stays_on_one_line() -> None:
    stream = io.StringIO()
    cases = [dataclasses.replace(SMALL, name=f"case {i}" + "x" * 300) for i in range(3)]
    assert list(progress.shown(cases, 3, stream)) == cases
    text = stream.getvalue()
    assert "\n" not in text and "2/3" in text and "s left" in text
    assert not text.rsplit("\r", 2)[-2].strip()  # cleared at the end
    assert list(progress.shown(cases, 3, None)) == cases
    stream = io.StringIO()
    stopped = progress.shown(cases, 3, stream)
    next(stopped)
    stopped.close()  # as an error does
    assert not stream.getvalue().rsplit("\r", 2)[-2].strip()


# --- the command


def test_one_call_on_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    files = tmp_path / "out.json", tmp_path / "out.md"
    code, out, err = run(
        capsys, *FAST, *TINY, "--len-q", "4", "--causal", "--window", "7", "-1", "--splits", "2",
        "--dtype", "bfloat16", "--lse", "--key-lengths", "int32", "--layout", "BLHD",
        "--json", str(files[0]), "--markdown", str(files[1]),
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert files[1].read_text() == out
    assert out.startswith("To repeat: `python -m cumha bench --host --warmups 1")
    assert str(tmp_path) not in out
    found = json.loads(files[0].read_text())
    (result,) = found["results"]
    assert found["runs"] == {"case": {"warmups": 1, "repeats": 2}}
    assert found["machine"]["digest"] == cli.verified_digest()
    assert {"device", "cores", "numpy", "blas", "cumha", "date"} <= found["machine"].keys()
    assert result["case"]["mask"] == "causal & window(7, -1) & key_lengths 32"
    assert result["plan"]["path"] == "host" and result["plan"]["splits"] == 2
    assert result["kernel"]["count"] == 2 and result["kernel"]["median"] > 0
    assert result["work"]["pairs"] == 2 * (29 + 30 + 31 + 32 - 22 - 23 - 24 - 21)
    assert result["eager"] is None and result["end_to_end"] is None


@pytest.mark.parametrize(
    ("parts", "measured"),
    [
        ([], ["ceilings", "eager", "end_to_end"]),
        (["--parts"], []),
        (["--parts", "eager", "ceilings"], ["ceilings", "eager"]),
    ],
    ids=str,
)
def test_parts_are_left_out(
    parts: list[str],
    measured: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(cumha.bench.command, "opened", lambda host: contextlib.nullcontext(clock))
    file = tmp_path / "out.json"
    assert run(capsys, *FAST, *TINY, *parts, "--json", str(file))[0] == 0
    (result,) = json.loads(file.read_text())["results"]
    found = ["ceilings"] if result["ceilings"]["read"] is not None else []
    found += [name for name in ("eager", "end_to_end") if result[name] is not None]
    assert found == measured
    assert result["kernel"] is not None


def test_suites_on_the_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cases() -> Iterator[Case]:
        yield SMALL
        yield dataclasses.replace(SMALL, name="twice", splits=2, against="small")
        yield SMALL  # as for several that are against it

    suites = {"own": Suite("own", "made up", cases, repeats=4), "more": Suite("more", "too", cases)}
    monkeypatch.setattr(cumha.bench.command, "SUITES", suites)
    code, out, err = run(capsys, *FAST, "--suite", "own", "more", "--path", "host", "--progress")
    assert code == 0
    assert "### own: made up" in out and "### more: too" in out
    table = rows(out.partition("### more")[0])
    assert [line[0] for line in table[2:]] == ["small", "twice"]
    assert "small: " in table[3][-1]
    assert "1/2" in err and "\n" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "quick"], "unknown suite 'quick': use one of decode, prefill, masks"),
        (["--suite", "decode", "--batch", "2"], "--batch is for a single call"),
        (["--set", "tile_keys=many"], "--set tile_keys=many: need NAME=VALUE"),
        (["--set", "tiles=3"], "unknown setting; known are block_rows, tile_keys"),
        (["--set", "tile_keys=96"], "host: it has no setting tile_keys"),
        (["--path", "gemv"], "it takes CuPy arrays"),
        (["--repeats", "0"], "--repeats 0: too few"),
        (["--parts", "eager", "copies"], "unknown part 'copies': use some of ceilings, eager"),
        (["--peers", "jax"], "unknown peer 'jax': known is torch"),
        (["--peers", "torch"], "peers are timed on a GPU"),
        (["--heads", "3", "--heads-kv", "2"], "multiple of the KV heads"),
        (["--partial"], "unrecognized arguments: --partial"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--host", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and message in err


def test_a_file_that_cannot_be_written_loses_no_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    missing = str(tmp_path / "not" / "there")
    code, out, err = run(capsys, *FAST, *TINY, "--markdown", missing)
    assert code == 2 and "### case" in out
    assert "No such file" in err and err.count("\n") == 1
    code, out, err = run(capsys, *FAST, *TINY, "--json", missing)
    assert code == 2 and out == ""  # before anything is measured
    assert "No such file" in err and err.count("\n") == 1


def test_what_was_measured_is_on_disk_before_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A run that is stopped, here in its third case, leaves the first two."""
    monkeypatch.setitem(SUITES, "three", three_cases(stop_at="third"))
    file = tmp_path / "numbers.json"
    with pytest.raises(KeyboardInterrupt):
        cli.main(["bench", *FAST, "--suite", "three", "--json", str(file)])
    lines = (tmp_path / "numbers.json.partial").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["case"]["name"] for line in lines] == ["first", "second"]
    assert not file.exists()
    monkeypatch.setitem(SUITES, "three", three_cases(stop_at=None))
    assert cli.main(["bench", *FAST, "--suite", "three", "--json", str(file)]) == 0
    assert list(tmp_path.iterdir()) == [file]
    names = [r["case"]["name"] for r in json.loads(file.read_text(encoding="utf-8"))["results"]]
    assert names == ["first", "second", "third"]


def three_cases(stop_at: str | None) -> Suite:
    def cases() -> Iterator[Case]:
        for name in ("first", "second", "third"):
            case = dataclasses.replace(SMALL, name=name)
            yield Stopping(**vars(case)) if name == stop_at else case

    return Suite("three", "three small cases", cases, parts=())


class Stopping(Case):
    """A case at which somebody stops the run."""

    @property
    def shapes(self) -> Any:
        raise KeyboardInterrupt


def test_an_error_of_the_gpu_ends_its_case_only(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(FakeClock):
        def eager(self, call: Callable[[], Any]) -> Sample | None:
            raise RuntimeError("cudaErrorLaunchFailure: unspecified launch failure")

    results = [session(clock).measure(SMALL) for clock in (Broken(), FakeClock())]
    assert results[0].seconds and "unspecified launch failure" in results[0].refused
    assert results[1].seconds and not results[1].refused
    table = report.cases_table(results)
    assert "1000; refused: cudaErrorLaunchFailure" in table  # its kernel time was there already
    with pytest.raises(RuntimeError, match="unspecified"):
        session(Broken(), strict=True).measure(SMALL)


def test_without_a_gpu_the_host_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise RuntimeError("no GPU available")

    monkeypatch.setattr(gpu.Device, "current", none)
    code, out, err = run(capsys, "--suite", "decode")
    assert (code, out) == (2, "")
    assert "no GPU available; for the host path give --host" in err and err.count("\n") == 1


def test_a_missing_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    clock = FakeClock()
    clock.library = "cupy"
    with pytest.raises(RuntimeError, match=r"torch cannot be imported .*leave --peers out"):
        peers.named(["torch"], clock)


def test_peers_are_timed_on_the_inputs_of_the_case() -> None:
    asked = []

    def peer(case: Case, inputs: Any, warmups: int, repeats: int) -> dict[str, Any]:
        asked.append((case.name, len(inputs.sets), warmups, repeats))
        return {"FAST": {"median": 1e-3}}

    clock = FakeClock()
    result = session(clock, peers={"other": peer}).measure(SMALL)
    assert asked == [("small", clock.timed[0], 1, 3)]
    assert "other FAST us" in report.cases_table([result])


def test_peers_get_the_mask_as_booleans() -> None:
    case = dataclasses.replace(
        SMALL, causal=True, key_lengths=30, mask=masks.where(lambda b, h, q, k: k != b + h)
    )
    keep = peers.dense_mask(case)
    assert keep.shape == (2, 4, 3, 40)
    assert keep.sum() == work_of(case).pairs and not keep[..., 30:].any()
    assert peers.dense_mask(dataclasses.replace(SMALL, key_lengths=30)).sum() == 3 * 30


# --- the GPU's clock, against a made-up CuPy


class FakeCuda:
    """What `GpuClock` uses of CuPy, written down; a launch takes 10 us, a product 3 ms."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0  # ms on the device
        self.launch_ms = 0.01
        self.recording: list[str] | None = None
        outer = self

        class Stream:
            def __init__(self, non_blocking: bool) -> None:
                assert non_blocking

            def __enter__(self) -> None:
                outer.log.append("stream")

            def __exit__(self, *error: Any) -> None:
                outer.log.append("left")

            def synchronize(self) -> None:
                assert outer.recording is None, "illegal while capturing"

            def begin_capture(self) -> None:
                outer.recording = []

            def end_capture(self) -> Any:
                launches, outer.recording = outer.recording, None
                return Graph(launches)

        class Graph:
            def __init__(self, launches: Any) -> None:
                self.launches = launches
                outer.log.append(f"graph of {len(launches)}: {' '.join(launches[:3])}")

            def upload(self, stream: Any) -> None:
                pass

            def launch(self) -> None:
                outer.now += outer.launch_ms * len(self.launches)

        class Event:
            def record(self, stream: Any) -> None:
                self.at = outer.now

        self.module = types.SimpleNamespace(
            cuda=types.SimpleNamespace(
                Stream=Stream,
                Event=Event,
                get_elapsed_time=lambda a, b: b.at - a.at,
                runtime=types.SimpleNamespace(CUDARuntimeError=RuntimeError),
            ),
            matmul=self.matmul,
        )

    def matmul(self, x: Any, y: Any, out: Any) -> None:
        assert self.recording is None, "CuPy refuses to capture cuBLAS"
        self.now += 3.0

    def call(self, name: str) -> Callable[[], None]:
        def launch() -> None:
            if self.recording is None:
                self.log.append(name)
            else:
                self.recording.append(name)

        return launch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made_up = FakeCuda()
    monkeypatch.setattr(gpu, "import_cupy", lambda: made_up.module)
    monkeypatch.setattr(gpu.Device, "current", lambda: gpu.Device.named("h200"))
    return made_up


def test_a_graph_holds_every_set_equally_often(fake: FakeCuda) -> None:
    with gpu.GpuClock() as clock:
        sample = clock.kernel([fake.call(n) for n in "abc"], 2, 5)
    assert sample == Sample(*[pytest.approx(1e-5)] * 3, 5)
    # once before any capture, then a graph for a first idea, then one of a millisecond
    assert fake.log == [
        "stream", "a", "b", "c", "graph of 3: a b c", "graph of 102: a b c", "left"
    ]  # fmt: skip


def test_the_slowest_kernels_are_repeated_less_often(fake: FakeCuda) -> None:
    """A launch of 4 seconds: about 10 seconds, but 5 replays at least."""
    fake.launch_ms = 4000.0
    with gpu.GpuClock() as clock:
        sample = clock.kernel([fake.call("a")], 10, 100)
    assert (sample.median, sample.count) == (pytest.approx(4.0), 5)


def test_long_kernels_and_many_sets_need_one_graph(fake: FakeCuda) -> None:
    with gpu.GpuClock() as clock:
        clock.kernel([fake.call(str(n)) for n in range(200)], 2, 5)
    assert [line for line in fake.log if line.startswith("graph")] == ["graph of 200: 0 1 2"]


def test_a_failing_capture_is_ended_and_told(fake: FakeCuda) -> None:
    def fails() -> None:
        if fake.recording is not None:
            raise ValueError("not now")

    with gpu.GpuClock() as clock:
        with pytest.raises(ValueError, match="not now"):
            clock.kernel([fails], 1, 1)
        assert fake.recording is None


def test_the_product_is_not_captured(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.GpuClock, "random", lambda *x: None)
    monkeypatch.setattr(gpu.GpuClock, "empty", lambda *x: None)
    clock = gpu.GpuClock()
    sample = clock.matmul(64, 0, 4)
    assert sample is not None and sample.median == pytest.approx(3e-3) and sample.count == 4
    monkeypatch.setenv("CUPY_TF32", "1")
    with pytest.raises(RuntimeError, match="CUPY_TF32"):
        clock.matmul(64, 0, 4)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_the_read_kernel_compiles(arch: str) -> None:
    try:
        nvrtc = compiler._nvrtc()
    except RuntimeError as error:
        pytest.skip(str(error))
    if int(arch[3:]) not in compiler.supported_architectures():
        pytest.skip(f"this NVRTC does not build for {arch}")
    program = nvrtc.createProgram(gpu.READ_KERNEL, "read.cu", [], [])
    try:
        nvrtc.compileProgram(program, ["--std=c++17", f"--gpu-architecture={arch}"])
        assert b"read_once" in nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_times_on_a_gpu_are_plausible(dtype: str) -> None:
    case = Case("decode", 4, 32, 8, 1, 8192, dtype=dtype)
    with cumha.bench.opened(host=False) as clock:
        result = session(clock, repeats=20, strict=True).measure(case)
    assert result.kernel and result.eager and result.end_to_end
    assert result.kernel.low <= result.kernel.median <= result.kernel.high
    assert result.end_to_end.median > result.kernel.median
    assert result.ceilings.read is not None and result.of_ceiling is not None
    assert 0.05 < result.of_ceiling < 1.1
    sheet = cumha.device.Device.current().memory_bandwidth
    assert sheet is None or 0.3 * sheet < result.ceilings.read < 1.05 * sheet


@pytest.mark.gpu
def test_random_inputs_fill_the_whole_array() -> None:
    with cumha.bench.opened(host=False) as clock:
        x = clock.random((3, cumha.bench.clock.PATTERN // 2), np.float32).get()
    assert 0.9 < x.std() < 1.1 and np.array_equal(x[0], x[2])


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["masks", "claims"])
def test_masked_and_tuned_cases_run_on_a_gpu(suite: str) -> None:
    """With one head; only a setting that a path does not have may be refused."""
    with cumha.bench.opened(host=False) as clock:
        measuring = session(clock, repeats=2, parts=())
        for case in SUITES[suite].cases():
            result = measuring.measure(dataclasses.replace(case, batch=1, heads_q=1, heads_kv=1))
            if result.seconds is None:
                assert case.settings and result.refused, case.name
