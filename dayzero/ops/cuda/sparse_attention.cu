// Attention of queries [T, H, 576] over listed latent rows: all heads read one row, whose first 512 numbers are its
// value.
//
// A block of 3 warpgroups holds 64 heads of one query and goes through its part of a list 64 rows (a tile) at a time.
// Warpgroup 2 gathers (sparse_gather.cuh). Warpgroups 0 and 1 compute: each makes the scores and weights of every other
// tile, and sums its half of the columns (256) of all tiles, as one warpgroup's registers do not hold 512. Maxima go
// from tile to tile; weights reach the other warpgroup through the columns of the shared key, which nobody needs by
// then.
//
// A list is SEGMENTS pieces; each is summed by itself, and results are joined two by two. PARTS blocks of a cluster
// share the segments out. A block that has several puts results aside in scratch memory; blocks of a cluster read each
// other's shared memory. What is added to what is the same, to the bit, whatever PARTS is.
//
// Defines: FP8 (records of 656 bytes, else bf16), SEGMENTS, PARTS (which divide them), WIDE (queries and results are
// float32, else bf16), AHEAD (records are brought into the L2 cache two tiles early).
#include "sparse_gather.cuh"

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

// Sums of the other warpgroup's last tile, once its weights are there; the tile's memory is free then.
template <int GROUP> __device__ __forceinline__ void add_other(Small& s, Sums& x, u32 tiles, int line) {
  constexpr int OTHER = GROUP ^ 1;
  const u32 other = tiles + OTHER * TILE_BYTES, weights = tile_low(other + 8 * GROUP_BYTES, 16);
  const u32 values = tile_low(other + GROUP * HALF_BYTES, GROUP_BYTES);
  named_sync(1 + OTHER, COMPUTING);
  shrink(x, s.top[OTHER][line], s.top[OTHER][line + 8]);
  hold(x.o);
  product_fence();
#pragma unroll
  for (int k = 0; k < TILE / 16; k++)
    product_64x256(x.o, descriptor(weights + k * 2), descriptor(values + k * 128));
  product_commit();
  product_wait<0>();
  hold(x.o);
  arrive_of_warp(&s.empty[OTHER]);
}

// One of this warpgroup's tiles, in which ``seen`` rows are no pads.
template <int GROUP>
__device__ __forceinline__ void own_tile(Small& s, Sums& x, u32 q, u32 tiles, int phase, int seen, float scale) {
  const int lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const u32 tile = tiles + GROUP * TILE_BYTES, weights = tile + 8 * GROUP_BYTES;
  const u32 queries = tile_low(q, 16), keys = tile_low(tile, 16);
  const u32 values = tile_low(tile + GROUP * HALF_BYTES, GROUP_BYTES);
  float p[32];
  barrier_wait(&s.full[GROUP], phase);
  shared_fence();
  product_fence();
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++) {
    u32 skip = ((k / 4) * GROUP_BYTES + (k % 4) * 32) >> 4;
    product_64x64(p, descriptor(queries + skip), descriptor(keys + skip), k > 0);
  }
  product_commit();
  product_wait<0>();
  product_ended(4 + GROUP);
  hold(p);
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
  for (int other_lane = 1; other_lane < 4; other_lane *= 2) {
    top0 = fmaxf(top0, __shfl_xor_sync(0xffffffffu, top0, other_lane));
    top1 = fmaxf(top1, __shfl_xor_sync(0xffffffffu, top1, other_lane));
  }
  top0 = fmaxf(x.top[0], top0 * scale), top1 = fmaxf(x.top[1], top1 * scale);
  float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    p[i] = power_of_2(fmaf(p[i], scale, -top0)), p[i + 1] = power_of_2(fmaf(p[i + 1], scale, -top0));
    p[i + 2] = power_of_2(fmaf(p[i + 2], scale, -top1)), p[i + 3] = power_of_2(fmaf(p[i + 3], scale, -top1));
    sum0 += p[i] + p[i + 1], sum1 += p[i + 2] + p[i + 3];
  }
  u32 a[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    a[i] = bf16_pair(p[2 * i], p[2 * i + 1]);
    u32 to = weights + piece_at<TILE>(line + 8 * (i % 2), i / 2) + (lane % 4) * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(a[i]) : "memory");
  }
  if (lane % 4 == 0) s.top[GROUP][line] = top0, s.top[GROUP][line + 8] = top1;
  shared_fence();
  named_tell(1 + GROUP, COMPUTING);
  shrink(x, top0, top1);
  x.total[0] += sum0, x.total[1] += sum1;
  hold(x.o);
  product_fence();
