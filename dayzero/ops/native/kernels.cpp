// Operators of one serving step on a CPU. Plain C ABI, no headers of any framework; compiled where it runs (build.py).
//
// Vectors are compiler vectors of LANES floats: 16 where the machine has AVX-512, else 8; a compiler splits what its
// target lacks, so both widths build and run on any machine, and the tests run both. DAYZERO_PORTABLE leaves out all
// x86 intrinsics. All sums are f32.
// Element types: 0 = f32, 1 = bf16. Strides count elements. The caller owns all memory and checks all shapes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <type_traits>
#if defined(__AVX__) && !defined(DAYZERO_PORTABLE)
#define DAYZERO_AVX
#include <immintrin.h>
#endif

#ifndef DAYZERO_LANES
#if defined(__AVX512F__)
#define DAYZERO_LANES 16
#else
#define DAYZERO_LANES 8
#endif
#endif

namespace {

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && DAYZERO_LANES == 16 && !defined(DAYZERO_PORTABLE)
#define DAYZERO_DOTS
#endif

constexpr int LANES = DAYZERO_LANES;
constexpr int PANEL = 2 * LANES;    // columns of a packed weight that one pass computes
constexpr int KEYS = 64;            // keys of one attention tile
constexpr int QUERIES = 64;         // (token, head) pairs of one attention tile
constexpr int FEW = 4;              // query rows of a key head up to which keys are read in place, all heads at once
constexpr int NEAR = 8;             // keys read before going on to the next head: their records lie side by side
constexpr int64_t SPLIT_KEYS = 128; // least keys worth a thread of their own
constexpr int64_t SMALL = 1 << 14;  // elements below which waking threads costs more than it saves

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
static_assert(KEYS % PANEL == 0, "a tile of keys is whole panels");

#if defined(DAYZERO_AVX)
struct Halves {
    __m256 low, high;
};
#endif

struct bf16 {
    uint16_t bits;
};

template <class To, class From> inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

inline vf splat(float x) { return x - vf{}; } // x - 0 is x, so nothing is computed

inline vf load(const float *p) {
    vf y;
    memcpy(&y, p, sizeof y);
    return y;
}

inline vf load(const bf16 *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return bits_as<vf>(__builtin_convertvector(h, vu) << 16);
}

inline void store(float *p, vf x) { memcpy(p, &x, sizeof x); }

inline void store(bf16 *p, vf x) {
#if defined(DAYZERO_DOTS) // the same rounding in one instruction; f32 subnormals become zero
    __m256i narrow = bits_as<__m256i>(_mm512_cvtneps_pbh(bits_as<__m512>(x)));
    memcpy(p, &narrow, sizeof narrow);
#else
    vu u = bits_as<vu>(x);
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16; // to nearest, ties to even
    vu kept = x == x ? rounded : (u >> 16) | 0x40;     // a NaN must not round to infinity
    vh h = __builtin_convertvector(kept, vh);
    memcpy(p, &h, sizeof h);
#endif
}

template <class E> inline vf load_some(const E *p, int64_t n) {
    if (n >= LANES) return load(p);
    E part[LANES] = {};
    memcpy(part, p, n * sizeof(E));
    return load(part);
}

template <class E> inline void store_some(E *p, vf x, int64_t n) {
    if (n >= LANES) return store(p, x);
    E part[LANES];
    store(part, x);
    memcpy(p, part, n * sizeof(E));
}

inline float sum(vf x) {
#if defined(DAYZERO_DOTS)
    return _mm512_reduce_add_ps(bits_as<__m512>(x));
#else
    float part[LANES];
    memcpy(part, &x, sizeof x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
#endif
}

// The sums of eight vectors. Adding neighbours pairwise costs a third of eight sums one by one.
inline void sum8(const vf *x, float *to) {
#if defined(DAYZERO_AVX)
    __m256 y[8];
    for (int i = 0; i < 8; i++) {
#if DAYZERO_LANES == 16
        y[i] = _mm256_add_ps(bits_as<Halves>(x[i]).low, bits_as<Halves>(x[i]).high);
#else
        y[i] = bits_as<__m256>(x[i]);
#endif
    }
    __m256 one = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
    __m256 two = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
    // one holds half sums of 0..3 in each of its 128-bit lanes, two those of 4..7.
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_permute2f128_ps(one, two, 0x20), _mm256_permute2f128_ps(one, two, 0x31)));
#else
    for (int i = 0; i < 8; i++) to[i] = sum(x[i]);
#endif
}

// e^x by x = n ln2 + r and a polynomial on |r| <= ln2 / 2; 0 below -87.3, the end of normal f32.
inline vf exponential(vf x) {
#if defined(DAYZERO_DOTS)
    const __m512 bound = _mm512_set1_ps(88.3f), given = bits_as<__m512>(x);
    __m512 c = _mm512_min_ps(bound, _mm512_max_ps(_mm512_set1_ps(-104.0f), given)); // a NaN is the second, and taken
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504088896f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), c), p = _mm512_set1_ps(1.0f / 5040);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    for (float f : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(f));
    __mmask16 normal = _mm512_cmp_ps_mask(given, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
    return bits_as<vf>(_mm512_maskz_scalef_ps(normal, p, n));
#else
    const vf low = splat(-87.3f), high = splat(88.3f);
    vf c = x < low ? low : x;
    c = c > high ? high : c;
    const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer
    vf n = (c * 1.44269504088896f + magic) - magic;
    vf r = c - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    vf y = p * bits_as<vf>(exponent);
    return x < low ? vf{} : y;
#endif
}

