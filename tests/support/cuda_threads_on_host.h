// What TileLang's generated CUDA takes from CUDA and from TileLang's templates, for the host, values
// and all: the threads of a block are coroutines that take turns at barriers, shuffles and waits.
// What is asynchronous happens as late as it may: cp.async, TMA and products of warp groups at the
// wait for them, stores by TMA at the wait that frees their source. Shared memory starts as NaN.
#pragma once
#include "cuda_values_on_host.h"
#include <deque>
#include <functional>
#include <map>
#include <ucontext.h>
#include <vector>

// The scheduler: thread 0 is the one that runs when nothing else does.
inline ucontext_t scheduler;
inline std::vector<ucontext_t> contexts;
inline int num_threads, current;
inline long num_idle_turns;

inline void yield() { swapcontext(&contexts[current], &scheduler); }

// What went wrong; the launch ends with it.
inline const char *failure;
inline void fail(const char *reason) {
  failure = reason;
  yield();
}

template <class Done> void wait_until(Done done) {
  while (!done()) {
    ++num_idle_turns;
    yield();
  }
  num_idle_turns = 0;
}

struct Meeting {
  int arrived = 0;
  long generation = 0;
};
inline std::map<int, Meeting> meetings;
// Threads of one meeting: `id` names it, `count` of them come.
inline void meet(int id, int count) {
  Meeting &meeting = meetings[id];
  long generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  wait_until([&] { return meeting.generation != generation; });
}
inline void __syncthreads() { meet(0, num_threads); }
inline int warp_meeting() { return 1000 + threadIdx.x / 32; }
inline void __syncwarp(unsigned = 0) { meet(warp_meeting(), 32); }

// Values of a warp's lanes, exchanged by all of them at once.
inline std::vector<std::vector<unsigned char>> exchanged;
template <class T> std::vector<T> all_of_warp(const T &mine) {
  std::vector<unsigned char> &own = exchanged[threadIdx.x];
  own.assign(reinterpret_cast<const unsigned char *>(&mine),
             reinterpret_cast<const unsigned char *>(&mine) + sizeof(T));
  __syncwarp();
  std::vector<T> all(32);
  for (int lane = 0; lane < 32; ++lane)
    memcpy(&all[lane], exchanged[threadIdx.x / 32 * 32 + lane].data(), sizeof(T));
  __syncwarp();
  return all;
}
template <class T> T __shfl_xor_sync(unsigned, T value, int delta, int = 32) {
  return all_of_warp(value)[threadIdx.x % 32 ^ delta];
}
inline int __any_sync(unsigned, int predicate) {
  auto all = all_of_warp(predicate);
  return std::any_of(all.begin(), all.end(), [](int one) { return one != 0; });
}

struct CUtensorMap {
  int rank;
  char *base;
  int64_t sizes[5], strides[5], box[5];
  int swizzle; // 0: none; 1, 2, 3: 32, 64, 128 bytes
  int64_t element_bytes() const { return strides[0]; }
  int64_t bytes() const {
    int64_t n = element_bytes();
    for (int i = 0; i < rank; ++i) n *= box[i];
    return n;
  }
  // What of the box lies inside the tensor, with its place in shared memory.
  template <class Visit> void visit(const int64_t *at, char *shared, Visit one) const {
    int64_t index[5] = {};
    int64_t offset = 0, width = element_bytes();
    for (;;) {
      char *source = base;
      bool is_inside = true;
      for (int i = 0; i < rank; ++i) {
        int64_t place = at[i] + index[i];
        is_inside = is_inside && 0 <= place && place < sizes[i];
        source += place * strides[i];
      }
      uintptr_t target = reinterpret_cast<uintptr_t>(shared) + offset;
      target ^= (target >> 3) & ((1 << swizzle) - 1) << 4;
      one(source, reinterpret_cast<char *>(target), width, is_inside);
      offset += width;
      int i = 0;
      while (i < rank && ++index[i] == box[i]) index[i++] = 0;
      if (i == rank) return;
    }
  }
};

