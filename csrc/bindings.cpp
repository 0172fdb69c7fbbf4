// The Python module of the native core, `tlt_ext._C`.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "attention/op.h"
#include "common/limits.h"
#include "common/math.h"
#include "common/noise.h"
#include "common/parallel.h"
#include "common/python.h"
#include "draft/op.h"
#include "graphs/op.h"
#include "graphs/pool.h"
#include "kv/op.h"
#include "layers/dot.h"
#include "layers/op.h"
#include "ngram/op.h"
#include "sampling/op.h"
#include "tree/op.h"

#if defined(TLT_WITH_CUDA)
#include "common/cuda.h"
#endif

namespace py = pybind11;
using namespace py::literals;
using NoGil = py::call_guard<py::gil_scoped_release>;

namespace {

py::dict build_info() {
  py::dict info;
  info["version"] = TLT_VERSION;
  info["compiler"] = TLT_COMPILER;
#if defined(TLT_WITH_CUDA)
  info["cuda_compiler"] = TLT_CUDA_COMPILER;
  info["cuda_archs"] = TLT_CUDA_ARCHS;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  py::list devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp device;
    if (cudaGetDeviceProperties(&device, i) != cudaSuccess) continue;
    devices.append(std::string(device.name) + " (sm_" + std::to_string(device.major) +
                   std::to_string(device.minor) + ")");
  }
  info["devices"] = devices;
#else
  info["cuda_compiler"] = py::none();
  info["cuda_archs"] = "";
  info["devices"] = py::list();
#endif
  return info;
}

// Names of the ops with a CUDA kernel in this build.
std::vector<std::string> cuda_ops() {
#if defined(TLT_WITH_CUDA)
  return {
      "rms_norm",           "silu_mul",   "linear_rows",    "linear_silu_mul", "linear_append",
      "fold_partials",      "append_kv",  "tree_attention", "commit_path",     "copy_pages",
      "gather_new_rows",    "sample",     "verify_tree",    "expand_tree",     "select_nodes",
      "verify_rejection",   "arm_passes", "advance_batch",  "ngram_propose",   "draft_inputs",
      "draft_level_inputs",
  };
#else
  return {};
#endif
}

void bind_common(py::module_& m) {
  m.def("build_info", &build_info);
  m.def("cuda_ops", &cuda_ops);
  m.def("num_threads", &tlt::num_threads);
  m.def("set_num_threads", &tlt::set_num_threads, "count"_a);
  m.def(
      "philox",
      [](std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
        const tlt::Philox4 r = tlt::philox(c[0], c[1], c[2], c[3], k[0], k[1]);
        return std::array<uint32_t, 4>{r.word[0], r.word[1], r.word[2], r.word[3]};
      },
      "counter"_a, "key"_a);
  m.def("gumbel", [](uint32_t word) { return tlt::gumbel(word); }, "word"_a);
  m.def("group_exponential", &tlt::group_exponential, "word"_a, "rest"_a, "id"_a);
  m.def(
      "target_noise",
      [](uint64_t seed, int64_t request, int32_t position, uint32_t id) {
        const auto key = tlt::noise_key(seed, request, tlt::NoiseDomain::kTarget);
        return tlt::target_noise(key, position, id);
      },
      "seed"_a, "request"_a, "position"_a, "id"_a);
  m.attr("NOISE_VERSION") = tlt::kNoiseVersion;
  m.def("uniform_open", [](uint32_t word) { return tlt::uniform_open(word); }, "word"_a);
  m.def("log_f32", [](float x) { return tlt::log_f32(x); }, "x"_a);
  m.def("exp_f32", [](float x) { return tlt::exp_f32(x); }, "x"_a);
}

// The limits of `common/limits.h`, for tlt_ext/limits.py.
void bind_limits(py::module_& m) {
  m.attr("MAX_DEPTH") = tlt::kMaxDepth;
  m.attr("MAX_EMITTED") = tlt::kMaxPassTokens;
  m.attr("MAX_TOP_K") = tlt::kMaxTopK;
  m.attr("MAX_TREE_ROWS") = tlt::kMaxTreeRows;
  m.attr("MAX_DRAFT_SLOTS") = tlt::kMaxDraftSlots;
  m.attr("MAX_HEAD_DIM") = tlt::kMaxHeadDim;
  m.attr("MAX_FOLD_BLOCKS") = tlt::kMaxFoldBlocks;
  m.attr("CONTROL_WORDS") = static_cast<int>(tlt::kControlWords);
}

