// A token of each row of logits: one block a row, nothing read back by the host.
//
// Weights exp((v - largest) / T) are f64, then whole numbers of 2^-44, so that sums do not depend on their order, and
// 2^18 of them fit 63 bits; what is less than half of 2^-44 of the likeliest is never drawn. Sorted order is likeliest
// first, lower id first. A place in it is looked for in a histogram of the distance from the largest logit, then among
// the numbers of one bin alone, which are sorted in shared memory; are they too many, the bin is halved by its bits
// until they are few or all the same.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define THREADS 1024
#define BINS 2048
#define FEW 2048
#define ONE 17592186044416.0  // 2^44
#define FAR 31.2              // exp(-31.2) < 2^-45
#define INFINITE __int_as_float(0x7f800000)

struct Shared {
  u64 mass[BINS], list[FEW], parts[32];
  u32 count[BINS], counts[32];
  u64 mass_found;
  u32 found, count_found, num, low, high, id;
};

struct Row {
  const float* logits;
  int vocab;
  double largest, inverse;  // 1 / T
  float top, scale;         // bins: (top - v) * scale
};

// The place in sorted order at which a count or a mass is reached: its id, its logit, the mass up to and with it.
struct Place {
  u32 id;
  float value;
  u64 mass;
};

// Floats in order as unsigned numbers, and back. -0 counts as 0, as comparisons have it.
__device__ __forceinline__ u32 key_of(float v) {
  const u32 bits = __float_as_uint(v == 0.f ? 0.f : v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ double depth_of(const Row& row, float v) { return ((double)v - row.largest) * row.inverse; }
__device__ __forceinline__ u64 weight_of(double z) { return z < -FAR ? 0 : __double2ull_rn(exp(z) * ONE); }
__device__ __forceinline__ u64 weight_of(const Row& row, float v) { return weight_of(depth_of(row, v)); }
__device__ __forceinline__ int bin_of(const Row& row, float v) {
  return (int)fminf((row.top - v) * row.scale, (float)(BINS - 1));
}

// ``what(id, logit)`` of every token, each thread's in rising order; four are on their way at once.
template <typename F>
__device__ __forceinline__ void each(const float* logits, int vocab, F what) {
  int i = threadIdx.x;
  for (; i + 3 * THREADS < vocab; i += 4 * THREADS) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = logits[i + j * THREADS];
#pragma unroll
    for (int j = 0; j < 4; ++j) what(i + j * THREADS, v[j]);
  }
  for (; i < vocab; i += THREADS) what(i, logits[i]);
}

// The sum of everybody's numbers up to and with one's own; the sum of all in ``all``.
template <typename T>
__device__ T scanned(T own, T* parts, T& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T other = __shfl_up_sync(~0u, own, d);
    if (lane >= d) own += other;
  }
  if (lane == 31) parts[warp] = own;
  __syncthreads();
  if (warp == 0) {
    T sum = parts[lane];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const T other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    parts[lane] = sum;
  }
  __syncthreads();
  if (warp) own += parts[warp - 1];
  all = parts[31];
  __syncthreads();
  return own;
}

// Among the two entries of a thread: the one at which ``rank`` (0: not asked) or ``wanted`` is reached, 2 if neither.
__device__ __forceinline__ int crossing(const u64* mass_at, const u32* count_at, u32 rank, u64 wanted) {
  for (int i = 0; i < 2; ++i) {
    const bool short_of = rank ? count_at[i] < rank : mass_at[i] < wanted;
    const bool reached = rank ? count_at[i + 1] >= rank : mass_at[i + 1] >= wanted;
    if (short_of && reached) return i;
  }
  return 2;
}

// Bitonic, largest first, of a power of two.
__device__ void sort(u64* list, int num) {
  for (int size = 2; size <= num; size *= 2)
    for (int step = size / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < num / 2; i += THREADS) {
        const int a = 2 * step * (i / step) + i % step, b = a + step;
        const u64 x = list[a], y = list[b];
        if ((x < y) == ((a & size) == 0)) list[a] = y, list[b] = x;
      }
      __syncthreads();
    }
}

