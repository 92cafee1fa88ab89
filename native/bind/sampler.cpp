// gids._core: NeighborTopology, HostSampler and the random numbers behind them. Checks types and shapes, holds
// the graph's arrays, releases the GIL while a minibatch is made.
#include <unistd.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bind/bind.h"
#include "gids/forest.h"
#include "gids/id_map.h"
#include "gids/random.h"
#include "sampler/bulk.h"
#include "sampler/neighbor.h"
#include "sampler/variates.h"
#include "sampler/walk.h"
#include "store/mapped_file.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using sampler::Topology;

using Ids = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyIds = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutWeights = nb::ndarray<nb::numpy, float, nb::ndim<1>>;
using OutIds = nb::ndarray<nb::numpy, i64, nb::ndim<1>>;

// Owns a reference to every array that the sampler reads.
class OwningTopology {
 public:
  explicit OwningTopology(const std::vector<std::pair<u64, std::string>>& node_types) {
    for (const auto& [count, name] : node_types) {
      if (count > id_map::max_ids) throw nb::value_error("a node type has 2^32 nodes or more");
      topology_.node_types.push_back({count, name});
    }
  }

  void add(Ids indptr, AnyIds indices, u32 src, u32 dst, std::string name) {
    const auto& types = topology_.node_types;
    if (src >= types.size() || dst >= types.size()) throw nb::index_error("no such node type");
    if (indptr.size() != types[dst].count + 1)
      throw nb::value_error("indptr must have one entry more than there are destinations");
    const bool wide = indices.dtype() == nb::dtype<int64_t>();
    if (!wide && indices.dtype() != nb::dtype<int32_t>()) throw nb::type_error("indices must be int32 or int64");
    topology_.relations.push_back({indptr.data(), indices.data(), wide, indices.size(), src, dst, std::move(name)});
    indptrs_.push_back(std::move(indptr));
    indices_.push_back(std::move(indices));
  }

  const Topology& topology() const { return topology_; }

 private:
  Topology topology_;
  std::vector<Ids> indptrs_;
  std::vector<AnyIds> indices_;
};

// Makes its samplers anew in a forked child, which has neither the threads nor the memory of its parent's.
class OwnSampler {
 public:
  OwnSampler(u32 threads, size_t keep_bytes) : threads_(threads), keep_bytes_(keep_bytes) {
    if (threads == 0) throw nb::value_error("threads must be 1 or more");
  }
  ~OwnSampler() { leave_parent(); }
  OwnSampler(const OwnSampler&) = delete;
  OwnSampler& operator=(const OwnSampler&) = delete;

  sampler::Bulk& get() {
    leave_parent();
    if (!samplers_) samplers_ = std::make_unique<sampler::Bulk>(threads_, keep_bytes_);
    pid_ = getpid();
    return *samplers_;
  }
  template <class Count>
  size_t count(Count count_bytes) {
    leave_parent();
    return samplers_ ? count_bytes(*samplers_) : 0;
  }

 private:
  void leave_parent() {
    if (samplers_ && getpid() != pid_) (void)samplers_.release();
  }

  u32 threads_;
  size_t keep_bytes_;
  pid_t pid_ = 0;
  std::unique_ptr<sampler::Bulk> samplers_;
};

nb::capsule owner_of(const sampler::Buffer& buffer) {
  return nb::capsule(new sampler::Buffer(buffer),
                     [](void* p) noexcept { delete static_cast<sampler::Buffer*>(p); });
}

nb::tuple arrays_of(const sampler::Block& block) {
  const nb::capsule owner = owner_of(block.memory);
  const u64 edges = block.num_edges;
  nb::object weights = nb::none();
  if (block.weights) weights = nb::cast(OutWeights(block.weights, {edges}, owner));
  return nb::make_tuple(OutIds(block.indptr, {block.num_dst + 1}, owner), OutIds(block.indices, {edges}, owner),
                        OutIds(block.positions, {edges}, owner), weights, block.num_src);
}