// ---- layers -------------------------------------------------------------------------------------

void bind_layers(py::module_& m) {
  m.def("rms_norm", &tlt::rms_norm, "x"_a, "weight"_a, "out"_a, "eps"_a, "stream"_a, NoGil());
  m.def("silu_mul", &tlt::silu_mul, "x"_a, "out"_a, "stream"_a, NoGil());
  m.def("linear_rows", &tlt::linear_rows, "x"_a, "weight"_a, "out"_a, "norm_weight"_a, "eps"_a,
        "bias"_a, "residual"_a, "parts"_a, "pdl"_a, "stream"_a, NoGil());
  m.def("fold_partials", &tlt::fold_partials, "partials"_a, "out"_a, "bias"_a, "residual"_a,
        "flags"_a, "rank"_a, "timeout_s"_a, "stream"_a, NoGil());
  m.def("linear_silu_mul", &tlt::linear_silu_mul, "x"_a, "weight"_a, "out"_a, "norm_weight"_a,
        "eps"_a, "pdl"_a, "stream"_a, NoGil());
  m.def("linear_append", &tlt::linear_append, "x"_a, "weight"_a, "q_out"_a, "k_cache"_a,
        "v_cache"_a, "cos_sin"_a, "rows"_a, "norm_weight"_a, "eps"_a, "bias"_a, "pdl"_a,
        "pdl_tables"_a, "stream"_a, NoGil());
  m.def("dot_variants", [] {
    std::vector<std::string> names;
    for (const tlt::DotVariant& variant : tlt::dot_variants()) names.push_back(variant.name);
    return names;
  });
  m.def(  // for tests: float32 x [rows, depth], w [cols, depth], out [rows, cols], all dense
      "dot_rows",
      [](size_t variant, const tlt::Tensor& x, const tlt::Tensor& w, const tlt::Tensor& out,
         int parts) {
        tlt::dot_variants().at(variant).run({x.ptr<float>(), x.stride[0], x.shape[0],
                                             w.ptr<float>(), w.stride[0], w.shape[0], x.shape[1],
                                             parts, out.ptr<float>(), out.stride[0]});
      },
      "variant"_a, "x"_a, "w"_a, "out"_a, "parts"_a);
}

// ---- kv and attention ---------------------------------------------------------------------------

void bind_kv(py::module_& m) {
  m.def("append_kv", &tlt::append_kv, "qkv"_a, "q_out"_a, "k_cache"_a, "v_cache"_a, "cos_sin"_a,
        "rows"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "stream"_a, NoGil());
  m.def("commit_path", &tlt::commit_path, "k_cache"_a, "v_cache"_a, "rows"_a, "path"_a,
        "num_emitted"_a, "features"_a, "feature_rows"_a, "stream"_a, NoGil());
  m.def("copy_pages", &tlt::copy_pages, "cache"_a, "source"_a, "destination"_a, "stream"_a,
        NoGil());
  m.def("gather_new_rows", &tlt::gather_new_rows, "features"_a, "rows"_a, "table"_a, "num_new"_a,
        "out"_a, "stream"_a, NoGil());
}

void bind_attention(py::module_& m) {
  m.def("tree_attention", &tlt::tree_attention, "q"_a, "k_cache"_a, "v_cache"_a, "out"_a, "rows"_a,
        "ancestors"_a, "scale"_a, "lse"_a, "workspace"_a, "pdl"_a, "stream"_a, NoGil());
  m.def("attention_workspace_bytes", &tlt::attention_workspace_bytes, "num_requests"_a,
        "num_rows"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "max_slots"_a);
}

// ---- sampling -----------------------------------------------------------------------------------