#pragma unroll
  for (int k = 0; k < TILE / 16; k++)
    product_64x256(x.o, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], descriptor(values + k * 128));
  product_commit();
  product_wait<0>();
  hold(x.o);
  arrive_of_warp(&s.empty[GROUP]);
}

// Two results over different rows become one: what each is multiplied by, and the new maximum and total.
struct Shares {
  float one, other;
};
__device__ __forceinline__ Shares joined(float& top, float& total, float other_top, float other_total) {
  float all = fmaxf(top, other_top);
  Shares by = {top == negative_infinity() ? 0.0f : power_of_2(top - all),
               other_top == negative_infinity() ? 0.0f : power_of_2(other_top - all)};
  top = all, total = __fmaf_rn(other_total, by.other, __fmul_rn(total, by.one));
  return by;
}
__device__ __forceinline__ float mixed(float one, float other, Shares by) {
  return __fmaf_rn(other, by.other, __fmul_rn(one, by.one));
}

// This thread's place in the scratch memory of its multiprocessor, which runs one block at a time.
__device__ __forceinline__ float4* kept(const Call& c, int level) {
  u32 processor;
  asm("mov.u32 %0, %%smid;" : "=r"(processor));
  return reinterpret_cast<float4*>(c.scratch) + (processor * 2 + level) * (33 * COMPUTING) + threadIdx.x;
}
__device__ __forceinline__ void keep(const Call& c, const Sums& x, int level) {
  float4* to = kept(c, level);
#pragma unroll
  for (int i = 0; i < 32; i++)
    __stcg(to + i * COMPUTING, make_float4(x.o[4 * i], x.o[4 * i + 1], x.o[4 * i + 2], x.o[4 * i + 3]));
  __stcg(to + 32 * COMPUTING, make_float4(x.top[0], x.top[1], x.total[0], x.total[1]));
}
// x becomes what was kept (of earlier rows) and x together.
__device__ __forceinline__ void join_kept(const Call& c, Sums& x, int level) {
  const float4* from = kept(c, level);
  float4 old = __ldcg(from + 32 * COMPUTING);
  float tops[2] = {old.x, old.y}, totals[2] = {old.z, old.w};
  Shares by[2] = {joined(tops[0], totals[0], x.top[0], x.total[0]), joined(tops[1], totals[1], x.top[1], x.total[1])};
#pragma unroll
  for (int i = 0; i < 2; i++) x.top[i] = tops[i], x.total[i] = totals[i];
#pragma unroll
  for (int i = 0; i < 32; i++) {
    float4 four = __ldcg(from + i * COMPUTING);
    x.o[4 * i] = mixed(four.x, x.o[4 * i], by[0]), x.o[4 * i + 1] = mixed(four.y, x.o[4 * i + 1], by[0]);
    x.o[4 * i + 2] = mixed(four.z, x.o[4 * i + 2], by[1]), x.o[4 * i + 3] = mixed(four.w, x.o[4 * i + 3], by[1]);
  }
}

// This block's tiles, from ``begin`` on in the list: segments of ``each`` tiles, each by itself, joined two by two.
template <int GROUP>
__device__ __forceinline__ void compute(const Call& c, Small& s, Sums& x, u32 q, u32 tiles, int begin, int num,
                                        int each) {
  const int lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale = c.scale * LOG2_E;
#pragma unroll 1
  for (int segment = 0; segment < SEGMENTS / PARTS; segment++) {
    const int from = min(segment * each, num), end = min(from + each, num);
#pragma unroll
    for (int i = 0; i < 128; i++) x.o[i] = 0.0f;
    x.top[0] = x.top[1] = negative_infinity(), x.total[0] = x.total[1] = 0.0f;
    for (int j = from + ((from ^ GROUP) & 1); j < end; j += 2) {
      if (j > from) add_other<GROUP>(s, x, tiles, line);
      own_tile<GROUP>(s, x, q, tiles, (j >> 1) & 1, s.count - (begin + j) * TILE, scale);
    }
    if (end > from && ((end - 1) & 1) != GROUP) add_other<GROUP>(s, x, tiles, line);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 1);
      x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 2);
      if (lane % 4 == 0) s.total[segment % 2][GROUP][line + 8 * i] = x.total[i];
    }
    named_sync<3>(COMPUTING);
#pragma unroll
    for (int i = 0; i < 2; i++)
      x.total[i] = s.total[segment % 2][0][line + 8 * i] + s.total[segment % 2][1][line + 8 * i];
    if (SEGMENTS > PARTS) {
      int level = 0;
#pragma unroll 1
      for (; segment >> level & 1; level++) join_kept(c, x, level);
      if (segment + 1 < SEGMENTS / PARTS) keep(c, x, level);
    }
  }
