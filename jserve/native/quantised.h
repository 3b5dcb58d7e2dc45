/* Products with quantised weights, for kernels.c: weights of int8, 4 bits and e4m3, in groups or not, with x in bfloat16, and
 * int8 with x rounded to int8.
 *
 *   few rows of x    numbers are widened in registers and sums multiplied by scales (bf16_eight and four_bit_few with
 *                    AVX512_BF16, else grouped.h); what zeros or shifts take off needs the sums of x in each group alone
 *   otherwise        a chunk of weights is widened to bfloat16 where it stays in the second-level cache, and then
 *                    multiplied as any other; numbers of groups are widened with their scales, and so rounded
 *   ROUNDED          sums of integers, exact in 32 bits, then the scales of x and of the weight row, as XLA has them */

/* --- numbers, one at a time --- */

static float e4m3_number(unsigned byte) {
  const unsigned exponent = byte >> 3 & 15, fraction = byte & 7;
  const float size = exponent ? ldexpf((float)(8 + fraction), (int)exponent - 10) : ldexpf((float)fraction, -9);
  const float value = (byte & 0x7f) == 0x7f ? NAN : size;
  return byte & 0x80 ? -value : value;
}

/* The numbers that four bits stand for. */
static const int8_t FOUR_BITS[N_KINDS][16] = {
    [INT4] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
    [UINT4] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    [E2M1] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

static float number(const uint8_t *row, i64 k, int kind) {
  if (half_bytes(kind)) return FOUR_BITS[kind][row[k / 32 * 16 + k % 16] >> (k & 16 ? 4 : 0) & 15];
  return kind == E4M3 ? e4m3_number(row[k]) : (float)(int8_t)row[k];
}

/* Where the numbers of weight row n are. */
INLINE const uint8_t *numbers_of(const Product *p, i64 n) { return p->q + n * (half_bytes(p->kind) ? p->K / 2 : p->K); }

/* Whether results are multiplied by scales: of one a row, if that leaves nothing to take off. */
INLINE int scaled_later(const Product *p) { return p->groups == 1 && !p->shift; }

/* What a number of group g of weight row n is multiplied by as it is widened. */
INLINE float scale_of(const Product *p, i64 n, i64 g) { return scaled_later(p) ? 1 : p->scale[n * p->groups + g]; }
INLINE float zero_of(const Product *p, i64 n, i64 g) { return p->zero ? (float)p->zero[n * p->groups + g] : 0; }
INLINE float shift_of(const Product *p, i64 n, i64 g) { return p->shift ? p->shift[n * p->groups + g] : 0; }

/* Weights k0 .. k1-1 of row n as bfloat16; they are of group g. */
static void widen_some(const Product *p, i64 n, i64 g, i64 k0, i64 k1, bf16 *to) {
  const float scale = scale_of(p, n, g), zero = zero_of(p, n, g), shift = shift_of(p, n, g);
  for (i64 k = k0; k < k1; k++) to[k] = narrow((number(numbers_of(p, n), k, p->kind) - zero) * scale - shift);
}

static void plain_widen(const Product *p, i64 n, bf16 *to) {
  const i64 G = p->K / p->groups;
  for (i64 g = 0; g < p->groups; g++) widen_some(p, n, g, g * G, (g + 1) * G, to);
}

/* --- rounding of x, and products of integers --- */

enum { INFINITE_BITS = 0x7f800000 };

/* The scale of a row whose largest value has these bits without its sign; NaN where it is not finite. */
static float scale_of_most(int32_t bits) {
  float most;
  memcpy(&most, &bits, 4);
  return bits >= INFINITE_BITS ? NAN : (bits ? most : 1.0f) * (1.0f / 127.0f);
}

static RoundedRow plain_round(const float *x, i64 K, int8_t *to) {
  int32_t most = 0, bits;
  for (i64 k = 0; k < K; k++) {
    memcpy(&bits, x + k, 4);
    bits &= 0x7fffffff;
    if (bits > most) most = bits;
  }
  RoundedRow row = {scale_of_most(most), 0};
  for (i64 k = 0; k < K; k++) row.sum += to[k] = most >= INFINITE_BITS ? 0 : (int8_t)rintf(x[k] / row.scale);
  return row;
}

INLINE float scaled_sum(const Product *p, i64 i, i64 n, int32_t sum) {
  return (float)sum * p->rounded[i].scale * p->scale[n];
}

static size_t int8_bytes(i64 L, i64 K) { return (size_t)(L * up_to(K, 64)); }

static void plain_round_pack(const Product *p, i64 i0, i64 i1) {
  for (i64 i = i0; i < i1; i++)
    p->rounded[i] = plain_round(p->x + p->row[i] * p->K, p->K, (int8_t *)p->packed + i * up_to(p->K, 64));
}

static void plain_round_rows(const Product *p, i64 n0, i64 n1, Target t) {
  for (i64 n = n0; n < n1; n++)
    for (i64 i = 0; i < p->L; i++) {
      const int8_t *x = (const int8_t *)p->packed + i * up_to(p->K, 64), *w = (const int8_t *)p->q + n * p->K;
      int32_t sum = 0;
      for (i64 k = 0; k < p->K; k++) sum += x[k] * w[k];
      at(t, i)[n - n0] = scaled_sum(p, i, n, sum);
    }
}

/* Whether numbers, groups, zeros and shifts go together. */
static int fits_quantised(const Product *p) {
  if (p->groups < 1 || p->K % p->groups || (half_bytes(p->kind) && p->K % 32) || (p->zero && p->shift)) return 0;
  return p->kind != ROUNDED || (p->groups == 1 && !p->zero && !p->shift);
}

/* Results of weights that were widened without their scale. */
static void scale_results(const Product *p, i64 n0, i64 n1, Target t) {
  typedef float Some __attribute__((vector_size(64), aligned(4), may_alias));
  for (i64 i = 0; i < p->L; i++) {
    float *y = at(t, i);
    i64 n = n0;
    for (; n + 16 <= n1; n += 16) *(Some *)(y + n - n0) *= *(const Some *)(p->scale + n);
    for (; n < n1; n++) y[n - n0] *= p->scale[n];
  }
}

#define WIDENED(NAME, WIDEN)                                                                                                  \
  static void NAME##_widened(const Product *p, i64 n0, i64 n1, Target t) {                                             \
    for (i64 n = n0; n < n1; n++) WIDEN(p, n, p->room + (n - n0) * p->K);                                       \
    Product wide = *p;                                                                                                 \
    wide.w = p->room;                                                                                                  \
    wide.N = n1 - n0;                                                                                                  \
    wide.next_chunk = (const char *)numbers_of(p, n0 + p->rows_ahead);                                                 \
    NAME##_rows(&wide, 0, n1 - n0, t);                                                                                 \
    if (scaled_later(p)) scale_results(p, n0, n1, t);                                                                  \
  }
