// Routed experts of a few tokens, as experts_few.cu, for stacks in tiles of 4 or 8 bits (triton/mxfp4, fp8_tiles).
//
// A warp takes 16 rows of a tile, all 128 columns of it: of each 32 columns a lane's 16 bytes are what mma.m16n8k16 wants
// of it in its left operand, once they are widened to bf16, which is exact. Of the right operand only the first column
// is there, so lanes 0 to 3 read x. The warps of a block share an expert's columns, tile by tile, and add up at the end,
// in their order; so a sum's order follows from the sizes and WARPS, not from other tokens.
//
// BITS 4 or 8, WARPS a block, STAGES of the ring, BIAS: 0 none, 1 bf16, 2 f32. Where GATED is defined, gate_up; GLU.
// Where CHOSEN is, down_sum. Both have 16 rows a block.
#include "experts_few.cuh"

#define ROWS 16
#define PIECES (BITS / 2)       // of 512 bytes: 16 rows of a tile
#define TILE (4 * PIECES * 32)  // uint4 of a tile, whose 64 rows are four times 16

// A stack: codes in tiles of 64 x 128, tall x wide of them a matrix; of 4 bits what their groups' exponents are, of 8 the
// scales of 128 x 128.
struct Stack {
  const uint4* codes;
  const void* scales;
  const float* shifts;  // of 4 bits, of each matrix
  int tall, wide;
};

__device__ __forceinline__ void copy_async_8(u32 into, const void* from, bool there) {
  const int bytes = there ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(into), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ u32 product(u32 pair, u32 power) {
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(power));
  return pair;
}

__device__ __forceinline__ u32 rotated(u32 word, int right) { return __funnelshift_r(word, word, right); }

// Two words of a row, eight columns apart from plane to plane: pairs of 8 bits as bf16.
__device__ __forceinline__ void widen_8(u32* planes, u32 one, u32 two) {
  planes[0] = one & 0x87f087f0u;
  planes[1] = two & 0x87f087f0u;
  planes[2] = ((one << 4) & 0x80f080f0u) | ((two >> 4) & 0x07000700u);
  planes[3] = ((two << 4) & 0x80f080f0u) | ((one >> 4) & 0x07000700u);
#pragma unroll
  for (int p = 0; p < 4; ++p) planes[p] = product(planes[p], 0x7b807b80u);  // 2^120
}

// The same of 4 bits; planes 4 to 7 are of the tile's other 64 columns. powers: of both, 2^(126 + exponent) as bf16.
__device__ __forceinline__ void widen_4(u32* planes, u32 one, u32 two, u32 low, u32 high) {
  const u32 both = (one & 0xc180c180u) | (two & ~0xc180c180u);
  const u32 turned[8] = {rotated(one, 26), rotated(one, 30), rotated(one, 4), both,
                         rotated(two, 8),  rotated(two, 28), rotated(two, 2), rotated(both, 6)};
#pragma unroll
  for (int p = 0; p < 8; ++p) planes[p] = product(turned[p] & 0x81c081c0u, p < 4 ? low : high);
}

// 32 columns of 16 rows times those of x: planes of a lane's two rows.
__device__ __forceinline__ void times(float* c, const u32* upper, const u32* lower, const u32* x) {
  multiply(c, upper[0], lower[0], upper[1], lower[1], x[0], x[1]);
  multiply(c, upper[2], lower[2], upper[3], lower[3], x[2], x[3]);
}

