// One token of the gated delta rule for every row, from the projections to the input of the output projection: short
// convolutions, decay, rule, gated output norm. The state [128, 128] f32 of a head is read once and written once.
//
// A block of threads does one value head of one row; the hardware deals blocks to multiprocessors as they come free,
// which matters: they do not get equal shares of the memory's bandwidth. Warps of the first kind hold the state in
// registers, 128 / WARPS rows a warp, four columns a lane. Four warps of the second kind, one thread a channel, make
// what the rule needs of q, k, v and the gates, and behind the rule they norm its output. States and all else that is
// kept between steps are read before the kernel ahead has ended, and the one behind is let in at once to do likewise.
//
// With S' = e^g S the rule is u = beta (v - S'^T k), S <- S' + k u^T, o = S^T q = S'^T q + (k.q) u: one pass over the
// state for both sums, one for the update. Keys and queries go in as they are; what divides them by their lengths is
// multiplied to the sums, so that nobody waits for it.
//
// Defines: CLUSTERED (a key head has several value heads, whose blocks are a cluster: none moves the windows of q and k
// on before all have read them); PER_HEAD (decay a head, not a channel); BOUNDED (decay); SILU (output gate, else a
// sigmoid); RULE_WARPS (warps of the first kind), STREAM (states pass by the L1 cache).

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;
typedef long long i64;

constexpr int WIDTH = 128, TAPS = 4, STATE = WIDTH * WIDTH;
constexpr int WARPS = RULE_WARPS, RULE = WARPS * 32, THREADS = RULE + WIDTH;  // threads of the first kind, and all
constexpr int ROWS = WIDTH / WARPS;                       // of the state that a warp holds
constexpr int READY = 1, SUMMED = 2, UPDATED = 3, AROUND = 4, DONE = 5;  // named barriers

struct Args {
    const bf16 *q, *k, *v, *z, *beta, *gate;                // raw projections, the last dimension contiguous
    i64 q_row, k_row, v_row, z_row, beta_row, gate_row;     // elements from one token to the next
    const float *q_taps, *k_taps, *v_taps, *a_log, *dt_bias, *norm;
    float *state;
    bf16 *q_window, *k_window, *v_window;
    i64 state_block, q_block, k_block, v_block;             // elements from one block number to the next
    const int *table, *start;
    i64 table_row;
    bf16 *out;
    int heads, group;                                       // group: value heads of a key head
    float lower, eps;
    int settled;                                            // what is kept may be read before kernels ahead end
};

struct Shared {
    float4 coef[WIDTH];  // of a key channel: decay * k, decay * q, decay, k
    float part[WARPS][2][WIDTH];
    float v[WIDTH], update[WIDTH], seen[WIDTH];
    float sums[2][4][4];
    float beta, k_scale;
};

struct Place {
    int row, head, key, block;  // block: number in the pool, negative where nothing is kept
    bool fresh;                 // the row starts from zeros
};

__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void tell(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void wait_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void near(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }

// Sums over the 128 threads of the second kind, in every one of them.
template <int N>
__device__ __forceinline__ void sum_all(float (&x)[N], float (*room)[4], int channel) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int step = 16; step; step >>= 1) x[n] += __shfl_xor_sync(0xffffffffu, x[n], step);
    if (channel % 32 == 0)
#pragma unroll
        for (int n = 0; n < N; ++n) room[n][channel / 32] = x[n];
    meet(AROUND, WIDTH);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float4 sums = *reinterpret_cast<const float4 *>(room[n]);
        x[n] = (sums.x + sums.y) + (sums.z + sums.w);
    }
}

// silu of a convolution, rounded: taps against three old inputs and the token's own.
__device__ __forceinline__ float convolved(float4 taps, const bf16 (&old)[TAPS - 1], bf16 now) {
    const float y = fmaf(taps.w, __bfloat162float(now), fmaf(taps.z, __bfloat162float(old[2]),
        fmaf(taps.y, __bfloat162float(old[1]), taps.x * __bfloat162float(old[0]))));
    return rounded(y * sigmoid(y));
}