inline float most_of(vf x) {
    float part[LANES];
    memcpy(part, &x, sizeof x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] = part[i + width] > part[i] ? part[i + width] : part[i];
    return part[0];
}

inline int64_t up_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <class E> void widen(float *to, const E *from, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store_some(to + i, load_some(from + i, n - i), n - i);
}

void widen_any(float *to, const void *from, int type, int64_t n) {
    if (type) widen(to, static_cast<const bf16 *>(from), n);
    else widen(to, static_cast<const float *>(from), n);
}

// ---- linear: y = x w^T + bias ---------------------------------------------------------------------------------
// A packed weight is panels of PANEL output columns; a panel holds, for each pair of inputs (2k, 2k + 1), PANEL words
// whose low half is the weight of 2k and whose high half that of 2k + 1: one shift or mask widens a word to f32.

template <int ROWS>
void panel_rows(const float *x, int64_t stride, const uint32_t *panel, int64_t pairs, float *out) {
    vf acc[ROWS][2] = {};
    for (int64_t k = 0; k < pairs; k++, panel += PANEL) {
        vu one, two;
        memcpy(&one, panel, sizeof one);
        memcpy(&two, panel + LANES, sizeof two);
        vf even1 = bits_as<vf>(one << 16), even2 = bits_as<vf>(two << 16);
        for (int r = 0; r < ROWS; r++) {
            vf a = splat(x[r * stride + 2 * k]);
            acc[r][0] += a * even1;
            acc[r][1] += a * even2;
        }
        vf odd1 = bits_as<vf>(one & 0xffff0000u), odd2 = bits_as<vf>(two & 0xffff0000u);
        for (int r = 0; r < ROWS; r++) {
            vf a = splat(x[r * stride + 2 * k + 1]);
            acc[r][0] += a * odd1;
            acc[r][1] += a * odd2;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        store(out + r * PANEL, acc[r][0]);
        store(out + r * PANEL + LANES, acc[r][1]);
    }
}

using PanelRows = void (*)(const float *, int64_t, const uint32_t *, int64_t, float *);
const PanelRows PANEL_ROWS[] = {nullptr, panel_rows<1>, panel_rows<2>, panel_rows<3>, panel_rows<4>};

} // namespace

#if defined(DAYZERO_DOTS)
#include "dots.h"
#endif

namespace {

// ---- attention -------------------------------------------------------------------------------------------------

// c[ROWS][cols] = a[ROWS][depth] b[depth][cols] (+ c); cols a multiple of PANEL.
template <int ROWS>
void product_rows(const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth, int64_t cols, float *c,
                  int64_t ldc, bool add) {
    for (int64_t n = 0; n < cols; n += PANEL) {
        vf acc[ROWS][2] = {};
        if (add)
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < 2; i++) acc[r][i] = load(c + r * ldc + n + i * LANES);
        for (int64_t k = 0; k < depth; k++) {
            vf b1 = load(b + k * ldb + n), b2 = load(b + k * ldb + n + LANES);
            for (int r = 0; r < ROWS; r++) {
                vf x = splat(a[r * lda + k]);
                acc[r][0] += x * b1;
                acc[r][1] += x * b2;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 2; i++) store(c + r * ldc + n + i * LANES, acc[r][i]);
    }
}

void product(int64_t rows, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t depth, int64_t cols,
             float *c, int64_t ldc, bool add) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) product_rows<4>(a + r * lda, lda, b, ldb, depth, cols, c + r * ldc, ldc, add);
    a += r * lda;
    c += r * ldc;
    if (rows - r == 3) product_rows<3>(a, lda, b, ldb, depth, cols, c, ldc, add);
    if (rows - r == 2) product_rows<2>(a, lda, b, ldb, depth, cols, c, ldc, add);
    if (rows - r == 1) product_rows<1>(a, lda, b, ldb, depth, cols, c, ldc, add);
}

} // namespace

extern "C" {

struct PagedArgs {
    const void *q;       // [T, heads, width], strides q_token, q_head
    const void *keys;    // block b, slot s, head k at b * key_block + (s * key_heads + k) * width
    const void *values;  // likewise with value_block, value_width
    void *out;           // [T, heads, value_width] packed
    float *lse;          // [T, heads] packed
    const int32_t *table; // [rows, pages]
    const int32_t *first, *query_start, *start;
    const float *sinks; // [heads] or null
    int64_t q_token, q_head, key_block, value_block;
    int64_t rows, pages, page, heads, key_heads, width, value_width;
    int64_t window; // 0: none
    float scale, softcap; // softcap 0: none
    int32_t q_type, type, threads; // q and out; keys and values
};

} // extern "C"

