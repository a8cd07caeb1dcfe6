// What kernels of attention of chunks of queries share: the blocks' pieces of work, two copying warps, and computing
// warpgroups. A piece of work is 64 * GROUPS queries (tokens times heads of one key head), 64 a warpgroup, and goes through
// tiles of 128 keys from the last that it sees to the first. As many blocks as there are multiprocessors take pieces, the
// longest first. Two further warps copy, one queries and keys, the other values, STAGES tiles of each in turn; they go on to
// the next piece while the last one is still computed. A warpgroup multiplies the queries with the next keys while it sums
// the values of the last tile, and takes exponents while that runs; warpgroups begin their products in turn.
//
// Defines: KEY_WIDTH and WIDTH (of values), GROUP, GROUPS (computing warpgroups), WINDOW (whether there is one), STAGES,
// UNCLEAN (whether what lies in a tile of values behind those that are seen may be anything).
//
// Who includes it declares ``Call`` with ``scale`` and ``taken``, with a window ``window``; ``find_work`` (one warp: what a
// number stands for), ``store`` (one warpgroup's sums of a piece); and ``Copies``, of keys or of values: ``tile`` and
// ``queries``, by one warp.
#pragma once
#include "paged_tiles.cuh"

constexpr int TILE = 128, QUERIES = 64 * GROUPS, COMPUTING = 128 * GROUPS, THREADS = COMPUTING + 128;
constexpr int KEY_COLUMNS = KEY_WIDTH / 64, COLUMNS = WIDTH / 64, GROUP_BYTES = TILE * 128;
constexpr int KEY_BYTES = KEY_COLUMNS * GROUP_BYTES, VALUE_BYTES = COLUMNS * GROUP_BYTES;
constexpr int QUERY_BYTES = KEY_COLUMNS * QUERIES * 128, TOKENS = QUERIES / GROUP, SUMS = WIDTH / 2;
constexpr float SLACK = 8.0f;  // of the highest logit, in base 2

// A piece of work. Places count from the first record that the row holds. No tiles: there is no more work.
struct Work {
  const int* pages;
  int token, count, place, end, head, low, tiles;  // packed number of the first token, tokens; its place; ...
};

// full, empty: of keys, of values.
struct Small {
  u64 full[2][STAGES], empty[2][STAGES], query_full, query_empty, work_full[2], work_empty[2];
  Work work[2];
};