// e^g from raw decay and bias together, z, and the logarithm of the rate.
__device__ __forceinline__ float decay_of(const Args &a, float z, float log_rate) {
    const float rate = __expf(log_rate);
#if BOUNDED
    return __expf(a.lower * sigmoid(rate * z));
#else
    return __expf(-rate * (fmaxf(z, 0.0f) + __logf(1.0f + __expf(-fabsf(z)))));
#endif
}

__device__ __forceinline__ void read_window(const bf16 *from, bool fresh, bf16 (&into)[TAPS - 1]) {
#pragma unroll
    for (int e = 0; e < TAPS - 1; ++e) into[e] = fresh ? __float2bfloat16(0.0f) : from[e];
}

__device__ __forceinline__ void move_window(bf16 *to, const bf16 (&old)[TAPS - 1], bf16 now) {
    to[0] = old[1], to[1] = old[2], to[2] = now;
}

__device__ __forceinline__ void add_scaled(float4 &x, const float4 &s, float c) {
    x.x = fmaf(s.x, c, x.x), x.y = fmaf(s.y, c, x.y), x.z = fmaf(s.z, c, x.z), x.w = fmaf(s.w, c, x.w);
}

__device__ __forceinline__ float4 of_state(const float4 *from) {
#if STREAM
    float4 x;
    asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from));
    return x;
#else
    return *from;
#endif
}

// Threads of the first kind: both sums over the state, and its update.
__device__ __forceinline__ void apply_rule(const Args &a, Shared &m, const Place &of) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    float4 *own = reinterpret_cast<float4 *>(a.state + max(of.block, 0) * a.state_block + (i64)of.head * STATE);
    own += warp * ROWS * (WIDTH / 4) + lane;
    float4 s[ROWS], of_k = make_float4(0, 0, 0, 0), of_q = of_k;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) s[r] = of.fresh ? make_float4(0, 0, 0, 0) : of_state(own + r * (WIDTH / 4));
#if CLUSTERED
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
    meet(READY, THREADS);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float2 c = *reinterpret_cast<const float2 *>(&m.coef[warp * ROWS + r]);
        add_scaled(of_k, s[r], c.x);
        add_scaled(of_q, s[r], c.y);
    }
    reinterpret_cast<float4 *>(m.part[warp][0])[lane] = of_k;
    reinterpret_cast<float4 *>(m.part[warp][1])[lane] = of_q;
    meet(SUMMED, THREADS);
    if (thread < 2 * WIDTH) {
        const int which = thread / WIDTH, column = thread % WIDTH;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += m.part[w][which][column];
        if (which == 0)
            m.update[column] = m.beta * m.k_scale * (m.v[column] - m.k_scale * sum);
        else
            m.seen[column] = sum;
    }
    meet(UPDATED, RULE);
    tell(DONE, THREADS);
    if (of.block < 0) return;
    const float4 u = reinterpret_cast<const float4 *>(m.update)[lane];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float2 c = reinterpret_cast<const float2 *>(&m.coef[warp * ROWS + r])[1];  // decay, k
        own[r * (WIDTH / 4)] = make_float4(fmaf(s[r].x, c.x, c.y * u.x), fmaf(s[r].y, c.x, c.y * u.y),
            fmaf(s[r].z, c.x, c.y * u.z), fmaf(s[r].w, c.x, c.y * u.w));
    }
}