// Of the tokens of one bin with keys in [low, high], more than FEW: halved until they are few or all the same.
__device__ void narrow(Shared& s, const Row& row, int bin, u32 rank, u64 wanted, u32& low, u32& high, u32& num,
                       u32& before, u64& mass) {
  if (threadIdx.x == 0) s.low = ~0u, s.high = 0;
  __syncthreads();
  each(row.logits, row.vocab, [&](int, float v) {
    if (bin_of(row, v) != bin || depth_of(row, v) < -FAR) return;
    atomicMin(&s.low, key_of(v));
    atomicMax(&s.high, key_of(v));
  });
  __syncthreads();
  low = s.low, high = s.high;
  while (num > FEW && low < high) {
    const u32 middle = low + (high - low) / 2 + 1;
    u32 own_count = 0, upper_count;
    u64 own_mass = 0, upper_mass;
    each(row.logits, row.vocab, [&](int, float v) {
      const u32 key = key_of(v);
      if (key >= middle && key <= high && bin_of(row, v) == bin) own_count += 1, own_mass += weight_of(row, v);
    });
    scanned<u32>(own_count, s.counts, upper_count);
    scanned<u64>(own_mass, s.parts, upper_mass);
    if (rank ? before + upper_count >= rank : mass + upper_mass >= wanted) {
      low = middle, num = upper_count;
    } else {
      high = middle - 1, num -= upper_count, before += upper_count, mass += upper_mass;
    }
  }
}

// Of ``num`` tokens that are all the same: as many, from the lowest id on, as reach what is asked for.
__device__ Place among_equals(Shared& s, const Row& row, u32 key, u32 num, u32 rank, u64 wanted, u32 before, u64 mass) {
  const u64 weight = weight_of(row, value_of(key));
  const u64 needed = rank ? rank - before : weight ? (wanted - mass + weight - 1) / weight : 1;
  const u32 equals = needed < num ? (u32)needed : num;
  u32 seen = 0;
  for (int first = 0; first < row.vocab && seen < equals; first += THREADS) {
    const int i = first + threadIdx.x;
    const bool same = i < row.vocab && key_of(row.logits[i]) == key;
    u32 some;
    const u32 upto = seen + scanned<u32>(same, s.counts, some);
    if (same && upto == equals) s.id = i;
    seen += some;
  }
  __syncthreads();
  return {s.id, value_of(key), mass + equals * weight};
}

