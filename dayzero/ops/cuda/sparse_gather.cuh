// What goes into shared memory for attention to listed rows: queries, and tiles of 64 records that are followed through
// list and page table and, where they are codes, widened. Part of sparse_attention.cu, which says what is defined.
#pragma once
#include "paged_tiles.cuh"
#ifndef WIDEN_ONCE  // codes are widened by one product each, as latent_decode.cu does
#define WIDEN_ONCE 0
#endif
#if WIDEN_ONCE
#include "latent_widen.cuh"
#endif

constexpr int TILE = 64, HEADS = 64, WIDTH = 576, VALUE = 512, GROUPS = WIDTH / 64;
constexpr int GROUP_BYTES = TILE * 128, TILE_BYTES = GROUPS * GROUP_BYTES, HALF_BYTES = 4 * GROUP_BYTES;
constexpr int COMPUTING = 256, GATHERING = 128, THREADS = COMPUTING + GATHERING;
constexpr int COMPUTE_REGISTERS = 208, GATHER_REGISTERS = 88;  // of a thread; 168 of each at the start
constexpr int RECORD_BYTES = FP8 ? 656 : 2 * WIDTH, PLAIN_AT = 528, SCALES_AT = 512;
constexpr int PITCH = VALUE + 8;  // of float32 results that parts exchange: rows lie in different banks

struct Small {
  u64 full[2], empty[2];
  float top[2][HEADS];  // running maximum, by the warpgroup whose tile it is of
  float total[2][2][HEADS];  // sums of weights of a segment: by its number mod 2, by warpgroup
  float part_top[HEADS], part_total[HEADS], share[HEADS][2 * PARTS];  // for the merge of a cluster's parts
  int count, row, first;
};

struct Call {
  const void* q;
  const unsigned char* rows;
  const long long* listed;
  const int *table, *first, *query_start;
  const float* sinks;
  void* out;
  float *lse, *scratch;
  long long block_bytes, listed_stride, q_token, q_head, q_column;
  int first_token, num_rows, heads, width, table_stride, page_shift;
  float scale;
};

// Rows of a tile that this thread fetches, PER of them: first their places in the sequence, then their blocks.
template <int PER> struct Fetch {
  int place[PER], block[PER];

  __device__ void places(const Small& s, const int* list, int tile, int lane_row, int step) {
#pragma unroll
    for (int k = 0; k < PER; k++) {
      int at = tile * TILE + lane_row + k * step;
      place[k] = at < s.count ? __ldg(list + 2 * at) - s.first : -1;
    }
  }
  __device__ void blocks(const Call& c, const int* pages) {
#pragma unroll
    for (int k = 0; k < PER; k++) block[k] = place[k] >= 0 ? __ldg(pages + (place[k] >> c.page_shift)) : 0;
  }
  __device__ const unsigned char* record(const Call& c, int k) const {
    int inside = place[k] & ((1 << c.page_shift) - 1);
    return c.rows + (place[k] >= 0 ? (long long)block[k] * c.block_bytes + (long long)inside * RECORD_BYTES : 0);
  }
};

__device__ __forceinline__ u32 bf16_sum_of_product(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Two e4m3 codes, in the upper bytes of the halves, as bf16 times ``scale`` (two equal bf16). A code's bits in the
// right places are its value times 2^-120, but that of NaN is 480; so a number that overflows for 480 and not for 448,
// times 0, is added.
__device__ __forceinline__ u32 widened(u32 spread, u32 scale) {
  u32 bits = (spread & 0x80008000u) | ((spread >> 4) & 0x07f007f0u);
  u32 code = bf16_product(bits, 0x7b807b80u);  // 2^120
  u32 nan = bf16_product(bf16_product(code, 0x7b107b10u), 0);  // 1.125 * 2^119
  return bf16_sum_of_product(code, scale, nan);
}

// 16 codes, widened, to ``to`` and to the place of the piece after that.
__device__ __forceinline__ void widen_16(u32 to, uint4 codes, float scale) {
  u32 pair = bf16_pair(scale, scale), w[4] = {codes.x, codes.y, codes.z, codes.w}, out[8];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    out[2 * i] = widened(__byte_perm(w[i], 0, 0x1404), pair);
    out[2 * i + 1] = widened(__byte_perm(w[i], 0, 0x3424), pair);
  }
  store_16(to, out[0], out[1], out[2], out[3]);
  store_16(to ^ 16, out[4], out[5], out[6], out[7]);
}

// 16 bytes, zeros where not ``real``; where it stands among stores stays as it is written here.
__device__ __forceinline__ uint4 load_16(const unsigned char* from, bool real) {
  uint4 out;
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }\n"
      : "=&r"(out.x), "=&r"(out.y), "=&r"(out.z), "=&r"(out.w)
      : "l"(from), "r"((int)real)
      : "memory");
  return out;
}

