// Products of bf16 pairs by the processor's own instruction (AVX-512 BF16), for attention. Included by kernels.cpp.
//
// A word is two neighbouring bf16; vdpbf16ps adds both products of 16 word pairs to 16 f32 sums. Products are exact,
// sums are f32; what is rounded to bf16 first are the probabilities alone, as their total is.
#pragma once
#include <immintrin.h>

namespace {

inline __m512bh words_as_bf16(__m512i x) { return bits_as<__m512bh>(x); }
inline __m512 dot(__m512 sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, words_as_bf16(a), words_as_bf16(b));
}

inline __mmask32 first_of_32(int64_t n) { return n >= 32 ? ~0u : (1u << n) - 1; }
inline __mmask16 first_of_16(int64_t n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

// Rows of words -> columns: out[i * stride + j] = x[j] word i, for 16 rows and 16 words.
inline void transpose_words(__m512i *x, uint32_t *out, int64_t stride) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    // x[4g + c] holds in its 128-bit lane l the words 4l + c of rows 4g .. 4g + 3.
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x44), b = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x44);
        __m512i d = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xee), e = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xee);
        _mm512_storeu_si512(out + c * stride, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(out + (4 + c) * stride, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(out + (8 + c) * stride, _mm512_shuffle_i32x4(d, e, 0x88));
        _mm512_storeu_si512(out + (12 + c) * stride, _mm512_shuffle_i32x4(d, e, 0xdd));
    }
}

// Up to KEYS rows of ``words`` words -> to[words up to 16s][KEYS]; what is behind the last row is 0.
inline void columns_of(const bf16 *const *row, int64_t count, int64_t words, uint32_t *to) {
    for (int64_t j = 0; j < KEYS; j += 16)
        for (int64_t w = 0; w < words; w += 16) {
            __m512i x[16];
            __mmask16 some = first_of_16(words - w);
            for (int64_t i = 0; i < 16; i++)
                x[i] = j + i < count ? _mm512_maskz_loadu_epi32(some, row[j + i] + 2 * w) : _mm512_setzero_si512();
            transpose_words(x, to + w * KEYS + j, KEYS);
        }
}

// Rows two by two -> to[pair][wide] words (row 2i, row 2i + 1), zeros behind ``width`` and the last row.
inline void pairs_of(const bf16 *const *row, int64_t count, int64_t width, int64_t wide, uint32_t *to) {
    for (int64_t j = 0; j < count; j += 2, to += wide)
        for (int64_t n = 0; n < wide; n += 16) {
            __mmask16 some = n < width ? first_of_16(width - n) : 0;
            __m512i one = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, row[j] + n)), two = {};
            if (j + 1 < count) two = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, row[j + 1] + n));
            _mm512_storeu_si512(to + n, _mm512_or_si512(one, _mm512_slli_epi32(two, 16)));
        }
}

// c[ROWS][16 VECS] = factor * a b (+ c): a [ROWS][pairs] words, b [pairs][16 VECS] words.
template <int ROWS, int VECS>
inline void dot_tile(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs, float *c,
                     int64_t ldc, bool add) {
    __m512 acc[ROWS][VECS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECS; i++) acc[r][i] = add ? _mm512_loadu_ps(c + r * ldc + 16 * i) : _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        __m512i x[VECS];
        for (int i = 0; i < VECS; i++) x[i] = _mm512_loadu_si512(b + k * ldb + 16 * i);
        for (int r = 0; r < ROWS; r++) {
            __m512i y = _mm512_set1_epi32(static_cast<int>(a[r * lda + k]));
            for (int i = 0; i < VECS; i++) acc[r][i] = dot(acc[r][i], y, x[i]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECS; i++) _mm512_storeu_ps(c + r * ldc + 16 * i, acc[r][i]);
}

template <int VECS>
inline void dot_rows(int64_t rows, const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs,
                     float *c, int64_t ldc, bool add) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) dot_tile<4, VECS>(a + r * lda, lda, b, ldb, pairs, c + r * ldc, ldc, add);
    for (; r < rows; r++) dot_tile<1, VECS>(a + r * lda, lda, b, ldb, pairs, c + r * ldc, ldc, add);
}

// The first rows of a product with one panel of a packed weight, at most 8: how many were computed.
inline int64_t dot_panel(int64_t rows, const uint32_t *a, int64_t lda, const uint32_t *panel, int64_t pairs, float *out) {
    static_assert(PANEL == 32, "two vectors of 16");
    if (rows >= 8) return dot_tile<8, 2>(a, lda, panel, PANEL, pairs, out, PANEL, false), 8;
    if (rows >= 4) return dot_tile<4, 2>(a, lda, panel, PANEL, pairs, out, PANEL, false), 4;
    if (rows >= 2) return dot_tile<2, 2>(a, lda, panel, PANEL, pairs, out, PANEL, false), 2;
    return dot_tile<1, 2>(a, lda, panel, PANEL, pairs, out, PANEL, false), 1;
}

// The same for any number of columns that is a multiple of 32.
inline void dot_product(int64_t rows, const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t pairs,
                        int64_t cols, float *c, int64_t ldc, bool add) {
    int64_t n = 0;
    for (; n + 64 <= cols; n += 64) dot_rows<4>(rows, a, lda, b + n, ldb, pairs, c + n, ldc, add);
    if (n < cols) dot_rows<2>(rows, a, lda, b + n, ldb, pairs, c + n, ldc, add);
}

