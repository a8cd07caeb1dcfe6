// Attention of rows of one token over their pages, for key heads that GROUP query heads share (up to 8): one part of a row's
// keys at a time, merged by a second kernel. As many blocks as are resident take parts in turn: the grid follows from nothing
// that only the device knows, and no block starts in vain. How a row is split follows from its own length alone.
//
// A warp goes through tiles of 16 keys, every WARPS-th of a part. Records go from device memory straight into the operands of
// matrix products, keys and values as the first, in an order of columns that suits 16-byte loads: a product's inner index
// and its rows may be dealt out at will.
//
// Defines: WIDTH (64 or 128), GROUP, WINDOW (whether there is one), SINKS (0: none, 1: float32, 2: bf16), SPLITS, LEAST (a row
// has at most so many parts, of at least so many keys), WARPS, RESIDENT (blocks of a multiprocessor).
#include "paged_tiles.cuh"
// Tried beside it: NEAREST: parts of LEAST keys on the average, none of a few. FUSED: the last part of a row and key head to
// be done merges all of them, by ``Call.done``, whose numbers are 0 between launches. OVERLAP: launches overlap.

constexpr int THREADS = 32 * WARPS, PIECES = WIDTH / 32, HALVES = WIDTH / 64, KEYS = 16;

struct Call {
  const unsigned short *q, *keys, *values;
  const int *table, *first, *query_start, *start;
  const void* sinks;
  unsigned short* out;
  float *lse, *parts, *part_lses;
  u32* done;
  long long q_token, q_head, key_block, key_row, key_head, value_block, value_row, value_head;
  int num_rows, heads, key_heads, table_stride, page_shift, window, max_splits;
  float scale;
};

struct Small {
  float sums[WARPS][GROUP][WIDTH + 4], top[WARPS][8], total[WARPS][8];
  int of_warps[WARPS];
  int last;
};

// Places of a row: those seen are from low on, before end; parts of ``size`` begin at lowest.
struct Row {
  int end, low, lowest, size, parts;
};
__device__ __forceinline__ Row row_of(const Call& c, int end) {
  Row r;
  r.end = end;
  r.low = WINDOW ? max(end - c.window, 0) : 0;
  r.lowest = r.low & ~(KEYS - 1);
#if NEAREST
  const int wanted = max(1, min(SPLITS, (end - r.lowest + LEAST / 2) / LEAST));
  const int each = (end - r.lowest + wanted - 1) / wanted;
  r.size = max(1, (each + KEYS - 1) / KEYS) * KEYS;
#else
  const int each = (end - r.lowest + SPLITS - 1) / SPLITS;
  r.size = max(LEAST, (each + KEYS - 1) / KEYS * KEYS);
#endif
  r.parts = max((end - r.lowest + r.size - 1) / r.size, 1);
  return r;
}

__device__ __forceinline__ float sink_of(const Call& c, int head) {
#if SINKS == 1
  return static_cast<const float*>(c.sinks)[head] * LOG2_E;
#elif SINKS == 2
  return __uint_as_float((u32)static_cast<const unsigned short*>(c.sinks)[head] << 16) * LOG2_E;
#else
  return negative_infinity();
#endif
}

__device__ __forceinline__ uint4 load_16(const unsigned short* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

__device__ __forceinline__ void product(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 transposed(u32 x) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(x));
  return out;
}

