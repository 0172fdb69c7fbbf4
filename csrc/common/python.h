// DLPack conversion in the bindings: any array with `__dlpack__` converts to `tlt::Tensor`. None
// becomes an undefined tensor, for arguments that may be null.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "common/groups.h"
#include "common/tensor.h"

namespace pybind11::detail {

template <>
struct type_caster<tlt::Tensor> {
 public:
  PYBIND11_TYPE_CASTER(tlt::Tensor, const_name("array"));

  bool load(handle source, bool) {
    if (source.is_none()) return true;
    try {
      capsule_ = export_dlpack(source);
    } catch (error_already_set& error) {
      if (!error.matches(PyExc_BufferError)) throw;
      throw std::invalid_argument("an array cannot be exported by DLPack: " +
                                  str(error.value()).cast<std::string>());
    }
    const auto* managed =
        static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
    if (managed == nullptr) throw error_already_set();
    const DLTensor& array = managed->dl_tensor;
    if (array.ndim > tlt::kMaxDims) {
      throw std::invalid_argument("an array has " + std::to_string(array.ndim) +
                                  " axes; expected at most " + std::to_string(tlt::kMaxDims));
    }
    value.data = static_cast<char*>(array.data) + array.byte_offset;
    value.device = array.device;
    if (value.device.device_type == kDLCUDAHost) value.device = {kDLCPU, 0};  // pinned memory
    value.dtype = tlt::dtype_of(array.dtype);
    value.ndim = array.ndim;
    int64_t dense = 1;
    for (int i = array.ndim - 1; i >= 0; --i) {
      value.shape[i] = array.shape[i];
      value.stride[i] = array.strides != nullptr ? array.strides[i] : dense;
      dense *= array.shape[i];
    }
    if (value.dtype == tlt::DType::kOther) {
      throw tlt::DTypeError("unsupported dtype (DLPack code " + std::to_string(array.dtype.code) +
                            ", " + std::to_string(array.dtype.bits) +
                            " bits); expected float16, bfloat16, float32, float64, int32, int64,"
                            " uint8 or bool");
    }
    // A view of freed storage that has an offset passes: torch adds the offset to the null address.
    if (array.data == nullptr && value.numel() > 0) {
      throw std::invalid_argument(
          "an array has no memory (a fake tensor of torch, or one whose storage was freed)");
    }
    if (reinterpret_cast<uintptr_t>(value.data) % tlt::bytes_of(value.dtype) != 0) {
      throw std::invalid_argument(std::string("an array of ") + tlt::name_of(value.dtype) +
                                  " is not aligned to its elements; pass a copy");
    }
    return true;
  }

 private:
  // Stream -1 requests no synchronisation, which would invalidate a graph capture. Torch tensors
  // use torch's export function, at a tenth of the cost of the protocol's Python wrapper.
  static object export_dlpack(handle source) {
    const Torch& torch = find_torch();
    if (torch.to_dlpack != nullptr && PyType_IsSubtype(Py_TYPE(source.ptr()), torch.tensor_type)) {
      PyObject* const capsule = PyObject_CallOneArg(torch.to_dlpack, source.ptr());
      if (capsule == nullptr) throw error_already_set();
      return reinterpret_steal<object>(capsule);
    }
    if (!hasattr(source, "__dlpack__")) {
      throw tlt::DTypeError(std::string("expected an array that exports DLPack, got ") +
                            Py_TYPE(source.ptr())->tp_name);
    }
    const auto device = source.attr("__dlpack_device__")().cast<tuple>();
    if (device[0].cast<int>() == kDLCUDA) return source.attr("__dlpack__")(arg("stream") = -1);
    return source.attr("__dlpack__")();
  }

  struct Torch {
    PyTypeObject* tensor_type = nullptr;
    PyObject* to_dlpack = nullptr;  // null until torch is imported
  };

  static const Torch& find_torch() {
    static Torch found;
    if (found.to_dlpack != nullptr) return found;
    PyObject* const modules = PyImport_GetModuleDict();
    PyObject* const torch = PyDict_GetItemString(modules, "torch");
    PyObject* const dlpack = PyDict_GetItemString(modules, "torch.utils.dlpack");
    if (torch == nullptr || dlpack == nullptr) return found;
    const object type = getattr(torch, "Tensor", none()),
                 call = getattr(dlpack, "to_dlpack", none());
    if (!PyType_Check(type.ptr()) || call.is_none()) return found;  // torch is being imported
    found.tensor_type = reinterpret_cast<PyTypeObject*>(object(type).release().ptr());
    found.to_dlpack = object(call).release().ptr();
    return found;
  }

  object capsule_;  // keeps the export alive for the length of the call
};

// A group of arrays, from the named tuple with its name. Fields that the op does not read stay
// undefined.
template <typename G>
struct type_caster<G, enable_if_t<std::is_base_of_v<tlt::Group, G>>> {
 public:
  PYBIND11_TYPE_CASTER(G, const_name("group"));

  bool load(handle source, bool convert) {
    const auto fields = value.fields();
    const char* type_name = Py_TYPE(source.ptr())->tp_name;
    if (!PyTuple_Check(source.ptr()) || std::strcmp(type_name, G::kName) != 0) {
      throw tlt::DTypeError(std::string("expected a tlt_ext.") + G::kName + ", got " + type_name);
    }
    const auto size = static_cast<size_t>(PyTuple_GET_SIZE(source.ptr()));
    if (size != fields.size()) {  // another tuple of this name
      throw tlt::DTypeError(std::string("expected a tlt_ext.") + G::kName + " of " +
                            std::to_string(fields.size()) + " fields, got " + std::to_string(size));
    }
    for (size_t i = 0; i < fields.size(); ++i) {
      if (!value.reads(fields[i])) continue;
      arrays_[i].load(PyTuple_GET_ITEM(source.ptr(), i), convert);
      *fields[i] = static_cast<tlt::Tensor&>(arrays_[i]);
    }
    return true;
  }

 private:
  using Fields = decltype(std::declval<G&>().fields());
  std::array<type_caster<tlt::Tensor>, std::tuple_size_v<Fields>> arrays_;
};

}  // namespace pybind11::detail
