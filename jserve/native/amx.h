/* Products of more live rows than few_rows says by the tile registers of AMX, for kernels.c.
 *
 * A tile of weights is 16 rows by 64 bytes; a tile of x is 16 groups of values, of 4 bytes each, by 16 rows, which is how
 * bf16_pack_lanes and vnni_pack leave them; their product is added to a tile of 16 weight rows by 16 rows of x: float32 of
 * bfloat16, int32 of int8 that x is rounded to. Two of the one meet two of the other, so that of eight tiles four are sums.
 *
 * A chunk of weights is taken 32 rows at a time. Where these meet no more than two tiles of x, they are read where they lie.
 * Else AMX_BYTES of them at a time are copied tile by tile to where the first-level cache has room for them (it has not
 * for rows that are powers of two apart) and meet up to AMX_X_ROWS rows of x. The sums of all of the chunk wait in the thread's
 * room, and are transposed and written when they are complete, line after line of a row of y. */

enum { TILE_BYTES = 64, AMX_BYTES = 1024 };

typedef char WeightTiles[AMX_BYTES / TILE_BYTES][2][TILE_ROWS][TILE_BYTES];
typedef float Sums[2][2][TILE_ROWS][16]; /* [tile of weights][tile of x][weight row][row of x]; of int8: int32 */

#if HAS_AMX
#define T_AMX __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,amx-int8")))

/* The eight tiles of this thread, whole but for ``rows`` rows of the first two and of the last four; to be released before
 * others use the thread. */
T_AMX static void begin_tiles(i64 rows) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = i == 2 || i == 3 ? TILE_ROWS : (uint8_t)rows;
  /* To gcc the instruction reads 8 bytes: without this it leaves out stores of the others, and what lies there faults. */
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

/* The compiler does not know that tile loads read what was stored, and loads what tiles stored: neither crosses this. */
#define COMPILER_BARRIER() __asm__ volatile("" ::: "memory")

/* ``n`` bytes of a tile's weight rows, of which there are ``rows``. */
T_AMX INLINE void copy_tile(char (*to)[TILE_BYTES], const char *w, i64 apart, i64 rows, i64 n) {
  const __mmask64 there = n >= TILE_BYTES ? ~0ull : (1ull << n) - 1;
  for (i64 r = 0; r < TILE_ROWS; r++)
    _mm512_store_si512(to[r], r < rows ? _mm512_maskz_loadu_epi8(there, w + r * apart) : _mm512_setzero_si512());
}

/* Weights to fetch at each of the steps that are multiplied: ``n`` lines from ``a`` and from ``b`` on. */
typedef struct {
  const char *a, *b;
  i64 n, apart, step;
} Prefetch;

/* Where two tiles of weights lie: bytes from row to row, and to the next tiles. */
typedef struct {
  const char *a, *b;
  i64 apart, step;
} TilePair;

/* Weights times 16 or, with ``two``, 32 rows of x, which lie ``apart``, added to ``sums`` or, if ``first``, put there;
 * ``int8``: of int8 weights, else bfloat16. */
T_AMX INLINE void add_tiles(TilePair w, const uint32_t *x, i64 apart, i64 n_tiles, Sums sums, Prefetch next, int first, int two,
                            int int8) {
#define ADD(sum, w, x)                                                                                                 \
  if (int8)                                                                                                           \
    _tile_dpbssd(sum, w, x);                                                                                           \
  else                                                                                                                 \
    _tile_dpbf16ps(sum, w, x);
  COMPILER_BARRIER();
  if (first) {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
  } else {
    _tile_loadd(4, sums[0][0], 64);
    _tile_loadd(5, sums[1][0], 64);
    if (two) _tile_loadd(6, sums[0][1], 64);
    if (two) _tile_loadd(7, sums[1][1], 64);
  }
  for (i64 i = 0; i < n_tiles; i++, x += 256) {
    for (i64 r = 0; r < next.n; r++) {
      _mm_prefetch(next.a + i * next.step + r * next.apart, _MM_HINT_T1);
      _mm_prefetch(next.b + i * next.step + r * next.apart, _MM_HINT_T1);
    }
    _tile_loadd(0, w.a + i * w.step, w.apart);
    _tile_loadd(2, x, 64);
    ADD(4, 0, 2)
    _tile_loadd(1, w.b + i * w.step, w.apart);
    ADD(5, 1, 2)
    if (two) {
      _tile_loadd(3, x + apart, 64);
      ADD(6, 0, 3)
      ADD(7, 1, 3)
    }
  }
#undef ADD
  _tile_stored(4, sums[0][0], 64);
  _tile_stored(5, sums[1][0], 64);
  if (two) _tile_stored(6, sums[0][1], 64);
  if (two) _tile_stored(7, sums[1][1], 64);
  COMPILER_BARRIER();
}

/* A tile of sums to columns n .. n+columns-1 of rows i .. i+rows-1, as far as a tile has them. */
T_AMX INLINE void put_tile(const float (*s)[16], Target t, i64 i, i64 rows, i64 n, i64 columns) {
  const __mmask16 there = (__mmask16)(columns >= 16 ? 0xffff : (1u << columns) - 1);
  __m512i v[16];
  for (int j = 0; j < 16; j++) v[j] = _mm512_loadu_si512(s[j]);
  turn16(v);
  for (i64 j = 0; j < min64(16, rows); j++) _mm512_mask_storeu_ps(at(t, i + j) + n, there, (__m512)v[j]);
}

