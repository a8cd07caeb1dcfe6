// The k largest scores of each query, exact, as ascending rows: one cluster of blocks a query, one launch.
//
// A score becomes a 32-bit key of the same order; 0 is a row that is never chosen. Each warp of the cluster owns one run
// of rows, so that prefixes over warps are prefixes over rows. First each thread takes the largest of its own keys: the
// k-th largest of those is no larger than the k-th largest key, so that whatever lies below its bin is out, and what is
// left mostly fits into a short list a warp. Every block then gets all candidates of the cluster, and finds the key of the k-th row in
// three passes over 11, 11 and 10 bits; where there are too many of them, the blocks count their own and read each
// other's counts. Nothing written depends on the order of atomics.
//
// CLUSTER: blocks of a cluster. CACHED: keys of a warp that are kept in shared memory; longer runs are read again.
// LISTED: candidates of a warp that are kept; where there are more, its whole run is gone through again. SENT: candidates
// that a block may send to the others.
//
// Tried beside it: FINE: the bin that leaves candidates over is cut again into 2048. MAXIMA: the largest score of every 16
// rows is there already: only where it may be among the best are the scores themselves read.

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int THREADS = 1024, WARPS = THREADS / 32, BINS = 2048, PASSES = 4 + FINE, STRIDE = 128, BATCH = 4;
constexpr u32 LEAST = 0x00800000u;  // the key of the lowest finite score
constexpr u32 FULL = 0xFFFFFFFFu, TOO_MANY = 0xFFFFFFFFu;
#define INFINITE __int_as_float(0x7F800000)

struct alignas(16) Shared {
    u32 counts[PASSES][BINS];
    u32 warp_sums[WARPS];
    u32 found[2];      // bin of the cut; keys above it
    u32 listed[2];     // this block's keys above the cut; at the cut
    u32 warp_listed[WARPS][2];
    u32 sent[8];            // candidates of each block of the cluster, or TOO_MANY
    u32 before[2];          // candidates of earlier blocks above the cut; at the cut
    int row, own;
};

__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ u32 remote_address(u32 address, u32 rank) {
    u32 out;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
    return out;
}

__device__ __forceinline__ uint2 remote_pair(const void* p, u32 rank) {
    uint2 out;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(out.x), "=r"(out.y)
                 : "r"(remote_address(shared_address(p), rank))
                 : "memory");
    return out;
}

__device__ __forceinline__ void remote_store(const void* p, u32 rank, u32 value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote_address(shared_address(p), rank)), "r"(value) : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_sync() {
    if constexpr (CLUSTER == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return CLUSTER == 1 ? 0 : rank;
}

__device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(score + 0.0f);  // -0.0 becomes 0.0
    u32 key = bits ^ (static_cast<int>(bits) < 0 ? 0xFFFFFFFFu : 0x80000000u);
    return score > -INFINITE ? key : 0u;  // a NaN is not larger
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Which run of the packed step the query belongs to: the last one that begins at or before it.
__device__ void find_row(const int* query_start, const int* start, int rows, int query, Shared& s) {
    for (int row = threadIdx.x; row < rows; row += THREADS) {
        int begin = query_start[row];
        if (begin <= query && query < query_start[row + 1]) {
            s.row = row;
            s.own = start[row] + query - begin;
        }
    }
}

// The largest bin such that it and all above hold at least `need` keys, or 0; leaves it and the count above in s.found.
// BLOCKS: of so many blocks the counts are added.
template <int BLOCKS>
__device__ void find_bin(Shared& s, int pass, u32 need) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int high = BINS - 1 - 2 * threadIdx.x;  // a thread has bins high and high - 1; threads go downwards
    u32 upper = 0, lower = 0;
#pragma unroll
    for (u32 rank = 0; rank < BLOCKS; ++rank) {
        uint2 pair = BLOCKS == 1 ? *reinterpret_cast<uint2*>(&s.counts[pass][high - 1])
                                  : remote_pair(&s.counts[pass][high - 1], rank);
        lower += pair.x;
        upper += pair.y;
    }
    u32 sum = upper + lower;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(FULL, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31) s.warp_sums[warp] = sum;
    if (threadIdx.x == 0) s.found[0] = s.found[1] = 0;
    __syncthreads();
    u32 before = __reduce_add_sync(FULL, lane < warp ? s.warp_sums[lane] : 0);
    u32 above = before + sum - upper - lower;
    if (above < need && need <= above + upper) {
        s.found[0] = high;
        s.found[1] = above;
    } else if (above + upper < need && need <= above + upper + lower) {
        s.found[0] = high - 1;
        s.found[1] = above + upper;
    }
    __syncthreads();
}

