// What makes C++ functions ops of torch, and which kernels they call. An op's .cpp file includes this once, after the header
// of its type `Kernels`.

#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "direct.h"

namespace {

// The kernels for the best instruction set that this CPU has, and, while a test asks for them, those of another one.
const Kernels* best = nullptr;
thread_local const Kernels* named = nullptr;

inline const Kernels& chosen() { return named != nullptr ? *named : *best; }

// Arguments are owned by the function that takes them, and so are the boxes that optional ones come in.
template <class T>
T argument(StableIValue value) {
  if constexpr (std::is_same_v<T, Tensor>) {
    return Tensor(reinterpret_cast<AtenTensorHandle>(value));
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    const std::unique_ptr<StableIValue> boxed(reinterpret_cast<StableIValue*>(value));
    if (boxed == nullptr) return std::nullopt;
    return argument<Tensor>(*boxed);
  } else if constexpr (std::is_same_v<T, std::string>) {
    const auto handle = reinterpret_cast<StringHandle>(value);
    size_t length = 0;
    const char* characters = nullptr;
    succeeded(torch_string_length(handle, &length));
    succeeded(torch_string_c_str(handle, &characters));
    std::string text(characters, length);
    succeeded(torch_delete_string(handle));
    return text;
  } else if constexpr (std::is_same_v<T, bool>) {
    return (value & 0xff) != 0;
  } else {
    static_assert(std::is_same_v<T, int64_t> || std::is_same_v<T, double>);
    return __builtin_bit_cast(T, value);
  }
}

inline void put(Slot* const* slots, Tensor result) { *slots[0] = std::move(result); }
template <class... Results>
void put(Slot* const* slots, std::tuple<Results...> results) {
  std::apply([&](auto&... each) { ((*slots++[0] = std::move(each)), ...); }, results);
}

inline void give(StableIValue* stack, Tensor result) { stack[0] = reinterpret_cast<StableIValue>(result.release()); }
template <class... Results>
void give(StableIValue* stack, std::tuple<Results...> results) {
  std::apply([&](auto&... each) { (give(stack++, std::move(each)), ...); }, results);
}

// An op as torch calls it: the arguments are on the stack, and the results take their place.
template <auto op>
struct Boxed;
template <class Result, class... Args, Result (*op)(Args...)>
struct Boxed<op> {
  static void call(StableIValue* stack, uint64_t, uint64_t) { call_with(stack, std::index_sequence_for<Args...>()); }
  static void direct(const void* const* arguments, Slot* const* results, Spare* of_program) {
    spare = of_program;
    const std::unique_ptr<Spare*, void (*)(Spare**)> end(&spare, [](Spare** each) { *each = nullptr; });
    direct_with(arguments, results, std::index_sequence_for<Args...>());
  }

 private:
  template <size_t... I>
  static void direct_with(const void* const* arguments, Slot* const* results, std::index_sequence<I...>) {
    put(results, op(*static_cast<const std::remove_cvref_t<Args>*>(arguments[I])...));
  }
  template <size_t... I>
  static void call_with(StableIValue* stack, std::index_sequence<I...>) {
    std::tuple<std::remove_cvref_t<Args>...> args{argument<std::remove_cvref_t<Args>>(stack[I])...};
    give(stack, std::apply(op, args));
  }
};

struct Op {
  const char* name;
  void (*call)(StableIValue*, uint64_t, uint64_t);
  Direct direct;
};
extern const std::vector<Op> ops;  // of the .cpp file

// Here and not in Python, which would add some 5 us to each call.
inline void register_ops() {
  constexpr uint64_t version = uint64_t{2} << 56 | uint64_t{11} << 48;  // of torch, that the interface is of
  TorchLibraryHandle library;
  succeeded(aoti_torch_library_init_impl("compiled_llm", "CPU", __FILE__, __LINE__, &library));
  for (const Op& op : ops) succeeded(torch_library_impl(library, op.name, op.call, version));
}

}  // namespace

// For ../native.py, which calls this once with `always`: that registers the ops. Afterwards it calls it for one thread, or
// with null for none.
extern "C" __attribute__((visibility("default"))) void use_kernels(const void* kernels, bool always) {
  const bool first = best == nullptr;
  (always ? best : named) = static_cast<const Kernels*>(kernels);
  if (first) register_ops();
}

// For ../native.py.
extern "C" __attribute__((visibility("default"))) void rest_threads() { team::first_team().rest(); }

// For ../native_program.py: how an op of this library is called without torch; null if it has none of that name.
extern "C" __attribute__((visibility("default"))) Direct find_op(const char* name) {
  for (const Op& op : ops)
    if (std::string_view(op.name) == name) return op.direct;
  return nullptr;
}
