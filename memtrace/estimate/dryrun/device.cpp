// A CUDA device without a GPU, for a CPU build of PyTorch: tensors with shapes and storages but no data.
//
// Loaded before PyTorch is imported. Births and deaths of storages are the calls of the allocator below; what they are
// given comes from Python (dryrun/machine.py). Operators run on the `meta` device for their shapes. Storages up to
// kShadowBytes whose values are known have a shadow on the host, on which operators run too, so that masks, lengths and
// counters that a program made itself have their true values.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/ReduceOpsUtils.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_cudnn_rnn.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::IValue;
using c10::Storage;
using Stack = torch::jit::Stack;

constexpr size_t kShadowBytes = 1 << 20;
constexpr int64_t kFilledBytes = 64 << 20;  // a larger copy to the host keeps the zeros of fresh pages
const Device kDevice(c10::kCUDA, 0);

// ---- what Python answers ------------------------------------------------------------------------------------------
struct Answers {
  uint64_t (*allocate)(uint64_t bytes);          // address, 0 if it is refused
  void (*release)(uint64_t address);
  const char* (*refusal)();                      // the text of the error
  double (*value)(int kind, const char* maker);  // a value nobody knows: 0 float, 1 integer, 2 boolean
  int64_t (*attention)(const int64_t* facts);    // which kernel
  int64_t (*workspace)(int is_lt);               // bytes that a library's first product on a thread allocates
  void (*failed)(const char* op);                // an operator that can't run without data
  void (*used)(uint64_t address, int64_t stream);  // another stream uses a block (record_stream)
  void (*waited)();                              // the host waited for the current stream
  int64_t multiprocessors;
};
Answers answers{};
bool is_open = false;  // false once the interpreter ends

struct Block {
  uint64_t address = 0;
  Storage host;  // values, if known
  bool known = false;
  bool tests_nan = false;  // made by isnan or isinf: no element is
  int holds = -1;          // how one number that nobody knows compares with a known one; -1: not such a result
  int64_t kinds = 0;       // its elements are places among so many: what topk, sort or argmax chose
  double share = 1;        // how many of its elements are true, where a choice among `kinds` says so
  int64_t set = -1;        // elements that are not zero, at most; -1: all
  const char* maker = "";
};

// A storage may die where Python can't run: while an error is on its way, on a thread without the interpreter's lock.
// Its release waits then for the next thing that is asked of Python.
std::mutex waiting_lock;
std::vector<uint64_t> waiting;
int (*holds_lock)() = nullptr;
void* (*has_error)() = nullptr;

void drain() {
  std::vector<uint64_t> now;
  {
    std::lock_guard<std::mutex> held(waiting_lock);
    now.swap(waiting);
  }
  for (auto address : now) answers.release(address);
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (is_open && block->address) {
    if (holds_lock() && !has_error()) {
      drain();
      answers.release(block->address);
    } else {
      std::lock_guard<std::mutex> held(waiting_lock);
      waiting.push_back(block->address);
    }
  }
  delete block;
}

// For the books about a step: which operator asks for a storage, and of what shape.
thread_local std::vector<const char*> running;
thread_local int64_t shape[3];  // dimensions, then the last two of them

void shape_is(c10::IntArrayRef size) {
  const auto dims = static_cast<int64_t>(size.size());
  shape[0] = dims;
  shape[1] = dims > 1 ? size[dims - 2] : 0;
  shape[2] = dims > 0 ? size[dims - 1] : 0;
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
  const bool serves = std::string_view(function.name()).rfind("aten::empty", 0) == 0;
  running.push_back(serves && !running.empty() ? running.back() : function.name());
  return nullptr;
}

void ends(const at::RecordFunction&, at::ObserverContext*) {
  if (!running.empty()) running.pop_back();
}

struct DryAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_unique<Block>();
    if (bytes) {
      drain();
      block->address = answers.allocate(bytes);
      if (!block->address) C10_THROW_ERROR(OutOfMemoryError, answers.refusal());
    }
    auto* address = reinterpret_cast<void*>(block->address);
    return {address, block.release(), &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
};
DryAllocator allocator;

