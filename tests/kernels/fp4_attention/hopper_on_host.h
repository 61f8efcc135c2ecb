// What TileLang's generated CUDA for Hopper takes from CUDA and from TileLang's templates, computed on
// the host. The threads of a block are fibers that take turns where they wait for one another: at
// barriers, in shuffles, in matrix products of a warp group. Copies and products are done when they
// are asked for, so a wait that is missing is not found; one that never ends is.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;

#define __global__
#define __grid_constant__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define CUDART_INF_F INFINITY

typedef unsigned char uchar;
struct Index3 { int x, y, z; };
inline Index3 threadIdx, blockIdx;
inline unsigned char *shared_memory;
inline int num_threads;
inline bool is_reversed;  // whether the last thread takes its turn first

// Fibers.
struct Fiber { ucontext_t context; std::vector<char> stack; bool is_done; };
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline void (*fiber_body)();
inline bool has_moved;

inline void start_fiber() {
  fiber_body();
  fibers[threadIdx.x].is_done = has_moved = true;
}

template <class Condition> void wait_until(Condition is_met) {
  while (!is_met()) swapcontext(&fibers[threadIdx.x].context, &scheduler);
  has_moved = true;
}

inline void run_block(Index3 block, void (*body)()) {
  blockIdx = block;
  fiber_body = body;
  fibers.resize(num_threads);
  for (Fiber &fiber : fibers) {
    fiber.stack.resize(1 << 16);
    fiber.is_done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, start_fiber, 0);
  }
  for (bool is_over = false; !is_over;) {
    is_over = true;
    has_moved = false;
    for (int turn = 0; turn < num_threads; ++turn) {
      int t = is_reversed ? num_threads - 1 - turn : turn;
      if (fibers[t].is_done) continue;
      threadIdx = {t, 0, 0};
      swapcontext(&scheduler, &fibers[t].context);
      is_over = is_over && fibers[t].is_done;
    }
    if (!is_over && !has_moved) {
      fprintf(stderr, "every thread waits\n");
      exit(3);
    }
  }
}

struct Meeting { int num_there = 0, generation = 0; };
inline void meet(Meeting &meeting, int size) {
  int generation = meeting.generation;
  if (++meeting.num_there == size) {
    meeting.num_there = 0;
    ++meeting.generation;
    has_moved = true;
  } else {
    wait_until([&] { return meeting.generation != generation; });
  }
}
inline int __any_sync(unsigned, int predicate) {
  static int predicates[1024];
  static Meeting meetings[32];
  int warp = threadIdx.x / 32, any = 0;
  predicates[threadIdx.x] = predicate;
  meet(meetings[warp], 32);
  for (int lane = 0; lane < 32; ++lane) any |= predicates[32 * warp + lane];
  meet(meetings[warp], 32);
  return any;
}
inline void __syncthreads() { static Meeting all; meet(all, num_threads); }

// Numbers.
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint1 { unsigned x; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
// Exact in fp64 where the product and the sum span less than 53 bits.
inline float __fmaf_rn(float a, float b, float c) { return float(double(a) * b + c); }
inline float tilescout_exp2(float x) { return x < -126.f ? 0.f : exp2f(x); }

inline uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
inline float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t raw = bits_of(value);
    bits = uint16_t((raw + 0x7FFF + (raw >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return float_of(uint32_t(bits) << 16); }
};
struct __nv_bfloat162 { bfloat16_t x, y; };
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return a.bits | b.bits << 16; }

inline float e4m3_to_float(uint8_t byte) {
  int exponent = byte >> 3 & 15, mantissa = byte & 7;
  float value = exponent ? ldexpf(1 + mantissa / 8.f, exponent - 7) : ldexpf(mantissa / 8.f, -6);
  return byte & 128 ? -value : value;
}
inline uint8_t float_to_e4m3(float value) {  // nearest, ties to even, saturating
  float magnitude = min(fabsf(value), 448.f);
  int exponent = max(magnitude > 0 ? ilogbf(magnitude) : -6, -6);
  float step = ldexpf(1.f, exponent - 3);
  float rounded = rintf(magnitude / step) * step;
  exponent = max(rounded > 0 ? ilogbf(rounded) : -6, -6);
  bool is_normal = rounded >= ldexpf(1.f, -6);
  int mantissa = int(rounded / ldexpf(1.f, exponent - 3)) - (is_normal ? 8 : 0);
  return uint8_t((is_normal ? (exponent + 7) << 3 : 0) | mantissa | (value < 0 ? 128 : 0));
}
struct fp8_e4_t {
  uint8_t byte;
  fp8_e4_t() = default;
  explicit fp8_e4_t(float value) : byte(float_to_e4m3(value)) {}
  explicit operator float() const { return e4m3_to_float(byte); }
};
struct fp8_e4_2_t { uint8_t x, y; };
typedef uint16_t __nv_fp8x2_storage_t;
enum { __NV_SATFINITE, __NV_E4M3 };
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 v, int, int) {
  return uint16_t(float_to_e4m3(v.x) | float_to_e4m3(v.y) << 8);
}