__device__ __forceinline__ float highest(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
}
__device__ __forceinline__ float summed(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

// What a warp has of a part: sums of 4 * HALVES tiles of 16 columns by 8 heads; of heads 2 (lane % 4) and the next.
struct Sums {
  float o[4 * HALVES][4], top[2], total[2];
};

// 16 keys from place ``at`` on, all of one page. Lane 4 r + n has pieces n of keys r and r + 8, and pieces r of values
// 2 n, 2 n + 1, 2 n + 8, 2 n + 9.
template <bool WHOLE>
__device__ __forceinline__ void tile(const Call& c, Sums& x, const uint4 (&q)[PIECES], const unsigned short* keys,
                                     const unsigned short* values, int at, int from, int to) {
  const int r = threadIdx.x % 32 / 4, n = threadIdx.x % 4;
  uint4 k[2][PIECES], v[4][HALVES];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const bool seen = WHOLE || (at + r + 8 * i >= from && at + r + 8 * i < to);
#pragma unroll
    for (int j = 0; j < PIECES; j++)
      k[i][j] = seen ? load_16(keys + (r + 8 * i) * c.key_row + (4 * j + n) * 8) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int own = 2 * n + i % 2 + i / 2 * 8;
    const bool seen = WHOLE || (at + own >= from && at + own < to);
#pragma unroll
    for (int h = 0; h < HALVES; h++)
      v[i][h] = seen ? load_16(values + own * c.value_row + h * 64 + r * 8) : make_uint4(0, 0, 0, 0);
  }
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < PIECES; j++) {
    product(s, k[0][j].x, k[1][j].x, k[0][j].y, k[1][j].y, q[j].x, q[j].y);
    product(s, k[0][j].z, k[1][j].z, k[0][j].w, k[1][j].w, q[j].z, q[j].w);
  }
  const float scale = c.scale * LOG2_E;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int place = at + r + i / 2 * 8;
    s[i] = WHOLE || (place >= from && place < to) ? s[i] * scale : negative_infinity();
  }
  const float top[2] = {fmaxf(x.top[0], highest(fmaxf(s[0], s[2]))), fmaxf(x.top[1], highest(fmaxf(s[1], s[3])))};
  if (__any_sync(0xffffffffu, top[0] > x.top[0] || top[1] > x.top[1])) {
    const float shrink[2] = {top[0] > x.top[0] ? power_of_2(x.top[0] - top[0]) : 1.0f,
                             top[1] > x.top[1] ? power_of_2(x.top[1] - top[1]) : 1.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) x.top[i] = top[i], x.total[i] *= shrink[i];
#pragma unroll
    for (int m = 0; m < 4 * HALVES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) x.o[m][i] *= shrink[i % 2];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float safe = x.top[i % 2] == negative_infinity() ? 0.0f : x.top[i % 2];
    s[i] = power_of_2(s[i] - safe);
    x.total[i % 2] += s[i];
  }
  const u32 low = transposed(bf16_pair(s[0], s[1])), high = transposed(bf16_pair(s[2], s[3]));
#pragma unroll
  for (int h = 0; h < HALVES; h++) {
    const u32 a[4] = {v[0][h].x, v[0][h].y, v[0][h].z, v[0][h].w}, b[4] = {v[1][h].x, v[1][h].y, v[1][h].z, v[1][h].w};
    const u32 d[4] = {v[2][h].x, v[2][h].y, v[2][h].z, v[2][h].w}, e[4] = {v[3][h].x, v[3][h].y, v[3][h].z, v[3][h].w};
#pragma unroll
    for (int m = 0; m < 4; m++)
      product(x.o[4 * h + m], __byte_perm(a[m], b[m], 0x5410), __byte_perm(a[m], b[m], 0x7632),
              __byte_perm(d[m], e[m], 0x5410), __byte_perm(d[m], e[m], 0x7632), low, high);
  }
}

// Parts of all rows up to and with each, and where each row ends; the number of all. Rows of several tokens have none.
__device__ __forceinline__ int count_parts(const Call& c, Small& s, int* behind, int* end) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int total = 0;
  for (int base = 0; base < c.num_rows; base += THREADS) {
    const int row = base + threadIdx.x;
    int sum = 0;
    if (row < c.num_rows) {
      const int count = c.query_start[row + 1] - c.query_start[row], last = c.start[row] + 1 - c.first[row];
      end[row] = last;
      if (count == 1) sum = row_of(c, last).parts;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int more = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += more;
    }
    if (lane == 31) s.of_warps[warp] = sum;
    __syncthreads();
    int before = total;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      if (w < warp) before += s.of_warps[w];
      total += s.of_warps[w];
    }
    if (row < c.num_rows) behind[row] = before + sum;
    __syncthreads();
  }
  return total;
}

