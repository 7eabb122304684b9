// The machine behind emulate.hpp: threads of a block as fibers, blocks over the CPU cores, checks.
//
// One operating-system thread runs one block at a time. The scheduler resumes the block's fibers in
// a seeded order; a fiber runs until it waits in a barrier or a warp exchange, or ends. A block is
// over when all fibers have ended. If none can run, they wait for each other: divergence.
//
// Checks, in units built with -fsanitize=thread (its runtime is not linked, the hooks are below):
//   bounds     each access lies in an array of the call, in shared memory or on the thread's stack
//   alignment  of accesses whose type promises it
//   races      two threads, no barrier between, one writes: vector clocks, joined by barriers
//   reads      of shared memory that no thread of the block has written
//   unset      variables without a value that are compared (hooks of -fsanitize-coverage)
#include "emulate.hpp"

#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUMHA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUMHA_ASAN 1
#endif
#endif
#ifdef CUMHA_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" void cumha_emulate_entry(const void* params);  // in the kernel's unit

namespace cumha_emulate {

// A range of memory that the call hands to the kernel.
struct Range {
  const char* name;
  std::uint64_t lo;
  std::uint64_t hi;  // one past the last byte
  std::uint64_t writable;
};

namespace {

constexpr int kWarpSize = 32;
constexpr int kBarriers = 16;
constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kSharedAlignment = 1024;
constexpr std::uintptr_t kNear = 1 << 20;  // bytes: beyond it a message names no array
constexpr int kPoison = 0xff;  // NaN in every floating-point format, -1 or huge as an integer

using Clock = std::vector<std::uint32_t>;

void join(Clock& into, const Clock& from) {
  into.resize(from.size(), 0);
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// --- fibers ------------------------------------------------------------------------------------

#if defined(__x86_64__) && !defined(CUMHA_ASAN)
#define CUMHA_FAST_SWITCH 1
// Saves what the calling convention says a callee must keep, and changes stacks.
extern "C" void cumha_emulate_switch(void** save, void* load);
asm(R"(
.text
.type cumha_emulate_switch,@function
cumha_emulate_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cumha_emulate_switch,.-cumha_emulate_switch
)");
#endif

struct Fiber {
  char* stack = nullptr;  // lowest byte; below it is a guard page
  std::size_t stack_bytes = 0;
#ifdef CUMHA_FAST_SWITCH
  void* top = nullptr;
#else
  ucontext_t context;
#endif
#ifdef CUMHA_ASAN
  void* fake_stack = nullptr;
#endif
};

void switch_fibers(Fiber& from, Fiber& to) {
#ifdef CUMHA_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#ifdef CUMHA_FAST_SWITCH
  cumha_emulate_switch(&from.top, to.top);
#else
  swapcontext(&from.context, &to.context);
#endif
#ifdef CUMHA_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void start_fiber(Fiber& fiber, void (*body)()) {
#ifdef CUMHA_FAST_SWITCH
  // The first switch pops six registers and returns into body(), with the stack as after a call.
  void** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_bytes - 56);  // 8 past 16
  *top = nullptr;
  *--top = reinterpret_cast<void*>(body);
  top -= 6;
  std::fill(top, top + 6, nullptr);
  fiber.top = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = fiber.stack_bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, body, 0);
#endif
}

// --- a block and its threads -------------------------------------------------------------------

enum class Status { kReady, kWaiting, kEnded };

struct Place {
  uint3 thread;
  uint3 block;
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  int source_bytes;  // the rest becomes zeros
  const void* issued_at;
};

struct Thread {
  Place place;
  Fiber fiber;
  Status status;
  const char* waits_in;  // what it waits in, for messages
  const void* waits_at;  // where in the kernel
  Clock clock;
  std::deque<std::vector<Copy>> copies;  // by group; the last one is open
};

struct Barrier {
  int expected = 0;
  int arrived = 0;
  Clock joined;
  std::vector<int> waiting;
};

// Exchanges among the lanes of one mask. Two tables in turn: a lane cannot begin the exchange after
// the next before all lanes have read this one.
struct Exchange {
  unsigned mask = 0;
  unsigned arrived = 0;
  int turn = 0;
  const char* name = nullptr;
  Clock joined;
  alignas(16) unsigned char tables[2][kWarpSize * kGiftBytes];
};

struct Warp {
  unsigned active;                 // lanes that have not ended
  std::deque<Exchange> exchanges;  // one per mask in use
};

struct Touch {
  int thread = -1;
  std::uint32_t time = 0;
  const void* at = nullptr;
  unsigned char bytes = 0;  // which of the cell's two
  bool atomic = false;
};

// Who touched two neighbouring bytes. Readers between two writes: one per thread.
struct Cell {
  std::uint32_t block = 0;    // serial number of the block; another one means untouched
  unsigned char written = 0;  // which of the two bytes
  Touch writer;
  std::vector<Touch> readers;
};

struct Launch {
  const void* params;
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes;
  std::uint64_t seed;
  std::vector<Range> ranges;  // sorted by address
  std::vector<std::uint32_t> order;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;  // of what follows
  std::string message;
  std::vector<const void*> places;  // code that the message is about
};

class Worker;
thread_local Worker* worker = nullptr;

class Worker {
 public:
  explicit Worker(Launch& l) : launch(l) {}
  void run_blocks();
  void run_block(std::uint32_t flat, std::mt19937_64& random);
  void begin_block(std::uint32_t flat);
  void wait(const char* in, const void* at);
  void fault(const std::string& message, std::vector<const void*> places);
  [[noreturn]] void stop(const std::string& message, std::vector<const void*> places);
  void report_stuck();
  void touch(Cell& cell, bool write, const char* array, const Touch& now);
  template <class CellAt>
  void touch_all(std::uintptr_t address, std::size_t bytes, bool write, const char* array,
                 const void* at, bool atomic, CellAt cell_at);
  void access(std::uintptr_t address, std::size_t bytes, bool write, bool aligned, const void* at,
              bool atomic = false);
  void forget(std::uintptr_t address, std::size_t bytes);
  void find_static_shared();
  Thread& self() { return threads[running]; }

