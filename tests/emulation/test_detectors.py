"""Each check of the emulation finds its planted fault, and is silent on the sound twin.

A case runs faulty or, with ``p.numbers[0]`` set, sound: one word in a line makes the difference.
Lines tagged ``//! name`` are the ones that the message must name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cumha
from cumha import emulate, masks
from tests.emulation.conftest import compiling_with

SOURCE = """
constexpr int kThreads = 64;
#define SETUP                                                              \\
  [[maybe_unused]] const bool sound = p.numbers[0] != 0;                   \\
  [[maybe_unused]] const int i = threadIdx.x;                              \\
  [[maybe_unused]] const int n = p.numbers[1];                             \\
  [[maybe_unused]] const float* in = array<const float>(p, 0);             \\
  [[maybe_unused]] float* out = array<float>(p, 1);                        \\
  [[maybe_unused]] float* s = reinterpret_cast<float*>(cumha::dynamic_shared());

// --- races
CASE(race_write_write) {
  SETUP
  s[sound ? i : i / 2] = i;  //! write_write
}
CASE(race_missing_syncthreads) {
  SETUP
  s[i] = 0;
  __syncthreads();
  s[i] = i;  //! syncthreads_write
  if (sound) __syncthreads();
  out[i] = s[kThreads - 1 - i];  //! syncthreads_read
}
CASE(race_overwritten_while_read) {
  SETUP
  s[i] = i;
  __syncthreads();
  out[i] = s[(i + 32) % kThreads];  //! overwrite_read
  if (sound) __syncthreads();
  s[i] = -i;  //! overwrite_write
}
CASE(race_missing_syncwarp) {
  SETUP
  s[i] = 0;
  __syncthreads();
  s[i] = i;  //! syncwarp_write
  if (sound) __syncwarp();
  out[i] = s[i ^ 1];  //! syncwarp_read
}
CASE(race_syncwarp_is_not_for_the_block) {
  SETUP
  s[i] = 0;
  __syncthreads();
  s[i] = i;  //! two_warps_write
  if (sound) __syncthreads(); else __syncwarp();
  out[i] = s[i ^ 32];  //! two_warps_read
}
CASE(race_syncwarp_of_other_lanes) {
  SETUP
  s[i] = 0;
  __syncthreads();
  s[i] = i;  //! halves_write
  if (sound) __syncwarp(); else if (i % 32 < 16) __syncwarp(0xffffu); else __syncwarp(0xffff0000u);
  out[i] = s[i ^ 16];  //! halves_read
}
CASE(race_shuffle_orders_no_memory) {
  SETUP
  s[i] = 0;
  __syncthreads();
  s[i] = i;  //! shuffle_write
  const float other = __shfl_xor_sync(0xffffffffu, float(i), 1);
  if (sound) __syncwarp();
  out[i] = s[i ^ 1] - other;  //! shuffle_read
}
CASE(race_static_shared) {
  SETUP
  __shared__ float t[kThreads];
  t[i] = 0;
  __syncthreads();
  t[i] = i;  //! static_write
  if (sound) __syncthreads();
  out[i] = t[kThreads - 1 - i];  //! static_read
}
CASE(race_named_barrier_without_the_reader) {
  SETUP  // 96 threads: the first two warps write, the third one reads
  if (i < 64) s[i] = 0;
  __syncthreads();
  if (i < 64) s[i] = i;  //! named_write
  if (sound) {
    cumha::named_barrier_sync(1, 96);
  } else if (i < 64) {
    cumha::named_barrier_sync(1, 64);
  }
  if (i >= 64) out[i] = s[i - 64];  //! named_read
}
CASE(race_arriving_is_not_waiting) {
  SETUP
  if (i < 32) s[i] = 0;
  __syncthreads();
  if (i < 32) s[i] = i;  //! arrive_write
  if (i < 32) {
    cumha::named_barrier_arrive(1, 64);
  } else if (sound) {
    cumha::named_barrier_sync(1, 64);
  } else {
    cumha::named_barrier_arrive(1, 64);
  }
  if (i >= 32) out[i] = s[i - 32];  //! arrive_read
}
CASE(race_output) {
  SETUP
  out[sound ? i : i / 2] = i;  //! output_write
}
CASE(race_atomic_and_plain) {
  SETUP
  if (i == 0) s[0] = 0;
  __syncthreads();
  if (i == 1) atomicAdd(s, 1.0f);  //! atomic_write
  if (sound) __syncthreads();
  if (i == 0) out[0] = s[0];  //! atomic_read
}
CASE(race_bytes) {
  SETUP
  unsigned char* bytes = reinterpret_cast<unsigned char*>(s);
  bytes[sound ? i : i / 2] = i;  //! bytes_write
  __syncthreads();
  bytes[kThreads - 1 - i] = bytes[kThreads - 1 - i] + 1;
}

