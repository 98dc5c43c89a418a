// Calls that were seen before: what Python has told of them, whether a call is one of them, and how it is launched.
// See shortcut.cpp.
#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "cpu/abi.hpp"
#include "shortcut_layouts.hpp"

namespace {

// ---- what Python tells

constexpr int MAX_PARAMETERS = 8, MAX_CALL_BYTES = 256;

struct Launch {  // launch.Record
  LaunchConfig config;
  void* function;
  void** parameters;  // addresses of the kernel's arguments; the last is a struct that holds what a call brings
  const Launch* image;  // of another kernel, which lays x out for this one; or null
  int64_t image_bytes;  // that it writes
  int32_t count, call_bytes;
  int32_t alignment;  // bytes that the address of x and its rows are multiples of
  int32_t x, bias, out, x_stride, m, bias_is_fp32;  // where in that struct
};

struct CpuLaunch {  // cpu.launch.Record
  int32_t (*linear)(int32_t isa, const HbWeight* weight, const HbCall* call);
  const HbWeight* weight;
  int32_t isa, dtype;
};

struct Call {
  DLDataType dtype;
  int64_t m;
  const Launch* launch;  // or
  const CpuLaunch* on_cpu;
  PyObject* owner;  // keeps what is launched, and raises for it
  PyObject* torch_dtype;
  PyObject *sizes, *strides;  // of the output for x [m, k]
  PyObject* counters;  // a dict: operators -> addresses of an int64 each
  int64_t* counter;    // of "linear"
};

struct Part {
  void* data;
  DLDataType dtype;
  std::vector<int64_t> shape;
  PyObject* plain;  // a weak reference to the tensor that was last found to be an ordinary one; or null
};

struct Weight {
  PyObject* capsule;  // owns this; not owned by it
  PyObject *views, *format;
  int64_t n, k;
  DLDevice device;
  std::vector<Part> parts;
  std::vector<Call> calls;
  std::vector<long long> versions;  // of the views, at the last launch
  std::vector<void*> streams;       // on which it was launched since they changed
};

constexpr const char* CAPSULE = "halfbyte.weight";
// By the address of the codes. Never destroyed: weights may end after this file's static objects do.
auto& published = *new std::unordered_map<void*, Weight*>;

const DLExchange* exchange = nullptr;
PyObject *in_python = nullptr, *allocate = nullptr, *allocate_on_cpu = nullptr, *uint8 = nullptr, *threads = nullptr;
LaunchKernel launch_kernel = nullptr;
ContextDevice context_device = nullptr;
StreamIsCapturing stream_is_capturing = nullptr;
PyObject* name_version = nullptr;

bool read(PyObject* object, DLTensor* out) {
  if (exchange->read(object, out) != 0) {
    PyErr_Clear();
    return false;
  }
  out->data = static_cast<char*>(out->data) + out->byte_offset;
  return out->strides != nullptr || out->ndim == 0;
}

// Sizes and strides of a contiguous tensor of a shape whose last is n. False with an exception set.
bool layout(const int64_t* shape, int ndim, int64_t n, PyObject** sizes, PyObject** strides) {
  *sizes = PyTuple_New(ndim);
  *strides = PyTuple_New(ndim);
  if (*sizes == nullptr || *strides == nullptr) return false;
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    const int64_t size = i == ndim - 1 ? n : shape[i];
    PyTuple_SetItem(*sizes, i, PyLong_FromLongLong(size));
    PyTuple_SetItem(*strides, i, PyLong_FromLongLong(stride));
    stride *= size;
  }
  return true;
}

// A new tensor of x's shape but n columns, on the current device of the allocator's type; null with an exception set
// where there is no memory.
PyObject* empty(const DLTensor& x, int64_t n, const Call& call) {
  PyObject* const allocator = call.on_cpu != nullptr ? allocate_on_cpu : allocate;
  if (x.ndim == 2) return PyObject_CallFunctionObjArgs(allocator, call.sizes, call.strides, call.torch_dtype, nullptr);
  PyObject *sizes = nullptr, *strides = nullptr, *result = nullptr;
  if (layout(x.shape, x.ndim, n, &sizes, &strides))
    result = PyObject_CallFunctionObjArgs(allocator, sizes, strides, call.torch_dtype, nullptr);
  Py_XDECREF(sizes);
  Py_XDECREF(strides);
  return result;
}

// Memory for so many bytes, as `empty`.
PyObject* bytes(int64_t count) {
  PyObject *sizes = nullptr, *strides = nullptr, *result = nullptr;
  if (layout(nullptr, 1, count, &sizes, &strides))
    result = PyObject_CallFunctionObjArgs(allocate, sizes, strides, uint8, nullptr);
  Py_XDECREF(sizes);
  Py_XDECREF(strides);
  return result;
}