// Merges the warps' sums, and stores a part, or a whole row.
__device__ __forceinline__ void store(const Call& c, Small& s, const Sums& x, int row, int head, int part, int parts) {
  const int r = threadIdx.x % 32 / 4, n = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float total = summed(x.total[i]);
    if (2 * n + i >= GROUP) continue;
    if (r == 0) s.top[warp][2 * n + i] = x.top[i], s.total[warp][2 * n + i] = total;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      float4* to = reinterpret_cast<float4*>(&s.sums[warp][2 * n + i][h * 64 + r * 8]);
      to[0] = make_float4(x.o[4 * h][i], x.o[4 * h][i + 2], x.o[4 * h + 1][i], x.o[4 * h + 1][i + 2]);
      to[1] = make_float4(x.o[4 * h + 2][i], x.o[4 * h + 2][i + 2], x.o[4 * h + 3][i], x.o[4 * h + 3][i + 2]);
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < GROUP * WIDTH / 4; at += THREADS) {
    const int g = at / (WIDTH / 4), d = at % (WIDTH / 4) * 4, h = head * GROUP + g;
    const float sink = parts == 1 ? sink_of(c, h) : negative_infinity();
    float top = sink, total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, s.top[w][g]);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float by = power_of_2(s.top[w][g] - top);
      const float4 own = *reinterpret_cast<const float4*>(&s.sums[w][g][d]);
      total += by * s.total[w][g];
      sum.x += by * own.x, sum.y += by * own.y, sum.z += by * own.z, sum.w += by * own.w;
    }
    total += power_of_2(sink - top);
    const float by = 1.0f / total;
    if (parts == 1) {
      const long long place = (long long)c.query_start[row] * c.heads + h;
      const u32 low = bf16_pair(sum.x * by, sum.y * by), high = bf16_pair(sum.z * by, sum.w * by);
      *reinterpret_cast<uint2*>(c.out + place * WIDTH + d) = make_uint2(low, high);
      if (d == 0) c.lse[place] = (top + log2f(total)) * LN_2;
    } else {
      const long long place = ((long long)row * c.heads + h) * c.max_splits + part;
      *reinterpret_cast<float4*>(c.parts + place * WIDTH + d) = make_float4(sum.x * by, sum.y * by, sum.z * by, sum.w * by);
      if (d == 0) c.part_lses[place] = top + log2f(total);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void run_part(const Call& c, Sums& x, int row, int head, const Row& own, int part) {
  const int r = threadIdx.x % 32 / 4, n = threadIdx.x % 4, warp = threadIdx.x / 32;
  uint4 q[PIECES];
  const unsigned short* from_q = c.q + c.query_start[row] * c.q_token + (head * GROUP + r) * c.q_head + n * 8;
#pragma unroll
  for (int j = 0; j < PIECES; j++) q[j] = r < GROUP ? load_16(from_q + j * 32) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int m = 0; m < 4 * HALVES; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) x.o[m][i] = 0.0f;
  x.top[0] = x.top[1] = negative_infinity(), x.total[0] = x.total[1] = 0.0f;
  const int* pages = c.table + (long long)row * c.table_stride;
  const unsigned short *keys = c.keys + head * c.key_head, *values = c.values + head * c.value_head;
  const int begin = own.lowest + part * own.size, to = min(begin + own.size, own.end), mask = (1 << c.page_shift) - 1;
  int at = begin + warp * KEYS;
  long long block = at < to ? __ldg(pages + (at >> c.page_shift)) : 0;
  long long next = at + WARPS * KEYS < to ? __ldg(pages + ((at + WARPS * KEYS) >> c.page_shift)) : 0;
  for (; at < to; at += WARPS * KEYS) {
    const unsigned short* k = keys + block * c.key_block + (at & mask) * c.key_row;
    const unsigned short* v = values + block * c.value_block + (at & mask) * c.value_row;
    block = next;
    const int then = at + WARPS * KEYS;
    if (then + WARPS * KEYS < to) next = __ldg(pages + ((then + WARPS * KEYS) >> c.page_shift));
    if (at >= own.low && at + KEYS <= to)
      tile<true>(c, x, q, k, v, at, own.low, to);
    else
      tile<false>(c, x, q, k, v, at, own.low, to);
  }
}

// What other blocks of the same launch have written may not come from the L1 cache.
__device__ __forceinline__ float read(const float* from) { return FUSED ? __ldcg(from) : *from; }

