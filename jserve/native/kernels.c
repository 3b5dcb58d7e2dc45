/* Kernels for the CPU, called through XLA's FFI: products of few rows with bfloat16 weights, the same with silu, and
 * attention over paged KV in bfloat16.
 *
 *   product     y[M, N] f32 = x[M, K] f32 @ w[N, K]^T bf16          x is rounded to bf16, sums are float32
 *   gate_up     h[M, F] f32 = silu(x @ gate^T) * (x @ up^T)         w[2, F, K]: gate, then up
 *   quantised_  the same of weights in 8 or 4 bits with scales
 *   expert_...  the same of each assignment with the weights of its expert, which are read where they lie
 *   attention   o[T, N, H] of tokens in rows, over pages [P, K, Z, H]
 *   write_kv    keys and values of tokens, rounded, to their places in these pages, which are changed in place
 *
 * Weights stay as they are: nothing is packed or copied. A row of x that is all zeros is a row that nobody reads: it gives
 * zeros and costs nothing, so that the number of live rows is data. Work is cut into chunks that the caller and the threads
 * of XLA's own pool claim from a counter (see Job).
 *
 * Quantised weights are multiplied by the same means (quantised.h).
 *
 * Levels: what the processor has, one set of functions each, chosen by cpuid and xgetbv, since __builtin_cpu_supports
 * answers 0 for everything in a library built for an old glibc; those of 64-bit Arm are in neon.h. */
#include "ffi_abi.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define X86 0
#endif
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define ARM 1
#include <arm_neon.h>
#else
#define ARM 0
#endif
/* Tile registers: of compilers that know them, on a system that lends them when asked. */
#if X86 && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef int64_t i64;

/* By architecture; each has what those before it have. */
#if X86
enum { PLAIN, AVX2, AVX512F, AVX512_BF16, AMX_LEVEL, N_LEVELS }; /* with AMX: tiles of bfloat16 and of int8 */
#elif ARM
enum { PLAIN, NEON, NEON_BF16, N_LEVELS, AMX_LEVEL }; /* NEON_BF16: and products of int8; none has tiles */
#else
enum { PLAIN, N_LEVELS, AMX_LEVEL };
#endif

INLINE i64 min64(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 max64(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 up_to(i64 n, i64 multiple) { return (n + multiple - 1) / multiple * multiple; }

INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

/* Round to nearest even; what is NaN stays NaN. */
INLINE bf16 narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 0x40);
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* --- levels --- */

#if HAS_AMX
/* Whether this process may use tiles; the kernel gives their place in a thread's state only to those that ask. */
static int ask_for_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#else
static int ask_for_tiles(void) { return 0; }
#endif

#if X86
static int detect(void) {
  unsigned a, b, c, d, lo, hi;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return PLAIN;
  int fma = c >> 12 & 1, osxsave = c >> 27 & 1;
  if (!fma || !osxsave) return PLAIN;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  if ((lo & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PLAIN;
  const unsigned subleaves = a, vnni = c >> 11 & 1;
  const int tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1); /* AMX-BF16, -TILE, -INT8 */
  int avx2 = b >> 5 & 1;
  int avx512 = (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1); /* F, DQ, BW, VL */
  if (!avx2) return PLAIN;
  if (!avx512 || (lo & 0xe6) != 0xe6) return AVX2;
  if (subleaves < 1 || !vnni || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return AVX512F;
  if (!(a >> 5 & 1)) return AVX512F;
  if (!tiles || (lo & 0x60000) != 0x60000) return AVX512_BF16;
  /* XLA multiplies by AMX itself: where an old compiler left ours out, it has all products but those of a few rows. */
  if (!HAS_AMX) return AVX512F;
  return ask_for_tiles() ? AMX_LEVEL : AVX512_BF16;
}
#elif !ARM
static int detect(void) { return PLAIN; }
#endif

/* --- a product, ready for a level's functions --- */

/* What weights are: bfloat16, or numbers of which (q - zero) * scale, or q * scale - shift, are the weights, with a scale
 * for each of ``groups`` parts of a row. ROUNDED: int8 that multiplies x rounded to int8, with a scale per row of x. INT4,
 * UINT4 and E2M1 are numbers of four bits (FOUR_BITS). */
enum { BF16, INT8, INT4, E4M3, ROUNDED, UINT4, E2M1, N_KINDS };
INLINE int half_bytes(int kind) { return kind == INT4 || kind == UINT4 || kind == E2M1; }

/* A row of x that was rounded to int8. */
typedef struct {
  float scale;
  int32_t sum; /* of its numbers */
} RoundedRow;

/* x as a level wants it, and where rows of results go. */
typedef struct {
  const bf16 *w;
  i64 N, K;
  i64 M;              /* rows of x */
  i64 L;              /* live ones */
  const int32_t *row; /* [L] their numbers */
  const float *x;     /* [M, K] as given */
  void *packed;       /* in the level's own form */
  int few;            /* whether that is the form for few live rows */
  int amx;            /* whether AMX multiplies what is not few */
  /* Where kind is not BF16: */
  int kind;
  const uint8_t *q;    /* [N, K]; of four bits: [N, K / 2], byte j of 32 weights has weight j in its low half, 16 + j in the other */
  const float *scale;  /* [N, groups] */
  const int8_t *zero;  /* [N, groups], NULL: all are 0 */
  const float *shift;  /* likewise; there is one of both at most */
  i64 groups;          /* of a row */
  RoundedRow *rounded; /* [L] */
  bf16 *room;          /* for the weights of a chunk, widened; of the thread alone */
  void *sums;          /* of a chunk by tiles, likewise */
  i64 rows_ahead;      /* weight rows from a thread's chunk to its next one, about */
  i64 then;            /* the weight row at which a thread goes on behind those of a call, about */
  const char *next_chunk; /* of a product with weights in room: where the numbers of that begin */
} Product;

/* Results of rows i of the live ones go to y + row[i] * ld. */
typedef struct {
  float *y;
  i64 ld;
  const int32_t *row;
} Target;

typedef struct {
  size_t (*packed_bytes)(i64 L, i64 K); /* of that many live rows; also where live row L begins, a multiple of PACKED */
  void (*pack)(const Product *, i64 i0, i64 i1); /* live rows i0 .. i1-1; i0 is a multiple of PACKED */
  void (*rows)(const Product *, i64 n0, i64 n1, Target); /* y[:, 0 .. n1-n0] */
  void (*silu)(const float *gate, const float *up, float *h, i64 n);
} Level;

INLINE float *at(Target t, i64 i) { return t.y + t.row[i] * t.ld; }

/* Live rows that are packed together: the lanes of the widest vector. At most FEW of them may have another form; without
 * AVX512_BF16, of numbers that are slow to widen, GROUPED_FEW, with tiles AMX_FEW (few_rows). */
enum { PACKED = 16, FEW = 8, GROUPED_FEW = 32, AMX_FEW = 4 };

/* Weight rows of a tile, and rows of x that the sums of tiles are kept for (amx.h). */
enum { TILE_ROWS = 16, AMX_X_ROWS = 256 };

/* --- plain C --- */

static size_t plain_bytes(i64 L, i64 K) { return (size_t)(L * K) * sizeof(float); }

static void plain_pack(const Product *p, i64 i0, i64 i1) {
  float *to = p->packed;
  for (i64 i = i0; i < i1; i++)
    for (i64 k = 0; k < p->K; k++) to[i * p->K + k] = widen(narrow(p->x[p->row[i] * p->K + k]));
}

static void plain_narrow(const float *from, bf16 *to, i64 n) {
  for (i64 i = 0; i < n; i++) to[i] = narrow(from[i]);
}

static void plain_rows(const Product *p, i64 n0, i64 n1, Target t) {
  for (i64 n = n0; n < n1; n++)
    for (i64 i = 0; i < p->L; i++) {
      const float *x = (const float *)p->packed + i * p->K;
      float sum = 0;
      for (i64 k = 0; k < p->K; k++) sum += x[k] * widen(p->w[n * p->K + k]);
      at(t, i)[n - n0] = sum;
    }
}

static void plain_silu(const float *gate, const float *up, float *h, i64 n) {
  for (i64 i = 0; i < n; i++) h[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* --- AVX2, AVX512F and NEON: even and odd values of bfloat16 pairs by shift and mask, then FMA ---
 *
 * x is kept as float32 in blocks of 2 * LANES values, the even ones first; of more than one row the blocks of four rows follow
 * each other. A weight row meets one row of x with four sums, or up to four rows of x with two sums each; NEAR weight rows
 * meet the four before the next four come. Of more than FEW rows of x two weight rows meet four with a sum each, TILED_K
 * values at a time of TILED rows, so that these stay in the first-level cache for TILED_N weight rows. */

#if X86 || ARM
enum { NEAR = 8, TILED = 16, TILED_K = 256, TILED_N = 64 };

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

/* A value that is loaded once, where the compiler would load it in each product it takes part in. */
#if X86
#define LOADED(v) ({ __typeof__(v) v_ = (v); __asm__("" : "+v"(v_)); v_; })
#else
#define LOADED(v) ({ __typeof__(v) v_ = (v); __asm__("" : "+w"(v_)); v_; })
#endif

/* SUMS: the sums of the lanes of four vectors, in order. */
#define FLOAT_LEVEL(NAME, TARGET, LANES, SUMS)                                                                         \
  typedef float NAME##_f __attribute__((vector_size(LANES * 4), aligned(4), may_alias));                               \
  typedef uint32_t NAME##_u __attribute__((vector_size(LANES * 4), aligned(2), may_alias));                            \
  typedef int32_t NAME##_i __attribute__((vector_size(LANES * 4), aligned(4), may_alias));                             \
                                                                                                                       \
  static size_t NAME##_bytes(i64 L, i64 K) {                                                                           \
    return (size_t)(up_to(L, 4) * up_to(K, 2 * LANES)) * sizeof(float);                                                \
  }                                                                                                                    \
                                                                                                                       \
  TARGET static void NAME##_pack(const Product *p, i64 i0, i64 i1) {                                                   \
    const i64 width = up_to(p->K, 2 * LANES), rows = p->L == 1 ? 1 : 4;                                                \
    float *to = (float *)p->packed + i0 * width;                                                                       \
    memset(to, 0, (size_t)((i1 == p->L ? up_to(i1, 4) : i1) - i0) * (size_t)width * sizeof *to);                       \
    for (i64 i = i0; i < i1; i++) {                                                                                    \
      const float *from = p->x + p->row[i] * p->K;                                                                     \
      float *block = to + (i - i0) / rows * rows * width + (i - i0) % rows * 2 * LANES;                                \
      for (i64 k = 0; k < p->K; k++)                                                                                   \
        block[k / (2 * LANES) * (2 * LANES) * rows + (k & 1) * LANES + k % (2 * LANES) / 2] = widen(narrow(from[k]));  \
    }                                                                                                                  \
  }                                                                                                                    \
                                                                                                                       \
  TARGET INLINE NAME##_u NAME##_tail(const bf16 *w, i64 n) {                                                           \
    NAME##_u v = {0};                                                                                                  \
    memcpy(&v, w, (size_t)n * sizeof(bf16));                                                                           \
    return v;                                                                                                          \
  }                                                                                                                    \
                                                                                                                       \
  TARGET INLINE NAME##_f NAME##_even(NAME##_u w) { return (NAME##_f)(w << 16); }                                       \
  TARGET INLINE NAME##_f NAME##_odd(NAME##_u w) { return (NAME##_f)(w & 0xffff0000u); }                                \
  TARGET INLINE NAME##_f NAME##_at(const float *x) { return *(const NAME##_f *)x; }                                    \
                                                                                                                       \
  TARGET INLINE float NAME##_one(const float *x, const bf16 *w, i64 K) {                                               \
    NAME##_f a = {0}, b = {0}, c = {0}, d = {0};                                                                       \
    i64 k = 0;                                                                                                         \
    for (; k + 4 * LANES <= K; k += 4 * LANES) {                                                                       \
      NAME##_u v = *(const NAME##_u *)(w + k), u = *(const NAME##_u *)(w + k + 2 * LANES);                             \
      a += NAME##_at(x + k) * NAME##_even(v);                                                                          \
      b += NAME##_at(x + k + LANES) * NAME##_odd(v);                                                                   \
      c += NAME##_at(x + k + 2 * LANES) * NAME##_even(u);                                                              \
      d += NAME##_at(x + k + 3 * LANES) * NAME##_odd(u);                                                               \
    }                                                                                                                  \
    for (; k < K; k += 2 * LANES) {                                                                                    \
      NAME##_u v = NAME##_tail(w + k, min64(K - k, 2 * LANES));                                                        \
      a += NAME##_at(x + k) * NAME##_even(v);                                                                          \
      b += NAME##_at(x + k + LANES) * NAME##_odd(v);                                                                   \
    }                                                                                                                  \
    a = (a + b) + (c + d);                                                                                             \
    return SUMS(a, a, a, a)[0];                                                                                        \
  }                                                                                                                    \
                                                                                                                       \
  /* The sums of a weight row and four rows of x. */                                                                   \
  TARGET INLINE Four NAME##_four(const float *x, const bf16 *w, i64 K) {                                               \
    NAME##_f a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};                                   \
    for (i64 k = 0; k < K; k += 2 * LANES, x += 8 * LANES) {                                                           \
      NAME##_u v = K - k >= 2 * LANES ? *(const NAME##_u *)(w + k) : NAME##_tail(w + k, K - k);                        \
      NAME##_f even = NAME##_even(v), odd = NAME##_odd(v);                                                             \
      a += NAME##_at(x) * even, b += NAME##_at(x + LANES) * odd;                                                       \
      c += NAME##_at(x + 2 * LANES) * even, d += NAME##_at(x + 3 * LANES) * odd;                                       \
      e += NAME##_at(x + 4 * LANES) * even, f += NAME##_at(x + 5 * LANES) * odd;                                       \
      g += NAME##_at(x + 6 * LANES) * even, h += NAME##_at(x + 7 * LANES) * odd;                                       \
    }                                                                                                                  \
    a += b, c += d, e += f, g += h;                                                                                    \
    return SUMS(a, c, e, g);                                                                                           \
  }                                                                                                                    \
                                                                                                                       \
  /* To the sums of two weight rows and four rows of x, LANES values of each. */                                       \
  TARGET INLINE void NAME##_meet(NAME##_f *s, NAME##_f a, NAME##_f b, const float *x) {                                \
    NAME##_f u = LOADED(NAME##_at(x));                                                                                 \
    s[0] += u * a, s[4] += u * b, u = LOADED(NAME##_at(x + 2 * LANES));                                                \
    s[1] += u * a, s[5] += u * b, u = LOADED(NAME##_at(x + 4 * LANES));                                                \
    s[2] += u * a, s[6] += u * b, u = LOADED(NAME##_at(x + 6 * LANES));                                                \
    s[3] += u * a, s[7] += u * b;                                                                                      \
  }                                                                                                                    \
                                                                                                                       \
  TARGET INLINE void NAME##_tile(const float *x, const bf16 *w0, const bf16 *w1, i64 K, Four *y) {                     \
    NAME##_f s[8] = {{0}};                                                                                             \
    i64 k = 0;                                                                                                         \
    for (; k + 2 * LANES <= K; k += 2 * LANES, x += 8 * LANES) {                                                       \
      NAME##_u a = *(const NAME##_u *)(w0 + k), b = *(const NAME##_u *)(w1 + k);                                       \
      NAME##_meet(s, NAME##_even(a), NAME##_even(b), x);                                                               \
      NAME##_meet(s, NAME##_odd(a), NAME##_odd(b), x + LANES);                                                         \
    }                                                                                                                  \
    if (k < K) {                                                                                                       \
      NAME##_u a = NAME##_tail(w0 + k, K - k), b = NAME##_tail(w1 + k, K - k);                                         \
      NAME##_meet(s, NAME##_even(a), NAME##_even(b), x);                                                               \
      NAME##_meet(s, NAME##_odd(a), NAME##_odd(b), x + LANES);                                                         \
    }                                                                                                                  \
    y[0] += SUMS(s[0], s[1], s[2], s[3]);                                                                              \
    y[1] += SUMS(s[4], s[5], s[6], s[7]);                                                                              \
  }                                                                                                                    \
                                                                                                                       \
  TARGET static void NAME##_many(const Product *p, i64 n0, i64 n1, Target t) {                                         \
    const i64 K = p->K, width = up_to(K, 2 * LANES);                                                                   \
    for (i64 first = n0; first < n1; first += TILED_N)                                                                 \
      for (i64 i0 = 0; i0 < p->L; i0 += TILED) {                                                                       \
        const i64 end = min64(n1, first + TILED_N), rows = min64(p->L - i0, TILED);                                    \
        Four y[TILED / 4][TILED_N];                                                                                    \
        memset(y, 0, sizeof y);                                                                                        \
        for (i64 k = 0; k < K; k += TILED_K)                                                                           \
          for (i64 n = first; n < end; n += 2)                                                                         \
            for (i64 i = 0; i < rows; i += 4)                                                                          \
              NAME##_tile((const float *)p->packed + (i0 + i) * width + 4 * k, p->w + n * K + k,                       \
                          p->w + min64(n + 1, n1 - 1) * K + k, min64(K - k, TILED_K), y[i / 4] + (n - first));         \
        for (i64 i = 0; i < rows; i++)                                                                                 \
          for (i64 n = first; n < end; n++) at(t, i0 + i)[n - n0] = ((const float *)&y[i / 4][n - first])[i % 4];      \
      }                                                                                                                \
  }                                                                                                                    \
                                                                                                                       \
  TARGET static void NAME##_rows(const Product *p, i64 n0, i64 n1, Target t) {                                         \
    const float *x = p->packed;                                                                                        \
    i64 width = up_to(p->K, 2 * LANES);                                                                                \
    if (!p->few) {                                                                                                     \
      NAME##_many(p, n0, n1, t);                                                                                       \
      return;                                                                                                          \
    }                                                                                                                  \
    if (p->L == 1) {                                                                                                   \
      for (i64 n = n0; n < n1; n++) at(t, 0)[n - n0] = NAME##_one(x, p->w + n * p->K, p->K);                           \
      return;                                                                                                          \
    }                                                                                                                  \
    for (i64 first = n0; first < n1; first += NEAR)                                                                    \
      for (i64 i = 0; i < p->L; i += 4)                                                                                \
        for (i64 n = first; n < min64(n1, first + NEAR); n++) {                                                        \
          const Four sums = NAME##_four(x + i * width, p->w + n * p->K, p->K);                                         \
          float y[4];                                                                                                  \
          memcpy(y, &sums, sizeof y);                                                                                  \
          for (i64 j = 0; j < min64(4, p->L - i); j++) at(t, i + j)[n - n0] = y[j];                                    \
        }                                                                                                              \
  }                                                                                                                    \
                                                                                                                       \
  TARGET INLINE NAME##_f NAME##_all(float x) { return x - (NAME##_f){0}; }                                             \
                                                                                                                       \
  TARGET INLINE NAME##_f NAME##_pick(NAME##_i mask, NAME##_f yes, NAME##_f no) {                                       \
    return (NAME##_f)((mask & (NAME##_i)yes) | (~mask & (NAME##_i)no));                                                \
  }                                                                                                                    \
                                                                                                                       \
  /* e^x to 2 units in the last place: 2^n by the bits of the exponent, the rest by a polynomial. */                   \
  TARGET INLINE NAME##_f NAME##_exp(NAME##_f x) {                                                                      \
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */                                  \
    x = NAME##_pick((NAME##_i)(x < -87.0f), NAME##_all(-87.0f), x);                                                    \
    x = NAME##_pick((NAME##_i)(x > 88.0f), NAME##_all(88.0f), x);                                                      \
    NAME##_f shifted = x * 1.44269504f + shift;                                                                        \
    NAME##_f n = shifted - shift;                                                                                      \
    NAME##_f r = x - n * 0.693145752f - n * 1.42860677e-6f;                                                            \
    NAME##_f y = r * 1.3981999e-3f + 8.3334519e-3f;                                                                    \
    y = y * r + 4.1665796e-2f;                                                                                         \
    y = y * r + 1.6666665e-1f;                                                                                         \
    y = y * r + 0.5f;                                                                                                  \
    y = y * r * r + r + 1.0f;                                                                                          \
    NAME##_i power = ((NAME##_i)shifted - (NAME##_i)NAME##_all(shift) + 127) << 23;                                    \
    return y * (NAME##_f)power;                                                                                        \
  }                                                                                                                    \
                                                                                                                       \
  TARGET static void NAME##_silu(const float *gate, const float *up, float *h, i64 n) {                                \
    i64 i = 0;                                                                                                         \
    for (; i + LANES <= n; i += LANES) {                                                                               \
      NAME##_f g = NAME##_at(gate + i);                                                                                \
      *(NAME##_f *)(h + i) = g / (1.0f + NAME##_exp(-g)) * NAME##_at(up + i);                                          \
    }                                                                                                                  \
    if (i < n) {                                                                                                       \
      NAME##_f g = {0}, u = {0};                                                                                       \
      memcpy(&g, gate + i, (size_t)(n - i) * 4), memcpy(&u, up + i, (size_t)(n - i) * 4);                              \
      u = g / (1.0f + NAME##_exp(-g)) * u;                                                                             \
      memcpy(h + i, &u, (size_t)(n - i) * 4);                                                                          \
    }                                                                                                                  \
  }

#endif /* X86 || ARM */

#if X86
#define T_AVX2 __attribute__((target("avx2,fma")))
#define T_AVX512F __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")))
#define T_BF16 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
T_AVX2 INLINE Four avx2_sums(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
#define HALF(v) _mm256_add_ps(_mm512_castps512_ps256((__m512)(v)), _mm512_extractf32x8_ps((__m512)(v), 1))
#define HALVES(a, b, c, d) avx2_sums(HALF(a), HALF(b), HALF(c), HALF(d))
FLOAT_LEVEL(avx2, T_AVX2, 8, avx2_sums)
FLOAT_LEVEL(avx512f, T_AVX512F, 16, HALVES)
#undef HALF
#undef HALVES

/* --- AVX512_BF16 --- */

T_BF16 INLINE __m512 dp(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
T_BF16 INLINE __m512i load(const bf16 *p) { return _mm512_loadu_si512(p); }
T_BF16 INLINE __m512i load_n(const bf16 *p, i64 n) {
  return _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffffu : (1u << n) - 1, p);
}
T_BF16 INLINE __m512i pair(const bf16 *p) {
  int32_t both;
  memcpy(&both, p, 4);
  return _mm512_set1_epi32(both);
}
T_BF16 INLINE __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

/* Lane i: the sum of the lanes of v[i]. */
T_BF16 INLINE __m512 sums4(__m512 a, __m512 b, __m512 c, __m512 d) {
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d lo = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), hi = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  return _mm512_add_ps((__m512)lo, (__m512)hi);
}
T_BF16 INLINE __m512 folded(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
T_BF16 INLINE __m512 sums16(const __m512 *v) {
  return folded(folded(sums4(v[0], v[1], v[2], v[3]), sums4(v[4], v[5], v[6], v[7])),
                folded(sums4(v[8], v[9], v[10], v[11]), sums4(v[12], v[13], v[14], v[15])));
}

/* Up to FEW live rows, or AMX_FEW, x is kept as rows of whole vectors, a multiple of four rows; beyond, lanes are rows of
 * x: [ceil(L / 16)][16 * ceil(K / 32)][16] pairs of values. Room for either. */
static size_t bf16_bytes(i64 L, i64 K) {
  i64 values = up_to(L, L <= AMX_FEW ? 4 : 16) * up_to(K, 32);
  return (size_t)values * sizeof(bf16);
}

T_BF16 static void bf16_pack_rows(const Product *p) {
  i64 width = up_to(p->K, 32);
  for (i64 i = 0; i < up_to(p->L, 4); i++) {
    bf16 *to = (bf16 *)p->packed + i * width;
    if (i >= p->L) {
      memset(to, 0, (size_t)width * sizeof(bf16));
      continue;
    }
    const float *from = p->x + p->row[i] * p->K;
    for (i64 k = 0; k < width; k += 16) {
      i64 n = max64(0, min64(16, p->K - k));
      __m512 x = _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), from + (n ? k : 0));
      _mm256_storeu_si256((__m256i *)(to + k), rounded(x));
    }
  }
}

