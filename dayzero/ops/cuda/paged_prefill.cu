// Attention of chunks of queries over the pages of their rows, causal within the row, for key heads that GROUP query heads
// share. A block has 64 * GROUPS queries (tokens times heads of one key head), 64 a warpgroup, and goes through tiles of 128
// keys from the last that it sees to the first. A further warp copies tiles into shared memory, two of keys and two of values
// in turn. A warpgroup multiplies the queries with the next keys while it sums the values of the last tile, and takes
// exponents while that runs.
//
// Defines: WIDTH (64 or 128, of keys and values), GROUP, GROUPS (computing warpgroups), WINDOW (whether there is one).
#include "paged_tiles.cuh"

constexpr int TILE = 128, QUERIES = 64 * GROUPS, COMPUTING = 128 * GROUPS, THREADS = COMPUTING + 128;
constexpr int COLUMNS = WIDTH / 64, GROUP_BYTES = TILE * 128, TILE_BYTES = COLUMNS * GROUP_BYTES;
constexpr int QUERY_BYTES = COLUMNS * QUERIES * 128, TOKENS = QUERIES / GROUP, SUMS = WIDTH / 2;

struct Small {
  u64 key_full[2], key_empty[2], value_full[2], value_empty[2];
  int row, number;
};

struct Call {
  const unsigned short* q;
  const int *table, *first, *query_start, *start;
  const float* sinks;
  unsigned short* out;
  float* lse;
  long long q_token, q_head;
  int num_rows, heads, key_heads, table_stride, page_shift, window, num_blocks;
  float scale;
};

// A block's part of a row. Places count from the first record that the row holds.
struct Work {
  const int* pages;
  int token, count, place, end, head, low, tiles;  // packed number of the first token, tokens; its place; …
};

#define O64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"

// s [64, 128] = (keep ? s : 0) + a [64, 16] b [128, 16]^T; both tiles have their columns together.
__device__ __forceinline__ void score(float (&s)[64], u64 a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" O64 "}, %64, %65, p, 1, 1, 0, 0; }\n"
      : F32(s, 0), F32(s, 32)
      : "l"(a), "l"(b), "r"(keep));
}

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

// Which row the block belongs to, and its number in the row: one warp. Rows of one token have no block.
__device__ __forceinline__ void find_row(const Call& c, Small& s, int number) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < c.num_rows; base += 32) {
    const int row = base + lane, count = row < c.num_rows ? c.query_start[row + 1] - c.query_start[row] : 0;
    int sum = count > 1 ? (count + TOKENS - 1) / TOKENS : 0;
    const int own = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int more = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += more;
    }
    if (number >= before + sum - own && number < before + sum) s.row = row, s.number = number - (before + sum - own);
    before += __shfl_sync(0xffffffffu, sum, 31);
    if (number < before) return;
  }
}

__device__ __forceinline__ Work work_of(const Call& c, const Small& s) {
  Work w;
  const int begin = c.query_start[s.row], count = c.query_start[s.row + 1] - begin;
  w.token = begin + s.number * TOKENS;
  w.count = min(TOKENS, count - s.number * TOKENS);
  w.place = c.start[s.row] - c.first[s.row] + s.number * TOKENS;
  w.end = w.place + w.count;
  w.pages = c.table + (long long)s.row * c.table_stride;
  w.head = blockIdx.x % c.key_heads * GROUP;
  w.low = WINDOW ? max(0, w.place - c.window + 1) / TILE : 0;
  w.tiles = (w.end + TILE - 1) / TILE - w.low;
  return w;
}

// A tile of records of one key head.
__device__ __forceinline__ void copy_tile(const Call& c, const Work& w, const TensorMap& map, u32 to, int tile, u64* full) {
  const int page = 1 << c.page_shift, rows = min(page, TILE), place = tile * TILE;
  const int boxes = (min(w.end - place, TILE) + rows - 1) / rows;
  expect(full, boxes * rows * 128 * COLUMNS);
  for (int i = 0; i < boxes; i++) {
    const int block = __ldg(w.pages + ((place + i * rows) >> c.page_shift));
#pragma unroll
    for (int g = 0; g < COLUMNS; g++)
      copy_box(map, to + g * GROUP_BYTES + i * rows * 128, g * 64, w.head / GROUP, (place + i * rows) & (page - 1), block, full);
  }
}

