// What a chunk of the gated delta rule computes without the state: one block of threads a (head, chunk of 64 tokens).
//
// K = 128, bf16 q and k. Written: w [64, 128], t [64, 64], qd, kd [64, 128], a [64, 64] in bf16, one behind the other, as
// tiles of shared memory (wgmma.cuh), and last [128] in f32. triton/delta_chunk_local.py has the formulas.
//
// A thread owns two neighbouring columns of 16 rows, so that running sums of the decay stay in its registers, and the
// exponent of any row against any boundary is one addition. Warp w has the rows from 16 (w / 2) on and the columns from
// 64 (w % 2) on. Warpgroup 0 then has k.k and the inverse, warpgroup 1 q.k.
//
// Pairs of rows in different halves of the chunk are decayed to its middle; pairs within a half to the middle of that
// half, with positive exponents where it has to be. Where 16 rows decay by more than 2^117 together, a second, careful
// kernel does the chunk: pairs across the middle of a half first, then pairs within 16 rows the same way, or, where 8 rows
// do, level by level with no positive exponent.
//
// Defines: CAREFUL; Q_ROW, K_ROW, G_ROW, elements from one token to the next; GATE 0 (g is the log-decay, f32, and beta
// f32), 1 (softplus) or 2 (bounded) of bf16 z and beta; PER_HEAD.
#include "delta_chunk.cuh"

constexpr float LOG2_E = 1.4426950408889634f, L2_EPS = 1e-6f, LEAST_EXPONENT = -117.0f;

struct Args {
  const __nv_bfloat16 *q, *k;
  const void *g, *beta;
  unsigned char* tiles;
  float* last;
  int* wild;  // by block, or null: whether the chunk is left to the careful kernel
  const float *a_log, *bias;
  const int *first, *count;
  long long q_h, k_h, g_h, beta_t, beta_h;
  int heads, group, num_tokens, span;
  float scale, lower;
};

struct __align__(1024) Shared {
  unsigned char x[TILE], y[TILE], z[TILE];  // tiles of 64 rows: two groups of 64 columns
  unsigned char t[SQUARE], u[SQUARE];
  float2 sums[16][256];  // of the decay, by row and thread: each reads its own
  float totals[4][K];    // sums of the decay over 16 rows
  float norms[2][2][C];  // [q or k][column half]
  float beta[C];
#if CAREFUL
  float kept[2][32][128];  // accumulators of each warpgroup
#endif
};

#if GATE
typedef __nv_bfloat16 Decay;
typedef u32 Decays;  // of two columns
__device__ __forceinline__ Decays decays(const Decay* from) {
  return PER_HEAD ? *reinterpret_cast<const unsigned short*>(from) : *reinterpret_cast<const u32*>(from);
}
__device__ __forceinline__ float2 floats_of(Decays x) { return floats_of_bf16(x); }
#else
typedef float Decay;
typedef float2 Decays;
__device__ __forceinline__ Decays decays(const Decay* from) {
  return PER_HEAD ? make_float2(*from, 0.0f) : *reinterpret_cast<const float2*>(from);
}
__device__ __forceinline__ float2 floats_of(Decays x) { return x; }
#endif

// A chunk's inputs, in the registers of the thread that has 16 rows of two columns: of q, k and of the decay; and one
// beta of the first 64 threads. Zeros behind the last token.
struct Chunk {
  int head, count;
  long long block;
  u32 q[16], k[16];
  Decays g[16];
  float beta, rate;
  float2 bias;
};

template <bool FULL, class Pair, class From, class Load>
__device__ __forceinline__ void load_rows(Pair (&x)[16], const From* from, int row, int real, Load one) {
#pragma unroll
  for (int r = 0; r < 16; r++) {
    x[r] = Pair();
    if (FULL || r < real) x[r] = one(from + r * row);
  }
}
template <bool FULL>
__device__ __forceinline__ void load(
    Chunk& chunk, const __nv_bfloat16* q, const __nv_bfloat16* k, const Decay* g, int real) {
  auto pair = [](const __nv_bfloat16* from) { return *reinterpret_cast<const u32*>(from); };
  load_rows<FULL>(chunk.g, g, G_ROW, real, decays);
  load_rows<FULL>(chunk.q, q, Q_ROW, real, pair);
  load_rows<FULL>(chunk.k, k, K_ROW, real, pair);
}