// A warp's sums of items 0 .. items - 1 over tiles begin, begin + step, ...: 16 rows from 16 * block on of the matrices
// that expert(item) has in the stacks, times line(item), known once wait() has returned. done(item, matrix, c): sums of
// rows g and g + 8 are c[0] and c[2] of lane 4 g. An expert below 0 counts as one of zeros.
template <int MATRICES, class Expert, class Wait, class Line, class Done>
__device__ __forceinline__ void products(uint4* ring, const Stack* stacks, int block, int items, int begin, int step,
                                         int inputs, Expert expert, Wait wait, Line line, Done done) {
  constexpr int SCALED = BITS == 8 ? MATRICES : 1;
  const int lane = threadIdx.x % 32, wide = stacks[0].wide;
  uint4* const codes = ring + threadIdx.x;  // [STAGES][MATRICES][PIECES][THREADS]
  uint2* const powers = (uint2*)(ring + STAGES * MATRICES * PIECES * THREADS) + threadIdx.x;
  const int count = begin < wide ? (wide - begin + step - 1) / step : 0;
  int ordered = 0, tile = begin, into = 0;
  auto order = [&]() {
    const i64 of = ordered < items ? expert(ordered) : -1;
    const bool there = of >= 0 && tile < wide;
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) {
      const i64 at = there ? (of * stacks[m].tall + block / 4) * wide + tile : 0;
#pragma unroll
      for (int p = 0; p < PIECES; ++p)
        copy_async((u32)__cvta_generic_to_shared(codes + ((into * MATRICES + m) * PIECES + p) * THREADS),
                   stacks[m].codes + at * TILE + p * 128 + block % 4 * 32 + lane, there);
      if (BITS == 4)
        copy_async_8((u32)__cvta_generic_to_shared(powers + (into * MATRICES + m) * THREADS),
                     (const uint2*)stacks[m].scales + at * 32 + block % 4 * 8 + lane / 4, there);
    }
    asm volatile("cp.async.commit_group;");
    into = into + 1 < STAGES ? into + 1 : 0;
    tile += step;
    if (tile >= wide) tile = begin, ++ordered;
  };
#pragma unroll 1  // code that is short is soon there
  for (int s = 0; s < STAGES - 1; ++s) order();
  wait();
  int from = 0;
#pragma unroll 1
  for (int item = 0; item < items; ++item) {
    float c[MATRICES][4] = {};
    const u16* x = line(item);
    const i64 of = expert(item);
#pragma unroll 1
    for (int s = 0; s < count; ++s) {
      const int here = begin + s * step;
      u32 columns[16];
#pragma unroll
      for (int q = 0; q < 16; ++q) {
        const int k = here * 128 + q * 8 + 2 * lane;
        columns[q] = lane < 4 && k < inputs ? *(const u32*)(x + k) : 0;
      }
      float scale[SCALED];
#pragma unroll
      for (int m = 0; m < SCALED; ++m)
        scale[m] = BITS == 8 && of >= 0
                       ? ((const float*)stacks[m].scales)[(of * (stacks[m].tall / 2) + block / 8) * wide + here]
                       : 0.f;
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
      order();
#pragma unroll
      for (int m = 0; m < MATRICES; ++m) {
        const uint4* own = codes + (from * MATRICES + m) * PIECES * THREADS;
        float part[4] = {};
        uint2 power = {};
        if (BITS == 4) power = powers[(from * MATRICES + m) * THREADS];
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
          const uint4 a = own[p * THREADS];
          u32 upper[8], lower[8];
          if (BITS == 8) {
            widen_8(upper, a.x, a.y);
            widen_8(lower, a.z, a.w);
            times(part, upper, lower, columns + 4 * p);
          } else {
            const int left = 8 * p, right = left + 16;
            widen_4(upper, a.x, a.y, (power.x >> left & 255) * 0x00800080u, (power.x >> right & 255) * 0x00800080u);
            widen_4(lower, a.z, a.w, (power.y >> left & 255) * 0x00800080u, (power.y >> right & 255) * 0x00800080u);
            times(c[m], upper, lower, columns + 4 * p);
            times(c[m], upper + 4, lower + 4, columns + 8 + 4 * p);
          }
        }
        if (BITS == 8) {
          c[m][0] = fmaf(part[0], scale[m], c[m][0]);
          c[m][2] = fmaf(part[2], scale[m], c[m][2]);
        }
      }
      from = from + 1 < STAGES ? from + 1 : 0;
    }
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) done(item, m, c[m]);
  }
}

__device__ __forceinline__ float shift_of(const Stack& stack, i64 expert) {
  return BITS == 4 ? stack.shifts[expert] : 1.f;
}

