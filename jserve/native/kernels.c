/* Kernels for the CPU. */
#include "ffi_abi.h"

__attribute__((visibility("default"))) const char *jserve_source_hash(void) { return JSERVE_SOURCE_HASH; }