  Launch& launch;
  Fiber scheduler;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  int running = -1;  // index of the running thread
  std::uint32_t serial = 0;
  std::vector<unsigned char> arena;
  unsigned char* shared = nullptr;
  std::vector<Cell> shared_cells;
  std::unordered_map<std::uintptr_t, Cell> other_cells;
  std::uintptr_t static_lo = 0, static_hi = 0;  // this thread's static shared memory
};

std::string format(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string name_of(const Thread& t) {
  const Place& p = t.place;
  return format("block (%u,%u,%u) thread (%u,%u,%u)", p.block.x, p.block.y, p.block.z, p.thread.x,
                p.thread.y, p.thread.z);
}

void Worker::wait(const char* in, const void* at) {
  Thread& t = self();
  t.status = Status::kWaiting;
  t.waits_in = in;
  t.waits_at = at;
  switch_fibers(t.fiber, scheduler);
}

void Worker::fault(const std::string& message, std::vector<const void*> places) {
  std::lock_guard<std::mutex> lock(launch.mutex);
  if (launch.failed) return;
  launch.message = message;
  launch.places = std::move(places);
  launch.failed = true;
}

void Worker::stop(const std::string& message, std::vector<const void*> places) {
  fault(name_of(self()) + ": " + message, std::move(places));
  for (;;) switch_fibers(self().fiber, scheduler);  // which drops the block
}

void Worker::report_stuck() {
  std::string text = "threads wait for each other:";
  std::vector<const void*> places;
  std::vector<bool> told(threads.size(), false);
  int ended = 0;
  for (std::size_t i = 0; i < threads.size(); ++i) {
    const Thread& first = threads[i];
    ended += first.status == Status::kEnded;
    if (told[i] || first.status != Status::kWaiting) continue;
    int count = 0;
    for (std::size_t j = i; j < threads.size(); ++j) {
      const Thread& t = threads[j];
      const bool same = t.status == Status::kWaiting && t.waits_at == first.waits_at;
      if (same) told[j] = true;
      count += same;
    }
    text += format(" %d in %s (first: %s),", count, first.waits_in, name_of(first).c_str());
    places.push_back(first.waits_at);
  }
  fault(text + format(" %d have ended", ended), places);
}

// --- running -----------------------------------------------------------------------------------

void thread_main() {
#ifdef CUMHA_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  cumha_emulate_entry(worker->launch.params);
  Thread& t = worker->self();
  t.status = Status::kEnded;
  worker->warps[worker->running / kWarpSize].active &= ~(1u << worker->running % kWarpSize);
  for (;;) switch_fibers(t.fiber, worker->scheduler);  // never resumed
}

void Worker::begin_block(std::uint32_t flat) {
  ++serial;
  other_cells.clear();
  std::memset(shared, kPoison, launch.shared_bytes);
  // Static shared memory is thread-local; so is our own `worker`, which must stay.
  const auto keep = reinterpret_cast<std::uintptr_t>(&worker);
  for (std::uintptr_t byte = static_lo; byte < static_hi; ++byte)
    if (byte - keep >= sizeof worker) *reinterpret_cast<unsigned char*>(byte) = kPoison;
  for (Barrier& b : barriers) b = Barrier{};
  for (Warp& w : warps) w = Warp{0, {}};
  const dim3 grid = launch.grid, block = launch.block;
  const uint3 at{flat % grid.x, flat / grid.x % grid.y, flat / grid.x / grid.y};
  for (std::size_t i = 0; i < threads.size(); ++i) {
    Thread& t = threads[i];
    const unsigned u = static_cast<unsigned>(i);
    const uint3 thread{u % block.x, u / block.x % block.y, u / block.x / block.y};
    t.place = Place{thread, at};
    t.status = Status::kReady;
    warps[i / kWarpSize].active |= 1u << i % kWarpSize;
    t.clock.assign(threads.size(), 0);
    t.clock[i] = 1;
    t.copies.assign(1, {});
    start_fiber(t.fiber, thread_main);
  }
}

void Worker::run_block(std::uint32_t flat, std::mt19937_64& random) {
  begin_block(flat);
  std::vector<int> order(threads.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t left = threads.size(); left > 0;) {
    std::shuffle(order.begin(), order.end(), random);
    bool ran = false;
    for (int i : order) {
      if (threads[i].status != Status::kReady) continue;
      running = i;
      switch_fibers(scheduler, threads[i].fiber);
      running = -1;
      if (launch.failed) return;
      ran = true;
      left -= threads[i].status == Status::kEnded;
    }
    if (!ran) return report_stuck();
  }
}

void Worker::run_blocks() {
  worker = this;
  find_static_shared();
  const std::size_t count = std::size_t(launch.block.x) * launch.block.y * launch.block.z;
  threads.resize(count);
  warps.resize((count + kWarpSize - 1) / kWarpSize);
  arena.resize(launch.shared_bytes + kSharedAlignment);
  void* aligned = arena.data();
  std::size_t space = arena.size();
  shared = static_cast<unsigned char*>(
      std::align(kSharedAlignment, launch.shared_bytes, aligned, space));
  shared_cells.resize(launch.shared_bytes / 2 + 1);
#ifdef CUMHA_ASAN
  ASAN_POISON_MEMORY_REGION(arena.data(), arena.size());
  ASAN_UNPOISON_MEMORY_REGION(shared, launch.shared_bytes);
#endif
  const std::size_t each = kStackBytes + kGuardBytes;
  void* stacks = mmap(nullptr, each * count, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) return fault("no memory for the stacks of a block's threads", {});
  for (std::size_t i = 0; i < count; ++i) {
    char* guard = static_cast<char*>(stacks) + each * i;
    mprotect(guard, kGuardBytes, PROT_NONE);
    threads[i].fiber.stack = guard + kGuardBytes;
    threads[i].fiber.stack_bytes = kStackBytes;
  }
  while (!launch.failed) {
    const std::size_t i = launch.next++;
    if (i >= launch.order.size()) break;
    std::mt19937_64 random(launch.seed * 0x9e3779b97f4a7c15ull + i);
    run_block(launch.order[i], random);
  }
  munmap(stacks, each * count);
#ifdef CUMHA_ASAN
  ASAN_UNPOISON_MEMORY_REGION(arena.data(), arena.size());
#endif
  worker = nullptr;
}

// --- this library in memory --------------------------------------------------------------------

struct Image {
  std::uintptr_t base = 0;
  std::uintptr_t tls = 0;  // the calling thread's block of thread-local variables
  std::size_t tls_bytes = 0;
  std::vector<Range> segments;
};

int inspect(dl_phdr_info* info, std::size_t, void* result) {
  Image found;
  found.base = info->dlpi_addr;
  const auto here = reinterpret_cast<std::uintptr_t>(&inspect);
  bool ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    const std::uintptr_t lo = info->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD) {
      found.segments.push_back({"the code's constants", lo, lo + segment.p_memsz, 0});
      ours = ours || (here >= lo && here < lo + segment.p_memsz);
    }
    if (segment.p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
      found.tls = reinterpret_cast<std::uintptr_t>(info->dlpi_tls_data);
      found.tls_bytes = segment.p_memsz;
    }
  }
  if (ours) *static_cast<Image*>(result) = found;
  return ours;
}