/* Pairs [16 rows][16 pairs] turned to [16 pairs][16 rows]. */
T_BF16 INLINE void turn16(__m512i *v) {
  __m512i a[16];
#define LOW(i) a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  LOW(0) LOW(2) LOW(4) LOW(6) LOW(8) LOW(10) LOW(12) LOW(14)
#undef LOW
#define QUAD(i)                                                                                                        \
  v[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]), v[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);                      \
  v[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]), v[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  QUAD(0) QUAD(4) QUAD(8) QUAD(12)
#undef QUAD
  /* v[4 g + j], 128-bit lane l: pair 4 l + j of rows 4 g .. 4 g + 3. */
#define LANES(j)                                                                                                       \
  {                                                                                                                    \
    __m512i lo = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88), hi = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);          \
    __m512i lo2 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);                                                     \
    __m512i hi2 = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);                                                     \
    a[j] = _mm512_shuffle_i32x4(lo, lo2, 0x88), a[8 + j] = _mm512_shuffle_i32x4(lo, lo2, 0xdd);                        \
    a[4 + j] = _mm512_shuffle_i32x4(hi, hi2, 0x88), a[12 + j] = _mm512_shuffle_i32x4(hi, hi2, 0xdd);                   \
  }
  LANES(0) LANES(1) LANES(2) LANES(3)
#undef LANES
  memcpy(v, a, sizeof a);
}

T_BF16 static void bf16_pack_lanes(const Product *p, i64 i0, i64 i1) {
  i64 pairs = up_to(p->K, 32) / 2;
  for (i64 i = i0; i < i1; i += 16) {
    uint32_t *to = (uint32_t *)p->packed + i * pairs;
    for (i64 k = 0; k < p->K; k += 32) {
      __m512i v[16];
      i64 low = min64(16, p->K - k), high = max64(0, p->K - k - 16);
      __mmask16 first = (__mmask16)((1u << low) - 1), second = (__mmask16)(high >= 16 ? 0xffff : (1u << high) - 1);
      for (int r = 0; r < 16; r++) {
        v[r] = _mm512_setzero_si512();
        if (i + r >= p->L) continue;
        const float *from = p->x + p->row[i + r] * p->K + k;
        __m256i a = rounded(_mm512_maskz_loadu_ps(first, from));
        __m256i b = rounded(_mm512_maskz_loadu_ps(second, second ? from + 16 : from));
        v[r] = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
      }
      turn16(v);
      for (i64 j = 0; j < 16; j++) _mm512_storeu_si512(to + (k / 2 + j) * 16, v[j]);
    }
  }
}

static void bf16_pack(const Product *p, i64 i0, i64 i1) {
  if (p->few)
    bf16_pack_rows(p);
  else
    bf16_pack_lanes(p, i0, i1);
}

#define EIGHT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

/* 32 numbers of int8 or e4m3, exactly. */
T_BF16 INLINE __m512i int8_values(__m256i q) {
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(q)));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(q, 1)));
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

T_BF16 INLINE __m512i e4m3_values(__m256i q) {
  const __m512i small = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m512i signs = _mm512_set1_epi16((short)0x8000);
  __m512i words = _mm512_cvtepu8_epi16(q), size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
  __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  value = _mm512_mask_permutexvar_epi16(value, _mm512_cmplt_epi16_mask(size, _mm512_set1_epi16(8)), size, small);
  value = _mm512_mask_mov_epi16(value, _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
  return _mm512_or_si512(value, _mm512_and_si512(_mm512_slli_epi16(words, 8), signs));
}

/* 32 weights of a row from its k-th on: as bfloat16, numbers of another kind without their scale; at ``n`` of them and less
 * the others are 0. */
T_BF16 INLINE __m512i weights(const char *row, i64 k, int kind) {
  if (kind == BF16) return load((const bf16 *)row + k);
  __m256i q = _mm256_loadu_si256((const __m256i *)(row + k));
  return kind == INT8 ? int8_values(q) : e4m3_values(q);
}
T_BF16 INLINE __m512i weights_n(const char *row, i64 k, i64 n, int kind) {
  if (kind == BF16) return load_n((const bf16 *)row + k, n);
  __m256i q = _mm256_maskz_loadu_epi8(n >= 32 ? 0xffffffffu : (1u << n) - 1, row + k);
  return kind == INT8 ? int8_values(q) : e4m3_values(q);
}
INLINE const char *weight_row(const Product *p, i64 n, int kind) {
  return kind == BF16 ? (const char *)(p->w + n * p->K) : (const char *)(p->q + n * p->K);
}
INLINE i64 weight_bytes(int kind) { return kind == BF16 ? 2 : 1; }

/* Several weight rows at once defeat the processor's own prefetcher where they lie in one page: lines of later rows are
 * fetched in the order of memory while these are read, as many of them, so far ahead that memory answers in time, and into
 * the second-level cache, since the first would lose them again. */
enum { AHEAD_BYTES = 16 << 10, LONGEST_LINEAR = 2048 };
#define NEXT(i) _mm_prefetch(next + 64 * i, _MM_HINT_T1);
/* The weight row to fetch: the n-th, or beyond the n1-th what the same thread reads next, since what it fetches of another
 * thread's is lost. */
INLINE i64 row_ahead(const Product *p, i64 n, i64 n1) { return min64(n < n1 ? n : p->then + n - n1, p->N - 1); }
/* The same, AHEAD_BYTES and more behind the n-th, as many times ``rows`` at once. */
INLINE i64 next_rows(const Product *p, i64 n, i64 n1, i64 rows, i64 row_bytes) {
  const i64 block = max64(rows * row_bytes, 1);
  return row_ahead(p, n + up_to(AHEAD_BYTES, block) / block * rows, n1);
}

/* One row of x and one weight row. */
T_BF16 INLINE __m512 row_sums(const bf16 *x, const bf16 *w, i64 K) {
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  i64 k = 0;
  for (; k + 128 <= K; k += 128) {
    a = dp(a, load(x + k), load(w + k)), b = dp(b, load(x + k + 32), load(w + k + 32));
    c = dp(c, load(x + k + 64), load(w + k + 64)), d = dp(d, load(x + k + 96), load(w + k + 96));
  }
  for (; k + 32 <= K; k += 32) a = dp(a, load(x + k), load(w + k));
  if (k < K) b = dp(b, load(x + k), load_n(w + k, K - k));
  return _mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d));
}

/* One row of x, short weight rows one after the other: one stream, which the processor prefetches by itself (Zen 4 does; a
 * Xeon with AMX reads the streams that bf16_eight fetches ahead 1.3 to 1.5 times as fast). */
T_BF16 static void bf16_linear(const Product *p, i64 n0, i64 n1, float *y) {
  for (i64 n = n0; n < n1; n += 8, y += 8) {
#define SUM(i) const __m512 s##i = row_sums(p->packed, p->w + min64(n + i, n1 - 1) * p->K, p->K);
    EIGHT(SUM)
#undef SUM
    __m512 four = folded(sums4(s0, s1, s2, s3), sums4(s4, s5, s6, s7));
    _mm512_mask_storeu_ps(y, (__mmask16)((1u << min64(8, n1 - n)) - 1), folded(four, four));
  }
}