namespace {

// Queries [token, token + count) of a row against keys [low, high), for key heads [head, head + heads).
// Its query rows are numbered head by head, then token by token.
struct Item {
    int64_t row, head, heads, token, count, low, high, part;
};

struct Scratch {
    std::vector<float> q, keys, values, scores;
    std::vector<uint32_t> q_words, key_words, value_words, p_words; // of the form that dots.h takes
    std::vector<int64_t> own; // each query row's position
};

struct Part { // where an item's sums go before they are divided: out [R][V padded], top [R], total [R]
    float *out, *top, *total;
};

template <class E> struct Attention {
    const PagedArgs &a;
    int64_t group = a.heads / a.key_heads, wide = up_to(a.value_width, PANEL), depth = up_to(a.width, LANES);
    int64_t words = up_to(a.width, 32) / 2; // of a query, where products are of bf16 pairs

    // The addresses of the keys at [position, position + count) of a row, or of their values.
    void locate(const void *base, int64_t block, int64_t width, const Item &it, int64_t position, int64_t count,
                const E **to) const {
        int64_t slot = position - a.first[it.row], number = slot / a.page, at = slot % a.page;
        const int32_t *table = a.table + it.row * a.pages;
        for (int64_t j = 0; j < count; number++, at = 0)
            for (const E *begin = static_cast<const E *>(base) + table[number] * block + it.head * width;
                 at < a.page && j < count; at++)
                to[j++] = begin + at * a.key_heads * width;
    }

    int64_t rows_of(const Item &it) const { return it.count * group; } // of one key head
    int64_t token_of(const Item &it, int64_t r) const { return it.token + r % rows_of(it) / group; }
    int64_t head_of(const Item &it, int64_t r) const {
        return (it.head + r / rows_of(it)) * group + r % rows_of(it) % group;
    }

    void load_queries(const Item &it, float *q) const {
        for (int64_t r = 0; r < it.heads * rows_of(it); r++, q += depth) {
            int64_t at = (a.query_start[it.row] + token_of(it, r)) * a.q_token + head_of(it, r) * a.q_head;
            widen_any(q, static_cast<const char *>(a.q) + at * (a.q_type ? 2 : 4), a.q_type, a.width);
            for (int64_t d = 0; d < depth; d++) q[d] = d < a.width ? q[d] * a.scale : 0.0f;
        }
    }

    void load_query_words(const Item &it, uint32_t *q) const {
        for (int64_t r = 0; r < it.heads * rows_of(it); r++, q += words) {
            int64_t at = (a.query_start[it.row] + token_of(it, r)) * a.q_token + head_of(it, r) * a.q_head;
            memcpy(q, static_cast<const bf16 *>(a.q) + at, a.width * sizeof(bf16));
            memset(q + a.width / 2, 0, (words - a.width / 2) * sizeof(uint32_t));
        }
    }

    // Many query rows of one key head: scores[rows][KEYS] by a product with the transposed keys.
    void score_many(int64_t rows, const E *const *key, int64_t count, Scratch &s) const {
        for (int64_t j = 0; j < KEYS; j++) {
            float wide_key[LANES] = {};
            for (int64_t d = 0; d < a.width; d += LANES) {
                int64_t some = std::min<int64_t>(LANES, a.width - d);
                if (j < count) store(wide_key, load_some(key[j] + d, some));
                else store(wide_key, vf{});
                for (int64_t i = 0; i < some; i++) s.keys[(d + i) * KEYS + j] = wide_key[i];
            }
        }
        product(rows, s.q.data(), depth, s.keys.data(), KEYS, a.width, KEYS, s.scores.data(), KEYS, false);
    }

    void weigh_many(int64_t rows, const E *const *value, int64_t count, Scratch &s, float *out) const {
        for (int64_t j = 0; j < count; j++) {
            float *row = &s.values[j * wide];
            widen(row, value[j], a.value_width);
            std::fill(row + a.value_width, row + wide, 0.0f);
        }
        product(rows, s.scores.data(), KEYS, s.values.data(), wide, count, wide, out, wide, true);
    }

    // ROWS query rows of each key head. Eight sums at a time: as many keys as leave room for all rows.
    template <int ROWS> void score_few(const Item &it, const E *const *key, int64_t count, Scratch &s) const {
        constexpr int some = ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2;
        for (int64_t j = 0; j < count; j += some)
            for (int64_t h = 0; h < it.heads; h++) {
                const float *q = &s.q[h * ROWS * depth];
                vf acc[8] = {};
                const E *k[some];
                for (int i = 0; i < some; i++) k[i] = key[std::min(j + i, count - 1)] + h * a.width;
                int64_t d = 0;
                for (; d + LANES <= a.width; d += LANES) add_products<ROWS, some>(k, d, LANES, q, acc);
                if (d < a.width) add_products<ROWS, some>(k, d, a.width - d, q, acc);
                float sums[8];
                sum8(acc, sums);
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < some; i++) s.scores[(h * ROWS + r) * KEYS + j + i] = sums[r * some + i];
            }
    }

    template <int ROWS, int NUM>
    void add_products(const E *const *k, int64_t d, int64_t width, const float *q, vf *acc) const {
        for (int i = 0; i < NUM; i++) {
            vf x = width == LANES ? load(k[i] + d) : load_some(k[i] + d, width);
            for (int r = 0; r < ROWS; r++) acc[r * NUM + i] += x * load(q + r * depth + d);
        }
    }

