// A view of the caller's array, and the checks that every op makes on its arguments.
//
// Arrays enter as DLPack capsules (python.h); the core never owns, allocates or frees them. Checks
// run in the order device, dtype, layout, shape, value. A message names the op, the argument, the
// expected value and the actual one.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "third_party/dlpack.h"

namespace tlt {

constexpr int kMaxDims = 6;

enum class DType { kFloat32, kFloat16, kBFloat16, kFloat64, kInt64, kInt32, kUInt8, kBool, kOther };

DType dtype_of(DLDataType type);
const char* name_of(DType dtype);
int64_t bytes_of(DType dtype);

struct Tensor {
  void* data = nullptr;
  DLDevice device{kDLCPU, 0};
  DType dtype = DType::kOther;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};  // in elements

  bool defined() const { return ndim >= 0 && dtype != DType::kOther; }
  bool is_cuda() const { return device.device_type == kDLCUDA; }
  int64_t numel() const;
  template <typename T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
};

// Raised as TypeError (a wrong dtype); every other failed check is std::invalid_argument
// (ValueError).
struct DTypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The checks of one argument:
//   Arg("rms_norm", "x", x).on(out).is({DType::kFloat32}).dense_last().shape({rows, kAny});
// kAny in a shape matches any extent.
constexpr int64_t kAny = -1;

class Arg {
 public:
  Arg(const char* op, const char* name, const Tensor& tensor)
      : op_(op), name_(name), tensor_(tensor) {}

  const Arg& on(const Tensor& other) const;                               // same device
  const Arg& is(std::initializer_list<DType> wanted) const;               // dtype is one of
  const Arg& is_like(const char* other_name, const Tensor& other) const;  // same dtype as another
  const Arg& dense_last() const;  // last axis contiguous; rows may overlap, as in a broadcast
  const Arg& separate() const;    // the same without overlap, for arrays that an op writes or tiles
  const Arg& dense() const;       // C-contiguous
  const Arg& shape(std::initializer_list<int64_t> wanted) const;
  [[noreturn]] void fail(const std::string& wanted, const std::string& got) const;

 private:
  std::string strides() const;

  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

// Throws std::invalid_argument("<op>: <message>") unless ok.
void require(bool ok, const char* op, const std::string& message);

inline const std::initializer_list<DType> kFloating = {DType::kFloat32, DType::kFloat16,
                                                       DType::kBFloat16};

}  // namespace tlt