using Numbers = std::tuple<u64, u64, u64>;      // seed, epoch, step of the first minibatch
using Only = std::optional<u32>;                // the layer to draw, or all
using Batches = std::vector<std::vector<Ids>>;  // seeds, by minibatch and node type
using Fanouts = std::vector<std::vector<int>>;
using Dependency = std::pair<u64, bool>;        // kappa, nested

// Of minibatch i.
sampler::Moment moment_of(const Numbers& numbers, sampler::Dependency dependency, size_t i = 0) {
  const auto [seed, epoch, first_step] = numbers;
  return sampler::moment_of(seed, epoch, first_step + i, dependency);
}

nb::tuple arrays_of(const sampler::Minibatch& minibatch) {
  nb::list nodes, layers;
  for (const auto& list : minibatch.nodes) nodes.append(OutIds(list.ids, {list.count}, owner_of(list.memory)));
  nb::list trees;
  for (const auto& list : minibatch.nodes)
    if (list.trees) trees.append(OutIds(list.trees, {list.count}, owner_of(list.memory)));
  for (const auto& blocks : minibatch.layers) {
    nb::list layer;
    for (const auto& block : blocks) layer.append(arrays_of(block));
    layers.append(layer);
  }
  return nb::make_tuple(nodes, layers, trees);
}

// sample(samplers, spans of a minibatch's seeds, its moment, i) runs without the GIL.
template <class Sample>
nb::list run(OwnSampler& self, const Topology& topology, const Batches& seeds, const Fanouts& fanouts,
             size_t in_a_layer, const Numbers& numbers, Only only, sampler::Dependency dependency,
             const Sample& sample) {
  if (only && *only >= fanouts.size()) throw nb::index_error("only: no such layer");
  std::vector<std::vector<std::span<const i64>>> spans;
  for (const auto& by_type : seeds) {
    if (by_type.size() != topology.node_types.size()) throw nb::value_error("seeds must have one array per node type");
    auto& given = spans.emplace_back();
    for (const Ids& ids : by_type) given.emplace_back(ids.data(), ids.size());
  }
  for (const auto& layer : fanouts)
    if (layer.size() != in_a_layer) throw nb::value_error("fanouts must have one number per relation in each layer");
  std::vector<sampler::Minibatch> made;
  {
    nb::gil_scoped_release unlocked;
    store::MapGuard::prepare();
    made = store::read_mapped([&] {
      return self.get().make(spans.size(), std::get<2>(numbers), [&](sampler::Samplers& samplers, size_t i) {
        samplers.host.draw_only(only);
        return sample(samplers, spans[i], moment_of(numbers, dependency, i), i);
      });
    });
  }
  nb::list result;
  for (const auto& minibatch : made) result.append(arrays_of(minibatch));
  return result;
}

using Bits = nb::ndarray<const u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using EdgeWeights = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Tags = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// The trees of a minibatch: the tree of each seed by node type, tags and perhaps times of the trees.
using Trees = std::tuple<std::vector<Ids>, Tags, std::optional<Ids>>;
using TimesOf = std::optional<std::pair<AnyIds, bool>>;  // the times of edges, or of sources if true

sampler::Forest forest_of(const Trees& given, const std::vector<Ids>& seeds) {
  const auto& [of_seeds, tags, times] = given;
  if (of_seeds.size() != seeds.size()) throw nb::value_error("trees must have one array per node type");
  sampler::Forest forest{{}, {tags.data(), tags.size()}, {}};
  if (times && times->size() != tags.size()) throw nb::value_error("times must have one value per tree");
  if (times) forest.times = {times->data(), times->size()};
  for (size_t type = 0; type < seeds.size(); ++type) {
    const Ids& trees = of_seeds[type];
    if (trees.size() != seeds[type].size()) throw nb::value_error("trees must have one value per seed");
    for (size_t i = 0; i < trees.size(); ++i)
      if (static_cast<u64>(trees.data()[i]) >= tags.size()) throw nb::index_error("no such tree");
    forest.of_seeds.emplace_back(trees.data(), trees.size());
  }
  return forest;
}