// Where in the ring of stages the next tile is.
struct Ring {
  int stage, phase;
  __device__ __forceinline__ void step() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// o [64, WIDTH] += a [64, 16] b [16, WIDTH]; a in registers, b with the numbers of a row together.
__device__ __forceinline__ void add(float (&o)[SUMS], const u32* a, u64 b) {
#if WIDTH == 128
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" O64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : F32(o, 0), F32(o, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" O32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
      : F32(o, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

struct Sums {
  float o[SUMS], top[2], total[2];
};

__device__ __forceinline__ void begin_scores(float (&s)[64], u32 q, u32 keys) {
  const u32 a = opaque(tile_low(q, 16)), b = opaque(tile_low(keys, 16));
  product_fence();
#pragma unroll
  for (int k = 0; k < KEY_WIDTH / 16; k++)
    score(s, descriptor(a + (k / 4) * QUERIES * 8 + (k % 4) * 2), descriptor(b + (k / 4) * TILE * 8 + (k % 4) * 2), k > 0);
  product_commit();
}

__device__ __forceinline__ void begin_sums(Sums& x, const u32 (&p)[32], u32 values) {
  const u32 b = opaque(tile_low(values, GROUP_BYTES));
  product_fence();
#pragma unroll
  for (int k = 0; k < TILE / 16; k++) add(x.o, p + 4 * k, descriptor(b + k * 128));
  product_commit();
}

// Keys behind a query's own, or before its window. own: of both lines, counted from the tile's first key.
__device__ __forceinline__ void hide(float (&s)[64], const int (&own)[2], int window) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const int at = i / 4 * 8 + column + i % 2, limit = own[i / 2 % 2];
    if (at > limit || (WINDOW && at <= limit - window)) s[i] = negative_infinity();
  }
}

// Logits to weights in place. Returns what sums so far shrink by. The highest logit is let grow by SLACK (in base 2) before
// sums shrink to it: they then seldom do, and weights stay below 2^SLACK.
__device__ __forceinline__ float2 weigh(float (&s)[64], Sums& x, float scale) {
  float top[2] = {negative_infinity(), negative_infinity()}, shrink[2];
#pragma unroll
  for (int i = 0; i < 64; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
  for (int line = 0; line < 2; line++) {
    top[line] = fmaxf(top[line], __shfl_xor_sync(0xffffffffu, top[line], 1));
    top[line] = fmaxf(top[line], __shfl_xor_sync(0xffffffffu, top[line], 2)) * scale;
    const bool rises = top[line] > x.top[line] + SLACK;
    top[line] = rises ? top[line] : x.top[line];
    shrink[line] = rises ? power_of_2(x.top[line] - top[line]) : 1.0f;
    x.top[line] = top[line];
    top[line] = top[line] == negative_infinity() ? 0.0f : top[line];
    x.total[line] *= shrink[line];
  }
#pragma unroll
  for (int i = 0; i < 64; i++) {
    const float y = fmaf(s[i], scale, -top[i / 2 % 2]);
    s[i] = power_of_2(y);
    x.total[i / 2 % 2] += s[i];
  }
  return make_float2(shrink[0], shrink[1]);
}

// Warpgroups begin products in turn, so that one takes exponents while another multiplies.
__device__ __forceinline__ void await_turn(int group) {
  named_sync(1 + group, COMPUTING);
}
__device__ __forceinline__ void pass_turn(int group) {
#pragma unroll
  for (int other = 1; other < GROUPS; other++) named_arrive(1 + (group + other) % GROUPS, COMPUTING);
}

__device__ __forceinline__ void shrink_sums(Sums& x, float2 shrink) {
  if (!__any_sync(0xffffffffu, shrink.x != 1.0f || shrink.y != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < SUMS; i++) x.o[i] *= i / 2 % 2 ? shrink.y : shrink.x;
}

// What lies behind the end of a row becomes zeros. Each warpgroup clears all of it, for itself.
__device__ __forceinline__ void clear_values(u32 tile, int seen, int group) {
  clear_rows<TILE, WIDTH>(tile, seen, threadIdx.x % 128, 128);
  named_sync(8 + group, 128);
}

// Sums of one piece of work.
template <class Call>
__device__ __forceinline__ void compute(const Call& c, const Work& w, Small& s, Sums& x, u32 q, u32 keys, u32 values, Ring& k,
                                        Ring& v, int group) {
  const int lane = threadIdx.x % 32, line = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale = c.scale * LOG2_E;
#if WINDOW
  const int window = c.window;
#else
  const int window = 0;
#endif
  const int place[2] = {w.place + min(line / GROUP, w.count - 1), w.place + min((line + 8) / GROUP, w.count - 1)};
  const int lowest = w.place + group * 64 / GROUP, highest = w.place + min((group * 64 + 63) / GROUP, w.count - 1);
  q += group * 64 * 128;
  float p[64];
  u32 a[32];
#pragma unroll
  for (int i = 0; i < SUMS; i++) x.o[i] = 0.0f;
  x.top[0] = x.top[1] = negative_infinity(), x.total[0] = x.total[1] = 0.0f;
  int begin = (w.low + w.tiles - 1) * TILE;
  const int seen = w.end - begin;  // of the last tile
  for (int j = 0; j < w.tiles; j++, begin -= TILE) {
    barrier_wait(&s.full[0][k.stage], k.phase);
    if (j > 0) {
      barrier_wait(&s.full[1][v.stage], v.phase);
      if (UNCLEAN && j == 1 && seen < TILE) clear_values(values + v.stage * VALUE_BYTES, seen, group);
      await_turn(group);
    }
    begin_scores(p, q, keys + k.stage * KEY_BYTES);
    if (j > 0) {
      hold(x.o);
      begin_sums(x, a, values + v.stage * VALUE_BYTES);
      pass_turn(group);
      product_wait<1>();
    } else {
      product_wait<0>();
    }
    hold(p);
    if (lane == 0) {
      barrier_arrive(&s.empty[0][k.stage]);
      if (j == w.tiles - 1) barrier_arrive(&s.query_empty);
    }
    k.step();
    const bool masked = begin + TILE - 1 > lowest || (WINDOW && begin <= highest - window);
    if (masked) {
      const int own[2] = {place[0] - begin, place[1] - begin};
      hide(p, own, window);
    }
    const float2 shrink = weigh(p, x, scale);
    if (j > 0) {
      product_wait<0>();
      hold(x.o);
      if (lane == 0) barrier_arrive(&s.empty[1][v.stage]);
      v.step();
      shrink_sums(x, shrink);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) a[i] = bf16_pair(p[2 * i], p[2 * i + 1]);
  }
  barrier_wait(&s.full[1][v.stage], v.phase);
  if (UNCLEAN && w.tiles == 1 && seen < TILE) clear_values(values + v.stage * VALUE_BYTES, seen, group);
  hold(x.o);
  begin_sums(x, a, values + v.stage * VALUE_BYTES);
  product_wait<0>();
  hold(x.o);
  if (lane == 0) barrier_arrive(&s.empty[1][v.stage]);
  v.step();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 1);
    x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 2);
  }
}

