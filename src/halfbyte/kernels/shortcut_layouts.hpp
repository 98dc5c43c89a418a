// Layouts of others that shortcut_calls.hpp reads: DLPack 1.x as dlpack.h has them, and the CUDA driver's.
#pragma once

#include <cstdint>

struct DLDevice {
  int32_t type, id;
  bool operator==(const DLDevice& other) const { return type == other.type && id == other.id; }
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
  bool operator==(const DLDataType& other) const {
    return code == other.code && bits == other.bits && lanes == other.lanes;
  }
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DLExchange {
  struct {
    uint32_t major, minor;
  } version;
  void *previous, *allocate, *export_managed, *import_managed;
  int (*read)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};
constexpr uint32_t DLPACK_MAJOR = 1;
constexpr DLDataType FP32 = {2, 32, 1};

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  uint32_t count;
};
using LaunchKernel = int (*)(const LaunchConfig*, void* function, void** parameters, void** extra);
using ContextDevice = int (*)(int* device);
using StreamIsCapturing = int (*)(void* stream, int* status);