// ROWS queries (words, padded with zeros to 32 numbers) times NUM keys where they lie: acc[r * NUM + i] += partial sums.
template <int ROWS, int NUM>
inline void add_dots(const bf16 *const *key, int64_t width, const uint32_t *q, int64_t words, vf *acc) {
    __m512 sums[ROWS * NUM] = {};
    for (int64_t d = 0; d < width; d += 32) {
        __mmask32 some = first_of_32(width - d);
        for (int i = 0; i < NUM; i++) {
            __m512i x = _mm512_maskz_loadu_epi16(some, key[i] + d);
            for (int r = 0; r < ROWS; r++)
                sums[r * NUM + i] = dot(sums[r * NUM + i], x, _mm512_loadu_si512(q + r * words + d / 2));
        }
    }
    for (int i = 0; i < ROWS * NUM; i++) acc[i] = bits_as<vf>(sums[i]);
}

// out[ROWS][32 BLOCKS] += p v for values where they lie, p [ROWS] rows of words p_words apart, rows of out ldo apart.
// Within 32 columns the sums stand as unpacking leaves them, until in_order.
template <int ROWS, int BLOCKS>
inline void add_weighed(const bf16 *const *value, int64_t offset, int64_t count, int64_t width, const uint32_t *p,
                        int64_t p_words, float *out, int64_t ldo) {
    __m512 acc[ROWS][2 * BLOCKS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2 * BLOCKS; i++) acc[r][i] = _mm512_loadu_ps(out + r * ldo + 16 * i);
    for (int64_t j = 0; j < count; j += 2)
        for (int b = 0; b < BLOCKS; b++) {
            __mmask32 some = first_of_32(width - 32 * b);
            __m512i one = _mm512_maskz_loadu_epi16(some, value[j] + offset + 32 * b), two = {};
            if (j + 1 < count) two = _mm512_maskz_loadu_epi16(some, value[j + 1] + offset + 32 * b);
            __m512i low = _mm512_unpacklo_epi16(one, two), high = _mm512_unpackhi_epi16(one, two);
            for (int r = 0; r < ROWS; r++) {
                __m512i y = _mm512_set1_epi32(static_cast<int>(p[r * p_words + j / 2]));
                acc[r][2 * b] = dot(acc[r][2 * b], y, low);
                acc[r][2 * b + 1] = dot(acc[r][2 * b + 1], y, high);
            }
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 2 * BLOCKS; i++) _mm512_storeu_ps(out + r * ldo + 16 * i, acc[r][i]);
}

// One row of KEYS scores -> probabilities over e^top, rounded to ``narrow``; only [begin, end) is visible. Returns by
// how much what was summed before has to shrink. top and total follow.
inline float soften_row(const float *score, float factor, int64_t begin, int64_t end, bf16 *narrow, float &top,
                        float &total) {
    static_assert(KEYS == 64, "four vectors of 16");
    uint64_t seen = end >= KEYS ? ~0ull : end <= 0 ? 0 : (1ull << end) - 1;
    if (begin > 0) seen &= begin >= KEYS ? 0 : ~0ull << begin;
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    __m512 x[4], most = hidden;
    bool wrong = false;
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_mul_ps(_mm512_loadu_ps(score + 16 * i), _mm512_set1_ps(factor));
        x[i] = _mm512_mask_mov_ps(hidden, static_cast<__mmask16>(seen >> (16 * i)), x[i]);
        most = _mm512_max_ps(x[i], most); // of a NaN and a number, the second is taken
        wrong |= _mm512_cmp_ps_mask(x[i], x[i], _CMP_UNORD_Q) != 0;
    }
    float higher = std::max(top, _mm512_reduce_max_ps(most));
    if (higher == -INFINITY && wrong) higher = 0.0f;
    if (higher == -INFINITY) {
        memset(narrow, 0, KEYS * sizeof(bf16));
        return 1.0f;
    }
    __m512 sums = _mm512_setzero_ps();
    for (int i = 0; i < 4; i++) {
        __m256i p = bits_as<__m256i>(_mm512_cvtneps_pbh(bits_as<__m512>(exponential(bits_as<vf>(x[i]) - higher))));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(narrow + 16 * i), p);
        // What is summed is what weighs.
        sums = _mm512_add_ps(sums, bits_as<__m512>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(p), 16)));
    }
    float shrink = higher == top ? 1.0f : top == -INFINITY ? 0.0f : std::exp(top - higher);
    total = total * shrink + _mm512_reduce_add_ps(sums);
    top = higher;
    return shrink;
}

// Ask for lines of records that are read next, so that memory is read while others are computed with.
inline void ask_for(const bf16 *const *record, int64_t num, int64_t offset, int64_t width) {
    for (int64_t j = 0; j < num; j++)
        for (int64_t d = 0; d < width; d += 32)
            _mm_prefetch(reinterpret_cast<const char *>(record[j] + offset + d), _MM_HINT_T0);
}

// Undo the order that add_weighed left: lane l of the first 16 is columns 8l .. 8l + 3, of the second 8l + 4 .. 8l + 7.
inline void in_order(float *out, int64_t columns) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t n = 0; n < columns; n += 32) {
        __m512 low = _mm512_loadu_ps(out + n), high = _mm512_loadu_ps(out + n + 16);
        _mm512_storeu_ps(out + n, _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_ps(out + n + 16, _mm512_permutex2var_ps(low, second, high));
    }
}

} // namespace