// The log-decay of x = z + bias in powers of two; rate = e^a_log.
__device__ __forceinline__ float log_decay(float x, float rate, float lower) {
#if GATE == 1
  float y = power_of_2(-LOG2_E * fabsf(x));
  float softplus = LOG2_E * fmaxf(x, 0.0f) + (y < 1e-3f ? LOG2_E * (y - 0.5f * y * y) : log_of_2(1.0f + y));
  return -rate * softplus;
#else
  return lower * LOG2_E * inverse_of(1.0f + power_of_2(-LOG2_E * rate * x));
#endif
}

__device__ __forceinline__ void keep_sums(Shared& shared, int r, int thread, float2 x) {
  u32 at = shared_address(&shared.sums[r][thread]);
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ float2 kept_sums(Shared& shared, int r, int thread) {
  float2 x;
  u32 at = shared_address(&shared.sums[r][thread]);
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ void fetch(const Args& args, int block, Chunk& chunk) {
  int thread = threadIdx.x, warp = thread >> 5, n = block / args.heads, head = block % args.heads, first, count;
  if (args.first) {
    first = args.first[n];
    count = args.count[n];
  } else {
    int per = (args.span + C - 1) / C, inside = n % per * C;
    first = n / per * args.span + inside;
    count = min(min(args.span - inside, C), args.num_tokens - first);
  }
  int row0 = 16 * (warp >> 1), col = 64 * (warp & 1) + 2 * (thread & 31);
  chunk.head = head, chunk.count = count, chunk.block = block;
  long long token = first + row0;
  const __nv_bfloat16* q = args.q + token * Q_ROW + head / args.group * args.q_h + col;
  const __nv_bfloat16* k = args.k + token * K_ROW + head / args.group * args.k_h + col;
  const Decay* g = static_cast<const Decay*>(args.g) + token * G_ROW + head * args.g_h + (PER_HEAD ? 0 : col);
  if (count == C) load<true>(chunk, q, k, g, C);
  else load<false>(chunk, q, k, g, count - row0);
  chunk.beta = 0.0f;
  if (thread < min(C, count)) {
    long long at = (first + thread) * args.beta_t + head * args.beta_h;
#if GATE
    chunk.beta = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(args.beta)[at]);
#else
    chunk.beta = reinterpret_cast<const float*>(args.beta)[at];
#endif
  }
#if GATE
  chunk.bias = make_float2(args.bias[PER_HEAD ? head : head * K + col], PER_HEAD ? 0.0f : args.bias[head * K + col + 1]);
  chunk.rate = args.a_log[head];
#endif
}

__device__ __forceinline__ void one_chunk(const Args& args, Shared& shared, Chunk& chunk) {
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int part = warp >> 1, row0 = 16 * part, col = 64 * (warp & 1) + 2 * lane;
  long long block = chunk.block;
  u32 (&q)[16] = chunk.q, (&k)[16] = chunk.k;
  float2 p[16];
  if (thread < C) {
#if GATE
    shared.beta[thread] = thread < chunk.count ? inverse_of(1.0f + power_of_2(-LOG2_E * chunk.beta)) : 0.0f;
#else
    shared.beta[thread] = chunk.beta;
#endif
  }
  {
    float squares[16];
#pragma unroll
    for (int r = 0; r < 16; r++) {
      float2 x = floats_of_bf16(q[r]);
      squares[r] = x.x * x.x + x.y * x.y;
    }
    float sum = sums_of_16(squares, lane);
    if (!(lane & 1)) shared.norms[0][warp & 1][row0 + (lane >> 1)] = sum;
#pragma unroll
    for (int r = 0; r < 16; r++) {
      float2 x = floats_of_bf16(k[r]);
      squares[r] = x.x * x.x + x.y * x.y;
    }
    sum = sums_of_16(squares, lane);
    if (!(lane & 1)) shared.norms[1][warp & 1][row0 + (lane >> 1)] = sum;
  }
  // Running sums over the 16 rows, in powers of two.
  float2 sum = make_float2(0.0f, 0.0f);
#if GATE
  float rate = power_of_2(LOG2_E * chunk.rate);
#endif
#pragma unroll
  for (int r = 0; r < 16; r++) {
    p[r] = floats_of(chunk.g[r]);
#if GATE
    p[r].x = log_decay((PER_HEAD ? __uint_as_float(chunk.g[r] << 16) : p[r].x) + chunk.bias.x, rate, args.lower);
    p[r].y = PER_HEAD ? p[r].x : log_decay(p[r].y + chunk.bias.y, rate, args.lower);
    if (row0 + r >= chunk.count) p[r] = make_float2(0.0f, 0.0f);
#else
    p[r].x *= LOG2_E;
    p[r].y = PER_HEAD ? p[r].x : p[r].y * LOG2_E;
#endif
    p[r].x = sum.x += p[r].x;
    p[r].y = sum.y += p[r].y;
  }
  *reinterpret_cast<float2*>(&shared.totals[part][col]) = sum;
  bool calm = __syncthreads_and(sum.x >= LEAST_EXPONENT && sum.y >= LEAST_EXPONENT);
#if !CAREFUL
  if (args.wild && thread == 0) args.wild[block] = !calm;
  if (!calm) return;
#endif
  if (thread < 2 * C) {
    float* to = &shared.norms[thread >> 6][0][thread & 63];
    *to = rsqrtf(to[0] + to[C] + L2_EPS);
  }
  float2 earlier = make_float2(0.0f, 0.0f), later = earlier;  // sums over the 16-row parts before and behind this one
  float2 other = *reinterpret_cast<float2*>(&shared.totals[part ^ 1][col]);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 x = *reinterpret_cast<float2*>(&shared.totals[i][col]);
    if (i < part) earlier.x += x.x, earlier.y += x.y;
    if (i > part) later.x += x.x, later.y += x.y;
  }
  if (part == 3) {
    float2 all = make_float2(power_of_2(earlier.x + sum.x), power_of_2(earlier.y + sum.y));
    *reinterpret_cast<float2*>(args.last + block * K + col) = all;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 16; r += 4) {
    float q_norm[4], k_norm[4];
    four_shared(q_norm, &shared.norms[0][0][row0 + r]);
    four_shared(k_norm, &shared.norms[1][0][row0 + r]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float2 x = floats_of_bf16(q[r + i]), y = floats_of_bf16(k[r + i]);
      q[r + i] = half_pair(x.x * q_norm[i], x.y * q_norm[i]);
      k[r + i] = half_pair(y.x * k_norm[i], y.y * k_norm[i]);
    }
  }

  // Pairs across the middle of the chunk.
  u32 x_at = shared_address(shared.x), y_at = x_at + TILE, z_at = y_at + TILE;
  u32 own = (warp & 1) * (TILE / 2) + row0 * 128 + (lane & 3) * 4;  // where this thread's numbers of row r lie in a tile
  bool upper = part >= 2;
#define AT(r) (own + (r) * 128 + (((lane >> 2) ^ ((r) & 7)) << 4))
  {
    float sign = upper ? 1.0f : -1.0f;
    bool outer = part == 0 || part == 3;
    float2 offset = upper ? make_float2(0.0f, 0.0f) : sum;
    if (outer) offset.x += other.x, offset.y += other.y;
#pragma unroll
    for (int r = 0; r < 16; r++) {
      u32 e = half_pair(power_of_2(fmaf(sign, p[r].x, offset.x)), power_of_2(fmaf(sign, p[r].y, offset.y)));
      store_shared(x_at + AT(r), half_product(k[r], e));
      store_shared(y_at + AT(r), half_product(q[r], e));
      keep_sums(shared, r, thread, p[r]);
    }
  }
  shared_fence();
  __syncthreads();
  bool second = warp >= 4;
  float across[16];
  pairs_with_32(across, second ? y_at : x_at, x_at);

  // What the scan takes: decays from the beginning of the chunk and to its end.
  {
    unsigned char* to = args.tiles + block * BLOCK;
    later.x += sum.x, later.y += sum.y;
#pragma unroll
    for (int r = 0; r < 16; r += 4) {  // four at a time: the loads and exponentials of one wait for nobody else's
      float2 g[4], up[4], down[4];
#pragma unroll
      for (int i = 0; i < 4; i++) g[i] = kept_sums(shared, r + i, thread);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        up[i] = make_float2(power_of_2(g[i].x + earlier.x), power_of_2(g[i].y + earlier.y));
        down[i] = make_float2(power_of_2(later.x - g[i].x), power_of_2(later.y - g[i].y));
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 x = floats_of_half(q[r + i]), y = floats_of_half(k[r + i]);
        store_shared(z_at + AT(r + i), half_product(k[r + i], half_pair(up[i].x, up[i].y)));
        store_global(to + AT(r + i) + QD_AT, bf16_pair(x.x * (up[i].x * args.scale), x.y * (up[i].y * args.scale)));
        store_global(to + AT(r + i) + KD_AT, bf16_pair(y.x * down[i].x, y.y * down[i].y));
      }
    }
  }

  // Pairs within each half.
  float near[32];
  int row = 16 * (warp & 3) + (lane >> 2), column = 2 * (lane & 3);