// Where ``rank`` tokens (0: not asked), or ``wanted`` of mass, are reached; both are reached somewhere.
__device__ Place find(Shared& s, const Row& row, u32 rank, u64 wanted) {
  const int one = 2 * threadIdx.x;
  u64 all_mass;
  u32 all;
  {
    const u64 m1 = s.mass[one], m2 = s.mass[one + 1], m = scanned<u64>(m1 + m2, s.parts, all_mass);
    const u32 c1 = s.count[one], c2 = s.count[one + 1], c = scanned<u32>(c1 + c2, s.counts, all);
    const u64 mass_at[3] = {m - m1 - m2, m - m2, m};
    const u32 count_at[3] = {c - c1 - c2, c - c2, c};
    const int i = crossing(mass_at, count_at, rank, wanted);
    if (i < 2) s.found = one + i, s.count_found = count_at[i], s.mass_found = mass_at[i];
  }
  __syncthreads();
  const int bin = s.found;
  u32 num = s.count[bin], before = s.count_found, low = 0, high = ~0u;
  u64 mass = s.mass_found;
  __syncthreads();
  if (num > FEW) narrow(s, row, bin, rank, wanted, low, high, num, before, mass);
  if (num > FEW) return among_equals(s, row, low, num, rank, wanted, before, mass);
  int padded = 32;
  while (padded < num) padded *= 2;
  for (int i = threadIdx.x; i < padded; i += THREADS) s.list[i] = 0;
  if (threadIdx.x == 0) s.num = 0;
  __syncthreads();
  each(row.logits, row.vocab, [&](int i, float v) {
    if (bin_of(row, v) != bin || depth_of(row, v) < -FAR) return;
    const u32 key = key_of(v);
    if (key >= low && key <= high) s.list[atomicAdd(&s.num, 1u)] = (u64)key << 32 | (u32)~i;
  });
  __syncthreads();
  sort(s.list, padded);
  const bool is_one = one < num, is_two = one + 1 < num;
  const u64 x = is_one ? s.list[one] : 0, y = is_two ? s.list[one + 1] : 0;
  const u64 m1 = is_one ? weight_of(row, value_of((u32)(x >> 32))) : 0;
  const u64 m2 = is_two ? weight_of(row, value_of((u32)(y >> 32))) : 0;
  const u64 m = mass + scanned<u64>(m1 + m2, s.parts, all_mass);
  const u64 mass_at[3] = {m - m1 - m2, m - m2, m};
  const u32 count_at[3] = {before + one, before + one + 1, before + one + 2};
  const int i = crossing(mass_at, count_at, rank, wanted);
  if (i < 2 && (i ? is_two : is_one)) {
    const u64 entry = i ? y : x;
    s.id = ~(u32)entry, s.low = (u32)(entry >> 32), s.mass_found = mass_at[i + 1];
  }
  __syncthreads();
  const Place place = {s.id, value_of(s.low), s.mass_found};
  __syncthreads();
  return place;
}

// Two rounds of SplitMix64 of (seed, index), as a number in [0, 1).
__device__ double chance_of(u64 seed, u64 index) {
  u64 state = seed * 0x9E3779B97F4A7C15ull + index * 0xD1B54A32D192ED03ull;
  for (int i = 0; i < 2; ++i) {
    state += 0x9E3779B97F4A7C15ull;
    u64 mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    state = mixed ^ (mixed >> 31);
  }
  return (double)(state >> 11) * (1.0 / 9007199254740992.0);
}

// ``chance`` of a mass: what is to be reached, or passed by the least bit.
__device__ u64 wanted_of(double chance, u64 mass) {
  const double part = floor(chance * (double)mass);
  return part < (double)mass ? min((u64)part + 1, mass) : mass;
}

// The first id at which the mass along the ids passes ``chance`` of all: a range is cut into one part a warp until it
// is one token.
__device__ int along_ids(Shared& s, const Row& row, double chance) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int first = 0, end = row.vocab;
  u64 before = 0, wanted = 0;
  while (end - first > 1) {
    const int part = (end - first + 31) / 32, from = first + warp * part, until = min(from + part, end);
    u64 own = 0;
    for (int i = from + lane; i < until; i += 32) own += weight_of(row, row.logits[i]);
#pragma unroll
    for (int d = 16; d; d /= 2) own += __shfl_xor_sync(~0u, own, d);
    if (lane == 0) s.parts[warp] = own;
    __syncthreads();
    if (wanted == 0) {
      u64 all = 0;
      for (int i = 0; i < 32; ++i) all += s.parts[i];
      wanted = wanted_of(chance, all);
    }
    int at = 0;
    while (at < 31 && before + s.parts[at] < wanted) before += s.parts[at++];
    first += at * part, end = min(first + part, end);
    __syncthreads();
  }
  return first;
}

