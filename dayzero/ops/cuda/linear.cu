// A product with few rows: y[m, n] = sum_k x[m, k] w[n, k] + bias[n], bf16 operands, f32 sums.
//
// A block takes 16 * TILES rows of w, its warps share K among themselves and add up at the end, so that a warp's sum
// is short. Which 16 k a fragment of mma.m16n8k16 holds does not matter as long as both operands hold the same ones,
// so a thread takes 16 bytes in a row, 8 k for two products. Each thread copies its weights into a ring of its own in
// shared memory and reads them back itself: nobody waits for anybody, and much is in flight.
//
// GLU, from 0 on the kind of a gated activation (ops/activation): w is a gate's matrix and then, as large, an up
// matrix; half of a block's rows are of each, for the same channels, and y = act(gate) * up of both as they are rounded.
//
// ADDED: one more matrix like y, to which the product is added as it is rounded.
//
// WARPS a block, TILES of 16 rows of w, COLS of 8 rows of x, UNROLL blocks of 32 k a stage, STAGES of the ring,
// OUT_F32, BIAS: 0 none, 1 bf16, 2 f32. GLU: -1 none, and then it has neither of the two.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define EACH UNROLL * 2 * TILES
#define THREADS (WARPS * 32)
#define HALF (TILES * 8)                    // rows of a block that are one matrix's, where there are two
#define OUTPUTS (GLU < 0 ? 2 * HALF : HALF)  // numbers of a row of y that a block makes

__device__ __forceinline__ void copy_async(u32 into, const u16* from, bool there) {
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

struct Inputs {
  uint4 row[UNROLL][COLS];
};

__device__ __forceinline__ void fetch(Inputs& into, const u16* const* rows, const bool* there, int k, int inputs) {
#pragma unroll
  for (int u = 0; u < UNROLL; ++u)
#pragma unroll
    for (int j = 0; j < COLS; ++j)
      into.row[u][j] = there[j] && k + 32 * u < inputs ? *(const uint4*)(rows[j] + k + 32 * u) : make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) few_rows(
    const u16* x, const u16* w, const void* bias, void* y, int count, int outputs, int inputs, i64 x_stride,
    i64 w_stride, Constants with, const u16* added) {
  extern __shared__ uint4 ring[];  // [STAGES][EACH][THREADS]
  __shared__ float sums[WARPS][COLS * 8][TILES * 16 + 1];
  asm volatile("griddepcontrol.launch_dependents;");  // who comes next may ask for its weights already, and then waits
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x * OUTPUTS;
  const int step = WARPS * UNROLL * 32, begin = warp * UNROLL * 32 + t * 8;
  const u32 own = (u32)__cvta_generic_to_shared(ring + threadIdx.x);
  const u16* rows[TILES * 2];
#pragma unroll
  for (int r = 0; r < TILES * 2; ++r) {
    const bool second = GLU >= 0 && r >= TILES;
    const int n = first + 8 * (second ? r - TILES : r) + g;
    rows[r] = w + (i64)((n < outputs ? n : outputs - 1) + (second ? outputs : 0)) * w_stride;
  }
  auto order = [&](int number) {
    const u32 slot = own + (number % STAGES) * (EACH * THREADS * 16);
    const int k = begin + number * step;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int r = 0; r < TILES * 2; ++r) {
        const bool there = k + 32 * u < inputs;
        copy_async(slot + (u * 2 * TILES + r) * (THREADS * 16), rows[r] + (there ? k + 32 * u : 0), there);
      }
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) order(s);
  asm volatile("griddepcontrol.wait;" ::: "memory");  // weights are under way before the kernel ahead has made x
  const u16* lines[COLS];
  bool there[COLS];
#pragma unroll
  for (int j = 0; j < COLS; ++j) {
    there[j] = g + 8 * j < count;
    lines[j] = x + (there[j] ? g + 8 * j : 0) * x_stride;
  }
  float c[TILES][COLS][4] = {};
  Inputs now;
  fetch(now, lines, there, begin, inputs);
  const int steps = (inputs + step - 1) / step;
  for (int s = 0; s < steps; ++s) {
    Inputs next;
    fetch(next, lines, there, begin + (s + 1) * step, inputs);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    const uint4* slot = ring + threadIdx.x + (s % STAGES) * (EACH * THREADS);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 a = slot[(u * 2 * TILES + 2 * tile) * THREADS], d = slot[(u * 2 * TILES + 2 * tile + 1) * THREADS];
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
          const uint4 b = now.row[u][j];
          multiply(c[tile][j], a.x, d.x, a.y, d.y, b.x, b.y);
          multiply(c[tile][j], a.z, d.z, a.w, d.w, b.z, b.w);
        }
      }
    order(s + STAGES - 1);
    now = next;
  }
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