    // out[rows][V padded] += probabilities[rows][KEYS] values, straight from the blocks, NUM vectors at a time.
    template <int ROWS, int NUM>
    void weigh_some(const E *const *value, int64_t offset, int64_t count, int64_t width, const float *p,
                    float *out) const {
        vf acc[ROWS][NUM];
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < NUM; i++) acc[r][i] = load(out + r * wide + i * LANES);
        for (int64_t j = 0; j < count; j++)
            for (int i = 0; i < NUM; i++) {
                const E *from = value[j] + offset + i * LANES;
                vf v = NUM > 1 ? load(from) : load_some(from, width);
                for (int r = 0; r < ROWS; r++) acc[r][i] += p[r * KEYS + j] * v;
            }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < NUM; i++) store(out + r * wide + i * LANES, acc[r][i]);
    }

    template <int ROWS>
    void weigh_few(const Item &it, const E *const *value, int64_t count, const float *p, float *out) const {
        constexpr int num = ROWS > 2 ? 2 : 4;
        for (int64_t j = 0; j < count; j += NEAR)
            for (int64_t h = 0; h < it.heads; h++) {
                int64_t n = 0, some = std::min<int64_t>(NEAR, count - j), at = h * a.value_width;
                const float *from = p + h * ROWS * KEYS + j;
                float *to = out + h * ROWS * wide;
                for (; n + num * LANES <= a.value_width; n += num * LANES)
                    weigh_some<ROWS, num>(value + j, at + n, some, num * LANES, from, to + n);
                for (; n < a.value_width; n += LANES)
                    weigh_some<ROWS, 1>(value + j, at + n, some, a.value_width - n, from, to + n);
            }
    }

    void score(const Item &it, const E *const *key, int64_t count, Scratch &s) const {
        int64_t rows = rows_of(it);
        if (rows == 1) score_few<1>(it, key, count, s);
        else if (rows == 2) score_few<2>(it, key, count, s);
        else if (rows == 3) score_few<3>(it, key, count, s);
        else if (rows == 4) score_few<4>(it, key, count, s);
        else score_many(rows, key, count, s);
    }

    void weigh(const Item &it, const E *const *value, int64_t count, Scratch &s, float *out) const {
        int64_t rows = rows_of(it);
        const float *p = s.scores.data();
        if (rows == 1) weigh_few<1>(it, value, count, p, out);
        else if (rows == 2) weigh_few<2>(it, value, count, p, out);
        else if (rows == 3) weigh_few<3>(it, value, count, p, out);
        else if (rows == 4) weigh_few<4>(it, value, count, p, out);
        else weigh_many(rows, value, count, s, out);
    }

#if defined(DAYZERO_DOTS)
    // The addresses of a tile's keys and values, and of the tile behind it (num 0: none).
    struct Tile {
        const bf16 *keys[KEYS], *values[KEYS];
        int64_t num;
    };

    void place(const Item &it, int64_t position, Tile &tile) const {
        tile.num = std::clamp<int64_t>(it.high - position, 0, KEYS);
        if (!tile.num) return;
        locate(a.keys, a.key_block, a.width, it, position, tile.num, tile.keys);
        locate(a.values, a.value_block, a.value_width, it, position, tile.num, tile.values);
    }

    template <int ROWS> void dot_few(const Item &it, const Tile &now, const Tile &next, Scratch &s) const {
        constexpr int some = ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2;
        for (int64_t j = 0; j < now.num; j += some)
            for (int64_t h = 0; h < it.heads; h++) {
                vf acc[8] = {};
                const bf16 *k[some];
                for (int i = 0; i < some; i++) k[i] = now.keys[std::min(j + i, now.num - 1)] + h * a.width;
                add_dots<ROWS, some>(k, a.width, &s.q_words[h * ROWS * words], words, acc);
                ask_for(now.values + j, std::min<int64_t>(some, now.num - j), h * a.value_width, a.value_width);
                float sums[8];
                sum8(acc, sums);
                for (int r = 0; r < ROWS; r++)
                    for (int i = 0; i < some; i++) s.scores[(h * ROWS + r) * KEYS + j + i] = sums[r * some + i];
            }
    }

    template <int ROWS>
    void dot_weigh_few(const Item &it, const Tile &now, const Tile &next, Scratch &s, float *out) const {
        for (int64_t j = 0; j < now.num; j += NEAR)
            for (int64_t h = 0; h < it.heads; h++) {
                int64_t n = 0, some = std::min<int64_t>(NEAR, now.num - j), at = h * a.value_width;
                const uint32_t *p = &s.p_words[h * ROWS * KEYS / 2 + j / 2];
                float *to = out + h * ROWS * wide;
                for (; n + 64 <= wide; n += 64)
                    add_weighed<ROWS, 2>(now.values + j, at + n, some, a.value_width - n, p, KEYS / 2, to + n, wide);
                if (n < wide)
                    add_weighed<ROWS, 1>(now.values + j, at + n, some, a.value_width - n, p, KEYS / 2, to + n, wide);
                if (j < next.num) ask_for(next.keys + j, std::min<int64_t>(NEAR, next.num - j), h * a.width, a.width);
            }
    }

    void dot_scores(const Item &it, const Tile &now, const Tile &next, Scratch &s) const {
        int64_t rows = rows_of(it);
        if (rows == 1) dot_few<1>(it, now, next, s);
        else if (rows == 2) dot_few<2>(it, now, next, s);
        else if (rows == 3) dot_few<3>(it, now, next, s);
        else if (rows == 4) dot_few<4>(it, now, next, s);
        else {
            columns_of(now.keys, now.num, a.width / 2, s.key_words.data());
            dot_product(rows, s.q_words.data(), words, s.key_words.data(), KEYS, a.width / 2, KEYS, s.scores.data(),
                        KEYS, false);
        }
    }

    void dot_weigh(const Item &it, const Tile &now, const Tile &next, Scratch &s, float *out) const {
        int64_t rows = rows_of(it);
        if (rows == 1) dot_weigh_few<1>(it, now, next, s, out);
        else if (rows == 2) dot_weigh_few<2>(it, now, next, s, out);
        else if (rows == 3) dot_weigh_few<3>(it, now, next, s, out);
        else if (rows == 4) dot_weigh_few<4>(it, now, next, s, out);
        else {
            pairs_of(now.values, now.num, a.value_width, wide, s.value_words.data());
            dot_product(rows, s.p_words.data(), KEYS / 2, s.value_words.data(), wide, (now.num + 1) / 2, wide, out,
                        wide, true);
        }
    }

    void soften_dots(const Item &it, int64_t position, int64_t count, Scratch &s, const Part &to) const {
        for (int64_t r = 0; r < it.heads * rows_of(it); r++) {
            float *score = &s.scores[r * KEYS], factor = a.scale;
            if (a.softcap > 0) {
                for (int64_t j = 0; j < count; j++) score[j] = a.softcap * std::tanh(score[j] * factor / a.softcap);
                factor = 1.0f;
            }
            int64_t behind = s.own[r] + 1 - position; // the first key that the row does not see
            int64_t begin = a.window ? behind - a.window : 0;
            bf16 *narrow = reinterpret_cast<bf16 *>(&s.p_words[r * KEYS / 2]);
            float shrink = soften_row(score, factor, begin, std::min(count, behind), narrow, to.top[r], to.total[r]);
            if (shrink != 1.0f)
                for (int64_t n = 0; n < wide; n += LANES) store(to.out + r * wide + n, load(to.out + r * wide + n) * shrink);
        }
    }

    void run_dots(const Item &it, Scratch &s, const Part &to) const {
        int64_t rows = it.heads * rows_of(it);
        bool many = rows_of(it) > FEW;
        s.q_words.resize(rows * words);
        s.p_words.resize(rows * KEYS / 2);
        s.own.resize(rows);
        if (many) {
            s.key_words.resize(words * KEYS);
            s.value_words.resize(KEYS / 2 * wide);
        }
        load_query_words(it, s.q_words.data());
        for (int64_t r = 0; r < rows; r++) s.own[r] = a.start[it.row] + token_of(it, r);
        Tile tiles[2];
        place(it, it.low, tiles[0]);
        for (int64_t position = it.low, i = 0; position < it.high; position += KEYS, i ^= 1) {
            const Tile &now = tiles[i], &next = tiles[i ^ 1];
            place(it, position + KEYS, tiles[i ^ 1]);
            dot_scores(it, now, next, s);
            soften_dots(it, position, now.num, s, to);
            dot_weigh(it, now, next, s, to.out);
        }
        if (!many)
            for (int64_t r = 0; r < rows; r++) in_order(to.out + r * wide, wide);
    }
