/* A libcuda without a GPU, for tests: records what it is called with. Compiled against cuda.h where there is one,
   so that the signatures are NVIDIA's. What a kernel "does" is to have its arguments written down. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(HAVE_CUDA_H)
#include <cuda.h>
#else
typedef int CUresult, CUdevice, CUdevice_attribute;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream, *CUevent;
typedef unsigned long long CUdeviceptr, cuuint64_t;
#define CUDAAPI
#define CUDA_SUCCESS 0
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemHostRegister cuMemHostRegister_v2
#define cuMemHostGetDevicePointer cuMemHostGetDevicePointer_v2
#define cuStreamWaitValue64 cuStreamWaitValue64_v2
#endif

#define NAMES_MAX 1024
#define PARAMETERS_MAX 16

static char record[1 << 16];
static CUresult next_failure;  /* of the next call that is recorded */
static __thread CUcontext current;
static char functions[NAMES_MAX][64];
static int function_count;
static size_t parameter_sizes[PARAMETERS_MAX];  /* of every kernel */
static int parameter_count;

const char* stub_record(void) { return record; }
void stub_clear(void) { record[0] = 0; }
void stub_fail_next(int status) { next_failure = (CUresult)status; }
void stub_parameters(int count, const size_t* sizes) {
  parameter_count = count;
  memcpy(parameter_sizes, sizes, count * sizeof *sizes);
}

static CUresult note(const char* text) {
  strcat(strcat(record, text), "\n");
  CUresult status = next_failure;
  next_failure = CUDA_SUCCESS;
  return status;
}
#define NOTE(...) (snprintf(line, sizeof line, __VA_ARGS__), note(line))

CUresult CUDAAPI cuInit(unsigned int flags) {
  (void)flags;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDriverGetVersion(int* version) {
  *version = 13010;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
  *text = error == 2 ? "out of memory" : error == 712 ? "already registered" : "a failure";
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetCount(int* count) {
  *count = 2;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal + 100;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetName(char* name, int len, CUdevice device) {
  snprintf(name, len, "Stub %d", device);
  return CUDA_SUCCESS;
}
#undef cuDeviceTotalMem
CUresult CUDAAPI cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  (void)device;
  *bytes = (size_t)80 << 30;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch ((int)attribute) {
    case 16: *value = 132; break;
    case 33: *value = 0x3b; break;
    case 34: *value = device - 100; break;
    case 50: *value = 1; break;
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 86: *value = 0; break;
    case 122: *value = device == 100; break;
    default: return (CUresult)1;
  }
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)(size_t)(0x1000 + device);
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
  *context = current;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
  *context = current;
  current = NULL;
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  char line[200];
  *module = (CUmodule)0x77;
  return NOTE("load %.3s in %zx", (const char*)image + 1, (size_t)current);
}
CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  strcpy(functions[function_count], name);
  *function = (CUfunction)functions[function_count++];
  return module == (CUmodule)0x77 ? CUDA_SUCCESS : (CUresult)400;
}
CUresult CUDAAPI cuFuncLoad(CUfunction function) {
  char line[200];
  return NOTE("ready %s", (const char*)function);
}
CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                                unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void** params,
                                void** extra) {
  char line[600];
  int at = snprintf(line, sizeof line, "launch %s <%u %u %u, %u %u %u, %u> stream %zx in %zx:", (const char*)function,
                    gx, gy, gz, bx, by, bz, shared, (size_t)stream, (size_t)current);
  for (int i = 0; i < parameter_count; ++i) {
    unsigned long long value = 0;
    memcpy(&value, params[i], parameter_sizes[i]);
    at += snprintf(line + at, sizeof line - at, " %llx", value);
  }
  return extra ? (CUresult)1 : note(line);
}
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  char line[200];
  return NOTE("copy %zu from %zx to %zx stream %zx in %zx", bytes, (size_t)from, (size_t)to, (size_t)stream,
              (size_t)current);
}
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t bytes, CUstream stream) {
  char line[200];
  return NOTE("fill %zu of %zx with %x stream %zx in %zx", bytes, (size_t)to, byte, (size_t)stream, (size_t)current);
}
CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned int flags) {
  static size_t events = 0xe00;
  char line[200];
  *event = (CUevent)++events;
  return NOTE("event flags %u in %zx", flags, (size_t)current);
}
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
  char line[200];
  return NOTE("record %zx stream %zx in %zx", (size_t)event & 0xf, (size_t)stream, (size_t)current);
}
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
  char line[200];
  return NOTE("wait stream %zx for %zx flags %u in %zx", (size_t)stream, (size_t)event & 0xf, flags, (size_t)current);
}
CUresult CUDAAPI cuEventQuery(CUevent event) {
  char line[200];
  return NOTE("query %zx", (size_t)event & 0xf);
}
CUresult CUDAAPI cuEventSynchronize(CUevent event) {
  char line[200];
  return NOTE("await %zx", (size_t)event & 0xf);
}
CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  char line[200];
  *address = 0x7f0000000000;
  return NOTE("allocate %zu in %zx", bytes, (size_t)current);
}
CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
  char line[200];
  return NOTE("free %llx in %zx", (unsigned long long)address, (size_t)current);
}
CUresult CUDAAPI cuMemHostRegister(void* p, size_t bytes, unsigned int flags) {
  char line[200];
  return NOTE("register %zx %zu flags %u in %zx", (size_t)p, bytes, flags, (size_t)current);
}
CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr* device, void* p, unsigned int flags) {
  char line[200];
  *device = (CUdeviceptr)(size_t)p + 0x1000000000000;
  return NOTE("pointer %zx flags %u", (size_t)p, flags);
}
CUresult CUDAAPI cuMemHostUnregister(void* p) {
  char line[200];
  return NOTE("unregister %zx in %zx", (size_t)p, (size_t)current);
}
CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int priority) {
  static size_t streams = 0x500;
  char line[200];
  *stream = (CUstream)++streams;
  return NOTE("stream flags %u priority %d in %zx", flags, priority, (size_t)current);
}
CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned int flags) {
  char line[200];
  return NOTE("wait stream %zx %llx >= %llx flags %u in %zx", (size_t)stream, (unsigned long long)address,
              (unsigned long long)value, flags, (size_t)current);
}