WIDENED(plain, plain_widen)

#if X86 || ARM
/* Values of e4m3 bytes, one a word. */
#define E4M3_VALUES(NAME, BASE, TARGET)                                                                                \
  TARGET INLINE BASE##_f NAME##_e4m3(BASE##_i byte) {                                                                  \
    BASE##_i size = byte & 0x7f, bits = (size << 20) + (120 << 23);                                                    \
    BASE##_f small = (BASE##_f)(bits + (1 << 23)) - 0.015625f; /* no exponent: 2^-6 (1 + m / 8) less 2^-6 */           \
    BASE##_f value = BASE##_pick((BASE##_i)(size < 8), small, (BASE##_f)bits);                                         \
    value = BASE##_pick((BASE##_i)(size == 0x7f), BASE##_all(NAN), value);                                             \
    return (BASE##_f)((BASE##_i)value | (byte & 0x80) << 24);                                                          \
  }
#endif

#if X86
/* --- the same in vectors --- */

T_AVX2 INLINE __m128i four_bit_table(int kind) { return _mm_loadu_si128((const __m128i *)FOUR_BITS[kind]); }

/* ``kind``: INT8, E4M3, or any of four bits, which ``table`` has. LOAD reads LANES bytes. */
#define WIDENING(NAME, BASE, TARGET, LANES, LOAD, SIGNED, UNSIGNED, STORE16)                                           \
  E4M3_VALUES(NAME, BASE, TARGET)                                                                                      \
                                                                                                                       \
  TARGET INLINE BASE##_f NAME##_numbers(const uint8_t *row, i64 k, int kind, __m128i table) {                          \
    if (kind == INT8) return __builtin_convertvector((BASE##_i)SIGNED(LOAD(row + k)), BASE##_f);                       \
    if (kind == E4M3) return NAME##_e4m3((BASE##_i)UNSIGNED(LOAD(row + k)));                                           \
    __m128i both = LOAD(row + k / 32 * 16 + k % 16);                                                                   \
    both = _mm_and_si128(k & 16 ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15));                                  \
    return __builtin_convertvector((BASE##_i)SIGNED(_mm_shuffle_epi8(table, both)), BASE##_f);                         \
  }                                                                                                                    \
                                                                                                                       \
  TARGET INLINE void NAME##_widen_as(const Product *p, i64 n, bf16 *to, int kind) {                                    \
    const i64 G = p->K / p->groups;                                                                                    \
    const uint8_t *row = numbers_of(p, n);                                                                             \
    const __m128i table = four_bit_table(p->kind);                                                                     \
    for (i64 g = 0; g < p->groups; g++) {                                                                              \
      const float scale = scale_of(p, n, g), zero = zero_of(p, n, g), shift = shift_of(p, n, g);                       \
      i64 k = g * G;                                                                                                   \
      for (; k % LANES == 0 && k + LANES <= (g + 1) * G; k += LANES)                                                   \
        STORE16(to + k, (NAME##_numbers(row, k, kind, table) - zero) * scale - shift);                                 \
      widen_some(p, n, g, k, (g + 1) * G, to);                                                                         \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  TARGET static void NAME##_widen(const Product *p, i64 n, bf16 *to) {                                                 \
    if (p->kind == INT8)                                                                                               \
      NAME##_widen_as(p, n, to, INT8);                                                                                 \
    else if (p->kind == E4M3)                                                                                          \
      NAME##_widen_as(p, n, to, E4M3);                                                                                 \
    else                                                                                                               \
      NAME##_widen_as(p, n, to, INT4);                                                                                 \
  }

T_AVX2 INLINE __m128i load8(const uint8_t *q) { return _mm_loadl_epi64((const __m128i *)q); }
T_AVX2 INLINE __m128i load16(const uint8_t *q) { return _mm_loadu_si128((const __m128i *)q); }
T_AVX2 INLINE __m256i avx2_narrow(avx2_f x) {
  avx2_i bits = (avx2_i)x, up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff;
  return (__m256i)avx2_pick((avx2_i)(x != x), (avx2_f)(avx2_i)_mm256_set1_epi32(0x7fc0), (avx2_f)up);
}
T_AVX2 INLINE void avx2_store16(bf16 *to, avx2_f x) {
  __m256i v = avx2_narrow(x);
  _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}

T_BF16 INLINE void bf16_store16(bf16 *to, avx512f_f x) { _mm256_storeu_si256((__m256i *)to, rounded((__m512)x)); }

WIDENING(avx2_any, avx2, T_AVX2, 8, load8, _mm256_cvtepi8_epi32, _mm256_cvtepu8_epi32, avx2_store16)
WIDENING(any, avx512f, T_BF16, 16, load16, _mm512_cvtepi8_epi32, _mm512_cvtepu8_epi32, bf16_store16)
#undef WIDENING

/* --- numbers whose weights are the same everywhere, or all through a group, by bytes (AVX2) ---
 *
 * The two bytes of a bfloat16 are looked up or made apart from each other, 32 numbers at once. */

typedef struct {
  __m256i low, high;
} Bytes;

/* Of e4m3: where it has an exponent its bits are those of bfloat16, but for the exponent's bias. */
T_AVX2 INLINE Bytes e4m3_bytes(__m256i v) {
  const __m256i most = _mm256_set1_epi8(0x7f), size = _mm256_and_si256(v, most);
  const __m256i highs = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 59, 59, 59, 60, 60, 60, 60, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i lows = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0));
  __m256i low = _mm256_slli_epi16(_mm256_and_si256(size, _mm256_set1_epi8(15)), 4);
  __m256i high = _mm256_and_si256(_mm256_srli_epi16(size, 4), _mm256_set1_epi8(7));
  high = _mm256_add_epi8(high, _mm256_set1_epi8(60));
  const __m256i small = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), size), nan = _mm256_cmpeq_epi8(size, most);
  low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(lows, size), small);
  high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(highs, size), small);
  high = _mm256_or_si256(high, _mm256_and_si256(nan, most));
  return (Bytes){_mm256_or_si256(low, _mm256_and_si256(nan, _mm256_set1_epi8((char)0xc0))),
                 _mm256_or_si256(high, _mm256_andnot_si256(most, v))};
}