// The largest logit with its lowest id, and the least that is finite; whether one is a NaN.
__device__ bool extremes(Shared& s, const float* logits, int vocab, u64& best, float& least) {
  u64 own = 0;
  float low = INFINITE;
  bool bad = false;
  each(logits, vocab, [&](int i, float v) {
    bad |= v != v;
    const u64 entry = (u64)key_of(v) << 32 | (u32)~i;
    own = entry > own ? entry : own;
    if (v > -INFINITE && v < low) low = v;
  });
#pragma unroll
  for (int d = 16; d; d /= 2) {
    const u64 other = __shfl_xor_sync(~0u, own, d);
    own = other > own ? other : own;
    low = fminf(low, __shfl_xor_sync(~0u, low, d));
  }
  if (threadIdx.x % 32 == 0) s.parts[threadIdx.x / 32] = own, s.counts[threadIdx.x / 32] = __float_as_uint(low);
  const bool any = __syncthreads_or(bad);
  best = 0, least = INFINITE;
  for (int i = 0; i < 32; ++i) {
    best = s.parts[i] > best ? s.parts[i] : best;
    least = fminf(least, __uint_as_float(s.counts[i]));
  }
  __syncthreads();
  return any;
}

// Count and mass of each bin of what weighs anything; all of them in ``num`` and ``mass``.
__device__ void histogram(Shared& s, const Row& row, u32& num, u64& mass) {
  for (int i = threadIdx.x; i < BINS; i += THREADS) s.count[i] = 0, s.mass[i] = 0;
  __syncthreads();
  u32 own = 0;
  u64 own_mass = 0;
  each(row.logits, row.vocab, [&](int, float v) {
    const double z = depth_of(row, v);
    if (!(z >= -FAR)) return;
    const u64 weight = weight_of(z);
    const int bin = bin_of(row, v);
    atomicAdd(&s.count[bin], 1u);
    atomicAdd(&s.mass[bin], weight);
    own += 1, own_mass += weight;
  });
  scanned<u32>(own, s.counts, num);
  scanned<u64>(own_mass, s.parts, mass);
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(
    const float* logits, i64 stride, int vocab, const double* temperatures, const i64* top_ks, const double* top_ps,
    const double* min_ps, const i64* seeds, const i64* indices, i64* out) {
  __shared__ Shared s;
  const int number = blockIdx.x;
  Row row = {logits + number * stride, vocab};
  u64 best;
  float least;
  const bool bad = extremes(s, row.logits, vocab, best, least);
  row.top = value_of((u32)(best >> 32)), row.largest = row.top;
  const double temperature = temperatures[number], top_p = top_ps[number], min_p = min_ps[number];
  const i64 top_k = top_ks[number];
  if (bad || row.top == INFINITE || row.top == -INFINITE || temperature == 0.0) {
    if (threadIdx.x == 0) out[number] = bad || isinf(row.top) ? vocab : (int)~(u32)best;
    return;
  }
  row.inverse = fmin(1.0 / temperature, 1e300);  // times 0 is 0
  const float reach = fminf((float)(FAR * temperature), row.top - least);
  row.scale = reach > 0.f ? fminf(BINS / reach, 1e30f) : 0.f;
  const double chance = chance_of(seeds[number], indices[number]);
  u32 id;
  if (top_k || top_p < 1.0 || min_p != 0.0) {
    u32 num;
    u64 mass;
    histogram(s, row, num, mass);
    Place last = {0, -INFINITE, mass};
    if (top_k && top_k < num) last = find(s, row, (u32)top_k, 0);
    if (top_p < 1.0) {
      const double part = ceil(top_p * (double)last.mass);
      last = find(s, row, 0, part < 1.0 ? 1 : part < (double)last.mass ? (u64)part : last.mass);
    }
    const double edge = min_p != 0.0 ? fmin(log(min_p), 0.0) : -1e300;
    if (depth_of(row, last.value) < edge) {
      u64 own = 0;
      each(row.logits, vocab, [&](int, float v) {
        const double z = depth_of(row, v);
        if (z >= edge) own += weight_of(z);
      });
      scanned<u64>(own, s.parts, last.mass);
    }
    id = find(s, row, 0, wanted_of(chance, last.mass)).id;
  } else {
    id = along_ids(s, row, chance);
  }
  if (threadIdx.x == 0) out[number] = id;
}