void bind_sampling(py::module_& m) {
  using tlt::Tensor;
  m.def("sampling_workspace_bytes", &tlt::sampling_workspace_bytes, "rows"_a);
  m.def(
      "sample",
      [](const Tensor& logits, const tlt::SamplingArgs& sampling, const Tensor& position,
         const Tensor& tokens, const Tensor& logprobs, const Tensor& status, uint64_t seed,
         std::optional<int64_t> vocab_size, const Tensor& filtered_logprobs, uintptr_t stream) {
        tlt::sample(logits, sampling, {position, tokens, logprobs, status, filtered_logprobs}, seed,
                    vocab_size, stream);
      },
      "logits"_a, "sampling"_a, "position"_a, "tokens"_a, "logprobs"_a, "status"_a, "seed"_a,
      "vocab_size"_a, "filtered_logprobs"_a, "stream"_a, NoGil());
  m.def(
      "verify_tree",
      [](const Tensor& logits, const tlt::VerifyNodes& tree, const tlt::VerifyRows& rows,
         const tlt::SamplingArgs& sampling, const tlt::VerifyOutputArgs& out,
         const Tensor& stop_ids, const Tensor& limit, uint64_t seed,
         std::optional<int64_t> vocab_size, const Tensor& workspace, uintptr_t stream) {
        tlt::verify_tree({logits, tree, rows, sampling, out, stop_ids, limit}, seed, vocab_size,
                         workspace, stream);
      },
      "logits"_a, "tree"_a, "rows"_a, "sampling"_a, "out"_a, "stop_ids"_a, "limit"_a, "seed"_a,
      "vocab_size"_a, "workspace"_a, "stream"_a, NoGil());
  m.def(
      "verify_rejection",
      [](const Tensor& logits, const Tensor& draft_probs, const tlt::VerifyNodes& tree,
         const tlt::VerifyRows& rows, const tlt::SamplingArgs& sampling,
         const tlt::VerifyOutputArgs& out, const Tensor& stop_ids, const Tensor& limit,
         uint64_t seed, std::optional<int64_t> vocab_size, bool deterministic, uintptr_t stream) {
        tlt::verify_rejection({logits, tree, rows, sampling, out, stop_ids, limit}, draft_probs,
                              seed, vocab_size, deterministic, stream);
      },
      "logits"_a, "draft_probs"_a, "tree"_a, "rows"_a, "sampling"_a, "out"_a, "stop_ids"_a,
      "limit"_a, "seed"_a, "vocab_size"_a, "deterministic"_a, "stream"_a, NoGil());
}

// ---- tree ---------------------------------------------------------------------------------------

void bind_tree(py::module_& m) {
  m.def("expand_tree", &tlt::expand_tree, "draft_logits"_a, "nodes"_a, "frontier"_a,
        "next_frontier"_a, "sampling"_a, "root_position"_a, "status"_a, "seed"_a, "vocab_size"_a,
        "slot_base"_a, "d2t"_a, "score_temperature"_a, "stream"_a, NoGil());
  m.def("select_nodes", &tlt::select_nodes, "nodes"_a, "tree"_a, "root_position"_a, "position"_a,
        "row_start"_a, "source"_a, "num_verify"_a, "stream"_a, NoGil());
}

// ---- draft --------------------------------------------------------------------------------------

void bind_draft(py::module_& m) {
  m.def("draft_inputs", &tlt::draft_inputs, "weights"_a, "ids"_a, "hidden"_a, "out"_a, "eps"_a,
        "stream"_a, NoGil());
  m.def("draft_level_inputs", &tlt::draft_level_inputs, "weights"_a, "nodes"_a, "frontier"_a,
        "hidden"_a, "rows"_a, "out"_a, "hidden_out"_a, "depth"_a, "eps"_a, "stream"_a, NoGil());
}

// ---- ngram --------------------------------------------------------------------------------------

void bind_ngram(py::module_& m) {
  m.def("ngram_propose", &tlt::ngram_propose, "table"_a, "nodes"_a, "sampling"_a, "context_len"_a,
        "status"_a, "seed"_a, "depth"_a, "top_k"_a, "max_ngram"_a, "min_ngram"_a,
        "keep_unmatched"_a, "stream"_a, NoGil());
}

// ---- graphs -------------------------------------------------------------------------------------

