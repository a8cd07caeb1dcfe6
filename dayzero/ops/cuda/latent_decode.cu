// Attention of queries [T, H, 576] over all latent rows of their sequences up to their own: all heads read one row, whose
// first 512 numbers are its value. Records are bf16, or (FP8) 656 bytes: 512 e4m3 codes, 4 float32 scales, powers of two, of
// 128 columns each, and 64 bf16 numbers of the shared key.
//
// A block holds 64 heads of one query and goes through a part (split) of its rows 64 (a tile) at a time. Warpgroup 2 brings
// tiles from the pages into shared memory (two of them, each in three pieces that are freed on their own): one thread has
// bf16 records copied, all of them widen codes, which they load a tile ahead, to bf16. Warpgroups 0
// and 1 compute: each makes the scores and weights of every other tile, and sums half of the columns (256) of all tiles,
// so that one multiplies while the other takes exponents. Running maxima go from tile to tile; weights reach the other
// warpgroup through the tile's shared-key columns, which nobody needs by then.
//
// Defines: FP8; WIDE (queries and results are float32, else bf16).
#include "latent_widen.cuh"
#include "paged_tiles.cuh"

constexpr int TILE = 64, HEADS = 64, WIDTH = 576, VALUE = 512;
constexpr int GROUP_BYTES = TILE * 128, TILE_BYTES = WIDTH / 64 * GROUP_BYTES, HALF_BYTES = 4 * GROUP_BYTES;
constexpr int COMPUTING = 256, THREADS = COMPUTING + 128;
constexpr int RECORD_BYTES = 656, SCALES_AT = 512, PLAIN_AT = 528;
constexpr int TAIL = 2;  // pieces of a tile: columns 0-255, 256-511, and the shared key

struct Small {
  u64 full[2][3], empty[2][3];
  float top[2][HEADS], total[2][HEADS];
};

struct Call {
  const void* q;
  const unsigned char* codes;
  const int *table, *first, *query_start, *start;
  const float* sinks;
  void* out;
  float *lse, *parts, *part_lses;
  long long q_token, q_head, block_bytes;
  int num_rows, heads, table_stride, page_shift, splits, least_tiles;
  float scale;
};

#if WIDE
typedef float Out;
#else
typedef unsigned short Out;
#endif

// What a block works on: tiles [begin, begin + num) of a row whose ``end`` first records the query sees.
struct Work {
  const int* pages;
  int token, head, split, begin, num, end;
};

__device__ __forceinline__ Work work_of(const Call& c) {
  Work w;
  const int blocks = (c.heads + HEADS - 1) / HEADS;
  w.head = blockIdx.x % blocks * HEADS;
  w.split = blockIdx.x / blocks % c.splits;
  w.token = blockIdx.x / blocks / c.splits;
  int row = 0;
  for (int i = 0; i < c.num_rows; i += THREADS) {
    int at = i + threadIdx.x;
    row += __syncthreads_count(at < c.num_rows && c.query_start[at + 1] <= w.token);
  }
  w.num = w.end = w.begin = 0;
  w.pages = c.table;
  if (row < c.num_rows) {
    w.pages += (long long)row * c.table_stride;
    w.end = c.start[row] + w.token - c.query_start[row] + 1 - c.first[row];
    const int tiles = (w.end + TILE - 1) / TILE, each = max(c.least_tiles, (tiles + c.splits - 1) / c.splits);
    w.begin = w.split * each;
    w.num = max(0, min(each, tiles - w.begin));
  }
  return w;
}

#if FP8
// A warpgroup. Four neighbours share two rows of a tile; what they load of a tile is held from the tile before on, in four
// units: left halves of both rows, then right ones. Rows behind the end become zeros.
__device__ __forceinline__ void widen_tiles(const Call& c, Small& s, const Work& w, u32 tiles) {
  const int row = threadIdx.x % 128 / 4, lane = threadIdx.x % 4, mask = (1 << c.page_shift) - 1;
  const unsigned char* from[2];
  uint4 held[4][4];
  float2 scale[4];
  int block[2];
  auto look = [&](int j) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int place = (w.begin + j) * TILE + row + 32 * k;
      block[k] = j < w.num && place < w.end ? __ldg(w.pages + (place >> c.page_shift)) : -1;
    }
  };
  auto point = [&](int j) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int inside = ((w.begin + j) * TILE + row + 32 * k) & mask;
      from[k] = block[k] < 0 ? nullptr : c.codes + block[k] * c.block_bytes + inside * RECORD_BYTES;
    }
  };
  auto load = [&](int unit) {
    const unsigned char* at = from[unit % 2];
#pragma unroll
    for (int i = 0; i < 4; i++)
      held[unit][i] = load_now(at ? at + (unit / 2 * 4 + i) * 64 + lane * 16 : at);
    scale[unit] = at ? __ldg(reinterpret_cast<const float2*>(at + SCALES_AT + unit / 2 * 8)) : make_float2(0.0f, 0.0f);
  };
  look(0), point(0), look(1);
