/* The levels of 64-bit Arm, for kernels.c.
 *
 *   NEON        every such processor: products in float32 as AVX2's (FLOAT_LEVEL), of int8 by products of 16 bits
 *   NEON_BF16   with the extensions of Armv8.2 for bfloat16 and int8: dot products of pairs and of fours
 *
 * Attention is the same at both, in float32. Quantised weights are widened a chunk at a time, for few rows of x too.
 *
 * BFDOT is not IEEE arithmetic: the two products, their sum, and its sum with what is there are each rounded to the odd one
 * of the two neighbours, what is denormal is zero, and any NaN is the default one. So a sum of K products is off by up to
 * twice what fused float32 sums are, without a drift, since odd is above as often as below. */
#if ARM
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* Extensions of compilers that know them; a library of others has the level NEON alone. */
#if defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10
#define HAS_BFDOT 1
#define T_DOT __attribute__((target("arch=armv8.2-a+bf16+dotprod")))
#else
#define HAS_BFDOT 0
#endif

#if defined(__APPLE__)
static int has_feature(const char *name) {
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname(name, &found, &size, NULL, 0) == 0 && found;
}
#endif

static int detect(void) {
#if HAS_BFDOT && defined(__linux__)
  enum { HWCAP = 16, DOT_PRODUCTS = 1 << 20, HWCAP2 = 26, BFLOAT16 = 1 << 14 }; /* old headers lack some of the names */
  if ((getauxval(HWCAP) & DOT_PRODUCTS) && (getauxval(HWCAP2) & BFLOAT16)) return NEON_BF16;
#elif HAS_BFDOT && defined(__APPLE__)
  if (has_feature("hw.optional.arm.FEAT_DotProd") && has_feature("hw.optional.arm.FEAT_BF16")) return NEON_BF16;
#endif
  return NEON;
}

/* --- vectors of float32 --- */

INLINE Four neon_sums(Four a, Four b, Four c, Four d) {
  return (Four)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
}
FLOAT_LEVEL(neon, , 4, neon_sums)
E4M3_VALUES(neon, neon, )

INLINE neon_i neon_wide(const bf16 *p) { return (neon_i)vshll_n_u16(vld1_u16(p), 16); }
/* The larger ones; of a number and NaN the number. */
INLINE neon_f neon_most(neon_f a, neon_f b) { return (neon_f)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b); }

/* Four values, rounded as ``narrow`` does. */
INLINE void neon_store(bf16 *to, neon_f x) {
  const uint32x4_t bits = (uint32x4_t)x, odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint16x4_t near = vaddhn_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  vst1_u16(to, vbsl_u16(vmovn_u32((uint32x4_t)(x == x)), near, vdup_n_u16(0x7fc0)));
}

static void neon_narrow_all(const float *from, bf16 *to, i64 n) {
  i64 i = 0;
  for (; i + 4 <= n; i += 4) neon_store(to + i, neon_at(from + i));
  plain_narrow(from + i, to + i, n - i);
}

/* --- weights widened to bfloat16 --- */

/* 16 bytes from p on, of which there are ``n``; the others are zero. */
INLINE int8x16_t bytes16(const void *p, i64 n) {
  int8_t some[16] = {0};
  if (n >= 16) return vld1q_s8(p);
  memcpy(some, p, (size_t)n);
  return vld1q_s8(some);
}

/* The numbers k to k + 15 of a row; k is a multiple of 16. */
INLINE void numbers16(const uint8_t *row, i64 k, int kind, neon_f *to) {
  int8x16_t q = vld1q_s8((const int8_t *)(half_bytes(kind) ? row + k / 32 * 16 : row + k));
  if (half_bytes(kind)) {
    const uint8x16_t both = (uint8x16_t)q, four = k & 16 ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    q = vqtbl1q_s8(vld1q_s8(FOUR_BITS[kind]), four);
  }
  const int16x8_t low = vmovl_s8(vget_low_s8(q)), high = vmovl_high_s8(q);
  const int32x4_t v[4] = {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
                          vmovl_high_s16(high)};
  for (int i = 0; i < 4; i++) to[i] = kind == E4M3 ? neon_e4m3((neon_i)v[i]) : (neon_f)vcvtq_f32_s32(v[i]);
}

static void neon_widen(const Product *p, i64 n, bf16 *to) {
  const uint8_t *row = numbers_of(p, n);
  const i64 G = p->K / p->groups;
  for (i64 g = 0; g < p->groups; g++) {
    const float scale = scale_of(p, n, g), zero = zero_of(p, n, g), shift = shift_of(p, n, g);
    i64 k = g * G;
    for (; k % 16 == 0 && k + 16 <= (g + 1) * G; k += 16) {
      neon_f v[4];
      numbers16(row, k, p->kind, v);
      for (int i = 0; i < 4; i++) neon_store(to + k + 4 * i, (v[i] - zero) * scale - shift);
    }
    widen_some(p, n, g, k, (g + 1) * G, to);
  }
}
WIDENED(neon, neon_widen)