T_AVX2 INLINE void store32(bf16 *to, Bytes v) {
  const __m256i a = _mm256_unpacklo_epi8(v.low, v.high), b = _mm256_unpackhi_epi8(v.low, v.high);
  _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(a, b, 0x20));
  _mm256_storeu_si256((__m256i *)(to + 16), _mm256_permute2x128_si256(a, b, 0x31));
}

/* 32 numbers of four bits, a byte each, in order. */
T_AVX2 INLINE __m256i nibbles32(const uint8_t *q) {
  const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)q));
  return _mm256_and_si256(_mm256_srlv_epi64(v, _mm256_set_epi64x(4, 4, 0, 0)), _mm256_set1_epi8(15));
}

/* The weights of all sixteen numbers of a group. */
T_AVX2 INLINE Bytes table_of(const Product *p, i64 n, i64 g) {
  const float scale = scale_of(p, n, g), zero = zero_of(p, n, g), shift = shift_of(p, n, g);
  bf16 all[16];
  for (int i = 0; i < 2; i++) {
    const __m256i some = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(FOUR_BITS[p->kind] + 8 * i)));
    avx2_store16(all + 8 * i, (__builtin_convertvector((avx2_i)some, avx2_f) - zero) * scale - shift);
  }
  const __m256i v = _mm256_loadu_si256((const __m256i *)all), byte = _mm256_set1_epi16(255);
  const __m256i both = _mm256_packus_epi16(_mm256_and_si256(v, byte), _mm256_srli_epi16(v, 8));
  const __m256i turned = _mm256_permute4x64_epi64(both, 0xd8); /* all low ones, all high ones */
  return (Bytes){_mm256_permute2x128_si256(turned, turned, 0x00), _mm256_permute2x128_si256(turned, turned, 0x11)};
}

/* Whether weights are widened so fast that from FEW rows on it is worth while: without a scale, or by tables that serve
 * many of them. */
static int widens_by_bytes(const Product *p) {
  if (half_bytes(p->kind)) return p->K / p->groups >= 64 && p->K / p->groups % 32 == 0;
  return scaled_later(p) && !p->zero;
}

T_AVX2 static void avx2_widen(const Product *p, i64 n, bf16 *to) {
  const uint8_t *row = numbers_of(p, n);
  const i64 K = p->K, G = K / p->groups;
  i64 k = 0;
  if (half_bytes(p->kind) && G % 32 == 0) {
    for (i64 g = 0; g < p->groups; g++) {
      const Bytes table = table_of(p, n, g);
      for (; k < (g + 1) * G; k += 32) {
        const __m256i v = nibbles32(row + k / 2);
        store32(to + k, (Bytes){_mm256_shuffle_epi8(table.low, v), _mm256_shuffle_epi8(table.high, v)});
      }
    }
  } else if (p->kind == E4M3 && scaled_later(p) && !p->zero) {
    for (; k + 32 <= K; k += 32) store32(to + k, e4m3_bytes(_mm256_loadu_si256((const __m256i *)(row + k))));
    widen_some(p, n, 0, k, K, to);
  } else if (p->kind == INT8 && scaled_later(p) && !p->zero) {
    for (; k + 8 <= K; k += 8) { /* whole numbers below 256 lose nothing */
      const __m256i v = (__m256i)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load8(row + k)));
      const __m256i up = _mm256_srli_epi32(v, 16);
      const __m128i eight = _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
      _mm_storeu_si128((__m128i *)(to + k), eight);
    }
    widen_some(p, n, 0, k, K, to);
  } else {
    avx2_any_widen(p, n, to);
  }
}

/* Numbers without groups or zeros, 32 at a time. */
T_BF16 INLINE void bf16_widen_exactly(const Product *p, i64 n, bf16 *to, int kind) {
  const char *row = weight_row(p, n, kind);
  i64 k = 0;
  for (; k + 32 <= p->K; k += 32) _mm512_storeu_si512(to + k, weights(row, k, kind));
  widen_some(p, n, 0, k, p->K, to);
}

/* 4 bits: a table has the weights of all sixteen numbers of a group; the four of a word are brought to the low bits of four
 * words, which are what a permutation looks at, and then into the order of weights. */
T_BF16 static void four_bit_widen(const Product *p, i64 n, bf16 *to) {
  const __m512i shifts = _mm512_set_epi64(0x000c000c000c000c, 0x000c000c000c000c, 0x0008000800080008, 0x0008000800080008,
                                          0x0004000400040004, 0x0004000400040004, 0, 0);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512 every = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(four_bit_table(p->kind)));
  const i64 G = p->K / p->groups;
  const uint8_t *row = numbers_of(p, n);
  for (i64 g = 0; g < p->groups; g++) {
    __m512 of = _mm512_mul_ps(_mm512_sub_ps(every, _mm512_set1_ps(zero_of(p, n, g))), _mm512_set1_ps(scale_of(p, n, g)));
    const __m512i table = _mm512_broadcast_i64x4(rounded(_mm512_sub_ps(of, _mm512_set1_ps(shift_of(p, n, g)))));
    for (i64 k = g * G; k < (g + 1) * G; k += 32) {
      __m512i v = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(row + k / 2)));
      v = _mm512_permutexvar_epi16(_mm512_srlv_epi16(v, shifts), table);
      _mm512_storeu_si512(to + k, _mm512_permutexvar_epi16(order, v));
    }
  }
}

T_BF16 static void bf16_widen(const Product *p, i64 n, bf16 *to) {
  const int row_scales = scaled_later(p) && !p->zero;
  if (half_bytes(p->kind) && p->K / p->groups % 32 == 0)
    four_bit_widen(p, n, to);
  else if (p->kind == INT8 && row_scales)
    bf16_widen_exactly(p, n, to, INT8);
  else if (p->kind == E4M3 && row_scales)
    bf16_widen_exactly(p, n, to, E4M3);
  else
    any_widen(p, n, to);
}
WIDENED(avx2, avx2_widen)
WIDENED(avx512f, avx2_widen)
WIDENED(bf16, bf16_widen)

#define ROWS_OF(NAME)                                                                                               \
  static void NAME##_rows(const Product *p, i64 n0, i64 n1, Target t) {                                                \
    if (p->few)                                                                                                        \
      NAME##_few(p, n0, n1, t);                                                                                        \
    else                                                                                                               \
      bf16_widened(p, n0, n1, t);                                                                                      \
  }