Image image() {
  Image result;
  dl_iterate_phdr(inspect, &result);
  return result;
}

void Worker::find_static_shared() {
  const Image found = image();
  static_lo = found.tls;
  static_hi = found.tls + found.tls_bytes;
}

// --- checks ------------------------------------------------------------------------------------

// `array` names memory that the call handed over; null for shared memory, which starts unwritten.
void Worker::touch(Cell& cell, bool write, const char* array, const Touch& now) {
  if (cell.block != serial) {
    cell.block = serial;
    cell.written = 0;
    cell.writer = Touch{};
    cell.readers.clear();
  }
  Thread& t = self();
  const auto unordered = [&](const Touch& other) {
    return other.thread >= 0 && other.thread != running && (other.bytes & now.bytes) != 0 &&
           !(other.atomic && now.atomic) && other.time > t.clock[other.thread];
  };
  const auto race = [&](const Touch& other, const char* did) {
    stop(format("race: it %s %s that %s has %s, with no barrier between",
                write ? "writes" : "reads", array == nullptr ? "shared memory" : array,
                name_of(threads[other.thread]).c_str(), did),
         {now.at, other.at});
  };
  if (unordered(cell.writer)) race(cell.writer, "written");
  if (!write && array == nullptr && (now.bytes & ~cell.written) != 0)
    stop("it reads shared memory that no thread has written", {now.at});
  if (write) {
    for (const Touch& reader : cell.readers)
      if (unordered(reader)) race(reader, "read");
    cell.readers.clear();
    cell.written |= now.bytes;
    cell.writer = now;
    return;
  }
  for (Touch& reader : cell.readers)
    if (reader.thread == running) {
      reader = now;
      return;
    }
  cell.readers.push_back(now);
}