/* One row of x, eight weight rows at once. Beyond the last row the pointers repeat it. */
T_BF16 INLINE void bf16_eight(const Product *p, i64 n0, i64 n1, float *y, int kind) {
  const bf16 *x = p->packed;
  const i64 K = p->K;
  for (i64 n = n0; n < n1; n += 8, y += 8) {
    const char *near = weight_row(p, next_rows(p, n, n1, 8, K * weight_bytes(kind)), kind);
#define BEGIN(i)                                                                                                       \
  const char *w##i = weight_row(p, min64(n + i, n1 - 1), kind);                                                        \
  __m512 s##i = _mm512_setzero_ps();
    EIGHT(BEGIN)
    i64 k = 0;
    for (; k + 32 <= K; k += 32) {
      __m512i v = load(x + k);
      const char *next = near + 8 * k * weight_bytes(kind);
      NEXT(0) NEXT(1) NEXT(2) NEXT(3)
      if (kind == BF16) {
        NEXT(4) NEXT(5) NEXT(6) NEXT(7)
      }
#define STEP(i) s##i = dp(s##i, v, weights(w##i, k, kind));
      EIGHT(STEP)
    }
    if (k < K) {
      __m512i v = load(x + k);
#define LAST(i) s##i = dp(s##i, v, weights_n(w##i, k, K - k, kind));
      EIGHT(LAST)
    }
#undef BEGIN
#undef STEP
#undef LAST
    const __mmask16 there = (__mmask16)((1u << min64(8, n1 - n)) - 1);
    __m512 four = folded(sums4(s0, s1, s2, s3), sums4(s4, s5, s6, s7));
    __m512 sum = folded(four, four);
    if (kind != BF16) sum = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(there, p->scale + n));
    _mm512_mask_storeu_ps(y, there, sum);
  }
}

/* Four rows of x against four weight rows: sixteen sums. */
T_BF16 INLINE void bf16_four_by_four(const Product *p, i64 n0, i64 n1, Target t, int kind) {
  const i64 K = p->K, width = up_to(K, 32);
  for (i64 n = n0; n < n1; n += 4)
    for (i64 i = 0; i < p->L; i += 4) {
      const char *near = weight_row(p, next_rows(p, n, n1, 4, K * weight_bytes(kind)), kind);
      const bf16 *x = (const bf16 *)p->packed + i * width;
      const char *w0 = weight_row(p, n, kind), *w1 = weight_row(p, min64(n + 1, n1 - 1), kind);
      const char *w2 = weight_row(p, min64(n + 2, n1 - 1), kind), *w3 = weight_row(p, min64(n + 3, n1 - 1), kind);
      __m512 z = _mm512_setzero_ps();
      __m512 a0 = z, a1 = z, a2 = z, a3 = z, b0 = z, b1 = z, b2 = z, b3 = z;
      __m512 c0 = z, c1 = z, c2 = z, c3 = z, d0 = z, d1 = z, d2 = z, d3 = z;
#define TILE(LOAD)                                                                                                     \
  {                                                                                                                    \
    const char *next = near + 4 * k * weight_bytes(kind);                                                              \
    NEXT(0) NEXT(1)                                                                                                    \
    if (kind == BF16) { NEXT(2) NEXT(3) }                                                                              \
    __m512i v0 = LOAD(w0), v1 = LOAD(w1), v2 = LOAD(w2), v3 = LOAD(w3);                                                \
    __m512i u = load(x + k);                                                                                           \
    a0 = dp(a0, u, v0), a1 = dp(a1, u, v1), a2 = dp(a2, u, v2), a3 = dp(a3, u, v3), u = load(x + width + k);           \
    b0 = dp(b0, u, v0), b1 = dp(b1, u, v1), b2 = dp(b2, u, v2), b3 = dp(b3, u, v3), u = load(x + 2 * width + k);       \
    c0 = dp(c0, u, v0), c1 = dp(c1, u, v1), c2 = dp(c2, u, v2), c3 = dp(c3, u, v3), u = load(x + 3 * width + k);       \
    d0 = dp(d0, u, v0), d1 = dp(d1, u, v1), d2 = dp(d2, u, v2), d3 = dp(d3, u, v3);                                    \
  }
#define WHOLE(row) weights(row, k, kind)
#define PART(row) weights_n(row, k, K - k, kind)
      i64 k = 0;
      for (; k + 32 <= K; k += 32) TILE(WHOLE)
      if (k < K) TILE(PART)
#undef TILE
#undef WHOLE
#undef PART
      __m512 ab = folded(sums4(a0, a1, a2, a3), sums4(b0, b1, b2, b3));
      __m512 cd = folded(sums4(c0, c1, c2, c3), sums4(d0, d1, d2, d3));
      __m512 all = folded(ab, cd);
      if (kind != BF16) {
        __m128 scale = _mm_maskz_loadu_ps((__mmask8)((1u << min64(4, n1 - n)) - 1), p->scale + n);
        all = _mm512_mul_ps(all, _mm512_broadcast_f32x4(scale));
      }
      float y[16];
      _mm512_storeu_ps(y, all);
      for (i64 j = 0; j < min64(4, p->L - i); j++)
        memcpy(at(t, i + j) + n - n0, y + 4 * j, (size_t)min64(4, n1 - n) * sizeof(float));
    }
}

/* Sums s[n], whose lanes are rows of x, to y[lane][n]. */
T_BF16 INLINE void put(const __m512 *s, Target t, i64 i, i64 rows, i64 n, i64 columns) {
  if (columns < 8) {
    float part[8][16];
    memcpy(part, s, sizeof part);
    for (i64 j = 0; j < rows; j++)
      for (i64 c = 0; c < columns; c++) at(t, i + j)[n + c] = part[c][j];
    return;
  }
  __m512 half[2][4]; /* [columns 0-3, 4-7][j], 128-bit lane l: row 4 l + j */
  for (int h = 0; h < 2; h++) {
    const __m512 *v = s + 4 * h;
    __m512d a = (__m512d)_mm512_unpacklo_ps(v[0], v[1]), b = (__m512d)_mm512_unpacklo_ps(v[2], v[3]);
    __m512d c = (__m512d)_mm512_unpackhi_ps(v[0], v[1]), d = (__m512d)_mm512_unpackhi_ps(v[2], v[3]);
    half[h][0] = (__m512)_mm512_unpacklo_pd(a, b), half[h][1] = (__m512)_mm512_unpackhi_pd(a, b);
    half[h][2] = (__m512)_mm512_unpacklo_pd(c, d), half[h][3] = (__m512)_mm512_unpackhi_pd(c, d);
  }
#define STORE(l, j)                                                                                                    \
  if (4 * l + j < rows) {                                                                                              \
    float *y = at(t, i + 4 * l + j) + n;                                                                               \
    _mm_storeu_ps(y, _mm512_extractf32x4_ps(half[0][j], l));                                                           \
    _mm_storeu_ps(y + 4, _mm512_extractf32x4_ps(half[1][j], l));                                                       \
  }
#define LANE(l) STORE(l, 0) STORE(l, 1) STORE(l, 2) STORE(l, 3)
  LANE(0) LANE(1) LANE(2) LANE(3)
#undef LANE
#undef STORE
}

/* Lanes are rows of x: eight weight rows (twelve of 4 KiB would fall into one set of an 8-way cache) by pairs from memory,
 * against 32 rows of x with ``two``, or against 16 with two sums each. Eight weight rows two
 * groups ahead are fetched in the order of memory (row_ahead). */