__device__ __forceinline__ void copy_tiles(const Call& c, const Work& w, const TensorMap& key_map, const TensorMap& value_map,
                                           Small& s, u32 keys, u32 values) {
  const int last = w.low + w.tiles - 1;
  for (int j = 0; j <= w.tiles; j++) {
    if (j < w.tiles) {
      barrier_wait(&s.key_empty[j & 1], ((j >> 1) & 1) ^ 1);
      copy_tile(c, w, key_map, keys + (j & 1) * TILE_BYTES, last - j, &s.key_full[j & 1]);
    }
    if (j > 0) {
      const int v = j - 1;
      barrier_wait(&s.value_empty[v & 1], ((v >> 1) & 1) ^ 1);
      copy_tile(c, w, value_map, values + (v & 1) * TILE_BYTES, last - v, &s.value_full[v & 1]);
    }
  }
}

__device__ __forceinline__ void load_queries(const Call& c, const Work& w, u32 to) {
  for (int at = threadIdx.x; at < QUERIES * WIDTH / 8; at += COMPUTING) {
    const int row = at / (WIDTH / 8), piece = at % (WIDTH / 8), token = row / GROUP;
    uint4 eight = make_uint4(0, 0, 0, 0);
    if (token < w.count) {
      const unsigned short* q = c.q + (w.token + token) * c.q_token + (w.head + row % GROUP) * c.q_head;
      eight = __ldg(reinterpret_cast<const uint4*>(q) + piece);
    }
    store_16(to + piece_at<QUERIES>(row, piece), eight.x, eight.y, eight.z, eight.w);
  }
  shared_fence();
  named_sync<1>(COMPUTING);
}

__device__ __forceinline__ void clear_values(u32 tile, int seen) {
  clear_rows<TILE, WIDTH>(tile, seen, threadIdx.x, COMPUTING);
  named_sync<1>(COMPUTING);
}

struct Sums {
  float o[SUMS], top[2], total[2];
};

__device__ __forceinline__ void begin_scores(float (&s)[64], u32 q, u32 keys) {
  const u32 a = opaque(tile_low(q, 16)), b = opaque(tile_low(keys, 16));
  product_fence();
#pragma unroll
  for (int k = 0; k < WIDTH / 16; k++)
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

// Logits to weights in place. Returns what sums so far shrink by.
__device__ __forceinline__ float2 weigh(float (&s)[64], Sums& x, float scale, bool masked) {
  float top[2] = {negative_infinity(), negative_infinity()}, shrink[2];
#pragma unroll
  for (int i = 0; i < 64; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
  for (int line = 0; line < 2; line++) {
    top[line] = fmaxf(top[line], __shfl_xor_sync(0xffffffffu, top[line], 1));
    top[line] = fmaxf(top[line], __shfl_xor_sync(0xffffffffu, top[line], 2));
    top[line] = fmaxf(x.top[line], top[line] * scale);
    const float safe = masked && top[line] == negative_infinity() ? 0.0f : top[line];
    shrink[line] = power_of_2(x.top[line] - safe);
    x.top[line] = top[line];
    top[line] = safe;
    x.total[line] *= shrink[line];
  }
#pragma unroll
  for (int i = 0; i < 64; i++) {
    s[i] = power_of_2(fmaf(s[i], scale, -top[i / 2 % 2]));
    x.total[i / 2 % 2] += s[i];
  }
  return make_float2(shrink[0], shrink[1]);
}

__device__ __forceinline__ void compute(const Call& c, const Work& w, Small& s, Sums& x, u32 q, u32 keys, u32 values) {
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
  const int line = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const float scale = c.scale * LOG2_E;
  const int place[2] = {w.place + min(line / GROUP, w.count - 1), w.place + min((line + 8) / GROUP, w.count - 1)};
  const int lowest = w.place + group * 64 / GROUP, highest = w.place + min((group * 64 + 63) / GROUP, w.count - 1);
  q += group * 64 * 128;
  float p[64];
  u32 a[32];
#pragma unroll
  for (int i = 0; i < SUMS; i++) x.o[i] = 0.0f;
  x.top[0] = x.top[1] = negative_infinity(), x.total[0] = x.total[1] = 0.0f;
  int begin = (w.low + w.tiles - 1) * TILE;
  for (int j = 0; j < w.tiles; j++, begin -= TILE) {
    if (j == 1 && w.end - begin - TILE < TILE) {
      barrier_wait(&s.value_full[0], 0);
      clear_values(values, w.end - begin - TILE);
    }
    barrier_wait(&s.key_full[j & 1], (j >> 1) & 1);
    begin_scores(p, q, keys + (j & 1) * TILE_BYTES);
    if (j > 0) {
      barrier_wait(&s.value_full[(j - 1) & 1], ((j - 1) >> 1) & 1);
      hold(x.o);
      begin_sums(x, a, values + ((j - 1) & 1) * TILE_BYTES);
      product_wait<1>();
    } else {
      product_wait<0>();
    }
    hold(p);
    if (lane == 0) barrier_arrive(&s.key_empty[j & 1]);
    const bool masked = begin + TILE - 1 > lowest || (WINDOW && begin <= highest - c.window);
    if (masked) {
      const int own[2] = {place[0] - begin, place[1] - begin};
      hide(p, own, c.window);
    }
    const float2 shrink = weigh(p, x, scale, true);
    if (j > 0) {
      product_wait<0>();
      hold(x.o);
      if (lane == 0) barrier_arrive(&s.value_empty[(j - 1) & 1]);
#pragma unroll
      for (int i = 0; i < SUMS; i++) x.o[i] *= i / 2 % 2 ? shrink.y : shrink.x;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) a[i] = bf16_pair(p[2 * i], p[2 * i + 1]);
  }
  const int j = w.tiles - 1;
  barrier_wait(&s.value_full[j & 1], (j >> 1) & 1);
  begin += TILE;
  if (j == 0 && w.end - begin < TILE) clear_values(values, w.end - begin);
  hold(x.o);
  begin_sums(x, a, values + (j & 1) * TILE_BYTES);
  product_wait<0>();
  hold(x.o);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 1);
    x.total[i] += __shfl_xor_sync(0xffffffffu, x.total[i], 2);
  }
}