// Memory of the host that says it is pinned.
struct PinnedAllocator final : c10::Allocator {
  static inline std::mutex lock;
  static inline std::unordered_map<const void*, c10::DataPtr> held;
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr made = c10::GetAllocator(c10::kCPU)->allocate(bytes);
    void* data = made.get();
    std::lock_guard<std::mutex> guard(lock);
    if (data) held[data] = std::move(made);
    return {data, data, &give_up, c10::Device(c10::kCPU)};
  }
  static void give_up(void* data) {
    std::lock_guard<std::mutex> guard(lock);
    held.erase(data);
  }
  static bool has(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    return held.count(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_up; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned;

struct DryGenerator final : at::CPUGeneratorImpl {
  explicit DryGenerator(uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::has(data); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91501; }
  long versionRuntimeCuDNN() const override { return 91501; }
  long versionCUDART() const override { return 13000; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const override {
    static at::Generator one = at::make_generator<DryGenerator>(c10::default_rng_seed_val);
    return one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override {
    return at::make_generator<DryGenerator>(c10::default_rng_seed_val);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return stream(); }
  c10::Stream getDefaultStream(Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  c10::Stream getNewStream(Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
};

// ---- shadows ------------------------------------------------------------------------------------------------------
Block* block_of(const c10::StorageImpl* storage) {
  return static_cast<Block*>(storage->data_ptr().get_context());
}
Block* block_of(const Tensor& t) {
  return block_of(t.storage().unsafeGetStorageImpl());
}

Tensor on_storage(const Storage& storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

bool is_known(const Tensor& t) {
  auto* block = block_of(t);
  return !t.storage().nbytes() || (block && block->known);
}

// Values of a device tensor; its storage must be known, or about to be written as a whole.
Tensor host_of(const Tensor& t) {
  auto* block = block_of(t);
  if (!block) return at::zeros_like(t, t.options().device(at::kCPU));
  if (!block->host || block->host.nbytes() < t.storage().nbytes())
    block->host = Storage(Storage::use_byte_size_t(), t.storage().nbytes(), c10::GetAllocator(at::kCPU), true);
  return on_storage(block->host, t, c10::DispatchKey::CPU);
}

void forget(const Tensor& t) {
  if (auto* block = block_of(t)) {
    block->known = false;
    block->set = -1;
    block->holds = -1;
    block->host = Storage();
  }
}

// How many elements of the storage of `t` are not zero, at most: of what began as zeros those that were set. -1: all.
int64_t most_set(const Tensor& t) {
  if (!t.is_cuda()) return t.count_nonzero().item<int64_t>();
  auto* block = block_of(t);
  if (!block || !block->known) return block ? block->set : 0;
  return at::empty({0}, t.options().device(at::kCPU)).set_(block->host).count_nonzero().item<int64_t>();
}

bool is_whole(const Tensor& t) {
  return t.numel() * t.element_size() == static_cast<int64_t>(t.storage().nbytes());
}

bool fits(const Tensor& t) {
  return t.storage().nbytes() <= kShadowBytes;
}

// Whether writing all of `t` leaves no value of its storage unknown.
bool completes(const Tensor& t) {
  return fits(t) && (is_known(t) || (t.is_non_overlapping_and_dense() && t.nbytes() == t.storage().nbytes()));
}

int kind_of(c10::ScalarType type) {
  return type == at::kBool ? 2 : c10::isIntegralType(type, false) ? 1 : 0;
}

double value_of(const Tensor& t) {
  auto* block = block_of(t);
  if (block && block->tests_nan) return 0;
  if (block && block->holds >= 0) return block->holds;
  return answers.value(kind_of(t.scalar_type()), block ? block->maker : "");
}

// ---- operators ----------------------------------------------------------------------------------------------------
struct Alone {  // below autograd and autocast, whatever the caller was in
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

struct Call {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // (meta, device)
  std::vector<std::pair<Storage, Storage>> storages;

  Tensor meta_of(const Tensor& t) {
    if (!t.defined() || t.is_meta() || (t.is_cpu() && !t.dim())) return t;
    if (!t.is_cuda()) return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
    for (auto& [meta, real] : pairs)
      if (real.is_same(t)) return meta;
    const Storage* mine = nullptr;
    for (auto& [meta, real] : storages)
      if (real.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) mine = &meta;
    if (!mine) {
      storages.emplace_back(
          Storage(Storage::use_byte_size_t(), t.storage().nbytes(), c10::GetAllocator(at::kMeta), true), t.storage());
      mine = &storages.back().first;
    }
    pairs.emplace_back(on_storage(*mine, t, c10::DispatchKey::Meta), t);
    return pairs.back().first;
  }

  Tensor real_of(const Tensor& t, const char* maker, bool tests_nan) {
    if (!t.defined() || !t.is_meta()) return t;
    for (auto& [meta, real] : pairs)
      if (meta.is_same(t)) return real;
    for (auto& [meta, real] : storages)
      if (meta.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl())
        return on_storage(real, t, c10::DispatchKey::CUDA);
    auto bytes = t.storage().nbytes();
    shape_is(t.sizes());
    Storage storage(Storage::use_byte_size_t(), bytes, allocator.allocate(bytes), &allocator, true);
    auto* block = block_of(storage.unsafeGetStorageImpl());
    block->maker = maker;
    block->tests_nan = tests_nan;
    return on_storage(storage, t, c10::DispatchKey::CUDA);
  }

  void resize() {  // what the operator resized
    for (auto& [meta, real] : pairs) {
      if (meta.sizes() == real.sizes() && meta.strides() == real.strides()) continue;
      auto bytes = meta.storage().nbytes();
      if (bytes > real.storage().nbytes()) {
        forget(real);
        real.storage().set_data_ptr(allocator.allocate(bytes));
        real.storage().set_nbytes(bytes);
      }
      real.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
    }
  }
};

template <class F>
IValue mapped(const IValue& value, F&& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(map(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      made.push_back(t && t->defined() ? std::optional<Tensor>(map(*t)) : std::nullopt);
    return made;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F&& see) {
  mapped(value, [&](const Tensor& t) {
    if (t.defined()) see(t);
    return t;
  });
}

struct Kind {  // what is known of an operator
  bool is_aten = false, is_seeded = false, has_generator = false, tests_nan = false;
  std::string_view order;  // in which it allocates its results, where that is not the order in which it gives them
  bool chooses = false;   // its last result holds places along a dimension
  bool compares = false;  // with one of the kinds: true for so many
  const char* relation = nullptr;  // to a plain number
  char sets = 0;  // how it changes the number of elements that are not zero
  int product = -1;       // 1: may have a bias
  int accumulator = 0;    // bytes in which a reduction sums an element; 0: no reduction
  int most_per_load = 4;  // elements that a thread of the reduction loads at a time
  std::vector<char> writes, only_writes;
};

const Kind& kind_of(const c10::OperatorHandle& op) {
  static std::unordered_map<std::string, Kind> known;
  static std::mutex lock;
  static const std::unordered_map<std::string, int> products{
      {"aten::mm", 0}, {"aten::bmm", 0}, {"aten::baddbmm", 0}, {"aten::addmm", 1}, {"aten::_addmm_activation", 1},
      {"aten::addmv", 0}, {"aten::_grouped_mm", 0}, {"aten::linalg_solve_ex", 0}};
  static const std::unordered_map<std::string, int> fills{
      {"aten::zero_", 0}, {"aten::fill_", 0}, {"aten::copy_", 0}, {"aten::normal_", 0}, {"aten::uniform_", 0},
      {"aten::random_", 0}, {"aten::bernoulli_", 0}, {"aten::exponential_", 0}};
  // ReduceOps: sums in 32 bits, Welford's four numbers, or a value with its place
  static const std::unordered_map<std::string, int> reductions{
      {"aten::sum", 4}, {"aten::mean", 4}, {"aten::nansum", 4}, {"aten::prod", 4}, {"aten::linalg_vector_norm", 4},
      {"aten::amax", 4}, {"aten::amin", 4}, {"aten::max", 16}, {"aten::min", 16}, {"aten::argmax", 16},
      {"aten::argmin", 16}, {"aten::any", 1}, {"aten::all", 1}, {"aten::var", 16}, {"aten::std", 16},
      {"aten::var_mean", 16}, {"aten::std_mean", 16}};
  std::lock_guard<std::mutex> held(lock);
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto [entry, is_new] = known.try_emplace(name + "." + schema.overload_name());
  auto& kind = entry->second;
  if (!is_new) return kind;
  kind.is_aten = name.rfind("aten::", 0) == 0;
  kind.tests_nan = name == "aten::isnan" || name == "aten::isinf";
  for (auto tag : op.getTags()) kind.is_seeded |= tag == at::Tag::nondeterministic_seeded;
  if (auto found = products.find(name); found != products.end()) kind.product = found->second;
  if (auto found = reductions.find(name); found != reductions.end()) kind.accumulator = found->second;
  if (name.find("var") != std::string::npos || name.find("std") != std::string::npos) kind.most_per_load = 2;
  if (name == "aten::native_dropout") kind.order = "10";
  if (name == "aten::_embedding_bag") kind.order = "2103";
  if (name == "aten::_scaled_dot_product_cudnn_attention") kind.order = "670123458";
  if (schema.overload_name() == "Scalar")
    for (const char* relation : {"gt", "ge", "lt", "le", "eq", "ne"})
      if (name == std::string("aten::") + relation) kind.relation = relation;
  kind.chooses = name == "aten::topk" || name == "aten::sort" || name == "aten::argmax" || name == "aten::argsort" ||
      name == "aten::multinomial";
  kind.compares = name == "aten::eq" || name == "aten::scatter_" || name == "aten::scatter";
  static const std::unordered_map<std::string, char> setters{
      {"aten::zero_", '0'}, {"aten::_index_put_impl_", 'i'}, {"aten::scatter_", 's'}, {"aten::scatter", 's'},
      {"aten::bitwise_or", '+'}, {"aten::bitwise_or_", '+'}, {"aten::logical_or", '+'},
      {"aten::bitwise_and", '<'}, {"aten::bitwise_and_", '<'}, {"aten::logical_and", '<'}, {"aten::gt", '='},
      {"aten::ne", '='}};
  if (auto found = setters.find(name); found != setters.end()) kind.sets = found->second;
  for (const auto& argument : schema.arguments()) {
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    kind.writes.push_back(writes);
    kind.only_writes.push_back(writes && (argument.is_out() || fills.count(name)));
    kind.has_generator |= argument.name() == "generator";
  }
  return kind;
}

// The workspaces of cuBLAS and, for a product with a bias, cuBLASLt: made by a thread's first product, kept for good.
void multiply(bool biased) {
  thread_local bool done[2] = {false, false};
  static auto* kept = new std::vector<c10::DataPtr>();
  for (int is_lt = 0; is_lt <= int(biased); is_lt++) {
    if (done[is_lt]) continue;
    done[is_lt] = true;
    running.push_back(is_lt ? "memtrace::cublaslt_workspace" : "memtrace::cublas_workspace");
    kept->push_back(allocator.allocate(answers.workspace(is_lt)));
    running.pop_back();
  }
}

int last_power(int64_t n, int most) {
  if (n >= most) return most;
  int power = 1;
  while (int64_t(power) * 2 <= n) power *= 2;
  return power;
}

int64_t divided(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Buffers of a reduction that several blocks of threads share: staging and semaphores, as Reduce.cuh's setReduceConfig
// lays it out. (bytes, bytes); zeros where no block shares.
std::pair<int64_t, int64_t> staging(at::TensorIterator& iter, int64_t offset, int accumulator, int most_per_load) {
  const int64_t outputs = iter.num_output_elements(), inputs = iter.numel() / outputs;
  const int in = iter.ntensors() - 1;
  const auto strides = iter.strides(in);
  const int64_t width = iter.element_size(in);
  int64_t across = 1, along = 1, fastest = width;
  bool on_fastest = true;
  if (iter.ndim() > 0) {
    on_fastest = iter.num_reduce_dims() == iter.ndim() || strides[0] < strides[iter.num_reduce_dims()];
    across = on_fastest ? inputs : outputs;
    along = on_fastest ? outputs : inputs;
    fastest = strides[on_fastest ? 0 : iter.num_reduce_dims()];
  }
  int vector = 1;
  if (fastest == width) {
    if (on_fastest && across > 128 && iter.ndim() == 1) across /= most_per_load;
    else if (!on_fastest) {
      vector = 4;
      auto fit = [&](int64_t n) { while (n % vector) vector /= 2; };
      fit(offset);
      fit(iter.shape()[iter.num_reduce_dims()]);
      for (int i = 0; i < iter.ndim(); i++)
        if (i != iter.num_reduce_dims()) fit(strides[i] / width);
      across /= vector;
    }
  }
  const int most = 512 / vector;
  const int x_most = last_power(across, most), y_most = last_power(along, most);
  int x = std::min(x_most, 32);
  const int y = std::min(y_most, most / x);
  x = std::min(x_most, most / y);
  int64_t step_in = 1, step_out = 1;
  (on_fastest ? step_in : step_out) *= x;
  const bool splits = divided(inputs, step_in) >= std::min(y * 16, 256);
  (splits ? step_in : step_out) *= y;
  const int64_t wanted = answers.multiprocessors * (2048 / (x * y)), grid = divided(outputs / vector, step_out);
  const int64_t each = divided(inputs, step_in);
  if (!splits || each < 256 || grid > wanted) return {0, 0};
  const int64_t shared = std::max(std::min(divided(wanted, grid), divided(each, 16)), divided(each, 256));
  if (shared <= 1) return {0, 0};
  return {accumulator * outputs * shared * (on_fastest ? 1 : x * vector), 4 * grid};
}

// What a reduction allocates beside its result: a copy in the result's type, then the staging.
void reduce(const Kind& kind, const c10::FunctionSchema& schema, const std::vector<IValue>& arguments, const Tensor& made) {
  const Tensor self = arguments[0].toTensor();
  if (!self.defined() || !self.is_cuda() || self.numel() < 2 || !made.defined() || !made.numel()) return;
  std::vector<int64_t> dims;
  bool keeps = false;
  for (size_t i = 1; i < arguments.size(); i++) {
    const auto& name = schema.arguments()[i].name();
    if (name == "dim" && arguments[i].isInt()) dims.push_back(arguments[i].toInt());
    if (name == "dim" && arguments[i].isIntList()) dims = arguments[i].toIntVector();
    if (name == "keepdim") keeps = arguments[i].toBool();
  }
  if (self.dim() == 0) return;
  Tensor from = self;
  const bool sums = kind.accumulator == 4 && made.dtype() != self.dtype();
  if (sums && !(c10::isReducedFloatingType(self.scalar_type()) && made.scalar_type() == at::kFloat))
    from = at::empty_strided(self.sizes(), self.strides(), made.options());
  auto mask = at::native::make_dim_mask(at::OptionalIntArrayRef(dims), self.dim());
  Tensor flat = at::native::review_reduce_result(made, self.dim(), mask, keeps);
  auto iter = at::TensorIterator::reduce_op(flat, from);
  const int accumulator = kind.accumulator == 4 && from.element_size() == 8 ? 8 : kind.accumulator;
  auto [stage, semaphores] = staging(iter, from.storage_offset(), accumulator, kind.most_per_load);
  if (!stage) return;
  auto first = allocator.allocate(stage);
  auto second = allocator.allocate(semaphores);
}

bool relates(double value, std::string_view relation, const at::Scalar& to) {
  const double other = to.toDouble();
  const bool less = value < other, same = value == other;
  if (relation == "eq" || relation == "ne") return same == (relation == "eq");
  if (relation == "le" || relation == "ge") return same || less == (relation == "le");
  return !same && less == (relation == "lt");
}

// Operator `op` on the shadows of its operands; false if that fails.
bool run_on_host(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, Stack& host) {
  static at::Generator generator = at::detail::createCPUGenerator();
  try {
    for (const auto& argument : arguments) {
      if (argument.isDevice() && argument.toDevice().is_cuda()) host.emplace_back(Device(at::kCPU));
      else host.push_back(mapped(argument, [](const Tensor& t) { return t.defined() && t.is_cuda() ? host_of(t) : t; }));
    }
    const auto& names = op.schema().arguments();
    for (size_t i = 0; i < names.size(); i++)
      if (names[i].name() == "generator") host[i] = generator;
    const Stack held = host;  // a kernel of two results gives its arguments back by reference, after they left the stack
    Alone alone;
    op.callBoxed(&host);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void only_dense(const Tensor& t, const char* name) {
  if (!t.defined() || t.layout() == at::kStrided) return;
  answers.failed(name);
  TORCH_CHECK_NOT_IMPLEMENTED(false, name, " makes a sparse tensor, whose size depends on data");
}

// The same of what an operator writes to or makes.
int64_t most_set_by(char way, const std::vector<IValue>& arguments) {
  const auto& self = arguments[0].toTensor();
  const int64_t before = most_set(self);
  if (way == '0') return is_whole(self) ? 0 : before;
  if (way == '=') return arguments[1].isScalar() && arguments[1].toScalar().toDouble() == 0 ? before : -1;
  int64_t more = 0;
  if (way == 'i') {  // as many places as the longest index has, each of all dimensions that have no index
    int64_t size = self.numel(), dim = 0;
    for (const std::optional<Tensor>& index : arguments[1].toOptionalTensorVector()) {
      if (index && index->defined()) {
        more = std::max(more, index->numel());
        size /= std::max<int64_t>(1, self.size(dim));
      }
      dim++;
    }
    more *= size;
  } else {
    const auto& other = arguments[way == 's' ? 2 : 1];
    more = other.isTensor() ? (way == 's' ? other.toTensor().numel() : most_set(other.toTensor())) : -1;
  }
  if (way == '<') return before < 0 || (more >= 0 && more < before) ? more : before;
  return before < 0 || more < 0 ? -1 : before + more;
}

// How much of a mask is true.
double true_of(const IValue& mask) {
  if (!mask.isTensor()) return 1;
  const auto& t = mask.toTensor();
  if (t.is_cuda() && !is_known(t)) return block_of(t)->share;
  return static_cast<double>(most_set(t)) / std::max<int64_t>(1, t.numel());
}

// Whether `scatter` writes each element: a permutation is turned round so.
bool scatters_to_all(const Tensor& self, const Tensor& index) {
  return self.dim() == 1 && index.numel() == self.numel() && is_whole(self) && fits(self) && index.is_cuda() &&
      is_known(index) && std::get<0>(at::_unique(host_of(index))).numel() == index.numel();
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& kind = kind_of(op);
  const auto count = op.schema().arguments().size();
  const char* name = op.schema().name().c_str();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());

  bool known = kind.is_aten && (!kind.is_seeded || kind.has_generator), tests_nan = kind.tests_nan;
  int64_t kinds = 0;
  double share = 1;
  for (size_t i = 0; i < count; i++)
    each_tensor(arguments[i], [&](const Tensor& t) {
      if (!t.is_cuda()) return;
      const bool is_made = kind.only_writes[i] || (kind.sets == 's' && !i && scatters_to_all(t, arguments[2].toTensor()));
      known = known && (is_made ? completes(t) : fits(t) && is_known(t));
      if (auto* block = block_of(t)) {
        tests_nan |= block->tests_nan;
        kinds = std::max(kinds, block->kinds);
        share = std::min(share, block->share);
      }
    });
  if (kind.chooses && arguments[0].toTensor().dim()) {
    const auto& self = arguments[0].toTensor();
    const int64_t dim = op.schema().name() == "aten::topk" ? arguments[2].toInt() : -1;
    kinds = self.size(dim);
  } else if (kind.compares && kinds > 1) {
    share = 1.0 / kinds;
    kinds = 0;
  }
  const std::string_view called(name);
  if (share < 1 && (called == "aten::bitwise_not" || called == "aten::logical_not")) share = 1 - share;
  if (kind.sets == '+') share = std::min(1.0, true_of(arguments[0]) + true_of(arguments[1]));
  if (kinds > 1 && (called == "aten::remainder" || called == "aten::floor_divide")) {
    const IValue& by = arguments[1];  // a plain number may come as a tensor of the host
    const bool is_plain = by.isTensor() && by.toTensor().is_cpu() && !by.toTensor().dim();
    const double number = is_plain ? by.toTensor().item().toDouble() : by.isScalar() ? by.toScalar().toDouble() : 0;
    const int64_t whole = std::max<int64_t>(1, std::abs(static_cast<int64_t>(number)));
    if (number) kinds = called == "aten::remainder" ? std::min(kinds, whole) : divided(kinds, whole);
  }
  if (kind.sets) kinds = 0;  // places to write to are no values

  const int64_t set = kind.sets && !known ? most_set_by(kind.sets, arguments) : -1;

  Call call;
  Stack results, host;
  bool on_host = false;
  try {
    Alone alone;
    for (const auto& argument : arguments) {
      if (argument.isDevice() && argument.toDevice().is_cuda()) results.emplace_back(Device(at::kMeta));
      else if (argument.isGenerator()) results.emplace_back(IValue());
      else results.push_back(mapped(argument, [&](const Tensor& t) { return call.meta_of(t); }));
    }
    op.callBoxed(&results);
  } catch (const std::exception&) {
    if (!known || !run_on_host(op, arguments, host)) {  // the shape depends on values: they may be known
      answers.failed(name);
      throw;
    }
    on_host = true;
    results.clear();
    for (const auto& result : host)
      results.push_back(mapped(result, [&](const Tensor& t) {
        only_dense(t, name);
        return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)) : t;
      }));
  }
  call.resize();
  std::vector<Tensor> fresh;
  bool small = true;
  std::vector<IValue> made(results.size());
  for (size_t i = 0; i < results.size(); i++) {
    const size_t which = kind.order.empty() ? i : kind.order[i] - '0';
    made[which] = mapped(results[which], [&](const Tensor& t) {
      only_dense(t, name);
      auto real = call.real_of(t, name, tests_nan);
      if (real.defined() && real.is_cuda()) {
        small = small && fits(real);
        if (auto* block = block_of(real)) {
          if (at::isIntegralType(real.scalar_type(), false)) block->kinds = kinds;
          block->share = share;
          if (kind.accumulator && share < 1 && called == "aten::all") {
            if (!real.dim()) block->holds = 0;
          } else if (kind.accumulator && share < 1) {  // one of many is true more often
            const double number = share * arguments[0].toTensor().numel() / std::max<int64_t>(1, real.numel());
            block->share = std::min(1.0, number);
            if (!real.dim() && real.scalar_type() == at::kBool) block->holds = number >= 1;
          }
          block->set = set;
        }
      }
      return real;
    });
  }
  for (const auto& result : made)
    each_tensor(result, [&](const Tensor& t) {
      if (t.is_cuda()) fresh.push_back(t);
    });
  if (kind.relation && !known && !tests_nan && !arguments[0].toTensor().dim() && arguments[0].toTensor().is_cuda() &&
      !arguments[1].toScalar().isComplex())
    block_of(fresh[0])->holds = relates(value_of(arguments[0].toTensor()), kind.relation, arguments[1].toScalar());
  stack->insert(stack->end(), made.begin(), made.end());
  if (kind.accumulator && !fresh.empty()) reduce(kind, op.schema(), arguments, fresh[0]);
  if (kind.product >= 0) multiply(kind.product == 1 && arguments[0].isTensor() && arguments[0].toTensor().dim() == 1);
  for (size_t i = 0; i < count; i++)
    if (kind.writes[i]) each_tensor(arguments[i], [&](const Tensor& t) { small = small && (!t.is_cuda() || fits(t)); });
  known = known && small && (on_host || run_on_host(op, arguments, host));
  if (known) {
    size_t next = 0;
    for (const auto& result : host)
      each_tensor(result, [&](const Tensor& t) {
        if (next == fresh.size()) return;
        const Tensor& real = fresh[next++];
        if (!real.storage().nbytes() || block_of(real)->known) return;  // an operand, or a view of one
        host_of(real).copy_(t);
        block_of(real)->known = true;
      });
  }
  for (size_t i = 0; i < count; i++)
    if (kind.writes[i]) each_tensor(arguments[i], [&](const Tensor& t) {
      if (!t.is_cuda()) return;
      if (!known) forget(t);
      if (auto* block = block_of(t)) {
        if (known) block->known = true;
        else block->set = set;
      }
    });
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  shape_is(size);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  shape_is(size);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size() && !size.empty()) impl->set_sizes_and_strides(size, stride, offset);
  else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& set_whole(Tensor& self, Storage source) {
  int64_t size = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, Storage(Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {1});
}

// As copy_kernel_cuda: between host and device what is not contiguous goes through a temporary on the device.
Tensor& copy(Tensor& self, const Tensor& source, bool is_async) {
  if (self.is_same(source)) return self;
  if (!is_async && self.is_cuda() != source.is_cuda()) answers.waited();
  Alone alone;
  Tensor from = source.sizes() == self.sizes() ? source : source.expand_as(self);
  if (!self.numel()) return self;
  Tensor temporary;
  if (self.is_cuda() != from.is_cuda()) {
    const Tensor& device = self.is_cuda() ? self : from;
    if (!device.is_contiguous() && (from.dtype() != self.dtype() || from.strides() != self.strides()))
      temporary = at::empty(device.sizes(), device.options());
  }
  if (self.is_cuda()) {
    if (completes(self) && (!from.is_cuda() || (fits(from) && is_known(from)))) {
      host_of(self).copy_(from.is_cuda() ? host_of(from) : from);
      block_of(self)->known = true;
    } else {
      forget(self);
      if (auto* block = block_of(self)) {
        const Block nothing, *origin = from.is_cuda() ? block_of(from) : nullptr;
        block->maker = origin ? origin->maker : "copy";
        if (!origin) origin = &nothing;
        block->tests_nan = origin->tests_nan;
        block->holds = from.dim() || self.dim() ? -1 : origin->holds;
        block->kinds = origin->kinds;
        block->share = origin->share;
        block->set = is_whole(self) ? origin->set : -1;
      }
    }
  } else if (is_known(from)) {
    self.copy_(host_of(from));
  } else if (static_cast<int64_t>(self.nbytes()) <= kFilledBytes) {
    self.fill_(value_of(from));
  }
  return self;
}

at::Scalar read(const Tensor& self) {
  answers.waited();
  if (is_known(self)) return host_of(self).item();
  double value = value_of(self);
  switch (kind_of(self.scalar_type())) {
    case 2: return value != 0;
    case 1: return static_cast<int64_t>(value);
    default: return value;
  }
}

bool equal(const Tensor& self, const Tensor& other) {
  if (self.sizes() != other.sizes()) return false;
  if (self.is_cuda() && other.is_cuda() && is_known(self) && is_known(other)) return host_of(self).equal(host_of(other));
  return answers.value(2, "aten::equal") != 0;
}

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double, bool is_causal, std::optional<double>, bool) {
  bool masked = mask && mask->defined();
  // as check_last_dim_stride_equals_1_dense has it
  bool dense = query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
  dense = (dense || query.size(-1) == 1) && (!masked || mask->stride(-1) == 1);
  const int64_t facts[] = {
      query.dim(), static_cast<int64_t>(query.dtype().itemsize()), query.size(-1), value.size(-1),
      query.dim() > 2 ? query.size(-3) : 1, key.dim() > 2 ? key.size(-3) : 1, query.size(-2), key.size(-2), masked,
      is_causal, masked && mask->requires_grad(), dense};
  return answers.attention(facts);
}

// cuDNN's recurrent layers, as cudnn/RNN.cpp of a CUDA build has them.
template <int64_t mode>
std::tuple<Tensor, Tensor, Tensor> recurrent(const Tensor& x, const Tensor& hidden, const Tensor& cell, at::TensorList weights,
                                             bool has_biases, int64_t layers, double dropout, bool train, bool both,
                                             bool batch_first, c10::IntArrayRef batches) {
  bool projects = cell.defined() && cell.size(2) != hidden.size(2);
  int64_t units = cell.defined() ? cell.size(2) : hidden.size(2);
  Tensor flat;  // the weights are in one piece where they share a storage
  if (std::all_of(weights.begin(), weights.end(), [&](const Tensor& w) { return w.is_alias_of(weights[0]); })) {
    flat = at::empty({0}, weights[0].options()).set_(weights[0].storage());
  }
  auto optional = [](const Tensor& given) { return given.defined() ? std::optional<Tensor>(given) : std::nullopt; };
  auto [y, last, memory, kept, one_piece] = at::_cudnn_rnn(
      x, weights, (has_biases ? 4 : 2) + projects, optional(flat), hidden, optional(cell), mode, units,
      projects ? hidden.size(2) : 0, layers, batch_first, dropout, train, both, batches, std::nullopt);
  return {y, last, memory};
}

void lstm(Tensor& y, Tensor& hy, Tensor& cy, const Tensor& x, at::TensorList states, at::TensorList weights, bool has_biases,
          int64_t layers, double dropout, bool train, bool both, bool batch_first) {
  std::tie(y, hy, cy) = recurrent<2>(x, states[0], states[1], weights, has_biases, layers, dropout, train, both, batch_first, {});
}

void lstm_packed(Tensor& y, Tensor& hy, Tensor& cy, const Tensor& x, const Tensor& batches, at::TensorList states,
                 at::TensorList weights, bool has_biases, int64_t layers, double dropout, bool train, bool both) {
  auto sizes = c10::IntArrayRef(batches.const_data_ptr<int64_t>(), batches.numel());
  std::tie(y, hy, cy) = recurrent<2>(x, states[0], states[1], weights, has_biases, layers, dropout, train, both, false, sizes);
}

template <int64_t mode>
void plain(Tensor& y, Tensor& hy, const Tensor& x, const Tensor& state, at::TensorList weights, bool has_biases, int64_t layers,
           double dropout, bool train, bool both, bool batch_first) {
  Tensor none;
  std::tie(y, hy, none) = recurrent<mode>(x, state, {}, weights, has_biases, layers, dropout, train, both, batch_first, {});
}

template <int64_t mode>
void plain_packed(Tensor& y, Tensor& hy, const Tensor& x, const Tensor& batches, const Tensor& state, at::TensorList weights,
                  bool has_biases, int64_t layers, double dropout, bool train, bool both) {
  Tensor none;
  auto sizes = c10::IntArrayRef(batches.const_data_ptr<int64_t>(), batches.numel());
  std::tie(y, hy, none) = recurrent<mode>(x, state, {}, weights, has_biases, layers, dropout, train, both, false, sizes);
}

torch::Library& library(const char* space, c10::DispatchKey key) {  // kept for good
  return *new torch::Library(torch::Library::IMPL, space, key, __FILE__, __LINE__);
}

torch::CppFunction general() {
  return torch::CppFunction::makeFromBoxedFunction<&fallback>();
}

struct Quiet final : c10::WarningHandler {  // what a CUDA build has registered is replaced on purpose
  void process(const c10::Warning&) override {}
};
Quiet quiet;

void own_kernels() {
  c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  library("_", c10::DispatchKey::CUDA).fallback(general());
  library("_", c10::DispatchKey::VE).fallback(general());  // what a handler in Python calls for the operator itself
  auto& m = library("aten", c10::DispatchKey::CUDA);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", [](const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                          std::optional<int64_t> offset) { return at::native::as_strided_tensorimpl(self, size, stride, offset); });
  m.impl("view", [](const Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &read);
  m.impl("equal", &equal);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("record_stream", [](Tensor& self, c10::Stream stream) {
    if (auto* block = block_of(self)) answers.used(block->address, stream.id());
  });
  m.impl("_assert_async", [](const Tensor&) {});
  m.impl("_assert_async.msg", [](const Tensor&, std::string_view) {});
}

}  // namespace

namespace at {
using MemtraceHooks = Hooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, MemtraceHooks)
}  // namespace at

// ---- what Python calls --------------------------------------------------------------------------------------------
extern "C" {

void memtrace_open(const Answers* given) {
  answers = *given;
  holds_lock = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  has_error = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyErr_Occurred"));
  is_open = true;
  c10::SetAllocator(c10::kCUDA, &allocator, 255);
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  at::native::lstm_cudnn_stub.set_cuda_dispatch_ptr(&lstm);
  at::native::lstm_packed_cudnn_stub.set_cuda_dispatch_ptr(&lstm_packed);
  at::native::gru_cudnn_stub.set_cuda_dispatch_ptr(&plain<3>);
  at::native::gru_packed_cudnn_stub.set_cuda_dispatch_ptr(&plain_packed<3>);
  at::native::rnn_tanh_cudnn_stub.set_cuda_dispatch_ptr(&plain<1>);
  at::native::rnn_tanh_packed_cudnn_stub.set_cuda_dispatch_ptr(&plain_packed<1>);
  at::native::rnn_relu_cudnn_stub.set_cuda_dispatch_ptr(&plain<0>);
  at::native::rnn_relu_packed_cudnn_stub.set_cuda_dispatch_ptr(&plain_packed<0>);
  own_kernels();
  // A CUDA build's clock of DistributedDataParallel would ask a card.
  c10d::TimerRegistry()->Register(
      c10::kCUDA, [](c10::Device) { return std::unique_ptr<c10d::Timer>(); }, c10::REGISTRY_PREFERRED);
}

void memtrace_drain() {
  drain();
}

// A storage changes its size in place, as shards' whole copies do; 0 where memory is refused.
int memtrace_resize(c10::StorageImpl* storage, uint64_t bytes) {
  try {
    storage->set_data_ptr_noswap(allocator.allocate(bytes));
  } catch (const c10::OutOfMemoryError&) {
    return 0;
  }
  storage->set_nbytes(bytes);
  return 1;
}

void memtrace_close() {
  is_open = false;
}

void memtrace_name_operators() {
  at::addGlobalCallback(at::RecordFunctionCallback(&begins, &ends).scopes({at::RecordScope::FUNCTION}));
}

// Of the storage that is being allocated: the operator's name, and its shape.
const char* memtrace_asked(int64_t* into) {
  std::copy(shape, shape + 3, into);
  return running.empty() ? "" : running.back();
}

// The general kernel for an operator that would run a composite one otherwise; for a handled one behind its handler.
void memtrace_own(const char* space, const char* name, int is_handled) {
  c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  library(space, is_handled ? c10::DispatchKey::VE : c10::DispatchKey::CUDA).impl(name, general());
}

void memtrace_product(int is_biased) {
  multiply(is_biased);
}

void memtrace_forget(void* storage) {
  if (auto* block = block_of(static_cast<c10::StorageImpl*>(storage))) block->known = false;
}

double memtrace_share(void* storage) {
  auto* block = block_of(static_cast<c10::StorageImpl*>(storage));
  return block ? block->share : 1;
}

int64_t memtrace_set(void* storage) {
  auto* block = block_of(static_cast<c10::StorageImpl*>(storage));
  return block ? block->set : -1;
}

int memtrace_known(void* storage) {
  auto* block = block_of(static_cast<c10::StorageImpl*>(storage));
  return block && block->known;
}
}