/* Sums of int8 become results: times the scale of a row of x, then of the weight row. */
T_AMX INLINE void scale_tile(const Product *p, float (*s)[16], i64 i, i64 n) {
  float scales[16] = {0};
  for (i64 j = 0; j < min64(16, p->L - i); j++) scales[j] = p->rounded[i + j].scale;
  const __m512 of_x = _mm512_loadu_ps(scales);
  for (i64 r = 0; r < min64(TILE_ROWS, p->N - n); r++) {
    const __m512 sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(s[r]));
    _mm512_storeu_ps(s[r], _mm512_mul_ps(_mm512_mul_ps(sums, of_x), _mm512_set1_ps(p->scale[n + r])));
  }
}

/* Columns n0 .. n1-1 of results. ``gated``: of gate_up, where weight row n of the gate is met by that of up, ``p->N / 2``
 * rows behind it, else by the one sixteen rows behind. */
T_AMX INLINE void amx_product(const Product *p, i64 n0, i64 n1, Target t, int gated, int int8) {
  const char *const weights = int8 ? (const char *)p->q : (const char *)p->w;
  const i64 row_bytes = p->K * (int8 ? 1 : (i64)sizeof(bf16)), apart = up_to(row_bytes, TILE_BYTES) * 4; /* of x */
  const i64 second = gated ? p->N / 2 : TILE_ROWS, step = gated ? TILE_ROWS : 2 * TILE_ROWS;
  const i64 n_blocks = (n1 - n0 + step - 1) / step;
  WeightTiles copy __attribute__((aligned(64)));
  Sums *const sums = p->sums;
  begin_tiles(TILE_ROWS);
  for (i64 i0 = 0; i0 < p->L; i0 += AMX_X_ROWS) {
    const i64 L = min64(AMX_X_ROWS, p->L - i0), n_x = (L + 31) / 32;
    const int in_place = n_x == 1 && row_bytes % TILE_BYTES == 0 && (n1 - n0) % step == 0;
    const i64 at_once = in_place ? row_bytes : AMX_BYTES;
    for (i64 k0 = 0; k0 < row_bytes; k0 += at_once) {
      const i64 n_bytes = min64(row_bytes - k0, at_once), n_tiles = (n_bytes + TILE_BYTES - 1) / TILE_BYTES;
      for (i64 block = 0; block < n_blocks; block++) {
        const i64 n = n0 + block * step, last = block + 1 == n_blocks, end = last && k0 + n_bytes == row_bytes;
        const i64 next_n = end ? p->then : last ? n0 : n + step, next_k = end ? 0 : last ? k0 + n_bytes : k0;
        const char *from = weights + n * row_bytes + k0, *ahead = weights + min64(next_n, p->N - 1) * row_bytes + next_k;
        TilePair w = {from, from + second * row_bytes, row_bytes, TILE_BYTES};
        Prefetch next = {ahead, ahead + second * row_bytes, TILE_ROWS, TILE_BYTES, TILE_ROWS * TILE_BYTES};
        if (!in_place) {
          for (i64 i = 0, k = 0; i < n_tiles; i++, k += TILE_BYTES) {
            copy_tile(copy[i][0], w.a + k, row_bytes, n1 - n, n_bytes - k);
            copy_tile(copy[i][1], w.b + k, row_bytes, n1 - n - (gated ? 0 : TILE_ROWS), n_bytes - k);
          }
          w = (TilePair){copy[0][0][0], copy[0][1][0], TILE_BYTES, sizeof copy[0]};
          next = (Prefetch){ahead, ahead + second * row_bytes, up_to(TILE_ROWS, n_x) / n_x, row_bytes, TILE_BYTES};
        }
        if (i0 || p->next_chunk) next.n = 0;
        for (i64 i = 0; i < n_x; i++) {
          const uint32_t *x = (const uint32_t *)p->packed + (i0 / 16 + 2 * i) * apart + k0 * 4;
          if (L - 32 * i > 16)
            add_tiles(w, x, apart, n_tiles, sums[i * n_blocks + block], next, k0 == 0, 1, int8);
          else
            add_tiles(w, x, apart, n_tiles, sums[i * n_blocks + block], next, k0 == 0, 0, int8);
          next.a += next.n * next.apart, next.b += next.n * next.apart;
        }
      }
    }
    for (i64 i = 0; i < L; i += 16)
      for (i64 block = 0; block < n_blocks; block++) {
        float (*s)[2][TILE_ROWS][16] = sums[i / 32 * n_blocks + block];
        const i64 b = i / 16 % 2, n = block * step;
        if (int8) {
          scale_tile(p, s[0][b], i0 + i, n0 + n);
          scale_tile(p, s[1][b], i0 + i, n0 + n + second);
        }
        if (gated)
          avx512f_silu(s[0][b][0], s[1][b][0], s[0][b][0], TILE_ROWS * 16);
        else
          put_tile(s[1][b], t, i0 + i, L - i, n + TILE_ROWS, max64(n1 - n0 - n - TILE_ROWS, 0));
        put_tile(s[0][b], t, i0 + i, L - i, n, n1 - n0 - n);
      }
  }
  _tile_release();
}

T_AMX static void amx_rows(const Product *p, i64 n0, i64 n1, Target t) {
  if (p->kind == ROUNDED)
    amx_product(p, n0, n1, t, 0, 1);
  else
    amx_product(p, n0, n1, t, 0, 0);
}
T_AMX static void amx_gated(const Product *p, i64 n0, i64 n1, Target t) {
  if (p->kind == ROUNDED)
    amx_product(p, n0, n1, t, 1, 1);
  else
    amx_product(p, n0, n1, t, 1, 0);
}
#endif