#pragma unroll
  for (int unit = 0; unit < 4; unit++) load(unit);
  for (int j = 0; j < w.num; j++) {
    const u32 tile = tiles + (j & 1) * TILE_BYTES;
    const int parity = ((j >> 1) & 1) ^ 1;
    barrier_wait(&s.empty[j & 1][TAIL], parity);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned char* at = from[i / 2];
      const int piece = lane * 2 + i % 2;
      copy_16(tile + piece_at<TILE>(row + i / 2 * 32, 64 + piece), at ? at + PLAIN_AT + piece * 16 : c.codes, at);
    }
    barrier_arrive_behind_copies(&s.full[j & 1][TAIL]);
#pragma unroll
    for (int unit = 0; unit < 4; unit++) {
      const int half = unit / 2;
      if (unit % 2 == 0) barrier_wait(&s.empty[j & 1][half], parity);
      widen_unit(tile, row + unit % 2 * 32, half * 32 + lane * 2, held[unit], scale[unit]);
      if (unit % 2 == 1) shared_fence(), barrier_arrive(&s.full[j & 1][half]);
    }
    point(j + 1), look(j + 2);  // behind the fences, which would wait for what is loaded
#pragma unroll
    for (int unit = 0; unit < 4; unit++) load(unit);
  }
}
#else
// One thread. Pages of 16 and 32 make several boxes of a tile.
__device__ __forceinline__ void copy_tiles(const Call& c, const TensorMap& map, Small& s, const Work& w, u32 tiles) {
  const int page = 1 << c.page_shift, rows = min(page, TILE);
  int next[4];
  auto look = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int place = tile * TILE + i * rows;
      if (i * rows < TILE && place < w.end) next[i] = __ldg(w.pages + (place >> c.page_shift));
    }
  };
  look(w.begin);
  for (int j = 0; j < w.num; j++) {
    const u32 tile = tiles + (j & 1) * TILE_BYTES;
    const int place = (w.begin + j) * TILE, left = w.end - place;
    const int boxes = (min(left, TILE) + rows - 1) / rows;
    int block[4] = {next[0], next[1], next[2], next[3]};
    if (j + 1 < w.num) look(w.begin + j + 1);
#pragma unroll
    for (int piece = 0; piece < 3; piece++) {
      const int from = piece * 4, groups = piece == TAIL ? 1 : 4;
      u64* full = &s.full[j & 1][piece];
      barrier_wait(&s.empty[j & 1][piece], ((j >> 1) & 1) ^ 1);
      expect(full, boxes * rows * 128 * groups);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (i < boxes)
          for (int g = from; g < from + groups; g++)
            copy_box(map, tile + g * GROUP_BYTES + i * rows * 128, g * 64, 0, (place + i * rows) & (page - 1), block[i], full);
    }
  }
}
#endif

// Queries of this block's heads into shared memory, zeros where there is no such head.
__device__ __forceinline__ void load_queries(const Call& c, const Work& w, u32 to) {
#pragma unroll
  for (int i = 0; i < HEADS * WIDTH / 8 / COMPUTING; i++) {
    const int at = i * COMPUTING + threadIdx.x;
    int row = at / (WIDTH / 8), piece = at % (WIDTH / 8);
    long long from = (long long)w.token * c.q_token + (long long)(w.head + row) * c.q_head + piece * 8;
    u32 out[4] = {0, 0, 0, 0};
    if (w.head + row < c.heads) {
#if WIDE
      const float4* q = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(c.q) + from);
      float4 a = __ldg(q), b = __ldg(q + 1);
      out[0] = bf16_pair(a.x, a.y), out[1] = bf16_pair(a.z, a.w);
      out[2] = bf16_pair(b.x, b.y), out[3] = bf16_pair(b.z, b.w);
#else
      uint4 a = __ldg(reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned short*>(c.q) + from));
      out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
#endif
    }
    store_16(to + piece_at<HEADS>(row, piece), out[0], out[1], out[2], out[3]);
  }
  shared_fence();
  named_sync<3>(COMPUTING);
}

