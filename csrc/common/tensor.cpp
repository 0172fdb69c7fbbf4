#include "common/tensor.h"

#include <algorithm>
#include <array>
#include <utility>

namespace tlt {

DType dtype_of(DLDataType type) {
  if (type.lanes != 1) return DType::kOther;
  if (type.code == kDLFloat && type.bits == 32) return DType::kFloat32;
  if (type.code == kDLFloat && type.bits == 16) return DType::kFloat16;
  if (type.code == kDLFloat && type.bits == 64) return DType::kFloat64;
  if (type.code == kDLBfloat && type.bits == 16) return DType::kBFloat16;
  if (type.code == kDLInt && type.bits == 64) return DType::kInt64;
  if (type.code == kDLInt && type.bits == 32) return DType::kInt32;
  if (type.code == kDLUInt && type.bits == 8) return DType::kUInt8;
  if (type.code == kDLBool) return DType::kBool;
  return DType::kOther;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat64:
      return "float64";
    case DType::kInt64:
      return "int64";
    case DType::kInt32:
      return "int32";
    case DType::kUInt8:
      return "uint8";
    case DType::kBool:
      return "bool";
    case DType::kOther:
      break;
  }
  return "None";  // no array: unsupported dtypes are rejected when an array is imported
}

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUInt8:
    case DType::kBool:
      return 1;
    case DType::kOther:
      break;
  }
  return 0;
}

int64_t Tensor::numel() const {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

namespace {

std::string device_name(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  if (device.device_type == kDLCUDA) return "cuda:" + std::to_string(device.device_id);
  return "device type " + std::to_string(device.device_type);
}

// Whether no two elements share an address (as in a broadcast array) and no stride is negative.
// Axes may lie in memory in any order.
bool has_separate_elements(const Tensor& tensor) {
  std::array<std::pair<int64_t, int64_t>, kMaxDims> axes;  // (stride, extent)
  int count = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] > 1) axes[count++] = {tensor.stride[i], tensor.shape[i]};
  }
  std::sort(axes.begin(), axes.begin() + count);
  int64_t span = 1;  // elements from the first to the last of the axes so far
  for (int i = 0; i < count; ++i) {
    const auto [stride, extent] = axes[i];
    if (stride < span) return false;
    span += stride * (extent - 1);
  }
  return true;
}

std::string shape_text(const int64_t* begin, const int64_t* end) {
  std::string text = "[";
  for (const int64_t* it = begin; it != end; ++it) {
    if (it != begin) text += ", ";
    text += *it == kAny ? "*" : std::to_string(*it);
  }
  return text + "]";
}

}  // namespace

void Arg::fail(const std::string& wanted, const std::string& got) const {
  throw std::invalid_argument(std::string(op_) + ": " + name_ + ": expected " + wanted + ", got " +
                              got);
}

const Arg& Arg::on(const Tensor& other) const {
  const bool same = tensor_.device.device_type == other.device.device_type &&
                    tensor_.device.device_id == other.device.device_id;
  if (!same) fail("device " + device_name(other.device), device_name(tensor_.device));
  return *this;
}

const Arg& Arg::is(std::initializer_list<DType> wanted) const {
  std::string names;
  for (DType dtype : wanted) {
    if (tensor_.dtype == dtype) return *this;
    names += (names.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  throw DTypeError(std::string(op_) + ": " + name_ + ": expected dtype " + names + ", got " +
                   name_of(tensor_.dtype));
}

const Arg& Arg::is_like(const char* other_name, const Tensor& other) const {
  if (tensor_.dtype != other.dtype) {
    throw DTypeError(std::string(op_) + ": " + name_ + ": expected the dtype of " + other_name +
                     ", " + name_of(other.dtype) + ", got " + name_of(tensor_.dtype));
  }
  return *this;
}

const Arg& Arg::dense_last() const {
  if (tensor_.numel() == 0) return *this;  // the strides of an empty array have no meaning
  const int last = tensor_.ndim - 1;
  if (last >= 0 && tensor_.shape[last] > 1 && tensor_.stride[last] != 1) {
    fail("a contiguous last axis", "stride " + std::to_string(tensor_.stride[last]));
  }
  for (int i = 0; i < last; ++i) {
    if (tensor_.shape[i] > 1 && tensor_.stride[i] < 0) fail("strides of 0 or more", strides());
  }
  return *this;
}

const Arg& Arg::separate() const {
  dense_last();
  if (tensor_.numel() > 0 && !has_separate_elements(tensor_)) {
    fail("elements that share no memory",
         "shape " + shape_text(tensor_.shape, tensor_.shape + tensor_.ndim) + " with " + strides());
  }
  return *this;
}

std::string Arg::strides() const {
  return "strides " + shape_text(tensor_.stride, tensor_.stride + tensor_.ndim);
}

const Arg& Arg::dense() const {
  int64_t stride = 1;
  for (int i = tensor_.ndim - 1; i >= 0; --i) {
    if (tensor_.shape[i] > 1 && tensor_.stride[i] != stride && tensor_.numel() > 0) {
      fail("a contiguous array", strides());
    }
    stride *= tensor_.shape[i];
  }
  return *this;
}

const Arg& Arg::shape(std::initializer_list<int64_t> wanted) const {
  bool same = tensor_.ndim == static_cast<int>(wanted.size());
  const int64_t* want = wanted.begin();
  for (int i = 0; same && i < tensor_.ndim; ++i) {
    same = want[i] == kAny || want[i] == tensor_.shape[i];
  }
  if (!same) {
    fail("shape " + shape_text(wanted.begin(), wanted.end()),
         shape_text(tensor_.shape, tensor_.shape + tensor_.ndim));
  }
  return *this;
}

void require(bool ok, const char* op, const std::string& message) {
  if (!ok) throw std::invalid_argument(std::string(op) + ": " + message);
}

}  // namespace tlt
