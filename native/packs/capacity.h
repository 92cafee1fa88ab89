// How many rows the offline cache may keep for the pages to fit in the lines. Rows take lines before they are used, as
// runs are read ahead, and pages live as long as the last of their rows; by how much, only a plan tells. So a sample of
// the rows is planned several times, as in Waldspurger et al., "Efficient MRC construction with SHARDS" (FAST 2015).
// Called by bind/.
#pragma once

#include "packs/annex_plan.h"

namespace gids::packs {

// ahead: runs are read that many steps before they are due. options.capacity_rows is not used. Throws as plan_annex().
u64 capacity_for(const Uses& uses, const cache::Geometry& geometry, const PlanOptions& options, u64 lines, u32 ahead,
                 cache::Workers& workers, const Check& check);

}  // namespace gids::packs
