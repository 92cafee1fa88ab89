// sources:
// The page word under real threads: marks, transitions and readers at once lose nothing.
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "check.h"
#include "gids/page_word.h"

using namespace gids;

namespace {

void the_fields_do_not_overlap() {
  const u64 w = word::fresh(200) | u64{12345} << word::line_shift | 2 * word::one_state | word::use_bit(30);
  CHECK(word::heat_of(w) == 200);
  CHECK(word::line_of(w) == 12345);
  CHECK(word::state_of(w) == PageState::resident);
  CHECK(word::uses_of(w) == 1u << 6);
}

void the_next_use_is_found_across_the_wrap() {
  for (u64 base = 0; base < 100; ++base) {
    for (u32 d = 0; d < word::use_bits; ++d) {
      u32 uses = word::use_bit(base + d);
      CHECK(word::next_use(uses, base) == d);
      for (u32 later = d; later < word::use_bits; ++later) uses |= word::use_bit(base + later);
      CHECK(word::next_use(uses, base) == d);
    }
  }
}

void each_transition_keeps_the_other_fields() {
  u64 w = word::fresh(77);
  word::enter(w, word::use_bit(5));
  const u64 before = w;
  word::admit(w, 0x3ffffffe);
  CHECK(word::state_of(w) == PageState::loading && word::line_of(w) == 0x3ffffffe);
  word::fail(w, 0x3ffffffe);
  CHECK(w == before);
  word::admit(w, 3);
  word::publish(w);
  CHECK(word::state_of(w) == PageState::resident && word::heat_of(w) == 77);
  CHECK(word::uses_of(w) == word::use_bit(5));
  word::evict(w, 3);
  CHECK(w == before);
  CHECK(word::retire(w, word::use_bit(5)) == word::fresh(77));
}

// One planner admits and evicts, one completion publishes or fails, one thread marks, two read. Each round
// of a word is LOADING -> RESIDENT -> ABSENT or LOADING -> ABSENT; marks of other steps come and go meanwhile.
void races() {
  constexpr int words = 64, rounds = 20000;
  std::vector<u64> table(words, word::fresh(9));
  std::vector<u64> payload(words, 0);  // what a line's contents stand for: written before publish
  std::barrier start(5);
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};

  std::thread planner([&] {
    start.arrive_and_wait();
    for (int r = 0; r < rounds; ++r) {
      u64& w = table[r % words];
      const u32 line = static_cast<u32>(r) & 0xffff;
      const u64 now = word::load(w);
      if (word::state_of(now) == PageState::absent) word::admit(w, line);
      else if (word::state_of(now) == PageState::resident && r % 3 == 0) word::evict(w, word::line_of(now));
    }
    stop = true;
  });
  std::thread completion([&] {
    start.arrive_and_wait();
    for (u64 n = 0; !stop; ++n) {
      const size_t i = n % words;
      const u64 now = word::load(table[i]);
      if (word::state_of(now) != PageState::loading) continue;
      if (n % 5 == 0) {
        word::fail(table[i], word::line_of(now));
      } else {
        std::atomic_ref<u64>(payload[i]).store(word::line_of(now), std::memory_order_relaxed);
        word::publish(table[i]);
      }
    }
  });
  std::thread marker([&] {
    start.arrive_and_wait();
    for (u64 step = 0; !stop; ++step) {
      const u32 bit = word::use_bit(step % 20);
      for (u64& w : table) word::enter(w, bit);
      for (u64& w : table)
        if (!(word::uses_of(word::load(w)) & bit)) ++wrong;  // nobody else takes this mark back
      for (u64& w : table)
        if (word::uses_of(word::retire(w, bit)) & bit) ++wrong;
    }
  });
  std::vector<std::thread> readers;
  for (int k = 0; k < 2; ++k)
    readers.emplace_back([&] {
      start.arrive_and_wait();
      for (size_t n = 0; !stop; ++n) {
        const u64 w = word::load(table[n % words]);
        if (word::heat_of(w) != 9) ++wrong;
        if (word::state_of(w) == PageState::absent && word::line_of(w) != 0) ++wrong;
        if (static_cast<u32>(word::state_of(w)) == 3) ++wrong;
      }
    });
  planner.join();
  completion.join();
  marker.join();
  for (auto& r : readers) r.join();
  CHECK(wrong == 0);
  for (u64 w : table) {
    CHECK(word::uses_of(w) == 0 && word::heat_of(w) == 9);
    CHECK(word::state_of(w) != PageState::absent || word::line_of(w) == 0);
  }
}

}  // namespace

int main() {
  the_fields_do_not_overlap();
  the_next_use_is_found_across_the_wrap();
  each_transition_keeps_the_other_fields();
  races();
}