ROWS_OF(int8)
ROWS_OF(e4m3)

/* --- rounded x against int8 by products of 16-bit integers ---
 *
 * x as 16-bit numbers: of one row as they are, else [ceil(L / 4)][ceil(K / 16)][4 rows][16]. */

static size_t whole_bytes(i64 L, i64 K) { return (size_t)(up_to(L, 4) * up_to(K, 16)) * sizeof(int16_t); }

/* Up to 8 values from x on, of which there are ``n``. */
T_AVX2 INLINE __m256 some8(const float *x, i64 n) {
  if (n >= 8) return _mm256_loadu_ps(x);
  __m256 v = _mm256_setzero_ps();
  memcpy(&v, x, (size_t)max64(n, 0) * sizeof *x);
  return v;
}

/* 16 values from x on, of which there are ``n``, rounded; zeros where the row is not finite. */
T_AVX2 INLINE __m256i rounded16(const float *x, i64 n, float scale) {
  if (!(scale == scale)) return _mm256_setzero_si256();
  __m256i low = _mm256_cvtps_epi32(_mm256_div_ps(some8(x, n), _mm256_set1_ps(scale)));
  __m256i high = _mm256_cvtps_epi32(_mm256_div_ps(some8(x + min64(n, 8), n - 8), _mm256_set1_ps(scale)));
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
}

T_AVX2 INLINE int32_t avx2_most_bits(const float *x, i64 K) {
  const __m256 size = (__m256)_mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (i64 k = 0; k < K; k += 8)
    most = _mm256_max_epi32(most, (__m256i)_mm256_and_ps(some8(x + k, K - k), size));
  int32_t each[8], found = 0;
  _mm256_storeu_si256((__m256i *)each, most);
  for (int j = 0; j < 8; j++) found = each[j] > found ? each[j] : found;
  return found;
}

T_AVX2 static void avx2_round_pack(const Product *p, i64 i0, i64 i1) {
  const i64 width = up_to(p->K, 16), rows = p->few && p->L == 1 ? 1 : 4;
  int16_t *to = (int16_t *)p->packed + i0 * width;
  if (i1 == p->L) memset(to, 0, (size_t)((up_to(i1, 4) - i0) * width) * sizeof *to);
  for (i64 i = i0; i < i1; i++) {
    const float *x = p->x + p->row[i] * p->K;
    int16_t *at_row = to + (i - i0) / rows * rows * width + (i - i0) % rows * 16;
    p->rounded[i].scale = scale_of_most(avx2_most_bits(x, p->K));
    for (i64 k = 0; k < p->K; k += 16)
      _mm256_storeu_si256((__m256i *)(at_row + k * rows), rounded16(x + k, p->K - k, p->rounded[i].scale));
  }
}

T_AVX2 INLINE __m256i whole16(const uint8_t *w, i64 n) {
  __m128i v = _mm_setzero_si128();
  if (n >= 16)
    v = _mm_loadu_si128((const __m128i *)w);
  else
    memcpy(&v, w, (size_t)n);
  return _mm256_cvtepi8_epi16(v);
}
T_AVX2 INLINE __m256i plus_products(__m256i sum, __m256i a, const int16_t *x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, _mm256_loadu_si256((const __m256i *)x)));
}
T_AVX2 INLINE __m128i four_sums(__m256i a, __m256i b, __m256i c, __m256i d) {
  __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

T_AVX2 INLINE int32_t whole_one(const int16_t *x, const uint8_t *w, i64 K) {
  __m256i a = _mm256_setzero_si256(), b = a;
  i64 k = 0;
  for (; k + 32 <= K; k += 32) {
    a = plus_products(a, whole16(w + k, 16), x + k);
    b = plus_products(b, whole16(w + k + 16, 16), x + k + 16);
  }
  for (; k < K; k += 16) a = plus_products(a, whole16(w + k, K - k), x + k);
  return _mm_cvtsi128_si32(four_sums(_mm256_add_epi32(a, b), a, a, a));
}

/* To y: the sums of two weight rows and four rows of x. */
T_AVX2 INLINE void whole_tile(const int16_t *x, const uint8_t *w0, const uint8_t *w1, i64 K, __m128i *y) {
  __m256i z = _mm256_setzero_si256(), a0 = z, a1 = z, a2 = z, a3 = z, b0 = z, b1 = z, b2 = z, b3 = z;
  for (i64 k = 0; k < K; k += 16, x += 64) {
    const __m256i v0 = whole16(w0 + k, K - k), v1 = whole16(w1 + k, K - k);
    a0 = plus_products(a0, v0, x), a1 = plus_products(a1, v0, x + 16);
    a2 = plus_products(a2, v0, x + 32), a3 = plus_products(a3, v0, x + 48);
    b0 = plus_products(b0, v1, x), b1 = plus_products(b1, v1, x + 16);
    b2 = plus_products(b2, v1, x + 32), b3 = plus_products(b3, v1, x + 48);
  }
  y[0] = _mm_add_epi32(y[0], four_sums(a0, a1, a2, a3));
  y[1] = _mm_add_epi32(y[1], four_sums(b0, b1, b2, b3));
}

/* TILED rows of x, or what there is of them, meet TILED_N weight rows in parts of ``part`` numbers. */
T_AVX2 INLINE void whole_many(const Product *p, i64 n0, i64 n1, Target t, i64 part) {
  const i64 K = p->K, width = up_to(K, 16);
  for (i64 first = n0; first < n1; first += TILED_N)
    for (i64 i0 = 0; i0 < p->L; i0 += TILED) {
      const i64 end = min64(n1, first + TILED_N), rows = min64(p->L - i0, TILED);
      __m128i y[TILED / 4][TILED_N + 1];
      memset(y, 0, sizeof y);
      for (i64 k = 0; k < K; k += part)
        for (i64 n = first; n < end; n += 2)
          for (i64 i = 0; i < rows; i += 4)
            whole_tile((const int16_t *)p->packed + (i0 + i) * width + 4 * k, p->q + n * K + k,
                       p->q + min64(n + 1, n1 - 1) * K + k, min64(K - k, part), y[i / 4] + (n - first));
      for (i64 i = 0; i < rows; i++)
        for (i64 n = first; n < end; n++)
          at(t, i0 + i)[n - n0] = scaled_sum(p, i0 + i, n, ((const int32_t *)&y[i / 4][n - first])[i % 4]);
    }
}

T_AVX2 static void avx2_round_rows(const Product *p, i64 n0, i64 n1, Target t) {
  if (p->few && p->L == 1)
    for (i64 n = n0; n < n1; n++) at(t, 0)[n - n0] = scaled_sum(p, 0, n, whole_one(p->packed, p->q + n * p->K, p->K));
  else
    whole_many(p, n0, n1, t, p->few ? p->K : 2 * TILED_K);
}

/* --- AVX512_BF16, which has VNNI: products of an unsigned and a signed byte --- */

#define T_VNNI __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))

T_VNNI INLINE __m512i dp8(__m512i sum, __m512i unsigned_, __m512i signed_) {
  return _mm512_dpbusd_epi32(sum, unsigned_, signed_);
}
T_VNNI INLINE __mmask64 first_bytes(i64 n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
T_VNNI INLINE __m512i plus_128(__m512i bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80)); }