// scores: [queries, stride_query] f32. out: [queries, k] int64. query_start, start: of the step's rows, or null where
// query q stands at position first_own + q. first_query: number in the step of the first query here.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
top_k(const float* scores, i64 stride_query, int num_keys, i64* out, int k, const int* query_start,
      const int* start, int rows, int first_query, int first_own, int sinks, int window, int tail,
      const float* maxima, i64 stride_maxima) {
    extern __shared__ __align__(16) u32 dynamic[];
    Shared& s = *reinterpret_cast<Shared*>(dynamic);
    float* memory = reinterpret_cast<float*>(dynamic) + sizeof(Shared) / 4;
    const u32 rank = rank_in_cluster();
    const int query = blockIdx.x / CLUSTER, lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    if constexpr (CLUSTER > 1) cluster_arrive();  // so that no block writes to one that is not there yet
    for (int i = threadIdx.x; i < PASSES * BINS; i += THREADS) (&s.counts[0][0])[i] = 0;
    if (threadIdx.x < 2) s.before[threadIdx.x] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");  // from here on it reads what the kernel ahead writes
    asm volatile("griddepcontrol.launch_dependents;");
    if (query_start == nullptr) {
        if (threadIdx.x == 0) s.own = first_own + query;
    } else {
        find_row(query_start, start, rows, first_query + query, s);
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_wait();
    const int own = s.own;
    const int visible = max(0, min(num_keys, own + 1));
    const int run = (visible + CLUSTER * WARPS * STRIDE - 1) / (CLUSTER * WARPS * STRIDE) * STRIDE;  // rows of a warp
    const int begin = min(visible, (static_cast<int>(rank) * WARPS + warp) * run);
    const int count = min(visible, begin + run) - begin;
    const bool cached = !MAXIMA && run <= CACHED;
    const float* mine = scores + query * stride_query + begin;
    const bool aligned = (reinterpret_cast<u64>(mine) & 15) == 0;
    float* kept = memory + warp * (CACHED + 2 * LISTED);
    u32* pool = reinterpret_cast<u32*>(memory + WARPS * (CACHED + 2 * LISTED));  // [CLUSTER, SENT] keys of all blocks
    uint2* list = reinterpret_cast<uint2*>(kept + CACHED);
    const int tail_begin = tail > 0 ? (own + 1) / tail * tail : 0x7FFFFFFF;

    auto judged = [&](int i, float score) -> float {  // what is forced and may be chosen becomes infinite
        int row = begin + i;
        bool forced = row < sinks || row > own - window || row >= tail_begin;
        return forced && score > -INFINITE ? INFINITE : score;
    };
    auto forced_in = [&](int first, int rows) {
        return first < sinks || first + rows - 1 > own - window || first + rows - 1 >= tail_begin;
    };
    auto load = [&](int i) -> float4 {  // rows i to i + 3 of the run; -inf behind its end
        float4 four;
        if (aligned && i + 4 <= count) {
            four = __ldcg(reinterpret_cast<const float4*>(mine + i));
        } else {
            four.x = i < count ? __ldcg(mine + i) : -INFINITE, four.y = i + 1 < count ? __ldcg(mine + i + 1) : -INFINITE;
            four.z = i + 2 < count ? __ldcg(mine + i + 2) : -INFINITE;
            four.w = i + 3 < count ? __ldcg(mine + i + 3) : -INFINITE;
        }
        if (forced_in(begin + i, 4)) {
            four.x = judged(i, four.x), four.y = judged(i + 1, four.y);
            four.z = judged(i + 2, four.z), four.w = judged(i + 3, four.w);
        }
        return four;
    };
    auto add = [&](int pass, bool valid, u32 bin) {  // one atomic where all that count have the same bin
        u32 counting = __ballot_sync(FULL, valid);
        int first = __ffs(counting) - 1;
        u32 other = __shfl_sync(FULL, bin, max(first, 0));
        if (!__all_sync(FULL, !valid || bin == other)) {
            if (valid) atomicAdd(&s.counts[pass][bin], 1u);
        } else if (lane == first) {
            atomicAdd(&s.counts[pass][bin], static_cast<u32>(__popc(counting)));
        }
    };

    const bool choose = visible > k;  // else all rows that may be are chosen
    u32 floor = LEAST;  // no key below it is chosen
    float largest = -INFINITE;  // of this thread's scores; NaN is never the larger one
#if MAXIMA
    const int groups = (count + 15) / 16;  // of 16 rows
    const float* largest_of = maxima + query * stride_maxima + begin / 16;
    auto most_of = [&](int group, float most) {  // ``most`` where neither an end nor what is forced lies within
        if (begin + group * 16 + 16 <= visible && !forced_in(begin + group * 16, 16)) return most;
        most = -INFINITE;
        for (int i = group * 16; i < group * 16 + 16; i += 4) {
            const float4 four = load(i);
            most = fmaxf(most, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
        }
        return most;
    };
    for (int first = lane; first < groups; first += 8 * 32) {
        float most[8];
#pragma unroll
        for (int b = 0; b < 8; ++b) most[b] = first + b * 32 < groups ? __ldcg(largest_of + first + b * 32) : -INFINITE;
#pragma unroll
        for (int b = 0; b < 8; ++b) {
            const int group = first + b * 32;
            if (group >= groups) continue;
            most[b] = most_of(group, most[b]);
            if (group < CACHED) kept[group] = most[b];
            largest = fmaxf(largest, most[b]);
        }
    }
#else
#pragma unroll 8
    for (int i = lane * 4; i < run; i += STRIDE) {
        float4 four = load(i);
        if (cached) *reinterpret_cast<float4*>(kept + i) = four;
        largest = fmaxf(largest, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
    }
#endif
    if (choose && k <= CLUSTER * THREADS) {
        add(3, true, key_of(largest) >> 21);
        cluster_sync();
        find_bin<CLUSTER>(s, 3, k);
        floor = max(LEAST, s.found[0] << 21);
#if FINE
        const u32 bin = s.found[0], more = k - s.found[1], own_key = key_of(largest);
        add(4, own_key >> 21 == bin, own_key >> 10 & 2047);
        cluster_sync();
        find_bin<CLUSTER>(s, 4, more);
        floor = max(LEAST, bin << 21 | s.found[0] << 10);
#endif
    }
    const float lowest = score_of(floor);
    int listed = 0;  // candidates of this warp, in order; their places are counted even where the list is too short
    auto take = [&](const float4 (&fours)[BATCH], auto place_of) {  // the best of rows place_of(b) to + 3, ascending by lanes
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const float scores[4] = {fours[b].x, fours[b].y, fours[b].z, fours[b].w};
            const float most = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
            if (!__any_sync(FULL, most >= lowest)) continue;
            int place = listed;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 votes = __ballot_sync(FULL, scores[j] >= lowest);
                place += __popc(votes & ((1u << lane) - 1));
                listed += __popc(votes);
            }
            if (most >= lowest) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (scores[j] >= lowest) {
                        if (place < LISTED) list[place] = make_uint2(key_of(scores[j]), begin + place_of(b) + j);
                        ++place;
                    }
                }
            }
        }
    };
    const float4 nothing = make_float4(-INFINITE, -INFINITE, -INFINITE, -INFINITE);
