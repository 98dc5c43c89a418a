// The operator on a GPU for calls that were seen before: from Python's objects to the driver with no Python in between.
//
// Python remains the implementation. It checks a call, plans it, compiles, launches, and then tells this module what it
// found: tensors of a weight, and the launch for x of a dtype and a number of rows. A later call whose tensors are the
// same memory, shapes and dtypes is launched from here; whatever differs in the least goes to Python, which has the
// words for what is wrong. Neither libtorch's C++ interface nor CUDA's headers are needed: tensors are read through the
// DLPack exchange table of torch.Tensor, the driver's functions come as addresses, and of Python's C interface only the
// part that is stable is used, so that one file serves every Python and every torch that has such a table.
//
// All state is read and written under the interpreter's lock, which is let go while the driver launches.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

namespace {

// ---- DLPack 1.x, as dlpack.h lays it out

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

// ---- the driver

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  uint32_t count;
};
using LaunchKernel = int (*)(const LaunchConfig*, void* function, void** parameters, void** extra);
using ContextDevice = int (*)(int* device);
using StreamIsCapturing = int (*)(void* stream, int* status);

// ---- what Python tells

constexpr int MAX_PARAMETERS = 8, MAX_CALL_BYTES = 256;

struct Launch {  // launch.Record
  LaunchConfig config;
  void* function;
  void** parameters;  // addresses of the kernel's arguments; the last is a struct that holds what a call brings
  int32_t count, call_bytes;
  int32_t alignment;  // bytes that the address of x and its rows are multiples of
  int32_t x, bias, out, x_stride, m, bias_is_fp32;  // where in that struct
};

struct Call {
  DLDataType dtype;
  int64_t m;
  const Launch* launch;
  PyObject* owner;  // keeps `launch`, and raises for it
  PyObject* torch_dtype;
  int64_t* counter;
};