struct BarrierState {
  int count = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
  std::vector<std::function<void()>> copies;
  void settle() {
    if (pending || bytes) return;
    pending = count;
    phase ^= 1;
  }
};
inline std::map<void *, BarrierState> barriers;
struct Barrier {
  uint64_t unused;
  BarrierState &state() { return barriers[this]; }
  void init(int count) {
    state() = BarrierState();
    state().count = state().pending = count;
  }
  void arrive() {
    if (--state().pending < 0) fail("a barrier has more arrivals than it counts");
    state().settle();
  }
  void expect_transaction(int bytes) { state().bytes += bytes; }
  void arrive_and_expect_tx(int bytes) {
    expect_transaction(bytes);
    arrive();
  }
  void wait(int parity) {
    wait_until([&] {
      auto copies = std::move(state().copies);
      state().copies.clear();
      for (auto &copy : copies) copy();
      return (state().phase ^ parity) & 1;
    });
  }
};

// Of each thread: groups of copies under way, the oldest first, and the group that is being filled.
struct Groups {
  std::deque<std::vector<std::function<void()>>> committed;
  std::vector<std::function<void()>> open;
  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  void wait(size_t left) {
    for (; committed.size() > left; committed.pop_front())
      for (auto &copy : committed.front()) copy();
  }
};
inline std::vector<Groups> loads, stores, products;

namespace tl {
struct MaxOp {
  float operator()(float a, float b) const { return max(a, b); }
};
struct SumOp {
  float operator()(float a, float b) const { return a + b; }
};
template <int> struct NamedBarrier {};
template <class Op, int lanes, int scale, int offset, class> struct AllReduce {
  static_assert(lanes == 4 && scale == 1, "rows stay within four threads");
  static float run(float value) {
    auto all = all_of_warp(value);
    int lane = threadIdx.x % 32;
    return Op()(Op()(value, all[lane ^ 2]), Op()(all[lane ^ 1], all[lane ^ 3]));
  }
};
inline float fast_rcp(float x) { return 1.0f / x; }

enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };

template <int bytes> void cp_async_gs(void *to, const void *from) {
  if (reinterpret_cast<uintptr_t>(from) % bytes || reinterpret_cast<uintptr_t>(to) % bytes)
    fail("a misaligned copy");
  loads[current].open.push_back([=] { memcpy(to, from, bytes); });
}
inline void cp_async_commit() { loads[current].commit(); }
template <int left> void cp_async_wait() { loads[current].wait(left); }

template <int threads> bool tl_shuffle_elect() {
  return threads ? threadIdx.x % threads == 0 : threadIdx.x == 0;
}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... At>
void tma_load(const CUtensorMap &map, Barrier &barrier, void *to, At... at) {
  static_assert(sizeof...(At) <= 5);
  std::vector<int64_t> place{at...};
  const CUtensorMap *from = &map;
  if (place[0] * from->element_bytes() % 16) {
    fprintf(stderr, "a TMA box begins at byte %ld of its innermost axis, which is no multiple of 16\n",
            long(place[0] * from->element_bytes()));
    abort();
  }
  BarrierState *state = &barrier.state();
  state->copies.push_back([=] {
    from->visit(place.data(), static_cast<char *>(to),
                [](char *source, char *target, int64_t width, bool is_inside) {
                  is_inside ? memcpy(target, source, width) : memset(target, 0, width);
                });
    state->bytes -= from->bytes();
    state->settle();
  });
}
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL, class... At>
void tma_store(const CUtensorMap &map, void *from, At... at) {
  std::vector<int64_t> place{at...};
  const CUtensorMap *to = &map;
  stores[current].open.push_back([=] {
    to->visit(place.data(), static_cast<char *>(from),
              [](char *target, char *source, int64_t width, bool is_inside) {
                if (is_inside) memcpy(target, source, width);
              });
  });
}
inline void tma_store_arrive() { stores[current].commit(); }
template <int left, bool = true> void tma_store_wait() { stores[current].wait(left); }
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
inline void prefetch_tma_descriptor(const CUtensorMap &) {}
// Registers for one warp group are those that another gave back: it waits for them.
inline int num_releases;
template <int> void warpgroup_reg_alloc() {
  wait_until([] { return num_releases >= 128; });
}
template <int> void warpgroup_reg_dealloc() { ++num_releases; }
inline void __sync_thread_partial(int id, int count) { meet(id, count); }