#if !CAREFUL
  {
    // Row i of a pair is decayed by what row j is with the opposite sign: three tiles, for which two places are free.
    u32 i_at = second ? y_at : x_at;
    float2 offset = part & 1 ? make_float2(0.0f, 0.0f) : sum;
    u32 j_at = shared_address(shared.t);  // t and u lie together and are not needed yet
#pragma unroll
    for (int r = 0; r < 16; r += 4) {
      float2 g[4];
#pragma unroll
      for (int i = 0; i < 4; i++) g[i] = kept_sums(shared, r + i, thread);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float2 x = floats_of_half(k[r + i]), y = floats_of_half(q[r + i]);
        float2 e = make_float2(offset.x - g[i].x, offset.y - g[i].y);
        float2 up = make_float2(power_of_2(-e.x), power_of_2(-e.y));
        store_shared(j_at + AT(r + i), bf16_pair(x.x * power_of_2(e.x), x.y * power_of_2(e.y)));
        k[r + i] = bf16_pair(x.x * up.x, x.y * up.y);
        q[r + i] = bf16_pair(y.x * up.x, y.y * up.y);
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 16; r++) {
      store_shared(x_at + AT(r), k[r]);
      store_shared(y_at + AT(r), q[r]);
    }
    shared_fence();
    __syncthreads();
    pairs_with_64(near, i_at, j_at);
    if ((warp & 3) >= 2) {
#pragma unroll
      for (int i = 0; i < 16; i++) near[i] = across[i];
    }
  }