#if PARTS > 1
  if (GROUP == 0 && lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; i++) s.part_top[line + 8 * i] = x.top[i], s.part_total[line + 8 * i] = x.total[i];
  }
#endif
}

// out and lse of one head's numbers: they are multiplied by what this returns. total: of weights relative to ``top``.
__device__ __forceinline__ float finish(const Call& c, int head, float top, float total, float& lse) {
  float sink = c.sinks ? c.sinks[head] * LOG2_E : negative_infinity();
  float all = fmaxf(top, sink), by = top == negative_infinity() ? 0.0f : power_of_2(top - all);
  total = total * by + (sink == negative_infinity() ? 0.0f : power_of_2(sink - all));
  lse = total == 0.0f ? negative_infinity() : (all + log2f(total)) * LN_2;
  return total == 0.0f ? 0.0f : by / total;
}

#if PARTS == 1
// This block has all: results go through shared memory, so that they are written in whole lines.
__device__ __forceinline__ void store(const Call& c, const Sums& x, u32 tiles, long long at, int head) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane / 4;
  float by[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int own = head + line + 8 * i;
    float lse;
    by[i] = own < c.heads ? finish(c, own, x.top[i], x.total[i], lse) : 0.0f;
    if (own < c.heads && lane % 4 == 0 && group == 0) c.lse[at * c.heads + own] = lse;
  }
#if WIDE
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    int own = head + line + 8 * (i / 2 % 2), column = group * 256 + i / 4 * 8 + lane % 4 * 2;
    if (own < c.heads) {
      float* to = reinterpret_cast<float*>(c.out) + (at * c.heads + own) * VALUE + column;
      *reinterpret_cast<float2*>(to) = make_float2(x.o[i] * by[i / 2 % 2], x.o[i + 1] * by[i / 2 % 2]);
    }
  }
#else
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    u32 to = tiles + piece_at<HEADS>(line + 8 * (i / 2 % 2), group * 32 + i / 4) + lane % 4 * 4;
    u32 two = bf16_pair(x.o[i] * by[i / 2 % 2], x.o[i + 1] * by[i / 2 % 2]);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(two) : "memory");
  }
  named_sync<3>(COMPUTING);
  for (int i = threadIdx.x; i < HEADS * VALUE / 8; i += COMPUTING) {
    int row = i / (VALUE / 8), piece = i % (VALUE / 8);
    if (head + row < c.heads) {
      uint4 eight;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                   : "r"(tiles + piece_at<HEADS>(row, piece)));
      reinterpret_cast<uint4*>(c.out)[(at * c.heads + head + row) * (VALUE / 8) + piece] = eight;
    }
  }
#endif
}
#else
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 of_part(u32 address, int part) {
  u32 out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(part));
  return out;
}
__device__ __forceinline__ float peer_float(u32 address) {
  float out;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(out) : "r"(address));
  return out;
}

// Sums of this part, so that the others can read them.
__device__ __forceinline__ void show(const Sums& x, u32 tiles) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, line = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    u32 to = tiles + ((line + 8 * (i / 2 % 2)) * PITCH + group * 256 + i / 4 * 8 + lane % 4 * 2) * 4;
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.o[i]), "f"(x.o[i + 1]) : "memory");
  }
}

// Of 16 bytes in another part's shared memory.
__device__ __forceinline__ float4 peer_float4(u32 address) {
  float4 out;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
               : "r"(address));
  return out;
}

// Each part joins its share of the columns, two by two as one block would. All threads of the block.
__device__ __forceinline__ void merge(const Call& c, Small& s, u32 tiles, long long at, int head, int part) {
  if (threadIdx.x < HEADS && head + threadIdx.x < c.heads) {
    const int row = threadIdx.x;
    float tops[PARTS], totals[PARTS], lse;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      tops[p] = peer_float(of_part(shared_address(&s.part_top[row]), p));
      totals[p] = peer_float(of_part(shared_address(&s.part_total[row]), p));
    }
    int at_share = 0;
#pragma unroll
    for (int step = 1; step < PARTS; step *= 2)
#pragma unroll
      for (int p = 0; p + step < PARTS; p += 2 * step) {
        Shares by = joined(tops[p], totals[p], tops[p + step], totals[p + step]);
        s.share[row][at_share++] = by.one, s.share[row][at_share++] = by.other;
      }
    s.share[row][at_share] = finish(c, head + row, tops[0], totals[0], lse);
    if (part == 0) c.lse[at * c.heads + head + row] = lse;
  }
  __syncthreads();
  constexpr int ACROSS = (VALUE / 4 + PARTS - 1) / PARTS;
