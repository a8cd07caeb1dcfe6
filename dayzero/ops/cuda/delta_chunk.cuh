// What the kernels of the chunked delta rule share: sizes, products in f16, numbers in pairs, sums over lanes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "wgmma.cuh"

constexpr int C = 64, K = 128, TILE = C * K * 2, SQUARE = C * C * 2;
// Where in a chunk's block of bytes the tiles lie that go from the first kernel to the second.
constexpr int W_AT = 0, T_AT = TILE, QD_AT = T_AT + SQUARE, KD_AT = QD_AT + TILE, A_AT = KD_AT + TILE;
constexpr int BLOCK = A_AT + SQUARE;

#define O16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"

// s [64, 32] (+)= a [64, 16] b [32, 16]^T in f16
__device__ __forceinline__ void half_64x32(float (&s)[16], u64 a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" O16 "}, %16, %17, p, 1, 1, 0, 0; }\n"
      : F16(s, 0) : "l"(a), "l"(b), "r"(keep));
}
// s [64, 64] (+)= a [64, 16] b [16, 64] in f16, the numbers of a row of b together
__device__ __forceinline__ void half_64x64_rows(float (&s)[32], u64 a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" O32 "}, %32, %33, p, 1, 1, 0, 1; }\n"
      : F32(s, 0) : "l"(a), "l"(b), "r"(keep));
}
// the same with a in registers
__device__ __forceinline__ void half_64x64_rows(float (&s)[32], const u32* a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" O32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }\n"
      : F32(s, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ u32 half_product(u32 a, u32 b) {
  u32 out;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ float2 floats_of_half(u32 x) { return __half22float2(*reinterpret_cast<__half2*>(&x)); }
__device__ __forceinline__ float2 floats_of_bf16(u32 x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
__device__ __forceinline__ float inverse_of(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ __forceinline__ float log_of_2(float x) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ __forceinline__ void store_shared(u32 at, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
}
// A store that stays where it is: moved, what it stores has to be kept.
__device__ __forceinline__ void store_global(unsigned char* to, u32 value) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void four_shared(float (&x)[4], const float* from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(shared_address(from)) : "memory");
}

// yes ? a : b, without a branch
__device__ __forceinline__ float pick(int yes, float a, float b) {
  float out;
  asm("{ .reg .pred p; setp.ne.s32 p, %3, 0; selp.f32 %0, %1, %2, p; }" : "=f"(out) : "f"(a), "f"(b), "r"(yes));
  return out;
}

// Sums over the lanes of 16 numbers each: lane l gets that of number l / 2.
__device__ __forceinline__ float sums_of_16(float (&v)[16], int lane) {
#pragma unroll
  for (int width = 8; width >= 1; width >>= 1) {
    int high = lane & (width * 2);
#pragma unroll
    for (int i = 0; i < width; i++) {
      float sent = pick(high, v[i], v[i + width]);
      v[i] = pick(high, v[i + width], v[i]) + __shfl_xor_sync(~0u, sent, width * 2);
    }
  }
  return v[0] + __shfl_xor_sync(~0u, v[0], 1);
}

__device__ __forceinline__ void finish() {
  product_commit();
  product_wait<0>();
}

// Products of the 64 rows of tile a and 64 rows of b in bf16, or the 32 from b on in f16; 128 columns.
__device__ __forceinline__ void pairs_with_64(float (&s)[32], u32 a, u32 b) {
  u32 left = opaque(tile_low(a, 1024)), right = opaque(tile_low(b, 1024));
  product_fence();
#pragma unroll
  for (int step = 0; step < 8; step++) {
    u32 at = ((step >> 2) * (TILE / 2) + (step & 3) * 32) >> 4;
    product_64x64(s, descriptor(left + at), descriptor(right + at), step > 0);
  }
  finish();
  hold(s);
}
__device__ __forceinline__ void pairs_with_32(float (&s)[16], u32 a, u32 b) {
  u32 left = opaque(tile_low(a, 1024)), right = opaque(tile_low(b, 1024));
  product_fence();
#pragma unroll
  for (int step = 0; step < 8; step++) {
    u32 at = ((step >> 2) * (TILE / 2) + (step & 3) * 32) >> 4;
    half_64x32(s, descriptor(left + at), descriptor(right + at), step > 0);
  }
  finish();
  hold(s);
}

// [64, 64] accumulators in f16, two to a register: the registers of a first operand, four for each 16 columns.
__device__ __forceinline__ void as_operand(u32 (&a)[16], const float (&s)[32]) {
#pragma unroll
  for (int n = 0; n < 16; n++) a[n] = half_pair(s[2 * n], s[2 * n + 1]);
}

// These into a square tile: rows of 128 bytes.
__device__ __forceinline__ void store_square(u32 to, const u32 (&s)[16], int warp, int lane) {
  int row = 16 * (warp & 3) + (lane >> 2);
  u32 at = opaque(to + row * 128 + (lane & 3) * 4);
#pragma unroll
  for (int n = 0; n < 8; n++) {
    store_shared(at + ((n ^ (row & 7)) << 4), s[2 * n]);
    store_shared(at + ((n ^ (row & 7)) << 4) + 8 * 128, s[2 * n + 1]);
  }
}

__device__ __forceinline__ u32 transposed(u32 x) {
  u32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
  return out;
}
__device__ __forceinline__ u32 half_sum(u32 a, u32 b) {
  u32 out;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// a b of [16, 16] in f16, as first operands hold them, by one warp.
__device__ __forceinline__ void product_16x16(u32 (&out)[4], const u32 (&a)[4], const u32 (&b)[4]) {
#pragma unroll
  for (int n = 0; n < 2; n++) {
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 b0 = transposed(b[2 * n]), b1 = transposed(b[2 * n + 1]);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : F4(s, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    out[2 * n] = half_pair(s[0], s[1]);
    out[2 * n + 1] = half_pair(s[2], s[3]);
  }
}

// The pairs of level ``level``: i in the upper half of a block of 2^(level + 1) rows, j in its lower half.
__device__ __forceinline__ bool same_level(int i, int j, int level) { return (i ^ j) >> level == 1 && i > j; }

// t = (I + m)^-1 of a strictly lower m, both in f16 as accumulators hold them, by one warpgroup. What a level adds to t
// lies where t is zero before. Each warp does the levels within its own 16 rows alone.
// t_at, u_at: square tiles to work in.
__device__ __forceinline__ void inverse(u32 (&t)[16], const u32 (&m)[16], u32 t_at, u32 u_at, int warp, int lane) {
  u32 t_low = opaque(tile_low(t_at, 1024)), u_low = opaque(tile_low(u_at, 1024));
  const u32 minus = 0x80008000u, one = 0x3c003c00u;
  u32 own[4], inner[4];  // a register holds (i, j) and (i, j + 1) of i = lane / 4, j = 2 (lane % 4), of 8 by 8 numbers
#pragma unroll
  for (int e = 0; e < 4; e++)
    own[e] = minus ^ (warp & 2 ? (warp & 1 ? m[12 + e] : m[8 + e]) : (warp & 1 ? m[4 + e] : m[e]));
  int i = lane >> 2, j = 2 * (lane & 3);
#define BOTH(f) ((f(i, j) ? 0xffffu : 0u) | (f(i, j + 1) ? 0xffff0000u : 0u))
#define HERE(i, j) same_level(i, j, level)
#define EQUAL(i, j) ((i) == (j))
  {
    const int level = 0;
    inner[0] = (BOTH(HERE) & own[0]) | (BOTH(EQUAL) & one);
    inner[3] = (BOTH(HERE) & own[3]) | (BOTH(EQUAL) & one);
    inner[1] = inner[2] = 0;
  }
#pragma unroll
  for (int level = 1; level < 4; level++) {
    u32 here = level < 3 ? BOTH(HERE) : 0, between[4];
    u32 some[4] = {own[0] & here, level < 3 ? 0 : own[1], 0, own[3] & here};
    product_16x16(between, some, inner);
    product_16x16(some, inner, between);
#pragma unroll
    for (int e = 0; e < 4; e++) inner[e] = half_sum(inner[e], some[e]);
  }
#pragma unroll
  for (int n = 0; n < 16; n++) t[n] = (warp & 3) == n >> 2 ? inner[n & 3] : 0;
#pragma unroll
  for (int level = 4; level < 6; level++) {
    // Level 4 joins rows 16.. with columns 0.. and 48.. with 32..; level 5 rows 32.. with columns 0..31.
    float product[32];
    u32 some[16];
    store_square(t_at, t, warp, lane);
#pragma unroll
    for (int n = 0; n < 16; n++) {
      bool here = level == 4 ? n >> 2 == (warp & 3) - 1 && warp & 1 : n < 8 && warp & 2;
      some[n] = here ? m[n] ^ minus : 0;
    }
    shared_fence();
    named_sync<1>(128);
    product_fence();
#pragma unroll
    for (int step = 0; step < 2; step++) {
      int at = level == 4 ? 2 * step : step;
      half_64x64_rows(product, some + 4 * at, descriptor(t_low + at * 128), step > 0);
    }
    finish();
    hold(product);
    as_operand(some, product);
    store_square(u_at, some, warp, lane);
    shared_fence();
    named_sync<1>(128);
    product_fence();
#pragma unroll
    for (int step = 0; step < 2; step++) {
      int at = level == 4 ? 2 * step + 1 : step + 2;
      half_64x64_rows(product, t + 4 * at, descriptor(u_low + at * 128), step > 0);
    }
    finish();
    hold(product);
    as_operand(some, product);
#pragma unroll
    for (int n = 0; n < 16; n++) t[n] = half_sum(t[n], some[n]);
  }
}