// Matrix tiles. A thread has elements of row lane / 4 (and of that row + 8), in pairs of columns.
enum class DataType { kBFloat16, kFloat16, kFloat8_e4m3, kFloat32 };
template <DataType type> constexpr int bytes_of = type == DataType::kFloat8_e4m3 ? 1 : 2;
template <DataType type> float value_of(const void *at) {
  static_assert(type != DataType::kFloat32);
  if (type == DataType::kBFloat16) return *static_cast<const bfloat16_t *>(at);
  if (type == DataType::kFloat16) return *static_cast<const half_t *>(at);
  return *static_cast<const fp8_e4_t *>(at);
}
template <int count, bool is_transposed, class T, class U> void load_matrices(T *row, U *to) {
  struct Row { uint16_t values[8]; };
  auto rows = all_of_warp(*reinterpret_cast<const Row *>(row));
  uint16_t *target = reinterpret_cast<uint16_t *>(to);
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < count; ++m)
    for (int e = 0; e < 2; ++e)
      target[2 * m + e] = is_transposed ? rows[8 * m + lane % 4 * 2 + e].values[lane / 4]
                                        : rows[8 * m + lane / 4].values[lane % 4 * 2 + e];
}
template <class T, class U> void ptx_ldmatrix_x4(T *row, U *to) { load_matrices<4, false>(row, to); }
template <class T, class U> void ptx_ldmatrix_x4_trans(T *row, U *to) {
  load_matrices<4, true>(row, to);
}
template <class T, class U> void ptx_ldmatrix_x2(T *row, U *to) { load_matrices<2, false>(row, to); }
template <class T, class U> void ptx_ldmatrix_x2_trans(T *row, U *to) {
  load_matrices<2, true>(row, to);
}
// Every lane names a row of the four matrices, and has pairs of elements of each.
template <bool is_transposed> void store_matrices(void *row, const uint32_t (&values)[4]) {
  struct Pairs { uint32_t of_matrix[4]; };
  Pairs own;
  for (int m = 0; m < 4; ++m) own.of_matrix[m] = values[m];
  auto lanes = all_of_warp(own);
  const int lane = threadIdx.x % 32, m = lane / 8, r = lane % 8;
  for (int c = 0; c < 8; ++c) {
    const int source = is_transposed ? 4 * c + r / 2 : 4 * r + c / 2;
    const int half = is_transposed ? r % 2 : c % 2;
    static_cast<uint16_t *>(row)[c] = uint16_t(lanes[source].of_matrix[m] >> 16 * half);
  }
}
inline void ptx_stmatrix_m8n8_x4(void *row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_matrices<false>(row, {a, b, c, d});
}
inline void ptx_stmatrix_m8n8_x4_trans(void *row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  store_matrices<true>(row, {a, b, c, d});
}

// Adds to a thread's part of 16 x columns the product of `left(half, k)`, of its two rows, and
// `right(k, column)`.
template <int depth, class Left, class Right>
void accumulate(float *sums, int columns, Left left, Right right) {
  const int lane = threadIdx.x % 32;
  float rows[2][depth];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < depth; ++k) rows[half][k] = left(half, k);
  for (int n = 0; n < columns / 8; ++n)
    for (int e = 0; e < 2; ++e) {
      float values[depth];
      for (int k = 0; k < depth; ++k) values[k] = right(k, 8 * n + lane % 4 * 2 + e);
      for (int half = 0; half < 2; ++half) {
        double sum = sums[4 * n + 2 * half + e];
        for (int k = 0; k < depth; ++k) sum += double(rows[half][k]) * values[k];
        sums[4 * n + 2 * half + e] = sum;
      }
    }
}
// The left operand of a warp, four registers of each thread, exchanged by all of them at once.
template <DataType type> auto from_registers(const void *own) {
  struct Registers { char bytes[16]; };
  auto all = all_of_warp(*static_cast<const Registers *>(own));
  return [all](int half, int k) {
    constexpr int word = 4 / bytes_of<type>;
    const Registers &held = all[threadIdx.x % 32 / 4 * 4 + k / word % 4];
    const int index = k / (4 * word) * 2 + half;
    return value_of<type>(held.bytes + 4 * index + k % word * bytes_of<type>);
  };
}
template <DataType type, DataType, DataType, int, int columns, int, bool, bool>
void mma_sync(float *sums, const unsigned *left, const unsigned *right) {
  struct Right { uint16_t values[4]; };
  auto all = all_of_warp(*reinterpret_cast<const Right *>(right));
  accumulate<16>(sums, columns, from_registers<type>(left), [&](int k, int column) {
    return value_of<type>(&all[column * 4 + k % 8 / 2].values[k / 8 * 2 + k % 2]);
  });
}