bool contiguous(const DLTensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// The codes may also be a column, as in ops._check_parts.
bool same(const DLTensor& tensor, const Part& part, bool codes) {
  const int ndim = static_cast<int>(part.shape.size());
  const bool column = codes && tensor.ndim == ndim + 1 && tensor.shape[ndim] == 1;
  return tensor.data == part.data && tensor.dtype == part.dtype && (tensor.ndim == ndim || column) &&
         std::memcmp(tensor.shape, part.shape.data(), ndim * sizeof(int64_t)) == 0 && contiguous(tensor);
}

// x as a matrix [m, k] with unit stride along k: its rows and their stride, or false where it is none without a copy.
bool as_rows(const DLTensor& x, int64_t k, int64_t* m, int64_t* stride) {
  const int last = x.ndim - 1;
  if (last < 0 || x.shape[last] != k || x.strides[last] != 1) return false;
  *m = 1;
  for (int i = 0; i < last; ++i) *m *= x.shape[i];
  for (int i = 0; i < last - 1; ++i)
    if (x.shape[i] != 1 && x.strides[i] != x.shape[i + 1] * x.strides[i + 1]) return false;
  *stride = *m > 1 ? x.strides[last - 1] : k;
  return true;
}

// Whether no kernel right before this launch can be writing the weight; see launch.Launcher.settled.
bool settled(Weight* weight, void* stream) {
  bool changed = false;
  for (size_t i = 0; i < weight->versions.size(); ++i) {
    PyObject* value = PyObject_GetAttr(PyTuple_GetItem(weight->views, i), name_version);
    const long long version = value == nullptr ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (version < 0) {  // an inference tensor keeps no version, and never will
      PyErr_Clear();
      weight->versions.clear();
      return false;
    }
    changed |= version != weight->versions[i];
    weight->versions[i] = version;
  }
  if (weight->versions.empty()) return false;
  if (changed) {
    weight->streams.assign(1, stream);
    return false;
  }
  for (void* known : weight->streams)
    if (known == stream) return true;
  int capturing = 0;
  if (stream_is_capturing(stream, &capturing) == 0 && capturing) return true;
  weight->streams.push_back(stream);
  return false;
}

// What a call brings to a kernel; see launch.call_fields.
struct Operands {
  void *x, *bias, *out;
  int64_t stride;
  int32_t m, bias_is_fp32;
};

// A launch with arguments of its own, so that the driver can be called without the lock.
class Start {
 public:
  Start(const Launch& launch, const Operands& operands, void* stream, bool early)
      : function(launch.function), config(launch.config) {
    std::memcpy(parameters, launch.parameters, launch.count * sizeof(void*));
    std::memcpy(values, parameters[launch.count - 1], launch.call_bytes);
    parameters[launch.count - 1] = values;
    set(launch.x, operands.x);
    set(launch.bias, operands.bias);
    set(launch.out, operands.out);
    set(launch.x_stride, operands.stride);
    set(launch.m, operands.m);
    set(launch.bias_is_fp32, operands.bias_is_fp32);
    config.stream = stream;
    config.count = early && config.attributes != nullptr ? 1 : 0;
  }
  Start(const Start&) = delete;
  int operator()() { return launch_kernel(&config, function, parameters, nullptr); }

 private:
  template <class Value>
  void set(int32_t at, Value value) {
    std::memcpy(values + at, &value, sizeof value);
  }

  void* function;
  LaunchConfig config;
  void* parameters[MAX_PARAMETERS];
  alignas(16) char values[MAX_CALL_BYTES];
};

// Lets the lock go meanwhile. Returns what the driver does.
int unlocked(Start* first, Start* second) {
  PyThreadState* state = PyEval_SaveThread();
  int error = (*first)();
  if (error == 0 && second != nullptr) error = (*second)();
  PyEval_RestoreThread(state);
  return error;
}

// What a call multiplies, checked.
struct Input {
  const DLTensor& x;
  const DLTensor* bias;  // or null
  int64_t m, stride;     // of x as a matrix

  void* bias_data() const { return bias == nullptr ? nullptr : bias->data; }
  bool bias_is_fp32() const { return bias != nullptr && bias->dtype == FP32; }
};

// The new output; null with an exception set, or without one where Python must see to it.
PyObject* output(const Weight& weight, const Call& call, const DLTensor& x, DLTensor* out) {
  PyObject* result = empty(x, weight.n, call);
  if (result != nullptr && !read(result, out)) {
    Py_DECREF(result);
    result = nullptr;
  }
  return result;
}

// Counts a call, or raises for it. Takes `result`.
PyObject* finish(const Call& call, int error, int64_t* counter, PyObject* result) {
  if (error == 0) {
    ++*counter;
    return result;
  }
  Py_DECREF(result);
  Py_XDECREF(PyObject_CallMethod(call.owner, "failed", "i", error));  // raises
  return nullptr;
}

PyObject* multiply_on_cpu(const Weight& weight, const Call& call, const Input& input, int64_t* counter) {
  const CpuLaunch& launch = *call.on_cpu;
  PyObject* count = PyObject_CallNoArgs(threads);
  if (count == nullptr) return nullptr;
  const long most = PyLong_AsLong(count);
  Py_DECREF(count);
  DLTensor out;
  PyObject* result = output(weight, call, input.x, &out);
  if (result == nullptr) return nullptr;
  const int32_t bias_dtype = input.bias_is_fp32() ? HB_FP32 : launch.dtype;
  const HbCall what = {input.x.data, input.bias_data(), out.data,   input.m,    input.stride,
                       weight.n,     launch.dtype,      bias_dtype, int32_t(most), 0};
  PyThreadState* state = PyEval_SaveThread();
  const int error = launch.linear(launch.isa, launch.weight, &what);
  PyEval_RestoreThread(state);
  return finish(call, error, counter, result);
}

PyObject* multiply_on_gpu(Weight* weight, const Call& call, const Input& input, int64_t* counter) {
  const DLTensor& x = input.x;
  const Launch& launch = *call.launch;
  const Launch& first = launch.image != nullptr ? *launch.image : launch;
  const uint64_t row_bytes = input.m > 1 ? input.stride * (x.dtype.bits / 8) : 0;
  if ((reinterpret_cast<uint64_t>(x.data) | row_bytes) % first.alignment) return nullptr;
  int device = -1;
  if (context_device == nullptr || context_device(&device) != 0 || device != weight->device.id) return nullptr;
  void* stream = nullptr;
  if (exchange->current_stream(weight->device.type, weight->device.id, &stream) != 0) {
    PyErr_Clear();
    return nullptr;
  }

  DLTensor out, image;
  PyObject *image_object = nullptr, *result = nullptr;
  if (launch.image != nullptr) image_object = bytes(launch.image_bytes);
  if (launch.image == nullptr || (image_object != nullptr && read(image_object, &image)))
    result = output(*weight, call, x, &out);
  if (result == nullptr) {
    Py_XDECREF(image_object);
    return nullptr;
  }

  const int32_t rows = static_cast<int32_t>(input.m);
  Operands operands = {x.data, input.bias_data(), out.data, input.stride, rows, input.bias_is_fp32()};
  const bool early = launch.config.attributes != nullptr && settled(weight, stream);
  int error;
  if (launch.image != nullptr) {
    operands.x = image.data;
    Start laying(first, {x.data, nullptr, image.data, input.stride, rows, 0}, stream, true);
    Start multiplying(launch, operands, stream, early);
    error = unlocked(&laying, &multiplying);
  } else {
    Start multiplying(launch, operands, stream, early);
    error = unlocked(&multiplying, nullptr);
  }
  result = finish(call, error, counter, result);
  Py_XDECREF(image_object);  // the allocator gives its memory to later work on this stream only
  return result;
}

// out = x times the weight, plus bias. Null with an exception set, or null without one where Python must see to it.
// operation: under which name the call is counted; null for "linear".
PyObject* multiply_known(Weight* weight, PyObject* x_object, PyObject* bias_object, PyObject* operation) {
  DLTensor x, bias;
  int64_t m, stride;
  if (!read(x_object, &x) || !(x.device == weight->device) || !as_rows(x, weight->k, &m, &stride)) return nullptr;
  const Call* found = nullptr;
  for (const Call& call : weight->calls)
    if (call.m == m && call.dtype == x.dtype) found = &call;
  if (found == nullptr) return nullptr;
  const Call call = *found;  // the list may grow while the lock is let go
  int64_t* counter = call.counter;
  if (operation != nullptr) {
    PyObject* address = PyDict_GetItem(call.counters, operation);
    if (address == nullptr) return nullptr;
    counter = static_cast<int64_t*>(PyLong_AsVoidPtr(address));
  }
  const bool biased = bias_object != Py_None;
  if (biased && (!read(bias_object, &bias) || !(bias.device == weight->device) || bias.ndim != 1 ||
                 bias.shape[0] != weight->n || !contiguous(bias) || !(bias.dtype == x.dtype || bias.dtype == FP32)))
    return nullptr;
  const Input input = {x, biased ? &bias : nullptr, m, stride};
  PyObject* held = weight->capsule;  // or another thread could end the weight while the lock is let go
  Py_INCREF(held);
  PyObject* result = call.on_cpu != nullptr ? multiply_on_cpu(*weight, call, input, counter)
                                            : multiply_on_gpu(weight, call, input, counter);
  Py_DECREF(held);
  return result;
}

}  // namespace