/* sums4 and folded of integers. */
T_VNNI INLINE __m512i whole4(__m512i a, __m512i b, __m512i c, __m512i d) {
  __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}
T_VNNI INLINE __m512i whole_folded(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}

T_VNNI static int32_t most_bits(const float *x, i64 K) {
  __m512i most = _mm512_setzero_si512(), size = _mm512_set1_epi32(0x7fffffff);
  for (i64 k = 0; k < K; k += 16) {
    __mmask16 there = (__mmask16)first_bytes(min64(16, K - k));
    most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_maskz_loadu_epi32(there, x + k), size));
  }
  return _mm512_reduce_max_epi32(most);
}

/* 64 values from x on, of which there are ``n``, rounded; zeros where the row is not finite. */
T_VNNI INLINE __m512i rounded64(const float *x, i64 n, float scale) {
  __m512i bytes = _mm512_setzero_si512();
  if (!(scale == scale)) return bytes;
  __m128i part[4];
  for (int j = 0; j < 4; j++) {
    i64 left = max64(0, min64(16, n - 16 * j));
    __m512 v = _mm512_maskz_loadu_ps((__mmask16)first_bytes(left), left ? x + 16 * j : x);
    part[j] = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_div_ps(v, _mm512_set1_ps(scale))));
  }
  memcpy(&bytes, part, sizeof bytes);
  return bytes;
}

/* Few live rows are kept as rows of whole vectors, a multiple of four; else lanes are rows of x:
 * [ceil(L / 16)][16 * ceil(K / 64)][16] of four numbers, plus 128 where tiles do not multiply them. Room for either. */
static size_t vnni_bytes(i64 L, i64 K) { return (size_t)(up_to(L, L <= AMX_FEW ? 4 : 16) * up_to(K, 64)); }

T_VNNI static void vnni_pack_rows(const Product *p) {
  const i64 K = p->K, width = up_to(K, 64);
  memset((char *)p->packed + p->L * width, 0, (size_t)((up_to(p->L, 4) - p->L) * width));
  for (i64 i = 0; i < p->L; i++) {
    const float *x = p->x + p->row[i] * K;
    RoundedRow *row = p->rounded + i;
    row->scale = scale_of_most(most_bits(x, K));
    __m512i sum = _mm512_setzero_si512();
    for (i64 k = 0; k < K; k += 64) {
      __m512i bytes = rounded64(x + k, K - k, row->scale);
      sum = dp8(sum, _mm512_set1_epi8(1), bytes);
      _mm512_storeu_si512((char *)p->packed + i * width + k, bytes);
    }
    row->sum = _mm512_reduce_add_epi32(sum);
  }
}

T_VNNI static void vnni_pack(const Product *p, i64 i0, i64 i1) {
  const i64 K = p->K, fours = up_to(K, 64) / 4;
  if (p->few) {
    vnni_pack_rows(p);
    return;
  }
  for (i64 i = i0; i < i1; i += 16) {
    const i64 rows = min64(16, p->L - i);
    for (i64 r = 0; r < rows; r++) p->rounded[i + r].scale = scale_of_most(most_bits(p->x + p->row[i + r] * K, K));
    for (i64 k = 0; k < K; k += 64) {
      __m512i v[16];
      for (i64 r = 0; r < 16; r++) {
        v[r] = _mm512_setzero_si512();
        if (r < rows) v[r] = rounded64(p->x + p->row[i + r] * K + k, K - k, p->rounded[i + r].scale);
        if (r < rows && !p->amx) v[r] = plus_128(v[r]);
      }
      turn16(v);
      for (i64 j = 0; j < 16; j++) _mm512_storeu_si512((uint32_t *)p->packed + i * fours + (k / 4 + j) * 16, v[j]);
    }
  }
}

/* One row of x, eight weight rows at once, which are made unsigned by adding 128. */
T_VNNI static void vnni_eight(const Product *p, i64 n0, i64 n1, float *y) {
  const int8_t *x = p->packed;
  const i64 K = p->K;
  for (i64 n = n0; n < n1; n += 8, y += 8) {
    const char *near = weight_row(p, next_rows(p, n, n1, 8, K), INT8);
#define BEGIN(i)                                                                                                       \
  const char *w##i = weight_row(p, min64(n + i, n1 - 1), INT8);                                                        \
  __m512i s##i = _mm512_setzero_si512();
    EIGHT(BEGIN)
    i64 k = 0;
    for (; k + 64 <= K; k += 64) {
      __m512i v = _mm512_loadu_si512(x + k);
      const char *next = near + 8 * k;
      EIGHT(NEXT)
#define STEP(i) s##i = dp8(s##i, plus_128(_mm512_loadu_si512(w##i + k)), v);
      EIGHT(STEP)
    }
    if (k < K) {
      __m512i v = _mm512_loadu_si512(x + k);
#define LAST(i) s##i = dp8(s##i, plus_128(_mm512_maskz_loadu_epi8(first_bytes(K - k), w##i + k)), v);
      EIGHT(LAST)
    }
#undef BEGIN
#undef STEP
#undef LAST
    const __mmask16 there = (__mmask16)((1u << min64(8, n1 - n)) - 1);
    __m512i four = whole_folded(whole4(s0, s1, s2, s3), whole4(s4, s5, s6, s7)), sum = whole_folded(four, four);
    sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(p->rounded->sum * 128));
    __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(p->rounded->scale));
    _mm512_mask_storeu_ps(y, there, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(there, p->scale + n)));
  }
}

