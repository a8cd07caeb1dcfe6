// The gated delta rule from chunk to chunk: one block of threads a (slice of value columns, head, sequence).
//
// K = 128, bf16 values, chunks of 64 tokens. Read is what delta_chunk_local.cu wrote, tiles that go into shared memory as
// they are; per chunk  u = t v + w S;  o = qd S + a u;  S <- diag(last) S + kd^T u.
//
// Everything is held transposed, values first: a warpgroup has 64 value columns, S^T [64, 128] and u^T, o^T [64, 64] in
// registers. S^T and u^T are first operands of products as they stand, so nothing waits on shared memory between them.
// The warp behind the warpgroups copies what the next chunks need. It has two places for each tile, and fills one as soon
// as the chunk has gone past it: t, w and v of the chunk after next while o of this one is being made.
//
// With NORM a block has a head's 128 values (GROUPS is 2), and the gated output norm is done to o before it is written:
// gates come along with qd, kd and a, and the warpgroups tell each other their sums of squares.
//
// With APART (GROUPS is 1) one warpgroup goes from state to state, and a second one, to which it leaves S^T and u^T in
// shared memory, makes and writes o: the same products in the same order, off the way from chunk to chunk.
//
// Defines: GROUPS, warpgroups in a block (1 or 2); APART; NORM, and SILU for it (delta_norm.cuh).
#include "delta_chunk.cuh"
#if NORM
#include "delta_norm.cuh"
#endif

constexpr int STAGES = 2;
constexpr int FRONT = QD_AT, BACK = BLOCK - QD_AT;  // bytes of w and t; of qd, kd and a, which lie behind them

struct Args {
  const __nv_bfloat16* v;
  const unsigned char* tiles;
  const float* last;
  const float* old_state;
  float *new_state, *states;
  __nv_bfloat16* out;
  const int *starts, *chunks, *slots, *start;
  const __nv_bfloat16* gate;
  const float* weight;
  long long v_t, v_h, out_t, out_h, slot_stride, slots_stride, gate_t, gate_h;
  int heads, width, num_tokens, num_chunks, span;
  float eps;
};

struct __align__(1024) Front {
  unsigned char w[TILE], t[SQUARE], v[GROUPS][SQUARE];
};
struct __align__(1024) Back {
  unsigned char qd[TILE], kd[TILE], a[SQUARE];
#if NORM
  unsigned char gate[GROUPS][SQUARE];
#endif
  float last[K];
};
#if APART
struct __align__(1024) Middle {
  unsigned char s[TILE], u[SQUARE];
};
#endif
struct __align__(1024) Shared {
  Front front[STAGES];
  Back back[STAGES];
  unsigned char out[GROUPS][SQUARE];
#if NORM
  float squares[2][GROUPS][C];  // of this chunk's o and, where a warpgroup still reads it, the last one's
#endif
#if APART
  Middle middle[STAGES];
  u64 middle_full[STAGES], middle_empty[STAGES];
#endif
  u64 front_full[STAGES], front_empty[STAGES], back_full[STAGES], back_empty[STAGES];
};

