/* Attention by the tile registers of AMX, for kernels.c.
 *
 *   token   keys of sixteen positions are one operand as they lie, query heads of the kv head the other; their scores
 *           are transposed, become weights as without tiles, and are an operand as they lie with values paired by position.
 *   tile    keys likewise, sixteen tokens of a query head the other; weights of pairs of positions are an operand, with
 *           values transposed so that positions run along their rows, once for all query heads of the kv head. */

#if HAS_AMX
/* --- one token --- */

/* Queries of G heads as pairs of values whose lanes are heads. */
T_AMX static void amx_token_queries(Token *s, i64 G, i64 H) {
  for (i64 h = 0; h < H; h += 32) {
    __m512i v[16];
    for (i64 g = 0; g < 16; g++) v[g] = g < G ? load(s->q[g] + h) : _mm512_setzero_si512();
    turn16(v);
    for (i64 r = 0; r < 16; r++) _mm512_storeu_si512(s->pairs[h / 2 + r], v[r]);
  }
}

/* Scores of the positions of four blocks, keys of which are at ``k``. */
T_AMX INLINE void amx_token_scores(const Token *s, const bf16 *const *k, i64 H, float scores[4][BLOCK][16]) {
  const i64 ld = H * (i64)sizeof(bf16);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  COMPILER_BARRIER();
  for (i64 h = 0; h < H; h += 32) {
    _tile_loadd(3, s->pairs[h / 2], 64);
    _tile_loadd(0, k[0] + h, ld);
    _tile_dpbf16ps(4, 0, 3);
    _tile_loadd(1, k[1] + h, ld);
    _tile_dpbf16ps(5, 1, 3);
    _tile_loadd(2, k[2] + h, ld);
    _tile_dpbf16ps(6, 2, 3);
    _tile_loadd(0, k[3] + h, ld);
    _tile_dpbf16ps(7, 0, 3);
  }
  _tile_stored(4, scores[0], 64);
  _tile_stored(5, scores[1], 64);
  _tile_stored(6, scores[2], 64);
  _tile_stored(7, scores[3], 64);
  COMPILER_BARRIER();
}

/* Values of n positions, 64 of each or, where ``half``, 32, added to the sums of all query heads. */
T_AMX INLINE void amx_token_values(Token *s, const Attention *a, const int32_t *pages, i64 head, i64 from, i64 n, i64 to,
                                    i64 h, int half, int careful) {
  const i64 ld_o = MOST_HEAD * (i64)sizeof(float), ld_w = SPAN * (i64)sizeof(bf16), H = a->H, values = half ? 32 : 64;
  uint32_t v[16][64] __attribute__((aligned(64)));
  COMPILER_BARRIER();
  _tile_loadd(4, s->o[0] + h, ld_o);
  _tile_loadd(5, s->o[0] + h + 16, ld_o);
  if (!half) _tile_loadd(6, s->o[0] + h + 32, ld_o);
  if (!half) _tile_loadd(7, s->o[0] + h + 48, ld_o);
  for (i64 at = 0; at < n; at += 2 * BLOCK) {
    for (i64 b = 0; b < 2 * BLOCK; b += BLOCK) {
      const int there = at + b < n;
      const bf16 *row = a->v + place(a, pages, head, there ? from + at + b : from) + h;
      const bf16 *next = from + at + b + SPAN < to ? a->v + place(a, pages, head, from + at + b + SPAN) + h : row;
      for (int i = 0; i < BLOCK; i += 2, row += 2 * H, next += 2 * H)
        for (i64 c = 0; c < values; c += 32) {
          _mm_prefetch((const char *)(next + c), _MM_HINT_T1);
          _mm_prefetch((const char *)(next + H + c), _MM_HINT_T1);
          const Pairs both = paired(row + c, row + H + c, careful || !there);
          _mm512_store_si512(v[(b + i) / 2] + c, both.lo);
          _mm512_store_si512(v[(b + i) / 2] + c + 16, both.hi);
        }
    }
    COMPILER_BARRIER();
    _tile_loadd(0, s->weight[0] + at, ld_w);
    _tile_loadd(1, s->rest[0] + at, ld_w);
#define ADD(tile, c)                                                                                                   \
  _tile_loadd(2, v[0] + c, 256);                                                                                       \
  _tile_dpbf16ps(tile, 0, 2);                                                                                          \
  _tile_dpbf16ps(tile, 1, 2);
    ADD(4, 0)
    ADD(5, 16)
    if (!half) {
      ADD(6, 32)
      ADD(7, 48)
    }
#undef ADD
    COMPILER_BARRIER();
  }
  _tile_stored(4, s->o[0] + h, ld_o);
  _tile_stored(5, s->o[0] + h + 16, ld_o);
  if (!half) _tile_stored(6, s->o[0] + h + 32, ld_o);
  if (!half) _tile_stored(7, s->o[0] + h + 48, ld_o);
  COMPILER_BARRIER();
}

