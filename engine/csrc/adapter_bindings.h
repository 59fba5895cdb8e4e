// What adapters add to a linear's outputs: a part of bindings.cpp.
#pragma once

namespace manta {
namespace {

// The matrices of one linear's adapters, by slot. A linear may be several projections of one input,
// whose outputs are side by side.
class AdapterWeights {
 public:
  // sizes: outputs of each projection.
  AdapterWeights(int64_t in, std::vector<int64_t> sizes, int64_t slots) : in(in), sizes_(std::move(sizes)), slots_(slots) {
    TORCH_CHECK(in > 0 && !sizes_.empty() && slots > 0, "a linear of adapters has inputs, outputs and slots");
  }

  // a and b: for each projection [rank, in] and [rank, size], or both None.
  void set(int64_t slot, const std::vector<c10::optional<Tensor>>& a, const std::vector<c10::optional<Tensor>>& b) {
    TORCH_CHECK(slot >= 0 && slot < num_slots(), "there is no slot ", slot);
    TORCH_CHECK(a.size() == sizes_.size() && b.size() == sizes_.size(), "there are ", sizes_.size(), " projections");
    Slot made;
    int64_t start = 0;
    for (size_t i = 0; i < sizes_.size(); start += sizes_[i++]) {
      TORCH_CHECK(a[i].has_value() == b[i].has_value(), "A and B come together");
      if (!a[i]) continue;
      check_cpu(*a[i], *b[i]);
      TORCH_CHECK(a[i]->dim() == 2 && a[i]->is_contiguous() && a[i]->size(1) == in, "A must be [rank, ", in, "]");
      TORCH_CHECK(b[i]->dim() == 2 && b[i]->is_contiguous() && b[i]->size(0) == a[i]->size(0) &&
                      b[i]->size(1) == sizes_[i] && b[i]->scalar_type() == a[i]->scalar_type(),
                  "B must be [rank, ", sizes_[i], "] of the type of A");
      TORCH_CHECK(made.kept.empty() || made.kept[0].scalar_type() == a[i]->scalar_type(), "one type for all");
      made.parts.push_back({a[i]->size(0), a[i]->data_ptr(), b[i]->data_ptr(), start, sizes_[i]});
      made.kept.push_back(*a[i]);
      made.kept.push_back(*b[i]);
    }
    slots_[static_cast<size_t>(slot)] = std::move(made);
  }

  void clear(int64_t slot) {
    TORCH_CHECK(slot >= 0 && slot < num_slots(), "there is no slot ", slot);
    slots_[static_cast<size_t>(slot)] = {};
  }

  // The rows' blocks. A slot below 0 is no adapter.
  std::vector<AdapterBlock> blocks(const int32_t* of_rows, int64_t rows, at::ScalarType type) const {
    std::vector<AdapterBlock> made, open(slots_.size());
    for (int64_t row = 0; row < rows; row++) {
      const int32_t slot = of_rows[row];
      if (slot < 0) continue;
      TORCH_CHECK(slot < num_slots(), "row ", row, " is of slot ", slot, " of ", num_slots());
      const Slot& adapter = slots_[static_cast<size_t>(slot)];
      if (adapter.parts.empty()) continue;
      TORCH_CHECK(adapter.kept[0].scalar_type() == type, "x and the adapter differ in type");
      AdapterBlock& block = open[static_cast<size_t>(slot)];
      block.parts = adapter.parts.data();
      block.num_parts = static_cast<int64_t>(adapter.parts.size());
      block.rows[block.count++] = row;
      if (block.count == 4) {
        made.push_back(block);
        block.count = 0;
      }
    }
    for (const AdapterBlock& block : open)
      if (block.count) made.push_back(block);
    return made;
  }

  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }
  int64_t out() const {
    int64_t all = 0;
    for (const int64_t size : sizes_) all += size;
    return all;
  }

  const int64_t in;

 private:
  struct Slot {
    std::vector<AdapterPart> parts;
    std::vector<Tensor> kept;
  };
  std::vector<int64_t> sizes_;
  std::vector<Slot> slots_;
};

// Adds to y [rows, out] what the adapter in each row's slot makes of x [rows, in]; slots: int32 [rows].
void adapt_(const Tensor& y, const Tensor& x, const Tensor& slots, const std::shared_ptr<AdapterWeights>& weights) {
  check_cpu(y, x, slots);
  check_rows(x, weights->in);
  check_rows(y, weights->out());
  TORCH_CHECK(y.size(0) == x.size(0) && y.scalar_type() == x.scalar_type(), "x and y don't fit");
  TORCH_CHECK(slots.scalar_type() == at::kInt && slots.is_contiguous() && slots.numel() == x.size(0),
              "slots must be int32 [", x.size(0), "]");
  const Adapted args{type_of(x), x.data_ptr(), x.stride(0), weights->in, y.data_ptr(), y.stride(0), nullptr, 0, 0};
  const auto call = [args, weights, of_rows = slots.data_ptr<int32_t>(), rows = x.size(0), type = x.scalar_type()] {
    const auto blocks = weights->blocks(of_rows, rows, type);
    Adapted now = on_threads(args);
    now.blocks = blocks.data();
    now.num_blocks = static_cast<int64_t>(blocks.size());
    kernels().adapt(now);
  };
  Recording::run_long(call, {&y, &x, &slots});
}

}  // namespace
}  // namespace manta