struct Part {
  void* data;
  DLDataType dtype;
  std::vector<int64_t> shape;
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
PyObject *in_python = nullptr, *allocate = nullptr;
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

// A new tensor of x's shape but n columns, on the current device; null with an exception set where there is no memory.
PyObject* empty(const DLTensor& x, int64_t n, PyObject* torch_dtype) {
  PyObject *sizes = PyTuple_New(x.ndim), *strides = PyTuple_New(x.ndim), *result = nullptr;
  if (sizes != nullptr && strides != nullptr) {
    int64_t stride = 1;
    for (int i = x.ndim - 1; i >= 0; --i) {
      const int64_t size = i == x.ndim - 1 ? n : x.shape[i];
      PyTuple_SetItem(sizes, i, PyLong_FromLongLong(size));
      PyTuple_SetItem(strides, i, PyLong_FromLongLong(stride));
      stride *= size;
    }
    result = PyObject_CallFunctionObjArgs(allocate, sizes, strides, torch_dtype, nullptr);
  }
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

// out = x times the weight, plus bias. Null with an exception set, or null without one where Python must see to it.
PyObject* multiply_known(Weight* weight, PyObject* x_object, PyObject* bias_object, bool counted) {
  DLTensor x, bias, out;
  int64_t m, stride;
  if (!read(x_object, &x) || !(x.device == weight->device) || !as_rows(x, weight->k, &m, &stride)) return nullptr;
  const Call* found = nullptr;
  for (const Call& call : weight->calls)
    if (call.m == m && call.dtype == x.dtype) found = &call;
  if (found == nullptr) return nullptr;
  const Call call = *found;  // the list may grow while the lock is let go
  const Launch& launch = *call.launch;
  const uint64_t row_bytes = m > 1 ? stride * (x.dtype.bits / 8) : 0;
  if ((reinterpret_cast<uint64_t>(x.data) | row_bytes) % launch.alignment) return nullptr;
  const bool biased = bias_object != Py_None;
  if (biased && (!read(bias_object, &bias) || !(bias.device == weight->device) || bias.ndim != 1 ||
                 bias.shape[0] != weight->n || !contiguous(bias) || !(bias.dtype == x.dtype || bias.dtype == FP32)))
    return nullptr;
  int device = -1;
  if (context_device(&device) != 0 || device != weight->device.id) return nullptr;
  void* stream = nullptr;
  if (exchange->current_stream(weight->device.type, weight->device.id, &stream) != 0) {
    PyErr_Clear();
    return nullptr;
  }

  PyObject* held = weight->capsule;  // or another thread could end the weight while the lock is let go
  Py_INCREF(held);
  PyObject* result = empty(x, weight->n, call.torch_dtype);
  if (result == nullptr || !read(result, &out)) {
    Py_XDECREF(result);
    Py_DECREF(held);
    return nullptr;
  }

  alignas(16) char values[MAX_CALL_BYTES];
  void* parameters[MAX_PARAMETERS];
  std::memcpy(parameters, launch.parameters, launch.count * sizeof(void*));
  std::memcpy(values, parameters[launch.count - 1], launch.call_bytes);
  parameters[launch.count - 1] = values;
  const auto set = [&values](int32_t at, auto value) { std::memcpy(values + at, &value, sizeof value); };
  set(launch.x, x.data);
  set(launch.bias, biased ? bias.data : nullptr);
  set(launch.out, out.data);
  set(launch.x_stride, stride);
  set(launch.m, static_cast<int32_t>(m));
  set(launch.bias_is_fp32, static_cast<int32_t>(biased && bias.dtype == FP32));
  LaunchConfig config = launch.config;
  config.stream = stream;
  config.count = config.attributes != nullptr && settled(weight, stream) ? 1 : 0;

  PyThreadState* state = PyEval_SaveThread();
  const int error = launch_kernel(&config, launch.function, parameters, nullptr);
  PyEval_RestoreThread(state);
  if (error == 0) {
    if (counted) ++*call.counter;
  } else {
    Py_DECREF(result);
    result = nullptr;
    Py_XDECREF(PyObject_CallMethod(call.owner, "failed", "i", error));  // raises
  }
  Py_DECREF(held);
  return result;
}

// ---- what Python calls

Weight* weight_of(PyObject* capsule) { return static_cast<Weight*>(PyCapsule_GetPointer(capsule, CAPSULE)); }

void end_weight(PyObject* capsule) {
  Weight* weight = weight_of(capsule);
  const auto place = published.find(weight->parts[0].data);
  if (place != published.end() && place->second == weight) published.erase(place);
  Py_DECREF(weight->views);
  Py_DECREF(weight->format);
  for (const Call& call : weight->calls) {
    Py_DECREF(call.owner);
    Py_DECREF(call.torch_dtype);
  }
  delete weight;
}

PyObject* refuse_count(const char* name) {
  PyErr_Format(PyExc_TypeError, "%s: wrong number of arguments", name);
  return nullptr;
}

PyObject* connect(PyObject*, PyObject* arguments) {
  PyObject *capsule, *function, *allocator;
  unsigned long long launch, device, capturing;
  if (!PyArg_ParseTuple(arguments, "OOOKKK", &capsule, &function, &allocator, &launch, &device, &capturing))
    return nullptr;
  auto* table = static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (table == nullptr) return nullptr;
  if (table->version.major != DLPACK_MAJOR || table->read == nullptr || table->current_stream == nullptr) {
    PyErr_SetString(PyExc_ImportError, "torch's DLPack exchange table is of another version");
    return nullptr;
  }
  exchange = table;
  Py_INCREF(function);
  Py_XDECREF(in_python);
  in_python = function;
  Py_INCREF(allocator);
  Py_XDECREF(allocate);
  allocate = allocator;
  launch_kernel = reinterpret_cast<LaunchKernel>(launch);
  context_device = reinterpret_cast<ContextDevice>(device);
  stream_is_capturing = reinterpret_cast<StreamIsCapturing>(capturing);
  Py_RETURN_NONE;
}

PyObject* make_weight(PyObject*, PyObject* arguments) {
  PyObject *views, *format;
  long long n, k;
  if (!PyArg_ParseTuple(arguments, "O!ULL", &PyTuple_Type, &views, &format, &n, &k)) return nullptr;
  auto* weight = new Weight{};
  weight->n = n;
  weight->k = k;
  const Py_ssize_t count = PyTuple_Size(views);
  for (Py_ssize_t i = 0; i < count; ++i) {
    DLTensor tensor;
    if (exchange == nullptr || !read(PyTuple_GetItem(views, i), &tensor)) {
      delete weight;
      PyErr_SetString(PyExc_ValueError, "weight: a part that DLPack cannot describe, or connect() was not called");
      return nullptr;
    }
    weight->device = tensor.device;
    weight->parts.push_back({tensor.data, tensor.dtype, {tensor.shape, tensor.shape + tensor.ndim}});
  }
  weight->versions.assign(count, -1);
  Py_INCREF(views);
  Py_INCREF(format);
  weight->views = views;
  weight->format = format;
  weight->capsule = PyCapsule_New(weight, CAPSULE, end_weight);
  return weight->capsule;
}

PyObject* publish(PyObject*, PyObject* capsule) {
  Weight* weight = weight_of(capsule);
  if (weight == nullptr) return nullptr;
  published[weight->parts[0].data] = weight;
  Py_RETURN_NONE;
}

PyObject* remember(PyObject*, PyObject* arguments) {
  PyObject *capsule, *x_object, *owner;
  long long m;
  unsigned long long launch, counter;
  if (!PyArg_ParseTuple(arguments, "OOLKOK", &capsule, &x_object, &m, &launch, &owner, &counter)) return nullptr;
  Weight* weight = weight_of(capsule);
  if (weight == nullptr) return nullptr;
  const auto* known = reinterpret_cast<const Launch*>(launch);
  DLTensor x;
  if (!read(x_object, &x) || known->count > MAX_PARAMETERS || known->call_bytes > MAX_CALL_BYTES) {
    PyErr_SetString(PyExc_ValueError, "remember: x is no tensor, or the kernel takes too many arguments");
    return nullptr;
  }
  PyObject* torch_dtype = PyObject_GetAttrString(x_object, "dtype");
  if (torch_dtype == nullptr) return nullptr;
  Py_INCREF(owner);
  weight->calls.push_back({x.dtype, m, known, owner, torch_dtype, reinterpret_cast<int64_t*>(counter)});
  Py_RETURN_NONE;
}

PyObject* multiply(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return refuse_count("multiply");
  Weight* weight = weight_of(arguments[0]);
  if (weight == nullptr) return nullptr;
  PyObject* result = multiply_known(weight, arguments[1], arguments[2], false);
  if (result == nullptr && !PyErr_Occurred()) Py_RETURN_NONE;
  return result;
}

// The published weight that a call of the operator means, or null.
Weight* find(PyObject* parts, PyObject* format, PyObject* n, PyObject* k) {
  DLTensor tensor;
  const Py_ssize_t count = PyList_Check(parts) ? PyList_Size(parts) : 0;
  if (count == 0 || !read(PyList_GetItem(parts, 0), &tensor)) return nullptr;
  const auto place = published.find(tensor.data);
  if (place == published.end()) return nullptr;
  Weight* weight = place->second;
  if (static_cast<size_t>(count) != weight->parts.size() || !same(tensor, weight->parts[0], true)) return nullptr;
  for (Py_ssize_t i = 1; i < count; ++i)
    if (!read(PyList_GetItem(parts, i), &tensor) || !same(tensor, weight->parts[i], false)) return nullptr;
  if (PyLong_AsLongLong(n) != weight->n || PyLong_AsLongLong(k) != weight->k ||
      PyUnicode_Compare(format, weight->format) != 0 || PyErr_Occurred()) {
    PyErr_Clear();
    return nullptr;
  }
  return weight;
}

PyObject* linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 6 || exchange == nullptr) return refuse_count("linear");
  if (Weight* weight = find(arguments[1], arguments[3], arguments[4], arguments[5])) {
    PyObject* result = multiply_known(weight, arguments[0], arguments[2], true);
    if (result != nullptr || PyErr_Occurred()) return result;
  }
  return PyObject_CallFunctionObjArgs(in_python, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                                      arguments[5], nullptr);
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, "connect(exchange table, linear in Python, allocator, three functions of the driver)"},
    {"weight", make_weight, METH_VARARGS, "weight(views of its parts, format key, n, k): a handle"},
    {"publish", publish, METH_O, "publish(handle): let `linear` find it by the address of its codes"},
    {"remember", remember, METH_VARARGS, "remember(handle, x, m, address of a launch.Record, its owner, counter)"},
    {"multiply", fast(multiply), METH_FASTCALL, "multiply(handle, x, bias): the product, or None if not remembered"},
    {"linear", fast(linear), METH_FASTCALL, "linear(x, parts, bias, format key, n, k): the operator on a GPU"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shortcut", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__shortcut() {
  name_version = PyUnicode_InternFromString("_version");
  return PyModule_Create(&module);
}
