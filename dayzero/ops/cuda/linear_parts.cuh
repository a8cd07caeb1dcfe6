// What products with few rows share, whatever the weight is stored in: how blocks divide its rows, and what becomes of
// the sums. A block takes 16 * TILES rows of w; its warps have shared K among themselves.
//
// GLU, from 0 on the kind of a gated activation (ops/activation): w is a gate's matrix and then, as large, an up
// matrix; half of a block's rows are of each, for the same channels, and y = act(gate) * up of both as they are rounded.
//
// ADDED: one more matrix like y, to which the product is added as it is rounded.
//
// WARPS a block, TILES of 16 rows of w, COLS of 8 rows of x, OUT_F32, BIAS: 0 none, 1 bf16, 2 f32. GLU: -1 none, and
// then it has neither of the two.
#include "products.cuh"

#define THREADS (WARPS * 32)
#define HALF (TILES * 8)                    // rows of a block that are one matrix's, where there are two
#define OUTPUTS (GLU < 0 ? 2 * HALF : HALF)  // numbers of a row of y that a block makes

// The row of w that the r-th group of 8 rows of this block begins with, for a thread that has the g-th of them.
__device__ __forceinline__ int weight_row(int r, int g, int outputs) {
  const bool second = GLU >= 0 && r >= TILES;
  const int n = blockIdx.x * OUTPUTS + 8 * (second ? r - TILES : r) + g;
  return (n < outputs ? n : outputs - 1) + (second ? outputs : 0);
}

// Adds up what the warps have, and writes y. Of a thread's c [tile][column block] two numbers are of row lane / 4, two
// of the one 8 further.
__device__ __forceinline__ void finish(const float (&c)[TILES][COLS][4], void* y, const void* bias, const u16* added,
                                       int count, int outputs, Constants with) {
  __shared__ float sums[WARPS][COLS * 8][TILES * 16 + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * OUTPUTS;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int j = 0; j < COLS; ++j) {
      float(*at)[TILES * 16 + 1] = &sums[warp][8 * j + 2 * t];
      at[0][16 * tile + g] = c[tile][j][0];
      at[1][16 * tile + g] = c[tile][j][1];
      at[0][16 * tile + g + 8] = c[tile][j][2];
      at[1][16 * tile + g + 8] = c[tile][j][3];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < count * OUTPUTS; i += THREADS) {
    const int m = i / OUTPUTS, r = i % OUTPUTS, n = first + r;
    if (n >= outputs) continue;
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < WARPS; ++s) sum += sums[s][m][r];
    if (GLU >= 0) {
      float up = 0.f;
#pragma unroll
      for (int s = 0; s < WARPS; ++s) up += sums[s][m][HALF + r];
      sum = activated(narrowed(sum), narrowed(up), with);
    }
    if (BIAS == 1) sum += __uint_as_float((u32)((const u16*)bias)[n] << 16);
    if (BIAS == 2) sum += ((const float*)bias)[n];
    if (ADDED) sum = narrowed(sum) + __uint_as_float((u32)added[(i64)m * outputs + n] << 16);
    if (OUT_F32) {
      ((float*)y)[(i64)m * outputs + n] = sum;
    } else {
      u16 narrow;
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(sum));
      ((u16*)y)[(i64)m * outputs + n] = narrow;
    }
  }
}