#if MAXIMA
    for (int window = 0; window < groups; window += CACHED) {  // of groups, whose numbers replace their largest scores
        int hot = 0;
        for (int base = window; base < min(groups, window + CACHED); base += 32) {
            const int group = base + lane;
            float most = -INFINITE;
            if (group < groups) most = window == 0 ? kept[group] : most_of(group, __ldcg(largest_of + group));
            const u32 votes = __ballot_sync(FULL, most >= lowest);
            if (votes >> lane & 1) kept[hot + __popc(votes & ((1u << lane) - 1))] = __int_as_float(group);
            hot += __popc(votes);
        }
        __syncwarp();
        for (int first = 0; first < hot; first += BATCH * 8) {
            float4 fours[BATCH];
            int places[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                const int at = first + b * 8 + lane / 4;
                places[b] = at < hot ? __float_as_int(kept[at]) * 16 + lane % 4 * 4 : 0;
                fours[b] = at < hot ? load(places[b]) : nothing;
            }
            take(fours, [&](int b) { return places[b]; });
        }
        __syncwarp();
    }
#else
    for (int first = lane * 4; first < run; first += BATCH * STRIDE) {
        float4 fours[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int i = first + b * STRIDE;
            fours[b] = nothing;
            if (i < run && largest >= lowest) fours[b] = cached ? *reinterpret_cast<float4*>(kept + i) : load(i);
        }
        take(fours, [&](int b) { return first + b * STRIDE; });
    }