#ifdef GATED
// Grid (slots, channels in blocks of 16): what slots that chose the same expert read lies near in time.
extern "C" __global__ void __launch_bounds__(THREADS) gate_up(
    const u16* x, const i64* ids, const uint4* gate, const void* gate_scales, const float* gate_shifts,
    const uint4* up, const void* up_scales, const float* up_shifts, const void* gate_bias, const void* up_bias,
    u16* hidden, int experts, int chosen, int channels, int inputs, int tall, int wide, i64 x_stride,
    Constants with) {
  extern __shared__ uint4 ring[];
  __shared__ float sums[WARPS][2][ROWS];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Not before: whoever comes next may read ids at once, as the kernel that wrote them has ended.
  asm volatile("griddepcontrol.launch_dependents;");
  const int slot = blockIdx.x, block = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i64 expert = expert_at(ids + slot);
  if (expert < 0 || expert >= experts) return;
  const Stack stacks[2] = {{gate, gate_scales, gate_shifts, tall, wide}, {up, up_scales, up_shifts, tall, wide}};
  products<2>(
      ring, stacks, block, 1, warp, WARPS, inputs, [&](int) { return expert; }, [] {},
      [&](int) { return x + slot / chosen * x_stride; },
      [&](int, int m, const float* c) {
        if (lane % 4 == 0) sums[warp][m][lane / 4] = c[0], sums[warp][m][lane / 4 + 8] = c[2];
      });
  __syncthreads();
  const int r = threadIdx.x, channel = block * ROWS + r;
  if (r >= ROWS || channel >= channels) return;
  float both[2] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int s = 0; s < WARPS; ++s) both[m] += sums[s][m][r];
    both[m] = narrowed(both[m] * shift_of(stacks[m], expert) + bias_at(m ? up_bias : gate_bias, expert * channels + channel));
  }
  store(hidden + (i64)slot * channels + channel, activated(both[0], both[1], with));
}
#endif

#ifdef CHOSEN
#define SHARE (WARPS > CHOSEN ? WARPS / CHOSEN : 1)  // warps that an expert has, or one has several experts

// Grid (tokens, rows of out in blocks of 16). Its weights are asked for while gate_up still runs.
extern "C" __global__ void __launch_bounds__(THREADS) down_sum(
    const u16* hidden, const i64* ids, const float* weights, const uint4* down, const void* down_scales,
    const float* down_shifts, const void* bias, u16* out, int experts, int outputs, int inputs, int tall, int wide) {
  extern __shared__ uint4 ring[];
  __shared__ float sums[CHOSEN][SHARE][ROWS];
  __shared__ Choices choices;
  asm volatile("griddepcontrol.launch_dependents;");
  const int token = blockIdx.x, block = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  read_ids(choices, ids + token * CHOSEN, experts);
  const Stack stack = {down, down_scales, down_shifts, tall, wide};
  const int first = warp / SHARE, items = (CHOSEN - first + WARPS / SHARE - 1) / (WARPS / SHARE);
  auto which = [&](int item) { return first + item * (WARPS / SHARE); };
  products<1>(
      ring, &stack, block, items, warp % SHARE, SHARE, inputs,
      [&](int item) { return item < items ? choices.expert[which(item)] : -1; },
      [&] { read_weights(choices, weights + token * CHOSEN); },
      [&](int item) { return hidden + ((i64)token * CHOSEN + which(item)) * inputs; },
      [&](int item, int, const float* c) {
        float(*to)[ROWS] = &sums[which(item)][warp % SHARE];
        if (lane % 4 == 0) (*to)[lane / 4] = c[0], (*to)[lane / 4 + 8] = c[2];
      });
  __syncthreads();
  const int r = threadIdx.x, row = block * ROWS + r;
  if (r >= ROWS || row >= outputs) return;
  const float total = weighted(choices, [&](int n) {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < SHARE; ++s) sum += sums[n][s][r];
    return narrowed(sum * shift_of(stack, choices.expert[n]) + bias_at(bias, choices.expert[n] * outputs + row));
  });
  store(out + (i64)token * outputs + row, total);
}
#endif
