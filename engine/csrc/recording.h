// Calls of kernels, recorded once and repeated without Python: a part of bindings.cpp.
#pragma once

#include <ATen/record_function.h>

#include <functional>
#include <map>
#include <set>

namespace manta {
namespace {

// The calls of the functions below that a thread makes between `begin` and `end`. `replay` repeats
// them on the same memory, with the numbers that it then holds. Outputs lie in memory of the
// recording; what one leaves, later ones take, as they did when they were recorded. Tensors that
// came from elsewhere are kept. Work of torch's operators is not recorded: `others` are those that
// do more than look at a tensor in another way.
class Recording : public std::enable_shared_from_this<Recording> {
 public:
  ~Recording() {
    if (current == this) end();
    for (const auto& [size, block] : blocks_) ::operator delete(block, kAlign);
  }

  void begin() {
    TORCH_CHECK(!current && calls_.empty(), "this recording, or another one of the thread, has begun");
    current = this;
    watch_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&saw).scopes({at::RecordScope::FUNCTION}));
  }

  void end() {
    TORCH_CHECK(current == this, "this thread doesn't record");
    at::removeCallback(watch_);
    current = nullptr;
  }

  void replay() const {
    TORCH_CHECK(!current, "a recording can't be part of another one");
    pybind11::gil_scoped_release release;
    for (const auto& call : calls_) call();
  }

  int64_t num_calls() const { return static_cast<int64_t>(calls_.size()); }
  int64_t num_bytes() const { return num_bytes_; }
  const std::set<std::string>& others() const { return others_; }

  // `at::empty`, in memory of the thread's recording if there is one.
  static Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
    return current ? current->take(sizes, options) : at::empty(sizes, options);
  }

  // Keeps the memory of a tensor as long as the thread's recording, if there is one. (Its own is there
  // anyway: a tensor in it that it kept would keep the recording.)
  static void keep(const Tensor& tensor) {
    if (current && tensor.defined() && !current->owns(tensor.storage().data()))
      current->kept_.push_back(tensor);
  }

  // Makes a call, and notes it. `of`: the tensors whose memory it uses.
  template <class F>
  static void run(F call, std::initializer_list<const Tensor*> of) {
    within(call);
    note(std::move(call), of);
  }

  // The same for one that takes long: other threads of Python run meanwhile.
  template <class F>
  static void run_long(F call, std::initializer_list<const Tensor*> of) {
    {
      pybind11::gil_scoped_release release;
      within(call);
    }
    note(std::move(call), of);
  }

  // A tensor of the same memory, for a call: one that kept its memory would keep the recording.
  static Tensor view(const Tensor& tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options());
  }

 private:
  // What torch's operators do within a call belongs to it.
  template <class F>
  static void within(const F& call) {
    struct Mark {
      Mark() { is_within = true; }
      ~Mark() { is_within = false; }
    } mark;
    call();
  }

  template <class F>
  static void note(F call, std::initializer_list<const Tensor*> of) {
    if (!current) return;
    current->calls_.push_back(std::move(call));
    for (const Tensor* tensor : of) keep(*tensor);
  }

  static std::unique_ptr<at::ObserverContext> saw(const at::RecordFunction& function) {
    if (is_within) return nullptr;
    const auto schema = function.operator_schema();
    bool is_view = schema && !schema->returns().empty();
    if (is_view)
      for (const c10::Argument& value : schema->returns())
        is_view = is_view && value.alias_info() && !value.alias_info()->isWrite();
    if (!is_view && current) current->others_.insert(function.name());
    return nullptr;
  }

  bool owns(const void* data) const {
    for (const auto& [size, block] : blocks_)
      if (data >= block && data < static_cast<const char*>(block) + size) return true;
    return false;
  }

  Tensor take(at::IntArrayRef sizes, const at::TensorOptions& options) {
    size_t bytes = options.dtype().itemsize();
    for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
    bytes = std::max((bytes + kLine - 1) / kLine * kLine, kLine);
    void* block;
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = free_.find(bytes);
    if (found != free_.end()) {
      block = found->second;
      free_.erase(found);
    } else {
      block = ::operator new(bytes, kAlign);
      blocks_.emplace_back(bytes, block);
      num_bytes_ += static_cast<int64_t>(bytes);
    }
    const auto give_back = [self = shared_from_this(), bytes, block](void*) {
      const std::lock_guard<std::mutex> guard(self->lock_);
      self->free_.emplace(bytes, block);
    };
    return at::from_blob(block, sizes, give_back, options);
  }

  static constexpr size_t kLine = 64;
  static constexpr std::align_val_t kAlign{kLine};
  static thread_local Recording* current;
  static thread_local bool is_within;
  std::vector<std::function<void()>> calls_;
  std::vector<Tensor> kept_;
  std::mutex lock_;
  std::vector<std::pair<size_t, void*>> blocks_;
  std::multimap<size_t, void*> free_;
  int64_t num_bytes_ = 0;
  at::CallbackHandle watch_ = 0;
  std::set<std::string> others_;
};

thread_local Recording* Recording::current = nullptr;
thread_local bool Recording::is_within = false;

}  // namespace
}  // namespace manta