#endif
    __syncwarp();
    const bool short_list = listed <= LISTED;
    auto each = [&](auto use) {  // use(key, row) of every candidate, in order of rows over a warp's lanes; key 0 is none
        if (short_list) {
            for (int i = 0; i < listed; i += 32) {
                uint2 one = i + lane < listed ? list[i + lane] : make_uint2(0, 0);
                use(one.x, one.y);
            }
        } else {
            for (int i = 0; i < run; i += 32) {
                float score = -INFINITE;
                if (i + lane < count) score = cached ? kept[i + lane] : judged(i + lane, __ldcg(mine + i + lane));
                use(score >= lowest ? key_of(score) : 0u, static_cast<u32>(begin + i + lane));
            }
        }
    };

    u32 cut = 0, need = k, candidates = 0;
    bool shared_out = false;  // every block has all candidates
    if constexpr (CLUSTER > 1) {
        if (lane == 0) s.warp_listed[warp][0] = short_list ? listed : TOO_MANY;
        __syncthreads();
        const u32 other = s.warp_listed[lane][0];
        const bool all_short = __all_sync(FULL, other != TOO_MANY);
        const u32 mine_before = __reduce_add_sync(FULL, lane < warp ? other : 0), mine_all = __reduce_add_sync(FULL, other);
        const u32 number = all_short && mine_all <= SENT ? mine_all : TOO_MANY;
        if (threadIdx.x < CLUSTER) remote_store(&s.sent[rank], threadIdx.x, number);
        if (number != TOO_MANY) {
            for (int i = lane; i < listed; i += 32) {
                const u32 key = list[i].x;
#pragma unroll
                for (u32 to = 0; to < CLUSTER; ++to) remote_store(pool + rank * SENT + mine_before + i, to, key);
            }
        }
        cluster_sync();
        shared_out = true;
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from) {
            shared_out = shared_out && s.sent[from] != TOO_MANY;
            candidates += s.sent[from];
        }
        auto each_shared = [&](auto use) {  // use(valid, block, key), as many times in every lane: some warps a block
            constexpr int SHARE = WARPS / CLUSTER;
            const int from = warp / SHARE;
            for (u32 i = warp % SHARE * 32; i < s.sent[from]; i += SHARE * 32) {
                const bool valid = i + lane < s.sent[from];
                use(valid, from, valid ? pool[from * SENT + i + lane] : 0u);
            }
        };
        if (shared_out) {
            if (choose && candidates >= static_cast<u32>(k)) {
                each_shared([&](bool valid, int, u32 key) { add(0, valid, key >> 21); });
                __syncthreads();
                find_bin<1>(s, 0, need);
                cut = s.found[0], need -= s.found[1];
                each_shared([&](bool valid, int, u32 key) { add(1, valid && key >> 21 == cut, key >> 10 & 2047); });
                __syncthreads();
                find_bin<1>(s, 1, need);
                cut = cut << 11 | s.found[0], need -= s.found[1];
                each_shared([&](bool valid, int, u32 key) { add(2, valid && key >> 10 == cut, key & 1023); });
                __syncthreads();
                find_bin<1>(s, 2, need);
                cut = cut << 10 | s.found[0], need -= s.found[1];
            }
            u32 over = 0, tied = 0;
            each_shared([&](bool valid, int from, u32 key) {
                over += valid && from < static_cast<int>(rank) && key > cut;
                tied += valid && from < static_cast<int>(rank) && key == cut;
            });
            over = __reduce_add_sync(FULL, over), tied = __reduce_add_sync(FULL, tied);
            if (lane == 0) atomicAdd(&s.before[0], over), atomicAdd(&s.before[1], tied);
        }
    }
    if (choose && !shared_out) {
        each([&](u32 key, u32) { add(0, key != 0, key >> 21); });
        cluster_sync();
        find_bin<CLUSTER>(s, 0, need);
        cut = s.found[0];
        need -= s.found[1];
        each([&](u32 key, u32) { add(1, key != 0 && key >> 21 == cut, key >> 10 & 2047); });
        cluster_sync();
        find_bin<CLUSTER>(s, 1, need);
        cut = cut << 11 | s.found[0];
        need -= s.found[1];
        each([&](u32 key, u32) { add(2, key != 0 && key >> 10 == cut, key & 1023); });
        cluster_sync();
        find_bin<CLUSTER>(s, 2, need);
        cut = cut << 10 | s.found[0];
        need -= s.found[1];
    }
    if (cut == 0) need = 0;  // fewer rows may be chosen than are asked for

    u32 above = 0, at = 0;
    each([&](u32 key, u32) {
        above += key > cut;
        at += key == cut;
    });
    above = __reduce_add_sync(FULL, above);
    at = cut == 0 ? 0 : __reduce_add_sync(FULL, at);
    if (lane == 0) {
        s.warp_listed[warp][0] = above;
        s.warp_listed[warp][1] = at;
    }
    __syncthreads();
    u32 above_before = __reduce_add_sync(FULL, lane < warp ? s.warp_listed[lane][0] : 0);
    u32 at_before = __reduce_add_sync(FULL, lane < warp ? s.warp_listed[lane][1] : 0);
    u32 total;
    if (shared_out) {
        above_before += s.before[0], at_before += s.before[1];
        total = cut == 0 ? candidates : k;
    } else {
        if (warp == WARPS - 1 && lane == 0) {
            s.listed[0] = above_before + above;
            s.listed[1] = at_before + at;
        }
        cluster_sync();
        uint2 block = make_uint2(0, 0);
        if (lane < CLUSTER) block = CLUSTER == 1 ? make_uint2(s.listed[0], s.listed[1]) : remote_pair(s.listed, lane);
        above_before += __reduce_add_sync(FULL, lane < rank ? block.x : 0);
        at_before += __reduce_add_sync(FULL, lane < rank ? block.y : 0);
        total = __reduce_add_sync(FULL, block.x) + min(need, __reduce_add_sync(FULL, block.y));
        cluster_sync();  // nobody leaves while another reads its counts
    }

    i64* lines = out + static_cast<i64>(query) * k;
    const u32 below = (1u << lane) - 1;
    each([&](u32 key, u32 row) {
        u32 over = __ballot_sync(FULL, key > cut), tied = __ballot_sync(FULL, key == cut && cut != 0);
        u32 ties = at_before + __popc(tied & below);
        u32 place = above_before + __popc(over & below) + min(ties, need);
        if (key > cut || (tied >> lane & 1 && ties < need)) lines[place] = row;
        above_before += __popc(over);
        at_before += __popc(tied);
    });
    for (u32 i = total + rank * THREADS + threadIdx.x; i < static_cast<u32>(k); i += CLUSTER * THREADS) lines[i] = -1;
}
