/* Products of more than FEW live rows by the tile registers of AMX, for kernels.c.
 *
 * A tile of weights is 16 rows by 32 values; a tile of x is 16 pairs of values by 16 rows, which is how bf16_pack_lanes
 * leaves them; their product is added to a tile of 16 weight rows by 16 rows of x. Two of the one meet two of the other, so
 * that of eight tiles four are sums.
 *
 * A chunk of weights is taken 32 rows at a time. Where these meet no more than two tiles of x, they are read where they lie.
 * Else TILED_VALUES of them at a time are copied tile by tile to where the first-level cache has room for them (it has not
 * for rows that are powers of two apart) and meet up to TILED_X rows of x. The sums of all of the chunk wait in the thread's
 * room, and are turned and written when they are complete, line after line of a row of y. */

enum { TILE_ROWS = 16, TILE_VALUES = 32, TILED_VALUES = 512, TILED_X = 256 };

typedef bf16 WeightTiles[TILED_VALUES / TILE_VALUES][2][TILE_ROWS][TILE_VALUES];
typedef float Sums[2][2][TILE_ROWS][16]; /* [tile of weights][tile of x][weight row][row of x] */

/* Of the sums of a chunk of ``rows`` weight rows and L of x. */
static i64 tiled_bytes(i64 rows, i64 L) {
  return up_to(rows, 2 * TILE_ROWS) * up_to(min64(L, TILED_X), 32) * (i64)sizeof(float);
}

#if AMX
#define T_AMX __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")))

/* The eight tiles of this thread, whole but for ``rows`` rows of the first two and of the last four; to be released before
 * others use the thread. */
T_AMX static void begin_tiles(i64 rows) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = i == 2 || i == 3 ? TILE_ROWS : (uint8_t)rows;
  _tile_loadconfig(&config);
}

/* Stores before this are seen by tile loads after it, and stores of tiles by loads: the compiler knows nothing of them. */
#define STORED() __asm__ volatile("" ::: "memory")

/* ``n`` values of a tile's weight rows, of which there are ``rows``. */
T_AMX INLINE void copy_tile(bf16 (*to)[TILE_VALUES], const bf16 *w, i64 K, i64 rows, i64 n) {
  if (rows >= TILE_ROWS && n >= TILE_VALUES)
    for (i64 r = 0; r < TILE_ROWS; r++) _mm512_store_si512(to[r], load(w + r * K));
  else
    for (i64 r = 0; r < TILE_ROWS; r++)
      _mm512_store_si512(to[r], r < rows ? load_n(w + r * K, n) : _mm512_setzero_si512());
}

/* Weights to fetch at each of the steps that are multiplied: ``n`` lines from ``a`` and from ``b`` on. */
typedef struct {
  const bf16 *a, *b;
  i64 n, apart, step;
} Next;

/* Where two tiles of weights lie: ``apart`` from row to row, ``step`` to the next 32 values. */
typedef struct {
  const bf16 *a, *b;
  i64 apart, step;
} Pair;

/* Weights times 16 or, with ``two``, 32 rows of x, which lie ``apart``, added to ``sums`` or, if ``first``, put there. */
T_AMX INLINE void add_tiles(Pair w, const uint32_t *x, i64 apart, i64 n_tiles, Sums sums, Next next, int first, int two) {
  STORED();
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
  const i64 ld = w.apart * (i64)sizeof(bf16);
  for (i64 i = 0; i < n_tiles; i++, x += 256) {
    for (i64 r = 0; r < next.n; r++) {
      _mm_prefetch((const char *)(next.a + i * next.step + r * next.apart), _MM_HINT_T1);
      _mm_prefetch((const char *)(next.b + i * next.step + r * next.apart), _MM_HINT_T1);
    }
    _tile_loadd(0, w.a + i * w.step, ld);
    _tile_loadd(2, x, 64);
    _tile_dpbf16ps(4, 0, 2);
    _tile_loadd(1, w.b + i * w.step, ld);
    _tile_dpbf16ps(5, 1, 2);
    if (two) {
      _tile_loadd(3, x + apart, 64);
      _tile_dpbf16ps(6, 0, 3);
      _tile_dpbf16ps(7, 1, 3);
    }
  }
  _tile_stored(4, sums[0][0], 64);
  _tile_stored(5, sums[1][0], 64);
  if (two) _tile_stored(6, sums[0][1], 64);
  if (two) _tile_stored(7, sums[1][1], 64);
  STORED();
}