// Threads of the second kind: what comes before the rule, and the norm behind it.
__device__ __forceinline__ void around_rule(const Args &a, Shared &m, const Place &of) {
    const int channel = threadIdx.x - RULE, of_key = of.key * WIDTH + channel, of_head = of.head * WIDTH + channel;
    const i64 block = max(of.block, 0), row = of.row;
    bf16 *const q_window = a.q_window + block * a.q_block + (i64)of_key * (TAPS - 1);
    bf16 *const k_window = a.k_window + block * a.k_block + (i64)of_key * (TAPS - 1);
    bf16 *const v_window = a.v_window + block * a.v_block + (i64)of_head * (TAPS - 1);
    const bf16 *const q_at = a.q + row * a.q_row + of_key, *const k_at = a.k + row * a.k_row + of_key;
    const bf16 *const v_at = a.v + row * a.v_row + of_head, *const gate_at = a.gate + row * a.gate_row + of_head;
    const bf16 *const z_at = a.z + row * a.z_row + (PER_HEAD ? of.head : of_head);
    if (channel % 64 == 0) {  // what the kernel ahead may still write is only brought near, a line of 128 bytes each
        near(q_at), near(k_at), near(v_at), near(gate_at);
        if (!PER_HEAD) near(z_at);
    }
    bf16 q_old[TAPS - 1], k_old[TAPS - 1], v_old[TAPS - 1];
    read_window(q_window, of.fresh, q_old);
    read_window(k_window, of.fresh, k_old);
    read_window(v_window, of.fresh, v_old);
    const float4 q_taps = reinterpret_cast<const float4 *>(a.q_taps)[of_key];
    const float4 k_taps = reinterpret_cast<const float4 *>(a.k_taps)[of_key];
    const float4 v_taps = reinterpret_cast<const float4 *>(a.v_taps)[of_head];
    const float log_rate = a.a_log[of.head], bias = a.dt_bias[PER_HEAD ? of.head : of_head], norm = a.norm[channel];
    if (a.settled) wait_ahead();
    const bf16 q_now = *q_at, k_now = *k_at, v_now = *v_at;
    const float z = __bfloat162float(*z_at) + bias, raw_gate = __bfloat162float(*gate_at);
    const float beta = __bfloat162float(a.beta[row * a.beta_row + of.head]);
    const float q = convolved(q_taps, q_old, q_now), k = convolved(k_taps, k_old, k_now);
    const float decay = decay_of(a, z, log_rate);
    m.coef[channel] = make_float4(decay * k, decay * q, decay, k);
    tell(READY, THREADS);
#if CLUSTERED
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");  // this block has read its windows
#endif
    m.v[channel] = convolved(v_taps, v_old, v_now);
    float sums[3] = {q * q, k * k, q * k};
    sum_all(sums, m.sums[0], channel);
    const float q_scale = rsqrtf(sums[0] + 1e-6f) * 0.08838834764831845f, k_scale = rsqrtf(sums[1] + 1e-6f);
    if (channel == 0) m.beta = sigmoid(beta), m.k_scale = k_scale;
    tell(SUMMED, THREADS);
    const bool moves = of.block >= 0 && of.head % a.group == 0;
    if (of.block >= 0) move_window(v_window, v_old, v_now);
#if CLUSTERED
    if (moves) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
    if (moves) {
        move_window(q_window, q_old, q_now);
        move_window(k_window, k_old, k_now);
    }
    const float gate = norm * sigmoid(raw_gate) * (SILU ? raw_gate : 1.0f);
    meet(DONE, THREADS);
    const float o = rounded(q_scale * fmaf(m.update[channel], sums[2], m.seen[channel]));
    float squares[1] = {o * o};
    sum_all(squares, m.sums[1], channel);
    a.out[(row * a.heads + of.head) * WIDTH + channel] =
        __float2bfloat16(o * rsqrtf(squares[0] / WIDTH + a.eps) * gate);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_decode(const __grid_constant__ Args a) {
    __shared__ __align__(16) Shared m;
    let_next();
    if (!a.settled) wait_ahead();
    Place of;
    of.row = blockIdx.y, of.head = blockIdx.x, of.key = of.head / a.group;
    of.block = a.table[of.row * a.table_row];
    of.fresh = a.start[of.row] == 0 || of.block < 0;
    if (threadIdx.x < RULE)
        apply_rule(a, m, of);
    else
        around_rule(a, m, of);
}
