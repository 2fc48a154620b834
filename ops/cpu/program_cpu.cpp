// Runs calls of ops one after the other, as a part of the program of a compiled graph has them. ../native_program.py says
// what a program is, and writes it as the words that `make_program` reads.

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "direct.h"

namespace {

constexpr size_t MOST_ARGUMENTS = 32, MOST_RESULTS = 4, MOST_DIMENSIONS = 8;

enum Kind : int64_t { TENSOR, OPTIONAL, INTEGER, SIZE, NUMBER, FLAG, TEXT };

// Of a VIEW the arguments are a tensor, sizes, strides and an offset; of an EMPTY tensor the number of a dtype, sizes and
// strides. A KERNEL is a function of torch's compiler: void (pointers to tensors' memory and int64_t, in any order).
enum What : int64_t { OP, VIEW, EMPTY, KERNEL };

struct Argument {
  Kind kind;
  int64_t value;  // INTEGER; the number of a slot, a size or a text
  double number;
  bool flag;
};

struct Step {
  What what;
  const void* call;  // a Direct, or a kernel
  std::vector<Argument> arguments;
  std::vector<int64_t> results;  // slots
  std::vector<int64_t> last;     // slots that no later step uses
};

struct Program {
  int64_t slots, inputs;
  int64_t arguments;  // the first of the inputs: the graph's own, which may be the same tensors in many calls
  std::vector<int64_t> outputs;
  std::vector<std::string> texts;
  std::vector<Step> steps;
  std::vector<bool> is_shared;  // of each slot: it is a view, or there is one of it
};

// A program with arguments that are the same tensors in each call.
struct Bound {
  std::vector<Slot> slots;
  Spare spare;
  bool is_filled = false;
  std::atomic<bool> is_busy = false;
};

// Reads words one after the other.
struct Reader {
  const int64_t* at;