// Parts of a row's head into one, in their order: a warp.
__device__ __forceinline__ void merge(const Call& c, int row, int h, int token, int parts, float sink) {
  constexpr int EACH = WIDTH / 32, FIRST = 4;
  const int lane = threadIdx.x % 32;
  const long long place = ((long long)row * c.heads + h) * c.max_splits;
  const float* from = c.parts + place * WIDTH + lane * EACH;
  const float lse = lane < parts ? read(c.part_lses + place + lane) : negative_infinity();
  float first[FIRST][EACH], sum[EACH];
#pragma unroll
  for (int part = 0; part < FIRST; part++)
#pragma unroll
    for (int i = 0; i < EACH; i++) first[part][i] = part < parts ? read(from + part * WIDTH + i) : 0.0f;
  float top = highest(lse);
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = fmaxf(fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)), sink);
  const float weight = power_of_2(lse - top);
  float total = power_of_2(sink - top);
#pragma unroll
  for (int i = 0; i < EACH; i++) sum[i] = 0.0f;
#pragma unroll
  for (int part = 0; part < FIRST; part++) {
    const float by = __shfl_sync(0xffffffffu, weight, part);  // 0 behind the last part
    total += by;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum[i] += by * first[part][i];
  }
  for (int part = FIRST; part < parts; part++) {
    const float by = __shfl_sync(0xffffffffu, weight, part);
    total += by;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum[i] += by * read(from + part * WIDTH + i);
  }
  const float by = 1.0f / total;
  const long long to = (long long)token * c.heads + h;
  u32* out = reinterpret_cast<u32*>(c.out + to * WIDTH + lane * EACH);
#pragma unroll
  for (int i = 0; i < EACH / 2; i++) out[i] = bf16_pair(sum[2 * i] * by, sum[2 * i + 1] * by);
  if (lane == 0) c.lse[to] = (top + log2f(total)) * LN_2;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) paged_decode(const __grid_constant__ Call c) {
  extern __shared__ float memory[];
  Small& s = *reinterpret_cast<Small*>(memory);
  int *behind = reinterpret_cast<int*>(&s + 1), *end = behind + c.num_rows;
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int all = count_parts(c, s, behind, end) * c.key_heads;
  for (int number = blockIdx.x; number < all; number += gridDim.x) {
    const int head = number % c.key_heads, part = number / c.key_heads;
    int row = 0, most = c.num_rows - 1;  // the first whose parts go beyond this one
    while (row < most) {
      const int middle = (row + most) / 2;
      if (behind[middle] > part)
        most = middle;
      else
        row = middle + 1;
    }
    const Row own = row_of(c, end[row]);
    const int inside = part - (row ? behind[row - 1] : 0);
    Sums x;
    run_part(c, x, row, head, own, inside);
    store(c, s, x, row, head, inside, own.parts);
#if FUSED
    if (own.parts == 1) continue;
    if (threadIdx.x == 0) {
      __threadfence();  // the barrier in ``store`` has ordered the other threads' numbers ahead of this
      s.last = atomicInc(c.done + row * c.key_heads + head, own.parts - 1) == own.parts - 1;
      __threadfence();
    }
    __syncthreads();
    if (!s.last) continue;
    for (int h = head * GROUP + threadIdx.x / 32; h < (head + 1) * GROUP; h += WARPS)
      merge(c, row, h, c.query_start[row], own.parts, sink_of(c, h));
#endif
  }
}

// The same in a launch of its own. May begin before ``paged_decode`` ahead of it has ended; what that one only reads, this
// one may read before it waits.
extern "C" __global__ void __launch_bounds__(128) paged_decode_merge(const __grid_constant__ Call c) {
  const int at = blockIdx.x * 4 + threadIdx.x / 32, row = at / c.heads, h = at % c.heads;
  int token = 0, parts = 1;
  float sink = negative_infinity();
  if (row < c.num_rows) {
    token = c.query_start[row];
    if (c.query_start[row + 1] - token == 1) parts = row_of(c, c.start[row] + 1 - c.first[row]).parts;
    sink = sink_of(c, h);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");  // in all threads: what comes behind relies on the other one's end too
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  if (parts > 1) merge(c, row, h, token, parts, sink);
}
