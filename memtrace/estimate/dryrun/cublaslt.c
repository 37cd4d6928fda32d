// cuBLASLt without a GPU, as far as cuDNN's planning asks it: every product has a kernel, which needs no workspace.
// The real one makes no handle where there is no GPU, and cuDNN would drop its plans for convolutions of 1 by 1.
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

size_t cublasLtGetVersion(void) { return CUDA_MAJOR * 10000; }
int cublasLtGetProperty(int which, int* value) { *value = which ? 0 : CUDA_MAJOR; return 0; }
int cublasLtCreate(void** handle) { *handle = calloc(1, 64); return 0; }
int cublasLtDestroy(void* handle) { free(handle); return 0; }
int cublasLtMatmul(void) { return 0; }
int cublasLtMatrixTransform(void) { return 0; }

// One result, a cublasLtMatmulHeuristicResult_t of 96 bytes: algorithm, workspace, status, waves.
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* op, void* a, void* b, void* c, void* d, void* preference,
                                   int most, void* results, int* count) {
  memset(results, 0, 96);
  *count = 1;
  return 0;
}

#define DESCRIPTOR(name)                                                                                  \
  int name##Create(void** made) { *made = calloc(1, 512); return 0; }                                     \
  int name##Destroy(void* made) { free(made); return 0; }                                                 \
  int name##Init_internal(void* made, size_t size) { memset(made, 0, size); return 0; }                   \
  int name##SetAttribute(void* made, int which, const void* value, size_t size) { return 0; }             \
  int name##GetAttribute(void* made, int which, void* value, size_t size, size_t* written) { return 0; }
DESCRIPTOR(cublasLtMatmulDesc)
DESCRIPTOR(cublasLtMatmulPreference)
DESCRIPTOR(cublasLtMatrixLayout)
DESCRIPTOR(cublasLtMatrixTransformDesc)