// --- asynchronous copies; the slot holds zeros before, except where nothing may be read
CASE(copy_never_waited_for) {
  SETUP
  cumha::copy_async<4>(s + i, in + i, 4);
  cumha::commit_copies();
  if (sound) cumha::wait_copies<0>();
  __syncthreads();
  out[i] = s[i];  //! unwaited_read
}
CASE(copy_waited_for_one_group_less) {
  SETUP
  for (int j = 0; j < 2; ++j) {
    cumha::copy_async<4>(s + kThreads * j + i, in + i, 4);
    cumha::commit_copies();
  }
  if (sound) cumha::wait_copies<0>(); else cumha::wait_copies<1>();
  out[i] = s[kThreads + i];  //! group_read
}
CASE(copy_never_committed) {
  SETUP
  cumha::copy_async<4>(s + i, in + i, 4);
  if (sound) cumha::commit_copies();
  cumha::wait_copies<0>();
  out[i] = s[i];  //! uncommitted_read
}
CASE(copy_waited_for_by_its_thread_alone) {
  SETUP
  s[i] = 0;
  __syncthreads();
  cumha::copy_async<4>(s + i, in + i, 4);  //! alone_copy
  cumha::commit_copies();
  cumha::wait_copies<0>();
  if (sound) __syncthreads();
  out[i] = s[i ^ 1];  //! alone_read
}
CASE(copy_into_a_slot_that_others_read) {
  SETUP
  s[i] = 0;
  __syncthreads();
  out[i] = s[i ^ 1];  //! slot_read
  if (sound) __syncthreads();
  cumha::copy_async<4>(s + i, in + i, 4);  //! slot_copy
  cumha::commit_copies();
  __syncthreads();
  cumha::wait_copies<0>();
}
CASE(copy_outside_its_source) {
  SETUP
  cumha::copy_async<4>(s + i, in + i + (sound ? 0 : 1), 4);  //! copy_bounds
  cumha::commit_copies();
  cumha::wait_copies<0>();
}
CASE(copy_of_more_than_its_bytes) {
  SETUP
  cumha::copy_async<4>(s + i, in + i, sound ? 4 : -4);  //! more_bytes
  cumha::commit_copies();
  cumha::wait_copies<0>();
}
CASE(copy_outside_shared_memory) {
  SETUP
  cumha::copy_async<4>(s + i + (sound ? 0 : kThreads), in + i, 4);  //! copy_shared_bounds
  cumha::commit_copies();
  cumha::wait_copies<0>();
}
CASE(copy_from_misaligned) {
  SETUP
  if (i == 0) cumha::copy_async<16>(s, in + (sound ? 4 : 1), 16);  //! copy_from
  cumha::commit_copies();
  cumha::wait_copies<0>();
}
CASE(copy_to_misaligned) {
  SETUP
  if (i == 0) cumha::copy_async<16>(s + (sound ? 4 : 2), in, 16);  //! copy_to
  cumha::commit_copies();
  cumha::wait_copies<0>();
}