// What a thread of a computing warpgroup holds: 128 of the sums; maximum and total of two heads, ``line`` and + 8.
struct Sums {
  float o[128], top[2], total[2];
};

__device__ __forceinline__ void shrink(Sums& x, float top0, float top1) {
  float by0 = x.top[0] == top0 ? 1.0f : power_of_2(x.top[0] - top0);
  float by1 = x.top[1] == top1 ? 1.0f : power_of_2(x.top[1] - top1);
  x.top[0] = top0, x.top[1] = top1;
  x.total[0] *= by0, x.total[1] *= by1;
  if (__any_sync(0xffffffffu, by0 != 1.0f || by1 != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 128; i += 4) x.o[i] *= by0, x.o[i + 1] *= by0, x.o[i + 2] *= by1, x.o[i + 3] *= by1;
  }
}

// Begin the sums of the other warpgroup's tile, once its weights are there.
__device__ __forceinline__ void add_other(Small& s, Sums& x, u32 other, int group, int line) {
  named_sync(1 + (group ^ 1), COMPUTING);
  shrink(x, s.top[group ^ 1][line], s.top[group ^ 1][line + 8]);
  hold(x.o);
  const u32 weights = opaque(tile_low(other + 8 * GROUP_BYTES, 16));
  const u32 columns = opaque(tile_low(other + group * HALF_BYTES, GROUP_BYTES));
  product_fence();
#pragma unroll
  for (int k = 0; k < TILE / 16; k++)
    product_64x256(x.o, descriptor(weights + k * 2), descriptor(columns + k * 128));
  product_commit();
}

// The end of the sums that ``add_other`` began: what they read may be overwritten.
__device__ __forceinline__ void end_other(Small& s, Sums& x, int group) {
  product_wait<0>();
  hold(x.o);
  arrive_of_warp(&s.empty[group ^ 1][group]);
  arrive_of_warp(&s.empty[group ^ 1][TAIL]);
}

// Logits to weights in place, and the weights as bf16 into shared memory and registers. Returns the totals.
__device__ __forceinline__ float2 weigh(float (&p)[32], u32 (&a)[16], float scale, float2& top, int seen, u32 weights, int line) {
  const int lane = threadIdx.x % 32;
  float top0 = negative_infinity(), top1 = top0;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    if (seen < TILE) {
      int at = i * 2 + (lane % 4) * 2;
      if (at >= seen) p[i] = p[i + 2] = negative_infinity();
      if (at + 1 >= seen) p[i + 1] = p[i + 3] = negative_infinity();
    }
    top0 = fmaxf(top0, fmaxf(p[i], p[i + 1])), top1 = fmaxf(top1, fmaxf(p[i + 2], p[i + 3]));
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, lanes));
    top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, lanes));
  }
  top.x = fmaxf(top.x, top0 * scale), top.y = fmaxf(top.y, top1 * scale);
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    p[i] = power_of_2(fmaf(p[i], scale, -top.x)), p[i + 1] = power_of_2(fmaf(p[i + 1], scale, -top.x));
    p[i + 2] = power_of_2(fmaf(p[i + 2], scale, -top.y)), p[i + 3] = power_of_2(fmaf(p[i + 3], scale, -top.y));
    sum.x += p[i] + p[i + 1], sum.y += p[i + 2] + p[i + 3];
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    a[i] = bf16_pair(p[2 * i], p[2 * i + 1]);
    u32 to = weights + piece_at<TILE>(line + 8 * (i % 2), i / 2) + (lane % 4) * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(a[i]) : "memory");
  }
  return sum;
}

