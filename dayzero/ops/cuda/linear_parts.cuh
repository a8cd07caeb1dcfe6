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
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define THREADS (WARPS * 32)
#define HALF (TILES * 8)                    // rows of a block that are one matrix's, where there are two
#define OUTPUTS (GLU < 0 ? 2 * HALF : HALF)  // numbers of a row of y that a block makes

__device__ __forceinline__ void copy_async(u32 into, const void* from, bool there) {
  const int bytes = there ? 16 : 0;  // what is not read is 0
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(into), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float narrowed(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return __uint_as_float((u32)bits << 16);
}

struct Constants {
  float limit, alpha, beta, linear_beta;
};

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

__device__ __forceinline__ float activated(float g, float u, Constants with) {
  if (GLU == 2 || GLU == 3) {  // a NaN stays one
    g = g > with.limit ? with.limit : g;
    u = u > with.limit ? with.limit : u < -with.limit ? -with.limit : u;
  }
  if (GLU == 1) return g * sigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g)) * u;
  if (GLU == 2) return g * sigmoid(with.alpha * g) * (u + 1.f);
  if (GLU == 4) return with.beta * tanhf(g / with.beta) * sigmoid(g) * (with.linear_beta * tanhf(u / with.linear_beta));
  return g * sigmoid(g) * u;
}

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