/* Four rows of x against four weight rows. */
T_VNNI static void vnni_four_by_four(const Product *p, i64 n0, i64 n1, Target t) {
  const i64 K = p->K, width = up_to(K, 64);
  for (i64 n = n0; n < n1; n += 4)
    for (i64 i = 0; i < p->L; i += 4) {
      const int8_t *x = (const int8_t *)p->packed + i * width;
      const char *near = weight_row(p, next_rows(p, n, n1, 4, K), INT8), *w[4];
      for (int r = 0; r < 4; r++) w[r] = weight_row(p, min64(n + r, n1 - 1), INT8);
      __m512i z = _mm512_setzero_si512();
      __m512i a0 = z, a1 = z, a2 = z, a3 = z, b0 = z, b1 = z, b2 = z, b3 = z;
      __m512i c0 = z, c1 = z, c2 = z, c3 = z, d0 = z, d1 = z, d2 = z, d3 = z;
      for (i64 k = 0; k < K; k += 64) {
        const char *next = near + 4 * k;
        NEXT(0) NEXT(1) NEXT(2) NEXT(3)
        const __mmask64 there = first_bytes(K - k);
        __m512i v0 = plus_128(_mm512_maskz_loadu_epi8(there, w[0] + k));
        __m512i v1 = plus_128(_mm512_maskz_loadu_epi8(there, w[1] + k));
        __m512i v2 = plus_128(_mm512_maskz_loadu_epi8(there, w[2] + k));
        __m512i v3 = plus_128(_mm512_maskz_loadu_epi8(there, w[3] + k));
        __m512i u = _mm512_loadu_si512(x + k);
        a0 = dp8(a0, v0, u), a1 = dp8(a1, v1, u), a2 = dp8(a2, v2, u), a3 = dp8(a3, v3, u);
        u = _mm512_loadu_si512(x + width + k);
        b0 = dp8(b0, v0, u), b1 = dp8(b1, v1, u), b2 = dp8(b2, v2, u), b3 = dp8(b3, v3, u);
        u = _mm512_loadu_si512(x + 2 * width + k);
        c0 = dp8(c0, v0, u), c1 = dp8(c1, v1, u), c2 = dp8(c2, v2, u), c3 = dp8(c3, v3, u);
        u = _mm512_loadu_si512(x + 3 * width + k);
        d0 = dp8(d0, v0, u), d1 = dp8(d1, v1, u), d2 = dp8(d2, v2, u), d3 = dp8(d3, v3, u);
      }
      __m512i ab = whole_folded(whole4(a0, a1, a2, a3), whole4(b0, b1, b2, b3));
      __m512i cd = whole_folded(whole4(c0, c1, c2, c3), whole4(d0, d1, d2, d3));
      int32_t sums[16];
      _mm512_storeu_si512(sums, whole_folded(ab, cd));
      for (i64 j = 0; j < min64(4, p->L - i); j++)
        for (i64 c = 0; c < min64(4, n1 - n); c++)
          at(t, i + j)[n - n0 + c] = scaled_sum(p, i + j, n + c, sums[4 * j + c] - 128 * p->rounded[i + j].sum);
    }
}

/* The sums of eight weight rows, which x plus 128 has too much of. */
T_VNNI INLINE void weight_sums(const Product *p, i64 n, i64 n1, int32_t *sums) {
  __m512i s[8];
  for (int r = 0; r < 8; r++) {
    const char *w = weight_row(p, min64(n + r, n1 - 1), INT8);
    s[r] = _mm512_setzero_si512();
    for (i64 k = 0; k < p->K; k += 64)
      s[r] = dp8(s[r], _mm512_set1_epi8(1), _mm512_maskz_loadu_epi8(first_bytes(p->K - k), w + k));
  }
  __m512i four = whole_folded(whole4(s[0], s[1], s[2], s[3]), whole4(s[4], s[5], s[6], s[7]));
  _mm512_mask_storeu_epi32(sums, 0xff, whole_folded(four, four));
}

T_VNNI INLINE __m512i four_bytes(const char *p, i64 n) {
  int32_t all = 0;
  memcpy(&all, p, (size_t)n);
  return _mm512_set1_epi32(all);
}

/* As bf16_lanes. */
T_VNNI INLINE void vnni_lanes(const Product *p, i64 i, i64 n, i64 n0, i64 n1, Target t, int two, int ahead) {
  const i64 K = p->K, fours = up_to(K, 64) / 4;
  const uint32_t *x = (const uint32_t *)p->packed + i * fours, *u = x + 16 * fours;
  const char *next = (const char *)p->q + min64(n + 16, p->N - 1) * K;
  int32_t sums[8];
  weight_sums(p, n, n1, sums);
#define BEGIN(r)                                                                                                       \
  const char *w##r = weight_row(p, min64(n + r, n1 - 1), INT8);                                                        \
  __m512i s##r = _mm512_setzero_si512(), t##r = s##r;
  EIGHT(BEGIN)
#define STEP(r)                                                                                                        \
  v = four_bytes(w##r + k, 4);                                                                                         \
  s##r = dp8(s##r, a, v);                                                                                              \
  if (two) t##r = dp8(t##r, b, v);
#define LAST(r)                                                                                                        \
  v = four_bytes(w##r + k, K - k);                                                                                     \
  s##r = dp8(s##r, a, v);                                                                                              \
  if (two) t##r = dp8(t##r, b, v);
  i64 k = 0;
  for (; k + 4 <= K; k += 4) {
    __m512i v, a = _mm512_loadu_si512(x + k * 4), b = two ? _mm512_loadu_si512(u + k * 4) : a;
    if (ahead && k % 8 == 0) _mm_prefetch(next + k * 8, _MM_HINT_T1);
    EIGHT(STEP)
  }
  if (k < K) {
    __m512i v, a = _mm512_loadu_si512(x + k * 4), b = two ? _mm512_loadu_si512(u + k * 4) : a;
    EIGHT(LAST)
  }
#undef LAST
#undef STEP
#undef BEGIN
  float scales[32] = {0};
  for (i64 j = 0; j < min64(32, p->L - i); j++) scales[j] = p->rounded[i + j].scale;
  const __m512 first = _mm512_loadu_ps(scales), second = _mm512_loadu_ps(scales + 16);
  const i64 columns = min64(8, n1 - n);
  __m512 out[8];
#define SCALED(v, r, with)                                                                                             \
  out[r] = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(v, _mm512_set1_epi32(128 * sums[r]))), with), \
                         _mm512_set1_ps(p->scale[min64(n + r, n1 - 1)]));
#define FIRST(r) SCALED(s##r, r, first)
#define SECOND(r) SCALED(t##r, r, second)
  EIGHT(FIRST)
  put(out, t, i, min64(16, p->L - i), n - n0, columns);
  if (two) {
    EIGHT(SECOND)
    put(out, t, i + 16, min64(16, p->L - i - 16), n - n0, columns);
  }
