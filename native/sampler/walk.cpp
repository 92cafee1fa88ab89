#include "sampler/walk.h"

#include <algorithm>
#include <memory>

namespace gids::sampler {

namespace {

constexpr i64 dead_end = -1;

struct Faults {
  FirstFault nodes, edges;
};

// The source of the in-edge of `node` that a walk draws with number i of `start`, or dead_end.
i64 hop(const Relation& relation, u64 num_src, u64 node, const Variates& variates, u64 start, u32 i, Faults& faults) {
  const i64 begin = relation.indptr[node], end = relation.indptr[node + 1];
  if (begin < 0 || end < begin || static_cast<u64>(end) > relation.num_edges) {
    faults.nodes.note(node);
    return dead_end;
  }
  if (begin == end) return dead_end;
  const u64 degree = static_cast<u64>(end - begin);
  const u64 position = static_cast<u64>(begin) + random::below(variates.draw(start, i), degree);
  const i64 source = relation.wide ? static_cast<const i64*>(relation.indices)[position]
                                   : static_cast<const int*>(relation.indices)[position];
  if (static_cast<u64>(source) < num_src) return source;
  faults.edges.note(position);
  return dead_end;
}

void raise_faults(const Relation& relation, u64 num_src, const Faults& faults) {
  if (faults.nodes.at() != FirstFault::none)
    throw BadTopology(relation, "indptr decreases or exceeds the indices at node " + std::to_string(faults.nodes.at()));
  if (faults.edges.at() != FirstFault::none)
    throw BadTopology(relation, "indices[" + std::to_string(faults.edges.at()) + "] is outside 0 to " +
                                    std::to_string(static_cast<i64>(num_src) - 1));
}

// The relations of a traversal, each with the positions of its faults.
class Path {
 public:
  Path(const Topology& graph, const std::vector<u32>& path) {
    for (const u32 r : path) {
      const Relation& relation = graph.relations[r];
      hops_.push_back({&relation, graph.node_types[relation.src].count, std::make_unique<Faults>()});
    }
  }

  // Numbers that one traversal draws.
  u32 numbers() const { return static_cast<u32>(hops_.size()); }

  // Where a traversal from `node` ends, with draws from number `i` of `start` on; false in a dead end.
  bool walk(u64& node, const Variates& variates, u64 start, u32 i) const {
    for (const auto& [relation, num_src, faults] : hops_) {
      const i64 source = hop(*relation, num_src, node, variates, start, i++, *faults);
      if (source == dead_end) return false;
      node = static_cast<u64>(source);
    }
    return true;
  }

  void raise() const {
    for (const auto& [relation, num_src, faults] : hops_) raise_faults(*relation, num_src, *faults);
  }