#endif

    // Scores of one row -> e^(score - top), hidden ones 0; the row's running top, total and out follow.
    void soften(const Item &it, int64_t r, int64_t position, int64_t count, Scratch &s, const Part &to) const {
        float *score = &s.scores[r * KEYS];
        if (a.softcap > 0)
            for (int64_t j = 0; j < count; j++) score[j] = a.softcap * std::tanh(score[j] / a.softcap);
        int64_t own = a.start[it.row] + token_of(it, r);
        int64_t end = std::min(count, own + 1 - position);
        int64_t begin = a.window ? std::max<int64_t>(0, own + 1 - a.window - position) : 0;
        if (begin > 0) std::fill(score, score + std::min<int64_t>(begin, KEYS), -INFINITY);
        if (end < KEYS) std::fill(score + std::max<int64_t>(end, 0), score + KEYS, -INFINITY);
        vf most = load(score);
        for (int64_t j = LANES; j < KEYS; j += LANES) {
            vf x = load(score + j);
            most = x > most ? x : most;
        }
        float top = std::max(to.top[r], most_of(most));
        if (top == -INFINITY && std::any_of(score, score + KEYS, [](float x) { return x != x; })) top = 0.0f;
        if (top == -INFINITY) {
            std::fill(score, score + KEYS, 0.0f);
            return;
        }
        vf total = {};
        for (int64_t j = 0; j < KEYS; j += LANES) {
            vf p = exponential(load(score + j) - top);
            store(score + j, p);
            total += p;
        }
        if (top != to.top[r]) {
            float shrink = to.top[r] == -INFINITY ? 0.0f : std::exp(to.top[r] - top);
            to.total[r] *= shrink;
            for (int64_t n = 0; n < wide; n++) to.out[r * wide + n] *= shrink;
            to.top[r] = top;
        }
        to.total[r] += sum(total);
    }

    void run(const Item &it, Scratch &s, const Part &to) const {
        int64_t rows = it.heads * rows_of(it);
        s.scores.resize(rows * KEYS);
        std::fill(to.out, to.out + rows * wide, 0.0f);
        std::fill(to.top, to.top + rows, -INFINITY);
        std::fill(to.total, to.total + rows, 0.0f);
#if defined(DAYZERO_DOTS)
        // Products of bf16 pairs: queries and keys are exact so, probabilities are rounded.
        if constexpr (std::is_same_v<E, bf16>)
            if (a.q_type && a.width % 2 == 0) return run_dots(it, s, to);
#endif
        s.q.resize(rows * depth);
        if (rows_of(it) > FEW) {
            s.keys.resize(a.width * KEYS);
            s.values.resize(KEYS * wide);
        }
        load_queries(it, s.q.data());
        for (int64_t position = it.low; position < it.high; position += KEYS) {
            int64_t count = std::min<int64_t>(KEYS, it.high - position);
            const E *at[KEYS];
            locate(a.keys, a.key_block, a.width, it, position, count, at);
            score(it, at, count, s);
            for (int64_t r = 0; r < rows; r++) soften(it, r, position, count, s, to);
            locate(a.values, a.value_block, a.value_width, it, position, count, at);
            weigh(it, at, count, s, to.out);
        }
    }

    void finish(const Item &it, const Part &from) const {
        for (int64_t r = 0; r < it.heads * rows_of(it); r++) {
            int64_t head = head_of(it, r), token = a.query_start[it.row] + token_of(it, r);
            float top = from.top[r], total = from.total[r], share = 1.0f;
            if (a.sinks) {
                float higher = std::max(top, a.sinks[head]);
                share = top == -INFINITY ? 0.0f : std::exp(top - higher);
                total = total * share + (higher == -INFINITY ? 0.0f : std::exp(a.sinks[head] - higher));
                top = higher;
            }
            float factor = total > 0 ? share / total : 0.0f;
            int64_t at = (token * a.heads + head) * a.value_width;
            for (int64_t n = 0; n < a.value_width; n += LANES) {
                vf v = load(from.out + r * wide + n) * factor;
                if (a.q_type) store_some(static_cast<bf16 *>(a.out) + at + n, v, a.value_width - n);
                else store_some(static_cast<float *>(a.out) + at + n, v, a.value_width - n);
            }
            a.lse[token * a.heads + head] = total > 0 ? top + std::log(total) : -INFINITY;
        }
    }

    std::vector<Item> items() const {
        std::vector<Item> made;
        int64_t tokens = std::max<int64_t>(1, QUERIES / group);
        for (int64_t row = 0; row < a.rows; row++) {
            int64_t count = a.query_start[row + 1] - a.query_start[row], start = a.start[row];
            for (int64_t token = up_to(count, tokens) - tokens; token >= 0; token -= tokens) { // most keys first
                int64_t some = std::min(tokens, count - token), high = start + token + some;
                int64_t low = a.window ? start + token + 1 - a.window : 0;
                low = std::max<int64_t>(low, a.first[row]);
                int64_t heads = some * group <= FEW ? a.key_heads : 1;
                for (int64_t head = 0; head < a.key_heads; head += heads)
                    made.push_back({row, head, heads, token, some, std::min(low, high), high, -1});
            }
        }
        return made;
    }

    void all() const {
        std::vector<Item> whole = items(), work;
        int64_t wanted = 4 * a.threads, num = static_cast<int64_t>(whole.size()), parts = 0, most = 0;
        std::vector<int64_t> begin(num + 1, 0); // parts of item i: [begin[i], begin[i + 1])
        for (int64_t i = 0; i < num; i++) {
            const Item &it = whole[i];
            int64_t keys = it.high - it.low, pieces = 1;
            if (a.threads > 1 && num < wanted)
                pieces = std::clamp<int64_t>(keys / SPLIT_KEYS, 1, (wanted + num - 1) / num);
            int64_t each = up_to((keys + pieces - 1) / pieces, KEYS);
            for (int64_t p = 0; p < pieces; p++) {
                Item piece = it;
                piece.low = std::min(it.high, it.low + p * each);
                piece.high = std::min(it.high, piece.low + each);
                piece.part = pieces > 1 ? parts++ : -1;
                work.push_back(piece);
            }
            begin[i + 1] = parts;
            most = std::max(most, it.heads * rows_of(it));
        }
        int64_t size = most * (wide + 2);
        std::vector<float> kept(parts * size);
        auto part_at = [&](float *at) { return Part{at, at + most * wide, at + most * (wide + 1)}; };
        int64_t num_work = static_cast<int64_t>(work.size());
#pragma omp parallel num_threads(a.threads) if (num_work > 1)
        {
            Scratch s;
            std::vector<float> own(size);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < num_work; i++) {
                bool split = work[i].part >= 0;
                Part to = part_at(split ? &kept[work[i].part * size] : own.data());
                run(work[i], s, to);
                if (!split) finish(work[i], to);
            }
        }
        for (int64_t i = 0; i < num; i++)
            if (begin[i] < begin[i + 1]) join(whole[i], begin[i], begin[i + 1], kept, size, part_at);
    }

    template <class At>
    void join(const Item &it, int64_t first, int64_t last, std::vector<float> &kept, int64_t size, At part_at) const {
        Part to = part_at(&kept[first * size]);
        for (int64_t p = first + 1; p < last; p++) {
            Part from = part_at(&kept[p * size]);
            for (int64_t r = 0; r < it.heads * rows_of(it); r++) {
                float top = std::max(to.top[r], from.top[r]);
                if (top == -INFINITY) continue;
                float mine = to.top[r] == -INFINITY ? 0.0f : std::exp(to.top[r] - top);
                float other = from.top[r] == -INFINITY ? 0.0f : std::exp(from.top[r] - top);
                for (int64_t n = 0; n < wide; n++)
                    to.out[r * wide + n] = mine * to.out[r * wide + n] + other * from.out[r * wide + n];
                to.total[r] = mine * to.total[r] + other * from.total[r];
                to.top[r] = top;
            }
        }
        finish(it, to);
    }
};