// Touches the cells of an access, each in the bytes that are meant.
template <class CellAt>
void Worker::touch_all(std::uintptr_t address, std::size_t bytes, bool write, const char* array,
                       const void* at, bool atomic, CellAt cell_at) {
  const std::uintptr_t end = address + bytes;
  for (std::uintptr_t cell = address / 2; cell <= (end - 1) / 2; ++cell) {
    const bool low = 2 * cell >= address, high = 2 * cell + 1 < end;
    const auto which = static_cast<unsigned char>(low | high << 1);
    touch(cell_at(cell), write, array, Touch{running, self().clock[running], at, which, atomic});
  }
}

// Marks shared memory as not written: an asynchronous copy into it is under way.
void Worker::forget(std::uintptr_t address, std::size_t bytes) {
  const std::uintptr_t from = address - reinterpret_cast<std::uintptr_t>(shared);
  if (from >= launch.shared_bytes) return;
  for (std::uintptr_t cell = from / 2; cell <= (from + bytes - 1) / 2; ++cell)
    shared_cells[cell].written = 0;
}

void Worker::access(std::uintptr_t address, std::size_t bytes, bool write, bool aligned,
                    const void* at, bool atomic) {
  const auto stack = reinterpret_cast<std::uintptr_t>(self().fiber.stack);
  if (address - stack < kStackBytes) return;
  const char* does = write ? "writes" : "reads";
  if (aligned && address % bytes != 0)
    stop(format("it %s %zu bytes at an address that is no multiple of %zu", does, bytes, bytes),
         {at});
  const std::uintptr_t last = address + bytes - 1;
  const auto arena_lo = reinterpret_cast<std::uintptr_t>(shared);
  const auto other = [&](std::uintptr_t cell) -> Cell& { return other_cells[cell]; };
  if (address - arena_lo < launch.shared_bytes && last - arena_lo < launch.shared_bytes) {
    touch_all(address - arena_lo, bytes, write, nullptr, at, atomic,
              [&](std::uintptr_t cell) -> Cell& { return shared_cells[cell]; });
    return;
  }
  const auto ours = reinterpret_cast<std::uintptr_t>(&worker);  // between the static variables
  if (address < ours + sizeof worker && last >= ours)
    stop(format("it %s %zu bytes outside static shared memory", does, bytes), {at});
  if (address >= static_lo && last < static_hi) {
    touch_all(address, bytes, write, nullptr, at, atomic, other);
    return;
  }
  const auto& ranges = launch.ranges;
  auto after = std::upper_bound(ranges.begin(), ranges.end(), address,
                                [](std::uintptr_t a, const Range& r) { return a < r.lo; });
  // Ranges may overlap or nest (two views of one buffer): look at all that begin before.
  for (auto r = after; r != ranges.begin();) {
    --r;
    if (last >= r->hi) continue;
    if (write && !r->writable) continue;
    if (r->writable) touch_all(address, bytes, write, r->name, at, atomic, other);
    return;
  }
  std::string nearest = "every array of the call";
  std::uintptr_t distance = kNear;
  for (const Range& r : ranges) {
    const std::uintptr_t off = address < r.lo    ? r.lo - address
                               : address >= r.hi ? address - r.hi
                                                 : 0;
    if (off >= distance) continue;
    distance = off;
    nearest = off == 0 && write && !r.writable ? format("outputs: %s is an input", r.name)
              : address < r.lo
                  ? format("%s, %zu bytes before its first", r.name, std::size_t(off))
                  : format("%s, %zu bytes past its last", r.name, std::size_t(off) + 1);
  }
  stop(format("it %s %zu bytes outside %s", does, bytes, nearest.c_str()), {at});
}

}  // namespace

