// The operator for calls that were seen before: from Python's objects to the driver, or on a CPU to the library of
// kernels, with no Python in between.
//
// Python remains the implementation. It checks a call, plans it, compiles, launches, and then tells this module what it
// found: tensors of a weight, and the launch for x of a dtype and a number of rows. A later call whose tensors are the
// same memory, shapes and dtypes is launched from here; whatever differs in the least goes to Python, which has the
// words for what is wrong. Neither libtorch's C++ interface nor CUDA's headers are needed: tensors are read through the
// DLPack exchange table of torch.Tensor, the driver's functions come as addresses, and of Python's C interface only the
// part that is stable is used, so that one file serves every Python and every torch that has such a table.
//
// A call gets here twice: in front of the dispatcher (`operate`), which converts each argument on its way in and once
// more on its way to a function of Python; and behind it (`linear`). In front it is served only where the dispatcher
// would do nothing but go straight on to `linear`: see `unobserved` and `ordinary`.
//
// All state is read and written under the interpreter's lock, which is let go while the driver launches, or the CPU
// multiplies.
#include "shortcut_calls.hpp"

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace {

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
    Py_DECREF(call.sizes);
    Py_DECREF(call.strides);
    Py_DECREF(call.counters);
  }
  for (const Part& part : weight->parts) Py_XDECREF(part.plain);
  delete weight;
}

PyObject* refuse_count(const char* name) {
  PyErr_Format(PyExc_TypeError, "%s: wrong number of arguments", name);
  return nullptr;
}

void take(PyObject** place, PyObject* object) {
  Py_INCREF(object);
  PyObject* before = *place;
  *place = object;
  Py_XDECREF(before);
}

PyObject* connect(PyObject*, PyObject* arguments) {
  PyObject *capsule, *function, *allocator, *allocator_on_cpu, *byte, *threads_of_torch;
  unsigned long long launch, device, capturing;
  Py_ssize_t record_bytes, cpu_record_bytes;
  if (!PyArg_ParseTuple(arguments, "OOOOOOnnKKK", &capsule, &function, &allocator, &allocator_on_cpu, &byte,
                        &threads_of_torch, &record_bytes, &cpu_record_bytes, &launch, &device, &capturing))
    return nullptr;
  if (record_bytes != static_cast<Py_ssize_t>(sizeof(Launch)) ||
      cpu_record_bytes != static_cast<Py_ssize_t>(sizeof(CpuLaunch))) {
    PyErr_SetString(PyExc_ImportError, "_shortcut was built for another launch.Record or cpu.launch.Record");
    return nullptr;
  }
  auto* table = static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (table == nullptr) return nullptr;
  if (table->version.major != DLPACK_MAJOR || table->read == nullptr || table->current_stream == nullptr) {
    PyErr_SetString(PyExc_ImportError, "torch's DLPack exchange table is of another version");
    return nullptr;
  }
  exchange = table;
  take(&in_python, function);
  take(&allocate, allocator);
  take(&allocate_on_cpu, allocator_on_cpu);
  take(&threads, threads_of_torch);
  take(&uint8, byte);
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
    weight->parts.push_back({tensor.data, tensor.dtype, {tensor.shape, tensor.shape + tensor.ndim}, nullptr});
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

bool fits(const Launch& launch) {
  return launch.count <= MAX_PARAMETERS && launch.call_bytes <= MAX_CALL_BYTES &&
         (launch.image == nullptr || fits(*launch.image));
}

PyObject* remember(PyObject*, PyObject* arguments) {
  PyObject *capsule, *x_object, *owner, *counters;
  long long m;
  unsigned long long launch;
  int on_cpu;
  if (!PyArg_ParseTuple(arguments, "OOLKpOO!", &capsule, &x_object, &m, &launch, &on_cpu, &owner, &PyDict_Type,
                        &counters))
    return nullptr;
  PyObject* address = PyDict_GetItemString(counters, "linear");
  void* counter = address == nullptr ? nullptr : PyLong_AsVoidPtr(address);
  if (counter == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "remember: no counter for 'linear'");
    return nullptr;
  }
  Weight* weight = weight_of(capsule);
  if (weight == nullptr) return nullptr;
  const auto* known = on_cpu ? nullptr : reinterpret_cast<const Launch*>(launch);
  const auto* known_on_cpu = on_cpu ? reinterpret_cast<const CpuLaunch*>(launch) : nullptr;
  DLTensor x;
  if (!read(x_object, &x) || (known != nullptr && !fits(*known))) {
    PyErr_SetString(PyExc_ValueError, "remember: x is no tensor, or the kernel takes too many arguments");
    return nullptr;
  }
  PyObject* torch_dtype = PyObject_GetAttrString(x_object, "dtype");
  PyObject *sizes = nullptr, *strides = nullptr;
  const int64_t rows = m;  // an output is [rows, n]
  if (torch_dtype == nullptr || !layout(&rows, 2, weight->n, &sizes, &strides)) {
    Py_XDECREF(torch_dtype);
    Py_XDECREF(sizes);
    Py_XDECREF(strides);
    return nullptr;
  }
  Py_INCREF(owner);
  Py_INCREF(counters);
  weight->calls.push_back(
      {x.dtype, m, known, known_on_cpu, owner, torch_dtype, sizes, strides, counters, static_cast<int64_t*>(counter)});
  // Python has just launched it on this stream: so the next call may start early, be it the one that a graph keeps.
  void* stream = nullptr;
  if (known != nullptr && exchange->current_stream(weight->device.type, weight->device.id, &stream) == 0)
    settled(weight, stream);
  PyErr_Clear();
  Py_RETURN_NONE;
}