__device__ __forceinline__ void gather(const Call& c, Small& s, u32 tiles, const int* list, int begin, int num) {
  const int thread = threadIdx.x - COMPUTING;
  const int* pages = c.table + (long long)s.row * c.table_stride;
  // Threads that share a row; rows that are fetched at once; rows of a thread.
  constexpr int ACROSS = FP8 ? 4 : 8, STEP = GATHERING / ACROSS, PER = TILE / STEP;
  const int row = thread / ACROSS, lane = thread % ACROSS;
  Fetch<PER> now, later;
  const unsigned char *from[PER], *next[PER];  // records of the tile that is fetched, and of the one after it
  bool real[PER], real_next[PER];
  auto turn = [&] {  // one tile on; where AHEAD, the records behind are asked for, so that they come from the L2 cache
#pragma unroll
    for (int k = 0; k < PER; k++) {
      from[k] = next[k], real[k] = real_next[k];
      next[k] = now.record(c, k), real_next[k] = now.place[k] >= 0;
      if (AHEAD && real_next[k] && lane == 0)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(next[k]), "n"(RECORD_BYTES) : "memory");
    }
  };
  now.places(s, list, begin, row, STEP);
  later.places(s, list, begin + 1, row, STEP);
  now.blocks(c, pages);
  later.blocks(c, pages);
  turn();
  now = later;
  later.places(s, list, begin + 2, row, STEP);
  turn();
#if FP8
  uint4 held[2][4];  // the codes of a row that is fetched, in halves; each half is fetched again once it is widened
  uint4 scales;
  auto load = [&](int k, int half) {
#pragma unroll
    for (int i = 0; i < 4; i++) held[half][i] = load_16(from[k] + (half * 4 + i) * 64 + lane * 16, real[k]);
    if (half == 1) scales = load_16(from[k] + SCALES_AT, real[k]);
  };
  if (num > 0) load(0, 0), load(0, 1);
#endif
  for (int j = 0; j < num; j++) {
    const u32 tile = tiles + (j & 1) * TILE_BYTES + piece_at<TILE>(row, FP8 ? 2 * lane : lane);  // steps keep row mod 8
    now = later;
    now.blocks(c, pages);
    later.places(s, list, begin + j + 3, row, STEP);
    if (j >= 2) barrier_wait(&s.empty[j & 1], ((j >> 1) & 1) ^ 1);
#if FP8
#pragma unroll
    for (int k = 0; k < PER; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 to = (tile + 8 * GROUP_BYTES + k * STEP * 128) ^ i * 16;
        copy_16(to, from[k] + PLAIN_AT + (lane * 2 + i) * 16, real[k]);
      }
    barrier_arrive_behind_copies(&s.full[j & 1]);
#pragma unroll
    for (int k = 0; k < PER; k++) {
      if (k + 1 == PER) turn();
      const u32 four[4] = {scales.x, scales.y, scales.z, scales.w};
#pragma unroll
      for (int half = 0; half < 2; half++) {
#if WIDEN_ONCE
        widen_unit(tile + half * HALF_BYTES + k * STEP * 128, held[half],
                   make_float2(__uint_as_float(four[half * 2]), __uint_as_float(four[half * 2 + 1])));
#else
#pragma unroll
        for (int i = 0; i < 4; i++)
          widen_16(tile + (half * 4 + i) * GROUP_BYTES + k * STEP * 128, held[half][i],
                   __uint_as_float(four[half * 2 + i / 2]));
#endif
        load((k + 1) % PER, half);
      }
    }
    barrier_arrive(&s.full[j & 1]);
#else
#pragma unroll
    for (int k = 0; k < PER; k++)
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        copy_16(tile + group * GROUP_BYTES + k * STEP * 128, from[k] + (group * 8 + lane) * 16, real[k]);
      }
    barrier_arrive_behind_copies(&s.full[j & 1]);
    turn();
#endif
  }
}

// Begins to bring queries of this block's heads into shared memory, zeros where there is no such head.
__device__ __forceinline__ void load_queries(const Call& c, u32 to, int token, int head) {
  const bool pieces =
      !WIDE && c.q_column == 1 && ((c.q_head | c.q_token) & 7) == 0 && (reinterpret_cast<u64>(c.q) & 15) == 0;
#pragma unroll 6
  for (int at = threadIdx.x; at < HEADS * WIDTH / 8; at += COMPUTING) {
    int row = at / (WIDTH / 8), piece = at % (WIDTH / 8);
    const bool real = head + row < c.heads;
    long long from = (long long)token * c.q_token + (long long)(head + row) * c.q_head + piece * 8 * c.q_column;
    if (pieces) {
      copy_16(to + piece_at<HEADS>(row, piece), reinterpret_cast<const unsigned short*>(c.q) + (real ? from : 0), real);
      continue;
    }
    u32 out[4] = {0, 0, 0, 0};
    if (real) {
#if WIDE
      const float* q = reinterpret_cast<const float*>(c.q) + from;
#pragma unroll
      for (int i = 0; i < 4; i++) out[i] = bf16_pair(q[2 * i * c.q_column], q[(2 * i + 1) * c.q_column]);
#else
      const unsigned short* q = reinterpret_cast<const unsigned short*>(c.q) + from;
#pragma unroll
      for (int i = 0; i < 4; i++) out[i] = q[2 * i * c.q_column] | ((u32)q[(2 * i + 1) * c.q_column] << 16);
#endif
    }
    store_16(to + piece_at<HEADS>(row, piece), out[0], out[1], out[2], out[3]);
  }
}