// s [64, 64] (+)= a [64, 16] b [64, 16]^T; a lies in shared memory with its rows as columns
__device__ __forceinline__ void product_columns(float (&s)[32], u64 a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" O32 "}, %32, %33, p, 1, 1, 1, 0; }\n"
      : F32(s, 0) : "l"(a), "l"(b), "r"(keep));
}
// the same with a in registers
__device__ __forceinline__ void product_64x64(float (&s)[32], const u32* a, u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" O32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }\n"
      : F32(s, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
#define O64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"
// s [64, 128] += a [64, 16] b [16, 128]; a in registers, the numbers of a row of b together
__device__ __forceinline__ void product_64x128(float (&s)[64], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" O64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
      : F32(s, 0), F32(s, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void expect(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

struct Run {
  int begin, end, first_chunk, num_chunks, slot;
};

// Tokens [first, last) of the run's chunk n.
__device__ __forceinline__ void place(const Args& args, const Run& run, int n, int& first, int& last) {
  int per = (args.span + C - 1) / C, begin = run.begin + n / per * args.span;
  first = begin + n % per * C;
  last = min(min(first + C, begin + args.span), run.end);
}

// This block's values of a chunk's rows, which begin ``at`` numbers into x and lie ``apart``; zeros behind the last.
__device__ __forceinline__ void copy_values(
    unsigned char (&to)[GROUPS][SQUARE], const __nv_bfloat16* x, long long at, long long apart, int rows, int width,
    int lane) {
  const __nv_bfloat16* from = x + at + blockIdx.x * (64 * GROUPS);
#pragma unroll 8
  for (int i = lane; i < C * 8 * GROUPS; i += 32) {
    int row = i / (8 * GROUPS), piece = i % (8 * GROUPS);
    bool real = row < rows && (int)(blockIdx.x * 64 * GROUPS + piece * 8) < width;
    copy_16(shared_address(to) + piece_at<C>(row, piece), real ? from + row * apart + piece * 8 : x, real);
  }
}

__device__ __forceinline__ void fill(const Args& args, const Run& run, Shared& shared, int head, int lane) {
  for (int n = 0; n < run.num_chunks; n++) {
    int stage = n % STAGES, parity = n / STAGES & 1 ^ 1, first, last;
    long long block = (long long)(run.first_chunk + n) * args.heads + head;
    place(args, run, n, first, last);
    Front& front = shared.front[stage];
    barrier_wait(&shared.front_empty[stage], parity);
    if (lane == 0) {
      expect(&shared.front_full[stage], FRONT);
      copy_bulk(front.w, args.tiles + block * BLOCK, FRONT, &shared.front_full[stage]);
    }
    copy_values(front.v, args.v, first * args.v_t + head * args.v_h, args.v_t, last - first, args.width, lane);
    barrier_arrive_behind_copies(&shared.front_full[stage]);
    Back& back = shared.back[stage];
    barrier_wait(&shared.back_empty[stage], parity);
    if (lane == 0) {
      u64* full = &shared.back_full[stage];
      expect(full, BACK + K * 4);
      copy_bulk(back.qd, args.tiles + block * BLOCK + FRONT, BACK, full);
      copy_bulk(back.last, args.last + block * K, K * 4, full);
    }
#if NORM
    long long gate_at = first * args.gate_t + head * args.gate_h;
    copy_values(back.gate, args.gate, gate_at, args.gate_t, last - first, args.width, lane);
    barrier_arrive_behind_copies(&shared.back_full[stage]);
#endif
  }
}

// Where number (n, e) of the state's accumulators lies in [K, width]: a warp's lanes cover 8 columns of 4 rows at once.
__device__ __forceinline__ int place_in_state(int n, int e, int column, int lane, int width) {
  return (8 * n + 2 * (lane & 3) + (e & 1)) * width + column + (e >> 1) * 8;
}

#if NORM
// The norm of the four rows of o of which this thread has eight values each.
__device__ __forceinline__ void finish_rows(
    const Args& args, float (&squares)[GROUPS][C], uint4 (&o)[4], const uint4 (&gates)[4], int group, int thread) {
  const float4* weights = reinterpret_cast<const float4*>(args.weight) + 16 * group + 2 * (thread & 7);
  const float4 weight[2] = {__ldg(weights), __ldg(weights + 1)};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float sum = squares_of(o[i]);
    if ((thread & 7) == 0) squares[group][16 * i + (thread >> 3)] = sum;
  }
  named_sync(3, 128 * GROUPS);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = 16 * i + (thread >> 3);
    o[i] = gated(o[i], gates[i], weight, factor_of(squares[0][row], squares[1][row], args.eps));
  }
}
#endif

__device__ __forceinline__ void decay_state(float (&s)[64], const float* last, int lane) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float2 decay = *reinterpret_cast<const float2*>(&last[8 * i + 2 * (lane & 3)]);
    s[4 * i] *= decay.x, s[4 * i + 1] *= decay.y, s[4 * i + 2] *= decay.x, s[4 * i + 3] *= decay.y;
  }
}

// o of a chunk, turned over through shared memory, into its rows.
__device__ __forceinline__ void put_rows(const Args& args, Shared& shared, const float (&o)[32], const uint4 (&gates)[4],
                                         int n, int first, int rows, int head) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, thread = threadIdx.x & 127, group = GROUPS == 2 ? warp >> 2 : 0;
  int slice = blockIdx.x * (64 * GROUPS) + group * 64;
  named_sync(1 + group, 128);  // the last chunk's has been read
  u32 out_at = shared_address(shared.out[group]);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = 16 * i + (lane & 7) + (lane >> 4 << 3), piece = 2 * (warp & 3) + (lane >> 3 & 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(out_at + piece_at<C>(row, piece)),
                 "r"(bf16_pair(o[8 * i], o[8 * i + 1])), "r"(bf16_pair(o[8 * i + 2], o[8 * i + 3])),
                 "r"(bf16_pair(o[8 * i + 4], o[8 * i + 5])), "r"(bf16_pair(o[8 * i + 6], o[8 * i + 7])) : "memory");
  }
  named_sync(1 + group, 128);
  uint4 turned[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    turned[i] = *reinterpret_cast<uint4*>(shared.out[group] + piece_at<C>(16 * i + (thread >> 3), thread & 7));
#if NORM
  finish_rows(args, shared.squares[n & 1], turned, gates, group, thread);
#endif
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = 16 * i + (thread >> 3), piece = thread & 7;
    uint4 x = turned[i];
    if (row < rows && slice + piece * 8 < args.width)
      *reinterpret_cast<uint4*>(args.out + (first + row) * args.out_t + head * args.out_h + slice + piece * 8) = x;
  }
}