// Swizzle: 16-byte pieces of 8 rows change places by bits 7 to 9 of the address in shared memory.
inline int swizzled(int address, int row_bytes) {
  int mask = row_bytes == 128 ? 7 : row_bytes == 64 ? 3 : 1;
  return address ^ ((address >> 7 & mask) << 4);
}

struct Barrier {
  uint16_t expected, pending;
  int transactions : 31;
  unsigned phase : 1;
  void init(int count) { expected = pending = count; transactions = 0; phase = 0; }
  void settle() {
    if (pending || transactions) return;
    pending = expected;
    phase ^= 1;
    has_moved = true;
  }
  void expect_transaction(int bytes) { transactions += bytes; }
  void arrive() { --pending; settle(); }
  void arrive_and_expect_tx(int bytes) { transactions += bytes; arrive(); }
  void wait(int parity) { wait_until([&] { return int(phase) != parity; }); }
};
static_assert(sizeof(Barrier) == 8, "barriers lie in arrays of 64-bit words");

struct CUtensorMap {
  const char *data;
  int element_bytes, sizes[4], box[2];
};

namespace tl {
enum class DataType { kBFloat16, kFloat8_e4m3, kFloat32 };
struct MaxOp { float operator()(float a, float b) const { return max(a, b); } };
struct SumOp { float operator()(float a, float b) const { return a + b; } };
template <int> struct NamedBarrier {};

template <class Op, int lanes, int scale, int offset, class> struct AllReduce {
  static_assert(lanes == 4 && scale == 1, "sums and maxima of rows stay within four threads");
  static float run(float value) {
    static float values[1024];
    static Meeting meetings[256];
    int t = threadIdx.x;
    values[t] = value;
    meet(meetings[t / 4], 4);
    float result = Op()(Op()(values[t], values[t ^ 2]), Op()(values[t ^ 1], values[t ^ 3]));
    meet(meetings[t / 4], 4);
    return result;
  }
};
inline float fast_rcp(float x) { return 1.f / x; }

template <int threads> bool tl_shuffle_elect() {
  return threads ? threadIdx.x % threads == 0 : threadIdx.x == 0;
}
inline void tma_load(const CUtensorMap &map, Barrier &barrier, void *to, int a, int b, int c, int d) {
  int start = int(static_cast<uchar *>(to) - shared_memory), row_bytes = map.box[0] * map.element_bytes;
  for (int row = 0; row < map.box[1]; ++row)
    for (int column = 0; column < map.box[0]; ++column) {
      uchar value[4] = {};
      if (a + column < map.sizes[0] && b + row < map.sizes[1]) {
        size_t at = ((size_t(d) * map.sizes[2] + c) * map.sizes[1] + b + row) * map.sizes[0] + a + column;
        memcpy(value, map.data + at * map.element_bytes, map.element_bytes);
      }
      int address = start + row * row_bytes + column * map.element_bytes;
      memcpy(shared_memory + swizzled(address, row_bytes), value, map.element_bytes);
    }
  barrier.transactions -= map.box[1] * row_bytes;
  barrier.settle();
}
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
inline void prefetch_tma_descriptor(const CUtensorMap &) {}
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <int> void warpgroup_wait() {}
template <class T> void warpgroup_fence_operand(T *, int) {}

struct GmmaDescriptor {
  int address = 0, row_bytes = 0, group_bytes = 0;
  GmmaDescriptor operator+(int pieces) const { return {address + 16 * pieces, row_bytes, group_bytes}; }
  explicit operator uint64_t() const {
    return uint64_t(address) | uint64_t(row_bytes) << 32 | uint64_t(group_bytes) << 48;
  }
  static GmmaDescriptor of(uint64_t raw) {
    return {int(raw & 0xFFFFFFFF), int(raw >> 32 & 0xFFFF), int(raw >> 48)};
  }
  const uchar *at(int row, int byte) const {
    int place = address + row / 8 * group_bytes + row % 8 * row_bytes + byte;
    return shared_memory + swizzled(place, row_bytes);
  }
};
template <int layout, int, int stride> void initialize_wgmma_descriptor(GmmaDescriptor &to, void *data) {
  static_assert(layout >= 1 && layout <= 3, "operands are swizzled");
  to = {int(static_cast<uchar *>(data) - shared_memory), 256 >> layout, 16 * stride};
}
template <class> void increase_descriptor_offset(GmmaDescriptor &to, int bytes) { to.address += bytes; }

template <DataType type> float element(const uchar *data) {
  if (type == DataType::kFloat8_e4m3) return e4m3_to_float(*data);
  uint16_t bits;
  memcpy(&bits, data, 2);
  return float_of(uint32_t(bits) << 16);
}

// The product of a warp group; the thread that comes last computes it for all.
template <DataType A, DataType B, int N, int K> struct Product {
  static constexpr int bytes = A == DataType::kFloat8_e4m3 ? 1 : 2;
  template <class Left> static void run(Left left_of, uint64_t raw_b, float *c, int adds, const void *own) {
    static float *outputs[1024];
    static const void *registers[1024];
    static Meeting meetings[8];
    int t = threadIdx.x, group = t / 128;
    outputs[t] = c;
    registers[t] = own;
    if (meetings[group].num_there == 127) {
      GmmaDescriptor b = GmmaDescriptor::of(raw_b);
      static float left[64][K], right[N][K];
      for (int k = 0; k < K; ++k) {
        for (int n = 0; n < N; ++n) right[n][k] = element<B>(b.at(n, k * bytes));
        for (int m = 0; m < 64; ++m) left[m][k] = left_of(registers + 128 * group, m, k);
      }
      for (int thread = 0; thread < 128; ++thread)
        for (int r = 0; r < N / 2; ++r) {
          int lane = thread % 32, m = thread / 32 * 16 + lane / 4 + r % 4 / 2 * 8;
          int n = r / 4 * 8 + lane % 4 * 2 + r % 2;
          float sum = adds ? outputs[128 * group + thread][r] : 0;
          for (int k = 0; k < K; ++k) sum += left[m][k] * right[n][k];
          outputs[128 * group + thread][r] = sum;
        }
    }
    meet(meetings[group], 128);
  }
};

template <DataType A, DataType B, DataType, int M, int N, int K, bool, bool, int, int>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t *c, int adds) {
  GmmaDescriptor rows = GmmaDescriptor::of(a);
  constexpr int bytes = Product<A, B, N, K>::bytes;
  auto left = [&](const void **, int m, int k) { return element<A>(rows.at(m, k * bytes)); };
  Product<A, B, N, K>::run(left, b, reinterpret_cast<float *>(c), adds, nullptr);
}

template <DataType A, DataType B, DataType, int M, int N, int K, bool, bool, int, int>
void wgmma_rs(const uint32_t *a, uint64_t b, uint32_t *c, int adds) {
  constexpr int bytes = Product<A, B, N, K>::bytes, word = 4 / bytes;
  auto left = [&](const void **registers, int m, int k) {
    int thread = m / 16 * 32 + m % 8 * 4 + k / word % 4, index = k / (4 * word) * 2 + m / 8 % 2;
    return element<A>(static_cast<const uchar *>(registers[thread]) + 4 * index + k % word * bytes);
  };
  Product<A, B, N, K>::run(left, b, reinterpret_cast<float *>(c), adds, a);
}
}  // namespace tl