// Scores, weights and sums of a tile of this warpgroup's own, between them the sums of the tile BEFORE it, if any.
template <bool BEFORE>
__device__ __forceinline__ void own_tile(Small& s, Sums& x, u32 q, u32 tiles, int group, int parity, int seen, float scale) {
  const int lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const u32 tile = tiles + group * TILE_BYTES, other = tiles + (group ^ 1) * TILE_BYTES;
  const u32 queries = opaque(tile_low(q, 16)), keys = opaque(tile_low(tile, 16));
  float p[32];
  if (!FP8 && seen < TILE) {
#pragma unroll
    for (int piece = 0; piece < 3; piece++) barrier_wait(&s.full[group][piece], parity);
    clear_rows<TILE, WIDTH>(tile, seen, threadIdx.x % 128, 128);
    named_sync(4 + group, 128);
  }
  product_fence();
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++) {
    if (k % 16 == 0) {
      barrier_wait(&s.full[group][k / 16], parity);
      if (FP8 && k == 32) shared_fence();  // behind the copies
      product_fence();
    }
    const u32 skip = ((k / 4) * GROUP_BYTES + (k % 4) * 32) / 16;
    product_64x64(p, descriptor(queries + skip), descriptor(keys + skip), k > 0);
  }
  product_commit();
  product_wait<0>();
  product_ended(4 + group);
  hold(p);
  if (BEFORE) add_other(s, x, other, group, line);
  float2 top = make_float2(x.top[0], x.top[1]);
  u32 a[16];
  float2 sum = weigh(p, a, scale, top, seen, tile + 8 * GROUP_BYTES, line);
  if (lane % 4 == 0) s.top[group][line] = top.x, s.top[group][line + 8] = top.y;
  shared_fence();
  named_tell(1 + group, COMPUTING);
  if (BEFORE) end_other(s, x, group);
  shrink(x, top.x, top.y);
  x.total[0] += sum.x, x.total[1] += sum.y;
  hold(x.o);
  const u32 columns = opaque(tile_low(tile + group * HALF_BYTES, GROUP_BYTES));
  product_fence();
#pragma unroll
  for (int k = 0; k < TILE / 16; k++)
    product_64x256(x.o, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3],
                   descriptor(columns + k * 128));
  product_commit();
  product_wait<0>();
  hold(x.o);
  arrive_of_warp(&s.empty[group][group]);
}

__device__ __forceinline__ void compute(const Call& c, const Work& w, Small& s, Sums& x, u32 q, u32 tiles) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // the same in a warp: the compiler has to see it
  const int lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale = c.scale * LOG2_E;
#pragma unroll
  for (int i = 0; i < 128; i++) x.o[i] = 0.0f;
  x.top[0] = x.top[1] = negative_infinity(), x.total[0] = x.total[1] = 0.0f;
  const u32 other = tiles + (group ^ 1) * TILE_BYTES;
  int seen = w.end - (w.begin + group) * TILE;
  if (group == 0) {
    for (int j = 0; j < w.num; j += 2, seen -= 2 * TILE) {
      own_tile<false>(s, x, q, tiles, group, (j >> 1) & 1, seen, scale);
      if (j + 1 < w.num) {  // while the next of its own is on the way
        add_other(s, x, other, group, line);
        end_other(s, x, group);
      }
    }
  } else {
    for (int j = 1; j < w.num; j += 2, seen -= 2 * TILE) own_tile<true>(s, x, q, tiles, group, (j >> 1) & 1, seen, scale);
    if (w.num % 2 == 1) {
      add_other(s, x, other, group, line);
      end_other(s, x, group);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 1);
    x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 2);
    if (lane % 4 == 0) s.total[group][line + 8 * i] = x.total[i];
  }
  named_sync<3>(COMPUTING);
}

// What a head's sums are multiplied by, and its log-sum-exp. total: of weights relative to ``top`` (base 2).
__device__ __forceinline__ float finish(const Call& c, int head, float top, float total, float& lse) {
  float sink = c.sinks ? c.sinks[head] * LOG2_E : negative_infinity(), all = fmaxf(top, sink);
  float by = power_of_2(top - all);
  total = total * by + power_of_2(sink - all);
  lse = (all + log2f(total)) * LN_2;
  return by / total;
}

