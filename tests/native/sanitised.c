/* Every kernel over heap arrays of exactly their size, by threads of a pool, two callers at once: a program to be
 * compiled with a sanitiser, which ends it at the first read or write beyond an array, race or undefined operation.
 * Built and run by test_sanitised.py; the pool stands for XLA's. */
#define JSERVE_SOURCE_HASH "sanitised"
#include "kernels.c"

enum { HELPERS = 3, MOST_TASKS = 256 };

/* --- a pool --- */

typedef struct {
  void (*run)(void *);
  void *data;
} Task;

static struct {
  pthread_mutex_t lock;
  pthread_cond_t some;
  Task tasks[MOST_TASKS];
  int first, n, ended;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, {{0}}, 0, 0, 0};

static void *helper(void *unused) {
  (void)unused;
  for (;;) {
    pthread_mutex_lock(&pool.lock);
    while (!pool.n && !pool.ended) pthread_cond_wait(&pool.some, &pool.lock);
    if (!pool.n) {
      pthread_mutex_unlock(&pool.lock);
      return NULL;
    }
    Task task = pool.tasks[pool.first];
    pool.first = (pool.first + 1) % MOST_TASKS, pool.n--;
    pthread_mutex_unlock(&pool.lock);
    task.run(task.data);
  }
}

static FfiError *schedule(FfiSchedule *args) {
  pthread_mutex_lock(&pool.lock);
  if (pool.n == MOST_TASKS) abort();
  pool.tasks[(pool.first + pool.n++) % MOST_TASKS] = (Task){args->task, args->data};
  pthread_cond_signal(&pool.some);
  pthread_mutex_unlock(&pool.lock);
  return NULL;
}

static FfiError *num_threads(FfiNumThreads *args) {
  *args->num_threads = HELPERS + 1;
  return NULL;
}

static const FfiApi API = {.schedule = schedule, .num_threads = num_threads};
static const FfiCall CALL = {.api = &API};

/* --- arrays --- */

static void *bytes(i64 n, uint32_t *state) {
  uint8_t *made = malloc((size_t)max64(n, 1));
  for (i64 i = 0; i < n; i++) made[i] = (uint8_t)drawn(state);
  return made;
}

static float *floats(i64 n, uint32_t *state) {
  float *made = malloc((size_t)max64(n, 1) * sizeof *made);
  for (i64 i = 0; i < n; i++) made[i] = drawn_float(state);
  return made;
}

static bf16 *bf16s(i64 n, uint32_t *state) {
  bf16 *made = malloc((size_t)max64(n, 1) * sizeof *made);
  for (i64 i = 0; i < n; i++) made[i] = narrow(drawn_float(state));
  return made;
}

/* --- kernels --- */

/* Weights with groups, where they fit, and zeros, shifts or neither. */
static Product quantised(int kind, i64 N, i64 K, uint32_t *state) {
  const i64 G = kind == E2M1 ? 16 : half_bytes(kind) || drawn(state) % 2 ? 32 : K;
  const i64 groups = kind == ROUNDED || K % G ? 1 : K / G;
  const uint32_t off = kind == ROUNDED ? 0 : drawn(state) % 3;
  return (Product){
      .N = N,
      .K = K,
      .kind = kind,
      .q = bytes(N * K / (half_bytes(kind) ? 2 : 1), state),
      .scale = floats(N * groups, state),
      .zero = off == 1 ? bytes(N * groups, state) : NULL,
      .shift = off == 2 ? floats(N * groups, state) : NULL,
      .groups = groups,
  };
}

static void put_away(Product p) { free((void *)p.q), free((void *)p.scale), free((void *)p.zero), free((void *)p.shift); }

static void products(int level, i64 M, i64 N, i64 K, uint32_t *state) {
  float *x = floats(M * K, state), *y = malloc((size_t)(M * N) * sizeof *y);
  if (M > 2) memset(x + K, 0, (size_t)K * sizeof *x); /* a row that nobody reads */
  for (int fused = 0; fused < 2; fused++) {
    const i64 rows = fused ? 2 * N : N;
    bf16 *w = bf16s(rows * K, state);
    if (!product(level, (Product){.w = w, .N = rows, .K = K, .M = M, .x = x}, y, fused, &CALL)) abort();
    for (int kind = BF16 + 1; kind < N_KINDS; kind++) {
      Product p = quantised(kind, rows, K, state);
      p.M = M, p.x = x;
      if (fits_quantised(&p) && !product(level, p, y, fused, &CALL)) abort();
      put_away(p);
    }
    free(w);
  }
  free(x), free(y);
}