// --- what emulate.hpp offers -------------------------------------------------------------------

uint3 thread_index() { return worker->self().place.thread; }
uint3 block_index() { return worker->self().place.block; }
dim3 block_size() { return worker->launch.block; }
dim3 grid_size() { return worker->launch.grid; }
int lane() { return worker->running % kWarpSize; }

void take(const unsigned char* table, int lane, void* to, int bytes) {
  std::memcpy(to, table + kGiftBytes * lane, bytes);
}

void fail(const char* text, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, text);
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  worker->stop(buffer, {__builtin_return_address(0)});
}

void expect_inside(long long index, long long extent) {
#ifdef CUMHA_CHECKED
  if (index < 0 || index >= extent)
    worker->stop(format("look-up index %lld outside an axis of %lld", index, extent),
                 {__builtin_return_address(0)});
#else
  (void)index, (void)extent;
#endif
}

void block_barrier(int id, int threads, bool wait) {
  Worker& w = *worker;
  const void* at = __builtin_return_address(0);
  const int expected = threads == 0 ? static_cast<int>(w.threads.size()) : threads;
  if (id < 0 || id >= kBarriers) w.stop(format("there is no barrier %d", id), {at});
  if (expected > static_cast<int>(w.threads.size()) || expected % kWarpSize != 0)
    if (threads != 0) w.stop(format("barrier %d for %d threads", id, expected), {at});
  Barrier& b = w.barriers[id];
  if (b.arrived == 0) b.expected = expected;
  if (b.expected != expected)
    w.stop(format("barrier %d is for %d threads here, for %d elsewhere", id, expected, b.expected),
           {at});
  Thread& t = w.self();
  join(b.joined, t.clock);
  ++t.clock[w.running];
  ++b.arrived;
  if (b.arrived == b.expected) {
    for (int i : b.waiting) {
      join(w.threads[i].clock, b.joined);
      w.threads[i].status = Status::kReady;
    }
    if (wait) join(t.clock, b.joined);
    b = Barrier{};
  } else if (wait) {
    b.waiting.push_back(w.running);
    w.wait(id == 0 && threads == 0 ? "__syncthreads" : "a named barrier", at);
  }
}