#undef SECOND
#undef FIRST
#undef SCALED
}

T_VNNI static void vnni_rows(const Product *p, i64 n0, i64 n1, Target t) {
#if HAS_AMX
  if (p->amx && !p->few) {
    amx_rows(p, n0, n1, t);
    return;
  }
#endif
  if (p->few && p->L == 1) {
    vnni_eight(p, n0, n1, at(t, 0));
    return;
  }
  if (p->few) {
    vnni_four_by_four(p, n0, n1, t);
    return;
  }
  const i64 group = vnni_bytes(p->L, p->K) > NEAR_BYTES ? max64(n1 - n0, 1) : 8;
  for (i64 first = n0; first < n1; first += group)
    for (i64 i = 0; i < p->L; i += 32)
      for (i64 n = first; n < min64(n1, first + group); n += 8) {
        if (p->L - i > 16)
          i ? vnni_lanes(p, i, n, n0, n1, t, 1, 0) : vnni_lanes(p, i, n, n0, n1, t, 1, 1);
        else
          i ? vnni_lanes(p, i, n, n0, n1, t, 0, 0) : vnni_lanes(p, i, n, n0, n1, t, 0, 1);
      }
}

/* --- 4 bits and few rows ---
 *
 * 64 bytes hold 128 weights. A word of them has four, of which a permutation of a table of all sixteen numbers, which looks
 * at five bits of each word (the table is there twice), makes bfloat16: four vectors, in an order that x is packed in. */

enum { FOUR_BIT_BLOCK = 128 };

static size_t four_bit_bytes(i64 L, i64 K) {
  const i64 few = L <= FEW ? up_to(L, 4) * up_to(K, FOUR_BIT_BLOCK) * (i64)sizeof(bf16) : 0;
  return (size_t)max64(few, (i64)bf16_bytes(L, K));
}

/* Whether the scales of a block fill whole lanes of its sums. */
INLINE int fits_four_bit(i64 K, i64 groups) {
  const i64 G = K / groups;
  return groups == 1 || G == 32 || G == 64 || G % FOUR_BIT_BLOCK == 0;
}

T_BF16 static void four_bit_pack(const Product *p, i64 i0, i64 i1) {
  if (!p->few) {
    bf16_pack_lanes(p, i0, i1);
    return;
  }
  const i64 K = p->K, width = up_to(K, FOUR_BIT_BLOCK);
  const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22,
                                         20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  memset(p->packed, 0, four_bit_bytes(p->L, K));
  for (i64 i = 0; i < p->L; i++) {
    const float *from = p->x + p->row[i] * K;
    for (i64 k = 0; k < K; k += 32) {
      __m256i low = rounded(_mm512_loadu_ps(from + k)), high = rounded(_mm512_loadu_ps(from + k + 16));
      __m512i v = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      v = _mm512_permutexvar_epi16(order, v);
      bf16 *to = (bf16 *)p->packed + i * width + k / FOUR_BIT_BLOCK * FOUR_BIT_BLOCK + k % FOUR_BIT_BLOCK / 4;
      _mm_storeu_si128((__m128i *)to, _mm512_castsi512_si128(v));
      _mm_storeu_si128((__m128i *)(to + 32), _mm512_extracti32x4_epi32(v, 1));
      _mm_storeu_si128((__m128i *)(to + 64), _mm512_extracti32x4_epi32(v, 2));
      _mm_storeu_si128((__m128i *)(to + 96), _mm512_extracti32x4_epi32(v, 3));
    }
  }
}

/* What is taken off: a zero times the scale, or a shift. */
enum { NOTHING, ZEROS, SHIFTS };

/* The scales, or zeros, of a block's lanes: ``wide``: of one group, else of 128 / G. */
typedef struct {
  __m512i lane;   /* where a lane has its own from */
  __mmask8 there; /* those that the row still has */
  i64 group;
} Groups;

T_BF16 INLINE __m512 lane_scales(const float *row, Groups g, int wide) {
  if (wide) return _mm512_set1_ps(row[g.group]);
  return _mm512_permutexvar_ps(g.lane, _mm512_castps128_ps512(_mm_maskz_loadu_ps(g.there, row + g.group)));
}
T_BF16 INLINE __m512 lane_zeros(const int8_t *row, Groups g, int wide) {
  if (wide) return _mm512_set1_ps(row[g.group]);
  __m128i some = _mm_maskz_loadu_epi8((__mmask16)g.there, row + g.group);
  __m128 four = _mm_cvtepi32_ps(_mm_cvtepi8_epi32(some));
  return _mm512_permutexvar_ps(g.lane, _mm512_castps128_ps512(four));
}

/* The groups of the block that begins at weight k. */
T_BF16 INLINE Groups groups_at(const Product *p, i64 k, i64 G, int wide) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  Groups g = {_mm512_setzero_si512(), 0, k / G};
  if (wide) return g;
  g.lane = _mm512_srli_epi32(lanes, G == 32 ? 2 : 3);
  g.there = (__mmask8)((1u << min64(FOUR_BIT_BLOCK / G, p->groups - g.group)) - 1);
  return g;
}

/* 4 * 32 numbers of 128 weights, of which there are ``n``. */
typedef struct {
  __m512i a, b, c, d;
} Numbers;

/* All sixteen numbers as bfloat16, twice. */
T_BF16 INLINE __m512i sixteen_twice(int kind) {
  return _mm512_broadcast_i64x4(rounded(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(four_bit_table(kind)))));
}

T_BF16 INLINE Numbers four_bit_numbers(const uint8_t *q, i64 n, __m512i table) {
  __m512i v = n >= FOUR_BIT_BLOCK ? _mm512_loadu_si512(q) : _mm512_maskz_loadu_epi8((1ull << n / 2) - 1, q);
  return (Numbers){_mm512_permutexvar_epi16(v, table), _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table),
                   _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table),
                   _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table)};
}

T_BF16 INLINE __m512 dp_block(__m512 sum, Numbers w, Numbers x) {
  return dp(dp(dp(dp(sum, x.a, w.a), x.b, w.b), x.c, w.c), x.d, w.d);
}
T_BF16 INLINE Numbers block_of(const bf16 *x) { return (Numbers){load(x), load(x + 32), load(x + 64), load(x + 96)}; }

