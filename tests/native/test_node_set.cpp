// sources: sampler/*.cpp cache/workers.cpp store/mapped_file.cpp
// Numbering the nodes of a minibatch: by one thread and by several, as an ordinary map does it.
#include <algorithm>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "gids/forest.h"
#include "gids/id_map.h"
#include "gids/pair_map.h"
#include "sampler/labor.h"
#include "sampler/ladies.h"
#include "sampler/neighbor.h"
#include "sampler/node_set.h"

using namespace gids;
using namespace gids::sampler;

namespace {

struct Model {
  std::vector<i64> nodes;
  std::unordered_map<i64, i64> local;

  explicit Model(const std::vector<i64>& seeds) {
    for (const i64 seed : seeds) {
      local.emplace(seed, static_cast<i64>(nodes.size()));
      nodes.push_back(seed);
    }
  }
  void relabel(std::vector<i64>& ids) {
    for (i64& id : ids) {
      const auto [at, is_new] = local.emplace(id, static_cast<i64>(nodes.size()));
      if (is_new) nodes.push_back(id);
      id = at->second;
    }
  }
};

std::vector<i64> some_ids(std::mt19937_64& rng, size_t count, u64 below) {
  std::vector<i64> ids(count);
  for (i64& id : ids) {
    const u64 drawn = rng() % below;
    id = static_cast<i64>(rng() % 4 ? drawn : drawn % 5 * (below / 5));  // a few that many threads note at once
  }
  return ids;
}

void test_numbering_equals_the_model(u32 threads) {
  cache::Workers workers(threads);
  NodeSet set;
  std::mt19937_64 rng(threads);
  for (int round = 1; round < 6; round += 2) {
    const u64 below = round % 3 == 0 ? 50 : round % 3 == 1 ? 100'000 : id_map::max_ids;
    const std::vector<i64> seeds = some_ids(rng, rng() % 300, below);
    Model model(seeds);
    set.start(seeds);
    for (int layer = 0; layer < 3; ++layer) {
      std::vector<i64> ids = some_ids(rng, round % 2 ? rng() % 30'000 : rng() % 3000, below), expected = ids;
      model.relabel(expected);
      set.relabel(ids.data(), ids.size(), workers);
      CHECK(ids == expected);
      CHECK(std::vector<i64>(set.nodes().begin(), set.nodes().end()) == model.nodes);
    }
  }
}

void test_numbering_nodes_of_trees_equals_the_model(u32 threads) {
  cache::Workers workers(threads);
  TreeSet set;
  std::mt19937_64 rng(100 + threads);
  for (int round = 0; round < 4; ++round) {
    const u64 below = round % 2 ? 40 : id_map::max_ids, trees = round % 3 ? 30 : id_map::max_ids;
    const auto some_trees = [&](size_t count) { return some_ids(rng, count, trees); };
    const auto keys = [](const std::vector<i64>& ids, const auto& of) {
      std::vector<i64> found;
      for (size_t i = 0; i < ids.size(); ++i)
        found.push_back(static_cast<i64>(pair_map::key(static_cast<u64>(of[i]), static_cast<u64>(ids[i]))));
      return found;
    };
    const std::vector<i64> seeds = some_ids(rng, rng() % 300, below), of_seeds = some_trees(seeds.size());
    Model model(keys(seeds, of_seeds));
    set.start(seeds, of_seeds.data());
    for (int layer = 0; layer < 3; ++layer) {
      std::vector<i64> ids = some_ids(rng, round % 2 ? rng() % 30'000 : rng() % 3000, below);
      const std::vector<i64> wide = some_trees(ids.size());
      const std::vector<u32> of(wide.begin(), wide.end());
      std::vector<i64> expected = keys(ids, of);
      const std::vector<i64> pairs = expected;
      model.relabel(expected);
      set.relabel(ids.data(), ids.size(), workers, of.data());
      CHECK(ids == expected);
      CHECK_EQUAL(set.size(), model.nodes.size());
      for (size_t i = 0; i < set.size(); ++i)
        CHECK_EQUAL(static_cast<i64>(pair_map::key(set.trees()[i], static_cast<u64>(set.nodes()[i]))), model.nodes[i]);
      for (size_t i = 0; i < pairs.size(); i += 97) {
        const u64 key = static_cast<u64>(pairs[i]);
        CHECK_EQUAL(set.find(pair_map::id_of(key), pair_map::tree_of(key)), static_cast<u64>(expected[i]));
      }
      CHECK_EQUAL(set.find(id_map::max_ids - 1, id_map::max_ids - 1), TreeSet::none);
    }
  }
}

void test_threads_note_the_least_position() {
  constexpr u32 log2_slots = 12;
  constexpr u64 ids = 700, positions = 60'000;
  cache::Workers workers(4);
  std::vector<u64> slots(u64{1} << log2_slots, id_map::empty);
  const auto id_at = [](u64 at) { return at * 7919 % ids * 5'000'011; };
  workers.parallel_for(positions, 64, [&](size_t begin, size_t end, u32) {
    for (u64 at = end; at-- > begin;) id_map::note(slots.data(), log2_slots, id_at(at), at);
  });
  std::unordered_map<u64, u64> least;
  for (u64 at = 0; at < positions; ++at) least.emplace(id_at(at), at);
  size_t taken = 0;
  for (const u64 word : slots) {
    if (word == id_map::empty) continue;
    ++taken;
    CHECK_EQUAL(id_map::at_of(word), least.at(id_map::id_of(word)));
  }
  CHECK_EQUAL(taken, least.size());
}

void test_samplers_of_any_threads_agree() {
  constexpr i64 nodes = 5000;
  std::mt19937_64 rng(1);
  std::vector<i64> indptr{0}, indices;
  for (i64 v = 0; v < nodes; ++v) {
    const size_t degree = v % 50 ? rng() % 30 : 600;
    for (size_t e = 0; e < degree; ++e) indices.push_back(static_cast<i64>(rng() % nodes));
    indptr.push_back(static_cast<i64>(indices.size()));
  }
  const Topology graph{{{nodes, "n"}}, {{indptr.data(), indices.data(), true, indices.size(), 0, 0, "r"}}};
  std::vector<i64> seeds(800);
  for (i64& seed : seeds) seed = static_cast<i64>(rng() % nodes);
  const std::vector<std::span<const i64>> given{seeds};
  const std::vector<std::vector<int>> fanouts{{10}, {60}, {3}};
  const auto pool = std::make_shared<cache::BufferPool>(1 << 24);
  HostSampler one(1, pool), four(4, pool);
  NeighborOptions gradual;
  gradual.dependent = true;
  Labor labor_of_one, labor_of_four;
  Ladies ladies_of_one, ladies_of_four;
  const auto equal = [&](const Minibatch& a, const Minibatch& b) {
    CHECK_EQUAL(a.nodes[0].count, b.nodes[0].count);
    CHECK(std::equal(a.nodes[0].ids, a.nodes[0].ids + a.nodes[0].count, b.nodes[0].ids));
    for (size_t layer = 0; layer < fanouts.size(); ++layer) {
      const Block &x = a.layers[layer][0], &y = b.layers[layer][0];
      CHECK_EQUAL(x.num_edges, y.num_edges);
      CHECK(std::equal(x.indices, x.indices + x.num_edges, y.indices));
      CHECK(std::equal(x.positions, x.positions + x.num_edges, y.positions));
      CHECK_EQUAL(x.weights == nullptr, y.weights == nullptr);
      if (x.weights) CHECK(std::equal(x.weights, x.weights + x.num_edges, y.weights));
    }
  };
  std::vector<i64> of_seeds, times(indices.size());
  std::vector<u32> tags;
  std::vector<i64> latest;
  for (size_t i = 0; i < seeds.size(); ++i) {
    of_seeds.push_back(static_cast<i64>(i));
    latest.push_back(static_cast<i64>(rng() % 100));
    tags.push_back(forest::tag(0, static_cast<u64>(seeds[i]), latest.back()));
  }
  for (size_t e = 0; e < times.size(); ++e) times[e] = static_cast<i64>(e % 100);
  for (i64 v = 0; v < nodes; ++v) std::sort(times.begin() + indptr[v], times.begin() + indptr[v + 1]);
  const Forest trees{{of_seeds}, tags, latest};
  NeighborOptions temporal;
  temporal.times = {{times.data(), true, false}};
  NeighborOptions last = temporal;
  last.last = true;
  for (u64 step = 0; step < 1; ++step) {
    const Moment moment = moment_of(1, 0, step, 1), slow = moment_of(1, 0, step, 2);
    equal(sample_neighbors(one, graph, given, fanouts, {}, moment),
          sample_neighbors(four, graph, given, fanouts, {}, moment));
    equal(sample_neighbors(one, graph, given, fanouts, gradual, slow),
          sample_neighbors(four, graph, given, fanouts, gradual, slow));
    for (const NeighborOptions& options : {NeighborOptions{}, temporal, last})
      equal(sample_neighbors(one, graph, given, fanouts, options, moment, &trees),
            sample_neighbors(four, graph, given, fanouts, options, moment, &trees));
    for (const LaborOptions options : {LaborOptions{}, {1, true, false}, {LaborOptions::to_convergence, false, true}})
      equal(labor_of_one.sample(one, graph, given, fanouts, options, slow),
            labor_of_four.sample(four, graph, given, fanouts, options, slow));
    for (const Ladies::Law law : {Ladies::Law::degree, Ladies::Law::count})
      for (const Ladies::Draws draws : {Ladies::Draws::repeated, Ladies::Draws::distinct, Ladies::Draws::poisson})
        equal(ladies_of_one.sample(one, graph, given, fanouts, law, draws, moment),
              ladies_of_four.sample(four, graph, given, fanouts, law, draws, moment));
  }
}

}  // namespace

int main() {
  for (const u32 threads : {1, 4}) test_numbering_equals_the_model(threads);
  test_numbering_nodes_of_trees_equals_the_model(3);
  test_threads_note_the_least_position();
  test_samplers_of_any_threads_agree();
}
