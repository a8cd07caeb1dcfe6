// A product with few rows and a weight in blocks of 8 bits: y[m, n] = sum_k x[m, k] code[n, k] scale[n / 128, k / 128]
// + bias[n], x in bf16, codes in e4m3, scales and sums in f32. The weight is read once, as 8 bits.
//
// As linear.cu, but that the 16 bytes a thread takes in a row are 16 k, for four products. A code becomes a bf16 number,
// which it is exactly; what a stage adds up lies in one block of 128 columns, and is multiplied by its scale: so nothing
// is rounded but sums. Rows that share a scale: those of a block of threads, or of each of its halves (GLU).
//
// XSCALED: x is codes too, in bf16, and has scales by block of columns and row: a block's are x_behind the one before.
//
// A code of NaN (0x7f, 0xff) is read as 480: whoever lays a weight out gives its block a scale that is NaN.
//
// UNROLL (1 or 2) blocks of 64 k a stage, STAGES of the ring; all else is told of in linear_parts.cuh.
#include "linear_parts.cuh"

#define EACH (UNROLL * 2 * TILES)
#define SCALED (GLU < 0 ? 1 : 2)  // matrices that a block has rows of

struct Inputs {
  uint4 row[UNROLL][COLS][2];
  float scale[SCALED];
  float of_x[COLS][2];  // of the two rows that a thread has sums of
};

struct Scales {
  const float* of_w[SCALED];
  const float* of_x;
  i64 behind;
  int count, own;  // rows of x; the first of a thread's two
};

// The sign and the 7 bits below it go where bf16 has them, its exponent's upper half zero: 2^-120 of the number, if need
// be as a subnormal. The product with 2^120 is exact.
__device__ __forceinline__ u32 widened(u32 four, u32 which) {
  u32 two;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(two) : "r"(four), "r"(which));  // each byte, and above it 8 times its sign
  two = (two << 4) & 0x87f087f0u;
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(two) : "r"(0x7b807b80u));
  return two;
}

__device__ __forceinline__ u32 lower(u32 four) { return widened(four, 0x9180); }
__device__ __forceinline__ u32 upper(u32 four) { return widened(four, 0xb3a2); }

__device__ __forceinline__ void fetch(Inputs& into, const u16* const* rows, const bool* there,
                                      const Scales& scales, int k, int first, int inputs) {
#pragma unroll
  for (int i = 0; i < SCALED; ++i) into.scale[i] = first < inputs ? scales.of_w[i][first / 128] : 0.f;
#pragma unroll
  for (int j = 0; j < COLS; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = 8 * j + scales.own + i;
      into.of_x[j][i] = !XSCALED ? 1.f
                        : first < inputs && m < scales.count ? scales.of_x[(first / 128) * scales.behind + m]
                                                             : 0.f;
    }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u)
#pragma unroll
    for (int j = 0; j < COLS; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        into.row[u][j][i] = there[j] && k + 64 * u < inputs ? *(const uint4*)(rows[j] + k + 64 * u + 8 * i)
                                                            : make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) few_rows_fp8(
    const u16* x, const float* x_scales, const u8* w, const float* scales, const void* bias, void* y, int count,
    int outputs, int inputs, i64 x_stride, i64 x_behind, i64 w_stride, i64 scale_stride, Constants with,
    const u16* added) {
  extern __shared__ uint4 ring[];  // [STAGES][EACH][THREADS]
  asm volatile("griddepcontrol.launch_dependents;");  // who comes next may ask for its weights already, and then waits
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int step = WARPS * UNROLL * 64, begin = warp * UNROLL * 64, own_k = t * 16;
  const u32 own = (u32)__cvta_generic_to_shared(ring + threadIdx.x);
  const u8* rows[TILES * 2];
#pragma unroll
  for (int r = 0; r < TILES * 2; ++r) rows[r] = w + (i64)weight_row(r, g, outputs) * w_stride + own_k;
  Scales blocks;
#pragma unroll
  for (int i = 0; i < SCALED; ++i) blocks.of_w[i] = scales + (weight_row(i * TILES, 0, outputs) / 128) * scale_stride;
  blocks.of_x = x_scales, blocks.behind = x_behind, blocks.count = count, blocks.own = 2 * t;
  auto order = [&](int number) {
    const u32 slot = own + (number % STAGES) * (EACH * THREADS * 16);
    const int k = begin + number * step;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int r = 0; r < TILES * 2; ++r) {
        const bool there = k + own_k + 64 * u < inputs;
        copy_async(slot + (u * 2 * TILES + r) * (THREADS * 16), rows[r] + (there ? k + 64 * u : 0), there);
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
  fetch(now, lines, there, blocks, begin + own_k, begin, inputs);
  const int steps = (inputs + step - 1) / step;
  for (int s = 0; s < steps; ++s) {
    const int after = begin + (s + 1) * step;
    Inputs next;
    fetch(next, lines, there, blocks, after + own_k, after, inputs);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    const uint4* slot = ring + threadIdx.x + (s % STAGES) * (EACH * THREADS);
    float part[TILES][COLS][4] = {};
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const uint4 a = slot[(u * 2 * TILES + 2 * tile) * THREADS], d = slot[(u * 2 * TILES + 2 * tile + 1) * THREADS];
        const u32 high[4] = {a.x, a.y, a.z, a.w}, low[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const u32 a0 = lower(high[q]), a1 = lower(low[q]), a2 = upper(high[q]), a3 = upper(low[q]);
#pragma unroll
          for (int j = 0; j < COLS; ++j) {
            const uint4 b = now.row[u][j][q / 2];
            multiply(part[tile][j], a0, a1, a2, a3, q % 2 ? b.z : b.x, q % 2 ? b.w : b.y);
          }
        }
      }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int j = 0; j < COLS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool second = GLU >= 0 && 2 * tile + i / 2 >= TILES;
          const float scale = now.scale[second ? SCALED - 1 : 0] * now.of_x[j][i % 2];
          c[tile][j][i] = fmaf(part[tile][j][i], scale, c[tile][j][i]);
        }
    order(s + STAGES - 1);
    now = next;
  }
  finish(c, y, bias, added, count, outputs, with);
}