// --- divergence
CASE(divergence_some_skip_the_barrier) {
  SETUP
  if (sound || i < 32) __syncthreads();  //! skip
  out[i] = 0;
}
CASE(divergence_some_end_early) {
  SETUP
  if (!sound && i == 5) return;
  __syncthreads();  //! early
  out[i] = 2 * i;
}
CASE(divergence_barrier_against_shuffle) {
  SETUP
  if (sound || i % 32 < 16) __syncthreads();  //! against_barrier
  if (sound || i % 32 >= 16) __syncwarp();  //! against_warp
}
CASE(barrier_with_two_counts) {
  SETUP
  cumha::named_barrier_sync(2, sound || i < 32 ? 64 : 32);  //! counts
}
CASE(barrier_for_part_of_a_warp) {
  SETUP
  cumha::named_barrier_sync(2, sound ? 64 : 48);  //! part
}
CASE(barrier_for_more_than_the_block) {
  SETUP
  cumha::named_barrier_sync(2, sound ? 64 : 96);  //! more
}
CASE(barrier_that_is_not_there) {
  SETUP
  cumha::named_barrier_sync(sound ? 15 : 16, 64);  //! sixteen
}

// --- collectives
CASE(shuffle_names_an_ended_lane) {
  SETUP
  if (i % 32 == 7) return;
  const unsigned mask = sound ? ~(1u << 7) : ~0u;
  out[i] = __shfl_sync(mask, float(i), 0);  //! ended
}
CASE(shuffle_names_a_lane_outside_the_block) {
  SETUP  // 40 threads: 8 in the second warp
  const unsigned mask = sound && i >= 32 ? 0xffu : ~0u;
  out[i] = __shfl_xor_sync(mask, float(i), 1);  //! outside
}
CASE(shuffle_leaves_out_its_own_lane) {
  SETUP
  if (i == 3) return;
  const unsigned mask = sound ? ~8u : ~24u;
  if (i < 32) out[i] = __shfl_sync(mask, float(i), 0);  //! own
}
CASE(shuffle_reads_a_lane_outside_its_mask) {
  SETUP
  if (i % 32 < 8) out[i] = __shfl_sync(0xffu, float(i), sound ? 7 : 8);  //! unmasked
}
CASE(different_collectives) {
  SETUP
  if (sound || i % 32 < 16) {
    out[i] = __shfl_xor_sync(~0u, float(i), 1);  //! different_shuffle
  } else {
    out[i] = __any_sync(~0u, i);  //! different_vote
  }
}
CASE(different_masks) {
  SETUP
  const unsigned mask = sound || i % 32 < 16 ? ~0u : 0xffff0000u;
  out[i] = __shfl_xor_sync(mask, float(i), 1);  //! masks
  __syncthreads();
}

