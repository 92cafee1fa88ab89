// sources:
// The number of rings against models of disks, of which each ring and the disk itself limit the rate.
#include <algorithm>

#include "check.h"
#include "io/ring_count.h"

using gids::u32;
using gids::io::RingCount;
using gids::io::RingLoad;

namespace {

struct Disk {
  double of_ring, limit;  // requests per second
  u32 cores;

  RingLoad load(u32 rings) const {
    const double rate = std::min(of_ring * rings, limit);
    return {rate, true, rate >= 0.9 * of_ring * rings, rings < cores};
  }
};

struct Seen {
  u32 last = 0, most = 0, above_one = 0;  // rings; windows with more than one
};

Seen watch(RingCount& count, const Disk& disk, u32 windows) {
  Seen seen;
  u32 rings = count.count();
  for (u32 i = 0; i < windows; ++i) {
    rings = count.look(disk.load(rings));
    seen.most = std::max(seen.most, rings);
    seen.above_one += rings > 1;
  }
  seen.last = rings;
  return seen;
}

}  // namespace

int main(int, char**) {
  {  // files in the page cache: as many rings as there are cores for them
    RingCount count(1, 16);
    CHECK_EQUAL(watch(count, {300e3, 1e12, 12}, 100).last, 12u);
  }
  {  // a slow disk: its ring waits, so none is ever tried
    RingCount count(1, 16);
    CHECK_EQUAL(watch(count, {300e3, 100e3, 16}, 1000).most, 1u);
  }
  {  // the disk is the limit, and a ring just about reaches it: the second one is tried, seldom
    RingCount count(1, 16);
    const Seen seen = watch(count, {300e3, 310e3, 16}, 10'000);
    CHECK_EQUAL(seen.most, 2u);
    CHECK(seen.above_one < 100);
  }
  {  // a disk that keeps two and a half rings busy
    RingCount count(1, 16);
    CHECK_EQUAL(watch(count, {300e3, 750e3, 16}, 15).last, 3u);
  }
  {  // no core is free
    RingCount count(2, 16);
    CHECK_EQUAL(watch(count, {300e3, 1e12, 2}, 100).most, 2u);
  }
  {  // pauses of the load say nothing about a ring that is tried
    RingCount count(1, 2);
    CHECK_EQUAL(count.look({300e3, true, true, true}), 2u);
    for (int i = 0; i < 50; ++i) CHECK_EQUAL(count.look({0, false, false, true}), 2u);
    CHECK(!count.fixed());
    count.look({600e3, true, true, true});  // it has begun
    CHECK_EQUAL(count.look({600e3, true, true, true}), 2u);
    CHECK(count.fixed());
  }
  {  // the system gives no more
    RingCount count(1, 16);
    count.look({300e3, true, true, true});
    count.stop(1);
    CHECK_EQUAL(watch(count, {300e3, 1e12, 12}, 100).most, 1u);
  }
}