const unsigned char* warp_exchange(const char* name, unsigned mask, const void* gift, int bytes,
                                   bool orders_memory) {
  Worker& w = *worker;
  const void* at = __builtin_return_address(0);
  const int warp = w.running / kWarpSize, mine = w.running % kWarpSize;
  if (!(mask >> mine & 1))
    w.stop(format("%s with mask %08x, which leaves out this lane, %d", name, mask, mine), {at});
  if (const unsigned gone = mask & ~w.warps[warp].active)
    w.stop(format("%s names lane %d in its mask %08x, which is not active", name,
                  __builtin_ctz(gone), mask),
           {at});
  auto& all = w.warps[warp].exchanges;
  auto found = std::find_if(all.begin(), all.end(), [&](Exchange& e) { return e.mask == mask; });
  if (found == all.end()) {
    all.emplace_back().mask = mask;
    found = all.end() - 1;
  }
  Exchange& e = *found;
  if (e.arrived != 0 && e.name != name && std::strcmp(e.name, name) != 0)
    w.stop(format("%s where other lanes of the warp are in %s", name, e.name), {at});
  e.name = name;
  e.arrived |= 1u << mine;
  const unsigned char* table = e.tables[e.turn];
  if (bytes > 0) std::memcpy(e.tables[e.turn] + kGiftBytes * mine, gift, bytes);
  if (orders_memory) {
    join(e.joined, w.self().clock);
    ++w.self().clock[w.running];
  }
  if (e.arrived != mask) {
    w.wait(name, at);
    return table;
  }
  for (int i = 0; i < kWarpSize; ++i) {
    if (!(mask >> i & 1)) continue;
    Thread& t = w.threads[std::size_t(warp) * kWarpSize + i];
    t.status = Status::kReady;
    if (orders_memory) join(t.clock, e.joined);
  }
  e.arrived = 0;
  e.turn ^= 1;
  e.joined.clear();
  return table;
}

void* dynamic_shared() { return worker->shared; }

void copy_async(void* to, const void* from, int bytes, int source_bytes) {
  const void* at = __builtin_return_address(0);
  if (source_bytes < 0 || source_bytes > bytes)
    worker->stop(
        format("an asynchronous copy of %d bytes takes %d from its source", bytes, source_bytes),
        {at});
#ifdef CUMHA_CHECKED
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  if (source % bytes != 0)
    worker->stop(format("an asynchronous copy of %d bytes reads a misaligned address", bytes),
                 {at});
  if (source_bytes > 0) worker->access(source, source_bytes, false, false, at);
  worker->access(target, bytes, true, true, at);  // it may land at once,
  worker->forget(target, bytes);                  // but counts only after the wait
#endif
  std::memset(to, kPoison, bytes);
  worker->self().copies.back().push_back(Copy{to, from, bytes, source_bytes, at});
}

void commit_copies() { worker->self().copies.emplace_back(); }

void wait_copies(int newest_left) {
  auto& groups = worker->self().copies;
  while (static_cast<int>(groups.size()) - 1 > newest_left) {
    for (const Copy& c : groups.front()) {
#ifdef CUMHA_CHECKED
      worker->access(reinterpret_cast<std::uintptr_t>(c.to), c.bytes, true, true, c.issued_at);
#endif
      std::memset(c.to, 0, c.bytes);
      if (c.source_bytes > 0) std::memcpy(c.to, c.from, c.source_bytes);
    }
    groups.pop_front();
  }
}

namespace {
void check_atomic(const void* address, int bytes, const void* at) {
#ifdef CUMHA_CHECKED
  worker->access(reinterpret_cast<std::uintptr_t>(address), bytes, true, true, at, true);
#else
  (void)address, (void)bytes, (void)at;
#endif
}
}  // namespace