/* As token_span. */
T_AMX static void amx_token_span(Token *s, const Attention *a, const int32_t *pages, i64 head, i64 from, i64 to,
                                  int careful) {
  enum { BLOCKS = 4 * BLOCK };
  const i64 G = a->N / a->K, H = a->H;
  amx_token_queries(s, G, H);
  for (i64 first = from / BLOCK * BLOCK; first < to; first += SPAN) {
    const i64 n = min64(SPAN, up_to(to - first, BLOCK));
    begin_tiles(TILE_ROWS);
    for (i64 at = 0; at < n; at += BLOCKS) {
      const bf16 *k[4];
      float scores[4][BLOCK][16] __attribute__((aligned(64)));
      for (int b = 0; b < 4; b++) {
        const i64 here = place(a, pages, head, first + min64(at + b * BLOCK, n - BLOCK)), next = first + at + BLOCKS + b * BLOCK;
        k[b] = a->k + here;
        if (first > from) continue; /* the span before fetched these */
        fetch_values(a->v + here, BLOCK * H);
        if (next < min64(to, first + SPAN)) fetch_keys(a->k + place(a, pages, head, next), BLOCK * H);
      }
      amx_token_scores(s, k, H, scores);
      for (i64 b = 0; b < 4 && at + b * BLOCK < n; b++) {
        const i64 pos = first + at + b * BLOCK, low = max64(from - pos, 0), high = min64(to - pos, BLOCK);
        if (pos + SPAN < to) fetch_values(a->k + place(a, pages, head, pos + SPAN), BLOCK * H);
        const __mmask16 seen = (__mmask16)((0xffffu >> (BLOCK - high)) & (0xffffu << low));
        __m512i v[16];
        for (int i = 0; i < BLOCK; i++) v[i] = _mm512_load_si512(scores[b][i]);
        turn16(v);
        for (i64 g = 0; g < G; g++) {
          s->bad[g] |= _mm512_mask_fpclass_ps_mask(seen, (__m512)v[g], 0x99); /* NaN or infinite */
          _mm512_storeu_ps(s->score[g] + at + b * BLOCK, _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, (__m512)v[g]));
        }
      }
    }
    for (i64 g = 0; g < G; g++) {
      token_weights(s, g, H, n);
      if (n % (2 * BLOCK)) memset(s->weight[g] + n, 0, BLOCK * sizeof(bf16)), memset(s->rest[g] + n, 0, BLOCK * sizeof(bf16));
    }
    begin_tiles(G);
    i64 h = 0;
    for (; h + 64 <= H; h += 64) amx_token_values(s, a, pages, head, first, n, to, h, 0, careful);
    if (h < H) amx_token_values(s, a, pages, head, first, n, to, h, 1, careful);
  }
}

/* --- a tile of tokens --- */

enum { AMX_HEADS = 4, AMX_STEP = 128 };

