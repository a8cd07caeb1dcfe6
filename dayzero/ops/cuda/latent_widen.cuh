// e4m3 codes of latent rows, 128 columns to a scale, as bf16 numbers of a tile of 64 rows in shared memory.
#pragma once
#include "paged_tiles.cuh"
#ifndef WIDEN_ONCE  // one way for all codes, without a slower one beside it
#define WIDEN_ONCE 0
#endif

// Two e4m3 codes, each in the upper byte of 16 bits, as bf16: their bits in the right places are the values times 2^-120.
__device__ __forceinline__ u32 spread(u32 codes) { return (codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u); }
__device__ __forceinline__ u32 pair_of(u32 word, int half) { return __byte_perm(word, 0, half ? 0x3424 : 0x1404); }

#if WIDEN_ONCE
// Four times 16 codes, 64 columns apart, to the piece at ``to`` and the one beside it, and to those 64 columns on; 128
// columns share a scale. One NaN makes all 16 NaN: its row's logits are NaN then in any case, and all that is made of it.
__device__ __forceinline__ void widen_unit(u32 to, const uint4 (&held)[4], float2 scale) {
  // By 2^120 times the scale, or where that may be no number, by one and then by the other.
  const bool large = __any_sync(0xffffffffu, !(fmaxf(scale.x, scale.y) <= 64.0f));
  const float lift = large ? 1.0f : 1.329227995784916e36f;
  const u32 by[2] = {bf16_pair(scale.x * lift, scale.x * lift), bf16_pair(scale.y * lift, scale.y * lift)};
#pragma unroll
  for (int i = 0; i < 4; i++, to += 64 * 128) {
    const u32 words[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
    u32 odd = 0, out[8];
#pragma unroll
    for (int k = 0; k < 4; k++) odd |= (words[k] & 0x7f7f7f7fu) + 0x01010101u;
    const u32 factor = odd & 0x80808080u ? 0x7fff7fffu : large ? 0x7b807b80u : by[i / 2];
#pragma unroll
    for (int k = 0; k < 8; k++) out[k] = bf16_product(spread(pair_of(words[k / 2], k % 2)), factor);
    if (large) {
#pragma unroll
      for (int k = 0; k < 8; k++) out[k] = bf16_product(out[k], by[i / 2]);
    }
    store_16(to, out[0], out[1], out[2], out[3]);
    store_16(to ^ 16, out[4], out[5], out[6], out[7]);
  }
}
__device__ __forceinline__ void widen_unit(u32 tile, int row, int piece, const uint4 (&held)[4], float2 scale) {
  widen_unit(tile + piece_at<64>(row, piece), held, scale);
}
#else
// 16 codes of a row as two pieces of a tile; scale: two equal bf16, 2^120 times that of the codes.
__device__ __forceinline__ void widen_16(u32 tile, int row, int piece, uint4 codes, u32 scale) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  u32 out[8];
#pragma unroll
  for (int i = 0; i < 8; i++) out[i] = bf16_product(spread(pair_of(words[i / 2], i % 2)), scale);
  store_16(tile + piece_at<64>(row, piece), out[0], out[1], out[2], out[3]);
  store_16(tile + piece_at<64>(row, piece + 1), out[4], out[5], out[6], out[7]);
}

// The same where a code may be NaN (which ``spread`` makes a number), or a scale so large that 2^120 times it is none.
__device__ __forceinline__ void widen_16_slowly(u32 tile, int row, int piece, uint4 codes, float scale) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, by = bf16_pair(scale, scale);
  u32 out[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 pair = pair_of(words[i / 2], i % 2);
    out[i] = bf16_product(bf16_product(spread(pair), 0x7b807b80u), by);
    if ((pair & 0x7f00u) == 0x7f00u) out[i] |= 0x7fc0u;
    if ((pair & 0x7f000000u) == 0x7f000000u) out[i] |= 0x7fc00000u;
  }
  store_16(tile + piece_at<64>(row, piece), out[0], out[1], out[2], out[3]);
  store_16(tile + piece_at<64>(row, piece + 1), out[4], out[5], out[6], out[7]);
}

// Four times 16 codes, 64 columns apart; 128 columns share a scale.
__device__ __forceinline__ void widen_unit(u32 tile, int row, int piece, const uint4 (&held)[4], float2 scale) {
  constexpr float LIFT = 1.329227995784916e36f;  // 2^120
  u32 odd = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    odd |= ((held[i].x & 0x7f7f7f7fu) + 0x01010101u) | ((held[i].y & 0x7f7f7f7fu) + 0x01010101u);
    odd |= ((held[i].z & 0x7f7f7f7fu) + 0x01010101u) | ((held[i].w & 0x7f7f7f7fu) + 0x01010101u);
  }
  if (__any_sync(0xffffffffu, (odd & 0x80808080u) != 0 || !(fmaxf(scale.x, scale.y) <= 64.0f))) {
#pragma unroll
    for (int i = 0; i < 4; i++) widen_16_slowly(tile, row, piece + i * 8, held[i], i < 2 ? scale.x : scale.y);
    return;
  }
  const u32 by[2] = {bf16_pair(scale.x * LIFT, scale.x * LIFT), bf16_pair(scale.y * LIFT, scale.y * LIFT)};
#pragma unroll
  for (int i = 0; i < 4; i++) widen_16(tile, row, piece + i * 8, held[i], by[i / 2]);
}
#endif

// 16 bytes of a record, here and not later; zeros where there is none.
__device__ __forceinline__ uint4 load_now(const unsigned char* at) {
  uint4 x = make_uint4(0, 0, 0, 0);
  asm volatile(
      "{ .reg .pred p; setp.ne.u64 p, %4, 0;\n"
      "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(at));
  return x;
}