__device__ __forceinline__ void store(const Call& c, const Work& w, const Sums& x) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int line = first + 8 * i, token = line / GROUP, head = w.head + line % GROUP;
    if (token >= w.count) continue;
    const long long at = (long long)(w.token + token) * c.heads + head;
    const float sink = c.sinks ? c.sinks[head] * LOG2_E : negative_infinity(), top = fmaxf(x.top[i], sink);
    float by = power_of_2(x.top[i] - top);
    const float total = x.total[i] * by + power_of_2(sink - top);
    by /= total;
    if (lane % 4 == 0) c.lse[at] = (top + log2f(total)) * LN_2;
    unsigned short* to = c.out + at * WIDTH + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < WIDTH / 8; k++)
      *reinterpret_cast<u32*>(to + k * 8) = bf16_pair(x.o[4 * k + 2 * i] * by, x.o[4 * k + 2 * i + 1] * by);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_prefill(const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map,
                  const __grid_constant__ Call c) {
  extern __shared__ unsigned char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u, q = base, keys = q + QUERY_BYTES, values = keys + 2 * TILE_BYTES;
  Small& s = *reinterpret_cast<Small*>(memory + (values + 2 * TILE_BYTES - shared_address(memory)));
  if (threadIdx.x < 32) find_row(c, s, c.num_blocks - 1 - blockIdx.x / c.key_heads);  // late blocks see the most keys
  if (threadIdx.x == 32) {
    for (int i = 0; i < 2; i++) {
      barrier_init(&s.key_full[i], 1), barrier_init(&s.value_full[i], 1);
      barrier_init(&s.key_empty[i], 4 * GROUPS), barrier_init(&s.value_empty[i], 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Work w = work_of(c, s);
  if (threadIdx.x >= COMPUTING) {
#if GROUPS == 2  // what a block has at its start: 168 * 384 and 128 * 512 registers
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
    if (threadIdx.x == COMPUTING) copy_tiles(c, w, key_map, value_map, s, keys, values);
  } else {
#if GROUPS == 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#endif
    Sums x;
    load_queries(c, w, q);
    compute(c, w, s, x, q, keys, values);
    store(c, w, x);
  }
}
