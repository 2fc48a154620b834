// Stands for libcuda.so.1: memory of "GPUs" is memory of the host without a name, and a handle says whose it is.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
struct Memory {
  int32_t process, descriptor;
  uint64_t size;
};
struct Handle {
  unsigned char data[64];
};
Memory own;  // a rank has one
uint64_t own_address;

uint64_t map_memory(int descriptor, uint64_t size) {
  return reinterpret_cast<uint64_t>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
}
bool fails(const char* name) {
  const char* const failing = getenv("STAND_IN_FAILS");
  return failing != nullptr && strcmp(failing, name) == 0;
}
}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuMemAlloc_v2(uint64_t* address, size_t size) {
  if (fails("cuMemAlloc_v2")) return 2;
  const int descriptor = memfd_create("stand-in", 0);
  if (size % (2 << 20) != 0 || ftruncate(descriptor, size) != 0) return 1;
  *address = map_memory(descriptor, size);
  own = {getpid(), descriptor, size};
  own_address = *address;
  return 0;
}
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t size) {
  memset(reinterpret_cast<void*>(address), value, size);
  return 0;
}
int cuCtxSynchronize() { return 0; }
int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
  memcpy(handle->data, &own, sizeof own);
  return address == own_address ? 0 : 1;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned flags) {
  Memory memory;
  memcpy(&memory, handle.data, sizeof memory);
  if (fails("cuIpcOpenMemHandle_v2") || flags != 1 || memory.process == getpid()) return 201;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", memory.process, memory.descriptor);
  const int descriptor = open(path, O_RDWR);
  if (descriptor < 0) return 400;
  *address = map_memory(descriptor, memory.size);
  close(descriptor);
  return 0;
}
int cuIpcCloseMemHandle(uint64_t address) {
  return address == own_address ? 1 : munmap(reinterpret_cast<void*>(address), own.size);  // all have the same size
}
int cuDeviceGetP2PAttribute(int* value, int attribute, int own, int other) {
  const char* const without = getenv("STAND_IN_WITHOUT");  // an attribute that no link has
  *value = own != other && (without == nullptr || atoi(without) != attribute);
  return 0;
}
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_STAND_IN";
  return 0;
}
}
