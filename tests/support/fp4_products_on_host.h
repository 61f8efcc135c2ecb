// What TileLang's generated CUDA for sm_120 takes besides cuda_threads_on_host.h: FP4 codes, packed
// pairs of fp32, and the product of a warp from blocks of 16 codes with e4m3 scales. Lanes hold what
// the PTX ISA says of mma.m16n8k64 with 4-bit types and scale_vec::4X, selectors 0.
#pragma once
#include "cuda_threads_on_host.h"

struct fp4_e2_t { uint8_t bits; };
struct fp4_e2_2_t { uint8_t bits; };

inline float e2m1_to_float(int code) {
  static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}
inline uint8_t float_to_e2m1(float value) { // nearest, ties to even, saturating
  float magnitude = min(fabsf(value), 6.f);
  float step = magnitude < 2 ? 0.5f : magnitude < 4 ? 1.f : 2.f;
  float rounded = rintf(magnitude / step) * step;
  int code = 0;
  while (code < 7 && e2m1_to_float(code) != rounded) ++code;
  return uint8_t(code | (std::signbit(value) ? 8 : 0));
}
inline uint8_t __tl_cvt_float2_to_fp4x2(float2 v) {
  return uint8_t(float_to_e2m1(v.x) | float_to_e2m1(v.y) << 4);
}

namespace tl {
inline float2 mul2(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 add2(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 fma2(float2 a, float2 b, float2 c) {
  return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)};
}
inline float2 max2(float2 a, float2 b) { return {max(a.x, b.x), max(a.y, b.y)}; }
template <class T> T broadcast(uchar value) {
  T all;
  memset(&all, value, sizeof(T));
  return all;
}

enum class SM120MmaBlockScaledKind { kMxf4nvf4 };
enum class SM120MmaScaleType { kUE4M3 };

// Codes of a row or column, 64 along k: lane 4 (index % 8) + k % 32 / 8 has eight of them a word.
template <SM120MmaBlockScaledKind, int scales, SM120MmaScaleType>
void sm120_mma_sync_blockscaled(float *d, const uint32_t *a, const uint32_t *b, const float *c,
                                uint32_t scale_a, uint32_t scale_b, int byte_a, int thread_a,
                                int byte_b, int thread_b) {
  static_assert(scales == 4, "four scales a word");
  if (byte_a || thread_a || byte_b || thread_b) fail("a selector other than 0");
  struct Operands { uint32_t a[4], b[2], scale_a, scale_b; };
  Operands mine{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, scale_a, scale_b};
  auto warp = all_of_warp(mine);
  auto code = [](uint32_t word, int k) { return e2m1_to_float(word >> 4 * (k % 8) & 15); };
  auto scale = [](uint32_t word, int k) { return e4m3_to_float(uint8_t(word >> 8 * (k / 16))); };
  const int lane = threadIdx.x % 32;
  for (int r = 0; r < 4; ++r) {
    const int half = r / 2, row = lane / 4, column = lane % 4 * 2 + r % 2;
    double sum = 0;
    for (int k = 0; k < 64; ++k) {
      const Operands &left = warp[row * 4 + k % 32 / 8], &right = warp[column * 4 + k % 32 / 8];
      // Words of A: the row, the row + 8, then both from k = 32 on; of B: from k = 0 and 32 on.
      double product = code(left.a[k / 32 * 2 + half], k) * code(right.b[k / 32], k);
      // Scales of rows: lanes 4 row and, of row + 8, 4 row + 1; of columns: lanes 4 column.
      product *= scale(warp[row * 4 + half].scale_a, k);
      sum += product * scale(warp[column * 4].scale_b, k);
    }
    d[r] = float(c[r] + sum);
  }
}
} // namespace tl