// ---- linear, over tokens and panels ----------------------------------------------------------------------------

struct Linear { // as dayzero_linear takes it
    const void *x;
    int64_t x_stride, tokens, inputs;
    const uint32_t *packed;
    int64_t outputs;
    const float *bias;
    void *y;
    int32_t type, out_type, threads;

    // One panel of one token, with the bias, as y wants it.
    void put(int64_t token, int64_t panel, const float *out) const {
        int64_t n = panel * PANEL, some = std::min<int64_t>(PANEL, outputs - n);
        for (int64_t i = 0; i < some; i += LANES) {
            vf v = load(out + i);
            if (bias) v += load_some(bias + n + i, some - i);
            int64_t at = token * outputs + n + i;
            if (out_type) store_some(static_cast<bf16 *>(y) + at, v, some - i);
            else store_some(static_cast<float *>(y) + at, v, some - i);
        }
    }
};

void linear_floats(const Linear &job) {
    int64_t pairs = up_to(job.inputs, 2) / 2, panels = up_to(job.outputs, PANEL) / PANEL;
    static thread_local std::vector<float> kept;
    kept.resize(job.tokens * pairs * 2);
    float *wide = kept.data();
#pragma omp parallel num_threads(job.threads)
    {
#pragma omp for
        for (int64_t t = 0; t < job.tokens; t++) {
            const char *from = static_cast<const char *>(job.x) + t * job.x_stride * (job.type ? 2 : 4);
            widen_any(wide + t * pairs * 2, from, job.type, job.inputs);
            if (job.inputs % 2) wide[t * pairs * 2 + job.inputs] = 0;
        }
        float out[4 * PANEL];
#pragma omp for schedule(dynamic, 4)
        for (int64_t p = 0; p < panels; p++)
            for (int64_t t = 0; t < job.tokens; t += 4) {
                int64_t rows = std::min<int64_t>(4, job.tokens - t);
                PANEL_ROWS[rows](wide + t * pairs * 2, pairs * 2, job.packed + p * pairs * PANEL, pairs, out);
                for (int64_t r = 0; r < rows; r++) job.put(t + r, p, out + r * PANEL);
            }
    }
}