// A copying warp. part 0: takes work, copies queries and keys; 1: copies values.
template <class Call, class Copies>
__device__ __forceinline__ void copy_all(const Call& c, const Copies& copies, Small& s, u32 q, u32 tiles, int part) {
  const int lane = threadIdx.x % 32, bytes = part ? VALUE_BYTES : KEY_BYTES;
  Ring ring = {0, 0};
  int number = blockIdx.x;
  for (int n = 0;; n++) {
    const Work& w = s.work[n & 1];
    if (part == 0) {
      barrier_wait(&s.work_empty[n & 1], ((n >> 1) & 1) ^ 1);
      find_work(c, number, s.work[n & 1]);
      if (lane == 0) {
        barrier_arrive(&s.work_full[n & 1]);
        if (w.tiles > 0) number = gridDim.x + atomicAdd(c.taken, 1);
      }
      number = __shfl_sync(0xffffffffu, number, 0);
    }
    barrier_wait(&s.work_full[n & 1], (n >> 1) & 1);
    const int num_tiles = w.tiles;
    if (num_tiles == 0) return;
    for (int j = 0; j < num_tiles; j++) {
      barrier_wait(&s.empty[part][ring.stage], ring.phase ^ 1);
      const int tile = w.low + num_tiles - 1 - j;
      copies.tile(w, tiles + ring.stage * bytes, tile, &s.full[part][ring.stage]);
      ring.step();
      if (j == 0 && part == 0) {
        barrier_wait(&s.query_empty, (n & 1) ^ 1);
        copies.queries(w, q, &s.query_full);
      }
    }
    __syncwarp();
    if (part == 1 && lane == 0) barrier_arrive(&s.work_empty[n & 1]);
  }
}

// One of the computing warpgroups.
template <class Call>
__device__ __forceinline__ void compute_all(const Call& c, Small& s, u32 q, u32 keys, u32 values) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  Ring k = {0, 0}, v = {0, 0};
#pragma unroll
  for (int other = 0; other < GROUPS; other++)
    if (group > other) named_arrive(1 + other, COMPUTING);
  for (int n = 0;; n++) {
    barrier_wait(&s.work_full[n & 1], (n >> 1) & 1);
    const Work w = s.work[n & 1];
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.work_empty[n & 1]);
    if (w.tiles == 0) return;
    Sums x;
    barrier_wait(&s.query_full, n & 1);
    compute(c, w, s, x, q, keys, values, k, v, group);
    store(c, w, x);
  }
}

// A block.
template <class Copies, class Call, class Maps> __device__ __forceinline__ void run(const Call& c, const Maps& maps) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u, q = base, keys = q + QUERY_BYTES,
            values = keys + STAGES * KEY_BYTES;
  Small& s = *reinterpret_cast<Small*>(memory + (values + STAGES * VALUE_BYTES - shared_address(memory)));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++) barrier_init(&s.full[0][0] + i, 1), barrier_init(&s.empty[0][0] + i, 4 * GROUPS);
    for (int i = 0; i < 2; i++) barrier_init(&s.work_full[i], 1), barrier_init(&s.work_empty[i], 4 * GROUPS + 1);
    barrier_init(&s.query_full, 1), barrier_init(&s.query_empty, 4 * GROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= COMPUTING) {
#if GROUPS == 2  // what a block has at its start: 168 * 384 and 128 * 512 registers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
    const int part = __shfl_sync(0xffffffffu, (threadIdx.x - COMPUTING) / 32, 0);
    if (part < 2) copy_all(c, Copies(c, maps, part), s, q, part ? values : keys, part);
  } else {
#if GROUPS == 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#endif
    compute_all(c, s, q, keys, values);
  }
}