__device__ __forceinline__ void store(const Call& c, const Work& w, const Small& s, const Sums& x) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int head = w.head + line + 8 * i;
    if (head >= c.heads) continue;
    const float total = s.total[0][line + 8 * i] + s.total[1][line + 8 * i];
    const long long at = (long long)w.token * c.heads + head;
    if (c.splits > 1) {
      const long long part = at * c.splits + w.split;
      float* to = c.parts + part * VALUE + group * 256 + lane % 4 * 2;
      const float by = 1.0f / total;
#pragma unroll
      for (int k = 0; k < 32; k++)
        *reinterpret_cast<float2*>(to + k * 8) = make_float2(x.o[4 * k + 2 * i] * by, x.o[4 * k + 2 * i + 1] * by);
      if (group == 0 && lane % 4 == 0) c.part_lses[part] = x.top[i] + log2f(total);
    } else {
      float lse, by = finish(c, head, x.top[i], total, lse);
      if (group == 0 && lane % 4 == 0) c.lse[at] = lse;
      Out* to = reinterpret_cast<Out*>(c.out) + at * VALUE + group * 256 + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < 32; k++) {
        float a = x.o[4 * k + 2 * i] * by, b = x.o[4 * k + 2 * i + 1] * by;
#if WIDE
        *reinterpret_cast<float2*>(to + k * 8) = make_float2(a, b);
#else
        *reinterpret_cast<u32*>(to + k * 8) = bf16_pair(a, b);
#endif
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_decode(const __grid_constant__ TensorMap map, const __grid_constant__ Call c) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u, q = base, tiles = base + TILE_BYTES;
  Small& s = *reinterpret_cast<Small*>(memory + (base - shared_address(memory)) + 3 * TILE_BYTES);
  asm volatile("griddepcontrol.launch_dependents;");  // the merge may be brought up, it waits for all of this grid
  const Work w = work_of(c);
  if (w.num <= 0) {  // behind the end of this row
    if (c.splits > 1)
      for (int i = threadIdx.x; i < HEADS && w.head + i < c.heads; i += THREADS)
        c.part_lses[((long long)w.token * c.heads + w.head + i) * c.splits + w.split] = negative_infinity();
    return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < 6; i++) barrier_init(&s.full[i / 3][i % 3], FP8 ? 128 : 1), barrier_init(&s.empty[i / 3][i % 3], 4 * OF_A_WARP);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= COMPUTING) {
#if FP8  // together 168 * 384 registers, what the block has at its start
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    widen_tiles(c, s, w, tiles);
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == COMPUTING) copy_tiles(c, map, s, w, tiles);
#endif
  } else {
#if FP8
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    Sums x;
    load_queries(c, w, q);
    compute(c, w, s, x, q, tiles);
    store(c, w, s, x);
  }
}

// One head of one query: parts by their log-sum-exp, in order. 128 threads; as many parts at most.
extern "C" __global__ void __launch_bounds__(128) latent_merge(const __grid_constant__ Call c) {
  __shared__ float lses[128], tops[4];
  const long long at = blockIdx.x;
  const int head = blockIdx.x % c.heads, thread = threadIdx.x;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const float own = thread < c.splits ? __ldg(c.part_lses + at * c.splits + thread) : negative_infinity();
  lses[thread] = own;
  float top = own, total = 0.0f;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
  if (thread % 32 == 0) tops[thread / 32] = top;
  __syncthreads();
  top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  const float4* parts = reinterpret_cast<const float4*>(c.parts + at * c.splits * VALUE) + thread;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
  for (int i = 0; i < c.splits; i++) {
    const bool written = lses[i] != negative_infinity();
    const float by = written ? power_of_2(lses[i] - top) : 0.0f;
    const float4 one = written ? __ldg(parts + i * (VALUE / 4)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    total += by;
    sum.x += by * one.x, sum.y += by * one.y, sum.z += by * one.z, sum.w += by * one.w;
  }
  float lse, by = finish(c, head, top, total, lse);
  if (thread == 0) c.lse[at] = lse;
#if WIDE
  reinterpret_cast<float4*>(reinterpret_cast<float*>(c.out) + at * VALUE)[thread] =
      make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
#else
  reinterpret_cast<uint2*>(reinterpret_cast<Out*>(c.out) + at * VALUE)[thread] =
      make_uint2(bf16_pair(sum.x * by, sum.y * by), bf16_pair(sum.z * by, sum.w * by));
#endif
}