typedef struct {
  TileHead heads[AMX_HEADS];
  float score[AMX_STEP][TILE];
  uint32_t weight[AMX_STEP / 2][TILE];
  bf16 v[MOST_HEAD / 16][AMX_STEP / 32][16][32]; /* [16 values][32 positions] */
} AmxTile;

/* Values of the positions from ``at`` on, up to 32 of ``n``, transposed. */
T_AMX INLINE void amx_transposed_values(AmxTile *s, const Attention *a, const int32_t *pages, i64 head, i64 first, i64 at, i64 n) {
  for (i64 h = 0; h < a->H; h += 16) {
    __m512i v[16];
    for (i64 i = 0; i < 16; i++) {
      v[i] = _mm512_setzero_si512();
      if (at + 2 * i >= n) continue;
      const i64 pos = first + at + 2 * i;
      const bf16 *row = a->v + place(a, pages, head, pos / BLOCK * BLOCK) + pos % BLOCK * a->H + h;
      const __m512i one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)row));
      const __m512i two = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(row + a->H)));
      v[i] = finite_or_zero(_mm512_or_si512(one, _mm512_slli_epi32(two, 16)));
    }
    turn16(v);
    for (i64 i = 0; i < 16; i++) _mm512_storeu_si512(s->v[h / 16][at / 32][i], v[i]);
  }
}

/* Scores of ``n`` positions, a multiple of sixteen, from ``first`` on. */
T_AMX INLINE void amx_tile_scores(const TileHead *s, const Attention *a, const int32_t *pages, i64 head, i64 first, i64 n,
                             float (*scores)[TILE], int two) {
  const i64 H = a->H, ld = H * (i64)sizeof(bf16), ld_s = TILE * 4;
  COMPILER_BARRIER();
  for (i64 at = 0; at < n; at += 2 * BLOCK) {
    const int more = at + BLOCK < n;
    const bf16 *k = a->k + place(a, pages, head, first + at);
    const bf16 *l = more ? a->k + place(a, pages, head, first + at + BLOCK) : k;
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (i64 h = 0; h < H; h += 32) {
      _tile_loadd(0, k + h, ld);
      _tile_loadd(2, s->q[h / 2], ld_s);
      _tile_dpbf16ps(4, 0, 2);
      _tile_loadd(1, l + h, ld);
      _tile_dpbf16ps(5, 1, 2);
      if (two) {
        _tile_loadd(3, s->q[h / 2] + 16, ld_s);
        _tile_dpbf16ps(6, 0, 3);
        _tile_dpbf16ps(7, 1, 3);
      }
    }
    _tile_stored(4, scores[at], ld_s);
    if (two) _tile_stored(6, scores[at] + 16, ld_s);
    if (more) _tile_stored(5, scores[at + BLOCK], ld_s);
    if (more && two) _tile_stored(7, scores[at + BLOCK] + 16, ld_s);
  }
  COMPILER_BARRIER();
}

/* Values of ``n`` positions, a multiple of 32, times their weights, added to those of a head. */
T_AMX INLINE void amx_tile_values(TileHead *s, const AmxTile *t, i64 H, i64 n, int two) {
  const i64 ld = TILE * 4;
  COMPILER_BARRIER();
  for (i64 h = 0; h < H; h += 32) {
    _tile_loadd(4, s->o[h], ld);
    _tile_loadd(5, s->o[h + 16], ld);
    if (two) _tile_loadd(6, s->o[h] + 16, ld);
    if (two) _tile_loadd(7, s->o[h + 16] + 16, ld);
    for (i64 at = 0; at < n; at += 32) {
      _tile_loadd(0, t->v[h / 16][at / 32], 64);
      _tile_loadd(2, t->weight[at / 2], ld);
      _tile_dpbf16ps(4, 0, 2);
      _tile_loadd(1, t->v[h / 16 + 1][at / 32], 64);
      _tile_dpbf16ps(5, 1, 2);
      if (two) {
        _tile_loadd(3, t->weight[at / 2] + 16, ld);
        _tile_dpbf16ps(6, 0, 3);
        _tile_dpbf16ps(7, 1, 3);
      }
    }
    _tile_stored(4, s->o[h], ld);
    _tile_stored(5, s->o[h + 16], ld);
    if (two) _tile_stored(6, s->o[h] + 16, ld);
    if (two) _tile_stored(7, s->o[h + 16] + 16, ld);
  }
  COMPILER_BARRIER();
}

