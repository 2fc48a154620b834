// Tensors of torch, checks and parallel loops for the ops, on torch's C interface (torch_c.h).

#pragma once

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "threads.h"
#include "torch_c.h"

namespace {

template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  return text.str();
}

// ValueError and IndexError in Python.
#define CHECK_VALUE(condition, ...) \
  if (!(condition)) [[unlikely]] throw std::invalid_argument(text_of(__VA_ARGS__))
#define CHECK_INDEX(condition, ...) \
  if (!(condition)) [[unlikely]] throw std::out_of_range(text_of(__VA_ARGS__))

// Of a function of torch_c.h: it has printed what was wrong.
inline void succeeded(AOTITorchError error) {
  if (error != 0) [[unlikely]] throw std::runtime_error("torch refused a call of a C++ kernel");
}

// The dtypes that the ops know; the numbers are torch's.
struct Dtype {
  int32_t code;
  friend bool operator==(Dtype a, Dtype b) { return a.code == b.code; }
};
inline const Dtype kFloat{aoti_torch_dtype_float32()}, kDouble{aoti_torch_dtype_float64()},
    kBFloat16{aoti_torch_dtype_bfloat16()}, kHalf{aoti_torch_dtype_float16()}, kChar{aoti_torch_dtype_int8()},
    kFloat8{aoti_torch_dtype_float8_e4m3fn()}, kShort{aoti_torch_dtype_int16()}, kInt{aoti_torch_dtype_int32()},
    kLong{aoti_torch_dtype_int64()};

inline int64_t bytes_of(Dtype dtype) {
  if (dtype == kDouble || dtype == kLong) return 8;
  if (dtype == kFloat || dtype == kInt) return 4;
  return dtype == kBFloat16 || dtype == kHalf || dtype == kShort ? 2 : 1;
}

inline std::ostream& operator<<(std::ostream& out, Dtype dtype) {
  for (const auto& [known, name] : {std::pair{kFloat, "float32"}, {kDouble, "float64"}, {kBFloat16, "bfloat16"},
                                    {kHalf, "float16"}, {kChar, "int8"}, {kFloat8, "float8_e4m3fn"}, {kShort, "int16"},
                                    {kInt, "int32"}, {kLong, "int64"}})
    if (dtype == known) return out << name;
  return out << "another dtype";
}

// Sizes or strides; of more dimensions than any op takes, the first ones.
struct Shape {
  int64_t dim, values[8];

  Shape(const int64_t* from, int64_t dim) : dim(dim) { std::copy_n(from, std::min<int64_t>(dim, 8), values); }
  Shape(std::initializer_list<int64_t> sizes) : Shape(sizes.begin(), static_cast<int64_t>(sizes.size())) {}

  friend bool operator==(const Shape& a, const Shape& b) {
    return a.dim == b.dim && std::equal(a.values, a.values + std::min<int64_t>(a.dim, 8), b.values);
  }
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << "[";
    for (int64_t i = 0; i < std::min<int64_t>(shape.dim, 8); ++i) out << (i == 0 ? "" : ", ") << shape.values[i];
    return out << "]";
  }
};

// A reference to a tensor. May be moved, not copied. What torch knows of it is asked for once: together, these questions
// take longer than some ops.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle)
      : handle_(handle),
        data_(read<void*>(aoti_torch_get_data_ptr)),
        sizes_(read<int64_t*>(aoti_torch_get_sizes)),
        strides_(read<int64_t*>(aoti_torch_get_strides)),
        dim_(read<int64_t>(aoti_torch_get_dim)),
        dtype_{read<int32_t>(aoti_torch_get_dtype)},
        is_contiguous_(read<bool>(aoti_torch_is_contiguous)),
        is_cpu_(read<int32_t>(aoti_torch_get_device_type) == aoti_torch_device_type_cpu()) {}
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    data_ = other.data_, sizes_ = other.sizes_, strides_ = other.strides_, dim_ = other.dim_, dtype_ = other.dtype_;
    is_contiguous_ = other.is_contiguous_, is_cpu_ = other.is_cpu_;
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  int64_t dim() const { return dim_; }
  Shape sizes() const { return {sizes_, dim_}; }
  Shape strides() const { return {strides_, dim_}; }
  // Of a dimension that there is.
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  Dtype dtype() const { return dtype_; }
  bool is_contiguous() const { return is_contiguous_; }
  // Whether each [i, ...] is contiguous; they may be apart, and do not overlap.
  bool has_contiguous_rows() const {
    int64_t row = 1;
    for (int64_t i = dim_ - 1; i > 0; row *= sizes_[i--])
      if (sizes_[i] != 1 && strides_[i] != row) return false;
    return sizes_[0] < 2 || strides_[0] >= row;
  }
  const char* place() const { return is_cpu_ ? "the CPU" : "another device"; }
  bool is_cpu() const { return is_cpu_; }
  template <class T = void>
  T* data() const { return static_cast<T*>(data_); }
  // False: its memory is another since this object was made.
  bool has_stayed() const { return read<void*>(aoti_torch_get_data_ptr) == data_; }

 private:
  AtenTensorHandle handle_ = nullptr;
  void* data_ = nullptr;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
  int64_t dim_ = 0;
  Dtype dtype_ = {};
  bool is_contiguous_ = true, is_cpu_ = true;

  template <class Value>
  Value read(AOTITorchError (*function)(AtenTensorHandle, Value*)) const {
    Value value;
    succeeded(function(handle_, &value));
    return value;
  }
};