/* --- dot products of 16 bytes ---
 *
 * x is rows of whole vectors, a multiple of four rows. One row meets a weight row with four sums; more are taken four at a
 * time, against four weight rows, and TILED of them meet all of a chunk before the next ones come. SIZE: bytes of a value;
 * DOT adds to four sums, ADD adds neighbours; RESULT(i, n, sum) is what becomes of the sum of row i and weight row n. */
#define DOT_LEVEL(NAME, TARGET, SIZE, SUM, DOT, ADD, RESULT)                                                           \
  TARGET INLINE SUM NAME##_one(const char *x, const char *w, i64 n) {                                                  \
    SUM a = {0}, b = {0}, c = {0}, d = {0};                                                                            \
    i64 k = 0;                                                                                                         \
    for (; k + 64 <= n; k += 64) {                                                                                     \
      a = DOT(a, bytes16(x + k, 16), bytes16(w + k, 16)), b = DOT(b, bytes16(x + k + 16, 16), bytes16(w + k + 16, 16)); \
      c = DOT(c, bytes16(x + k + 32, 16), bytes16(w + k + 32, 16));                                                    \
      d = DOT(d, bytes16(x + k + 48, 16), bytes16(w + k + 48, 16));                                                    \
    }                                                                                                                  \
    for (; k < n; k += 16) a = DOT(a, bytes16(x + k, 16), bytes16(w + k, n - k));                                      \
    a = ADD((a + b) + (c + d), a);                                                                                     \
    return ADD(a, a);                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  /* The sums of four rows of x and four weight rows of ``n`` bytes: s[weight row], whose lanes are rows of x. */      \
  TARGET INLINE void NAME##_tile(const char *x, i64 width, const char *const *w, i64 n, SUM *s) {                      \
    const char *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];                                                         \
    SUM a0 = {0}, a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;                                       \
    SUM c0 = a0, c1 = a0, c2 = a0, c3 = a0, d0 = a0, d1 = a0, d2 = a0, d3 = a0;                                        \
    for (i64 k = 0; k < n; k += 16) {                                                                                  \
      const i64 there = n - k;                                                                                         \
      const int8x16_t v0 = bytes16(w0 + k, there), v1 = bytes16(w1 + k, there);                                        \
      const int8x16_t v2 = bytes16(w2 + k, there), v3 = bytes16(w3 + k, there);                                        \
      int8x16_t u = bytes16(x + k, 16);                                                                                \
      a0 = DOT(a0, u, v0), a1 = DOT(a1, u, v1), a2 = DOT(a2, u, v2), a3 = DOT(a3, u, v3);                              \
      u = bytes16(x + width + k, 16);                                                                                  \
      b0 = DOT(b0, u, v0), b1 = DOT(b1, u, v1), b2 = DOT(b2, u, v2), b3 = DOT(b3, u, v3);                              \
      u = bytes16(x + 2 * width + k, 16);                                                                              \
      c0 = DOT(c0, u, v0), c1 = DOT(c1, u, v1), c2 = DOT(c2, u, v2), c3 = DOT(c3, u, v3);                              \
      u = bytes16(x + 3 * width + k, 16);                                                                              \
      d0 = DOT(d0, u, v0), d1 = DOT(d1, u, v1), d2 = DOT(d2, u, v2), d3 = DOT(d3, u, v3);                              \
    }                                                                                                                  \
    s[0] = ADD(ADD(a0, b0), ADD(c0, d0)), s[1] = ADD(ADD(a1, b1), ADD(c1, d1));                                        \
    s[2] = ADD(ADD(a2, b2), ADD(c2, d2)), s[3] = ADD(ADD(a3, b3), ADD(c3, d3));                                        \
  }                                                                                                                    \
                                                                                                                       \
  TARGET static void NAME##_rows(const Product *p, i64 n0, i64 n1, Target t) {                                         \
    const i64 bytes = p->K * SIZE, width = up_to(bytes, 16);                                                           \
    const char *x = p->packed, *first = SIZE == 1 ? (const char *)p->q : (const char *)p->w;                           \
    if (p->L == 1) {                                                                                                   \
      for (i64 n = n0; n < n1; n++) at(t, 0)[n - n0] = RESULT(0, n, NAME##_one(x, first + n * bytes, bytes)[0]);       \
      return;                                                                                                          \
    }                                                                                                                  \
    for (i64 i0 = 0; i0 < p->L; i0 += TILED)                                                                           \
      for (i64 n = n0; n < n1; n += 4) {                                                                               \
        const char *w[4];                                                                                              \
        for (i64 c = 0; c < 4; c++) w[c] = first + min64(n + c, n1 - 1) * bytes;                                       \
        for (i64 i = i0; i < min64(p->L, i0 + TILED); i += 4) {                                                        \
          SUM s[4];                                                                                                    \
          NAME##_tile(x + i * width, width, w, bytes, s);                                                              \
          for (i64 j = 0; j < min64(4, p->L - i); j++)                                                                 \
            for (i64 c = 0; c < min64(4, n1 - n); c++) at(t, i + j)[n - n0 + c] = RESULT(i + j, n + c, s[c][j]);       \
        }                                                                                                              \
      }                                                                                                                \
  }

