// Attention of a chunk of one row over some keys of its sequence, expanded from latent rows: each head has the 128 numbers
// of a key that come from the latent and 128 of a value, all heads share the 64 further ones of a key, which are copied from
// the rows themselves (``prefill.cuh``). Sums over later keys join those that are stored, by log-sum-exp.
//
// A query's own key may lie before these keys, or behind them: places count from the first of them. Pieces of work go from
// head to head, so that the blocks at work read the keys of few heads, and within a head from late queries to early ones.
//
// Defines: GROUPS (computing warpgroups), STAGES.
#define KEY_WIDTH 192
#define WIDTH 128
#define GROUP 1
#define WINDOW 0
#define UNCLEAN 0  // the copy engine puts zeros behind the last key
#include "prefill.cuh"

struct Call {
  unsigned short* out;  // of the last keys
  float *sums, *lse;    // of others, and of those before; lse in base 2
  int* taken;           // pieces beyond the first of each block, 0 at the start
  int heads, num_tokens, first_own, num_keys, first_block, num_blocks, joins, last;
  float scale;
};

__device__ __forceinline__ void find_work(const Call& c, int number, Work& w) {
  if (threadIdx.x % 32 != 0) return;
  if (number >= c.num_blocks * c.heads) {
    w.tiles = 0;
    return;
  }
  w.head = number / c.num_blocks;
  w.token = (c.first_block + c.num_blocks - 1 - number % c.num_blocks) * QUERIES;
  w.count = min(QUERIES, c.num_tokens - w.token);
  w.place = c.first_own + w.token;
  w.end = min(w.place + w.count, c.num_keys);
  w.low = 0;
  w.tiles = (w.end + TILE - 1) / TILE;
}

struct Maps {
  const TensorMap &queries, &expanded, &shared;
};

__device__ __forceinline__ void copy_columns(const TensorMap& map, u32 to, int column, int key, u64* full) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(key), "r"(shared_address(full))
      : "memory");
}

struct Copies {
  const Maps& maps;
  const int part;
  __device__ __forceinline__ Copies(const Call&, const Maps& maps, int part) : maps(maps), part(part) {}

  // A box a lane: 64 numbers of 128 keys. Of a head: two of its keys, two of its values.
  __device__ __forceinline__ void tile(const Work& w, u32 to, int tile, u64* full) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) expect(full, part ? VALUE_BYTES : KEY_BYTES);
    __syncwarp();
    if (lane < 2) copy_columns(maps.expanded, to + lane * GROUP_BYTES, (w.head * 4 + part * 2 + lane) * 64, tile * TILE, full);
    if (lane == 2 && part == 0) copy_columns(maps.shared, to + 2 * GROUP_BYTES, 0, tile * TILE, full);
  }

  __device__ __forceinline__ void queries(const Work& w, u32 to, u64* full) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) expect(full, QUERY_BYTES);
    __syncwarp();
    if (lane < KEY_COLUMNS)
      asm volatile(
          "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
              to + lane * QUERIES * 128),
          "l"(&maps.queries), "r"(lane * 64), "r"(w.head), "r"(w.token), "r"(shared_address(full))
          : "memory");
  }
};

__device__ __forceinline__ void store(const Call& c, const Work& w, const Sums& x) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int line = first + 8 * i, own = w.place + line;
    const bool real = line < w.count && own >= 0, joins = real && c.joins && own >= c.num_keys;
    const long long at = (long long)(w.token + line) * c.heads + w.head, column = at * WIDTH + lane % 4 * 2;
    const float later = joins ? c.lse[at] : negative_infinity(), top = fmaxf(x.top[i], later);
    __syncwarp();  // all lanes of a line have read it before one writes
    if (!real) continue;
    float by = power_of_2(x.top[i] - top), weight = power_of_2(later - top);
    const float total = x.total[i] * by + weight;
    by /= total, weight /= total;
    if (!c.last && lane % 4 == 0) c.lse[at] = top + log2f(total);
#pragma unroll
    for (int k = 0; k < WIDTH / 8; k++) {
      float2 y = make_float2(x.o[4 * k + 2 * i] * by, x.o[4 * k + 2 * i + 1] * by);
      float2* sums = reinterpret_cast<float2*>(c.sums + column + k * 8);
      if (joins) {
        const float2 z = *sums;
        y.x += z.x * weight, y.y += z.y * weight;
      }
      if (c.last)
        *reinterpret_cast<u32*>(c.out + column + k * 8) = bf16_pair(y.x, y.y);
      else
        *sums = y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    latent_prefill(const __grid_constant__ TensorMap queries, const __grid_constant__ TensorMap expanded,
                   const __grid_constant__ TensorMap shared, const __grid_constant__ Call c) {
  run<Copies>(c, Maps{queries, expanded, shared});
}
