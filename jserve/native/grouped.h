/* Few rows of x and weights of int8, e4m3 or four bits, for kernels.c: in groups of 16 or of multiples of 32, or with a scale a row.
 *
 *   y = sum over groups of scale * (q . x) - (shift, or zero * scale) * sum(x)
 *
 * Nothing is rounded but x. 32 numbers are the bytes of a vector; byte j of each of its eight words, brought to the top of the
 * word, is a number times 2^24, so four vectors of float32 are made of them, and x is times 2^-24. Of e4m3 it is the upper half of
 * a float32 (e4m3_bytes) that comes there, and x is as it is. x lies in that order,
 * [rows][ceil(K / 32)][j][word], and behind it the sums of its groups, [rows][a multiple of 8]; rows are a multiple of four. */

#if X86
enum { GROUPED_BLOCK = 32, NARROW = 16 };

INLINE i64 grouped_width(i64 K) { return up_to(K, GROUPED_BLOCK); }
static size_t grouped_bytes(i64 L, i64 K) {
  return (size_t)(up_to(L, 4) * (grouped_width(K) + up_to(max64(K / NARROW, 1), 8))) * sizeof(float);
}

/* Whether these functions serve numbers in such groups. */
static int fits_grouped(const Product *p) {
  const i64 G = p->K / max64(p->groups, 1);
  if (p->kind != INT8 && p->kind != E4M3 && !half_bytes(p->kind)) return 0;
  return p->groups == 1 || G % GROUPED_BLOCK == 0 || (G == NARROW && p->K % GROUPED_BLOCK == 0);
}

INLINE const float *group_sums(const Product *p, i64 i) {
  return (const float *)p->packed + up_to(p->L, 4) * grouped_width(p->K) + i * up_to(p->groups, 8);
}

static void grouped_pack(const Product *p) {
  const i64 K = p->K, width = grouped_width(K), G = K / p->groups;
  const float unit = p->kind == E4M3 ? 1 : 0x1p-24f;
  memset(p->packed, 0, (size_t)(up_to(p->L, 4) * (width + up_to(p->groups, 8))) * sizeof(float));
  for (i64 i = 0; i < p->L; i++) {
    const float *x = p->x + p->row[i] * K;
    float *to = (float *)p->packed + i * width, *sums = (float *)group_sums(p, i);
    for (i64 g = 0; g < p->groups; g++) {
      float sum[8] = {0};
      for (i64 k = g * G; k < (g + 1) * G; k++) {
        const float value = widen(narrow(x[k]));
        to[k / 32 * 32 + k % 4 * 8 + k % 32 / 4] = value * unit;
        sum[k % 8] += value;
      }
      for (int j = 0; j < 8; j++) sums[g] += sum[j];
    }
  }
}

/* 32 numbers as float32 times 2^24; a: of bytes 0, 4, 8 and so on. */
typedef struct {
  __m256 a, b, c, d;
} Quads;

T_AVX2 INLINE Quads quads(__m256i bytes) {
  const __m256i top = _mm256_set1_epi32((int)0xff000000);
  return (Quads){_mm256_cvtepi32_ps(_mm256_slli_epi32(bytes, 24)),
                 _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32(bytes, 16), top)),
                 _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_slli_epi32(bytes, 8), top)),
                 _mm256_cvtepi32_ps(_mm256_and_si256(bytes, top))};
}

T_AVX2 INLINE Quads e4m3_quads(__m256i bytes) {
  const __m256i top = _mm256_set1_epi32((int)0xff000000), below = _mm256_set1_epi32(0x00ff0000);
  const Bytes v = e4m3_bytes(bytes);
#define QUAD(high, low) (__m256)_mm256_or_si256(high, _mm256_and_si256(low, below))
  return (Quads){QUAD(_mm256_slli_epi32(v.high, 24), _mm256_slli_epi32(v.low, 16)),
                 QUAD(_mm256_and_si256(_mm256_slli_epi32(v.high, 16), top), _mm256_slli_epi32(v.low, 8)),
                 QUAD(_mm256_and_si256(_mm256_slli_epi32(v.high, 8), top), v.low),
                 QUAD(_mm256_and_si256(v.high, top), _mm256_srli_epi32(v.low, 8))};
#undef QUAD
}