sampler::Times times_of(const std::pair<AnyIds, bool>& given, const sampler::Relation& relation,
                        const Topology& topology) {
  const auto& [values, of_sources] = given;
  const bool wide = values.dtype() == nb::dtype<int64_t>();
  if (!wide && values.dtype() != nb::dtype<int32_t>()) throw nb::type_error("times must be int32 or int64");
  if (values.size() != (of_sources ? topology.node_types[relation.src].count : relation.num_edges))
    throw nb::value_error("times must have one value per edge of a relation, or per source");
  return {values.data(), wide, of_sources};
}

nb::list sample_neighbors(OwnSampler& self, const OwningTopology& graph, const Batches& seeds,
                           const Fanouts& fanouts, const Numbers& numbers, Only only, bool replace,
                           const std::vector<std::optional<EdgeWeights>>& weights, Dependency kappa_nested,
                           const std::vector<std::optional<Bits>>& near, float factor, bool weigh_near,
                           const std::vector<Trees>& trees, const std::vector<TimesOf>& times, bool last,
                           bool newest, bool induced) {
  const sampler::Dependency dependency(kappa_nested.first, kappa_nested.second);
  sampler::NeighborOptions options{replace, dependency.gradual(), {},   {},     factor,
                                   weigh_near, {}, last, newest, induced};
  const auto& relations = graph.topology().relations;
  if (weights.size() > relations.size()) throw nb::value_error("weights must have at most one array per relation");
  for (size_t r = 0; r < weights.size(); ++r) {
    if (weights[r] && weights[r]->size() != relations[r].num_edges)
      throw nb::value_error("weights must have one value per edge of a relation");
    options.weights.push_back(weights[r] ? weights[r]->data() : nullptr);
  }
  if (near.size() > relations.size()) throw nb::value_error("near must have at most one array per relation");
  for (size_t r = 0; r < near.size(); ++r) {
    if (near[r] && near[r]->size() != div_ceil(graph.topology().node_types[relations[r].src].count, 8))
      throw nb::value_error("near must have one bit per source of a relation");
    options.near.push_back(near[r] ? near[r]->data() : nullptr);
  }
  std::vector<sampler::Forest> forests;
  if (!trees.empty() && trees.size() != seeds.size()) throw nb::value_error("trees must be of every minibatch");
  for (size_t i = 0; i < trees.size(); ++i) forests.push_back(forest_of(trees[i], seeds[i]));
  if (times.size() > relations.size()) throw nb::value_error("times must have at most one array per relation");
  for (size_t r = 0; r < times.size(); ++r) {
    options.times.push_back(times[r] ? times_of(*times[r], relations[r], graph.topology()) : sampler::Times{});
    for (const sampler::Forest& forest : forests)
      if (times[r] && forest.times.size() != forest.tags.size()) throw nb::value_error("the trees have no times");
    if (times[r] && forests.empty()) throw nb::value_error("times need trees");
  }
  return run(self, graph.topology(), seeds, fanouts, relations.size(), numbers, only, dependency,
             [&](sampler::Samplers& samplers, sampler::Seeds spans, const sampler::Moment& moment, size_t i) {
               return sampler::sample_neighbors(samplers.host, graph.topology(), spans, fanouts, options, moment,
                                                forests.empty() ? nullptr : &forests[i]);
             });
}

nb::list sample_labor(OwnSampler& self, const OwningTopology& graph, const Batches& seeds,
                       const Fanouts& fanouts, const Numbers& numbers, Only only, int importance_sampling,
                       bool fixed_count, bool layer_dependency, Dependency kappa_nested) {
  const sampler::Dependency dependency(kappa_nested.first, kappa_nested.second);
  return run(self, graph.topology(), seeds, fanouts, graph.topology().relations.size(), numbers, only, dependency,
             [&](sampler::Samplers& samplers, sampler::Seeds spans, const sampler::Moment& moment, size_t) {
               return samplers.labor.sample(samplers.host, graph.topology(), spans, fanouts,
                                            {importance_sampling, fixed_count, layer_dependency}, moment);
             });
}

