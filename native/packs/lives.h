// The lives of copies: born with the step that misses the row, dead with the last one that uses them. Two passes over
// the uses, after those of belady.h. Called by plan_annex().
#pragma once

#include "packs/annex_plan.h"

namespace gids::packs {

// Backwards: when each copy dies, hence its slot; lists the copies for the sweep. Sets `once`, `page_dies` and `list`.
void place_copies(Uses& uses, Team& team, AnnexPlan& plan, const Check& check);

// Forwards: writes, in place of its row, the slot that each use reads.
void note_positions(Uses& uses, Team& team, const Misses& misses, const AnnexPlan& plan, const Check& check);

}  // namespace gids::packs