  int64_t next() { return *at++; }
  std::vector<int64_t> list() {
    const int64_t count = next();
    at += count;
    return {at - count, at};
  }
  Argument argument() {
    const auto kind = static_cast<Kind>(next());
    const int64_t value = next();
    return {kind, value, __builtin_bit_cast(double, value), value != 0};
  }
  Step step() {
    Step step;
    step.what = static_cast<What>(next());
    step.call = reinterpret_cast<const void*>(next());
    const int64_t count = next();
    for (int64_t i = 0; i < count; ++i) step.arguments.push_back(argument());
    step.results = list();
    step.last = list();
    return step;
  }
};

int64_t integer(const Argument& argument, const int64_t* sizes) {
  return argument.kind == SIZE ? sizes[argument.value] : argument.value;
}

void view(const Step& step, std::vector<Slot>& slots, const int64_t* sizes) {
  const size_t dimensions = step.arguments.size() / 2 - 1;
  std::array<int64_t, 2 * MOST_DIMENSIONS + 1> values;
  for (size_t i = 1; i < step.arguments.size(); ++i) values[i - 1] = integer(step.arguments[i], sizes);
  AtenTensorHandle made;
  succeeded(aoti_torch__reinterpret_tensor(slots[step.arguments[0].value]->get(), dimensions, values.data(),
                                           values.data() + dimensions, values[2 * dimensions], &made));
  slots[step.results[0]] = Tensor(made);
}

// In the order of DTYPES in native_program.py.
Dtype dtype_of(int64_t number) {
  static const std::array<Dtype, 11> dtypes = {Dtype{aoti_torch_dtype_bool()}, Dtype{aoti_torch_dtype_uint8()}, kChar,
                                               kShort, kInt, kLong, kHalf, kBFloat16, kFloat,
                                               kDouble, kFloat8};
  return dtypes.at(number);
}

void make_empty(const Step& step, std::vector<Slot>& slots, const int64_t* sizes) {
  const size_t dimensions = (step.arguments.size() - 1) / 2;
  std::array<int64_t, 2 * MOST_DIMENSIONS> values;
  for (size_t i = 1; i < step.arguments.size(); ++i) values[i - 1] = integer(step.arguments[i], sizes);
  const Dtype dtype = dtype_of(step.arguments[0].value);
  const int64_t* const strides = values.data() + dimensions;
  bool is_contiguous = true;
  int64_t stride = 1;
  for (size_t i = dimensions; i-- > 0; stride *= values[i]) is_contiguous = is_contiguous && strides[i] == stride;
  if (is_contiguous) {
    slots[step.results[0]] = empty(Shape(values.data(), dimensions), dtype);
    return;
  }
  AtenTensorHandle made;
  succeeded(aoti_torch_empty_strided(dimensions, values.data(), strides, dtype.code, aoti_torch_device_type_cpu(), 0,
                                     &made));
  slots[step.results[0]] = Tensor(made);
}

// A kernel with so many arguments. Pointers and int64_t are handed over alike by the calling conventions of x86-64 and
// AArch64, so one type stands for both.
template <size_t>
using Word = int64_t;
using Caller = void (*)(const void* kernel, const int64_t* words);

template <size_t... I>
void call_with(const void* kernel, const int64_t* words, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(Word<I>...)>(const_cast<void*>(kernel))(words[I]...);
}

template <size_t... N>
constexpr std::array<Caller, sizeof...(N)> callers(std::index_sequence<N...>) {
  return {[](const void* kernel, const int64_t* words) { call_with(kernel, words, std::make_index_sequence<N>()); }...};
}

void run_kernel(const Step& step, const std::vector<Slot>& slots, const int64_t* sizes) {
  static constexpr auto CALLERS = callers(std::make_index_sequence<MOST_ARGUMENTS + 1>());
  std::array<int64_t, MOST_ARGUMENTS> words;
  for (size_t i = 0; i < step.arguments.size(); ++i) {
    const Argument& argument = step.arguments[i];
    words[i] = argument.kind == TENSOR ? reinterpret_cast<int64_t>(slots[argument.value]->data())
                                       : integer(argument, sizes);
  }
  CALLERS[step.arguments.size()](step.call, words.data());
}

void run_op(const Program& program, const Step& step, std::vector<Slot>& slots, const int64_t* sizes, Spare* spare) {
  static const Slot none;
  std::array<const void*, MOST_ARGUMENTS> arguments;
  std::array<Slot*, MOST_RESULTS> results;
  for (size_t i = 0; i < step.arguments.size(); ++i) {
    const Argument& argument = step.arguments[i];
    switch (argument.kind) {
      case TENSOR: arguments[i] = &*slots[argument.value]; break;
      case OPTIONAL: arguments[i] = argument.value < 0 ? &none : &slots[argument.value]; break;
      case INTEGER: arguments[i] = &argument.value; break;
      case SIZE: arguments[i] = &sizes[argument.value]; break;
      case NUMBER: arguments[i] = &argument.number; break;
      case FLAG: arguments[i] = &argument.flag; break;
      case TEXT: arguments[i] = &program.texts[argument.value]; break;
    }
  }
  for (size_t i = 0; i < step.results.size(); ++i) results[i] = &slots[step.results[i]];
  reinterpret_cast<Direct>(const_cast<void*>(step.call))(arguments.data(), results.data(), spare);
}

// `kept`: slots before this one stay as they are. `of_bound` takes what no later step uses.
void run(const Program& program, std::vector<Slot>& slots, const int64_t* sizes, int64_t kept, Spare* of_bound) {
  spare = of_bound;  // of this library: see op.h for those of the ops'
  const std::unique_ptr<Spare*, void (*)(Spare**)> end(&spare, [](Spare** each) { *each = nullptr; });
  for (const Step& step : program.steps) {
    switch (step.what) {
      case OP: run_op(program, step, slots, sizes, of_bound); break;
      case VIEW: view(step, slots, sizes); break;
      case EMPTY: make_empty(step, slots, sizes); break;
      case KERNEL: run_kernel(step, slots, sizes); break;
    }
    for (const int64_t slot : step.last)
      if (slot >= kept) {
        // An input may be another's too, and a view shares memory.
        if (of_bound != nullptr && slot >= program.inputs && !program.is_shared[slot]) of_bound->add(std::move(*slots[slot]));
        slots[slot].reset();
      }
  }
}

// A list that torch gave, as `count` values; each is owned by who takes it.
std::vector<StableIValue> taken(StableIValue given) {
  const auto list = reinterpret_cast<StableListHandle>(given);
  size_t count;
  succeeded(torch_list_size(list, &count));
  std::vector<StableIValue> values(count);
  for (size_t i = 0; i < count; ++i) succeeded(torch_list_get_item(list, i, &values[i]));
  succeeded(torch_delete_list(list));
  return values;
}

// All inputs, or those behind the `bound` ones: where there are none, what was given says nothing.
void fill(const Program& program, std::vector<Slot>& slots, StableIValue list, int64_t bound) {
  const std::vector<StableIValue> inputs = taken(list);
  const int64_t count = inputs.size();
  std::vector<Slot> given(count);  // owned before anything is checked
  for (int64_t i = 0; i < count; ++i) given[i] = Tensor(reinterpret_cast<AtenTensorHandle>(inputs[i]));
  if (bound == program.inputs && bound != 0) return;
  CHECK_VALUE(count == program.inputs || bound + count == program.inputs, "run_program: the program takes ",
              program.inputs, " tensors, got ", count);
  for (int64_t i = 0; i < count; ++i) slots[program.inputs - count + i] = std::move(given[i]);
}

StableIValue outputs_of(const Program& program, std::vector<Slot>& slots) {
  StableListHandle outputs;
  succeeded(torch_new_list_reserve_size(program.outputs.size(), &outputs));
  for (const int64_t slot : program.outputs)
    succeeded(torch_list_push_back(outputs, reinterpret_cast<StableIValue>(slots[slot]->release())));
  return reinterpret_cast<StableIValue>(outputs);
}

// run_program(int program, int bound, Tensor[] inputs, int[] sizes) -> Tensor[]
void run_program(StableIValue* stack, uint64_t, uint64_t) {
  const auto& program = *reinterpret_cast<const Program*>(stack[0]);
  auto* const bound = reinterpret_cast<Bound*>(stack[1]);
  const std::vector<StableIValue> sizes = taken(stack[3]);
  const auto* const values = reinterpret_cast<const int64_t*>(sizes.data());
  if (bound == nullptr) {
    std::vector<Slot> slots(program.slots);
    fill(program, slots, stack[2], 0);
    run(program, slots, values, 0, nullptr);
    stack[0] = outputs_of(program, slots);
    return;
  }
  CHECK_VALUE(!bound->is_busy.exchange(true), "run_program: the bound program runs in another thread");
  const std::unique_ptr<std::atomic<bool>, void (*)(std::atomic<bool>*)> busy(&bound->is_busy,
                                                                              [](auto* flag) { flag->store(false); });
  std::vector<Slot>& slots = bound->slots;
  slots.resize(program.slots);
  for (int64_t i = program.arguments; i < program.slots; ++i) slots[i].reset();  // of a run that failed
  fill(program, slots, stack[2], bound->is_filled ? program.arguments : 0);
  bound->is_filled = true;
  for (int64_t i = 0; i < program.arguments; ++i)
    CHECK_VALUE(slots[i]->has_stayed(), "run_program: argument ", i, " has other memory than when it was bound");
  run(program, slots, values, program.arguments, &bound->spare);
  stack[0] = outputs_of(program, slots);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void register_program_op() {
  TorchLibraryHandle library;
  succeeded(aoti_torch_library_init_impl("compiled_llm", "CPU", __FILE__, __LINE__, &library));
  succeeded(torch_library_impl(library, "run_program", run_program, uint64_t{2} << 56 | uint64_t{11} << 48));
}

// Words: slots, inputs, arguments, list of outputs, number of steps, steps. A list is its length and its items.
EXPORTED const void* make_program(const int64_t* words, const char* const* texts, int64_t num_texts) {
  auto program = std::make_unique<Program>();
  Reader reader = {words};
  program->slots = reader.next();
  program->inputs = reader.next();
  program->arguments = reader.next();
  program->outputs = reader.list();
  program->texts.assign(texts, texts + num_texts);
  const int64_t steps = reader.next();
  for (int64_t i = 0; i < steps; ++i) program->steps.push_back(reader.step());
  program->is_shared.resize(program->slots);
  for (const Step& step : program->steps)
    if (step.what == VIEW) program->is_shared[step.arguments[0].value] = program->is_shared[step.results[0]] = true;
  for (const Step& step : program->steps)
    if (step.arguments.size() > MOST_ARGUMENTS || step.results.size() > MOST_RESULTS ||
        (step.what == VIEW && step.arguments.size() > 2 * MOST_DIMENSIONS + 2) ||
        (step.what == EMPTY && step.arguments.size() > 2 * MOST_DIMENSIONS + 1))
      return nullptr;
  return program.release();
}

EXPORTED void delete_program(const void* program) { delete static_cast<const Program*>(program); }

EXPORTED void* make_bound() { return new Bound; }

EXPORTED void delete_bound(void* bound) { delete static_cast<Bound*>(bound); }
