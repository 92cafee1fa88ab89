// All in-edges of a frontier with numbered sources, for samplers that compare the sources of a layer. Called by
// LABOR-i and LADIES.
#pragma once

#include "sampler/host_sampler.h"

namespace gids::sampler {

class Neighborhood {
 public:
  void read(cache::Workers& workers, const Frontier& frontier);

  // In-edge e of destination v leads from sources()[local(v)[e]].
  const i64* local(size_t v) const { return local_.data() + offsets_.data()[v]; }
  std::span<const i64> sources() const { return set_.nodes(); }  // in order of first appearance
  size_t bytes() const { return offsets_.bytes() + local_.bytes() + set_.bytes(); }

 private:
  Scratch<u64> offsets_;
  Scratch<i64> local_;
  NodeSet set_;
};

}  // namespace gids::sampler
