// Scores of single queries over their paged index keys: score = scale * sum over heads of w * relu(q . k).
//
// A warpgroup multiplies a tile of 64 keys by all heads of a query at once (wgmma), the keys as the left operand from
// registers: each thread takes 16-byte pieces of two keys, in any order, since a dot product does not care in which order
// it meets the channels as long as the queries follow. So codes are widened where they are multiplied, and the sum over
// heads stays within a quad of lanes. Blocks, one a multiprocessor, walk equal shares of all (query, tile); one warp of
// each does nothing but copy tiles from the pages into a ring in shared memory.
//
// KIND: 0 bf16 rows; 1 e4m3 codes with one f32 scale a row (idx_fp8_128), widened to f16; 2 e4m3 codes with an e8m0
// scale per 32 channels (idx_mxfp8_32), widened to bf16. Queries stay bf16: products are exact, sums are float32.
// WARPGROUPS that multiply. STAGES: tiles of the ring, a multiple of them: a place then belongs to one of them, which
// meets its fillings in turn. (A barrier tells apart two fillings in a row, no more, and copies end in any order.)
// MAXIMA: the largest score of every 16 keys is written as well, for the choice behind this.
// DIM: width of a key. HEADS: a multiple of 8. GROUPS: of up to 64 heads. PAGE: rows of a block, a multiple of 16.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using u32 = unsigned int;
using u64 = unsigned long long;
using u8 = unsigned char;
using i64 = long long;

constexpr int WORKERS = 128 * WARPGROUPS, THREADS = WORKERS + 128, MOST_QUERIES = 1024, TILE = 64;
constexpr int ELEMENT = KIND == 0 ? 2 : 1;           // bytes of a stored number
constexpr int WIDE = 2;                              // bytes of a multiplied one
constexpr int ROW = DIM * ELEMENT;                   // bytes of a key
constexpr int PIECES = ROW / 64;                     // 16-byte loads a thread and key
constexpr int STEPS = DIM * WIDE / 32;               // wgmmas a tile and group of heads
constexpr int CORE_ROW = DIM * WIDE / 16 * 128;      // bytes of 8 heads in shared memory
constexpr u32 FULL = 0xFFFFFFFFu;
constexpr int COPIED = PAGE < TILE ? PAGE : TILE;    // rows that lie together
constexpr int SCALES = KIND == 0 ? 0 : 4;            // bytes of a row's scales
constexpr int STAGE = TILE * (ROW + SCALES);
static_assert(ROW % 64 == 0 && PAGE % 16 == 0 && TILE % COPIED == 0 && PAGE % COPIED == 0, "copies of whole pages");
static_assert(STAGES % WARPGROUPS == 0, "a place of the ring belongs to one warpgroup");
static_assert(HEADS % 8 == 0 && (KIND == 0 || (DIM == 128) || (KIND == 1 && DIM == 64)), "4 bytes of scales a row");

struct Tile {
    uint4 piece[2][PIECES];
    u32 scale[2];
};

struct Shared {
    alignas(128) u8 ring[STAGES][STAGE];
    alignas(128) u8 q[GROUPS * 8 * CORE_ROW];
    float weights[GROUPS * 64];
    u64 full[STAGES], empty[STAGES];
    int ends[MOST_QUERIES];  // of the tiles of all queries up to each
    int warp_sums[WORKERS / 32];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    asm volatile(
        "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra AGAIN;}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void workers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

// Where a product finds the queries: core matrices of 8 heads and 16 bytes, CORE_ROW bytes from 8 heads to the next.
__device__ __forceinline__ u64 descriptor(u32 first, int offset) {
    return static_cast<u64>(CORE_ROW >> 4) << 32 | (first + (offset >> 4));
}

__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 q, int more) {
#define OPERANDS                                                                                                 \
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),             \
      "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),       \
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),     \
      "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])      \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(q), "r"(more)
#define RESULTS                                                                                                  \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "       \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, "
#define START "{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned."
    if constexpr (KIND == 1) {
        asm volatile(START "m64n64k16.f32.f16.f16 " RESULTS "p, 1, 1, 0;}" OPERANDS);
    } else {
        asm volatile(START "m64n64k16.f32.bf16.bf16 " RESULTS "p, 1, 1, 0;}" OPERANDS);
    }
}

__device__ __forceinline__ float positive(float x) {  // NaN stays NaN
    float out;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
    return out;
}