// --- bounds and alignment; in and out hold n numbers each
CASE(read_past_the_end) {
  SETUP
  if (i == 0) out[0] = in[sound ? n - 1 : n];  //! read_past
}
CASE(read_before_the_start) {
  SETUP
  if (i == 0) out[0] = in[sound ? 0 : -1];  //! read_before
}
CASE(read_output_past_the_end) {
  SETUP
  if (i == 0) out[0] = out[sound ? n - 1 : n];  //! read_out_past
}
CASE(read_across_the_end) {
  SETUP
  if (i == 0) out[0] = reinterpret_cast<const float2*>(in)[sound ? 0 : n / 2].y;  //! across
}
CASE(write_past_the_end) {
  SETUP
  if (i == 0) out[sound ? n - 1 : n] = 1;  //! write_past
}
CASE(write_before_the_start) {
  SETUP
  if (i == 0) out[sound ? 0 : -1] = 1;  //! write_before
}
CASE(write_to_an_input) {
  SETUP
  float* to = sound ? out : const_cast<float*>(in);
  if (i == 0) to[n - 1] = 1;  //! write_input
}
CASE(atomic_past_the_end) {
  SETUP
  if (i == 0) atomicAdd(out + (sound ? n - 1 : n), 1.0f);  //! atomic_past
}
CASE(shared_past_the_end) {
  SETUP
  s[sound ? i : i + 1] = 1;  //! shared_past
}
CASE(null_pointer) {
  SETUP
  if (i == 0) (sound ? out : array<float>(p, 5))[0] = 1;  //! null
}
CASE(misaligned_vector_read) {
  SETUP
  if (i == 0) {
    const float4 x = *reinterpret_cast<const float4*>(in + (sound ? 4 : 1));  //! vector_read
    out[0] = x.x + x.y + x.z + x.w;
  }
}
CASE(misaligned_vector_write) {
  SETUP
  const float4 x{in[0], in[1], in[2], in[3]};
  if (i == 0) *reinterpret_cast<float4*>(out + (sound ? 4 : 1)) = x;  //! vector_write
}
CASE(misaligned_pair_in_shared_memory) {
  SETUP
  const float2 x{in[0], in[1]};
  if (i == 0) *reinterpret_cast<float2*>(s + (sound ? 2 : 1)) = x;  //! pair
}
CASE(misaligned_double) {
  SETUP
  if (i == 0) out[0] = *reinterpret_cast<const double*>(in + (sound ? 2 : 3));  //! whole_double
}
CASE(unwritten_dynamic_shared) {
  SETUP
  if (sound) s[i] = 0;
  out[i] = s[i];  //! unwritten_dynamic
}
CASE(unwritten_static_shared) {
  SETUP
  __shared__ float t[kThreads];
  if (sound) t[i] = 0;
  out[i] = t[i];  //! unwritten_static
}

// --- variables without a value
enum class Class : int { kSkip, kFull };
struct Found {
  int first;
  Class what;
};
__device__ __forceinline__ int find(int first, int end, Class& what) {
  if (first >= end) return end;
  what = Class::kFull;
  return first;
}
CASE(unset_by_a_callee) {
  SETUP
  if (!__any_sync(0xffffffffu, i % 8)) return;  // lanes 0xfefefefe: what unset variables hold
  Found found;
  if (sound) found.what = Class::kSkip;
  found.first = find(i, kThreads / 2, found.what);
  Found kept[2] = {{i, Class::kSkip}, found};
  out[i] = kept[i >= 8].what == Class::kFull;  //! unset_found
}
CASE(unset_in_one_turn) {
  SETUP
  for (int turn = 0; turn < 2; ++turn) {
    int x;  // on a GPU perhaps that of the turn before
    if (sound || turn == 0) x = i;
    if (x > 40) out[i] = turn;  //! unset_turn
  }
}
CASE(unset_in_an_array) {
  SETUP
  long long x[4];
  for (int j = 0; j < 3 + sound; ++j) x[j] = i;
  out[i] = x[i % 4] < n;  //! unset_element
}
CASE(unset_choice) {
  SETUP
  int x;
  if (sound || i != 9) x = i;
  switch (x) {  //! unset_choice
    case 2: out[i] = 4; break;
    case 9: out[i] = 1; break;
    case 31: out[i] = 5; break;
    case 700: out[i] = 7; break;
    case 9000: out[i] = 8; break;
  }
}
CASE(unset_float) {
  SETUP
  float x;
  if (sound || i != 9) x = in[i];
  out[i] = x > 0 ? 1 : 2;  //! unset_float
}
CASE(unset_double) {
  SETUP
  double x;
  if (sound || i != 9) x = in[i];
  out[i] = x < in[3] ? 1 : 2;  //! unset_double
}