__device__ __forceinline__ void walk(const Args& args, const Run& run, Shared& shared, int head) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp >> 2;
  int slice = blockIdx.x * (64 * GROUPS) + group * 64, column = slice + 16 * (warp & 3) + (lane >> 2);
  bool real = slice < args.width;
  long long state_at = (long long)head * (K * args.width), slot_at = run.slot * args.slot_stride;
  float s[64];
  bool known = args.old_state && real && (!args.start || (args.start[blockIdx.z] > 0 && run.slot >= 0));
#pragma unroll
  for (int i = 0; i < 64; i++)
    s[i] = known ? args.old_state[slot_at + state_at + place_in_state(i >> 2, i & 3, column, lane, args.width)] : 0.0f;

  for (int n = 0; n < run.num_chunks; n++) {
    int stage = n % STAGES, parity = n / STAGES & 1, first, last;
    place(args, run, n, first, last);
    Front& front = shared.front[stage];
    Back& back = shared.back[stage];
    u32 low[32];
#pragma unroll
    for (int i = 0; i < 32; i++) low[i] = bf16_pair(s[2 * i], s[2 * i + 1]);
    barrier_wait(&shared.front_full[stage], parity);
    shared_fence();
    float u[32];
    u32 v_low = opaque(tile_low(shared_address(front.v[group]), 1024)), t_low = opaque(tile_low(shared_address(front.t), 1024));
    u32 w_low = opaque(tile_low(shared_address(front.w), 1024)), kd_low = opaque(tile_low(shared_address(back.kd), TILE / 2));
#if !APART
    float o[32];
    u32 qd_low = opaque(tile_low(shared_address(back.qd), 1024)), a_low = opaque(tile_low(shared_address(back.a), 1024));
#endif
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
      product_columns(u, descriptor(v_low + step * 128), descriptor(t_low + step * 2), step > 0);
#pragma unroll
    for (int step = 0; step < 8; step++)
      product_64x64(u, low + 4 * step, descriptor(w_low + (step >> 2) * (TILE / 32) + (step & 3) * 2), 1);
    product_commit();
#if APART
    Middle& middle = shared.middle[stage];
    barrier_wait(&shared.middle_empty[stage], parity ^ 1);
    store_square(shared_address(middle.s), reinterpret_cast<const u32(&)[16]>(low[0]), warp, lane);
    store_square(shared_address(middle.s) + SQUARE, reinterpret_cast<const u32(&)[16]>(low[16]), warp, lane);
#endif
    barrier_wait(&shared.back_full[stage], parity);
#if !APART
    product_fence();
#pragma unroll
    for (int step = 0; step < 8; step++)
      product_64x64(o, low + 4 * step, descriptor(qd_low + (step >> 2) * (TILE / 32) + (step & 3) * 2), step > 0);
    product_commit();
#endif
#if APART
    product_wait<0>();
    decay_state(s, back.last, lane);  // ahead of that wait the compiler would end each product before the next begins
#else
    decay_state(s, back.last, lane);
    product_wait<1>();
#endif
    hold(u);
    arrive_of_warp(&shared.front_empty[stage]);
    u32 update[16];
#pragma unroll
    for (int i = 0; i < 16; i++) update[i] = bf16_pair(u[2 * i], u[2 * i + 1]);
#if APART
    store_square(shared_address(middle.u), update, warp, lane);
    shared_fence();
    barrier_arrive(&shared.middle_full[stage]);
#endif
    hold(s);
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) product_64x128(s, update + 4 * step, descriptor(kd_low + step * 128));
    product_commit();
#if !APART
#pragma unroll
    for (int step = 0; step < 4; step++) product_64x64(o, update + 4 * step, descriptor(a_low + step * 2), 1);
    product_commit();