// Four e4m3 codes as two pairs of f16, exact.
__device__ __forceinline__ void widen_f16(u32& low, u32& high, u32 codes) {
    asm("{.reg .b16 x, y; mov.b32 {x, y}, %2; cvt.rn.f16x2.e4m3x2 %0, x; cvt.rn.f16x2.e4m3x2 %1, y;}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

// A pair of f16 times a pair of powers of two in bf16: exact in bf16, since codes have three bits behind the first.
__device__ __forceinline__ u32 scaled_bf16(u32 pair, u32 scales) {
    float2 wide = __half22float2(*reinterpret_cast<__half2*>(&pair));
    __nv_bfloat162 narrow = __floats2bfloat162_rn(wide.x, wide.y);
    __nv_bfloat162 scaled = __hmul2(narrow, *reinterpret_cast<__nv_bfloat162*>(&scales));
    return *reinterpret_cast<u32*>(&scaled);
}

// Place in shared memory of 4 bytes of a head's query: those that meet a key's channels `channel` on.
__device__ __forceinline__ int place(int head, int channel) {
    int step, half, lane;
    if constexpr (KIND == 1 || KIND == 2) {  // a word of 4 codes becomes one step
        step = channel / 64 * 4 + channel % 16 / 4, half = channel % 4 / 2, lane = channel % 64 / 16;
    } else {
        int byte = channel * ELEMENT;
        step = byte / 64 * 2 + byte % 16 / 8, half = byte % 8 / 4, lane = byte % 64 / 16;
    }
    return head / 8 * CORE_ROW + (2 * step + half) * 128 + head % 8 * 16 + lane * 4;
}

__device__ __forceinline__ u32 packed_pair(float x, float y) {
    u32 out;
    if constexpr (KIND == 1) {
        asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(out) : "f"(x), "f"(y));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(out) : "f"(x), "f"(y));
    }
    return out;
}

// A query's heads into shared memory, eight threads a head, and the weight each head's sum is multiplied by. q and
// stride_head in steps of 16 bytes.
__device__ void stage(const __nv_bfloat16* q, i64 stride_head, const float* weights, i64 stride_weight, Shared& s) {
    constexpr int SHARE = DIM / 8;
    for (int head = threadIdx.x / 8; head < GROUPS * 64; head += WORKERS / 8) {
        const int part = threadIdx.x % 8;
        float x[SHARE];
        float most = 0;
#pragma unroll
        for (int i = 0; i < SHARE; i += 8) {
            uint4 eight = make_uint4(0, 0, 0, 0);
            if (head < HEADS) eight = __ldg(reinterpret_cast<const uint4*>(q + head * stride_head + part * SHARE + i));
            const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[i + 2 * j] = __uint_as_float(pairs[j] << 16);
                x[i + 2 * j + 1] = __uint_as_float(pairs[j] & 0xFFFF0000u);
                most = fmaxf(most, fmaxf(fabsf(x[i + 2 * j]), fabsf(x[i + 2 * j + 1])));
            }
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, step));
        float up = 1, down = 1;
        if constexpr (KIND == 1) {  // a power of two that brings the head into the middle of f16: nothing is lost
            int exponent = __float_as_uint(most) >> 23;
            int by = exponent == 0 || exponent == 255 ? 127 : max(1, min(253, 267 - exponent));
            up = __uint_as_float(by << 23), down = __uint_as_float((254 - by) << 23);
        }
#pragma unroll
        for (int i = 0; i < SHARE; i += 2) {
            const u32 word = packed_pair(x[i] * up, x[i + 1] * up);
            *reinterpret_cast<u32*>(s.q + place(head, part * SHARE + i)) = word;
        }
        if (part == 0) s.weights[head] = head < HEADS ? weights[head * stride_weight] * down : 0.0f;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What a warp has of a tile in the ring.
__device__ __forceinline__ void take(Tile& tile, const u8* stage) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
#pragma unroll
        for (int c = 0; c < PIECES; ++c) {
            tile.piece[r][c] = *reinterpret_cast<const uint4*>(stage + row * ROW + c * 64 + lane % 4 * 16);
        }
        if constexpr (KIND != 0) tile.scale[r] = *reinterpret_cast<const u32*>(stage + TILE * ROW + row * 4);
    }
}

__device__ __forceinline__ u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

