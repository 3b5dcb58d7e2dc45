/* The part of the C ABI of XLA's typed FFI that the kernels use, as of API 0.3 (jaxlib 0.10.2), declared from its layout:
 * names are ours, sizes and offsets are XLA's. tests/native/test_ffi_abi.py compares them with the headers of the
 * installed jaxlib. A structure that XLA fills carries its size first, so that later versions may append to it. */
#ifndef JSERVE_FFI_ABI_H
#define JSERVE_FFI_ABI_H

#include <stddef.h>
#include <stdint.h>

#define FFI_MAJOR 0
#define FFI_MINOR 3
/* Bytes up to and with a structure's last field, which is less than sizeof where padding follows it. */
#define FFI_SIZE(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

enum { FFI_EXTENSION_METADATA = 1 };
enum { FFI_STAGE_EXECUTE = 3 };
enum { FFI_ATTR_SCALAR = 3 };
enum { FFI_ERROR_INVALID_ARGUMENT = 3, FFI_ERROR_FAILED_PRECONDITION = 9 };
enum { FFI_S8 = 2, FFI_S32 = 4, FFI_S64 = 5, FFI_U8 = 6, FFI_U16 = 7, FFI_F32 = 11, FFI_BF16 = 16, FFI_F8E4M3FN = 20 };

typedef struct FfiError FfiError;
typedef struct FfiContext FfiContext;
typedef struct FfiFuture FfiFuture;

typedef struct FfiExtension {
  size_t struct_size;
  int type;
  struct FfiExtension *next;
} FfiExtension;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  int major;
  int minor;
} FfiVersion;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  const char *message;
  int code;
} FfiErrorCreate;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  FfiError *error;
} FfiErrorDestroy;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
} FfiBuffer;

typedef struct {
  const char *text;
  size_t len;
} FfiSpan;

typedef struct {
  int dtype;
  void *value;
} FfiScalar;

/* Arguments, and results. */
typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  int64_t size;
  int *types;
  void **items;
} FfiList;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  int64_t size;
  int *types;
  FfiSpan **names;
  void **items;
} FfiAttrs;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  FfiContext *ctx;
  void (*task)(void *data);
  void *data;
} FfiSchedule;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  FfiContext *ctx;
  int64_t *num_threads;
} FfiNumThreads;

/* A table of functions; those that the kernels do not call are only places. */
typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  FfiVersion version;
  const void *internal;
  FfiError *(*error_create)(FfiErrorCreate *);
  void *error_get_message;
  void (*error_destroy)(FfiErrorDestroy *);
  void *unused[8]; /* Handler_Register ... DeviceMemory_Free */
  FfiError *(*schedule)(FfiSchedule *);
  FfiError *(*num_threads)(FfiNumThreads *);
} FfiApi;

typedef struct {
  size_t struct_size;
  FfiExtension *extension;
  const FfiApi *api;
  FfiContext *ctx;
  int stage;
  FfiList args;
  FfiList rets;
  FfiAttrs attrs;
} FfiCall;

typedef struct {
  size_t struct_size;
  FfiVersion version;
  uint32_t traits;
} FfiMetadata;

typedef struct {
  FfiExtension base;
  FfiMetadata *metadata;
} FfiMetadataExtension;

#endif
