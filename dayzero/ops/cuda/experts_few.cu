// Routed experts of a few tokens, each by itself: a slot is a token's choice, number token * chosen + n. bf16 operands,
// f32 sums.
//
//   gate_up   hidden[slot] = act(gate x + bias) * (up x + bias), both rounded before
//   down_sum  out[token] = sum over its slots, in ascending expert, of weight * (down hidden[slot] + bias) as it is
//             rounded; ids outside 0 .. experts - 1 are no expert
//
// A warp takes two rows of weights at a time, of gate and up or two of down, 256 numbers of each in one go: 512 bytes in
// a row of memory. To mma.m16n8k16 it shows them as 16 rows of 32 numbers and x as 8 columns of 32, each the part of K
// that 4 lanes hold; of the 128 sums the 16 whose row and column are the same part count. A warp has all of K, so nobody
// waits for anybody, and a sum's order follows from K alone: not from the settings below, nor from other tokens.
//
// Each thread copies its weights into a ring of its own in shared memory and reads them back itself; the ring goes on
// from one pair of rows to the next, so it is full until a warp's last ones.
//
// WARPS a block, STAGES of the ring (1 KB a warp each), BIAS: 0 none, 1 bf16, 2 f32. Where EACH is defined, gate_up:
// channels a warp, at most 32; GLU. Where ROWS is, down_sum: rows a block, an even number; CHOSEN: experts a token.
#include "experts_few.cuh"

#define STEP 256

struct Pair {
  const u16 *one, *two;
  bool there;  // else they count as 0, and are not read
};

struct Sums {
  float one, two;
};

// The sums that count, on all lanes. A lane's c are of parts lane / 4 (c[0], c[1] of the first row, c[2], c[3] of the
// second) and columns 2 (lane % 4) and the next.
__device__ __forceinline__ Sums added(const float* c, int lane) {
  const int part = lane / 4;
  const bool own = lane % 4 == part / 2;
  Sums sums = {own ? (part % 2 ? c[1] : c[0]) : 0.f, own ? (part % 2 ? c[3] : c[2]) : 0.f};
#pragma unroll
  for (int far = 16; far > 0; far /= 2) {
    sums.one += __shfl_xor_sync(~0u, sums.one, far);
    sums.two += __shfl_xor_sync(~0u, sums.two, far);
  }
  return sums;
}

// A warp's products of items 0 .. items - 1: weights(item) are its rows, line(item) what they are multiplied by, known
// once wait() has returned, and done(item, sums) is called in this order.
template <class Weights, class Wait, class Line, class Done>
__device__ __forceinline__ void products(uint4* ring, int items, int inputs, Weights weights, Wait wait, Line line,
                                         Done done) {
  const int lane = threadIdx.x % 32, begin = lane * 8, steps = (inputs + STEP - 1) / STEP;
  const u32 own = (u32)__cvta_generic_to_shared(ring + threadIdx.x);  // [STAGES][2][THREADS]
  Pair rows = weights(0);
  int ordered = 0, ordered_step = 0, into = 0;
  auto order = [&]() {
    const int k = begin + ordered_step * STEP;
    const bool there = ordered < items && k < inputs && rows.there;
    const u32 slot = own + into * (2 * THREADS * 16);
    copy_async(slot, rows.one + (there ? k : 0), there);
    copy_async(slot + THREADS * 16, rows.two + (there ? k : 0), there);
    asm volatile("cp.async.commit_group;");
    into = into + 1 < STAGES ? into + 1 : 0;
    if (++ordered_step == steps) {
      ordered_step = 0;
      if (++ordered < items) rows = weights(ordered);
    }
  };
  auto inputs_at = [&](const u16* at, int item, int step) {
    const int k = begin + step * STEP;
    return item < items && k < inputs ? *(const uint4*)(at + k) : make_uint4(0, 0, 0, 0);
  };
#pragma unroll 1  // code that is short is soon there
  for (int s = 0; s < STAGES - 1; ++s) order();
  wait();
  float c[4] = {};
  const u16* at = line(0);
  uint4 x = inputs_at(at, 0, 0);
  int item = 0, step = 0, from = 0;
#pragma unroll 1
  while (item < items) {
    const bool last = ++step == steps;
    const int done_with = item;
    if (last) step = 0, at = line(++item);
    const uint4 x_after = inputs_at(at, item, step);
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    const uint4 a = ring[threadIdx.x + from * 2 * THREADS], d = ring[threadIdx.x + from * 2 * THREADS + THREADS];
    multiply(c, a.x, d.x, a.y, d.y, x.x, x.y);
    multiply(c, a.z, d.z, a.w, d.w, x.z, x.w);
    order();
    if (last) {
      done(done_with, added(c, lane));
      c[0] = c[1] = c[2] = c[3] = 0.f;
    }
    from = from + 1 < STAGES ? from + 1 : 0;
    x = x_after;
  }
}