/* The sums of x in each lane, that zeros and shifts take off. */
T_BF16 INLINE __m512 block_sum(Numbers x) {
  const __m512i one = _mm512_set1_epi16(0x3f80);
  return dp_block(_mm512_setzero_ps(), (Numbers){one, one, one, one}, x);
}

T_BF16 INLINE void four_bit_eight(const Product *p, i64 n0, i64 n1, float *y, int wide, int off) {
  const bf16 *x = p->packed;
  const __m512i table = sixteen_twice(p->kind);
  const i64 K = p->K, G = K / p->groups, half = K / 2;
  for (i64 n = n0; n < n1; n += 8, y += 8) {
    const char *near = (const char *)p->q + next_rows(p, n, n1, 8, half) * half;
#define BEGIN(i)                                                                                                       \
  const i64 row##i = min64(n + i, n1 - 1);                                                                              \
  const uint8_t *w##i = p->q + row##i * half;                                                                            \
  __m512 s##i = _mm512_setzero_ps();
    EIGHT(BEGIN)
    for (i64 k = 0; k < K; k += FOUR_BIT_BLOCK) {
      const char *next = near + 4 * k;
      EIGHT(NEXT)
      const Groups g = groups_at(p, k, G, wide);
      const Numbers v = block_of(x + k);
      const __m512 sum = off ? block_sum(v) : _mm512_setzero_ps();
      __m512 t;
#define STEP(i)                                                                                                        \
  t = _mm512_setzero_ps();                                                                                             \
  if (off == ZEROS) t = _mm512_fnmadd_ps(lane_zeros(p->zero + row##i * p->groups, g, wide), sum, t);                   \
  if (off == SHIFTS) s##i = _mm512_fnmadd_ps(lane_scales(p->shift + row##i * p->groups, g, wide), sum, s##i);          \
  t = dp_block(t, four_bit_numbers(w##i + k / 2, K - k, table), v);                                                    \
  s##i = _mm512_fmadd_ps(t, lane_scales(p->scale + row##i * p->groups, g, wide), s##i);
      EIGHT(STEP)
#undef STEP
    }
#undef BEGIN
    __m512 four = folded(sums4(s0, s1, s2, s3), sums4(s4, s5, s6, s7));
    _mm512_mask_storeu_ps(y, (__mmask16)((1u << min64(8, n1 - n)) - 1), folded(four, four));
  }
}

T_BF16 INLINE void four_bit_four_by_four(const Product *p, i64 n0, i64 n1, Target t, int wide, int off) {
  const i64 K = p->K, G = K / p->groups, half = K / 2, width = up_to(K, FOUR_BIT_BLOCK);
  const __m512i table = sixteen_twice(p->kind);
  for (i64 n = n0; n < n1; n += 4)
    for (i64 i = 0; i < p->L; i += 4) {
      const bf16 *x = (const bf16 *)p->packed + i * width;
      const char *near = (const char *)p->q + next_rows(p, n, n1, 4, half) * half;
      const __m512 z = _mm512_setzero_ps();
      __m512 a0 = z, a1 = z, a2 = z, a3 = z, b0 = z, b1 = z, b2 = z, b3 = z;
      __m512 c0 = z, c1 = z, c2 = z, c3 = z, d0 = z, d1 = z, d2 = z, d3 = z;
      for (i64 k = 0; k < K; k += FOUR_BIT_BLOCK) {
        const char *next = near + 2 * k;
        NEXT(0) NEXT(1) NEXT(2) NEXT(3)
        const Groups g = groups_at(p, k, G, wide);
        __m512 sum0 = z, sum1 = z, sum2 = z, sum3 = z;
        if (off) {
          sum0 = block_sum(block_of(x + k)), sum1 = block_sum(block_of(x + width + k));
          sum2 = block_sum(block_of(x + 2 * width + k)), sum3 = block_sum(block_of(x + 3 * width + k));
        }
#define CELL(s, j)                                                                                                     \
  if (off == SHIFTS) s = _mm512_fnmadd_ps(taken, sum##j, s);                                                           \
  s = _mm512_fmadd_ps(dp_block(off == ZEROS ? _mm512_fnmadd_ps(taken, sum##j, z) : z, v, block_of(x + j * width + k)), \
                      scale, s);
#define ROW(r, s)                                                                                                      \
  {                                                                                                                    \
    const i64 at_row = min64(n + r, n1 - 1);                                                                           \
    const Numbers v = four_bit_numbers(p->q + at_row * half + k / 2, K - k, table);                                    \
    const __m512 scale = lane_scales(p->scale + at_row * p->groups, g, wide);                                          \
    const __m512 taken = off == ZEROS    ? lane_zeros(p->zero + at_row * p->groups, g, wide)                           \
                         : off == SHIFTS ? lane_scales(p->shift + at_row * p->groups, g, wide)                         \
                                         : z;                                                                          \
    CELL(s##0, 0) CELL(s##1, 1) CELL(s##2, 2) CELL(s##3, 3)                                                            \
  }
        ROW(0, a) ROW(1, b) ROW(2, c) ROW(3, d)
#undef ROW
#undef CELL
      }
      /* [weight row][row of x] */
      __m512 ab = folded(sums4(a0, a1, a2, a3), sums4(b0, b1, b2, b3));
      __m512 cd = folded(sums4(c0, c1, c2, c3), sums4(d0, d1, d2, d3));
      float y[16];
      _mm512_storeu_ps(y, folded(ab, cd));
      for (i64 j = 0; j < min64(4, p->L - i); j++)
        for (i64 c = 0; c < min64(4, n1 - n); c++) at(t, i + j)[n - n0 + c] = y[4 * c + j];
    }
}

T_BF16 INLINE void four_bit_as(const Product *p, i64 n0, i64 n1, Target t, int wide, int off) {
  if (p->L == 1)
    four_bit_eight(p, n0, n1, at(t, 0), wide, off);
  else
    four_bit_four_by_four(p, n0, n1, t, wide, off);
}

T_BF16 static void four_bit_few(const Product *p, i64 n0, i64 n1, Target t) {
  const int wide = p->groups == 1 || p->K / p->groups % FOUR_BIT_BLOCK == 0;
#define WITH(off) wide ? four_bit_as(p, n0, n1, t, 1, off) : four_bit_as(p, n0, n1, t, 0, off)
  if (p->zero)
    WITH(ZEROS);
  else if (p->shift)
    WITH(SHIFTS);
  else
    WITH(NOTHING);
#undef WITH
}

ROWS_OF(four_bit)
#undef ROWS_OF
#endif /* X86 */