 private:
  struct Hop {
    const Relation* relation;
    u64 num_src;
    std::unique_ptr<Faults> faults;
  };
  std::vector<Hop> hops_;
};

struct Visited {
  u64 node, first;  // the first visit's number
  u64 times;
};

// Each node once: by number of visits, then by first visit. visits: in order, once each.
void rank(std::vector<Visited>& visits) {
  std::sort(visits.begin(), visits.end(), [](const Visited& a, const Visited& b) {
    return a.node < b.node || (a.node == b.node && a.first < b.first);
  });
  size_t kept = 0;
  for (size_t at = 0; at < visits.size(); ++at) {
    if (kept && visits[kept - 1].node == visits[at].node) ++visits[kept - 1].times;
    else visits[kept++] = visits[at];
  }
  visits.resize(kept);
  std::sort(visits.begin(), visits.end(), [](const Visited& a, const Visited& b) {
    return a.times > b.times || (a.times == b.times && a.first < b.first);
  });
}

// Adds the neighbors that the most visits make, with their shares.
void take(const std::vector<Visited>& visits, size_t most, EdgeList& list) {
  const size_t taken = std::min(most, visits.size());
  u64 total = 0;
  for (size_t i = 0; i < taken; ++i) total += visits[i].times;
  list.reserve(taken);
  for (size_t i = 0; i < taken; ++i)
    list.add(visits[i].node, ~u64{0}, static_cast<float>(visits[i].times) / static_cast<float>(total));
}

// The nodes that walks from `start` visit, without itself, ranked.
void visit(const Path& path, const WalkOptions& options, const Variates& variates, u64 start,
           std::vector<Visited>& visits) {
  const u32 numbers = 1 + path.numbers();
  u32 i = 0;
  visits.clear();
  for (u32 walk = 0; walk < options.walks; ++walk) {
    u64 node = start;
    for (u32 step = 0; step < options.length; ++step, i += numbers) {
      if (step && unit(variates.draw(start, i)) < options.restart) node = start;
      if (!path.walk(node, variates, start, i + 1)) {
        node = start;  // from a dead end the walk goes back, too
        continue;
      }
      if (node != start) visits.push_back({node, visits.size(), 1});
    }
  }
  rank(visits);
}

}  // namespace

Minibatch sample_walks(HostSampler& host, const Topology& graph, Seeds seeds, std::span<const std::vector<int>> counts,
                       const WalkOptions& options, const Moment& moment) {
  const Path path(graph, options.path);
  Topology walks{graph.node_types, {graph.relations[options.path.front()]}};
  walks.relations[0].src = walks.relations[0].dst;  // what is between the ends of a path is nobody's neighbor
  return host.run(walks, seeds, static_cast<u32>(counts.size()), [&](u32 layer, u32, const Frontier& frontier) {
    const Variates variates(moment, layer, 0);
    const size_t most = static_cast<size_t>(counts[layer][0]);
    Block block = host.collect(frontier, [&](size_t v, EdgeList& list) {
      static thread_local std::vector<Visited> visits;
      visit(path, options, variates, static_cast<u64>(frontier.nodes[v]), visits);
      take(visits, most, list);
    });
    path.raise();
    return block;
  });
}

void hop_walks(const Topology& graph, u32 relation, const Moment& moment, u32 layer, const WalkDraws& draws,
               std::span<const i64> nodes, i64* out) {
  const Relation& of = graph.relations[relation];
  const u64 num_src = graph.node_types[of.src].count, num_dst = graph.node_types[of.dst].count;
  const Variates variates(moment, layer, 0);
  Faults faults;
  for (size_t w = 0; w < nodes.size(); ++w) {
    if (static_cast<u64>(nodes[w]) >= num_dst) throw std::out_of_range("a walk is at no node");
    out[w] = hop(of, num_src, static_cast<u64>(nodes[w]), variates, static_cast<u64>(draws.starts[w]),
                 static_cast<u32>(draws.numbers[w]), faults);
  }
  raise_faults(of, num_src, faults);
}

void restart_walks(const Moment& moment, u32 layer, const WalkDraws& draws, double restart, bool* out) {
  const Variates variates(moment, layer, 0);
  for (size_t w = 0; w < draws.starts.size(); ++w)
    out[w] = unit(variates.draw(static_cast<u64>(draws.starts[w]), static_cast<u32>(draws.numbers[w]))) < restart;
}

u64 rank_walks(std::span<const i64> visited, size_t each, size_t most, i64* indptr, i64* sources, float* shares) {
  std::vector<Visited> visits;
  EdgeList list;
  indptr[0] = 0;
  for (size_t v = 0; v * each < visited.size(); ++v) {
    visits.clear();
    for (const i64 node : visited.subspan(v * each, each))
      if (node != dead_end) visits.push_back({static_cast<u64>(node), visits.size(), 1});
    rank(visits);
    take(visits, most, list);
    indptr[v + 1] = static_cast<i64>(list.count);
  }
  std::copy_n(list.sources.data(), list.count, sources);
  std::copy_n(list.weights.data(), list.count, shares);
  return list.count;
}

}  // namespace gids::sampler