#else
  {
    float(&kept)[32][128] = shared.kept[second];
#pragma unroll
    for (int r = 0; r < 16; r++) p[r] = kept_sums(shared, r, thread);
#pragma unroll
    for (int i = 0; i < 16; i++) kept[i][thread & 127] = across[i];
    // Where 8 rows stay above the bound, all pairs within 16 rows are decayed to their middle at once.
    float2 ahead = p[7], behind = make_float2(p[15].x - p[7].x, p[15].y - p[7].y);
    bool mild = __syncthreads_and(ahead.x >= LEAST_EXPONENT && ahead.y >= LEAST_EXPONENT &&
                                  behind.x >= LEAST_EXPONENT && behind.y >= LEAST_EXPONENT);
#pragma unroll
    for (int level = 4; level >= -1; level--) {  // -1: a row with itself
      if (mild && level < 4) break;
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 16; r++) {
        float2 e = make_float2(0.0f, 0.0f);
        if (level == 4) {
          e = part & 1 ? p[r] : make_float2(sum.x - p[r].x, sum.y - p[r].y);
        } else if (level >= 0) {
          const int boundary = ((r >> level | 1) << level) - 1;  // the last row of the lower half
          bool above = r > boundary;
          e.x = above ? p[r].x - p[boundary].x : p[boundary].x - p[r].x;
          e.y = above ? p[r].y - p[boundary].y : p[boundary].y - p[r].y;
        }
        u32 factor = half_pair(power_of_2(e.x), power_of_2(e.y));
        store_shared(x_at + AT(r), half_product(k[r], factor));
        store_shared(y_at + AT(r), half_product(q[r], factor));
      }
      shared_fence();
      __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; half++) {  // of the columns
        float some[16];
        pairs_with_32(some, second ? y_at : x_at, x_at + half * 32 * 128);
#pragma unroll
        for (int i = 0; i < 16; i++) {
          int at_i = row + ((i & 2) << 2), at_j = 32 * half + 8 * (i >> 2) + column + (i & 1);
          if (level >= 0 ? same_level(at_i, at_j, level) : at_i == at_j) kept[16 * half + i][thread & 127] = some[i];
        }
      }
    }
    if (mild) {
      u32 j_at = shared_address(shared.t);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 16; r++) {
        float2 e = make_float2(p[7].x - p[r].x, p[7].y - p[r].y), x = floats_of_half(k[r]), y = floats_of_half(q[r]);
        float2 up = make_float2(power_of_2(-e.x), power_of_2(-e.y));
        store_shared(j_at + AT(r), bf16_pair(x.x * power_of_2(e.x), x.y * power_of_2(e.y)));
        store_shared(x_at + AT(r), bf16_pair(x.x * up.x, x.y * up.y));
        store_shared(y_at + AT(r), bf16_pair(y.x * up.x, y.y * up.y));
      }
      shared_fence();
      __syncthreads();
      pairs_with_64(near, second ? y_at : x_at, j_at);
