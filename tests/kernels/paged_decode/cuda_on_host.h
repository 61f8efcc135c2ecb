// What TileLang's generated CUDA takes from CUDA and from TileLang's templates, for the host: threads
// run one after the other, every access is made, nothing is computed. Under AddressSanitizer this
// finds reads and writes outside global and shared memory.
#pragma once
#include "cuda_values_on_host.h"

inline long num_accesses;
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
