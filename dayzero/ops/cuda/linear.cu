// A product with few rows: y[m, n] = sum_k x[m, k] w[n, k] + bias[n], bf16 operands, f32 sums.
//
// A block takes 16 * TILES rows of w, its warps share K among themselves and add up at the end, so that a warp's sum
// is short. Which 16 k a fragment of mma.m16n8k16 holds does not matter as long as both operands hold the same ones,
// so a thread takes 16 bytes in a row, 8 k for two products. Each thread copies its weights into a ring of its own in
// shared memory and reads them back itself: nobody waits for anybody, and much is in flight.
//
// UNROLL blocks of 32 k a stage, STAGES of the ring; all else is told of in linear_parts.cuh.
#include "linear_parts.cuh"

#define EACH UNROLL * 2 * TILES

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
  asm volatile("griddepcontrol.launch_dependents;");  // who comes next may ask for its weights already, and then waits
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int step = WARPS * UNROLL * 32, begin = warp * UNROLL * 32 + t * 8;
  const u32 own = (u32)__cvta_generic_to_shared(ring + threadIdx.x);
  const u16* rows[TILES * 2];
#pragma unroll
  for (int r = 0; r < TILES * 2; ++r) rows[r] = w + (i64)weight_row(r, g, outputs) * w_stride;
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
  finish(c, y, bias, added, count, outputs, with);
}