#pragma unroll
      for (int i = 0; i < 32; i++) {
        int at_i = row + ((i & 2) << 2), at_j = 8 * (i >> 2) + column + (i & 1);
        if ((at_i ^ at_j) < 16) kept[i][thread & 127] = near[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) near[i] = kept[i][thread & 127];  // where i < j nothing, which is not taken below
  }
#endif
#pragma unroll
  for (int i = 0; i < 32; i++) {
    int at_i = row + ((i & 2) << 2), at_j = 8 * (i >> 2) + column + (i & 1);
    near[i] = (second ? at_i >= at_j : at_i > at_j) ? near[i] : 0.0f;
  }

  if (second) {
    unsigned char* to = args.tiles + block * BLOCK + A_AT + row * 128 + (lane & 3) * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 at = (i ^ (row & 7)) << 4;
      store_global(to + at, bf16_pair(near[4 * i] * args.scale, near[4 * i + 1] * args.scale));
      store_global(to + at + 1024, bf16_pair(near[4 * i + 2] * args.scale, near[4 * i + 3] * args.scale));
    }
    __syncthreads();  // the tile of rows j, which lies where t and u do, has been read
  } else {
    float beta_low = shared.beta[row], beta_high = shared.beta[row + 8];
    u32 m[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float beta = i & 1 ? beta_high : beta_low;
      m[i] = half_pair(near[2 * i] * beta, near[2 * i + 1] * beta);
    }
    __syncthreads();
    u32 t[16];
    inverse(t, m, shared_address(shared.t), shared_address(shared.u), warp, lane);
    unsigned char* to = args.tiles + block * BLOCK + T_AT + row * 128 + (lane & 3) * 4;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float2 beta = *reinterpret_cast<float2*>(&shared.beta[8 * (i >> 1) + column]), x = floats_of_half(t[i]);
      x.x *= beta.x, x.y *= beta.y;
      store_global(to + ((i >> 1 ^ (row & 7)) << 4) + (i & 1) * 1024, bf16_pair(x.x, x.y));
      t[i] = half_pair(-x.x, -x.y);
    }
    store_square(shared_address(shared.t), t, warp, lane);
    shared_fence();
  }
  __syncthreads();
  // w, of which each warpgroup has 64 columns.
  u32 left = opaque(tile_low(shared_address(shared.t), 1024));
  u32 right = opaque(tile_low(z_at + (second ? TILE / 2 : 0), 1024));
  product_fence();
#pragma unroll
  for (int step = 0; step < 4; step++)
    half_64x64_rows(near, descriptor(left + step * 2), descriptor(right + step * 128), step > 0);
  finish();
  hold(near);
  unsigned char* to = args.tiles + block * BLOCK + W_AT + (second ? TILE / 2 : 0) + row * 128 + (lane & 3) * 4;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 at = (i ^ (row & 7)) << 4;
    store_global(to + at, bf16_pair(near[4 * i], near[4 * i + 1]));
    store_global(to + at + 1024, bf16_pair(near[4 * i + 2], near[4 * i + 3]));
  }
}

#if CAREFUL
extern "C" __global__ void __launch_bounds__(256, 1) local(const Args args, int num_chunks) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int at_once = 64;  // chunks looked at together
  for (int base = blockIdx.x * at_once; base < args.heads * num_chunks; base += gridDim.x * at_once) {
    int mine = base + threadIdx.x;
    bool found = threadIdx.x < at_once && mine < args.heads * num_chunks && args.wild[mine];
    if (!__syncthreads_or(found)) continue;
    for (int i = 0; i < at_once; i++)
      if (__syncthreads_or(found && threadIdx.x == i)) {
        Chunk chunk;
        fetch(args, base + i, chunk);
        one_chunk(args, shared, chunk);
      }
  }
}
#else
extern "C" __global__ void __launch_bounds__(256, 2) local(const Args args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Chunk chunk;
  fetch(args, blockIdx.y * args.heads + blockIdx.x, chunk);
  one_chunk(args, *reinterpret_cast<Shared*>(memory), chunk);
}
#endif
