// What TileLang's generated CUDA takes from CUDA and from TileLang's templates, for the host: threads
// run one after the other, every access is made, nothing is computed. Under AddressSanitizer this
// finds reads and writes outside global and shared memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using std::max;
using std::min;

#define __global__
#define __grid_constant__
#define __shared__
#define __align__(n)
#define __launch_bounds__(...)
#define CUDART_INF_F INFINITY

typedef unsigned char uchar;
struct Index3 { int x, y, z; };
inline Index3 threadIdx, blockIdx;
inline long num_accesses;
inline unsigned char *shared_memory;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits(value != 0) {}
};
struct __nv_bfloat162 { bfloat16_t x, y; };
inline unsigned __pack_half2(bfloat16_t, bfloat16_t) { return 0; }
inline unsigned __pack_nv_bfloat162(bfloat16_t, bfloat16_t) { return 0; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline void __syncthreads() {}

struct CUtensorMap { long sizes[4]; };
struct Barrier {
  uint64_t state;
  void init(int) {}
  void wait(int) {}
  void arrive() {}
  void arrive_and_expect_tx(int) {}
  void expect_transaction(int) {}
};

namespace tl {
enum class DataType { kBFloat16, kFloat32 };
enum class CacheHintSm90 { EVICT_NORMAL, EVICT_FIRST };
struct MaxOp {};
struct SumOp {};
template <int> struct NamedBarrier {};

template <class, int, int, int offset, class, int batch = 1, int stride = 0> struct AllReduce {
  template <class T> static void run_batch(T *x, T *workspace = nullptr) {
    for (int i = 0; workspace && i < batch; ++i)
      workspace[threadIdx.x - offset + i * stride] = x[i];
  }
};

template <int bytes> void cp_async_gs(void *to, const void *from) {
  if (reinterpret_cast<uintptr_t>(from) % bytes) {
    fprintf(stderr, "a misaligned copy\n");
    abort();
  }
  memcpy(to, from, bytes);
  ++num_accesses;
}
inline void cp_async_commit() {}
template <int> void cp_async_wait() {}

template <class T, class U> void ptx_ldmatrix_x4(T *row, U *) {
  volatile uint4 taken = *reinterpret_cast<const uint4 *>(row);
  (void)taken;
}
template <class T, class U> void ptx_ldmatrix_x4_trans(T *row, U *to) { ptx_ldmatrix_x4(row, to); }
template <class T, class... U> void ptx_stmatrix_m8n8_x4(T *row, U...) { memset(row, 0, 16); }
template <DataType, DataType, DataType, int, int, int, bool, bool>
void mma_sync(float *, const unsigned *, const unsigned *) {}

template <int threads> bool tl_shuffle_elect() {
  return threads ? threadIdx.x % threads == 0 : threadIdx.x == 0;
}
// TMA fills with zeros what lies outside a tensor; a page that is not there is a mistake all the same.
template <CacheHintSm90 = CacheHintSm90::EVICT_NORMAL>
void tma_load(const CUtensorMap &map, Barrier &, void *to, int a, int b, int c, int d) {
  const int at[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    if (at[i] < 0 || at[i] >= map.sizes[i]) {
      fprintf(stderr, "a TMA box starts at %d on axis %d of %ld\n", at[i], i, map.sizes[i]);
      abort();
    }
  *static_cast<char *>(to) = 0;
  ++num_accesses;
}
inline void fence_barrier_init() {}
inline void fence_proxy_async() {}
inline void prefetch_tma_descriptor(const CUtensorMap &) {}
template <int> void warpgroup_reg_alloc() {}
template <int> void warpgroup_reg_dealloc() {}
template <class... T> void __sync_thread_partial(T...) {}
}  // namespace tl