T_BF16 INLINE void bf16_lanes(const Product *p, i64 i, i64 n, i64 n0, i64 n1, Target t, int two, int ahead) {
  const i64 K = p->K, pairs = up_to(K, 32) / 2;
  const uint32_t *x = (const uint32_t *)p->packed + i * pairs, *u = x + 16 * pairs;
  const i64 per_weight = !p->next_chunk ? 16 : half_bytes(p->kind) ? 4 : 8; /* bytes of eight rows */
  const char *next = (const char *)(p->w + row_ahead(p, n + 16, n1) * K);
  if (p->next_chunk) next = p->next_chunk + n * K * per_weight / 8;
#define BEGIN(r)                                                                                                       \
  const bf16 *w##r = p->w + min64(n + r, n1 - 1) * K;                                                                  \
  __m512 s##r = _mm512_setzero_ps(), t##r = s##r;
  EIGHT(BEGIN)
#define STEP(r)                                                                                                        \
  v = pair(w##r + k);                                                                                                  \
  s##r = dp(s##r, a, v);                                                                                               \
  if (two) t##r = dp(t##r, b, v);
#define STEPS(r) s##r = dp(s##r, a, pair(w##r + k)), t##r = dp(t##r, b, pair(w##r + k + 2));
  i64 k = 0;
  for (; !two && k + 4 <= K; k += 4) {
    __m512i a = _mm512_loadu_si512(x + k * 8), b = _mm512_loadu_si512(x + k * 8 + 16);
    if (ahead) _mm_prefetch(next + k * per_weight, _MM_HINT_T1);
    EIGHT(STEPS)
  }
  for (; k + 2 <= K; k += 2) {
    __m512i v, a = _mm512_loadu_si512(x + k * 8), b = two ? _mm512_loadu_si512(u + k * 8) : a;
    if (ahead && k % 4 == 0) _mm_prefetch(next + k * per_weight, _MM_HINT_T1);
    EIGHT(STEP)
  }
#undef STEPS
#undef STEP
#define LAST(r)                                                                                                        \
  v = _mm512_set1_epi32(w##r[k]);                                                                                      \
  s##r = dp(s##r, a, v);                                                                                               \
  if (two) t##r = dp(t##r, b, v);
  if (k < K) {
    __m512i v, a = _mm512_loadu_si512(x + k * 8), b = two ? _mm512_loadu_si512(u + k * 8) : a;
    EIGHT(LAST)
  }
#undef LAST
#undef BEGIN
#define BOTH(r) s##r = _mm512_add_ps(s##r, t##r);
  if (!two) {
    EIGHT(BOTH)
  }
#undef BOTH
  i64 columns = min64(8, n1 - n);
  __m512 s[8] = {s0, s1, s2, s3, s4, s5, s6, s7};
  put(s, t, i, min64(16, p->L - i), n - n0, columns);
  if (two) {
    __m512 s[8] = {t0, t1, t2, t3, t4, t5, t6, t7};
    put(s, t, i + 16, min64(16, p->L - i - 16), n - n0, columns);
  }
}

/* Bytes of packed x up to which every group of weight rows meets all of it; a larger one is taken 32 rows at a time, and
 * meets the whole chunk of weights, so that what is read again is in the second-level cache either way. */
enum { NEAR_BYTES = 256 << 10 };

T_BF16 static void bf16_many(const Product *p, i64 n0, i64 n1, Target t) {
  i64 group = bf16_bytes(p->L, p->K) > NEAR_BYTES ? max64(n1 - n0, 1) : 8;
  for (i64 first = n0; first < n1; first += group)
    for (i64 i = 0; i < p->L; i += 32)
      for (i64 n = first; n < min64(n1, first + group); n += 8) {
        if (p->L - i > 16)
          i ? bf16_lanes(p, i, n, n0, n1, t, 1, 0) : bf16_lanes(p, i, n, n0, n1, t, 1, 1);
        else
          i ? bf16_lanes(p, i, n, n0, n1, t, 0, 0) : bf16_lanes(p, i, n, n0, n1, t, 0, 1);
      }
}

#include "amx.h"

#define FEW_ROWS(NAME, KIND)                                                                                           \
  T_BF16 static void NAME(const Product *p, i64 n0, i64 n1, Target t) {                                                \
    if (p->L == 1 && KIND == BF16 && p->K <= LONGEST_LINEAR && !p->amx)                                                           \
      bf16_linear(p, n0, n1, at(t, 0));                                                                                \
    else if (p->L == 1)                                                                                                \
      bf16_eight(p, n0, n1, at(t, 0), KIND);                                                                           \
    else                                                                                                               \
      bf16_four_by_four(p, n0, n1, t, KIND);                                                                           \
  }
FEW_ROWS(bf16_few, BF16)
FEW_ROWS(int8_few, INT8)
FEW_ROWS(e4m3_few, E4M3)
#undef FEW_ROWS

T_BF16 static void bf16_rows(const Product *p, i64 n0, i64 n1, Target t) {
  if (p->few)
    bf16_few(p, n0, n1, t);
#if HAS_AMX
  else if (p->amx)
    amx_rows(p, n0, n1, t);
#endif
  else
    bf16_many(p, n0, n1, t);
}
#endif /* X86 */

#include "quantised.h"
#include "grouped.h"
#include "neon.h"

static const Level LEVELS[N_LEVELS] = {
    {plain_bytes, plain_pack, plain_rows, plain_silu},
#if X86
    {avx2_bytes, avx2_pack, avx2_rows, avx2_silu},
    {avx512f_bytes, avx512f_pack, avx512f_rows, avx512f_silu},
    {bf16_bytes, bf16_pack, bf16_rows, avx512f_silu},
    {bf16_bytes, bf16_pack, bf16_rows, avx512f_silu},
#elif ARM
    {neon_bytes, neon_pack, neon_rows, neon_silu},
    {neon_bf16_bytes, neon_bf16_pack, neon_bf16_rows, neon_silu},
#endif
};

static const Level WIDENED_LEVELS[N_LEVELS] = {
    {plain_bytes, plain_pack, plain_widened, plain_silu},
#if X86
    {avx2_bytes, avx2_pack, avx2_widened, avx2_silu},
    {avx512f_bytes, avx512f_pack, avx512f_widened, avx512f_silu},
    {bf16_bytes, bf16_pack, bf16_widened, avx512f_silu},
    {bf16_bytes, bf16_pack, bf16_widened, avx512f_silu},
#elif ARM
    {neon_bytes, neon_pack, neon_widened, neon_silu},
    {neon_bf16_bytes, neon_bf16_pack, neon_bf16_widened, neon_silu},
#endif
};

static const Level ROUNDED_LEVELS[N_LEVELS] = {
    {int8_bytes, plain_round_pack, plain_round_rows, plain_silu},
#if X86
    {whole_bytes, avx2_round_pack, avx2_round_rows, avx2_silu},
    {whole_bytes, avx2_round_pack, avx2_round_rows, avx512f_silu},
    {vnni_bytes, vnni_pack, vnni_rows, avx512f_silu},
    {vnni_bytes, vnni_pack, vnni_rows, avx512f_silu},
#elif ARM
    {neon_int8_bytes, neon_int8_pack, neon_int8_rows, neon_silu},
    {neon_int8_bytes, neon_int8_pack, neon_int8dot_rows, neon_silu},
#endif
};

/* The functions for weights like those of ``p``. */
static const Level *functions_for(int level, const Product *p) {
  if (p->kind == BF16) return &LEVELS[level];
  if (p->kind == ROUNDED) return &ROUNDED_LEVELS[level];
#if X86
  static const Level int8 = {bf16_bytes, bf16_pack, int8_rows, avx512f_silu};
  static const Level e4m3 = {bf16_bytes, bf16_pack, e4m3_rows, avx512f_silu};
  static const Level four_bit = {four_bit_bytes, four_bit_pack, four_bit_rows, avx512f_silu};
  static const Level grouped[N_LEVELS] = {
      [AVX2] = {avx2_grouped_bytes, avx2_grouped_pack, avx2_grouped_rows, avx2_silu},
      [AVX512F] = {avx512f_grouped_bytes, avx512f_grouped_pack, avx512f_grouped_rows, avx512f_silu},
      [AVX512_BF16] = {bf16_grouped_bytes, bf16_grouped_pack, bf16_grouped_rows, avx512f_silu},
      [AMX_LEVEL] = {bf16_grouped_bytes, bf16_grouped_pack, bf16_grouped_rows, avx512f_silu},
  };
  const int row_scales = scaled_later(p) && !p->zero;
  if (level >= AVX512_BF16 && p->kind == INT8 && row_scales) return &int8;
  if (level >= AVX512_BF16 && p->kind == E4M3 && row_scales) return &e4m3;
  if (level >= AVX512_BF16 && half_bytes(p->kind) && fits_four_bit(p->K, p->groups)) return &four_bit;
  if (level >= AVX2 && fits_grouped(p)) return &grouped[level];
#endif
  return &WIDENED_LEVELS[level];
}

/* Whether tiles read weights as they are stored, without a chunk of them being widened. */
INLINE int as_stored(const Product *p) { return p->kind == BF16 || p->kind == ROUNDED; }

/* Live rows up to which x has its form for few. */
static i64 few_rows(int level, const Product *p) {
#if X86
  if ((level == AVX2 || level == AVX512F) && fits_grouped(p) && !widens_by_bytes(p)) return GROUPED_FEW;
  if (p->amx) return half_bytes(p->kind) && p->K / p->groups % 32 ? FEW : AMX_FEW;
#endif
  return FEW;
}

static int best_level(void) {
  static atomic_int found = -1;
  int level = atomic_load_explicit(&found, memory_order_relaxed);
  if (level < 0) atomic_store_explicit(&found, level = detect(), memory_order_relaxed);
  return level;
}

/* --- work shared with the threads of XLA's pool ---
 *
 * Handlers run on threads of the pool that they ask for help, so a handler must never wait for a task that has not begun:
 * the whole pool could be such handlers. The caller and its helpers claim chunks from a counter; the caller works too, and
 * waits only for chunks that a helper has claimed. A helper that comes late finds nothing left and touches nothing but the
 * job, which lives until the last of them has put it down. Jobs and their scratch are kept for the next call. */

typedef struct Job Job;
struct Job {
  atomic_long next, done;
  atomic_int holders;
  atomic_int seats; /* threads that have begun to work on it */
  i64 n_chunks;
  i64 n_first; /* chunks that all others wait for */
  void (*chunk)(const Job *, i64 number, int seat);
  const void *work; /* of the caller, there until all chunks are done */
  void *scratch;
  size_t scratch_bytes;
  Job *idle;
};

enum { MOST_IDLE = 16 };
static pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
static Job *idle_jobs;
static int n_idle;

/* A job with that much scratch, NULL where there is no memory. */
static Job *new_job(size_t scratch_bytes) {
  pthread_mutex_lock(&idle_lock);
  Job *job = idle_jobs;
  if (job) idle_jobs = job->idle, n_idle--;
  pthread_mutex_unlock(&idle_lock);
  if (!job) job = calloc(1, sizeof *job);
  if (job && job->scratch_bytes < scratch_bytes) {
    free(job->scratch);
    job->scratch = NULL;
    job->scratch_bytes = 0;
    size_t bytes = (size_t)up_to((i64)scratch_bytes, 4096);
    if (posix_memalign(&job->scratch, 64, bytes)) {
      free(job);
      return NULL;
    }
    job->scratch_bytes = bytes;
  }
  if (job) {
    job->n_first = 0;
    atomic_store(&job->next, 0), atomic_store(&job->done, 0), atomic_store(&job->holders, 1);
    atomic_store(&job->seats, 0);
  }
  return job;
}

static void put_down(Job *job) {
  if (atomic_fetch_sub_explicit(&job->holders, 1, memory_order_acq_rel) != 1) return;
  pthread_mutex_lock(&idle_lock);
  int keep = n_idle < MOST_IDLE;
  if (keep) job->idle = idle_jobs, idle_jobs = job, n_idle++;
  pthread_mutex_unlock(&idle_lock);
  if (keep) return;
  free(job->scratch);
  free(job);
}

/* Until so many chunks are done, all of which have been claimed. */
static void await(Job *job, i64 n) {
  for (int spins = 0; atomic_load_explicit(&job->done, memory_order_acquire) < n; spins++) {
    if (spins >= 256)
      sched_yield();
#if X86
    else
      _mm_pause();
#elif ARM
    else
      __asm__ volatile("yield");
#endif
  }
}

static void claim_chunks(Job *job) {
  const int seat = atomic_fetch_add_explicit(&job->seats, 1, memory_order_relaxed);
  for (;;) {
    i64 number = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (number >= job->n_chunks) return;
    if (number >= job->n_first) await(job, job->n_first); /* all of these have been claimed before */
    job->chunk(job, number, seat);
    atomic_fetch_add_explicit(&job->done, 1, memory_order_release);
  }
}

static void help(void *data) {
  claim_chunks(data);
  put_down(data);
}

static void drop_error(const FfiApi *api, FfiError *error) {
  FfiErrorDestroy args = {FFI_SIZE(FfiErrorDestroy, error), NULL, error};
  if (error) api->error_destroy(&args);
}

/* Threads of the pool, the caller's among them; 1 where there is none. */
static i64 pool_threads(const FfiCall *call) {
  int64_t n = 1;
  if (!call) return 1;
  FfiNumThreads args = {FFI_SIZE(FfiNumThreads, num_threads), NULL, call->ctx, &n};
  FfiError *error = call->api->num_threads(&args);
  drop_error(call->api, error);
  return error || n < 1 ? 1 : n;
}

/* Run all chunks of ``job``, with helpers where ``call`` has a pool, and put it down. */
static void run_job(Job *job, const FfiCall *call) {
  i64 helpers = min64(pool_threads(call), job->n_chunks) - 1;
  for (i64 i = 0; i < helpers; i++) {
    atomic_fetch_add_explicit(&job->holders, 1, memory_order_relaxed);
    FfiSchedule args = {FFI_SIZE(FfiSchedule, data), NULL, call->ctx, help, job};
    FfiError *error = call->api->schedule(&args);
    if (!error) continue;
    drop_error(call->api, error);
    put_down(job);
  }
  claim_chunks(job);
  await(job, job->n_chunks);
  put_down(job);
}

/* --- products --- */

enum {
  CHUNK_BYTES = 96 << 10, /* of weights: they stay in the second-level cache while all rows of x meet them */
  ALONE_BYTES = 96 << 10, /* of weights in a call that is not worth waking a thread */
  FEWEST_CHUNKS = 8,
  CHUNK_ROWS = 16,  /* multiples of this: a line of results */
  PACK_AT_ONCE = 32, /* live rows that one chunk packs, where there are more */
  ZEROED_AT_ONCE = 64,
  PART = 64,         /* live rows that a chunk of gate_up takes at once */
  HELD = 4096,       /* results of gate, and of up, that it keeps on its stack */
};

/* Of the sums of a chunk of ``rows`` weight rows and L of x. */
static i64 amx_sums_bytes(i64 rows, i64 L) {
  return up_to(rows, 2 * TILE_ROWS) * up_to(min64(L, AMX_X_ROWS), 32) * (i64)sizeof(float);
}

/* What threads have to themselves: room for the weights of a chunk, then for its sums by tiles. */
typedef struct {
  char *first; /* NULL: there are none */
  i64 weights, each;
} Rooms;

static Product with_room(const Product *p, Rooms rooms, int seat) {
  Product own = *p;
  own.room = (bf16 *)(rooms.first + seat * rooms.each);
  own.sums = rooms.first + seat * rooms.each + rooms.weights;
  return own;
}

typedef struct {
  Product p;
  const Level *level;
  float *y;
  i64 N; /* columns of y */
  i64 rows_per_chunk;
  i64 n_column_chunks;
  const int32_t *zero; /* [M - L] dead rows of x */
  Rooms rooms;
} ProductWork;

/* Chunks before those of the product pack x, those after them zero the results of dead rows. */
static int aside(const Job *job, i64 number) {
  const ProductWork *work = job->work;
  const i64 dead = work->p.M - work->p.L, first = (number - job->n_first - work->n_column_chunks) * ZEROED_AT_ONCE;
  if (number < job->n_first)
    work->level->pack(&work->p, number * PACK_AT_ONCE, min64(work->p.L, (number + 1) * PACK_AT_ONCE));
  for (i64 i = max64(first, 0); first >= 0 && i < min64(dead, first + ZEROED_AT_ONCE); i++)
    memset(work->y + work->zero[i] * work->N, 0, (size_t)work->N * sizeof(float));
  return number < job->n_first || first >= 0;
}

static void product_chunk(const Job *job, i64 number, int seat) {
  const ProductWork *work = job->work;
  if (aside(job, number)) return;
  number -= job->n_first;
  i64 n0 = number * work->rows_per_chunk, n1 = min64(work->N, n0 + work->rows_per_chunk);
  Target t = {work->y + n0, work->N, work->p.row};
  Product p = with_room(&work->p, work->rooms, seat);
  p.then = n0 + p.rows_ahead;
  work->level->rows(&p, n0, n1, t);
}

/* Live rows i .. i+n-1 of ``p``; i is a multiple of PACKED. */
static Product part_of(const Level *level, const Product *p, i64 i, i64 n) {
  Product part = *p;
  part.L = n;
  part.row += i;
  part.packed = (char *)p->packed + (i ? level->packed_bytes(i, p->K) : 0);
  if (part.rounded) part.rounded += i;
  return part;
}

/* Columns [n0, n1) of gate_up, to rows ``t.row`` of ``t``, which has as many columns as the gate has. */
static void gated(const Level *level, const Product *p, i64 n0, i64 n1, Target t) {
#if HAS_AMX
  if (p->amx && !p->few && as_stored(p)) {
    amx_gated(p, n0, n1, t);
    return;
  }
#endif
  const i64 n = n1 - n0;
  float gate[HELD], up[HELD];
  int32_t number_of[PART];
  for (int i = 0; i < PART; i++) number_of[i] = i;
  for (i64 first = 0; first < p->L; first += PART) {
    Product part = part_of(level, p, first, min64(PART, p->L - first));
    part.then = t.ld + n0;
    level->rows(&part, n0, n1, (Target){gate, n, number_of});
    part.then = first + PART < p->L ? n0 : p->then;
    level->rows(&part, t.ld + n0, t.ld + n1, (Target){up, n, number_of});
    for (i64 i = 0; i < part.L; i++) level->silu(gate + i * n, up + i * n, at(t, first + i), n);
  }
}

static void gate_up_chunk(const Job *job, i64 number, int seat) {
  const ProductWork *work = job->work;
  if (aside(job, number)) return;
  number -= job->n_first;
  const i64 n0 = number * work->rows_per_chunk, n1 = min64(work->N, n0 + work->rows_per_chunk);
  Product p = with_room(&work->p, work->rooms, seat);
  p.then = n0 + p.rows_ahead;
  gated(work->level, &p, n0, n1, (Target){work->y + n0, work->N, work->p.row});
}

typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));

/* Whether a row is all zeros, of either sign. */
static int is_dead(const float *x, i64 K) {
  i64 k = 0;
  for (; k + 64 <= K; k += 64) {
    const Bits *at = (const Bits *)(x + k);
    Bits any = (at[0] | at[1] | at[2] | at[3]) << 1;
    for (int i = 0; i < 16; i++)
      if (any[i]) return 0;
  }
  for (; k < K; k++)
    if (x[k] != 0) return 0;
  return 1;
}

/* Which rows of x are live, then which are not. */
static i64 sort_rows(const float *x, i64 M, i64 K, int32_t *row) {
  i64 live = 0, dead = M;
  for (i64 m = 0; m < M; m++) row[is_dead(x + m * K, K) ? --dead : live++] = (int32_t)m;
  return live;
}

/* Results of a chunk: of N that meet up to L live rows of x. Tiles of whole weights take more at once, so that x is read
 * less often than weights are. */
static i64 chunk_rows(const Product *p, i64 N, i64 L, int fused) {
  const i64 each = fused ? 2 : 1, tiled = p->amx && L > few_rows(AMX_LEVEL, p);
  i64 rows = max64(CHUNK_BYTES / max64(each * p->K * (i64)sizeof(bf16), 1), 1);
  if (tiled && as_stored(p)) rows = max64(rows, min64(L, AMX_X_ROWS) / each);
  rows = min64(rows, (N + FEWEST_CHUNKS - 1) / FEWEST_CHUNKS);
  rows = up_to(rows, tiled ? 2 * TILE_ROWS / each : CHUNK_ROWS);
  const int held = fused && !(tiled && as_stored(p));
  return held ? min64(rows, HELD / min64(max64(L, 8), PART) / 8 * 8) : rows;
}

/* For each thread, with up to M live rows of x. */
static Rooms rooms_for(const Product *p, i64 N, i64 M, int fused) {
  const i64 rows = max64(chunk_rows(p, N, 1, fused), chunk_rows(p, N, M, fused));
  const int widened = !as_stored(p);
  Rooms rooms = {.weights = widened ? up_to(rows * p->K * (i64)sizeof(bf16), 64) : 0};
  rooms.each = rooms.weights + (p->amx ? amx_sums_bytes((fused ? 2 : 1) * rows, M) : 0);
  return rooms;
}

/* ``p``, of which weights, sizes and x are given, or gate_up where ``fused``. Returns 0 where there is no memory. */
static int product(int level, Product p, float *y, int fused, const FfiCall *call) {
  const i64 M = p.M, K = p.K, N = fused ? p.N / 2 : p.N;
  if (M == 0 || N == 0) return 1;
  const Level *with = functions_for(level, &p);
  if (p.N * K * (i64)sizeof(bf16) <= ALONE_BYTES) call = NULL;
  const i64 rows_bytes = up_to(M * 4, 64), rounded_bytes = p.kind == ROUNDED ? up_to(M * (i64)sizeof(RoundedRow), 64) : 0;
  p.amx = level >= AMX_LEVEL;
  const i64 packed = max64((i64)with->packed_bytes(M, K), (i64)with->packed_bytes(min64(M, few_rows(level, &p)), K));
  Rooms rooms = rooms_for(&p, N, M, fused);
  Job *job = new_job((size_t)(rows_bytes + rounded_bytes + up_to(packed, 64) + rooms.each * pool_threads(call)));
  if (!job) return 0;
  int32_t *row = job->scratch;
  char *rest = (char *)job->scratch + rows_bytes;
  p.L = sort_rows(p.x, M, K, row);
  p.row = row;
  p.few = p.L <= few_rows(level, &p);
  if (rounded_bytes) p.rounded = (RoundedRow *)rest;
  p.packed = rest + rounded_bytes;
  rooms.first = (char *)p.packed + up_to(packed, 64);
  ProductWork work = {.p = p, .level = with, .y = y, .N = N, .zero = row + p.L, .rooms = rooms};
  job->n_first = p.L > PACK_AT_ONCE ? (p.L + PACK_AT_ONCE - 1) / PACK_AT_ONCE : 0;
  if (p.L && !job->n_first) with->pack(&work.p, 0, p.L);
  const i64 rows = chunk_rows(&p, N, p.L, fused);
  work.rows_per_chunk = rows;
  work.p.rows_ahead = rows * pool_threads(call);
  work.n_column_chunks = p.L ? (N + rows - 1) / rows : 0;
  job->n_chunks = job->n_first + work.n_column_chunks + (M - p.L + ZEROED_AT_ONCE - 1) / ZEROED_AT_ONCE;
  job->chunk = fused ? gate_up_chunk : product_chunk;
  job->work = &work;
  run_job(job, call);
  return 1;
}

/* --- products of experts ---
 *
 * Assignments are sorted by expert; each expert that has any is a product of its own, on weights that stay where they lie.
 * All of them are one job, so that the threads share small experts too. */

typedef struct {
  const Product *p;      /* of each expert that has assignments; p->row are rows of x */
  const int32_t *const *to; /* of each, rows of y */
  const Level *level;
  float *y;
  i64 N, rows_per_chunk, chunks_each, threads;
  int fused;
  Rooms rooms;
} ExpertWork;

static void expert_chunk(const Job *job, i64 number, int seat) {
  const ExpertWork *work = job->work;
  i64 g = number / work->chunks_each, n0 = number % work->chunks_each * work->rows_per_chunk;
  i64 n1 = min64(work->N, n0 + work->rows_per_chunk);
  Target t = {work->y + n0, work->N, work->to[g]};
  Product p = with_room(&work->p[g], work->rooms, seat);
  p.rows_ahead = work->rows_per_chunk * work->threads;
  p.then = n0 + p.rows_ahead;
  if (work->fused)
    gated(work->level, &p, n0, n1, t);
  else
    work->level->rows(&p, n0, n1, t);
}

typedef struct {
  Product of;            /* weights of all experts, [E * N, K], or [E * 2 * N, K] where fused; x: [R, K] */
  const int32_t *expert; /* [A]; assignment a has row a / (A / R) of x; E and more: nowhere, its row of y is zeros */
  float *y;              /* [A, N] */
  i64 A, R, E, N;
  int fused;
} Experts;

/* ``p`` with ``rows`` weight rows from the n-th on. */
static Product rows_from(const Product *p, i64 n, i64 rows) {
  Product part = *p;
  part.N = rows;
  if (p->kind == BF16) {
    part.w += n * p->K;
    return part;
  }
  part.q = numbers_of(p, n);
  part.scale += n * p->groups;
  if (p->zero) part.zero += n * p->groups;
  if (p->shift) part.shift += n * p->groups;
  return part;
}