#pragma unroll 3
  for (int i = threadIdx.x; i < HEADS * ACROSS; i += THREADS) {
    int row = i / ACROSS, column = (part * ACROSS + i % ACROSS) * 4;
    if (head + row >= c.heads || column >= VALUE) continue;
    float4 x[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) x[p] = peer_float4(of_part(tiles + (row * PITCH + column) * 4, p));
    int at_share = 0;
#pragma unroll
    for (int step = 1; step < PARTS; step *= 2)
#pragma unroll
      for (int p = 0; p + step < PARTS; p += 2 * step) {
        Shares by = {s.share[row][at_share], s.share[row][at_share + 1]};
        at_share += 2;
        x[p] = make_float4(mixed(x[p].x, x[p + step].x, by), mixed(x[p].y, x[p + step].y, by),
                           mixed(x[p].z, x[p + step].z, by), mixed(x[p].w, x[p + step].w, by));
      }
    float by = s.share[row][at_share];
    long long to = (at * c.heads + head + row) * VALUE + column;
#if WIDE
    *reinterpret_cast<float4*>(reinterpret_cast<float*>(c.out) + to) =
        make_float4(x[0].x * by, x[0].y * by, x[0].z * by, x[0].w * by);
#else
    *reinterpret_cast<uint2*>(reinterpret_cast<unsigned short*>(c.out) + to) =
        make_uint2(bf16_pair(x[0].x * by, x[0].y * by), bf16_pair(x[0].z * by, x[0].w * by));
#endif
  }
}
#endif

// Which row of the step the token belongs to, its first position, and how many rows its list names.
__device__ __forceinline__ void look_up(const Call& c, Small& s, int token, const int* list) {
  if (threadIdx.x == 0) {
    s.count = 0, s.row = -1;
    for (int i = 0; i < 2; i++) barrier_init(&s.full[i], FP8 ? 2 * GATHERING : GATHERING), barrier_init(&s.empty[i], 8 * OF_A_WARP);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  int row = -1, first = 0, count = 0;
  for (int i = threadIdx.x; i < c.num_rows; i += THREADS) {
    int begin = __ldg(c.query_start + i), end = __ldg(c.query_start + i + 1), at = __ldg(c.first + i);
    if (begin <= token && token < end) row = i, first = at;
  }
#pragma unroll 6
  for (int i = threadIdx.x; i < c.width; i += THREADS) count += __ldg(list + 2 * i) >= 0;
  count = __reduce_add_sync(0xffffffffu, count);
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&s.count, count);
  if (row >= 0) s.row = row, s.first = first;
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_attention(const __grid_constant__ Call c) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u, q = base, tiles = base + TILE_BYTES;
  Small& s = *reinterpret_cast<Small*>(memory + (base - shared_address(memory)) + 3 * TILE_BYTES);
  const int blocks = (c.heads + HEADS - 1) / HEADS, part = blockIdx.x % PARTS;
  const int head = blockIdx.x / PARTS % blocks * HEADS, token = c.first_token + blockIdx.x / PARTS / blocks;
  const int* list = reinterpret_cast<const int*>(c.listed + token * c.listed_stride);  // the lower halves
  asm volatile("griddepcontrol.wait;" ::: "memory");  // lists and queries are what the kernel ahead writes
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x < COMPUTING) load_queries(c, q, token, head);
  look_up(c, s, token, list);
  // A list is SEGMENTS pieces whatever PARTS is. A token of no row lists nothing.
  const int num_tiles = s.row < 0 ? 0 : (s.count + TILE - 1) / TILE, each = (num_tiles + SEGMENTS - 1) / SEGMENTS;
  const int begin = part * (SEGMENTS / PARTS) * each, num = max(0, min(SEGMENTS / PARTS * each, num_tiles - begin));
  if (threadIdx.x >= COMPUTING) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GATHER_REGISTERS));
    gather(c, s, tiles, list, begin, num);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGISTERS));
    Sums x;
    asm volatile("cp.async.wait_all;" ::: "memory");
    shared_fence();
    named_sync<3>(COMPUTING);
    if (threadIdx.x < 128) compute<0>(c, s, x, q, tiles, begin, num, each);
    else compute<1>(c, s, x, q, tiles, begin, num, each);
#if PARTS == 1
    store(c, x, tiles, token, head);
#else
    show(x, tiles);
#endif
  }
#if PARTS > 1
  cluster_sync();
  merge(c, s, tiles, token, head, part);
  cluster_sync();
#endif
}