PyObject* multiply(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4) return refuse_count("multiply");
  Weight* weight = weight_of(arguments[0]);
  if (weight == nullptr) return nullptr;
  PyObject* result = multiply_known(weight, arguments[1], arguments[2], arguments[3]);
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
    PyObject* result = multiply_known(weight, arguments[0], arguments[2], nullptr);
    if (result != nullptr || PyErr_Occurred()) return result;
  }
  return PyObject_CallFunctionObjArgs(in_python, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                                      arguments[5], nullptr);
}

// ---- in front of the dispatcher

// Two words of libc10 for each thread: the keys that its dispatcher adds to those of a call's tensors, and leaves out.
// Modes, autocast, tracing, functional transforms and lowered operators are such keys. They are compared, not understood.
struct Keys {
  uint64_t words[2];
  bool operator==(const Keys& other) const { return words[0] == other.words[0] && words[1] == other.words[1]; }
};

// This thread's; null where they cannot be found.
const Keys* thread_keys() {
#if defined(__linux__)
  static thread_local const Keys* found = nullptr;
  if (found == nullptr) {
    static void* c10 = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    if (c10 != nullptr) found = static_cast<const Keys*>(dlsym(c10, "_ZN3c104impl26raw_local_dispatch_key_setE"));
  }
  return found;
#else
  return nullptr;
#endif
}

PyObject *dispatched = nullptr;  // the operator
std::vector<Keys> straight;      // keys with which the dispatcher goes straight on to `linear`
std::vector<PyObject*> watching;  // functions that say whether something else wants to see calls
std::vector<PyObject*> types;    // of ordinary tensors
PyObject *grad_enabled = nullptr, *is_neg = nullptr, *name_requires_grad = nullptr;

// Whether something is true; what cannot be asked is.
bool is_true(PyObject* answer) {
  const bool result = answer != Py_False;
  Py_XDECREF(answer);
  if (answer == nullptr) PyErr_Clear();
  return result;
}

// Whether neither the dispatcher nor Python's modes nor a profiler would do anything with a call of ordinary tensors.
bool unobserved() {
  const Keys* keys = thread_keys();
  bool known = false;
  if (keys != nullptr)
    for (const Keys& each : straight) known |= *keys == each;
  if (!known) return false;
  for (PyObject* watches : watching)
    if (is_true(PyObject_CallNoArgs(watches))) return false;
  return true;
}

// Whether no subclass has a say in what is done with a tensor, and it holds its values as they are.
bool ordinary(PyObject* tensor) {
  bool known = false;
  for (PyObject* type : types) known |= reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type;
  return known && !is_true(PyObject_CallFunctionObjArgs(is_neg, tensor, nullptr));
}

// `ordinary` for the tensors of a weight, remembered as long as they are the same objects.
bool ordinary_parts(Weight* weight, PyObject* parts) {
  for (size_t i = 0; i < weight->parts.size(); ++i) {
    PyObject *&known = weight->parts[i].plain, *tensor = PyList_GetItem(parts, i);
    if (known != nullptr && PyWeakref_GetObject(known) == tensor) continue;
    if (tensor == nullptr || !ordinary(tensor)) return false;
    PyObject *before = known, *now = PyWeakref_NewRef(tensor, nullptr);
    if (now == nullptr) {
      PyErr_Clear();
      return false;
    }
    known = now;
    Py_XDECREF(before);
  }
  return true;
}

bool learns(PyObject* tensor) { return tensor != Py_None && is_true(PyObject_GetAttr(tensor, name_requires_grad)); }