#if defined(DAYZERO_DOTS)
void linear_dots(const Linear &job) {
    int64_t pairs = up_to(job.inputs, 2) / 2, panels = up_to(job.outputs, PANEL) / PANEL;
    int64_t stride = job.x_stride / 2;
    const uint32_t *x = static_cast<const uint32_t *>(job.x);
    static thread_local std::vector<uint32_t> kept;
    if (job.inputs % 2 || (job.tokens > 1 && job.x_stride % 2)) { // rows that are no whole words
        stride = pairs;
        kept.assign(job.tokens * pairs, 0);
        for (int64_t t = 0; t < job.tokens; t++)
            memcpy(&kept[t * pairs], static_cast<const bf16 *>(job.x) + t * job.x_stride, job.inputs * sizeof(bf16));
        x = kept.data();
    }
#pragma omp parallel for num_threads(job.threads) schedule(dynamic, 8)
    for (int64_t p = 0; p < panels; p++) {
        float out[8 * PANEL];
        for (int64_t t = 0, rows; t < job.tokens; t += rows) {
            rows = dot_panel(job.tokens - t, x + t * stride, stride, job.packed + p * pairs * PANEL, pairs, out);
            for (int64_t r = 0; r < rows; r++) job.put(t + r, p, out + r * PANEL);
        }
    }
}
#endif

// ---- row by row ------------------------------------------------------------------------------------------------

struct Rows { // [outer, inner, width], the last dimension packed
    int64_t outer, inner, outer_stride, inner_stride, width;
    int64_t num() const { return outer * inner; }
    int64_t at(int64_t i) const { return i / inner * outer_stride + i % inner * inner_stride; }
};

template <class E>
void rms_row(const E *x, E *y, const float *weight, int64_t width, float eps, bool cast_first) {
    vf squares = {};
    for (int64_t d = 0; d < width; d += LANES) {
        vf v = load_some(x + d, width - d);
        squares += v * v;
    }
    float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
    for (int64_t d = 0; d < width; d += LANES) {
        vf v = load_some(x + d, width - d) * inverse;
        if (cast_first) {
            E narrow[LANES];
            store(narrow, v);
            v = load(narrow);
        }
        if (weight) v *= load_some(weight + d, width - d);
        store_some(y + d, v, width - d);
    }
}

template <class E>
void rms_all(const void *x, void *y, Rows s, const float *weight, float eps, bool cast_first, int threads) {
#pragma omp parallel for num_threads(threads) if (s.num() * s.width > SMALL)
    for (int64_t i = 0; i < s.num(); i++)
        rms_row(static_cast<const E *>(x) + s.at(i), static_cast<E *>(y) + i * s.width, weight, s.width, eps,
                cast_first);
}

template <class E>
void silu_all(const void *gate, const void *up, void *out, int64_t rows, int64_t width, int64_t gate_stride,
              int64_t up_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
    for (int64_t t = 0; t < rows; t++) {
        const E *g = static_cast<const E *>(gate) + t * gate_stride, *u = static_cast<const E *>(up) + t * up_stride;
        E *y = static_cast<E *>(out) + t * width;
        for (int64_t i = 0; i < width; i += LANES) {
            vf x = load_some(g + i, width - i);
            store_some(y + i, x / (1.0f + exponential(-x)) * load_some(u + i, width - i), width - i);
        }
    }
}

