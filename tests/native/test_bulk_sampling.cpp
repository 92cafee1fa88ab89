// sources: sampler/*.cpp cache/workers.cpp store/mapped_file.cpp
// Many minibatches in one call, by every sampler and any number of threads: those that are made alone.
#include <random>
#include <vector>

#include "check.h"
#include "sampler/bulk.h"
#include "sampler/neighbor.h"
#include "sampler/walk.h"

using namespace gids;
using namespace gids::sampler;

namespace {

constexpr i64 nodes = 3000;
constexpr size_t keep_bytes = 1 << 24;

struct Graph {
  std::vector<i64> indptr{0}, indices;
  std::vector<std::vector<i64>> seeds;  // by step, of very different sizes

  Graph() {
    std::mt19937_64 rng(1);
    for (i64 v = 0; v < nodes; ++v) {
      const size_t degree = v % 50 ? rng() % 30 : 400;
      for (size_t e = 0; e < degree; ++e) indices.push_back(static_cast<i64>(rng() % nodes));
      indptr.push_back(static_cast<i64>(indices.size()));
    }
    for (const size_t count : {40, 0, 700, 3, 64, 64, 1, 100}) {
      auto& ids = seeds.emplace_back(count);
      for (i64& id : ids) id = static_cast<i64>(rng() % nodes);
    }
  }
  Topology topology() const {
    return {{{nodes, "n"}}, {{indptr.data(), indices.data(), true, indices.size(), 0, 0, "r"}}};
  }
};

using Sample = std::function<Minibatch(Samplers&, const Topology&, Seeds, const Moment&)>;

std::vector<Sample> every_sampler() {
  static const std::vector<std::vector<int>> fanouts{{10}, {3}}, counts{{4}, {3}};
  static const WalkOptions walk{{0}, 6, 3, 0.5};
  std::vector<Sample> all;
  for (const bool dependent : {false, true})
    all.push_back([=](Samplers& s, const Topology& graph, Seeds seeds, const Moment& moment) {
      NeighborOptions options;
      options.dependent = dependent;
      return sample_neighbors(s.host, graph, seeds, fanouts, options, moment);
    });
  for (const LaborOptions options : {LaborOptions{}, {1, true, false}})
    all.push_back([=](Samplers& s, const Topology& graph, Seeds seeds, const Moment& moment) {
      return s.labor.sample(s.host, graph, seeds, fanouts, options, moment);
    });
  for (const Ladies::Draws draws : {Ladies::Draws::repeated, Ladies::Draws::distinct, Ladies::Draws::poisson})
    all.push_back([=](Samplers& s, const Topology& graph, Seeds seeds, const Moment& moment) {
      return s.ladies.sample(s.host, graph, seeds, fanouts, Ladies::Law::degree, draws, moment);
    });
  all.push_back([](Samplers& s, const Topology& graph, Seeds seeds, const Moment& moment) {
    return sample_walks(s.host, graph, seeds, counts, walk, moment);
  });
  return all;
}

void check_equal(const Minibatch& a, const Minibatch& b) {
  CHECK_EQUAL(a.nodes[0].count, b.nodes[0].count);
  CHECK(std::equal(a.nodes[0].ids, a.nodes[0].ids + a.nodes[0].count, b.nodes[0].ids));
  CHECK_EQUAL(a.layers.size(), b.layers.size());
  for (size_t layer = 0; layer < a.layers.size(); ++layer) {
    const Block &x = a.layers[layer][0], &y = b.layers[layer][0];
    CHECK_EQUAL(x.num_edges, y.num_edges);
    CHECK(std::equal(x.indptr, x.indptr + x.num_dst + 1, y.indptr));
    CHECK(std::equal(x.indices, x.indices + x.num_edges, y.indices));
    CHECK(std::equal(x.positions, x.positions + x.num_edges, y.positions));
    CHECK_EQUAL(x.weights == nullptr, y.weights == nullptr);
    if (x.weights) CHECK(std::equal(x.weights, x.weights + x.num_edges, y.weights));
  }
}

std::vector<Minibatch> make(Bulk& bulk, const Graph& graph, const Sample& sample, size_t first, size_t count) {
  const Topology topology = graph.topology();
  return bulk.make(count, first, [&](Samplers& samplers, size_t i) {
    const std::vector<std::span<const i64>> seeds{graph.seeds[first + i]};
    return sample(samplers, topology, seeds, moment_of(1, 0, first + i, 2));
  });
}

void test_each_minibatch_is_the_one_made_alone(const Graph& graph) {
  for (const Sample& sample : every_sampler()) {
    std::vector<Minibatch> alone;
    Bulk one(1, keep_bytes);
    for (size_t step = 0; step < graph.seeds.size(); ++step)
      alone.push_back(std::move(make(one, graph, sample, step, 1)[0]));
    for (const u32 threads : {2, 4}) {
      Bulk bulk(threads, keep_bytes);
      for (const size_t count : {graph.seeds.size(), size_t{1}, graph.seeds.size()}) {  // apart, together, apart
        const std::vector<Minibatch> made = make(bulk, graph, sample, 0, count);
        for (size_t step = 0; step < count; ++step) check_equal(made[step], alone[step]);
      }
      CHECK(bulk.scratch_bytes() > 0);
    }
  }
}

void test_the_first_step_that_fails_is_named(Graph graph) {
  const Sample sample = every_sampler()[0];
  graph.seeds[3][1] = nodes;
  graph.seeds[5][0] = -1;
  for (const u32 threads : {1, 4}) {
    Bulk bulk(threads, keep_bytes);
    for (int again = 0; again < 3; ++again) {
      std::string message;
      try {
        make(bulk, graph, sample, 1, 6);
      } catch (const std::out_of_range& error) {
        message = error.what();
      }
      CHECK(message == "step 3: seed 3000 is not a n node: ids run from 0 to 2999");
    }
    CHECK_EQUAL(make(bulk, graph, sample, 0, 3).size(), size_t{3});
  }
}

}  // namespace

int main() {
  const Graph graph;
  test_each_minibatch_is_the_one_made_alone(graph);
  test_the_first_step_that_fails_is_named(graph);
}