nb::list sample_ladies(OwnSampler& self, const OwningTopology& graph, const Batches& seeds,
                        const Fanouts& sizes, const Numbers& numbers, Only only, bool by_count, bool replace,
                        bool poisson) {
  using Draws = sampler::Ladies::Draws;
  using Law = sampler::Ladies::Law;
  const Draws draws = poisson ? Draws::poisson : replace ? Draws::repeated : Draws::distinct;
  const Law law = by_count ? Law::count : Law::degree;
  return run(self, graph.topology(), seeds, sizes, graph.topology().relations.size(), numbers, only, 1,
             [&](sampler::Samplers& samplers, sampler::Seeds spans, const sampler::Moment& moment, size_t) {
               return samplers.ladies.sample(samplers.host, graph.topology(), spans, sizes, law, draws, moment);
             });
}

nb::list sample_walks(OwnSampler& self, const OwningTopology& graph, const Batches& seeds,
                       const Fanouts& counts, const Numbers& numbers, Only only, const std::vector<u32>& path,
                       u32 walks, u32 length, double restart) {
  for (size_t i = 0; i < path.size(); ++i)
    if (path[i] >= graph.topology().relations.size()) throw nb::index_error("path: no such relation");
  for (size_t i = 0; i < path.size(); ++i)
    if (graph.topology().relations[path[i]].src != graph.topology().relations[path[(i + 1) % path.size()]].dst)
      throw nb::value_error("path must lead back to its start");
  if (path.empty()) throw nb::value_error("path must have one relation or more");
  const sampler::WalkOptions options{path, walks, length, restart};
  return run(self, graph.topology(), seeds, counts, 1, numbers, only, 1,
             [&](sampler::Samplers& samplers, sampler::Seeds spans, const sampler::Moment& moment, size_t) {
               return sampler::sample_walks(samplers.host, graph.topology(), spans, counts, options, moment);
             });
}

using OutTags = nb::ndarray<nb::numpy, u32, nb::ndim<1>>;

// The nodes of a minibatch by type, while its edges come from several samplers.
class FoundNodes {
 public:
  FoundNodes(u32 threads, const Batches::value_type& seeds, const std::optional<std::vector<Ids>>& trees)
      : workers_(threads), in_trees_(trees.has_value()) {
    if (trees && trees->size() != seeds.size()) throw nb::value_error("trees must have one array per node type");
    (in_trees_ ? tree_sets_.resize(seeds.size()) : sets_.resize(seeds.size()));
    for (size_t type = 0; type < seeds.size(); ++type) {
      for (size_t i = 0; i < seeds[type].size(); ++i)
        if (static_cast<u64>(seeds[type].data()[i]) >= id_map::max_ids) throw nb::index_error("no such node");
      if (trees && (*trees)[type].size() != seeds[type].size())
        throw nb::value_error("trees must have one value per seed");
      const std::span<const i64> ids(seeds[type].data(), seeds[type].size());
      in_trees_ ? tree_sets_[type].start(ids, (*trees)[type].data()) : sets_[type].start(ids);
    }
  }