// A property that returns a view of one of the ring's arrays, [passes, requests, tokens], and keeps
// the ring alive. The last two axes are transposed in memory.
template <auto kMember>
auto show(int axes) {
  return [axes](py::object self) {
    const tlt::RingView& view = self.cast<tlt::PassRing&>().view();
    auto* data = view.*kMember;
    const auto size = static_cast<py::ssize_t>(sizeof(*data));
    using Axes = std::vector<py::ssize_t>;
    const py::ssize_t rows = view.max_batch, width = view.max_emitted;
    const Axes shape = axes == 3   ? Axes{view.passes, rows, width}
                       : axes == 2 ? Axes{view.passes, rows}
                                   : Axes{axes == 1 ? view.passes : 1};
    const Axes strides = axes == 3   ? Axes{rows * width * size, size, rows * size}
                         : axes == 2 ? Axes{rows * size, size}
                                     : Axes{size};
    return py::array_t<std::remove_pointer_t<decltype(data)>>(shape, strides, data, self);
  };
}

void bind_graph_pool(py::module_& m) {
  using tlt::GraphPool;
  using tlt::Tensor;
  using Parts = std::vector<uintptr_t>;
  py::register_exception<tlt::GraphError>(m, "GraphError", PyExc_RuntimeError);
  py::class_<GraphPool>(m, "GraphPool")
      .def(py::init<int, int64_t>(), "device"_a, "budget_bytes"_a)
      .def_static("supports_loop", &GraphPool::supports_loop, "device"_a)
      .def(
          "add",
          [](GraphPool& pool, const std::string& key, const Parts& graphs, const Tensor& control,
             bool loop, int priority,
             uintptr_t stream) { return pool.add(key, {graphs, control, loop, priority}, stream); },
          "key"_a, "graphs"_a, "control"_a, "loop"_a, "priority"_a, "stream"_a, NoGil())
      .def("launch", &GraphPool::launch, "key"_a, "stream"_a, NoGil())
      .def("remove", &GraphPool::remove, "key"_a, NoGil())
      .def("__contains__", &GraphPool::contains, "key"_a)
      .def("usage", [](const GraphPool& pool) {
        py::dict all;
        for (const auto& [key, usage] : pool.usage()) {
          all[py::str(key)] =
              py::make_tuple(usage.charged_bytes, usage.resident_bytes, usage.peak_bytes,
                             usage.nodes, usage.launches, usage.loop);
        }
        return all;
      });
}

void bind_graphs(py::module_& m) {
  using tlt::PassRing;
  using tlt::RingView;
  py::class_<PassRing>(m, "PassRing")
      .def(py::init<int64_t, int64_t, int64_t, bool>(), "passes"_a, "max_batch"_a, "max_emitted"_a,
           "pinned"_a)
      .def_property_readonly("begin_ns", show<&RingView::begin_ns>(0))
      .def_property_readonly("time_ns", show<&RingView::time_ns>(1))
      .def_property_readonly("num_emitted", show<&RingView::num_emitted>(2))
      .def_property_readonly("finish", show<&RingView::finish>(2))
      .def_property_readonly("status", show<&RingView::status>(2))
      .def_property_readonly("tokens", show<&RingView::tokens>(3))
      .def_property_readonly("logprobs", show<&RingView::logprobs>(3))
      .def_property_readonly("passes", [](const PassRing& ring) { return ring.view().passes; })
      .def_property_readonly("sequence", &PassRing::sequence)
      .def_property_readonly("reason", &PassRing::reason)
      .def("request_stop", &PassRing::request_stop)
      .def("wait", &PassRing::wait, "timeout_s"_a, NoGil())
      .def("collect", [](const PassRing& ring, int64_t begin, int64_t end, int64_t rows) {
        py::list list;
        for (const tlt::Collected& row : ring.collect(begin, end, rows)) {
          list.append(py::make_tuple(row.tokens, row.logprobs, row.counts, row.finish, row.status));
        }
        return list;
      });
  m.def("advance_batch", &tlt::advance_batch, "verified"_a, "table"_a, "requests"_a, "control"_a,
        "ring"_a, "lookahead"_a, "stream"_a, NoGil());
  m.def("graph_bytes", &tlt::graph_bytes, "nodes"_a, "loop"_a);
  bind_graph_pool(m);
  m.def("arm_passes", &tlt::arm_passes, "control"_a, "ring"_a, "limit"_a, "ends"_a, "stream"_a,
        NoGil());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  py::register_exception<tlt::DTypeError>(m, "DTypeError", PyExc_TypeError);
  bind_common(m);
  bind_limits(m);
  bind_layers(m);
  bind_kv(m);
  bind_attention(m);
  bind_sampling(m);
  bind_tree(m);
  bind_draft(m);
  bind_ngram(m);
  bind_graphs(m);
}