PyObject* operate(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  if (count == 6 && names == nullptr && !published.empty() && unobserved()) {
    PyObject *x = arguments[0], *parts = arguments[1], *bias = arguments[2];
    if (ordinary(x) && (bias == Py_None || ordinary(bias)) &&
        !(is_true(PyObject_CallNoArgs(grad_enabled)) && (learns(x) || learns(bias)))) {
      if (Weight* weight = find(parts, arguments[3], arguments[4], arguments[5])) {
        PyObject *held = weight->capsule, *result = nullptr;
        Py_INCREF(held);
        if (ordinary_parts(weight, parts)) result = multiply_known(weight, x, bias, nullptr);
        Py_DECREF(held);
        if (result != nullptr || PyErr_Occurred()) return result;
      }
    }
  }
  PyObject *positional = PyTuple_New(count), *named = nullptr, *result = nullptr;
  const Py_ssize_t more = names == nullptr ? 0 : PyTuple_Size(names);
  if (positional != nullptr && more != 0) named = PyDict_New();
  if (positional != nullptr && (more == 0 || named != nullptr)) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      Py_INCREF(arguments[i]);
      PyTuple_SetItem(positional, i, arguments[i]);
    }
    bool set = true;
    for (Py_ssize_t i = 0; i < more; ++i)
      set &= PyDict_SetItem(named, PyTuple_GetItem(names, i), arguments[count + i]) == 0;
    if (set) result = PyObject_Call(dispatched, positional, named);
  }
  Py_XDECREF(positional);
  Py_XDECREF(named);
  return result;
}

PyObject* keys(PyObject*, PyObject*) {
  const Keys* found = thread_keys();
  if (found == nullptr) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found), sizeof(Keys));
}

PyObject* lead(PyObject*, PyObject* arguments) {
  PyObject *operation, *key_sets, *functions, *classes, *grad, *neg;
  if (!PyArg_ParseTuple(arguments, "OO!O!O!OO", &operation, &PyTuple_Type, &key_sets, &PyTuple_Type, &functions,
                        &PyTuple_Type, &classes, &grad, &neg))
    return nullptr;
  straight.clear();
  for (Py_ssize_t i = 0; i < PyTuple_Size(key_sets); ++i) {
    const char* words = PyBytes_AsString(PyTuple_GetItem(key_sets, i));
    if (words == nullptr || PyBytes_Size(PyTuple_GetItem(key_sets, i)) != sizeof(Keys)) return refuse_count("lead");
    straight.emplace_back();
    std::memcpy(&straight.back(), words, sizeof(Keys));
  }
  const auto fill = [](std::vector<PyObject*>& list, PyObject* objects) {  // what was there stays alive: seldom, little
    list.clear();
    for (Py_ssize_t i = 0; i < PyTuple_Size(objects); ++i) {
      list.push_back(PyTuple_GetItem(objects, i));
      Py_INCREF(list.back());
    }
  };
  fill(watching, functions);
  fill(types, classes);
  take(&dispatched, operation);
  take(&grad_enabled, grad);
  take(&is_neg, neg);
  Py_RETURN_NONE;
}

PyObject* trust(PyObject*, PyObject* type) {
  Py_INCREF(type);
  types.push_back(type);
  Py_RETURN_NONE;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyCFunction fast_with_names(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"connect", connect, METH_VARARGS, "connect(exchange table, linear in Python, allocators on a GPU and a CPU, torch.uint8, torch.get_num_threads, sizes of launch.Record and cpu.launch.Record, three functions of the driver, or zeros)"},
    {"weight", make_weight, METH_VARARGS, "weight(views of its parts, format key, n, k): a handle"},
    {"publish", publish, METH_O, "publish(handle): let `linear` find it by the address of its codes"},
    {"remember", remember, METH_VARARGS, "remember(handle, x, m, address of a launch.Record or cpu.launch.Record, whether it is the latter, its owner, counters)"},
    {"multiply", fast(multiply), METH_FASTCALL, "multiply(handle, x, bias, operator): the product, or None if not remembered"},
    {"linear", fast(linear), METH_FASTCALL, "linear(x, parts, bias, format key, n, k): the operator on a GPU"},
    {"keys", keys, METH_NOARGS, "keys(): what this thread adds to and leaves out of a dispatch, 16 bytes; None if unknown"},
    {"lead", lead, METH_VARARGS, "lead(operator, keys, watching functions, types, grad enabled, is negated): for `operate`"},
    {"trust", trust, METH_O, "trust(type): tensors of this subclass are ordinary ones to `operate`"},
    {"operate", fast_with_names(operate), METH_FASTCALL | METH_KEYWORDS, "the operator, in front of the dispatcher"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shortcut", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__shortcut() {
  name_version = PyUnicode_InternFromString("_version");
  name_requires_grad = PyUnicode_InternFromString("requires_grad");
  return PyModule_Create(&module);
}