/* Assignments by expert: ``to`` their numbers, ``from`` their rows of x, ``end[i]`` where in both those of expert i end.
 * Rows of y of assignments to no expert become zeros. */
static void sort_by_expert(const Experts *e, i64 *end, int32_t *to, int32_t *from) {
  memset(end, 0, (size_t)(e->E + 1) * sizeof *end);
  for (i64 a = 0; a < e->A; a++) {
    i64 i = e->expert[a];
    if (i >= 0 && i < e->E)
      end[i + 1]++;
    else
      memset(e->y + a * e->N, 0, (size_t)e->N * sizeof *e->y);
  }
  for (i64 i = 0; i < e->E; i++) end[i + 1] += end[i];
  for (i64 a = 0; a < e->A; a++) {
    i64 i = e->expert[a];
    if (i < 0 || i >= e->E) continue;
    to[end[i]] = (int32_t)a;
    from[end[i]++] = (int32_t)(a / (e->A / e->R));
  }
}

/* Returns 0 where there is no memory. */
static int experts(int level, const Experts *e, const FfiCall *call) {
  const i64 most = min64(e->A, e->E), rows_each = (e->fused ? 2 : 1) * e->N, K = e->of.K;
  if (e->A == 0 || e->N == 0) return 1;
  Product of = e->of;
  of.amx = level >= AMX_LEVEL;
  const Level *with = functions_for(level, &of);
  const i64 alone = up_to((i64)with->packed_bytes(1, K), 64); /* L rows together take no more than L alone */
  const i64 ends = up_to((e->E + 1) * 8, 64), numbers = up_to(e->A * 4, 64);
  const i64 products = up_to(most * (i64)sizeof(Product), 64), pointers = up_to(most * 8, 64);
  const i64 rounded_bytes = of.kind == ROUNDED ? up_to(e->A * (i64)sizeof(RoundedRow), 64) : 0;
  const i64 threads = pool_threads(call);
  Rooms rooms = rooms_for(&of, e->N, e->A, e->fused);
  Job *job = new_job((size_t)(ends + 2 * numbers + products + pointers + rounded_bytes + e->A * alone + threads * rooms.each));
  if (!job) return 0;
  char *rest = job->scratch;
  i64 *end = (i64 *)rest;
  int32_t *to = (int32_t *)(rest += ends), *from = (int32_t *)(rest += numbers);
  Product *p = (Product *)(rest += numbers);
  const int32_t **rows_of_y = (const int32_t **)(rest += products);
  RoundedRow *rounded_rows = (RoundedRow *)(rest += pointers);
  rest += rounded_bytes;
  sort_by_expert(e, end, to, from);
  i64 n = 0, longest = 0, begin = 0;
  for (i64 i = 0; i < e->E; begin = end[i++]) {
    i64 L = end[i] - begin;
    if (!L) continue;
    p[n] = rows_from(&of, i * rows_each, rows_each);
    p[n].M = e->R, p[n].L = L;
    p[n].row = from + begin;
    p[n].packed = rest;
    p[n].few = L <= few_rows(level, &of);
    if (rounded_bytes) p[n].rounded = rounded_rows + begin;
    with->pack(&p[n], 0, L);
    rest += up_to((i64)with->packed_bytes(L, K), 64);
    rows_of_y[n++] = to + begin;
    longest = max64(longest, L);
  }
  const i64 rows = chunk_rows(&of, e->N, longest, e->fused);
  rooms.first = rest;
  if (n * rows_each * K * (i64)sizeof(bf16) <= ALONE_BYTES) call = NULL;
  ExpertWork work = {
      .p = p,
      .to = rows_of_y,
      .level = with,
      .y = e->y,
      .N = e->N,
      .rows_per_chunk = rows,
      .chunks_each = (e->N + rows - 1) / rows,
      .threads = threads,
      .fused = e->fused,
      .rooms = rooms,
  };
  job->n_chunks = n * work.chunks_each;
  job->chunk = expert_chunk;
  job->work = &work;
  run_job(job, call);
  return 1;
}

/* --- attention ---
 *
 * Tokens of a row lie at neighbouring positions and see what its pages hold up to their own. A row of few tokens is
 * computed token by token, one with more in tiles of TILE tokens, whose lanes are tokens:
 *
 *   token   scores of SPAN positions, sixteen at a time, for each query head of the kv head; then their softmax;
 *           then values, two positions at a time. Weights keep 16 bits, as the sum of two bfloat16.
 *   tile    for each query head, STEP positions at a time: scores, running softmax, values. Weights are bfloat16, as
 *           XLA's are.
 *
 * Without AVX512_BF16 both are computed in float32 by AVX2 or NEON, all query heads of up to ROWS / heads tokens together, NEARBY
 * positions at a time: keys and values are widened once for them.
 *
 * A chunk of work is one of these for one kv head, heads in the outer order, so that pages which rows share are met
 * again while a cache has them. What is not finite among keys makes the token's result NaN, among values it reads as
 * zero, so that what nobody may see cannot leave its place with a weight of zero. */

enum { BLOCK = 16, MOST_HEAD = 256, MOST_GROUP = 16, TILE = 32, FEW_TOKENS = 8, SPAN = 256, STEP = 64, AHEAD = 64 };

/* Tokens token .. token+n-1 of a row, from position ``start`` on. */
typedef struct {
  int32_t row, token, start, n;
} Item;

typedef struct {
  const float *q, *far; /* [T, N, H], far: queries that meet the sinks, or NULL */
  const bf16 *k, *v;    /* [P, K, Z, H] */
  const int32_t *table; /* [R, M] */
  const int32_t *start, *count, *first; /* [R] position of a row's first token, its tokens, the first one's number */
  float *o;                             /* [T, N, H] */
  i64 T, R, M, N, K, Z, H;
  i64 window, sinks;
  float scale;
  const Item *items;
  i64 n_items;
} Attention;

/* Where the sixteen positions from ``pos`` on (a multiple of sixteen) begin: they lie in one page. */
INLINE i64 place(const Attention *a, const int32_t *pages, i64 head, i64 pos) {
  return ((i64)pages[pos / a->Z] * a->K + head) * a->Z * a->H + pos % a->Z * a->H;
}

#if X86
T_BF16 INLINE __m512 exp16(__m512 x) { return (__m512)avx512f_exp((avx512f_f)x); }

/* e^(x - top) in two thirds of the instructions, with a relative error of at most 6e-7 down to e^-10 and 4e-6 below; x is
 * no infinity and no more than top. The polynomial is Cephes' of 2^r. */
T_BF16 INLINE __m512 exp16_below(__m512 x, __m512 top) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f), y = _mm512_mul_ps(_mm512_sub_ps(x, top), log2e);
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(y, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.5353362e-4f), r, _mm512_set1_ps(1.3398874e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6184373e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5503324e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022650e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
  return _mm512_scalef_ps(p, n);
}

/* Two positions of 32 values each, as pairs: the first four of each eight in lo, the others in hi. */
typedef struct {
  __m512i lo, hi;
} Pairs;

T_BF16 INLINE __m512i finite_or_zero(__m512i x) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(_mm512_and_si512(x, exponent), exponent), x);
}

T_BF16 INLINE Pairs paired(const bf16 *a, const bf16 *b, int careful) {
  __m512i x = load(a), y = load(b);
  if (careful) x = finite_or_zero(x), y = finite_or_zero(y);
  return (Pairs){_mm512_unpacklo_epi16(x, y), _mm512_unpackhi_epi16(x, y)};
}

/* --- one token --- */

typedef struct {
  float o[MOST_GROUP][MOST_HEAD]; /* of each 32 values, those of Pairs.lo, then of Pairs.hi */
  float top[MOST_GROUP], total[MOST_GROUP];
  int bad[MOST_GROUP];
  bf16 q[MOST_GROUP][MOST_HEAD];
  uint32_t pairs[MOST_HEAD / 2][16]; /* of values of q; lanes are query heads (AMX) */
  float score[MOST_GROUP][SPAN];
  bf16 weight[MOST_GROUP][SPAN], rest[MOST_GROUP][SPAN]; /* their sum is a position's weight */
} Token;

T_BF16 static void token_queries(Token *s, const float *q, i64 G, i64 H, float scale) {
  for (i64 g = 0; g < G; g++)
    for (i64 h = 0; h < H; h += 16)
      _mm256_storeu_si256((__m256i *)(s->q[g] + h),
                          rounded(_mm512_mul_ps(_mm512_loadu_ps(q + g * H + h), _mm512_set1_ps(scale))));
}

/* Scores of sixteen positions for each query; -inf for one that is not seen. */
T_BF16 INLINE void token_scores(Token *s, i64 G, i64 H, const bf16 *k, i64 at, __mmask16 seen) {
  for (i64 g = 0; g < G; g++) {
    __m512 d[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
      __m512 sum = dp(_mm512_setzero_ps(), load(s->q[g]), load(k + i * H));
      for (i64 h = 32; h < H; h += 32) sum = dp(sum, load(s->q[g] + h), load(k + i * H + h));
      d[i] = sum;
    }
    __m512 score = sums16(d);
    s->bad[g] |= _mm512_mask_fpclass_ps_mask(seen, score, 0x99); /* NaN or infinite */
    _mm512_storeu_ps(s->score[g] + at, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, score));
  }
}

/* Scores of n positions (a multiple of sixteen) become weights; sums so far are brought to the new top. */
T_BF16 INLINE void token_weights(Token *s, i64 g, i64 H, i64 n) {
  const __m512 none = _mm512_set1_ps(-INFINITY);
  __m512 most = none;
  for (i64 i = 0; i < n; i += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(s->score[g] + i));
  float top = _mm512_reduce_max_ps(most);
  if (top > s->top[g]) {
    __m512 keep = exp16(_mm512_set1_ps(s->top[g] - top));
    for (i64 h = 0; s->total[g] != 0 && h < H; h += 16)
      _mm512_storeu_ps(s->o[g] + h, _mm512_mul_ps(_mm512_loadu_ps(s->o[g] + h), keep));
    s->total[g] *= _mm512_cvtss_f32(keep);
    s->top[g] = top;
  }
  __m512 total = _mm512_setzero_ps();
  for (i64 i = 0; i < n; i += 16) {
    __m512 score = _mm512_loadu_ps(s->score[g] + i);
    __m512 p = exp16_below(score, _mm512_set1_ps(s->top[g]));
    p = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(score, none, _CMP_NEQ_OQ), p);
    total = _mm512_add_ps(total, p);
    __m256i near = rounded(p);
    __m512 rest = _mm512_sub_ps(p, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(near), 16));
    _mm256_storeu_si256((__m256i *)(s->weight[g] + i), near);
    _mm256_storeu_si256((__m256i *)(s->rest[g] + i), rounded(rest));
  }
  s->total[g] += _mm512_reduce_add_ps(total);
}

/* Values of n positions, 32 of each, added to ``n_g`` queries from g on. */
T_BF16 INLINE void token_values(Token *s, const Attention *a, const int32_t *pages, i64 head, i64 from, i64 n, i64 g,
                                int n_g, i64 h, int careful) {
  __m512 lo[2], hi[2];
  for (int j = 0; j < n_g; j++) lo[j] = _mm512_loadu_ps(s->o[g + j] + h), hi[j] = _mm512_loadu_ps(s->o[g + j] + h + 16);
  for (i64 at = 0; at < n; at += BLOCK) {
    const bf16 *v = a->v + place(a, pages, head, from + at) + h;
    for (int i = 0; i < BLOCK; i += 2) {
      Pairs both = paired(v + i * a->H, v + (i + 1) * a->H, careful);
      for (int j = 0; j < n_g; j++) {
        __m512i w = pair(s->weight[g + j] + at + i), rest = pair(s->rest[g + j] + at + i);
        lo[j] = dp(dp(lo[j], w, both.lo), rest, both.lo);
        hi[j] = dp(dp(hi[j], w, both.hi), rest, both.hi);
      }
    }
  }
  for (int j = 0; j < n_g; j++)
    _mm512_storeu_ps(s->o[g + j] + h, lo[j]), _mm512_storeu_ps(s->o[g + j] + h + 16, hi[j]);
}

T_BF16 INLINE void fetch_keys(const bf16 *p, i64 n) {
  for (i64 i = 0; i < n; i += 32) _mm_prefetch((const char *)(p + i), _MM_HINT_T0);
}

/* Into the second-level cache, since all values of a span are many. */
T_BF16 INLINE void fetch_values(const bf16 *p, i64 n) {
  for (i64 i = 0; i < n; i += 32) _mm_prefetch((const char *)(p + i), _MM_HINT_T1);
}

/* Positions [from, to) of one row and kv head. */
T_BF16 static void token_span(Token *s, const Attention *a, const int32_t *pages, i64 head, i64 from, i64 to,
                              int careful) {
  const i64 G = a->N / a->K, H = a->H;
  for (i64 pos = from / BLOCK * BLOCK; pos < min64(from / BLOCK * BLOCK + AHEAD, to); pos += BLOCK)
    fetch_keys(a->k + place(a, pages, head, pos), BLOCK * H);
  for (i64 first = from / BLOCK * BLOCK; first < to; first += SPAN) {
    i64 n = min64(SPAN, up_to(to - first, BLOCK));
    for (i64 at = 0; at < n; at += BLOCK) {
      i64 pos = first + at, low = max64(from - pos, 0), high = min64(to - pos, BLOCK), here = place(a, pages, head, pos);
      unsigned seen = (0xffffu >> (BLOCK - high)) & (0xffffu << low);
      if (pos + AHEAD < to) fetch_keys(a->k + place(a, pages, head, pos + AHEAD), BLOCK * H);
      fetch_values(a->v + here, BLOCK * H);
      token_scores(s, G, H, a->k + here, at, (__mmask16)seen);
    }
    for (i64 g = 0; g < G; g++) token_weights(s, g, H, n);
    for (i64 h = 0; h < H; h += 32) {
      i64 g = 0;
      for (; g + 2 <= G; g += 2) token_values(s, a, pages, head, first, n, g, 2, h, careful);
      if (g < G) token_values(s, a, pages, head, first, n, g, 1, h, careful);
    }
  }
}

typedef void TokenSpan(Token *, const Attention *, const int32_t *pages, i64 head, i64 from, i64 to, int careful);

/* Results of one token and kv head; 0 where one is not finite though all scores are. */
T_BF16 INLINE int token_results(const Attention *a, const Item *item, i64 head, TokenSpan *span, int careful) {
  const i64 G = a->N / a->K, H = a->H, at = (item->token * a->N + head * G) * H, length = item->start + 1;
  const int32_t *pages = a->table + item->row * a->M;
  const i64 first = a->window ? max64(length - a->window, 0) : 0;
  Token s;
  for (i64 g = 0; g < G; g++) {
    s.top[g] = -FLT_MAX;
    s.total[g] = 0;
    s.bad[g] = 0;
    memset(s.o[g], 0, (size_t)H * sizeof(float));
  }
  if (a->far) {
    token_queries(&s, a->far + at, G, H, a->scale);
    span(&s, a, pages, head, 0, min64(a->sinks, first), careful);
  }
  token_queries(&s, a->q + at, G, H, a->scale);
  span(&s, a, pages, head, first, length, careful);
  /* Lane i of either half of 32 values: i % 4 of an eight's first or second four. */
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  int odd = 0;
  for (i64 g = 0; g < G; g++) {
    __m512 by = _mm512_set1_ps(s.bad[g] ? NAN : 1.0f / s.total[g]);
    for (i64 h = 0; h < H; h += 32) {
      __m512 lo = _mm512_mul_ps(_mm512_loadu_ps(s.o[g] + h), by), hi = _mm512_mul_ps(_mm512_loadu_ps(s.o[g] + h + 16), by);
      odd |= !s.bad[g] && (_mm512_fpclass_ps_mask(lo, 0x99) | _mm512_fpclass_ps_mask(hi, 0x99));
      _mm512_storeu_ps(a->o + at + g * H + h, _mm512_permutex2var_ps(lo, low, hi));
      _mm512_storeu_ps(a->o + at + g * H + h + 16, _mm512_permutex2var_ps(lo, high, hi));
    }
  }
  return !odd;
}