#ifdef EACH
// Grid (slots, channels in blocks of WARPS * EACH): what slots that chose the same expert read lies near in time.
extern "C" __global__ void __launch_bounds__(THREADS) gate_up(
    const u16* x, const i64* ids, const u16* gate, const u16* up, const void* gate_bias, const void* up_bias,
    u16* hidden, int experts, int chosen, int channels, int inputs, i64 x_stride, i64 gate_stride, i64 gate_row,
    i64 up_stride, i64 up_row, Constants with) {
  extern __shared__ uint4 ring[];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Not before: whoever comes next may read ids at once, as the kernel that wrote them has ended.
  asm volatile("griddepcontrol.launch_dependents;");
  const int slot = blockIdx.x, lane = threadIdx.x % 32;
  const int first = (blockIdx.y * WARPS + threadIdx.x / 32) * EACH, items = min(EACH, channels - first);
  const i64 expert = expert_at(ids + slot);
  if (expert < 0 || expert >= experts || items <= 0) return;
  const u16* own_x = x + slot / chosen * x_stride;
  const u16 *gates = gate + expert * gate_stride, *ups = up + expert * up_stride;
  Sums mine = {};
  products(
      ring, items, inputs,
      [&](int item) { return Pair{gates + (first + item) * gate_row, ups + (first + item) * up_row, true}; }, [] {},
      [&](int) { return own_x; },
      [&](int item, Sums sums) {
        if (lane == item) mine = sums;
      });
  if (lane >= items) return;
  const i64 channel = expert * channels + first + lane;
  const float g = narrowed(mine.one + bias_at(gate_bias, channel)), u = narrowed(mine.two + bias_at(up_bias, channel));
  store(hidden + (i64)slot * channels + first + lane, activated(g, u, with));
}
#endif

#ifdef ROWS
// Grid (tokens, rows of out in blocks of ROWS). Its weights are asked for while gate_up still runs.
extern "C" __global__ void __launch_bounds__(THREADS) down_sum(
    const u16* hidden, const i64* ids, const float* weights, const u16* down, const void* bias, u16* out, int experts,
    int outputs, int inputs, i64 down_stride, i64 down_row) {
  extern __shared__ uint4 ring[];
  __shared__ float sums[CHOSEN][ROWS];
  __shared__ Choices choices;
  asm volatile("griddepcontrol.launch_dependents;");
  const int token = blockIdx.x, first = blockIdx.y * ROWS, warp = threadIdx.x / 32, n = threadIdx.x;
  read_ids(choices, ids + token * CHOSEN, experts);
  // A warp's items: pair by pair of rows, the pairs' choices dealt to the warps in turn.
  const int pairs = (min(ROWS, outputs - first) + 1) / 2, items = (pairs * CHOSEN - warp + WARPS - 1) / WARPS;
  products(
      ring, items, inputs,
      [&](int item) {
        const int number = warp + item * WARPS, row = first + number / CHOSEN * 2;
        const i64 expert = choices.expert[number % CHOSEN];
        if (expert < 0 || item >= items) return Pair{down, down, false};
        const u16* rows = down + expert * down_stride;
        return Pair{rows + row * down_row, rows + min(row + 1, outputs - 1) * down_row, true};
      },
      [&] { read_weights(choices, weights + token * CHOSEN); },
      [&](int item) { return hidden + ((i64)token * CHOSEN + (warp + item * WARPS) % CHOSEN) * inputs; },
      [&](int item, Sums both) {
        const int number = warp + item * WARPS, row = number / CHOSEN * 2, which = number % CHOSEN;
        if (n % 32 < 2 && choices.expert[which] >= 0) {
          const float sum = n % 32 ? both.two : both.one;
          const int channel = min(first + row + n % 32, outputs - 1);
          sums[which][row + n % 32] = narrowed(sum + bias_at(bias, choices.expert[which] * outputs + channel));
        }
      });
  __syncthreads();
  for (int row = n; row < ROWS && first + row < outputs; row += THREADS) {
    const float total = weighted(choices, [&](int which) { return sums[which][row]; });
    store(out + (i64)token * outputs + first + row, total);
  }
}
#endif