/* --- int8 with x rounded to int8 --- */

static size_t neon_int8_bytes(i64 L, i64 K) { return (size_t)(up_to(L, 4) * up_to(K, 16)); }

INLINE int32_t neon_most_bits(const float *x, i64 K) {
  const uint32x4_t size = vdupq_n_u32(0x7fffffff);
  uint32x4_t most = vdupq_n_u32(0);
  for (i64 k = 0; k < K; k += 4)
    most = vmaxq_u32(most, vandq_u32((uint32x4_t)bytes16(x + k, 4 * (K - k)), size));
  return (int32_t)vmaxvq_u32(most);
}

static void neon_int8_pack(const Product *p, i64 i0, i64 i1) {
  const i64 K = p->K, width = up_to(K, 16);
  memset((char *)p->packed + i0 * width, 0, (size_t)(((i1 == p->L ? up_to(i1, 4) : i1) - i0) * width));
  for (i64 i = i0; i < i1; i++) {
    const float *x = p->x + p->row[i] * K;
    const float scale = scale_of_most(neon_most_bits(x, K));
    int8_t *to = (int8_t *)p->packed + i * width;
    p->rounded[i].scale = scale;
    for (i64 k = 0; scale == scale && k < K; k += 4) { /* zeros where the row is not finite */
      const neon_f v = (neon_f)bytes16(x + k, 4 * (K - k)) / scale;
      const int16x4_t whole = vmovn_s32(vcvtnq_s32_f32((float32x4_t)v));
      vst1_lane_s32((int32_t *)(to + k), (int32x2_t)vmovn_s16(vcombine_s16(whole, whole)), 0);
    }
  }
}

INLINE int32x4_t neon_int8_dot(int32x4_t sum, int8x16_t a, int8x16_t b) {
  sum = vpadalq_s16(sum, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  return vpadalq_s16(sum, vmull_high_s8(a, b));
}
#define SCALED(i, n, sum) scaled_sum(p, i, n, sum)
DOT_LEVEL(neon_int8, , 1, int32x4_t, neon_int8_dot, vpaddq_s32, SCALED)

#if HAS_BFDOT
DOT_LEVEL(neon_int8dot, T_DOT, 1, int32x4_t, vdotq_s32, vpaddq_s32, SCALED)

/* --- bfloat16 by dot products of pairs --- */

static size_t neon_bf16_bytes(i64 L, i64 K) { return (size_t)(up_to(L, 4) * up_to(K, 8)) * sizeof(bf16); }

static void neon_bf16_pack(const Product *p, i64 i0, i64 i1) {
  const i64 K = p->K, width = up_to(K, 8);
  bf16 *to = (bf16 *)p->packed + i0 * width;
  memset(to, 0, (size_t)(((i1 == p->L ? up_to(i1, 4) : i1) - i0) * width) * sizeof *to);
  for (i64 i = i0; i < i1; i++, to += width) neon_narrow_all(p->x + p->row[i] * K, to, K);
}

T_DOT INLINE float32x4_t neon_bf16_dot(float32x4_t sum, int8x16_t a, int8x16_t b) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_s8(a), vreinterpretq_bf16_s8(b));
}
#define AS_IT_IS(i, n, sum) (sum)
DOT_LEVEL(neon_bf16, T_DOT, 2, float32x4_t, neon_bf16_dot, vpaddq_f32, AS_IT_IS)
#undef AS_IT_IS
WIDENED(neon_bf16, neon_widen)
#else /* never chosen */
#define neon_bf16_bytes neon_bytes
#define neon_bf16_pack neon_pack
#define neon_bf16_rows neon_rows
#define neon_bf16_widened neon_widened
#define neon_int8dot_rows neon_int8_rows
#endif
#undef SCALED
#undef DOT_LEVEL
#endif /* ARM */