/* Values are hardly ever not finite: they are looked at only where a result is not. */
T_BF16 static void token_attention(const Attention *a, const Item *item, i64 head, TokenSpan *span) {
  for (int i = 0; i < item->n; i++) {
    Item one = {item->row, item->token + i, item->start + i, 1};
    if (!token_results(a, &one, head, span, 0)) token_results(a, &one, head, span, 1);
  }
}

/* --- a tile of tokens --- */

/* What a tile keeps of one query head; lanes are tokens. */
typedef struct {
  float o[MOST_HEAD][TILE]; /* values in the order of Pairs */
  float top[TILE], total[TILE], odd[TILE]; /* odd: NaN once a score was not finite */
  uint32_t q[MOST_HEAD / 2][TILE];
} TileHead;

typedef struct {
  TileHead head;
  float score[STEP][TILE];
  uint32_t weight[STEP / 2][TILE];
  uint32_t v[STEP / 2][MOST_HEAD];
} Tile;

/* One query head of ``n`` tokens, scaled, as pairs of values whose lanes are tokens. */
T_BF16 static void tile_queries(uint32_t (*to)[TILE], const float *q, i64 ld, i64 n, i64 H, float scale) {
  const __m512 by = _mm512_set1_ps(scale);
  for (i64 lane = 0; lane < up_to(n, 16); lane += 16)
    for (i64 h = 0; h < H; h += 32) {
      __m512i v[16];
      for (i64 r = 0; r < 16; r++) {
        v[r] = _mm512_setzero_si512();
        if (lane + r >= n) continue;
        const float *from = q + (lane + r) * ld + h;
        __m256i a = rounded(_mm512_mul_ps(_mm512_loadu_ps(from), by));
        __m256i b = rounded(_mm512_mul_ps(_mm512_loadu_ps(from + 16), by));
        v[r] = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
      }
      turn16(v);
      for (int r = 0; r < 16; r++) _mm512_storeu_si512(to[h / 2 + r] + lane, v[r]);
    }
}

/* Scores of eight positions against one or two vectors of tokens. */
T_BF16 INLINE void tile_scores(Tile *s, const bf16 *k, i64 at, i64 H, int two) {
#define BEGIN(r)                                                                                                       \
  const bf16 *k##r = k + r * H;                                                                                        \
  __m512 s##r = _mm512_setzero_ps(), t##r = s##r;
  EIGHT(BEGIN)
#undef BEGIN
#define ADD(r)                                                                                                         \
  v = pair(k##r + h);                                                                                                  \
  s##r = dp(s##r, a, v);                                                                                               \
  if (two) t##r = dp(t##r, b, v);
  for (i64 h = 0; h < H; h += 2) {
    __m512i v, a = _mm512_loadu_si512(s->head.q[h / 2]), b = two ? _mm512_loadu_si512(s->head.q[h / 2] + 16) : a;
    EIGHT(ADD)
  }
#undef ADD
#define KEEP(r)                                                                                                        \
  _mm512_storeu_ps(s->score[at + r], s##r);                                                                            \
  if (two) _mm512_storeu_ps(s->score[at + r] + 16, t##r);
  EIGHT(KEEP)
#undef KEEP
}

/* Scores of ``n`` positions from ``first`` on become weights of the tokens in lanes lane .. lane+15, which see the positions
 * [low, high) of their own; all of them where ``whole``. */
T_BF16 INLINE void tile_weights(TileHead *s, float (*scores)[TILE], uint32_t (*weights)[TILE], i64 lane, i64 first, i64 n,
                                i64 H, __m512i low, __m512i high, int whole) {
  const __m512 none = _mm512_set1_ps(-INFINITY), zero = _mm512_setzero_ps();
  __m512 top = _mm512_loadu_ps(s->top + lane), odd = _mm512_loadu_ps(s->odd + lane), most = top;
  for (i64 i = 0; i < n; i++) {
    __m512 score = _mm512_loadu_ps(scores[i] + lane);
    if (!whole) {
      __m512i pos = _mm512_set1_epi32((int)(first + i));
      __mmask16 seen = _mm512_cmplt_epi32_mask(pos, high) & _mm512_cmpge_epi32_mask(pos, low);
      odd = _mm512_mask3_fmadd_ps(score, zero, odd, seen);
      score = _mm512_mask_mov_ps(none, seen, score);
      _mm512_storeu_ps(scores[i] + lane, score);
    } else {
      odd = _mm512_fmadd_ps(score, zero, odd);
    }
    most = _mm512_max_ps(most, score);
  }
  _mm512_storeu_ps(s->odd + lane, odd);
  __m512 keep = exp16(_mm512_sub_ps(top, most)), total = _mm512_mul_ps(_mm512_loadu_ps(s->total + lane), keep);
  _mm512_storeu_ps(s->top + lane, most);
  if (_mm512_cmp_ps_mask(top, most, _CMP_NEQ_UQ))
    for (i64 h = 0; h < H; h++)
      _mm512_storeu_ps(s->o[h] + lane, _mm512_mul_ps(_mm512_loadu_ps(s->o[h] + lane), keep));
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (i64 i = 0; i < n; i += 2) {
    __m512 a = _mm512_loadu_ps(scores[i] + lane), b = _mm512_loadu_ps(scores[i + 1] + lane);
    __m512 p = exp16_below(a, most), r = exp16_below(b, most);
    if (!whole) {
      p = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, none, _CMP_NEQ_UQ), p);
      r = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(b, none, _CMP_NEQ_UQ), r);
    }
    total = _mm512_add_ps(total, _mm512_add_ps(p, r));
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(rounded(p)), rounded(r), 1);
    _mm512_storeu_si512(weights[i / 2] + lane, _mm512_permutexvar_epi16(order, both));
  }
  _mm512_storeu_ps(s->total + lane, total);
}