/* Numbers k to k + 31 of a row, of which there are ``n``. ``kind``: INT8, E4M3, or any of four bits, which ``table`` has. */
T_AVX2 INLINE Quads numbers32(const uint8_t *row, i64 k, i64 n, int kind, __m256i table) {
  if (half_bytes(kind)) return quads(_mm256_shuffle_epi8(table, nibbles32(row + k / 2)));
  __m256i v = _mm256_setzero_si256();
  if (n >= GROUPED_BLOCK)
    v = _mm256_loadu_si256((const __m256i *)(row + k));
  else
    memcpy(&v, row + k, (size_t)n);
  return kind == E4M3 ? e4m3_quads(v) : quads(v);
}

T_AVX2 INLINE __m256 meet(const float *x, Quads w) {
  __m256 t = _mm256_mul_ps(_mm256_loadu_ps(x), w.a);
  t = _mm256_fmadd_ps(_mm256_loadu_ps(x + 8), w.b, t);
  t = _mm256_fmadd_ps(_mm256_loadu_ps(x + 16), w.c, t);
  return _mm256_fmadd_ps(_mm256_loadu_ps(x + 24), w.d, t);
}

/* The scales of the block that begins at k, of group g or of the two that k / 16 begins. */
T_AVX2 INLINE __m256 block_scales(const float *scale, i64 k, i64 g, int narrow_groups) {
  if (!narrow_groups) return _mm256_broadcast_ss(scale + g);
  const __m256i two = _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(scale + k / NARROW)));
  return _mm256_permutevar8x32_ps(_mm256_castsi256_ps(two), _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0));
}

/* What zeros or shifts of weight row n take off the product with a row of x, in lanes. */
T_AVX2 INLINE __m256 taken_off(const Product *p, i64 n, const float *sums) {
  const i64 groups = p->groups;
  const float *scale = p->scale + n * groups;
  __m256 off = _mm256_setzero_ps();
  for (i64 g = 0; g < groups; g += 8) {
    const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)min64(8, groups - g)), lanes);
    __m256 each;
    if (p->shift) {
      each = _mm256_maskload_ps(p->shift + n * groups + g, there);
    } else {
      __m128i zeros = _mm_setzero_si128();
      memcpy(&zeros, p->zero + n * groups + g, (size_t)min64(8, groups - g));
      each = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(zeros)), _mm256_maskload_ps(scale + g, there));
    }
    off = _mm256_fmadd_ps(each, _mm256_loadu_ps(sums + g), off);
  }
  return off;
}

#define FOUR(DO) DO(0) DO(1) DO(2) DO(3)

/* DO(n) for each block, of ``n`` numbers from k on, in group g. */
#define EACH_BLOCK(DO)                                                                                                 \
  for (i64 k = 0, g = 0; k < K; g++) {                                                                                 \
    const i64 end = narrow_groups ? K : k + G;                                                                         \
    for (; k + GROUPED_BLOCK <= end; k += GROUPED_BLOCK) {                                                             \
      DO(GROUPED_BLOCK)                                                                                                \
    }                                                                                                                  \
    if (k < end) { /* of a row without groups */                                                                       \
      DO(end - k)                                                                                                      \
      k = end;                                                                                                         \
    }                                                                                                                  \
  }