void atomic_load(const void* from, void* value, int bytes) {
  check_atomic(from, bytes, __builtin_return_address(0));
  if (bytes == 4) {
    __atomic_load(static_cast<const std::uint32_t*>(from), static_cast<std::uint32_t*>(value),
                  __ATOMIC_SEQ_CST);
  } else {
    __atomic_load(static_cast<const std::uint64_t*>(from), static_cast<std::uint64_t*>(value),
                  __ATOMIC_SEQ_CST);
  }
}

void memory_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

bool atomic_swap_if(void* to, void* expected, const void* desired, int bytes) {
  check_atomic(to, bytes, __builtin_return_address(0));
  if (bytes == 4) {
    return __atomic_compare_exchange_n(
        static_cast<std::uint32_t*>(to), static_cast<std::uint32_t*>(expected),
        *static_cast<const std::uint32_t*>(desired), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }
  return __atomic_compare_exchange_n(
      static_cast<std::uint64_t*>(to), static_cast<std::uint64_t*>(expected),
      *static_cast<const std::uint64_t*>(desired), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

}  // namespace cumha_emulate

// --- entry from Python -------------------------------------------------------------------------

// Runs a grid. `sizes`: grid x, y, z, block x, y, z. Returns 0, or 1 with a message and the code
// offsets (within this library) that it is about: at most `*place_count`, which becomes how many.
extern "C" __attribute__((visibility("default"))) int cumha_emulate_run(
    const void* params, const unsigned* sizes, std::uint64_t shared_bytes, std::uint64_t seed,
    int workers, const cumha_emulate::Range* ranges, int range_count, char* message,
    int message_bytes, std::uint64_t* places, int* place_count) {
  using namespace cumha_emulate;
  Launch launch;
  launch.params = params;
  launch.grid = dim3(sizes[0], sizes[1], sizes[2]);
  launch.block = dim3(sizes[3], sizes[4], sizes[5]);
  launch.shared_bytes = shared_bytes;
  launch.seed = seed;
  const Image library = image();
  launch.ranges.assign(ranges, ranges + range_count);
  launch.ranges.insert(launch.ranges.end(), library.segments.begin(), library.segments.end());
  std::sort(launch.ranges.begin(), launch.ranges.end(),
            [](const Range& x, const Range& y) { return x.lo < y.lo; });
  launch.order.resize(std::size_t(sizes[0]) * sizes[1] * sizes[2]);
  std::iota(launch.order.begin(), launch.order.end(), 0u);
  std::mt19937_64 random(seed);
  std::shuffle(launch.order.begin(), launch.order.end(), random);
  const int useful = std::max(1, std::min(workers, static_cast<int>(launch.order.size())));
  std::vector<std::thread> pool;
  for (int i = 0; i < useful; ++i) pool.emplace_back([&launch] { Worker(launch).run_blocks(); });
  for (std::thread& t : pool) t.join();
  if (!launch.failed) return 0;
  std::snprintf(message, message_bytes, "%s", launch.message.c_str());
  *place_count = std::min(*place_count, static_cast<int>(launch.places.size()));
  for (int i = 0; i < *place_count; ++i)  // a return address: the call is just before it
    places[i] = reinterpret_cast<std::uintptr_t>(launch.places[i]) - 1 - library.base;
  return 1;
}

// --- hooks of -fsanitize=thread ----------------------------------------------------------------

#ifdef CUMHA_CHECKED
namespace {
void checked(const void* address, std::size_t bytes, bool write, bool aligned, const void* at) {
  using cumha_emulate::worker;
  if (worker == nullptr || worker->running < 0) return;
  worker->access(reinterpret_cast<std::uintptr_t>(address), bytes, write, aligned, at);
}
}  // namespace

#define CUMHA_HOOK(name, bytes, write, aligned)                           \
  extern "C" void name(void* address) {                                   \
    checked(address, bytes, write, aligned, __builtin_return_address(0)); \
  }
#define CUMHA_HOOKS(size)                                     \
  CUMHA_HOOK(__tsan_read##size, size, false, true)            \
  CUMHA_HOOK(__tsan_write##size, size, true, true)            \
  CUMHA_HOOK(__tsan_volatile_read##size, size, false, true)   \
  CUMHA_HOOK(__tsan_volatile_write##size, size, true, true)   \
  CUMHA_HOOK(__tsan_unaligned_read##size, size, false, false) \
  CUMHA_HOOK(__tsan_unaligned_write##size, size, true, false)
CUMHA_HOOKS(1)
CUMHA_HOOKS(2)
CUMHA_HOOKS(4)
CUMHA_HOOKS(8)
CUMHA_HOOKS(16)
extern "C" void __tsan_read_range(void* address, std::size_t bytes) {
  checked(address, bytes, false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, std::size_t bytes) {
  checked(address, bytes, true, false, __builtin_return_address(0));
}
// clang++ 15 and newer calls these where g++ calls the functions of the C library.
extern "C" void* __tsan_memset(void* to, int value, std::size_t bytes) {
  checked(to, bytes, true, false, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}
extern "C" void* __tsan_memcpy(void* to, const void* from, std::size_t bytes) {
  checked(from, bytes, false, false, __builtin_return_address(0));
  checked(to, bytes, true, false, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
extern "C" void* __tsan_memmove(void* to, const void* from, std::size_t bytes) {
  checked(from, bytes, false, false, __builtin_return_address(0));
  checked(to, bytes, true, false, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
// Hooks of -fsanitize=alignment: an access whose type promises more than its address keeps.
namespace {
struct TypeMismatch {
  struct {
    const char* file;
    unsigned line;
    unsigned column;
  } place;
  const void* type;
  unsigned char log_alignment;
  unsigned char kind;
};
void misaligned(const TypeMismatch* data, const void*, const void* at) {
  using cumha_emulate::worker;
  if (worker == nullptr || worker->running < 0) return;
  worker->stop(cumha_emulate::format("it uses an address that is no multiple of %d",
                                     1 << data->log_alignment),
               {at});
}
}  // namespace
extern "C" void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, void* pointer) {
  misaligned(data, pointer, __builtin_return_address(0));
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, void* pointer) {
  misaligned(data, pointer, __builtin_return_address(0));
}
// Hooks of -fsanitize-coverage=trace-cmp: both sides of a comparison. A variable without a value
// holds g++'s pattern of -ftrivial-auto-var-init, 0xfe in each byte. A value of 1 or 2 bytes may
// well be the same, and so may a set of lanes or keys: those are compared with none and with all.
namespace {
template <class T>
void compared(T x, T y, const void* at) {
  using cumha_emulate::worker;
  T unset;
  std::memset(&unset, 0xfe, sizeof unset);
  if ((x != unset && y != unset) || worker == nullptr || worker->running < 0) return;
  const T other = x == unset ? y : x;
  if (std::is_integral<T>::value && (other == 0 || other == T(-1))) return;
  worker->stop("it compares a variable that has no value", {at});
}
}  // namespace

#define CUMHA_COMPARES(name, type) \
  extern "C" void name(type x, type y) { compared(x, y, __builtin_return_address(0)); }
CUMHA_COMPARES(__sanitizer_cov_trace_cmp4, std::uint32_t)
CUMHA_COMPARES(__sanitizer_cov_trace_cmp8, std::uint64_t)
CUMHA_COMPARES(__sanitizer_cov_trace_const_cmp4, std::uint32_t)
CUMHA_COMPARES(__sanitizer_cov_trace_const_cmp8, std::uint64_t)
CUMHA_COMPARES(__sanitizer_cov_trace_cmpf, float)
CUMHA_COMPARES(__sanitizer_cov_trace_cmpd, double)
// cases: how many there are, bits of x, values.
extern "C" void __sanitizer_cov_trace_switch(std::uint64_t x, const std::uint64_t* cases) {
  const void* at = __builtin_return_address(0);
  // 1: neither none nor all
  if (cases[1] == 32) compared(static_cast<std::uint32_t>(x), 1u, at);
  if (cases[1] == 64) compared(x, std::uint64_t(1), at);
}
extern "C" void __sanitizer_cov_trace_cmp1(std::uint8_t, std::uint8_t) {}
extern "C" void __sanitizer_cov_trace_cmp2(std::uint16_t, std::uint16_t) {}
extern "C" void __sanitizer_cov_trace_const_cmp1(std::uint8_t, std::uint8_t) {}
extern "C" void __sanitizer_cov_trace_const_cmp2(std::uint16_t, std::uint16_t) {}

extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
#endif
