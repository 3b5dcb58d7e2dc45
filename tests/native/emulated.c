/* The kernels as a program: it reads calls from its input, makes them through the handlers that XLA calls, and writes what
 * they answer, so that kernels of another processor run in an emulator. Every array ends where a page does, and the page
 * behind it cannot be touched. Built and run by emulated.py.
 *
 *   first     the level of the processor, and for each level whether its self check passed: 64-bit numbers, as all are
 *   a call    name[64]; how many arguments, results, attributes; each array; each attribute
 *   array     type, bytes of an element, which argument a result is (-1: none), rank, dimensions; of an argument its data
 *   attribute name[64], type, value
 *   answer    how long the error message is, the message; of a call without one the data of its results */
#define JSERVE_SOURCE_HASH "emulated"
#include "kernels.c"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 16, NAME = 64, THREADS = 3 };

static FfiError *(*const HANDLERS[])(FfiCall *) = {
    jserve_product, jserve_gate_up, jserve_quantised_product, jserve_quantised_gate_up, jserve_expert_product,
    jserve_expert_gate_up, jserve_quantised_expert_product, jserve_quantised_expert_gate_up, jserve_attention, jserve_write_kv,
};
static const char *const NAMES[] = {
    "jserve_product", "jserve_gate_up", "jserve_quantised_product", "jserve_quantised_gate_up", "jserve_expert_product",
    "jserve_expert_gate_up", "jserve_quantised_expert_product", "jserve_quantised_expert_gate_up", "jserve_attention",
    "jserve_write_kv",
};

/* --- what stands for XLA --- */

struct FfiError {
  char message[256];
};

static FfiError *error_create(FfiErrorCreate *args) {
  FfiError *error = calloc(1, sizeof *error);
  strncpy(error->message, args->message, sizeof error->message - 1);
  return error;
}

static FfiError *num_threads(FfiNumThreads *args) {
  *args->num_threads = THREADS;
  return NULL;
}

static void *run(void *task) {
  FfiSchedule *args = task;
  args->task(args->data);
  free(args);
  return NULL;
}

static FfiError *schedule(FfiSchedule *args) {
  FfiSchedule *kept = malloc(sizeof *kept);
  pthread_t thread;
  *kept = *args;
  if (pthread_create(&thread, NULL, run, kept)) abort();
  pthread_detach(thread);
  return NULL;
}

static const FfiApi API = {
    .struct_size = sizeof(FfiApi),
    .version = {.major = FFI_MAJOR, .minor = FFI_MINOR},
    .error_create = error_create,
    .schedule = schedule,
    .num_threads = num_threads,
};

/* --- reading and writing --- */

static void take(void *to, size_t n) {
  if (fread(to, 1, n, stdin) != n) exit(feof(stdin) ? 0 : 1);
}

static i64 take_number(void) {
  i64 n;
  take(&n, sizeof n);
  return n;
}

static void give(const void *from, size_t n) {
  if (fwrite(from, 1, n, stdout) != n) exit(1);
}

static void give_number(i64 n) { give(&n, sizeof n); }

typedef struct {
  FfiBuffer buffer;
  int64_t dims[8];
  size_t bytes, mapped;
  char *map;
} Array;

/* An array, whose data is a page's last bytes; it is that of ``of`` where a result is an argument. */
static void take_array(Array *a, Array *of) {
  const i64 page = sysconf(_SC_PAGESIZE), dtype = take_number(), size = take_number(), same = take_number();
  a->buffer = (FfiBuffer){.struct_size = sizeof a->buffer, .dtype = (int)dtype, .rank = take_number(), .dims = a->dims};
  a->bytes = (size_t)size;
  for (i64 i = 0; i < a->buffer.rank; i++) a->bytes *= (size_t)(a->dims[i] = take_number());
  if (same >= 0) {
    a->buffer.data = of[same].buffer.data, a->mapped = 0;
    return;
  }
  a->mapped = (size_t)(up_to((i64)a->bytes, page) + page);
  a->map = mmap(NULL, a->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char *end = a->map + a->mapped - page;
  if (a->map == MAP_FAILED || mprotect(end, (size_t)page, PROT_NONE)) abort();
  a->buffer.data = end - a->bytes;
}

/* --- calls --- */

static void one_call(void) {
  static Array args[MOST], rets[MOST];
  static char names[MOST][NAME];
  char name[NAME];
  void *arg_items[MOST], *ret_items[MOST], *attr_items[MOST];
  int attr_types[MOST];
  i64 values[MOST];
  FfiSpan spans[MOST], *span_at[MOST];
  FfiScalar scalars[MOST];
  take(name, NAME);
  const i64 n_args = take_number(), n_rets = take_number(), n_attrs = take_number();
  for (i64 i = 0; i < n_args; i++) {
    take_array(&args[i], NULL), arg_items[i] = &args[i].buffer;
    take(args[i].buffer.data, args[i].bytes);
  }
  for (i64 i = 0; i < n_rets; i++) {
    take_array(&rets[i], args), ret_items[i] = &rets[i].buffer;
    if (rets[i].mapped) memset(rets[i].buffer.data, 0xff, rets[i].bytes);
  }
  for (i64 i = 0; i < n_attrs; i++) {
    take(names[i], NAME);
    spans[i] = (FfiSpan){names[i], strlen(names[i])}, span_at[i] = &spans[i];
    scalars[i] = (FfiScalar){(int)take_number(), &values[i]}, values[i] = take_number();
    attr_types[i] = FFI_ATTR_SCALAR, attr_items[i] = &scalars[i];
  }
  FfiCall call = {
      .struct_size = sizeof call,
      .api = &API,
      .stage = FFI_STAGE_EXECUTE,
      .args = {.size = n_args, .items = arg_items},
      .rets = {.size = n_rets, .items = ret_items},
      .attrs = {.size = n_attrs, .types = attr_types, .names = span_at, .items = attr_items},
  };
  FfiError *error = error_create(&(FfiErrorCreate){.message = "no such handler"});
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
    if (!strcmp(name, NAMES[i])) free(error), error = HANDLERS[i](&call);
  const size_t said = error ? strlen(error->message) : 0;
  give_number((i64)said);
  if (error) give(error->message, said);
  for (i64 i = 0; !error && i < n_rets; i++) give(rets[i].buffer.data, rets[i].bytes);
  fflush(stdout);
  free(error);
  for (i64 i = 0; i < n_args; i++) munmap(args[i].map, args[i].mapped);
  for (i64 i = 0; i < n_rets; i++)
    if (rets[i].mapped) munmap(rets[i].map, rets[i].mapped);
}

int main(void) {
  give_number(best_level());
  for (int level = 0; level <= best_level(); level++) give_number(jserve_self_check(level));
  fflush(stdout);
  for (;;) one_call();
}