  void relabel(u32 type, nb::ndarray<i64, nb::ndim<1>, nb::c_contig, nb::device::cpu> ids, std::optional<Tags> trees) {
    check(type);
    if (trees.has_value() != in_trees_ || (trees && trees->size() != ids.size()))
      throw nb::value_error("trees must have one value per id, or be None");
    nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < ids.size(); ++i)
      if (static_cast<u64>(ids.data()[i]) >= id_map::max_ids) throw std::out_of_range("no such node");
    if (in_trees_)
      tree_sets_[type].relabel(ids.data(), ids.size(), workers_, trees->data());
    else
      sets_[type].relabel(ids.data(), ids.size(), workers_);
  }

  size_t size(u32 type) const {
    check(type);
    return in_trees_ ? tree_sets_[type].size() : sets_[type].size();
  }
  OutIds nodes(u32 type) const {
    check(type);
    return copy<i64>(in_trees_ ? tree_sets_[type].nodes().data() : sets_[type].nodes().data(), size(type));
  }
  OutTags trees(u32 type) const {
    check(type);
    if (!in_trees_) throw nb::value_error("the nodes are in no trees");
    return copy<u32>(tree_sets_[type].trees(), size(type));
  }

 private:
  template <class T>
  static nb::ndarray<nb::numpy, T, nb::ndim<1>> copy(const T* from, size_t count) {
    T* to = new T[count];
    std::copy_n(from, count, to);
    return {to, {count}, nb::capsule(to, [](void* p) noexcept { delete[] static_cast<T*>(p); })};
  }
  void check(u32 type) const {
    if (type >= (in_trees_ ? tree_sets_.size() : sets_.size())) throw nb::index_error("no such node type");
  }

  cache::Workers workers_;
  bool in_trees_;
  std::vector<sampler::NodeSet> sets_;
  std::vector<sampler::TreeSet> tree_sets_;
};

using MutableIds = nb::ndarray<i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

sampler::WalkDraws walk_draws(const Ids& starts, const Ids& numbers, size_t count) {
  if (starts.size() != count || numbers.size() != count) throw nb::value_error("give one value for each walk");
  return {{starts.data(), count}, {numbers.data(), count}};
}

void hop_walks(const OwningTopology& graph, u32 relation, const Numbers& numbers, u32 layer, Ids starts, Ids draws,
               Ids nodes, MutableIds out) {
  if (relation >= graph.topology().relations.size()) throw nb::index_error("no such relation");
  if (out.size() != nodes.size()) throw nb::value_error("give one value for each walk");
  const auto of = walk_draws(starts, draws, nodes.size());
  nb::gil_scoped_release unlocked;
  store::MapGuard::prepare();
  store::read_mapped([&] {
    sampler::hop_walks(graph.topology(), relation, moment_of(numbers, 1), layer, of, {nodes.data(), nodes.size()},
                       out.data());
    return 0;
  });
}

void restart_walks(const Numbers& numbers, u32 layer, double restart, Ids starts, Ids draws,
                   nb::ndarray<bool, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  sampler::restart_walks(moment_of(numbers, 1), layer, walk_draws(starts, draws, out.size()), restart, out.data());
}

u64 rank_walks(Ids visited, size_t each, size_t most, MutableIds indptr, MutableIds sources,
               nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> shares) {
  if (each == 0 || visited.size() % each || indptr.size() != visited.size() / each + 1 ||
      sources.size() < visited.size() || shares.size() < visited.size())
    throw nb::value_error("the arrays do not fit together");
  nb::gil_scoped_release unlocked;
  return sampler::rank_walks({visited.data(), visited.size()}, each, most, indptr.data(), sources.data(),
                             shares.data());
}

void draw_variates(const Numbers& numbers, u64 kappa, u32 layer, u32 number, Ids nodes,
                   nb::ndarray<u64, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
  if (out.size() != nodes.size()) throw nb::value_error("out must have one value per node");
  const sampler::Variates variates(moment_of(numbers, kappa), layer, number);
  sampler::Lanes node = {}, bits;
  for (size_t first = 0; first < nodes.size(); first += sampler::draw_lanes) {
    const size_t count = std::min<size_t>(sampler::draw_lanes, nodes.size() - first);
    std::copy_n(nodes.data() + first, count, node);
    variates.of_nodes(node, static_cast<u32>(count), 1, bits);
    std::copy_n(bits, count, out.data() + first);
  }
}