// Small tensors that a program (program_cpu.cpp) has done with: `empty` gives them again, which saves torch's making of one.
struct Spare {
  static constexpr size_t MOST = 64;
  static constexpr int64_t MOST_BYTES = 1 << 16;
  std::vector<Tensor> tensors;

  // One with other strides than `empty` gives, if only in a dimension of one, is not kept.
  void add(Tensor&& tensor) {
    int64_t bytes = bytes_of(tensor.dtype()), stride = 1;
    for (int64_t i = tensor.dim() - 1; i >= 0; stride *= tensor.size(i--)) {
      if (tensor.stride(i) != stride) return;
      bytes *= tensor.size(i);
    }
    if (bytes <= MOST_BYTES && tensors.size() < MOST) tensors.push_back(std::move(tensor));
  }
  // With the first of these sizes, or none.
  Tensor take(const Shape& sizes, Dtype dtype) {
    for (Tensor& tensor : tensors)
      if (tensor.dtype() == dtype && tensor.sizes() == sizes) {
        Tensor found = std::move(tensor);
        if (&tensor != &tensors.back()) tensor = std::move(tensors.back());
        tensors.pop_back();
        return found;
      }
    return {};
  }
};
inline thread_local Spare* spare = nullptr;  // of the program that calls an op of this library now

// Larger tensors lie in memory as malloc gives it. torch asks for aligned memory, of which glibc cuts off the ends and keeps
// them: so what a tensor leaves is too small for the next one of its size, and steps take twice the memory they need.
constexpr int64_t LARGE = 1 << 16, ALIGNMENT = 64;

// A contiguous tensor on the CPU, not initialised.
inline Tensor empty(const Shape& sizes, Dtype dtype) {
  if (spare != nullptr)
    if (Tensor found = spare->take(sizes, dtype); found.get() != nullptr) return found;
  int64_t strides[8], stride = 1;
  for (int64_t i = sizes.dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes.values[i];
  }
  const int64_t bytes = bytes_of(dtype) * stride;
  const int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle made;
  if (bytes < LARGE) {
    succeeded(aoti_torch_empty_strided(sizes.dim, sizes.values, strides, dtype.code, cpu, 0, &made));
    return Tensor(made);
  }
  std::unique_ptr<void, void (*)(void*)> memory(std::malloc(bytes + ALIGNMENT), std::free);
  if (memory == nullptr) throw std::bad_alloc();
  const auto begin = reinterpret_cast<uintptr_t>(memory.get()) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
  const auto give_back = [](void*, void* whole) { std::free(whole); };
  succeeded(torch_from_blob(reinterpret_cast<void*>(begin), sizes.dim, sizes.values, strides, 0, dtype.code, cpu, -1,
                            &made, aoti_torch_layout_strided(), nullptr, 0, give_back, memory.get()));
  memory.release();
  return Tensor(made);
}

inline int64_t num_threads() {
  uint32_t threads;
  succeeded(torch_get_num_threads(&threads));
  return threads;
}

// work(begin, end) for ranges of [begin, end), of at least `grain` where there are several, on as many threads as torch has.
template <class Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Work& work) {
  team::parallel_for(num_threads(), begin, end, grain, work);
}

}  // namespace