// --- ldmatrix
CASE(ldmatrix_of_a_misaligned_row) {
  SETUP
  for (int j = i; j < 160; j += kThreads) s[j] = j;
  __syncthreads();
  unsigned got[4];
  cumha::load_matrices<4, false>(got, s + 4 * (i % 32) + (sound ? 0 : 1));  //! ldmatrix_row
}
CASE(ldmatrix_of_unwritten_rows) {
  SETUP
  for (int j = i; j < 128; j += kThreads)
    if (sound || j < 100) s[j] = j;
  __syncthreads();
  unsigned got[4];
  cumha::load_matrices<4, true>(got, s + 4 * (i % 32));  //! ldmatrix_unwritten
}
CASE(ldmatrix_missing_barrier) {
  SETUP
  for (int j = i; j < 128; j += kThreads) s[j] = 0;
  __syncthreads();
  for (int j = i; j < 128; j += kThreads) s[j] = j;  //! ldmatrix_write
  if (sound) __syncthreads();
  unsigned got[2];
  cumha::load_matrices<2, false>(got, s + 4 * (31 - i % 32));  //! ldmatrix_read
}
"""

RACE = "race: it (reads|writes) .* with no barrier between"
UNWRITTEN = "it reads shared memory that no thread has written"
EARLY = f"{UNWRITTEN}|an asynchronous copy of .* is under way"
UNSET = "it compares a variable that has no value"
STUCK = "threads wait for each other"


@dataclass(frozen=True)
class Fault:
    case: str
    message: str
    tags: tuple[str, ...]  # all of them are in the message
    block: int = 64


FAULTS = [
    Fault("race_write_write", RACE, ("write_write",)),
    Fault("race_missing_syncthreads", RACE, ("syncthreads_write", "syncthreads_read")),
    Fault("race_overwritten_while_read", RACE, ("overwrite_write", "overwrite_read")),
    Fault("race_missing_syncwarp", RACE, ("syncwarp_write", "syncwarp_read"), block=32),
    Fault("race_syncwarp_is_not_for_the_block", RACE, ("two_warps_write", "two_warps_read")),
    Fault("race_syncwarp_of_other_lanes", RACE, ("halves_write", "halves_read"), block=32),
    Fault("race_shuffle_orders_no_memory", RACE, ("shuffle_write", "shuffle_read")),
    Fault("race_static_shared", RACE, ("static_write", "static_read")),
    Fault("race_named_barrier_without_the_reader", RACE, ("named_write", "named_read"), block=96),
    Fault("race_arriving_is_not_waiting", RACE, ("arrive_write", "arrive_read")),
    Fault("race_output", "race: it writes out that", ("output_write",)),
    Fault("race_bytes", RACE, ("bytes_write",)),
    Fault("race_atomic_and_plain", RACE, ("atomic_write", "atomic_read")),
    Fault("copy_never_waited_for", EARLY, ("unwaited_read",)),
    Fault("copy_waited_for_one_group_less", EARLY, ("group_read",)),
    Fault("copy_never_committed", EARLY, ("uncommitted_read",)),
    Fault("copy_waited_for_by_its_thread_alone", RACE, ("alone_copy", "alone_read")),
    Fault("copy_into_a_slot_that_others_read", f"{RACE}|{EARLY}", ("slot_copy", "slot_read")),
    Fault("copy_outside_its_source", "reads 4 bytes outside in, 1 bytes past", ("copy_bounds",)),
    Fault("copy_of_more_than_its_bytes", "copy of 4 bytes takes -4 from its", ("more_bytes",)),
    Fault("copy_outside_shared_memory", "writes 4 bytes outside", ("copy_shared_bounds",)),
    Fault("copy_from_misaligned", "copy of 16 bytes reads a misaligned address", ("copy_from",)),
    Fault("copy_to_misaligned", "writes 16 bytes at an address that is no mult", ("copy_to",)),
    Fault("divergence_some_skip_the_barrier", f"{STUCK}: 32 in __syncthreads.*32 have", ("skip",)),
    Fault("divergence_some_end_early", f"{STUCK}: 63 in __syncthreads.* 1 have ended", ("early",)),
    Fault(
        "divergence_barrier_against_shuffle", STUCK, ("against_barrier", "against_warp"), block=32
    ),
    Fault("barrier_with_two_counts", "barrier 2 is for (32|64) threads here", ("counts",)),
    Fault("barrier_for_part_of_a_warp", "barrier 2 for 48 threads", ("part",)),
    Fault("barrier_for_more_than_the_block", "barrier 2 for 96 threads", ("more",)),
    Fault("barrier_that_is_not_there", "there is no barrier 16", ("sixteen",)),
    Fault("shuffle_names_an_ended_lane", "__shfl_sync names lane 7 .* not active", ("ended",)),
    Fault(
        "shuffle_names_a_lane_outside_the_block",
        "__shfl_xor_sync names lane 8 .* not active",
        ("outside",),
        block=40,
    ),
    Fault("shuffle_leaves_out_its_own_lane", "ffffffe7, which leaves out this lane, 4", ("own",)),
    Fault(
        "shuffle_reads_a_lane_outside_its_mask",
        "__shfl_sync reads lane 8, which is not in its mask 000000ff",
        ("unmasked",),
    ),
    Fault(
        "different_collectives",
        "(__shfl_xor_sync|__any_sync|__ballot_sync) where other lanes of the warp are in",
        (),
    ),
    Fault("different_masks", STUCK, ("masks",)),
    Fault("read_past_the_end", "reads 4 bytes outside in, 1 bytes past its last", ("read_past",)),
    Fault("read_before_the_start", "4 bytes outside in, 4 bytes before its", ("read_before",)),
    Fault("read_output_past_the_end", "reads 4 bytes outside out, 1 bytes", ("read_out_past",)),
    Fault("read_across_the_end", "outside in", ("across",)),
    Fault("write_past_the_end", "writes 4 bytes outside out, 1 bytes past its", ("write_past",)),
    Fault("write_before_the_start", "writes 4 bytes outside out, 4 bytes bef", ("write_before",)),
    Fault("write_to_an_input", "writes 4 bytes outside outputs: in is an input", ("write_input",)),
    Fault("atomic_past_the_end", "4 bytes outside out, 1 bytes past its last", ("atomic_past",)),
    Fault("shared_past_the_end", "writes 4 bytes outside", ("shared_past",)),
    Fault("null_pointer", "writes 4 bytes outside every array of the call", ("null",)),
    Fault("misaligned_vector_read", "no multiple of 16", ("vector_read",)),
    Fault("misaligned_vector_write", "no multiple of 16", ("vector_write",)),
    Fault("misaligned_pair_in_shared_memory", "no multiple of 8", ("pair",)),
    Fault("misaligned_double", "no multiple of 8", ("whole_double",)),
    Fault("unwritten_dynamic_shared", UNWRITTEN, ("unwritten_dynamic",)),
    Fault("unwritten_static_shared", UNWRITTEN, ("unwritten_static",)),
    Fault("unset_by_a_callee", UNSET, ("unset_found",)),
    Fault("unset_in_one_turn", UNSET, ("unset_turn",)),
    Fault("unset_in_an_array", UNSET, ("unset_element",)),
    Fault("unset_choice", UNSET, ("unset_choice",)),
    Fault("unset_float", UNSET, ("unset_float",)),
    Fault("unset_double", UNSET, ("unset_double",)),
    Fault("ldmatrix_of_a_misaligned_row", "ldmatrix: .* is not aligned to 16", ("ldmatrix_row",)),
    Fault("ldmatrix_of_unwritten_rows", UNWRITTEN, ("ldmatrix_unwritten",)),
    Fault("ldmatrix_missing_barrier", RACE, ("ldmatrix_write", "ldmatrix_read")),
]
SHARED = {  # bytes of dynamic shared memory where it is not 1024
    "shared_past_the_end": 256,
    "copy_outside_shared_memory": 256,
}
COUNT = 65  # numbers in "in" and "out"; odd: a pair can lie across the end


@pytest.fixture(scope="module")
def planted(cases: Callable[..., Any]) -> Any:
    return cases("planted", SOURCE)


def run(
    planted: Any, guarded: Any, fault: Fault, *, sound: bool, seed: int, build: str = "release"
) -> None:
    count = 64 if fault.case.startswith("copy_outside_its") else COUNT
    inputs = {"in": guarded(np.arange(count, dtype=np.float32))}
    outputs = {"out": guarded(np.zeros(96 if fault.block == 96 else COUNT, np.float32))}
    shared = SHARED.get(fault.case, 1024)
    with emulate.using(checks="all", seed=seed):
        planted.run(
            fault.case,
            int(sound),
            count,
            inputs=inputs,
            outputs=outputs,
            block=(fault.block,),
            shared_bytes=shared,
            build=build,
        )


def named(case: str) -> Fault:
    return next(f for f in FAULTS if f.case == case)


def skip_unless_known(compiler: str, fault: Fault) -> None:
    with compiling_with(compiler):
        if fault.message == UNSET and not emulate.host_compiler().unset_flags:
            pytest.skip(f"unset variables do not show with {compiler}, they do with g++ 12")


def test_every_case_is_listed(planted: Any) -> None:
    assert sorted(planted.names) == sorted(f.case for f in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.case)
def test_planted_fault_is_caught(planted: Any, guarded: Any, fault: Fault) -> None:
    skip_unless_known(planted.compiler, fault)
    for seed in range(4):
        with pytest.raises(emulate.EmulationError, match=fault.message) as caught:
            run(planted, guarded, fault, sound=False, seed=seed)
        message, places = str(caught.value), caught.value.places
        assert "block (0,0,0) thread (" in message
        for tag in fault.tags:
            place = planted.place(tag)
            assert any(p.startswith(place) for p in places), (place, message)
            assert place in message


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.case)
def test_sound_twin_is_silent(planted: Any, guarded: Any, fault: Fault) -> None:
    for seed in range(4):
        run(planted, guarded, fault, sound=True, seed=seed)


def test_different_collectives_name_a_line_of_the_kernel(planted: Any, guarded: Any) -> None:
    """Which of the two depends on the order of threads."""
    with pytest.raises(emulate.EmulationError) as caught:
        run(planted, guarded, named("different_collectives"), sound=False, seed=0)
    both = planted.place("different_shuffle"), planted.place("different_vote")
    assert any(p.startswith(both) for p in caught.value.places)


def test_message_names_block_and_thread(planted: Any, guarded: Any) -> None:
    outputs = {"out": guarded(np.zeros(COUNT, np.float32))}
    inputs = {"in": guarded(np.zeros(COUNT, np.float32))}
    numbers = (0, COUNT)
    with emulate.using(checks="all"), pytest.raises(emulate.EmulationError) as caught:
        planted.run(
            "write_past_the_end", *numbers, inputs=inputs, outputs=outputs,
            grid=(2, 3), block=(1, 2, 2),
        )  # fmt: skip
    assert re.match(r"block \([01],[0-2],0\) thread \(0,[01],[01]\): it writes", str(caught.value))


@pytest.mark.parametrize("checks", ["all", "none"])
def test_divergence_is_found_without_checks_too(planted: Any, guarded: Any, checks: str) -> None:
    arrays = {"inputs": {"in": guarded(np.zeros(COUNT, np.float32))},
              "outputs": {"out": guarded(np.zeros(COUNT, np.float32))}}  # fmt: skip
    for case, tag in (
        ("divergence_some_skip_the_barrier", "skip"),
        ("divergence_some_end_early", "early"),
        ("shuffle_reads_a_lane_outside_its_mask", "unmasked"),
        ("different_masks", "masks"),
    ):
        with emulate.using(checks=checks):
            with pytest.raises(emulate.EmulationError, match=named(case).message) as caught:
                planted.run(case, 0, COUNT, **arrays, block=(64,), shared_bytes=1024)
            assert any(p.startswith(planted.place(tag)) for p in caught.value.places), case
            planted.run(case, 1, COUNT, **arrays, block=(64,), shared_bytes=1024)


@pytest.mark.parametrize(
    "case",
    [
        "race_missing_syncthreads",
        "copy_outside_its_source",
        "divergence_some_end_early",
        "barrier_with_two_counts",
        "shuffle_reads_a_lane_outside_its_mask",
        "write_past_the_end",
        "misaligned_vector_read",
        "unset_by_a_callee",
        "ldmatrix_of_unwritten_rows",
    ],
)
def test_debug_build_finds_the_same(planted: Any, guarded: Any, case: str) -> None:
    """Nothing is inlined there: the message must name the kernel, not what it calls."""
    fault = named(case)
    skip_unless_known(planted.compiler, fault)
    with pytest.raises(emulate.EmulationError, match=fault.message) as caught:
        run(planted, guarded, fault, sound=False, seed=0, build="debug")
    for tag in fault.tags:
        assert any(p.startswith(planted.place(tag)) for p in caught.value.places), str(caught.value)
    run(planted, guarded, fault, sound=True, seed=0, build="debug")


def test_a_copy_that_nobody_waits_for_leaves_poison(planted: Any, guarded: Any) -> None:
    """Without checks the missing wait shows in the result."""
    inputs = {"in": guarded(np.ones(COUNT, np.float32))}
    outputs = {"out": guarded(np.zeros(COUNT, np.float32))}
    for sound, expected in ((0, np.nan), (1, 1.0)):
        with emulate.using(checks="none"):
            planted.run(
                "copy_never_waited_for", sound, COUNT,
                inputs=inputs, outputs=outputs, block=(64,), shared_bytes=1024,
            )  # fmt: skip
        np.testing.assert_array_equal(outputs["out"][:64], np.float32(expected))


# --- look-ups of masks ----------------------------------------------------------------------------


def problem(len_k: int = 6) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        rng.standard_normal((2, 1, length, 8)).astype(np.float32) for length in (3, len_k, len_k)
    )


@pytest.mark.parametrize("offset", [1, -1])
def test_look_up_outside_its_array(compiler: str, offset: int) -> None:
    q, k, v = problem()
    ids = masks.array(np.ones((2, 6), np.int32))
    mask = masks.where(lambda b, h, q, k: ids[b, k + offset] == 1)
    with emulate.using(checks="all"):
        with pytest.raises(emulate.EmulationError, match=r"look-up index .* outside") as caught:
            cumha.attention(q, k, v, mask=mask, path="naive", backend="emulate")
    index = 6 if offset > 0 else -1
    assert f"look-up index {index} outside an axis of 6" in str(caught.value)
    assert any("mask" in p for p in caught.value.places), caught.value.places


def test_look_up_is_clamped_without_checks(compiler: str) -> None:
    """As on the device, which says nothing."""
    q, k, v = problem()
    rng = np.random.default_rng(1)
    keep = rng.integers(0, 2, (2, 6)).astype(np.int32)
    ids = masks.array(keep)
    mask = masks.where(lambda b, h, q, k: ids[b, k + 1] == 1)
    clamped = np.concatenate([keep[:, 1:], keep[:, -1:]], axis=1) == 1
    with emulate.using(checks="none"):
        out = cumha.attention(q, k, v, mask=mask, path="naive", backend="emulate")
    expected = cumha.attention(q, k, v, mask=masks.key_padding(clamped))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_look_up_inside_is_silent(compiler: str) -> None:
    q, k, v = problem()
    ids = masks.array(np.arange(12, dtype=np.int32).reshape(2, 6) % 3)
    mask = masks.where(lambda b, h, q, k: ids[b, masks.minimum(k + 1, 5)] == 1)
    with emulate.using(checks="all"):
        out = cumha.attention(q, k, v, mask=mask, path="naive", backend="emulate")
    np.testing.assert_allclose(out, cumha.attention(q, k, v, mask=mask), rtol=1e-5, atol=1e-6)