/* As tile_span, of ``n_heads``. */
T_AMX INLINE void amx_tile_span(AmxTile *s, const Attention *a, const int32_t *pages, i64 head, i64 from, i64 to,
                             const int32_t *low, const int32_t *high, i64 n_tokens, i64 n_heads, int two) {
  const i64 H = a->H, least = high[0], most = low[n_tokens - 1]; /* all tokens, which are in order, see [most, least) */
  for (i64 first = from / BLOCK * BLOCK; first < to; first += AMX_STEP) {
    const i64 n = min64(AMX_STEP, up_to(to - first, BLOCK)), whole = first >= most && first + n <= least;
    for (i64 at = 0; at < n; at += 32) amx_transposed_values(s, a, pages, head, first, at, n);
    for (i64 g = 0; g < n_heads; g++) {
      amx_tile_scores(&s->heads[g], a, pages, head, first, n, s->score, two);
      for (i64 lane = 0; lane < (two ? 32 : 16); lane += 16) {
        const __m512i lows = _mm512_loadu_si512(low + lane), highs = _mm512_loadu_si512(high + lane);
        if (whole)
          tile_weights(&s->heads[g], s->score, s->weight, lane, first, n, H, lows, highs, 1);
        else
          tile_weights(&s->heads[g], s->score, s->weight, lane, first, n, H, lows, highs, 0);
      }
      for (i64 i = n / 2; i < up_to(n, 32) / 2; i++) memset(s->weight[i], 0, sizeof s->weight[i]);
      amx_tile_values(&s->heads[g], s, H, up_to(n, 32), two);
    }
  }
}

T_AMX INLINE void amx_tile_attention(const Attention *a, const Item *item, i64 head, int two) {
  const i64 G = a->N / a->K, H = a->H, ld = a->N * H, end = item->start + item->n;
  const int32_t *pages = a->table + item->row * a->M;
  Visible visible;
  AmxTile s __attribute__((aligned(64)));
  tile_visible(&visible, a, item);
  for (i64 first = 0; first < G; first += AMX_HEADS) {
    const i64 n_heads = min64(AMX_HEADS, G - first), at = (item->token * a->N + head * G + first) * H;
    for (i64 g = 0; g < n_heads; g++) {
      tile_begin(&s.heads[g], H);
      if (a->far) tile_queries(s.heads[g].q, a->far + at + g * H, ld, item->n, H, a->scale);
    }
    if (a->far)
      amx_tile_span(&s, a, pages, head, 0, visible.behind[item->n - 1], visible.none, visible.behind, item->n, n_heads, two);
    for (i64 g = 0; g < n_heads; g++) tile_queries(s.heads[g].q, a->q + at + g * H, ld, item->n, H, a->scale);
    amx_tile_span(&s, a, pages, head, visible.low[0], end, visible.low, visible.high, item->n, n_heads, two);
    for (i64 g = 0; g < n_heads; g++) tile_results(&s.heads[g], a->o + at + g * H, ld, item->n, H, 1);
  }
}

T_AMX static void amx_attention_chunk(const Job *job, i64 number, int seat) {
  (void)seat;
  const Attention *a = job->work;
  const Item *item = a->items + number % a->n_items;
  const i64 head = number / a->n_items;
  begin_tiles(TILE_ROWS);
  if (item->n <= FEW_TOKENS)
    token_attention(a, item, head, amx_token_span);
  else if (item->n > 16)
    amx_tile_attention(a, item, head, 1);
  else
    amx_tile_attention(a, item, head, 0);
  _tile_release();
}
#endif