/* A tile of sums to columns n .. n+columns-1 of rows i .. i+rows-1, as far as a tile has them. */
T_AMX INLINE void put_tile(const float (*s)[16], Target t, i64 i, i64 rows, i64 n, i64 columns) {
  const __mmask16 there = (__mmask16)(columns >= 16 ? 0xffff : (1u << columns) - 1);
  __m512i v[16];
  for (int j = 0; j < 16; j++) v[j] = _mm512_loadu_si512(s[j]);
  turn16(v);
  for (i64 j = 0; j < min64(16, rows); j++) _mm512_mask_storeu_ps(at(t, i + j) + n, there, (__m512)v[j]);
}

/* Columns n0 .. n1-1 of results. ``gated``: of gate_up, where weight row n of the gate is met by that of up, ``p->N / 2``
 * rows behind it, else by the one sixteen rows behind. */
T_AMX INLINE void tiled(const Product *p, i64 n0, i64 n1, Target t, int gated) {
  const i64 K = p->K, apart = up_to(K, TILE_VALUES) * 8; /* pairs of sixteen rows of x */
  const i64 second = gated ? p->N / 2 : TILE_ROWS, step = gated ? TILE_ROWS : 2 * TILE_ROWS;
  const i64 n_blocks = (n1 - n0 + step - 1) / step;
  WeightTiles copy __attribute__((aligned(64)));
  Sums *const sums = p->sums;
  begin_tiles(TILE_ROWS);
  for (i64 i0 = 0; i0 < p->L; i0 += TILED_X) {
    const i64 L = min64(TILED_X, p->L - i0), n_x = (L + 31) / 32;
    const int in_place = n_x == 1 && K % TILE_VALUES == 0 && (n1 - n0) % step == 0;
    const i64 at_once = in_place ? K : TILED_VALUES;
    for (i64 k0 = 0; k0 < K; k0 += at_once) {
      const i64 values = min64(K - k0, at_once), n_tiles = (values + TILE_VALUES - 1) / TILE_VALUES;
      for (i64 block = 0; block < n_blocks; block++) {
        const i64 n = n0 + block * step, last = block + 1 == n_blocks, end = last && k0 + values == K;
        const i64 next_n = end ? p->then : last ? n0 : n + step, next_k = end ? 0 : last ? k0 + values : k0;
        const bf16 *from = p->w + n * K + k0, *ahead = p->w + min64(next_n, p->N - 1) * K + next_k;
        Pair w = {from, from + second * K, K, TILE_VALUES};
        Next next = {ahead, ahead + second * K, TILE_ROWS, TILE_VALUES, TILE_ROWS * TILE_VALUES};
        if (!in_place) {
          for (i64 i = 0; i < n_tiles; i++) {
            const i64 k = i * TILE_VALUES;
            copy_tile(copy[i][0], w.a + k, K, n1 - n, values - k);
            copy_tile(copy[i][1], w.b + k, K, n1 - n - (gated ? 0 : TILE_ROWS), values - k);
          }
          w = (Pair){copy[0][0][0], copy[0][1][0], TILE_VALUES, 2 * TILE_ROWS * TILE_VALUES};
          next = (Next){ahead, ahead + second * K, up_to(TILE_ROWS, n_x) / n_x, K, TILE_VALUES};
        }
        if (i0 || p->next_chunk) next.n = 0;
        for (i64 i = 0; i < n_x; i++) {
          const uint32_t *x = (const uint32_t *)p->packed + (i0 / 16 + 2 * i) * apart + k0 * 8;
          if (L - 32 * i > 16)
            add_tiles(w, x, apart, n_tiles, sums[i * n_blocks + block], next, k0 == 0, 1);
          else
            add_tiles(w, x, apart, n_tiles, sums[i * n_blocks + block], next, k0 == 0, 0);
          next.a += next.n * next.apart, next.b += next.n * next.apart;
        }
      }
    }
    for (i64 i = 0; i < L; i += 16)
      for (i64 block = 0; block < n_blocks; block++) {
        float (*s)[2][TILE_ROWS][16] = sums[i / 32 * n_blocks + block];
        const i64 b = i / 16 % 2, n = block * step;
        if (gated)
          avx512f_silu(s[0][b][0], s[1][b][0], s[0][b][0], TILE_ROWS * 16);
        else
          put_tile(s[1][b], t, i0 + i, L - i, n + TILE_ROWS, max64(n1 - n0 - n - TILE_ROWS, 0));
        put_tile(s[0][b], t, i0 + i, L - i, n, n1 - n0 - n);
      }
  }
  _tile_release();
}

T_AMX static void amx_rows(const Product *p, i64 n0, i64 n1, Target t) { tiled(p, n0, n1, t, 0); }
T_AMX static void amx_gated(const Product *p, i64 n0, i64 n1, Target t) { tiled(p, n0, n1, t, 1); }
#endif
