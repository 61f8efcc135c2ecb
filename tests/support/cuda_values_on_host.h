// Names, numbers and vectors of CUDA and of TileLang's templates, for the host.
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
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define CUDART_INF_F INFINITY
#define TL_DEVICE inline

typedef unsigned char uchar;
typedef unsigned int uint;
struct Index3 { int x, y, z; };
inline Index3 threadIdx, blockIdx;
inline unsigned char *shared_memory;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint1 { unsigned x; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) {
    uint32_t x;
    memcpy(&x, &value, 4);
    bits = std::isnan(value) ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t x = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &x, 4);
    return value;
  }
};
struct half_t {
  _Float16 value;
  half_t() = default;
  explicit half_t(float x) : value(_Float16(x)) {}
  operator float() const { return float(value); }
};
struct __nv_bfloat162 { bfloat16_t x, y; };
struct half2 { half_t x, y; };
typedef half2 __half2;
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline float2 __half22float2(half2 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline half2 __float22half2_rn(float2 v) { return {half_t(v.x), half_t(v.y)}; }
template <class T> unsigned packed(T a, T b) {
  T both[2] = {a, b};
  unsigned result;
  memcpy(&result, both, 4);
  return result;
}
inline unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) { return packed(a, b); }
inline unsigned __pack_half2(half_t a, half_t b) { return packed(a, b); }
inline unsigned __pack_half2(bfloat16_t a, bfloat16_t b) { return packed(a, b); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// e4m3: 4 bits of exponent, 3 of mantissa, no infinity.
inline float e4m3_to_float(uint8_t byte) {
  int exponent = byte >> 3 & 15, mantissa = byte & 7;
  float value = exponent ? ldexpf(1 + mantissa / 8.f, exponent - 7) : ldexpf(mantissa / 8.f, -6);
  return (byte & 127) == 127 ? NAN : byte & 128 ? -value : value;
}
inline uint8_t float_to_e4m3(float value) { // nearest, ties to even, saturating
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
  operator float() const { return e4m3_to_float(byte); }
};
struct fp8_e4_2_t { uint8_t x, y; };
typedef uint16_t __nv_fp8x2_storage_t;
enum { __NV_SATFINITE, __NV_E4M3 };
inline uint16_t __nv_cvt_float2_to_fp8x2(float2 v, int, int) {
  return uint16_t(float_to_e4m3(v.x) | float_to_e4m3(v.y) << 8);
}

// Exact in fp64 where the product and the sum span less than 53 bits.
inline float __fmaf_rn(float a, float b, float c) { return float(double(a) * b + c); }
inline float ex2_approx_ftz(float x) { return x < -126.f ? 0.f : exp2f(x); }