inline float widened(float x) { return x; }
inline float widened(bf16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }
inline void put(float *p, float x) { *p = x; }
inline void put(bf16 *p, float x) {
    uint32_t u = bits_as<uint32_t>(x);
    p->bits = static_cast<uint16_t>(x == x ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40);
}

} // namespace

extern "C" {

int32_t dayzero_lanes() { return LANES; }

struct RopeArgs {
    const void *x; // [tokens, heads, width], strides token_stride, head_stride
    void *y;       // packed
    const int64_t *positions; // [tokens], or null with angles
    const float *frequencies; // [count]
    const float *angles;      // [tokens, count], or null with positions
    int64_t tokens, heads, width, token_stride, head_stride, count, begin;
    float cos_factor, sin_factor;
    int32_t interleaved, type, threads;
};

void dayzero_pack(const void *weight, int64_t rows, int64_t columns, int64_t stride, uint32_t *packed,
                  int32_t threads) {
    const uint16_t *w = static_cast<const uint16_t *>(weight);
    int64_t pairs = up_to(columns, 2) / 2, panels = up_to(rows, PANEL) / PANEL;
#pragma omp parallel for num_threads(threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t k = 0; k < pairs; k++)
            for (int64_t i = 0; i < PANEL; i++) {
                int64_t n = p * PANEL + i;
                uint32_t low = n < rows ? w[n * stride + 2 * k] : 0;
                uint32_t high = n < rows && 2 * k + 1 < columns ? w[n * stride + 2 * k + 1] : 0;
                packed[(p * pairs + k) * PANEL + i] = low | high << 16;
            }
}

// x [tokens, inputs] of type, y [tokens, outputs] packed of out_type, bias f32 or null.
void dayzero_linear(const void *x, int64_t x_stride, int64_t tokens, int64_t inputs, const uint32_t *packed,
                    int64_t outputs, const float *bias, void *y, int32_t type, int32_t out_type, int32_t threads) {
    Linear job{x, x_stride, tokens, inputs, packed, outputs, bias, y, type, out_type, threads};
#if defined(DAYZERO_DOTS)
    if (type) return linear_dots(job);
#endif
    linear_floats(job);
}

void dayzero_paged(const PagedArgs *args) {
    if (args->type) Attention<bf16>{*args}.all();
    else Attention<float>{*args}.all();
}

// x [outer, inner, width] of type, y packed. weight [width] of weight_type or null; offset: the factor is 1 + w.
void dayzero_rms(const void *x, void *y, const int64_t *shape, const void *weight, int32_t weight_type, int32_t offset,
                 int32_t cast_first, float eps, int32_t type, int32_t threads) {
    Rows s{shape[0], shape[1], shape[2], shape[3], shape[4]};
    static thread_local std::vector<float> factor;
    if (weight) {
        factor.resize(s.width);
        widen_any(factor.data(), weight, weight_type, s.width);
        if (offset)
            for (float &f : factor) f += 1.0f;
    }
    const float *w = weight ? factor.data() : nullptr;
    if (type) rms_all<bf16>(x, y, s, w, eps, cast_first, threads);
    else rms_all<float>(x, y, s, w, eps, cast_first, threads);
}

void dayzero_silu(const void *gate, const void *up, void *out, int64_t rows, int64_t width, int64_t gate_stride,
                  int64_t up_stride, int32_t type, int32_t threads) {
    if (type) silu_all<bf16>(gate, up, out, rows, width, gate_stride, up_stride, threads);
    else silu_all<float>(gate, up, out, rows, width, gate_stride, up_stride, threads);
}

} // extern "C"

namespace {

template <class E> void rope_token(const RopeArgs &a, int64_t t, std::vector<float> &turn) {
    turn.resize(2 * a.count);
    for (int64_t f = 0; f < a.count; f++) {
        float angle = a.angles ? a.angles[t * a.count + f] : static_cast<float>(a.positions[t]) * a.frequencies[f];
        turn[f] = std::cos(angle) * a.cos_factor;
        turn[a.count + f] = std::sin(angle) * a.sin_factor;
    }
    int64_t step = a.interleaved ? 2 : 1, far = a.interleaved ? 1 : a.count;
    for (int64_t h = 0; h < a.heads; h++) {
        const E *x = static_cast<const E *>(a.x) + t * a.token_stride + h * a.head_stride;
        E *y = static_cast<E *>(a.y) + (t * a.heads + h) * a.width;
        memcpy(y, x, a.width * sizeof(E));
        for (int64_t f = 0; f < a.count; f++) {
            int64_t i = a.begin + f * step, j = i + far;
            float one = widened(x[i]), two = widened(x[j]), c = turn[f], s = turn[a.count + f];
            put(y + i, one * c - two * s);
            put(y + j, two * c + one * s);
        }
    }
}

} // namespace

extern "C" void dayzero_rope(const RopeArgs *a) {
#pragma omp parallel num_threads(a->threads) if (a->tokens * a->heads * a->width > SMALL)
    {
        std::vector<float> turn;
#pragma omp for
        for (int64_t t = 0; t < a->tokens; t++) {
            if (a->type) rope_token<bf16>(*a, t, turn);
            else rope_token<float>(*a, t, turn);
        }
    }
}