// The operand of step `step`: two words of each of a thread's keys.
__device__ __forceinline__ void operand(u32 (&a)[4], const Tile& tile, int step) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if constexpr (KIND == 1) {
            u32 x = word_of(tile.piece[r][step / 4], step % 4);
            widen_f16(a[r], a[2 + r], x);
        } else if constexpr (KIND == 2) {
            u32 x = word_of(tile.piece[r][step / 4], step % 4);
            // Channels of this piece lie in one block of 32: lanes 0 and 1 of a quad have the first, 2 and 3 the next.
            u32 exponent = tile.scale[r] >> (8 * (step / 4 * 2 + threadIdx.x % 4 / 2)) & 255;
            u32 scale = exponent == 255 ? 0x7FC0u : exponent == 0 ? 0x0040u : exponent << 7;
            widen_f16(a[r], a[2 + r], x);
            a[r] = scaled_bf16(a[r], scale | scale << 16), a[2 + r] = scaled_bf16(a[2 + r], scale | scale << 16);
        } else {
            a[r] = word_of(tile.piece[r][step / 2], step % 2 * 2);
            a[2 + r] = word_of(tile.piece[r][step / 2], step % 2 * 2 + 1);
        }
    }
}

// All heads of a group against a tile: under way when this returns.
__device__ __forceinline__ void begin_product(float (&d)[32], const u32 (&a)[STEPS][4], u32 first, int group) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        multiply(d, a[step], descriptor(first, group * 8 * CORE_ROW + step * 256), step > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// What a product reads and writes is taken to be in use until here: the compiler does not know by itself.
__device__ __forceinline__ void end_product(float (&d)[32], u32 (&a)[STEPS][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    }
}

// Adds a group's heads to the sums of a thread's two keys.
__device__ __forceinline__ void add_heads(float (&sums)[2], const float (&d)[32], const float* weights) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float2 w = *reinterpret_cast<const float2*>(weights + j * 8 + lane % 4 * 2);
        sums[0] += w.x * positive(d[4 * j]);
        sums[0] += w.y * positive(d[4 * j + 1]);
        sums[1] += w.x * positive(d[4 * j + 2]);
        sums[1] += w.y * positive(d[4 * j + 3]);
    }
}

__device__ __forceinline__ void store(float (&sums)[2], const u32 (&scales)[2], float* out, float* maxima, int first,
                                      int num, float scale) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sums[r] += __shfl_xor_sync(FULL, sums[r], 1);
        sums[r] += __shfl_xor_sync(FULL, sums[r], 2);
    }
    const int at = first + lane / 4 + lane % 4 * 8;
    if (lane % 4 < 2 && at < num) {
        float factor = KIND == 1 ? __uint_as_float(lane % 4 ? scales[1] : scales[0]) * scale : scale;
        out[at] = (lane % 4 ? sums[1] : sums[0]) * factor;
    }
#if MAXIMA
    float most = __int_as_float(0xFF800000);  // a NaN is never the larger one
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float factor = KIND == 1 ? __uint_as_float(scales[r]) * scale : scale;
        if (first + lane / 4 + 8 * r < num) most = fmaxf(most, sums[r] * factor);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, step));
    if (lane == 0 && first < num) maxima[first / 16] = most;
#endif
}

// ends[i]: tiles of queries 0..i.
__device__ void count_tiles(const int* start, int queries, Shared& s) {
    constexpr int EACH = MOST_QUERIES / WORKERS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * EACH;
    int mine[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        sum += first + i < queries ? start[first + i] / TILE + 1 : 0;
        mine[i] = sum;
    }
    int before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(FULL, before, step);
        before += lane >= step ? other : 0;
    }
    if (lane == 31 && threadIdx.x < WORKERS) s.warp_sums[warp] = before;
    __syncthreads();
    before += __reduce_add_sync(FULL, lane < min(warp, WORKERS / 32) ? s.warp_sums[lane] : 0) - sum;
    if (threadIdx.x < WORKERS) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) s.ends[first + i] = before + mine[i];
    }
    __syncthreads();
}

__device__ __forceinline__ int query_of(int tile, int queries, const Shared& s) {  // the first that ends behind it
    int query = 0;
#pragma unroll
    for (int step = MOST_QUERIES / 2; step > 0; step /= 2) {
        if (query + step <= queries && s.ends[query + step - 1] <= tile) query += step;
    }
    return query;
}

struct Keys {
    const u8* pool;
    i64 stride;  // bytes between block numbers
    const int* table;
    i64 stride_table;
    const int* start;
};