std::tuple<u32, u32, u32, u32> philox(std::tuple<u32, u32, u32, u32> counter, std::pair<u32, u32> key) {
  const auto [a, b, c, d] = counter;
  const random::Words w = random::philox({{a, b, c, d}}, key.first | u64{key.second} << 32);
  return {w.w[0], w.w[1], w.w[2], w.w[3]};
}

}  // namespace

void bind_sampler(nb::module_& m) {
  m.attr("MAX_NODES") = id_map::max_ids;
  m.def("philox", &philox, "counter"_a, "key"_a, "Philox4x32-10: four words from a counter of four and a key of two.");

  nb::class_<OwningTopology>(m, "NeighborTopology", "In-edges by relation, between numbered node types.")
      .def(nb::init<std::vector<std::pair<u64, std::string>>>(), "node_types"_a)
      .def("add", &OwningTopology::add, "indptr"_a.noconvert(), "indices"_a.noconvert(), "src"_a, "dst"_a,
           "name"_a, "The next relation: int64[num_dst + 1] and int32 or int64[num_edges], kept and not copied.");

  nb::exception<sampler::BadTopology>(m, "BadTopology", PyExc_ValueError);
  nb::class_<OwnSampler>(m, "HostSampler", "Threads, hash maps and buffers, used again for each minibatch.")
      .def(nb::init<u32, size_t>(), "threads"_a, "keep_bytes"_a)
      .def("neighbor", &sample_neighbors, "topology"_a, "seeds"_a.noconvert(), "fanouts"_a, "numbers"_a, "only"_a,
           "replace"_a, "weights"_a, "dependency"_a, "near"_a, "factor"_a, "weigh_near"_a, "trees"_a, "times"_a,
           "last"_a, "newest"_a, "induced"_a,
           "Minibatches of successive steps. seeds: int64[n] by minibatch and node type; fanouts: by layer, the "
           "seeds' first, by relation; numbers: (seed, epoch, first step); only: draw this layer alone, for the seeds "
           "as its nodes, and leave node ids in indices, or None; weights: by relation, float32[num_edges] or None; "
           "dependency: kappa (0: without end) and whether it is nested; near: by relation, a bit for each source "
           "whose edges are drawn factor times as often, or None; weigh_near: blocks of these relations have weights; "
           "trees: by minibatch (the tree of each seed by node type, tags, times or None), or empty; times: by "
           "relation (times of edges or of sources, whether of sources) or None: later edges are left out; last: draw "
           "among the last edges; newest: only nodes that the layer before found "
           "draw; induced: one layer, of all edges among the nodes. Returns of each minibatch (int64[n] nodes by node "
           "type, by layer and relation (indptr, indices, positions, weights or None, number of sources), the trees of "
           "the nodes by node type or nothing).")
      .def("labor", &sample_labor, "topology"_a, "seeds"_a.noconvert(), "fanouts"_a, "numbers"_a,
           "only"_a, "importance_sampling"_a, "fixed_count"_a, "layer_dependency"_a, "dependency"_a,
           "The same by LABOR. importance_sampling -1: to convergence.")
      .def("ladies", &sample_ladies, "topology"_a, "seeds"_a.noconvert(), "sizes"_a, "numbers"_a, "only"_a,
           "by_count"_a, "replace"_a, "poisson"_a,
           "The same by LADIES. sizes: how many sources to draw, by layer and relation; by_count: draw a source in "
           "proportion to the square of its edges to the nodes.")
      .def("walk", &sample_walks, "topology"_a, "seeds"_a.noconvert(), "counts"_a, "numbers"_a, "only"_a, "path"_a,
           "walks"_a, "length"_a, "restart"_a,
           "The same by random walks; one block in a layer. counts: neighbors, by layer, one each; path: relations.")
      .def_prop_ro("scratch_bytes", [](OwnSampler& s) { return s.count([](auto& b) { return b.scratch_bytes(); }); })
      .def_prop_ro("together_bytes", [](OwnSampler& s) { return s.count([](auto& b) { return b.together_bytes(); }); })
      .def_prop_ro("taken_bytes", [](OwnSampler& s) { return s.count([](auto& b) { return b.taken_bytes(); }); })
      .def_prop_ro("idle_bytes", [](OwnSampler& s) { return s.count([](auto& b) { return b.idle_bytes(); }); });

  nb::class_<FoundNodes>(m, "FoundNodes", "The nodes of a minibatch, while its edges come from several samplers.")
      .def(nb::init<u32, const Batches::value_type&, const std::optional<std::vector<Ids>>&>(), "threads"_a,
           "seeds"_a.noconvert(), "trees"_a = nb::none(),
           "seeds: int64[n] by node type; trees: the tree of each, or None.")
      .def("relabel", &FoundNodes::relabel, "type"_a, "ids"_a.noconvert(), "trees"_a.noconvert() = nb::none(),
           "Replace ids by local ids, in place; new nodes get the next ones. trees: uint32[n], of each id, or None.")
      .def("size", &FoundNodes::size, "type"_a)
      .def("nodes", &FoundNodes::nodes, "type"_a, "A copy, in order of first appearance.")
      .def("trees", &FoundNodes::trees, "type"_a, "The tree of each node, a copy.");

  m.def("hop_walks", &hop_walks, "topology"_a, "relation"_a, "numbers"_a, "layer"_a, "starts"_a.noconvert(),
        "draws"_a.noconvert(), "nodes"_a.noconvert(), "out"_a.noconvert(),
        "One hop of random walks from nodes; starts, draws: where each began, and the number of its draw. out: int64, "
        "the next nodes; -1 in a dead end.");
  m.def("restart_walks", &restart_walks, "numbers"_a, "layer"_a, "restart"_a, "starts"_a.noconvert(),
        "draws"_a.noconvert(), "out"_a.noconvert(), "Whether walks go back to their starts. out: bool.");
  m.def("rank_walks", &rank_walks, "visited"_a.noconvert(), "each"_a, "most"_a, "indptr"_a.noconvert(),
        "sources"_a.noconvert(), "shares"_a.noconvert(),
        "The neighbors that `each` visits of every node make; -1: no visit. Returns their number.");

  m.def("variates", &draw_variates, "numbers"_a, "kappa"_a, "layer"_a, "number"_a, "nodes"_a.noconvert(),
        "out"_a.noconvert(),
        "64 random bits for each node, which it has as a source of type `number` in a layer, with dependence kappa (0: "
        "without end). out: uint64[n].");
  m.def(
      "variate_keys",
      [](const Numbers& numbers, Dependency dependency, u32 layer, u32 number) {
        const auto [kappa, nested] = dependency;
        const sampler::Variates variates(moment_of(numbers, {kappa, nested}), layer, number);
        return std::tuple(variates.now, variates.next, variates.cos, variates.sin);
      },
      "numbers"_a, "dependency"_a, "layer"_a, "number"_a,
      "What the kernels need for these numbers: the keys of the group and of the next one, and their shares.");
  m.def(
      "tree_tags",
      [](u32 node_type, Ids roots, Ids times, nb::ndarray<u32, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
        if (out.size() != roots.size() || times.size() != roots.size())
          throw nb::value_error("times and out must have one value per root");
        for (size_t i = 0; i < roots.size(); ++i)
          out.data()[i] = forest::tag(node_type, static_cast<u64>(roots.data()[i]), times.data()[i]);
      },
      "node_type"_a, "roots"_a.noconvert(), "times"_a.noconvert(), "out"_a.noconvert(),
      "What the trees with these roots draw by. out: uint32[n].");
  m.def("philox2", &random::philox2, "counter"_a, "key"_a, "Philox2x32-10: 64 bits of 64 bits and a key of 32.");
}

}  // namespace gids
