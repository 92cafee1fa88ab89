// Where every row of a superbatch comes from: the last two passes over the uses, after those of belady.h. Called by
// plan_annex().
#pragma once

#include "packs/annex_plan.h"

namespace gids::packs {

// Backwards: notes which copies a later step uses, and which use is the last one of a copy. Sets `kept`.
void note_lives(Uses& uses, Team& team, AnnexPlan& plan, const Check& check);

// Forwards: gives each copy its place in its run and, if it is kept, a line; writes for each step what its reader does
// and which rows the sweep copies. Sets `moves`.
void write_moves(Uses& uses, Team& team, AnnexPlan& plan, u64 lines, const Check& check);

}  // namespace gids::packs