// Where an operand lies in shared memory: the fields of a descriptor, in bytes.
struct GmmaDescriptor {
  char *start;
  int leading, stride, span;
  GmmaDescriptor operator+(int64_t units) const {
    return {start + 16 * units, leading, stride, span};
  }
  char *at(bool is_column_major, int k, int column, int bytes) const {
    const int width = span / bytes;
    char *place = start;
    if (is_column_major)
      place += column / width * leading + k / 8 * stride + k % 8 * span + column % width * bytes;
    else
      place += column / 8 * stride + column % 8 * span + k * bytes;
    uintptr_t bits = reinterpret_cast<uintptr_t>(place);
    return reinterpret_cast<char *>(bits ^ ((bits >> 7) & (span / 16 - 1)) << 4);
  }
};
template <int layout, int leading, int stride, class T>
void initialize_wgmma_descriptor(GmmaDescriptor &descriptor, T *start) {
  descriptor = {reinterpret_cast<char *>(start), 16 * leading, 16 * stride, 256 >> layout};
}
template <class T> void increase_descriptor_offset(GmmaDescriptor &descriptor, T bytes) {
  descriptor.start += bytes;
}
#define uint64_t(descriptor) (descriptor)
template <DataType type, bool is_column_major, int columns, int depth, class Left>
void multiply(uint32_t *sums, int keeps, Left left, const GmmaDescriptor &right) {
  float *target = reinterpret_cast<float *>(sums);
  if (!keeps) std::fill(target, target + columns / 2, 0.0f);
  accumulate<depth>(target, columns, left, [&](int k, int column) {
    return value_of<type>(right.at(is_column_major, k, column, bytes_of<type>));
  });
}
template <DataType left_type, DataType type, DataType, int, int columns, int depth, bool,
          bool is_column_major, int, int>
void wgmma_rs(const uint32_t *left, GmmaDescriptor right, uint32_t *sums, int keeps) {
  products[current].open.push_back([=] {
    multiply<type, is_column_major, columns, depth>(sums, keeps, from_registers<left_type>(left),
                                                    right);
  });
}
template <DataType left_type, DataType type, DataType, int, int columns, int depth,
          bool is_left_column_major, bool is_column_major, int, int>
void wgmma_ss(GmmaDescriptor left, GmmaDescriptor right, uint32_t *sums, int keeps) {
  products[current].open.push_back([=] {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    auto left_of = [&](int half, int k) {
      return value_of<left_type>(
          left.at(is_left_column_major, k, row + 8 * half, bytes_of<left_type>));
    };
    multiply<type, is_column_major, columns, depth>(sums, keeps, left_of, right);
  });
}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() { products[current].commit(); }
template <class T> void warpgroup_fence_operand(T *, int) {}
template <int left> void wait_wgmma() { products[current].wait(left); }
template <int left> void warpgroup_wait() { wait_wgmma<left>(); }
} // namespace tl

inline std::function<void()> body;
inline bool is_done[4096];
inline void start() {
  body();
  stores[current].wait(0);
  is_done[current] = true;
  swapcontext(&contexts[current], &scheduler);
}

// Runs one block. Threads take turns in their order, or from the last to the first.
inline void run_block(int threads, size_t shared_bytes, bool is_reversed) {
  constexpr size_t stack_bytes = 128 << 10;
  static std::vector<char> stacks;
  stacks.resize(threads * stack_bytes);
  num_threads = threads;
  contexts.assign(threads, ucontext_t());
  loads.assign(threads, Groups());
  stores.assign(threads, Groups());
  products.assign(threads, Groups());
  exchanged.assign(threads, {});
  meetings.clear();
  barriers.clear();
  memset(shared_memory, 0xff, shared_bytes);
  for (int t = 0; t < threads; ++t) {
    is_done[t] = false;
    getcontext(&contexts[t]);
    contexts[t].uc_stack.ss_sp = stacks.data() + t * stack_bytes;
    contexts[t].uc_stack.ss_size = stack_bytes;
    contexts[t].uc_link = &scheduler;
    makecontext(&contexts[t], start, 0);
  }
  num_idle_turns = 0;
  tl::num_releases = 0;
  for (int left = threads; left;) {
    left = 0;
    for (int i = 0; i < threads; ++i) {
      int t = is_reversed ? threads - 1 - i : i;
      if (is_done[t]) continue;
      current = t;
      threadIdx = {t, 0, 0};
      swapcontext(&scheduler, &contexts[t]);
      left += !is_done[t];
      if (num_idle_turns > 1000L * threads) failure = "threads wait for one another";
      if (failure) return;
    }
  }
}