// One warp: tiles [first, last) into the ring, each lane the tile of its number.
__device__ void copy_tiles(const Keys& keys, int first, int last, int queries, Shared& s) {
    const int lane = threadIdx.x % 32;
    for (int base = first; base < last; base += 32) {
        const int tile = min(base + lane, last - 1), query = query_of(tile, queries, s);
        const int at = (tile - (query ? s.ends[query - 1] : 0)) * TILE;
        const int seen = keys.start[query] + 1 - at;
        const u8* from[TILE / COPIED];
        int copies = 0;
#pragma unroll
        for (int i = 0; i < TILE / COPIED; ++i) {
            if (i * COPIED >= seen) break;
            int row = at + i * COPIED;
            from[i] = keys.pool + keys.table[query * keys.stride_table + row / PAGE] * keys.stride + row % PAGE * ROW;
            copies = i + 1;
        }
        const int scales = (PAGE - at % PAGE) * ROW + at % PAGE * SCALES;  // of the first copy, seen from its codes
        for (int j = 0; j < min(32, last - base); ++j) {
            const int number = base - first + j, slot = number % STAGES;
            if (number >= STAGES) wait(&s.empty[slot], (number / STAGES - 1) & 1);
            if (lane == j) {
                const u32 barrier = shared_address(&s.full[slot]), to = shared_address(s.ring[slot]);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                             "r"(copies * COPIED * (ROW + SCALES))
                             : "memory");
#pragma unroll
                for (int i = 0; i < TILE / COPIED; ++i) {
                    if (i >= copies) break;
                    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                                 ::"r"(to + i * COPIED * ROW), "l"(from[i]), "r"(COPIED * ROW), "r"(barrier)
                                 : "memory");
                    if constexpr (SCALES > 0) {
                        asm volatile(
                            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                                to + TILE * ROW + i * COPIED * SCALES),
                            "l"(from[i] + scales), "r"(COPIED * SCALES), "r"(barrier)
                            : "memory");
                    }
                }
            }
            __syncwarp();
        }
    }
}

// Query t stands at position start[t] of row t. scores: [queries, stride_score] f32. pool: bytes of block 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
score_single(const __nv_bfloat16* q, i64 stride_query, i64 stride_head, const float* weights, i64 stride_weights,
             i64 stride_weight, const u8* pool, i64 stride_block, const int* table, i64 stride_table, const int* start,
             int queries, float scale, float* scores, i64 stride_score,
             float* maxima, i64 stride_maxima) {
    extern __shared__ __align__(128) u8 dynamic[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&s.full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 4;" ::"r"(shared_address(&s.empty[i])) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    // The choice of the best may be brought up meanwhile; it waits for the end of this grid.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    count_tiles(start, queries, s);
    const i64 total = s.ends[queries - 1];
    const int first = static_cast<int>(total * blockIdx.x / gridDim.x);
    const int last = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
    if (threadIdx.x >= WORKERS) {  // registers go to those who multiply
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x < WORKERS + 32) copy_tiles({pool, stride_block, table, stride_table, start}, first, last, queries, s);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        const int offset = threadIdx.x % 128 / 32 * 16;  // of this warp's keys in a tile
        int number = threadIdx.x / 128;                  // of this warpgroup's next tile, counted from the first
        int query = query_of(first, queries, s);
        const u32 queries_at = __shfl_sync(FULL, (shared_address(s.q) & 0x3FFFF) >> 4 | 128 >> 4 << 16, 0);
        for (int now = first; now < last; ++query) {
            const int begin = query ? s.ends[query - 1] : 0, end = min(last, s.ends[query]);
            const int num_keys = start[query] + 1;
            workers_sync();  // nobody multiplies by the query ahead of this one any more
            stage(q + query * stride_query, stride_head, weights + query * stride_weights, stride_weight, s);
            workers_sync();
            float* out = scores + query * stride_score;
            // A tile is taken while the one ahead of it is multiplied. Its place may be filled again when it has been
            // multiplied: only then it is surely out of shared memory, an arrival does not wait for loads under way.
            Tile tile;
            auto take_next = [&](int which) {
                if (first + which >= end) return;
                wait(&s.full[which % STAGES], which / STAGES & 1);
                take(tile, s.ring[which % STAGES]);
            };
            take_next(number);
            while (first + number < end) {
                const int next = number + WARPGROUPS;
                u32 a[STEPS][4];
                float d[32], sums[2] = {0, 0};
                const u32 scales[2] = {tile.scale[0], tile.scale[1]};
#pragma unroll
                for (int step = 0; step < STEPS; ++step) operand(a[step], tile, step);
                begin_product(d, a, queries_at, 0);
                if constexpr (KIND != 0) take_next(next);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    if (group > 0) begin_product(d, a, queries_at, group);
                    end_product(d, a);
                    add_heads(sums, d, s.weights + group * 64);
                }
                if (threadIdx.x % 32 == 0) arrive(&s.empty[number % STAGES]);
                if constexpr (KIND == 0) take_next(next);  // a plain tile is an operand itself: no registers for two
                store(sums, scales, out, maxima + query * stride_maxima, (first + number - begin) * TILE + offset, num_keys,
                      scale);
                number = next;
            }
            now = end;
        }
    }
}
