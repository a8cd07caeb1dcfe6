// Attention of chunks of queries over the pages of their rows, causal within the row, for key heads that GROUP query heads
// share (``prefill.cuh``).
//
// Defines: WIDTH (64 or 128, of keys and values), GROUP, GROUPS (computing warpgroups), WINDOW (whether there is one),
// STAGES.
#define KEY_WIDTH WIDTH
#define UNCLEAN 1  // behind the end of a row
#include "prefill.cuh"

struct Call {
  const int *table, *first, *query_start, *start;
  const float* sinks;
  unsigned short* out;
  float* lse;
  int* taken;  // pieces beyond the first of each block, 0 at the start
  int num_rows, heads, key_heads, table_stride, page_shift, window, num_blocks;
  float scale;
};

// Which row a block of queries belongs to, and its number in the row: one warp. Rows of one token have no block.
__device__ __forceinline__ int2 find_row(const Call& c, int number) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < c.num_rows; base += 32) {
    const int row = base + lane, count = row < c.num_rows ? c.query_start[row + 1] - c.query_start[row] : 0;
    const int own = count > 1 ? (count + TOKENS - 1) / TOKENS : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int more = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += more;
    }
    const u32 behind = __ballot_sync(0xffffffffu, number < before + sum);
    if (behind) {
      const int at = __ffs(behind) - 1;
      return make_int2(base + at, number - before - __shfl_sync(0xffffffffu, sum - own, at));
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return make_int2(-1, 0);
}

__device__ __forceinline__ void find_work(const Call& c, int number, Work& w) {
  if (number >= c.num_blocks * c.key_heads) {
    if (threadIdx.x % 32 == 0) w.tiles = 0;
    return;
  }
  const int2 found = find_row(c, c.num_blocks - 1 - number / c.key_heads);  // late blocks see the most keys
  if (threadIdx.x % 32 != 0) return;
  const int begin = c.query_start[found.x], first = found.y * TOKENS, count = c.query_start[found.x + 1] - begin - first;
  const int place = c.start[found.x] - c.first[found.x] + first, low = WINDOW ? max(0, place - c.window + 1) / TILE : 0;
  w.token = begin + first;
  w.count = min(TOKENS, count);
  w.place = place;
  w.end = place + min(TOKENS, count);
  w.pages = c.table + (long long)found.x * c.table_stride;
  w.head = number % c.key_heads * GROUP;
  w.low = low;
  w.tiles = (place + min(TOKENS, count) + TILE - 1) / TILE - low;
}

// A tile of records of one key head: a box a lane.
__device__ __forceinline__ void copy_tile(const Call& c, const Work& w, const TensorMap& map, u32 to, int tile, u64* full) {
  const int lane = threadIdx.x % 32, shift = min(c.page_shift, 7), rows = 1 << shift;
  const int boxes = ((min(w.end - tile * TILE, TILE) + rows - 1) >> shift) * COLUMNS;
  if (lane == 0) expect(full, boxes * rows * 128);
  __syncwarp();
  if (lane >= boxes) return;
  const int box = lane / COLUMNS, g = lane % COLUMNS, place = tile * TILE + (box << shift);
  const int block = __ldg(w.pages + (place >> c.page_shift));
  copy_box(map, to + g * GROUP_BYTES + (box << shift) * 128, g * 64, w.head / GROUP, place & ((1 << c.page_shift) - 1), block,
           full);
}

// The queries of some tokens, of the heads of one key head.
__device__ __forceinline__ void copy_queries(const Work& w, const TensorMap& map, u32 to, u64* full) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) expect(full, COLUMNS * TOKENS * GROUP * 128);
  __syncwarp();
  if (lane < COLUMNS)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            to + lane * QUERIES * 128),
        "l"(&map), "r"(lane * 64), "r"(w.head), "r"(w.token), "r"(shared_address(full))
        : "memory");
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

struct Maps {
  const TensorMap &queries, &keys, &values;
};

struct Copies {
  const Call& c;
  const TensorMap &query_map, &map;
  __device__ __forceinline__ Copies(const Call& c, const Maps& maps, int part)
      : c(c), query_map(maps.queries), map(part ? maps.values : maps.keys) {}
  __device__ __forceinline__ void tile(const Work& w, u32 to, int tile, u64* full) const {
    copy_tile(c, w, map, to, tile, full);
  }
  __device__ __forceinline__ void queries(const Work& w, u32 to, u64* full) const { copy_queries(w, query_map, to, full); }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_prefill(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap key_map,
                  const __grid_constant__ TensorMap value_map, const __grid_constant__ Call c) {
  run<Copies>(c, Maps{query_map, key_map, value_map});
}