/* One row of x, four weight rows at once. */
T_AVX2 INLINE void grouped_one(const Product *p, i64 n0, i64 n1, float *y, int kind, int narrow_groups) {
  const float *x = p->packed;
  const i64 K = p->K, G = K / p->groups;
  const __m256i table = _mm256_broadcastsi128_si256(four_bit_table(p->kind));
  for (i64 n = n0; n < n1; n += 4) {
#define BEGIN(r)                                                                                                       \
  const i64 row##r = min64(n + r, n1 - 1);                                                                             \
  const uint8_t *w##r = numbers_of(p, row##r);                                                                         \
  const float *scale##r = p->scale + row##r * p->groups;                                                               \
  __m256 s##r = _mm256_setzero_ps();
    FOUR(BEGIN)
#undef BEGIN
#define STEP(r)                                                                                                        \
  s##r = _mm256_fmadd_ps(meet(x + k, numbers32(w##r, k, there, kind, table)),                                          \
                         block_scales(scale##r, k, g, narrow_groups), s##r);
#define BLOCK(n)                                                                                                       \
  {                                                                                                                    \
    const i64 there = n;                                                                                               \
    FOUR(STEP)                                                                                                         \
  }
    EACH_BLOCK(BLOCK)
#undef BLOCK
#undef STEP
#define OFF(r) s##r = _mm256_sub_ps(s##r, taken_off(p, row##r, group_sums(p, 0)));
    if (p->zero || p->shift) {
      FOUR(OFF)
    }
#undef OFF
    const Four sums = avx2_sums(s0, s1, s2, s3);
    float four[4];
    memcpy(four, &sums, sizeof four);
    memcpy(y + (n - n0), four, (size_t)min64(4, n1 - n) * sizeof(float));
  }
}

/* Four rows of x against each weight row; GROUPED_NEAR weight rows meet the four before the next four come. */
enum { GROUPED_NEAR = 8 };

T_AVX2 INLINE void grouped_four(const Product *p, i64 n0, i64 n1, Target t, int kind, int narrow_groups) {
  const i64 K = p->K, G = K / p->groups, width = grouped_width(K);
  const __m256i table = _mm256_broadcastsi128_si256(four_bit_table(p->kind));
  for (i64 first = n0; first < n1; first += GROUPED_NEAR)
    for (i64 i = 0; i < p->L; i += 4)
      for (i64 n = first; n < min64(n1, first + GROUPED_NEAR); n++) {
        const uint8_t *row = numbers_of(p, n);
        const float *scale = p->scale + n * p->groups, *x = (const float *)p->packed + i * width;
        __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
#define MEET(j) s##j = _mm256_fmadd_ps(meet(x + j * width + k, w), scales, s##j);
#define BLOCK(n)                                                                                                       \
  {                                                                                                                    \
    const Quads w = numbers32(row, k, n, kind, table);                                                                 \
    const __m256 scales = block_scales(scale, k, g, narrow_groups);                                                    \
    FOUR(MEET)                                                                                                         \
  }
        EACH_BLOCK(BLOCK)
#undef BLOCK
#undef MEET
#define OFF(j) s##j = _mm256_sub_ps(s##j, taken_off(p, n, group_sums(p, i + j)));
        if (p->zero || p->shift) {
          FOUR(OFF)
        }
#undef OFF
        const Four sums = avx2_sums(s0, s1, s2, s3);
        float y[4];
        memcpy(y, &sums, sizeof y);
        for (i64 j = 0; j < min64(4, p->L - i); j++) at(t, i + j)[n - n0] = y[j];
      }
}
#undef EACH_BLOCK
#undef FOUR

T_AVX2 INLINE void grouped_as(const Product *p, i64 n0, i64 n1, Target t, int kind, int narrow_groups) {
  if (p->L == 1)
    grouped_one(p, n0, n1, at(t, 0), kind, narrow_groups);
  else
    grouped_four(p, n0, n1, t, kind, narrow_groups);
}

T_AVX2 static void grouped_few(const Product *p, i64 n0, i64 n1, Target t) {
  const int narrow_groups = p->groups > 1 && p->K / p->groups == NARROW;
#define AS(kind) narrow_groups ? grouped_as(p, n0, n1, t, kind, 1) : grouped_as(p, n0, n1, t, kind, 0)
  if (half_bytes(p->kind))
    AS(INT4);
  else if (p->kind == E4M3)
    AS(E4M3);
  else
    AS(INT8);
#undef AS
}

#define GROUPED(NAME, MOST)                                                                                            \
  static size_t NAME##_grouped_bytes(i64 L, i64 K) {                                                                   \
    const size_t few = L <= MOST ? grouped_bytes(L, K) : 0, many = NAME##_bytes(L, K);                                 \
    return few > many ? few : many;                                                                                    \
  }                                                                                                                    \
  static void NAME##_grouped_pack(const Product *p, i64 i0, i64 i1) {                                                  \
    if (p->few)                                                                                                        \
      grouped_pack(p);                                                                                                 \
    else                                                                                                               \
      NAME##_pack(p, i0, i1);                                                                                          \
  }                                                                                                                    \
  static void NAME##_grouped_rows(const Product *p, i64 n0, i64 n1, Target t) {                                        \
    if (p->few)                                                                                                        \
      grouped_few(p, n0, n1, t);                                                                                       \
    else                                                                                                               \
      NAME##_widened(p, n0, n1, t);                                                                                    \
  }
GROUPED(avx2, GROUPED_FEW)
GROUPED(avx512f, GROUPED_FEW)
GROUPED(bf16, FEW)
#undef GROUPED
#endif /* X86 */