#endif
    product_wait<0>();
    hold(s);
#if !APART
    hold(o);
    uint4 gates[4];
#endif
#if NORM
    int thread = threadIdx.x & 127;
#pragma unroll
    for (int i = 0; i < 4; i++)
      gates[i] = *reinterpret_cast<uint4*>(back.gate[group] + piece_at<C>(16 * i + (thread >> 3), thread & 7));
    __syncwarp();  // every lane has its gates before the place is given back
#endif
    arrive_of_warp(&shared.back_empty[stage]);

#if !APART
    put_rows(args, shared, o, gates, n, first, last - first, head);
#endif
    if (args.states && real) {
      int per = (args.span + C - 1) / C;
      if (n % per == per - 1 || n == run.num_chunks - 1) {
        float* to = args.states + (long long)(n / per) * args.heads * (K * args.width) + state_at;
#pragma unroll
        for (int i = 0; i < 64; i++) to[place_in_state(i >> 2, i & 3, column, lane, args.width)] = s[i];
      }
    }
  }
  if (real && run.slot >= 0)
#pragma unroll
    for (int i = 0; i < 64; i++)
      args.new_state[slot_at + state_at + place_in_state(i >> 2, i & 3, column, lane, args.width)] = s[i];
}

#if APART
// The second warpgroup: o = S^T qd^T + u^T a^T, with what the first has left.
__device__ __forceinline__ void put_all(const Args& args, const Run& run, Shared& shared, int head) {
  for (int n = 0; n < run.num_chunks; n++) {
    int stage = n % STAGES, parity = n / STAGES & 1, first, last;
    place(args, run, n, first, last);
    Middle& middle = shared.middle[stage];
    Back& back = shared.back[stage];
    u32 s_low = opaque(tile_low(shared_address(middle.s), 1024)), u_low = opaque(tile_low(shared_address(middle.u), 1024));
    u32 qd_low = opaque(tile_low(shared_address(back.qd), 1024)), a_low = opaque(tile_low(shared_address(back.a), 1024));
    float o[32];
    const uint4 gates[4] = {};
    barrier_wait(&shared.middle_full[stage], parity);
    barrier_wait(&shared.back_full[stage], parity);
    product_fence();
#pragma unroll
    for (int step = 0; step < 8; step++) {
      u32 at = (step >> 2) * (TILE / 32) + (step & 3) * 2;
      product_64x64(o, descriptor(s_low + at), descriptor(qd_low + at), step > 0);
    }
#pragma unroll
    for (int step = 0; step < 4; step++) product_64x64(o, descriptor(u_low + step * 2), descriptor(a_low + step * 2), 1);
    finish();
    hold(o);
    arrive_of_warp(&shared.middle_empty[stage]);
    arrive_of_warp(&shared.back_empty[stage]);
    put_rows(args, shared, o, gates, n, first, last - first, head);
  }
}
#endif

// Two warpgroups with their states need more registers than an even share: a third one, of which one warp works, gives.
extern "C" __global__ void __launch_bounds__(GROUPS == 2 ? 384 : APART ? 288 : 160, 1) scan(const Args args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int head = blockIdx.y, r = blockIdx.z;
  Run run = {0, args.num_tokens, 0, args.num_chunks, 0};
  if (args.starts) {
    run.begin = args.starts[r], run.end = args.starts[r + 1];
    run.first_chunk = args.chunks[r], run.num_chunks = args.chunks[r + 1] - run.first_chunk;
    run.slot = args.slots[r * args.slots_stride];
    if (run.num_chunks == 0) return;
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&shared.front_full[i], 33);
      barrier_init(&shared.back_full[i], NORM ? 33 : 1);
      barrier_init(&shared.front_empty[i], 4 * GROUPS * OF_A_WARP);
      barrier_init(&shared.back_empty[i], 4 * (GROUPS + APART) * OF_A_WARP);
#if APART
      barrier_init(&shared.middle_full[i], 128);
      barrier_init(&shared.middle_empty[i], 4 * OF_A_WARP);
#endif
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128 * (GROUPS + APART)) {
#if GROUPS == 2
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
    if (threadIdx.x < 128 * (GROUPS + APART) + 32) fill(args, run, shared, head, threadIdx.x & 31);
#if APART
  } else if (threadIdx.x >= 128) {
    put_all(args, run, shared, head);
#endif
  } else {
#if GROUPS == 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
    walk(args, run, shared, head);
  }
}