/* Four experts, of which some have no assignment, others few rows or many. */
static void products_of_experts(int level, i64 A, i64 N, i64 K, uint32_t *state) {
  enum { E = 4 };
  float *x = floats(A * K, state), *y = malloc((size_t)(A * N) * sizeof *y);
  int32_t *expert = malloc((size_t)A * sizeof *expert);
  for (i64 a = 0; a < A; a++) expert[a] = a % 5 == 0 ? E : a % 7 == 0 ? 1 : 3;
  for (int fused = 0; fused < 2; fused++)
    for (int kind = BF16; kind < N_KINDS; kind++) {
      const i64 rows = (fused ? 2 : 1) * N;
      Product p = kind == BF16 ? (Product){.w = bf16s(E * rows * K, state), .K = K} : quantised(kind, E * rows, K, state);
      p.x = x;
      const Experts e = {.of = p, .expert = expert, .y = y, .A = A, .R = A, .E = E, .N = N, .fused = fused};
      if ((kind == BF16 || fits_quantised(&p)) && !experts(level, &e, &CALL)) abort();
      free((void *)p.w), put_away(p);
    }
  free(x), free(y), free(expert);
}

/* Rows of 1 and of ``most`` tokens, over pages that they share out of order. */
static void attends(int level, i64 N, i64 K, i64 H, int32_t most, i64 window, i64 sinks, uint32_t *state) {
  enum { R = 3, M = 4, Z = 16, P = 9 };
  int32_t *table = malloc(R * M * sizeof *table), *start = malloc(R * sizeof *start);
  int32_t *count = malloc(R * sizeof *count), *first = malloc(R * sizeof *first);
  i64 T = 0;
  for (int r = 0; r < R; r++) {
    count[r] = r == 1 ? most : r == 0, first[r] = (int32_t)T, start[r] = M * Z - max64(count[r], 1);
    T += count[r];
    for (int m = 0; m < M; m++) table[r * M + m] = 1 + (r * 5 + m * 3) % (P - 1);
  }
  float *q = floats(T * N * H, state), *o = malloc((size_t)(T * N * H) * sizeof *o);
  float *far = sinks ? floats(T * N * H, state) : NULL;
  bf16 *k = bf16s(P * K * Z * H, state), *v = bf16s(P * K * Z * H, state);
  Attention a = {.q = q, .far = far, .k = k, .v = v, .table = table, .start = start, .count = count, .first = first,
                 .o = o, .T = T, .R = R, .M = M, .N = N, .K = K, .Z = Z, .H = H, .window = window, .sinks = sinks,
                 .scale = 0.125f};
  if (level > PLAIN && !attention(level, &a, &CALL)) abort();
  int32_t *page = malloc((size_t)T * sizeof *page), *offset = malloc((size_t)T * sizeof *offset);
  for (i64 t = 0; t < T; t++) page[t] = (int32_t)(t / Z) % P, offset[t] = (int32_t)(t % Z);
  const Writes w = {{k, v}, {q, q}, page, offset, T, P, K, Z, H};
  if (!write_all(&w, &CALL)) abort();
  free(table), free(start), free(count), free(first), free(q), free(far), free(o), free(k), free(v);
  free(page), free(offset);
}

static void *caller(void *number) {
  uint32_t state = 1 + (uint32_t)(size_t)number;
  static const i64 MS[] = {1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 65}, KS[] = {32, 64, 75, 160, 512}, NS[] = {1, 21, 64};
  for (int level = 0; level <= best_level(); level++) {
    for (size_t m = 0; m < sizeof MS / sizeof *MS; m++)
      for (size_t k = 0; k < sizeof KS / sizeof *KS; k++)
        for (size_t n = 0; n < sizeof NS / sizeof *NS; n++) products(level, MS[m], NS[n], KS[k], &state);
    products(level, 3, 700, 512, &state); /* enough chunks that threads share them */
    for (i64 A = 1; A < 80; A += 13) products_of_experts(level, A, 33, 96, &state);
    products_of_experts(level, 20, 700, 256, &state);
    attends(level, 4, 2, 64, 1, 0, 0, &state);
    attends(level, 8, 1, 128, 40, 0, 0, &state);
    attends(level, 2, 2, 64, 33, 20, 0, &state);
    attends(level, 6, 2, 256, 17, 20, 3, &state);
  }
  return NULL;
}

int main(void) {
  pthread_t helpers[HELPERS], callers[2];
  for (int i = 0; i < HELPERS; i++) pthread_create(&helpers[i], NULL, helper, NULL);
  for (size_t i = 0; i < 2; i++) pthread_create(&callers[i], NULL, caller, (void *)i);
  for (int i = 0; i < 2; i++) pthread_join(callers[i], NULL);
  pthread_mutex_lock(&pool.lock);
  pool.ended = 1;
  pthread_cond_broadcast(&pool.some);
  pthread_mutex_unlock(&pool.lock);
  for (int i = 0; i < HELPERS; i++) pthread_join(helpers[i], NULL);
  return 0;
}
