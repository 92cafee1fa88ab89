#include "sampler/ladies.h"

#include <algorithm>

#include "gids/neighbor.h"
#include "gids/weighted.h"

namespace gids::sampler {

Minibatch Ladies::sample(HostSampler& host, const Topology& graph, Seeds seeds, std::span<const std::vector<int>> sizes,
                         Law law, Draws draws, const Moment& moment) {
  return host.run(graph, seeds, static_cast<u32>(sizes.size()), [&](u32 layer, u32 r, const Frontier& frontier) {
    const Variates variates(moment, layer, draws == Draws::repeated ? r : frontier.relation.src);
    return sample_layer(host, frontier, sizes[layer][r], law, draws, variates);
  });
}

Block Ladies::sample_layer(HostSampler& host, const Frontier& frontier, int size, Law law, Draws draws,
                           const Variates& variates) {
  if (size == 0) return host.collect(frontier, [](size_t, EdgeList&) {});
  neighborhood_.read(host.workers(), frontier);
  const std::span<const i64> sources = neighborhood_.sources();
  float* counts = counts_.ensure(sources.size());
  std::fill(counts, counts + sources.size(), size == neighbor::all_neighbors ? 1.0f : 0.0f);
  if (size != neighbor::all_neighbors && !sources.empty()) {
    const double total = weigh(frontier, law);
    if (draws == Draws::poisson) draw_poisson(static_cast<u64>(size), variates);
    else if (draws == Draws::distinct) draw_distinct(static_cast<u64>(size), variates);
    else draw(static_cast<u64>(size), total, variates);
  }
  return host.collect(frontier, [&](size_t v, EdgeList& list) {
    const u64 degree = frontier.degrees[v], begin = static_cast<u64>(frontier.begins[v]);
    const i64* local = neighborhood_.local(v);
    list.reserve(degree);
    for (u64 e = 0; e < degree; ++e)
      if (counts[local[e]] > 0)
        list.add(static_cast<u64>(sources[static_cast<size_t>(local[e])]), begin + e, counts[local[e]]);
  });
}

// One thread, in order: sums of rounded numbers depend on it. Parallel edges are entries of their own.
double Ladies::weigh(const Frontier& frontier, Law law) {
  const size_t count = neighborhood_.sources().size();
  double* norms = norms_.ensure(count);
  std::fill(norms, norms + count, 0.0);
  double total = 0;
  for (size_t v = 0; v < frontier.size(); ++v) {
    const u64 degree = frontier.degrees[v];
    const double share = 1 / static_cast<double>(degree);
    const i64* local = neighborhood_.local(v);
    const double of_edge = law == Law::degree ? share * share : 1;
    for (u64 e = 0; e < degree; ++e) norms[local[e]] += of_edge;
    if (degree) total += share;
  }
  if (law == Law::degree) return total;
  total = 0;
  for (size_t t = 0; t < count; ++t) total += norms[t] *= norms[t];
  return total;
}

// Inverse transform sampling. What is drawn m times of `size` counts m / (size * its share).
void Ladies::draw(u64 size, double total, const Variates& variates) {
  const size_t count = neighborhood_.sources().size();
  const double* norms = norms_.data();
  double* sums = sums_.ensure(count);
  float* counts = counts_.data();
  double sum = 0;
  for (size_t t = 0; t < count; ++t) sums[t] = sum += norms[t];
  for (u32 i = 0; i < size; ++i) {
    const double at = unit(variates.draw(0, i)) * sum;
    const size_t t = std::min<size_t>(count - 1, static_cast<size_t>(std::upper_bound(sums, sums + count, at) - sums));
    counts[t] += static_cast<float>(total / (static_cast<double>(size) * norms[t]));
  }
}

// The `size` sources with the least waiting times are successive draws without replacement in proportion to norm_t.
// Given the next least time, each of them came with probability 1 - exp(-norm_t time), so that 1 / probability makes
// sums unbiased (Cohen and Kaplan, "Summarizing Data using Bottom-k Sketches", 2007).
void Ladies::draw_distinct(u64 size, const Variates& variates) {
  const std::span<const i64> sources = neighborhood_.sources();
  const double* norms = norms_.data();
  float* counts = counts_.data();
  if (sources.size() <= size) return std::fill(counts, counts + sources.size(), 1.0f);
  double* times = times_.ensure(2 * sources.size());
  Lanes node = {}, bits;
  for (size_t first = 0; first < sources.size(); first += draw_lanes) {
    const size_t n = std::min<size_t>(draw_lanes, sources.size() - first);
    for (size_t lane = 0; lane < n; ++lane) node[lane] = static_cast<u64>(sources[first + lane]);
    variates.of_nodes(node, static_cast<u32>(n), 1, bits);
    for (size_t lane = 0; lane < n; ++lane)
      times[first + lane] = weighted::waiting_time(bits[lane], static_cast<float>(norms[first + lane]));
  }
  double* ordered = times + sources.size();
  std::copy(times, ordered, ordered);
  std::nth_element(ordered, ordered + size, ordered + sources.size());
  const double next = ordered[size];
  for (size_t t = 0; t < sources.size(); ++t)
    if (times[t] < next) counts[t] = weighted::estimate(static_cast<float>(norms[t]), next);
}

// Source t comes with probability min(1, c norm_t), with c so that these sum up to `size`. As in LABOR, c is
// approached from below, with those taken for certain that the last c makes certain.
void Ladies::draw_poisson(u64 size, const Variates& variates) {
  const std::span<const i64> sources = neighborhood_.sources();
  const double* norms = norms_.data();
  float* counts = counts_.data();
  if (sources.size() <= size) return std::fill(counts, counts + sources.size(), 1.0f);
  double c = 0;
  size_t certain = 0;
  for (size_t round = 0; round <= sources.size(); ++round) {
    double rest = 0;
    size_t now_certain = 0;
    for (size_t t = 0; t < sources.size(); ++t) {
      if (c * norms[t] >= 1) ++now_certain;
      else rest += norms[t];
    }
    if (round && now_certain == certain) break;
    certain = now_certain;
    if (certain >= size) break;
    c = static_cast<double>(size - certain) / rest;
  }
  Lanes node = {}, bits;
  for (size_t first = 0; first < sources.size(); first += draw_lanes) {
    const size_t n = std::min<size_t>(draw_lanes, sources.size() - first);
    for (size_t lane = 0; lane < n; ++lane) node[lane] = static_cast<u64>(sources[first + lane]);
    variates.of_nodes(node, static_cast<u32>(n), 1, bits);
    for (size_t lane = 0; lane < n; ++lane) {
      const double p = std::min(1.0, c * norms[first + lane]);
      if (unit(bits[lane]) <= p) counts[first + lane] = static_cast<float>(1 / p);
    }
  }
}

}  // namespace gids::sampler