/* Values of ``n`` positions times their weights, added to eight values of each token. */
T_BF16 INLINE void tile_values(Tile *s, i64 h, i64 n, int two) {
#define BEGIN(r)                                                                                                       \
  __m512 s##r = _mm512_loadu_ps(s->head.o[h + r]), t##r = two ? _mm512_loadu_ps(s->head.o[h + r] + 16) : s##r;
  EIGHT(BEGIN)
#undef BEGIN
#define ADD(r)                                                                                                         \
  v = _mm512_set1_epi32((int)from[r]);                                                                                 \
  s##r = dp(s##r, a, v);                                                                                               \
  if (two) t##r = dp(t##r, b, v);
  for (i64 i = 0; i < n / 2; i++) {
    const uint32_t *from = s->v[i] + h;
    __m512i v, a = _mm512_loadu_si512(s->weight[i]), b = two ? _mm512_loadu_si512(s->weight[i] + 16) : a;
    EIGHT(ADD)
  }
#undef ADD
#define KEEP(r)                                                                                                        \
  _mm512_storeu_ps(s->head.o[h + r], s##r);                                                                            \
  if (two) _mm512_storeu_ps(s->head.o[h + r] + 16, t##r);
  EIGHT(KEEP)
#undef KEEP
}

/* Positions [from, to), of which lane i sees those in [low, high)[i]. */
T_BF16 INLINE void tile_span(Tile *s, const Attention *a, const int32_t *pages, i64 head, i64 from, i64 to,
                             const int32_t *low, const int32_t *high, i64 n_tokens, int two) {
  const i64 H = a->H, least = high[0], most = low[n_tokens - 1]; /* all tokens, which are in order, see [most, least) */
  for (i64 first = from / BLOCK * BLOCK; first < to; first += STEP) {
    const i64 n = min64(STEP, up_to(to - first, BLOCK));
    for (i64 at = 0; at < n; at += BLOCK) {
      const i64 here = place(a, pages, head, first + at);
      tile_scores(s, a->k + here, at, H, two);
      tile_scores(s, a->k + here + 8 * H, at + 8, H, two);
      for (i64 i = 0; i < BLOCK; i += 2)
        for (i64 h = 0; h < H; h += 32) {
          Pairs both = paired(a->v + here + i * H + h, a->v + here + (i + 1) * H + h, 1);
          _mm512_storeu_si512(s->v[(at + i) / 2] + h, both.lo);
          _mm512_storeu_si512(s->v[(at + i) / 2] + h + 16, both.hi);
        }
    }
    const int whole = first >= most && first + n <= least;
    for (i64 lane = 0; lane < (two ? 32 : 16); lane += 16) {
      __m512i lows = _mm512_loadu_si512(low + lane), highs = _mm512_loadu_si512(high + lane);
      if (whole)
        tile_weights(&s->head, s->score, s->weight, lane, first, n, H, lows, highs, 1);
      else
        tile_weights(&s->head, s->score, s->weight, lane, first, n, H, lows, highs, 0);
    }
    for (i64 h = 0; h < H; h += 8) tile_values(s, h, n, two);
  }
}

/* The results of one query head, whose values are in the order of Pairs or, with ``in_order``, in their own. */
T_BF16 INLINE void tile_results(const TileHead *s, float *o, i64 ld, i64 n, i64 H, int in_order) {
  for (i64 lane = 0; lane < n; lane += 16) {
    __m512 total = _mm512_loadu_ps(s->total + lane);
    __m512 by = _mm512_add_ps(_mm512_div_ps(_mm512_set1_ps(1.0f), total), _mm512_loadu_ps(s->odd + lane));
    for (i64 h = 0; h < H; h += 16) {
      __m512i v[16];
      for (i64 r = 0; r < 16; r++) { /* value h + r in the order of Pairs */
        i64 in = (h + r) % 32, at = in_order ? h + r : h / 32 * 32 + (in % 8 < 4 ? 0 : 16) + in / 8 * 4 + in % 4;
        v[r] = (__m512i)_mm512_mul_ps(_mm512_loadu_ps(s->o[at] + lane), by);
      }
      turn16(v);
      for (i64 r = 0; r < min64(16, n - lane); r++) _mm512_storeu_si512(o + (lane + r) * ld + h, v[r]);
    }
  }
}

/* The positions that the tokens of a tile see: [low, high), and of the sinks [none, behind). */
typedef struct {
  int32_t low[TILE], high[TILE], none[TILE], behind[TILE];
} Visible;

static void tile_visible(Visible *s, const Attention *a, const Item *item) {
  for (int i = 0; i < TILE; i++) {
    s->high[i] = item->start + i + 1;
    s->low[i] = a->window ? (int32_t)max64(s->high[i] - a->window, 0) : 0;
    s->none[i] = 0;
    s->behind[i] = (int32_t)min64(a->sinks, s->low[i]);
  }
}

static void tile_begin(TileHead *s, i64 H) {
  for (int i = 0; i < TILE; i++) s->top[i] = -FLT_MAX, s->total[i] = 0, s->odd[i] = 0;
  memset(s->o, 0, (size_t)H * sizeof *s->o);
}

T_BF16 INLINE void tile_attention(const Attention *a, const Item *item, i64 head, int two) {
  const i64 G = a->N / a->K, H = a->H, end = item->start + item->n, ld = a->N * H;
  const int32_t *pages = a->table + item->row * a->M;
  Visible visible;
  Tile s;
  tile_visible(&visible, a, item);
  for (i64 g = 0; g < G; g++) {
    const i64 at = (item->token * a->N + head * G + g) * H;
    tile_begin(&s.head, H);
    if (a->far) {
      tile_queries(s.head.q, a->far + at, ld, item->n, H, a->scale);
      tile_span(&s, a, pages, head, 0, visible.behind[item->n - 1], visible.none, visible.behind, item->n, two);
    }
    tile_queries(s.head.q, a->q + at, ld, item->n, H, a->scale);
    tile_span(&s, a, pages, head, visible.low[0], end, visible.low, visible.high, item->n, two);
    tile_results(&s.head, a->o + at, ld, item->n, H, 0);
  }
}

T_BF16 static void bf16_attention_chunk(const Job *job, i64 number, int seat) {
  (void)seat;
  const Attention *a = job->work;
  const Item *item = a->items + number % a->n_items;
  const i64 head = number / a->n_items;
  if (item->n <= FEW_TOKENS)
    token_attention(a, item, head, token_span);
  else if (item->n > 16)
    tile_attention(a, item, head, 1);
  else
    tile_attention(a, item, head, 0);
}

#include "amx_attention.h"

/* The vectors that attention in float32 is written with. */
#define T_WIDE T_AVX2
#define WIDE(name) avx2_##name
enum { WIDE_LANES = 8 };
T_AVX2 INLINE avx2_i avx2_wide(const bf16 *p) {
  return (avx2_i)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
T_AVX2 INLINE avx2_f avx2_most(avx2_f a, avx2_f b) { return (avx2_f)_mm256_max_ps((__m256)a, (__m256)b); }
#elif ARM
#define T_WIDE
#define WIDE(name) neon_##name
enum { WIDE_LANES = 4 };
#endif

#if X86 || ARM
/* --- AVX2 and NEON: rows of queries against keys and values that are widened once for all of them --- */

typedef WIDE(f) wide_f;
typedef WIDE(i) wide_i;
enum { ROWS = 32, NEARBY = 32 };

/* The query heads of one or several tokens over one kv head. */
typedef struct {
  float q[ROWS][MOST_HEAD], o[ROWS][MOST_HEAD];
  float top[ROWS], total[ROWS], odd[ROWS]; /* odd: NaN once a score was not finite */
  int32_t low[ROWS], high[ROWS];           /* the positions that a row sees: [low, high) */
  float k[NEARBY][MOST_HEAD], v[NEARBY][MOST_HEAD];
  float score[2][NEARBY];
} Group;

/* Keys and values of ``n`` positions from ``first`` on; values that are not finite are zero. */
T_WIDE INLINE void group_widen(Group *s, const Attention *a, const int32_t *pages, i64 head, i64 first, i64 n) {
  const i64 H = a->H;
  for (i64 at = 0; at < n; at += BLOCK) {
    const i64 here = place(a, pages, head, first + at);
    for (i64 i = 0; i < BLOCK; i++)
      for (i64 h = 0; h < H; h += WIDE_LANES) {
        const wide_i v = WIDE(wide)(a->v + here + i * H + h);
        *(wide_i *)(s->k[at + i] + h) = WIDE(wide)(a->k + here + i * H + h);
        *(wide_i *)(s->v[at + i] + h) = v & ~((v & 0x7f800000) == 0x7f800000);
      }
  }
}

/* Scores of ``n`` positions for rows r and, where ``two``, r + 1. */
T_WIDE INLINE void group_scores(Group *s, i64 r, i64 n, i64 H, int two) {
  const float *q = s->q[r], *t = s->q[two ? r + 1 : r];
  for (i64 i = 0; i < n; i += 4) {
    const float *k = s->k[i];
    wide_f a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, l = {0};
    for (i64 h = 0; h < H; h += WIDE_LANES) {
      const wide_f x = WIDE(at)(q + h), y = WIDE(at)(t + h);
      const wide_f k0 = WIDE(at)(k + h), k1 = WIDE(at)(k + MOST_HEAD + h);
      const wide_f k2 = WIDE(at)(k + 2 * MOST_HEAD + h), k3 = WIDE(at)(k + 3 * MOST_HEAD + h);
      a += x * k0, b += x * k1, c += x * k2, d += x * k3;
      if (two) e += y * k0, f += y * k1, g += y * k2, l += y * k3;
    }
    *(Four *)(s->score[0] + i) = WIDE(sums)(a, b, c, d);
    if (two) *(Four *)(s->score[1] + i) = WIDE(sums)(e, f, g, l);
  }
}

/* Scores of ``n`` positions from ``first`` on become weights of row r, which sees some of them; its sums so far are brought
 * to the new top. */
T_WIDE INLINE void group_weights(Group *s, i64 r, float *score, i64 first, i64 n, i64 H) {
  static const int32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7};
  const wide_i lanes = *(const wide_i *)order;
  const wide_f none = WIDE(all)(-INFINITY);
  wide_f most = none, odd = {0};
  for (i64 i = 0; i < n; i += WIDE_LANES) {
    const wide_i pos = lanes + (int32_t)(first + i), seen = (pos > s->low[r] - 1) & (pos < s->high[r]);
    const wide_f x = WIDE(at)(score + i), shown = WIDE(pick)(seen, x, none);
    odd += (wide_f)((wide_i)x & seen) * 0.0f;
    *(wide_f *)(score + i) = shown;
    most = WIDE(most)(most, shown);
  }
  s->odd[r] += WIDE(sums)(odd, odd, odd, odd)[0];
  float tops[WIDE_LANES], top = s->top[r];
  *(wide_f *)tops = most;
  for (int i = 0; i < WIDE_LANES; i++) top = tops[i] > top ? tops[i] : top;
  if (top > s->top[r]) {
    const wide_f keep = WIDE(exp)(WIDE(all)(s->top[r] - top));
    for (i64 h = 0; s->total[r] != 0 && h < H; h += WIDE_LANES) *(wide_f *)(s->o[r] + h) *= keep;
    s->total[r] *= keep[0];
    s->top[r] = top;
  }
  wide_f total = {0};
  for (i64 i = 0; i < n; i += WIDE_LANES) {
    const wide_f x = WIDE(at)(score + i);
    const wide_f p = (wide_f)((wide_i)WIDE(exp)(x - WIDE(all)(top)) & (wide_i)(x != none));
    *(wide_f *)(score + i) = p;
    total += p;
  }
  for (int i = 0; i < WIDE_LANES; i++) s->total[r] += total[i];
}

/* Values of ``n`` positions times their weights, added to rows r and, where ``two``, r + 1. */
T_WIDE INLINE void group_values(Group *s, i64 r, i64 n, i64 H, int two) {
  enum { L = WIDE_LANES };
  for (i64 h = 0; h < H; h += 4 * L) {
    float *o = s->o[r] + h, *t = s->o[two ? r + 1 : r] + h;
    wide_f a = WIDE(at)(o), b = WIDE(at)(o + L), c = WIDE(at)(o + 2 * L), d = WIDE(at)(o + 3 * L);
    wide_f e = WIDE(at)(t), f = WIDE(at)(t + L), g = WIDE(at)(t + 2 * L), l = WIDE(at)(t + 3 * L);
    for (i64 i = 0; i < n; i++) {
      const float *v = s->v[i] + h;
      const wide_f x = WIDE(all)(s->score[0][i]), y = WIDE(all)(s->score[1][i]);
      const wide_f v0 = WIDE(at)(v), v1 = WIDE(at)(v + L), v2 = WIDE(at)(v + 2 * L), v3 = WIDE(at)(v + 3 * L);
      a += x * v0, b += x * v1, c += x * v2, d += x * v3;
      if (two) e += y * v0, f += y * v1, g += y * v2, l += y * v3;
    }
    *(wide_f *)o = a, *(wide_f *)(o + L) = b, *(wide_f *)(o + 2 * L) = c, *(wide_f *)(o + 3 * L) = d;
    if (two) *(wide_f *)t = e, *(wide_f *)(t + L) = f, *(wide_f *)(t + 2 * L) = g, *(wide_f *)(t + 3 * L) = l;
  }
}

/* Positions [from, to) for ``n_rows`` rows. */
T_WIDE INLINE void group_span(Group *s, const Attention *a, const int32_t *pages, i64 head, i64 from, i64 to, i64 n_rows) {
  for (i64 first = from / BLOCK * BLOCK; first < to; first += NEARBY) {
    const i64 n = min64(NEARBY, up_to(to - first, BLOCK));
    for (i64 pos = first + NEARBY; pos < min64(first + 2 * NEARBY, to); pos += BLOCK)
      for (i64 i = 0; i < BLOCK * a->H; i += 32) {
        __builtin_prefetch(a->k + place(a, pages, head, pos) + i);
        __builtin_prefetch(a->v + place(a, pages, head, pos) + i);
      }
    group_widen(s, a, pages, head, first, n);
    for (i64 r = 0; r < n_rows; r += 2) {
      const int two = r + 1 < n_rows;
      if (two)
        group_scores(s, r, n, a->H, 1);
      else
        group_scores(s, r, n, a->H, 0);
      group_weights(s, r, s->score[0], first, n, a->H);
      if (two) {
        group_weights(s, r + 1, s->score[1], first, n, a->H);
        group_values(s, r, n, a->H, 1);
      } else {
        group_values(s, r, n, a->H, 0);
      }
    }
  }
}

T_WIDE INLINE void group_queries(Group *s, const float *q, const Attention *a, i64 n, i64 heads) {
  for (i64 i = 0; i < n; i++)
    for (i64 g = 0; g < heads; g++)
      for (i64 h = 0; h < a->H; h++)
        s->q[i * heads + g][h] = widen(narrow(q[(i * a->N + g) * a->H + h] * a->scale));
}

/* ``heads`` query heads of an item's tokens, from head g of the kv head on. */
T_WIDE INLINE void group_attention(Group *s, const Attention *a, const Item *item, i64 head, i64 g, i64 heads) {
  const i64 H = a->H, at = (item->token * a->N + head * (a->N / a->K) + g) * H, n_rows = item->n * heads;
  const int32_t *pages = a->table + item->row * a->M;
  i64 behind = 0;
  for (i64 r = 0; r < n_rows; r++) {
    const i64 end = item->start + r / heads + 1, low = a->window ? max64(end - a->window, 0) : 0;
    s->top[r] = -FLT_MAX, s->total[r] = 0, s->odd[r] = 0;
    s->low[r] = 0, s->high[r] = (int32_t)min64(a->sinks, low);
    behind = max64(behind, s->high[r]);
    memset(s->o[r], 0, (size_t)H * sizeof(float));
  }
  if (a->far) {
    group_queries(s, a->far + at, a, item->n, heads);
    group_span(s, a, pages, head, 0, behind, n_rows);
  }
  for (i64 r = 0; r < n_rows; r++) {
    s->high[r] = (int32_t)(item->start + r / heads + 1);
    s->low[r] = a->window ? (int32_t)max64(s->high[r] - a->window, 0) : 0;
  }
  group_queries(s, a->q + at, a, item->n, heads);
  group_span(s, a, pages, head, s->low[0], item->start + item->n, n_rows);
  for (i64 r = 0; r < n_rows; r++) {
    const float by = 1.0f / s->total[r] + s->odd[r];
    for (i64 h = 0; h < H; h++) a->o[at + (r / heads * a->N + r % heads) * H + h] = s->o[r][h] * by;
  }
}

T_WIDE static void group_attention_chunk(const Job *job, i64 number, int seat) {
  (void)seat;
  const Attention *a = job->work;
  const Item *item = a->items + number % a->n_items;
  const i64 G = a->N / a->K, most = max64(1, ROWS / item->n);
  Group s;
  for (i64 g = 0; g < G; g += most) group_attention(&s, a, item, number / a->n_items, g, min64(most, G - g));
}
#endif /* X86 || ARM */

/* Whether there is an attention of that level for these sizes. */
static int serves(int level, const Attention *a) {
  return level > PLAIN && a->H % 32 == 0 && a->H <= MOST_HEAD && a->K > 0 && a->N % a->K == 0 &&
         a->N / a->K <= MOST_GROUP && a->Z % BLOCK == 0;
}

/* Whether every row's tokens and positions are within their arrays. */
static int within(const Attention *a) {
  for (i64 r = 0; r < a->R; r++)
    if (a->count[r] > 0 && (a->first[r] < 0 || a->first[r] + (i64)a->count[r] > a->T || a->start[r] < 0 ||
                            a->start[r] + (i64)a->count[r] > a->M * a->Z))
      return 0;
  return 1;
}

/* The work of all rows, long rows first and their last tokens before their first; tokens of no row get zeros. */
static i64 fill_items(const Attention *a, Item *items, char *met) {
  i64 n = 0;
  memset(met, 0, (size_t)a->T);
  for (int few = 0; few < 2; few++)
    for (i64 r = 0; r < a->R; r++) {
      const int32_t count = a->count[r], first = a->first[r];
      if (count <= 0 || (count <= FEW_TOKENS) != few) continue;
      memset(met + first, 1, (size_t)count);
      for (int32_t end = count; end > 0;) {
        int32_t begin = (end - 1) / (few ? 1 : TILE) * (few ? 1 : TILE);
        items[n++] = (Item){(int32_t)r, first + begin, a->start[r] + begin, end - begin};
        end = begin;
      }
    }
  for (i64 t = 0; t < a->T; t++)
    if (!met[t]) memset(a->o + t * a->N * a->H, 0, (size_t)(a->N * a->H) * sizeof *a->o);
  return n;
}

static int attention(int level, Attention *a, const FfiCall *call) {
#if X86 || ARM
  if (!serves(level, a) || !within(a)) return 0;
  Job *job = new_job((size_t)a->T * (sizeof(Item) + 1));
  if (!job) return 0;
  a->items = job->scratch;
  a->n_items = fill_items(a, job->scratch, (char *)job->scratch + (size_t)a->T * sizeof(Item));
  i64 seen = 0;
  for (i64 i = 0; i < a->n_items; i++) seen += (i64)(a->items[i].start + a->items[i].n) * a->items[i].n;
  if (seen * a->K * a->H * 2 * (i64)sizeof(bf16) <= ALONE_BYTES) call = NULL;
  job->n_chunks = a->n_items * a->K;
  job->chunk = group_attention_chunk;
#if X86
  if (level >= AVX512_BF16) job->chunk = bf16_attention_chunk;
#endif
#if HAS_AMX
  if (level >= AMX_LEVEL) job->chunk = amx_attention_chunk;
#endif
  job->work = a;
  run_job(job, call);
  return 1;
#else
  (void)level, (void)a, (void)call, (void)serves, (void)within, (void)fill_items;
  return 0;
#endif
}

/* --- writes of keys and values --- */

typedef struct {
  bf16 *pool[2];        /* [P, K, Z, H]: keys, values */
  const float *new[2];  /* [T, K, H] */
  const int32_t *page, *offset; /* [T]; page 0 is scratch, and one beyond the pool is none: neither is written */
  i64 T, P, K, Z, H;
} Writes;

enum { WRITTEN_AT_ONCE = 32 };

#if X86
T_BF16 static void bf16_narrow(const float *from, bf16 *to, i64 n) {
  i64 i = 0;
  for (; i + 16 <= n; i += 16) _mm256_storeu_si256((__m256i *)(to + i), rounded(_mm512_loadu_ps(from + i)));
  plain_narrow(from + i, to + i, n - i);
}
#endif

/* As the processor can, whatever level a program was traced for: all round alike. */
static void narrow_all(const float *from, bf16 *to, i64 n) {
#if X86
  if (best_level() >= AVX512_BF16)
    bf16_narrow(from, to, n);
  else
    plain_narrow(from, to, n);
#elif ARM
  neon_narrow_all(from, to, n);
#else
  plain_narrow(from, to, n);
#endif
}

static void writes_chunk(const Job *job, i64 number, int seat) {
  (void)seat;
  const Writes *w = job->work;
  for (i64 t = number * WRITTEN_AT_ONCE; t < min64(w->T, (number + 1) * WRITTEN_AT_ONCE); t++) {
    if (w->page[t] <= 0 || w->page[t] >= w->P || w->offset[t] < 0 || w->offset[t] >= w->Z) continue;
    for (int which = 0; which < 2; which++)
      for (i64 head = 0; head < w->K; head++) {
        const float *from = w->new[which] + (t * w->K + head) * w->H;
        bf16 *to = w->pool[which] + ((w->page[t] * w->K + head) * w->Z + w->offset[t]) * w->H;
        narrow_all(from, to, w->H);
      }
  }
}

static int write_all(const Writes *w, const FfiCall *call) {
  Job *job = new_job(0);
  if (!job) return 0;
  job->n_chunks = (w->T + WRITTEN_AT_ONCE - 1) / WRITTEN_AT_ONCE;
  job->chunk = writes_chunk;
  job->work = w;
  run_job(job, call);
  return 1;
}

/* --- handlers --- */

static FfiError *failed(const FfiCall *call, int code, const char *message) {
  FfiErrorCreate args = {FFI_SIZE(FfiErrorCreate, code), NULL, message, code};
  return call->api->error_create(&args);
}

static int speaks(const FfiApi *api) {
  return api->struct_size >= FFI_SIZE(FfiApi, num_threads) && api->version.major == FFI_MAJOR &&
         api->version.minor >= FFI_MINOR;
}

/* The question that XLA asks at registration: which version of the interface a handler is written for. */
static int asks_metadata(const FfiCall *call, FfiError **error) {
  if (!call->extension || call->extension->type != FFI_EXTENSION_METADATA) return 0;
  *error = NULL;
  if (!speaks(call->api)) {
    *error = failed(call, FFI_ERROR_FAILED_PRECONDITION, "jserve: this jaxlib has another version of the FFI");
    return 1;
  }
  FfiMetadata *metadata = ((FfiMetadataExtension *)call->extension)->metadata;
  metadata->version = (FfiVersion){FFI_SIZE(FfiVersion, minor), NULL, FFI_MAJOR, FFI_MINOR};
  metadata->traits = 0;
  return 1;
}

static const FfiBuffer *buffer(const FfiList *list, int64_t i, int dtype, i64 rank) {
  if (i >= list->size) return NULL;
  const FfiBuffer *b = list->items[i];
  return b->dtype == dtype && b->rank == rank ? b : NULL;
}

static const FfiScalar *scalar(const FfiCall *call, const char *name, int dtype) {
  for (int64_t i = 0; i < call->attrs.size; i++) {
    const FfiSpan *span = call->attrs.names[i];
    if (span->len != strlen(name) || memcmp(span->text, name, span->len) || call->attrs.types[i] != FFI_ATTR_SCALAR)
      continue;
    const FfiScalar *found = call->attrs.items[i];
    return found->dtype == dtype ? found : NULL;
  }
  return NULL;
}

static i64 integer(const FfiCall *call, const char *name) {
  const FfiScalar *found = scalar(call, name, FFI_S64);
  i64 value = -1;
  if (found) memcpy(&value, found->value, sizeof value);
  return value;
}

/* The level that a program was traced for, or less where the processor has less; -1: none. */
static int level_of(const FfiCall *call) {
  i64 asked = integer(call, "level");
  return asked < 0 || asked >= N_LEVELS ? -1 : (int)min64(asked, best_level());
}

static FfiError *run_product(const FfiCall *call, const FfiBuffer *x, const FfiBuffer *y, Product p, int level, int fused) {
  if (x->dims[1] != p.K || y->dims[1] * (fused ? 2 : 1) != p.N || y->dims[0] != p.M)
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: shapes do not match");
  if (!product(level, p, y->data, fused, call))
    return failed(call, FFI_ERROR_FAILED_PRECONDITION, "jserve: no memory for a product");
  return NULL;
}

static FfiError *handle_product(const FfiCall *call, int fused) {
  FfiError *error;
  if (asks_metadata(call, &error)) return error;
  const FfiBuffer *x = buffer(&call->args, 0, FFI_F32, 2), *y = buffer(&call->rets, 0, FFI_F32, 2);
  const FfiBuffer *w = buffer(&call->args, 1, FFI_BF16, 2);
  int level = level_of(call);
  if (!x || !y || !w || level < 0) return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: wrong arguments");
  const Product p = {.w = w->data, .N = w->dims[0], .K = w->dims[1], .M = x->dims[0], .x = x->data};
  return run_product(call, x, y, p, level, fused);
}

/* What a call says that the numbers in ``q`` are; -1: nothing, or they are of another type. */
static int kind_of(const FfiCall *call, const FfiBuffer *q) {
  const i64 kind = integer(call, "kind");
  if (kind <= BF16 || kind >= N_KINDS) return -1;
  return q->dtype == (half_bytes((int)kind) ? FFI_U8 : kind == E4M3 ? FFI_F8E4M3FN : FFI_S8) ? (int)kind : -1;
}

/* Weights of a call, from argument 1 on: numbers, scales and, where there are ``all`` arguments, zeros or shifts; the last
 * two dimensions are those of a matrix, which the ``rank`` - 2 before them repeat. Returns 0 where they do not match. */
static int read_weights(const FfiCall *call, i64 rank, i64 all, Product *p) {
  const FfiBuffer *q = call->args.size > 1 ? call->args.items[1] : NULL, *scale = buffer(&call->args, 2, FFI_F32, rank);
  const int has_off = call->args.size >= all, kind = q && q->rank == rank ? kind_of(call, q) : -1;
  const FfiBuffer *zero = has_off ? buffer(&call->args, 3, FFI_S8, rank) : NULL;
  const FfiBuffer *shift = has_off ? buffer(&call->args, 3, FFI_F32, rank) : NULL;
  if (kind < 0 || !scale || (has_off && !zero && !shift)) return 0;
  const FfiBuffer *off = zero ? zero : shift;
  p->kind = kind, p->q = q->data, p->scale = scale->data;
  p->zero = zero ? zero->data : NULL, p->shift = shift ? shift->data : NULL;
  p->N = q->dims[rank - 2], p->K = q->dims[rank - 1] * (half_bytes(kind) ? 2 : 1), p->groups = scale->dims[rank - 1];
  const size_t before = (size_t)(rank - 1) * sizeof *q->dims;
  return fits_quantised(p) && !memcmp(scale->dims, q->dims, before) &&
         (!off || !memcmp(off->dims, scale->dims, before + sizeof *q->dims));
}

static FfiError *handle_quantised(const FfiCall *call, int fused) {
  FfiError *error;
  if (asks_metadata(call, &error)) return error;
  const FfiBuffer *x = buffer(&call->args, 0, FFI_F32, 2), *y = buffer(&call->rets, 0, FFI_F32, 2);
  const int level = level_of(call);
  Product p = {0};
  if (!x || !y || level < 0 || !read_weights(call, 2, 4, &p))
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: wrong arguments of a quantised product");
  p.M = x->dims[0], p.x = x->data;
  return run_product(call, x, y, p, level, fused);
}

EXPORT FfiError *jserve_quantised_product(FfiCall *call) { return handle_quantised(call, 0); }
EXPORT FfiError *jserve_quantised_gate_up(FfiCall *call) { return handle_quantised(call, 1); }

EXPORT FfiError *jserve_product(FfiCall *call) { return handle_product(call, 0); }
EXPORT FfiError *jserve_gate_up(FfiCall *call) { return handle_product(call, 1); }

static FfiError *handle_experts(const FfiCall *call, int fused, int quantised) {
  FfiError *error;
  if (asks_metadata(call, &error)) return error;
  const FfiBuffer *x = buffer(&call->args, 0, FFI_F32, 2), *w = call->args.size > 1 ? call->args.items[1] : NULL;
  const FfiBuffer *expert = w ? buffer(&call->args, call->args.size - 1, FFI_S32, 1) : NULL;
  const FfiBuffer *y = buffer(&call->rets, 0, FFI_F32, 2);
  const int level = level_of(call);
  Product of = {0};
  if (!quantised && (w = buffer(&call->args, 1, FFI_BF16, 3))) of.w = w->data, of.N = w->dims[1], of.K = w->dims[2];
  if (!x || !w || !expert || !y || level < 0 || (quantised && !read_weights(call, 3, 5, &of)))
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: wrong arguments of experts");
  const i64 each = fused ? 2 : 1;
  of.x = x->data;
  Experts e = {
      .of = of,
      .expert = expert->data,
      .y = y->data,
      .A = expert->dims[0],
      .R = x->dims[0],
      .E = w->dims[0] / each,
      .N = of.N,
      .fused = fused,
  };
  if (w->dims[0] % each || x->dims[1] != of.K || y->dims[0] != e.A || y->dims[1] != e.N || (e.R ? e.A % e.R : e.A))
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: shapes of experts do not match");
  if (!experts(level, &e, call))
    return failed(call, FFI_ERROR_FAILED_PRECONDITION, "jserve: no memory for experts");
  return NULL;
}

EXPORT FfiError *jserve_expert_product(FfiCall *call) { return handle_experts(call, 0, 0); }
EXPORT FfiError *jserve_expert_gate_up(FfiCall *call) { return handle_experts(call, 1, 0); }
EXPORT FfiError *jserve_quantised_expert_product(FfiCall *call) { return handle_experts(call, 0, 1); }
EXPORT FfiError *jserve_quantised_expert_gate_up(FfiCall *call) { return handle_experts(call, 1, 1); }

EXPORT FfiError *jserve_attention(FfiCall *call) {
  FfiError *error;
  if (asks_metadata(call, &error)) return error;
  i64 sinks = integer(call, "sinks"), window = integer(call, "window");
  const FfiScalar *scale = scalar(call, "scale", FFI_F32);
  const FfiBuffer *q = buffer(&call->args, 0, FFI_F32, 3), *k = buffer(&call->args, 1, FFI_U16, 4);
  const FfiBuffer *v = buffer(&call->args, 2, FFI_U16, 4), *table = buffer(&call->args, 3, FFI_S32, 2);
  const FfiBuffer *start = buffer(&call->args, 4, FFI_S32, 1), *count = buffer(&call->args, 5, FFI_S32, 1);
  const FfiBuffer *first = buffer(&call->args, 6, FFI_S32, 1), *far = buffer(&call->args, 7, FFI_F32, 3);
  const FfiBuffer *o = buffer(&call->rets, 0, FFI_F32, 3);
  int level = level_of(call);
  if (!q || !k || !v || !table || !start || !count || !first || !o || !scale || level < 0 || sinks < 0 || window < 0 ||
      (sinks > 0) != !!far)
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: wrong arguments of attention");
  Attention a = {
      .q = q->data,
      .far = far ? far->data : NULL,
      .k = k->data,
      .v = v->data,
      .table = table->data,
      .start = start->data,
      .count = count->data,
      .first = first->data,
      .o = o->data,
      .T = q->dims[0],
      .R = table->dims[0],
      .M = table->dims[1],
      .N = q->dims[1],
      .K = k->dims[1],
      .Z = k->dims[2],
      .H = q->dims[2],
      .window = window,
      .sinks = sinks,
  };
  memcpy(&a.scale, scale->value, sizeof a.scale);
  if (k->dims[3] != a.H || memcmp(k->dims, v->dims, 4 * sizeof *k->dims) || start->dims[0] != a.R ||
      count->dims[0] != a.R || first->dims[0] != a.R ||
      memcmp(q->dims, o->dims, 3 * sizeof *q->dims) || (far && memcmp(q->dims, far->dims, 3 * sizeof *q->dims)))
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: shapes of attention do not match");
  if (!attention(level, &a, call))
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: sizes that attention does not serve, or rows beyond their arrays");
  return NULL;
}

EXPORT FfiError *jserve_write_kv(FfiCall *call) {
  FfiError *error;
  if (asks_metadata(call, &error)) return error;
  Writes w = {0};
  const FfiBuffer *pool = NULL, *new = NULL;
  for (int i = 0; i < 2; i++) {
    pool = buffer(&call->args, i, FFI_U16, 4), new = buffer(&call->args, 2 + i, FFI_F32, 3);
    const FfiBuffer *same = buffer(&call->rets, i, FFI_U16, 4);
    if (!pool || !new || !same || same->data != pool->data || pool->dims[1] != new->dims[1] ||
        pool->dims[3] != new->dims[2])
      return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: wrong arguments of write_kv");
    w.pool[i] = pool->data, w.new[i] = new->data;
  }
  const FfiBuffer *page = buffer(&call->args, 4, FFI_S32, 1), *offset = buffer(&call->args, 5, FFI_S32, 1);
  const FfiBuffer *keys = buffer(&call->args, 0, FFI_U16, 4), *first = buffer(&call->args, 2, FFI_F32, 3);
  if (!page || !offset || page->dims[0] != new->dims[0] || offset->dims[0] != new->dims[0] ||
      memcmp(keys->dims, pool->dims, 4 * sizeof *pool->dims) || memcmp(first->dims, new->dims, 3 * sizeof *new->dims))
    return failed(call, FFI_ERROR_INVALID_ARGUMENT, "jserve: shapes of write_kv do not match");
  w.page = page->data, w.offset = offset->data;
  w.T = new->dims[0], w.P = pool->dims[0], w.K = pool->dims[1], w.Z = pool->dims[2], w.H = pool->dims[3];
  if (!write_all(&w, call)) return failed(call, FFI_ERROR_FAILED_PRECONDITION, "jserve: no memory to write KV");
  return NULL;
}

/* --- what Python asks directly --- */

EXPORT const char *jserve_source_hash(void) { return JSERVE_SOURCE_HASH; }

/* The number of the processor's level. */
EXPORT int jserve_level(void) { return best_level(); }

/* Products in the caller's thread, for tests; 0 where there is no memory, or sizes do not match. */
EXPORT int jserve_run_product(int level, const float *x, const bf16 *w, float *y, i64 M, i64 N, i64 K, int fused) {
  const Product p = {.w = w, .N = fused ? 2 * N : N, .K = K, .M = M, .x = x};
  return level >= 0 && level <= best_level() && product(level, p, y, fused, NULL);
}

/* ``kind``: by number; groups: of a row. */
EXPORT int jserve_run_quantised(int level, int kind, const float *x, const void *q, const float *scale, const int8_t *zero,
                                const float *shift, i64 groups, float *y, i64 M, i64 N, i64 K, int fused) {
  const Product p = {.N = fused ? 2 * N : N, .K = K, .M = M, .x = x, .kind = kind, .q = q, .scale = scale, .zero = zero,
                     .shift = shift, .groups = groups};
  return level >= 0 && level <= best_level() && kind > BF16 && kind < N_KINDS && fits_quantised(&p) &&
         product(level, p, y, fused, NULL);
}

static uint32_t drawn(uint32_t *state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }
static float drawn_float(uint32_t *state) { return (float)drawn(state) / (1 << 24) - 0.5f; }

/* Sizes of the products that a level is checked by. */
enum { CHECK_M = 19, CHECK_N = 21, CHECK_K = 96 };
static const int CHECK_ROWS[] = {1, 3, 8, 9, CHECK_M};

static int agree(const float *got, const float *want, int n) {
  for (int i = 0; i < n; i++)
    if (!(fabsf(got[i] - want[i]) < 1e-3f)) return 0;
  return 1;
}

static int check_wide(int level, const float *x, int fused, uint32_t *state) {
  enum { K = 75 };
  float want[CHECK_M * CHECK_N], got[CHECK_M * CHECK_N];
  bf16 w[2 * CHECK_N * K];
  for (int i = 0; i < 2 * CHECK_N * K; i++) w[i] = narrow(drawn_float(state));
  for (size_t r = 0; r < sizeof CHECK_ROWS / sizeof *CHECK_ROWS; r++) {
    const int M = CHECK_ROWS[r];
    if (!jserve_run_product(level, x, w, got, M, CHECK_N, K, fused)) return 0;
    if (!jserve_run_product(PLAIN, x, w, want, M, CHECK_N, K, fused) || !agree(got, want, M * CHECK_N)) return 0;
  }
  return 1;
}

/* Scales are powers of two and shifts a few of them, with which widening rounds nothing. */
static int check_quantised(int level, const float *x, int kind, int fused, uint32_t *state) {
  enum { MOST_GROUPS = CHECK_K / 16 };
  const int groups = kind == E2M1 ? MOST_GROUPS : half_bytes(kind) ? 3 : 1;
  float want[CHECK_M * CHECK_N], got[CHECK_M * CHECK_N], scale[2 * CHECK_N * MOST_GROUPS], shift[2 * CHECK_N * MOST_GROUPS];
  uint8_t q[2 * CHECK_N * CHECK_K];
  int8_t zero[2 * CHECK_N * MOST_GROUPS];
  for (int i = 0; i < 2 * CHECK_N * CHECK_K; i++) q[i] = (uint8_t)(drawn(state) & (kind == E4M3 ? 0xbf : 0xff));
  for (int i = 0; i < 2 * CHECK_N * MOST_GROUPS; i++) {
    scale[i] = ldexpf(1, -9 + (int)(drawn(state) & 1)), zero[i] = (int8_t)(drawn(state) % 15) - 7;
    shift[i] = scale[i] * (float)zero[i];
  }
  for (size_t r = 0; r < sizeof CHECK_ROWS / sizeof *CHECK_ROWS; r++) {
    const int M = CHECK_ROWS[r];
    const int8_t *zeros = kind == INT4 ? zero : NULL;
    const float *shifts = kind == UINT4 ? shift : NULL;
    if (!jserve_run_quantised(level, kind, x, q, scale, zeros, shifts, groups, got, M, CHECK_N, CHECK_K, fused)) return 0;
    if (!jserve_run_quantised(PLAIN, kind, x, q, scale, zeros, shifts, groups, want, M, CHECK_N, CHECK_K, fused)) return 0;
    if (!agree(got, want, M * CHECK_N)) return 0;
  }
  return 1;
}

/* One token a row that sees [low, end) of its row, as ``attention`` does. */
static void plain_attention(const Attention *a) {
  for (i64 t = 0; t < a->T; t++)
    for (i64 n = 0; n < a->N; n++) {
      const float *q = a->q + (t * a->N + n) * a->H;
      float *o = a->o + (t * a->N + n) * a->H, total = 0;
      const i64 end = a->start[t] + 1, low = a->window ? max64(end - a->window, 0) : 0;
      memset(o, 0, (size_t)a->H * sizeof *o);
      for (i64 pos = low; pos < end; pos++) {
        const i64 at = ((a->table[t * a->M + pos / a->Z] * a->K + n / (a->N / a->K)) * a->Z + pos % a->Z) * a->H;
        float score = 0;
        for (i64 h = 0; h < a->H; h++) score += q[h] * a->scale * widen(a->k[at + h]);
        const float weight = expf(score);
        total += weight;
        for (i64 h = 0; h < a->H; h++) o[h] += weight * widen(a->v[at + h]);
      }
      for (i64 h = 0; h < a->H; h++) o[h] /= total;
    }
}

/* Two rows on pages out of order, of which one ends within a page and one with it. */
static int check_attention(int level, i64 window, uint32_t *state) {
  enum { R = 2, M = 3, N = 4, K = 2, Z = 16, H = 32, P = 1 + R * M };
  static const int32_t table[R * M] = {5, 2, 6, 1, 4, 3}, start[R] = {36, 31}, count[R] = {1, 1}, first[R] = {0, 1};
  float q[R * N * H], want[R * N * H], got[R * N * H];
  bf16 k[P * K * Z * H], v[P * K * Z * H];
  for (int i = 0; i < R * N * H; i++) q[i] = widen(narrow(drawn_float(state)));
  for (int i = 0; i < P * K * Z * H; i++) k[i] = narrow(drawn_float(state)), v[i] = narrow(drawn_float(state));
  Attention a = {.q = q, .k = k, .v = v, .table = table, .start = start, .count = count, .first = first, .o = want, .T = R,
                 .R = R, .M = M, .N = N, .K = K, .Z = Z, .H = H, .window = window, .scale = 4};
  plain_attention(&a);
  a.o = got;
  return attention(level, &a, NULL) && agree(got, want, R * N * H);
}

/* Small products of a level, and decode attention where it has any, against plain C: 1 where they agree. */
EXPORT int jserve_self_check(int level) {
  float x[CHECK_M * CHECK_K];
  uint32_t state = 1;
  for (int i = 0; i < CHECK_M * CHECK_K; i++) x[i] = drawn_float(&state);
  memset(x + 2 * CHECK_K, 0, CHECK_K * sizeof *x);
  for (int fused = 0; fused < 2; fused++) {
    if (!check_wide(level, x, fused, &state)) return 0;
    for (int kind = INT8; kind < N_KINDS; kind++)
      if (!check_quantised(level, x, kind, fused, &state)) return 0;
  }
  for (i64 window = 0; level > PLAIN && window <= 20; window += 20)
    if (!check_attention(level, window, &state)) return 0;
  return 1;
}
