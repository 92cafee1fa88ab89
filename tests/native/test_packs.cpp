// sources: packs/*.cpp io/*.cpp cache/workers.cpp cache/convert_rows.cpp cache/copy.cpp store/crc32c.cpp store/mapped_file.cpp
// Packs against obvious models: row sets, counts and cuts; sweeps of random tables into memory and into a file, with
// injected faults, full disks and cancels; reads and gathers of packs. Argument: a directory to work in.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
#include "io/engine.h"
#include "packs/counts.h"
#include "packs/cutter.h"
#include "packs/gather.h"
#include "packs/sweep.h"
#include "store/crc32c.h"

using namespace gids;
using packs::BadPage;
using packs::Counts;
using packs::Cutter;
using packs::Hot;
using packs::PackRead;
using packs::Priority;
using packs::RowList;
using packs::RowSet;
using packs::Sweep;
using packs::Target;
using packs::Writer;

namespace {

using Random = std::mt19937_64;
using Bytes = std::vector<std::byte>;

std::string g_dir;

u64 between(Random& random, u64 least, u64 most) { return least + random() % (most - least + 1); }

Bytes random_bytes(Random& random, u64 count) {
  Bytes found(count);
  for (std::byte& b : found) b = static_cast<std::byte>(random());
  return found;
}

std::set<u32> random_rows(Random& random, u64 row_count, u64 one_in) {
  std::set<u32> found;
  for (u32 row = 0; row < row_count; ++row)
    if (random() % one_in == 0) found.insert(row);
  return found;
}

RowSet set_of(const std::set<u32>& rows, u64 row_count) {
  RowSet set(row_count);
  for (const u32 row : rows) set.insert(row);
  set.seal();
  return set;
}

std::shared_ptr<const RowList> list_of(const std::set<u32>& rows, u64 row_count) {
  return std::make_shared<RowList>(set_of(rows, row_count));
}

template <class Work>
void wait(Work& work) {
  for (int i = 0; i < 600; ++i)
    if (work.wait_for(100)) return;
  CHECK(!"background work hangs");
}

// --- numbers ---

void test_ranks_are_positions_in_a_sorted_list(Random& random) {
  for (int round = 0; round < 15; ++round) {
    const u64 row_count = between(random, 0, 3000);
    const std::set<u32> model = random_rows(random, row_count, between(random, 1, 40));
    RowSet set(row_count);
    std::vector<u32> order(model.begin(), model.end());
    std::shuffle(order.begin(), order.end(), random);
    for (const u32 row : order) CHECK(set.insert(row));
    for (const u32 row : order) CHECK(!set.insert(row));
    for (u32 row = 0; row < row_count; ++row) {
      if (!model.contains(row)) {
        CHECK(set.insert(row));
        set.erase(row);
        set.erase(row);
      }
    }
    set.seal();
    CHECK_EQUAL(set.size(), model.size());
    CHECK_EQUAL(set.bytes(), RowSet::bytes_of(row_count));
    u64 rank = 0;
    for (u32 row = 0; row < row_count; ++row) {
      CHECK_EQUAL(set.contains(row), model.contains(row));
      if (model.contains(row)) CHECK_EQUAL(set.rank(row), rank++);
    }
    for (int i = 0; i < 50; ++i) {
      const u64 begin = between(random, 0, row_count), end = between(random, begin, row_count);
      const std::vector<u32> expected(model.lower_bound(static_cast<u32>(begin)),
                                      model.lower_bound(static_cast<u32>(end)));
      std::vector<u32> found;
      set.each(begin, end, [&](u64 row) { found.push_back(static_cast<u32>(row)); });
      CHECK(found == expected);
      CHECK_EQUAL(set.any(begin, end), !expected.empty());
    }
    const RowList list(set);
    CHECK_EQUAL(list.size(), model.size());
    std::vector<u32> listed;
    for (RowList::Cursor c(list); c.row() != RowList::Cursor::end(); c.advance())
      listed.push_back(static_cast<u32>(c.row()));
    CHECK(listed == std::vector<u32>(model.begin(), model.end()));
    set.clear();
    CHECK_EQUAL(set.size(), 0u);
    CHECK(!set.any(0, row_count));
    list.insert_into(set);
    set.seal();
    CHECK_EQUAL(set.size(), model.size());
    if (!model.empty()) CHECK_EQUAL(set.rank(*model.rbegin()), model.size() - 1);
  }
}

void test_a_row_list_holds_gaps_of_any_length() {
  const u64 row_count = u64{1} << 26;  // gaps of 1 to 4 bytes
  const std::set<u32> rows = {0, 1, 129, 129 + 0x80, 258 + 0x4000, 3u << 21, (3u << 21) + 1, (1u << 26) - 1};
  RowSet set(row_count);
  for (const u32 row : rows) set.insert(row);
  const RowList list(set);
  std::vector<u32> found;
  for (RowList::Cursor c(list); c.row() != RowList::Cursor::end(); c.advance())
    found.push_back(static_cast<u32>(c.row()));
  CHECK(found == std::vector<u32>(rows.begin(), rows.end()));
  CHECK(list.bytes() <= 4 * rows.size());
}

void test_counts_and_the_hottest_rows(Random& random) {
  for (int round = 0; round < 10; ++round) {
    const u64 row_count = between(random, 1, 400);
    Counts counts(row_count);
    std::map<u32, u64> model;
    for (u64 m = between(random, 0, 12); m > 0; --m) {
      std::vector<u32> rows;
      for (u64 i = between(random, 0, 300); i > 0; --i)
        rows.push_back(static_cast<u32>(random() % (1 + random() % row_count)));
      const std::set<u32> distinct(rows.begin(), rows.end());
      CHECK_EQUAL(counts.add(rows), distinct.size());
      for (const u32 row : distinct) ++model[row];
    }
    std::vector<u64> histogram(1);
    for (u32 row = 0; row < row_count; ++row) {
      const u64 count = model.contains(row) ? model[row] : 0;
      if (count >= histogram.size()) histogram.resize(count + 1);
      ++histogram[count];
    }
    CHECK(counts.histogram() == histogram);
    std::vector<u32> wanted;  // the most wanted first, then by number
    for (const auto& [row, count] : model) wanted.push_back(row);
    std::stable_sort(wanted.begin(), wanted.end(), [&](u32 a, u32 b) { return model[a] > model[b]; });
    for (const u64 n : std::vector<u64>{0, 1, between(random, 0, row_count), wanted.size(), row_count}) {
      const Hot hot = counts.hottest(n);
      const std::set<u32> expected(wanted.begin(),
                                   wanted.begin() + static_cast<std::ptrdiff_t>(std::min<u64>(n, wanted.size())));
      const RowSet found = counts.set_of(hot);
      CHECK_EQUAL(found.size(), expected.size());
      for (u32 row = 0; row < row_count; ++row) {
        CHECK_EQUAL(found.contains(row), expected.contains(row));
        CHECK_EQUAL(counts.is_hot(row, hot), expected.contains(row));
      }
    }
    const std::vector<u32> beyond = {0, static_cast<u32>(row_count)};
    bool refused = false;
    try {
      counts.add(beyond);
    } catch (const std::out_of_range&) {
      refused = true;
    }
    CHECK(refused);
    CHECK(counts.histogram() == histogram);
  }
}

void test_a_count_stays_at_its_most() {
  Counts counts(3);
  const std::vector<u32> all = {0, 1, 2}, one = {1};
  for (u32 i = 0; i < Counts::most - 1; ++i) counts.add(all);
  for (int i = 0; i < 5; ++i) counts.add(one);
  const std::vector<u64> histogram = counts.histogram();
  CHECK_EQUAL(histogram.size(), u64{Counts::most} + 1);
  CHECK_EQUAL(histogram[Counts::most], 1u);
  CHECK_EQUAL(histogram[Counts::most - 1], 2u);
  CHECK(counts.set_of(counts.hottest(1)).contains(1));
  CHECK_EQUAL(counts.set_of(counts.hottest(2)).size(), 2u);
}

void test_cuts_are_those_of_a_model(Random& random) {
  for (int round = 0; round < 30; ++round) {
    const bool parts = round % 2;
    const u64 space_count = between(random, 1, 3), minibatches = between(random, 0, 30);
    std::vector<std::vector<std::vector<u32>>> rows(minibatches);
    std::vector<u64> row_counts, row_bytes;
    for (u64 s = 0; s < space_count; ++s) {
      const u64 row_count = between(random, 1, 500);
      row_counts.push_back(row_count);
      row_bytes.push_back(between(random, 1, 600));
      for (auto& minibatch : rows) {
        minibatch.emplace_back();
        for (u64 i = random() % 60; i > 0; --i) minibatch.back().push_back(static_cast<u32>(random() % row_count));
      }
    }
    std::vector<packs::Space> spaces;
    for (u64 s = 0; s < space_count; ++s)
      spaces.push_back(
          {std::make_shared<RowSet>(set_of(random_rows(random, row_counts[s], between(random, 1, 50)), row_counts[s])),
           row_bytes[s]});
    const u64 pack_bytes = between(random, 1, 60'000), lists_bytes = between(random, 0, 2) * between(random, 1, 3'000);
    Cutter cutter(spaces, pack_bytes, lists_bytes, parts);
    std::vector<std::vector<std::set<u32>>> rows_of_packs;
    std::vector<Cutter::Pack> model;
    std::vector<std::set<u32>> current(space_count);
    u64 largest = 0;
    auto bytes_of = [&](const std::vector<std::set<u32>>& sets) {
      u64 found = 0;
      for (u64 s = 0; s < space_count; ++s) found += sets[s].size() * row_bytes[s];
      return found;
    };
    auto end_pack = [&](u64 end) {
      model.push_back({end, {}});
      for (auto& set : current) model.back().rows.push_back(set.size());
      rows_of_packs.push_back(current);
    };
    for (u64 m = 0; m < minibatches; ++m) {
      std::vector<std::set<u32>> own(space_count);
      for (u64 s = 0; s < space_count; ++s)
        for (const u32 row : rows[m][s])
          if (!spaces[s].resident->contains(row)) own[s].insert(row);
      std::vector<std::set<u32>> both = current;
      for (u64 s = 0; s < space_count; ++s) both[s].insert(own[s].begin(), own[s].end());
      const u64 begun = model.empty() ? 0 : model.back().end;
      if (m > begun && bytes_of(both) > pack_bytes) {
        end_pack(m);
        both = own;
      }
      current = both;
      largest = std::max(largest, bytes_of(own));
      cutter.add(std::vector<std::span<const u32>>(rows[m].begin(), rows[m].end()));
    }
    if (minibatches > (model.empty() ? 0 : model.back().end)) end_pack(minibatches);
    const std::vector<Cutter::Pack> packs = cutter.packs();
    std::vector<u64> place;  // of each pack in the model
    std::vector<Cutter::Pack> merged;
    for (const Cutter::Pack& pack : packs) {
      u64 bytes = 0, count = 0;
      for (u64 s = 0; s < space_count; ++s) {
        bytes += pack.rows[s] * row_bytes[s];
        count += pack.rows[s];
      }
      CHECK(bytes <= pack_bytes || !parts || count == 1);
      if (merged.empty() || merged.back().end != pack.end) {
        merged.push_back(pack);
      } else {
        CHECK(parts);
        CHECK(count > 0);
        for (u64 s = 0; s < space_count; ++s) merged.back().rows[s] += pack.rows[s];
      }
      place.push_back(merged.size() - 1);
    }
    CHECK_EQUAL(merged.size(), model.size());
    for (u64 p = 0; p < model.size(); ++p) {
      CHECK_EQUAL(merged[p].end, model[p].end);
      CHECK(merged[p].rows == model[p].rows);
    }
    CHECK_EQUAL(cutter.largest_bytes() > pack_bytes, largest > pack_bytes);
    // The first packs have lists, which take at most lists_bytes. Those of parts go on where the one before ends.
    const std::vector<Cutter::Lists> lists = cutter.take_lists();
    u64 taken = 0;
    for (u64 p = 0; p < lists.size(); ++p) {
      for (u64 s = 0; s < space_count; ++s) {
        RowSet listed(row_counts[s]);
        lists[p][s]->insert_into(listed);
        CHECK_EQUAL(listed.size(), packs[p].rows[s]);
        CHECK_EQUAL(lists[p][s]->size(), packs[p].rows[s]);
        std::set<u32>& expected = rows_of_packs[place[p]][s];
        listed.each(0, row_counts[s], [&](u64 row) {
          CHECK(!expected.empty() && *expected.begin() == row);
          if (!expected.empty()) expected.erase(expected.begin());
        });
        taken += lists[p][s]->bytes();
      }
    }
    CHECK(taken <= lists_bytes);
    u64 next = 0;  // bytes of the lists of the first pack without
    if (lists.size() < packs.size() && !parts)
      for (u64 s = 0; s < space_count; ++s) next += list_of(rows_of_packs[lists.size()][s], row_counts[s])->bytes();
    CHECK(lists.size() == packs.size() || parts || taken + next >= lists_bytes);
    CHECK(cutter.take_lists().empty());
  }
}

// --- writing ---

struct File {
  explicit File(const std::string& name)
      : path(g_dir + "/" + name), fd(open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)) {
    CHECK(fd >= 0);
  }
  ~File() { close(fd); }
  File(const File&) = delete;
  Bytes content() const {
    Bytes found(static_cast<size_t>(lseek(fd, 0, SEEK_END)));
    CHECK_EQUAL(pread(fd, found.data(), found.size(), 0), static_cast<ssize_t>(found.size()));
    return found;
  }
  const std::string path;
  const int fd;
};

void test_a_writer_writes_every_buffer_at_its_offset(Random& random) {
  File file("written");
  Bytes model;
  {
    Writer writer({file.fd}, 3, 5, 8192);
    CHECK_EQUAL(writer.buffer_bytes(), 8192u);
    u64 bytes_written = 0;
    std::vector<u64> offsets(40);
    for (u64 i = 0; i < offsets.size(); ++i) offsets[i] = i * writer.buffer_bytes();
    std::shuffle(offsets.begin(), offsets.end(), random);
    for (const u64 offset : offsets) {
      std::byte* buffer = writer.take();
      if (random() % 5 == 0) {
        writer.give_back(buffer);
        buffer = writer.take();
      }
      const Bytes data = random_bytes(random, between(random, 1, writer.buffer_bytes()));
      std::memcpy(buffer, data.data(), data.size());
      if (model.size() < offset + data.size()) model.resize(offset + data.size());
      std::copy(data.begin(), data.end(), model.begin() + static_cast<std::ptrdiff_t>(offset));
      writer.write(buffer, data.size(), offset);
      bytes_written += data.size();
    }
    CHECK_EQUAL(writer.finish(), 0);
    CHECK_EQUAL(writer.bytes_written(), bytes_written);
    CHECK(file.content() == model);
    writer.write(writer.take(), 100, 0);  // one that is only written when the writer ends
  }
  CHECK_EQUAL(file.content().size(), model.size());
}

void test_a_write_error_is_returned_once_and_buffers_come_back(const char* device, int error) {
  int ends[2] = {-1, -1};
  const int fd = device ? open(device, O_WRONLY | O_CLOEXEC) : (pipe2(ends, O_CLOEXEC) == 0 ? ends[1] : -1);
  CHECK(fd >= 0);
  {
    Writer writer({fd}, 2, 3, 4096);
    for (int round = 0; round < 2; ++round) {
      for (int i = 0; i < 20; ++i) {  // many more than there are buffers
        std::byte* buffer = writer.take();
        std::memset(buffer, i, 4096);
        writer.write(buffer, 4096, static_cast<u64>(i) * 4096);
      }
      CHECK_EQUAL(writer.finish(), error);
      CHECK_EQUAL(writer.error(), 0);
    }
    CHECK_EQUAL(writer.bytes_written(), 0u);
  }
  close(fd);
  if (ends[0] >= 0) close(ends[0]);
}

// --- sweeping ---

struct Table {
  cache::Geometry g;
  Bytes rows;                    // the model: row after row
  std::vector<Bytes> shards;     // with padding
  std::vector<u32> checksums;

  std::span<const std::byte> row(u32 r) const { return {&rows[u64{r} * g.row_bytes], g.row_bytes}; }
};

Table random_table(Random& random, u32 first_file) {
  Table t;
  t.g.row_bytes = static_cast<u32>(between(random, 1, random() % 2 ? 64 : 900));
  t.g.rows_per_page = static_cast<u32>(between(random, 1, 8));
  const u64 used = u64{t.g.row_bytes} * t.g.rows_per_page;
  const u64 alignment = random() % 3 ? 512 : 1;
  t.g.page_bytes = static_cast<u32>(align_up(used, alignment) + (random() % 3 ? 0 : 512));
  t.g.shard_count = static_cast<u32>(between(random, 1, 5));
  t.g.first_file = first_file;
  t.g.row_count = between(random, 0, 1500);
  t.g.validate();
  t.rows = random_bytes(random, t.g.row_count * t.g.row_bytes);
  t.shards.resize(t.g.shard_count);
  for (u64 page = 0; page < t.g.page_count(); ++page) {
    Bytes content(t.g.page_bytes);  // zeros behind the rows
    const u64 begin = page * used, end = std::min<u64>(begin + used, t.rows.size());
    std::copy(t.rows.begin() + static_cast<std::ptrdiff_t>(begin), t.rows.begin() + static_cast<std::ptrdiff_t>(end),
              content.begin());
    Bytes& shard = t.shards[page % t.g.shard_count];
    CHECK_EQUAL(shard.size(), t.g.offset_of(page));
    shard.insert(shard.end(), content.begin(), content.end());
    t.checksums.push_back(store::crc32c(content.data(), content.size()));
  }
  return t;
}

struct Tables {
  std::vector<Table> tables;
  std::vector<std::string> paths;

  explicit Tables(Random& random, u64 count) {
    for (u64 i = 0; i < count; ++i) {
      tables.push_back(random_table(random, static_cast<u32>(paths.size())));
      write(tables.back());
    }
  }
  void write(const Table& table) {
    for (const Bytes& shard : table.shards) {
      paths.push_back(g_dir + "/shard-" + std::to_string(paths.size()));
      std::ofstream(paths.back(), std::ios::binary)
          .write(reinterpret_cast<const char*>(shard.data()), static_cast<std::streamsize>(shard.size()));
    }
  }
  u32 longest_page() const {
    u32 found = 1;
    for (const Table& t : tables) found = std::max(found, t.g.page_bytes);
    return found;
  }
};

std::vector<std::string> engines() {
  std::vector<std::string> kinds = {"threads", "mmap"};
  if (io::why_no_uring().empty()) kinds.push_back("uring");
  return kinds;
}

bool can_be_direct() {
  const int fd = open((g_dir + "/direct").c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

std::shared_ptr<io::Engine> open_engine(Random& random, const std::string& kind, const std::vector<std::string>& paths,
                                        u32 piece_bytes) {
  io::Options options;
  options.depth = static_cast<u32>(between(random, 1, 16));
  options.max_read_bytes = piece_bytes;
  options.direct = can_be_direct() && random() % 2;
  return io::open_engine(kind, paths, options);
}

packs::SweepOptions random_options(Random& random, u32 longest_page) {
  packs::SweepOptions options;
  options.piece_bytes = longest_page + static_cast<u32>(random() % 20'000);
  options.pieces = static_cast<u32>(between(random, 1, 5));
  options.gap_bytes = random() % 2 ? 0 : static_cast<u32>(random() % 30'000);
  options.threads = static_cast<u32>(between(random, 1, 3));
  return options;
}

// The targets of a table, and where their rows must come to be.
struct Wanted {
  std::vector<std::set<u32>> rows;
  std::vector<std::unique_ptr<Bytes>> memory;  // null: in the file
  std::vector<u64> offsets;

  std::set<u32> all() const {
    std::set<u32> found;
    for (const auto& one : rows) found.insert(one.begin(), one.end());
    return found;
  }
};

constexpr u64 kGuard = 64;  // bytes around a target in memory that must stay as they are
constexpr std::byte kUntouched{0xA5};

Wanted random_targets(Random& random, const Table& table, packs::TableSweep& sweep, bool to_file, u64& file_end) {
  Wanted wanted;
  for (u64 i = between(random, 0, 5); i > 0; --i) {
    wanted.rows.push_back(random_rows(random, table.g.row_count, between(random, 1, random() % 2 ? 5 : 200)));
    const u64 bytes = wanted.rows.back().size() * table.g.row_bytes;
    Target target{list_of(wanted.rows.back(), table.g.row_count), nullptr, 0};
    wanted.memory.emplace_back();
    wanted.offsets.push_back(0);
    if (to_file && random() % 4) {
      target.offset = wanted.offsets.back() = file_end;
      file_end += align_up(bytes, 4096);
    } else {
      wanted.memory.back() = std::make_unique<Bytes>(bytes + 2 * kGuard, kUntouched);
      target.memory = wanted.memory.back()->data() + kGuard;
    }
    sweep.targets.push_back(target);
  }
  return wanted;
}

// bad: pages that could not be read; their rows are arbitrary.
void check_targets(const Table& table, const Wanted& wanted, const Bytes& file, const std::set<u64>& bad) {
  for (u64 t = 0; t < wanted.rows.size(); ++t) {
    const std::byte* at = wanted.memory[t] ? wanted.memory[t]->data() + kGuard : file.data() + wanted.offsets[t];
    for (const u32 row : wanted.rows[t]) {
      if (!bad.contains(table.g.page_of(row)))
        CHECK(std::memcmp(at, table.row(row).data(), table.g.row_bytes) == 0);
      at += table.g.row_bytes;
    }
    if (!wanted.memory[t]) continue;
    const Bytes& memory = *wanted.memory[t];
    CHECK(std::all_of(memory.begin(), memory.begin() + kGuard, [](std::byte b) { return b == kUntouched; }));
    CHECK(std::all_of(memory.end() - kGuard, memory.end(), [](std::byte b) { return b == kUntouched; }));
  }
}

std::set<u64> pages_of(const Table& table, const std::set<u32>& rows) {
  std::set<u64> found;
  for (const u32 row : rows) found.insert(table.g.page_of(row));
  return found;
}

void test_a_sweep_copies_every_wanted_row(Random& random) {
  for (int round = 0; round < 12; ++round) {
    for (const std::string& kind : engines()) {
      Tables on_disk(random, between(random, 1, 3));
      const packs::SweepOptions options = random_options(random, on_disk.longest_page());
      const bool to_file = random() % 2, checked = random() % 2;
      File file("scratch");
      u64 file_end = 0, pages = 0, page_bytes = 0;
      std::vector<packs::TableSweep> sweeps;
      std::vector<Wanted> wanted;
      for (const Table& table : on_disk.tables) {
        packs::TableSweep& sweep = sweeps.emplace_back();
        sweep.geometry = table.g;
        if (checked) sweep.checksums = table.checksums;
        wanted.push_back(random_targets(random, table, sweep, to_file, file_end));
        pages += table.g.page_count() * table.g.page_bytes;
        page_bytes += pages_of(table, wanted.back().all()).size() * table.g.page_bytes;
      }
      CHECK_EQUAL(ftruncate(file.fd, static_cast<off_t>(file_end)), 0);
      std::shared_ptr<Writer> writer;
      if (to_file) writer = std::make_shared<Writer>(std::vector{file.fd}, 2, 6, between(random, 1, 3) * 4096);
      Sweep sweep(open_engine(random, kind, on_disk.paths, options.piece_bytes), writer, std::make_shared<Priority>(),
                  sweeps, options);
      wait(sweep);
      CHECK_EQUAL(sweep.error(), 0);
      CHECK(sweep.bad_pages().empty());
      const Bytes content = file.content();
      CHECK_EQUAL(content.size(), file_end);
      for (u64 t = 0; t < wanted.size(); ++t) check_targets(on_disk.tables[t], wanted[t], content, {});
      if (options.gap_bytes == 0) CHECK_EQUAL(sweep.bytes_read(), page_bytes);
      CHECK(sweep.bytes_read() >= page_bytes && sweep.bytes_read() <= pages);
      u64 written = 0;
      for (const Wanted& of_table : wanted)
        for (u64 t = 0; t < of_table.rows.size(); ++t)
          if (!of_table.memory[t]) written += of_table.rows[t].size();
      if (writer) CHECK_EQUAL(writer->bytes_written() > 0, written > 0);
    }
  }
}

void test_a_page_that_cannot_be_read_loses_its_own_rows_only(Random& random) {
  for (int round = 0; round < 12; ++round) {
    for (const std::string& kind : engines()) {
      Tables on_disk(random, 1);
      Table& table = on_disk.tables[0];
      if (table.g.page_count() == 0) continue;
      const packs::SweepOptions options = random_options(random, on_disk.longest_page());
      // Faults of the device, checksums that are wrong, and a shard that was cut off.
      std::map<u64, int> bad;
      std::vector<io::Fault> faults;
      const bool checked = random() % 2;
      for (u64 i = random() % 6; i > 0; --i) {
        const u64 page = random() % table.g.page_count();
        if (checked && random() % 2) {
          if (bad.emplace(page, EBADMSG).second) table.checksums[page] ^= 1;
        } else {
          faults.push_back({table.g.file_of(page), table.g.offset_of(page) + random() % table.g.page_bytes, EIO, ~0u});
          bad[page] = EIO;
        }
      }
      if (random() % 3 == 0) {
        const u64 last = table.g.page_count() - 1 - random() % std::min<u64>(table.g.page_count(), 20);
        const u32 shard = static_cast<u32>(last % table.g.shard_count);
        CHECK_EQUAL(truncate(on_disk.paths[shard].c_str(),
                             static_cast<off_t>(table.g.offset_of(last) + random() % table.g.page_bytes)),
                    0);
        for (u64 page = last; page < table.g.page_count(); page += table.g.shard_count)
          if (!bad.contains(page) || bad[page] == EBADMSG) bad[page] = ENODATA;
      }
      packs::TableSweep sweep_of_table;
      sweep_of_table.geometry = table.g;
      if (checked) sweep_of_table.checksums = table.checksums;
      u64 file_end = 0;
      const Wanted wanted = random_targets(random, table, sweep_of_table, false, file_end);
      auto engine = open_engine(random, kind, on_disk.paths, options.piece_bytes);
      engine->inject_faults(faults);
      Sweep sweep(engine, nullptr, std::make_shared<Priority>(), {sweep_of_table}, options);
      wait(sweep);
      CHECK_EQUAL(sweep.error(), 0);
      std::set<u64> lost;
      for (const BadPage& page : sweep.bad_pages()) {
        const u64 number = table.g.page_at(page.file, page.offset);
        CHECK_EQUAL(table.g.offset_of(number), page.offset);
        CHECK(bad.contains(number));
        CHECK(lost.insert(number).second);
        // An injected fault and the end of the file: either may be met first.
        if (bad[number] == EBADMSG) CHECK_EQUAL(page.error, EBADMSG);
        else CHECK(page.error == EIO || page.error == ENODATA);
      }
      for (const u64 page : pages_of(table, wanted.all()))
        if (bad.contains(page)) CHECK(lost.contains(page));
      check_targets(table, wanted, {}, lost);
    }
  }
}

// A table of 8 MiB, all of whose rows two packs want.
struct Large {
  Large() {
    Random random(5);
    table.g = {16'384, 512, 4096, 8, 1, 0};
    table.rows = random_bytes(random, table.g.row_count * table.g.row_bytes);
    table.shards = {table.rows};
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(table.rows.data()), static_cast<std::streamsize>(table.rows.size()));
    RowSet set(table.g.row_count);
    for (u32 row = 0; row < table.g.row_count; ++row) set.insert(row);
    rows = std::make_shared<RowList>(set);
  }
  packs::TableSweep to_file() const {
    packs::TableSweep found;
    found.geometry = table.g;
    found.targets = {{rows, nullptr, 0}, {rows, nullptr, table.rows.size()}};
    return found;
  }
  packs::TableSweep to_memory(std::byte* memory) const {
    packs::TableSweep found;
    found.geometry = table.g;
    found.targets = {{rows, memory, 0}};
    return found;
  }
  Table table;
  const std::string path = g_dir + "/large";
  std::shared_ptr<const RowList> rows;
};

constexpr packs::SweepOptions kSmallPieces{16 << 10, 4, 0, 2};

std::shared_ptr<io::Engine> engine_of(const std::string& path, u32 max_read_bytes = 16 << 10) {
  io::Options options;
  options.depth = 8;
  options.max_read_bytes = max_read_bytes;
  options.direct = false;
  return io::open_engine("threads", {path}, options);
}

// A file that may not grow beyond this many bytes while this lives.
struct FileLimit {
  explicit FileLimit(u64 bytes) {
    CHECK_EQUAL(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, before.rlim_max};
    CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileLimit() { setrlimit(RLIMIT_FSIZE, &before); }
  rlimit before;
};

void test_a_full_disk_ends_the_sweep(const Large& large) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  CHECK(full >= 0);
  {
    auto writer = std::make_shared<Writer>(std::vector{full}, 2, 4, 8192);
    Sweep sweep(engine_of(large.path), writer, std::make_shared<Priority>(), {large.to_file()}, kSmallPieces);
    wait(sweep);
    CHECK_EQUAL(sweep.error(), ENOSPC);
    CHECK(sweep.bytes_read() < large.table.rows.size());  // it did not go on
  }
  close(full);
  {
    File file("limited");
    const FileLimit limit(3 << 20);
    auto writer = std::make_shared<Writer>(std::vector{file.fd}, 2, 4, 8192);
    Sweep sweep(engine_of(large.path), writer, std::make_shared<Priority>(), {large.to_file()}, kSmallPieces);
    wait(sweep);
    CHECK_EQUAL(sweep.error(), EFBIG);
  }
}

void test_a_sweep_that_is_cancelled_ends_soon(const Large& large, Random& random) {
  Bytes memory(large.table.rows.size());
  int cancelled = 0;
  for (int round = 0; round < 15; ++round) {
    File file("scratch");
    const bool to_file = round % 2;
    std::shared_ptr<Writer> writer;
    if (to_file) writer = std::make_shared<Writer>(std::vector{file.fd}, 2, 16, 8192);
    auto priority = std::make_shared<Priority>();
    const bool blocked = to_file && round % 3 == 0;  // by a read of a pack that takes its time
    if (blocked) priority->begin_urgent();
    {
      Sweep sweep(engine_of(large.path), writer, priority, {to_file ? large.to_file() : large.to_memory(memory.data())},
                  kSmallPieces);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
      const auto begun = std::chrono::steady_clock::now();
      if (round % 5) {
        sweep.cancel();
        wait(sweep);
        CHECK(sweep.error() == ECANCELED || (!blocked && sweep.error() == 0));
        cancelled += sweep.error() == ECANCELED;
      }  // else its end cancels
      CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(10));
    }
    if (blocked) priority->end_urgent();
  }
  CHECK(cancelled > 0);
}

// A slow disk would write for seconds what waits when a sweep is cancelled.
void test_a_cancelled_sweep_does_not_write_what_waits(const Large& large) {
  constexpr u64 size = 1 << 20, count = 64;
  bool dropped = false;
  for (int attempt = 0; attempt < 10 && !dropped; ++attempt) {
    File file("scratch");
    auto writer = std::make_shared<Writer>(std::vector{file.fd}, 1, count, size);
    auto priority = std::make_shared<Priority>();
    priority->begin_urgent();  // the sweep itself writes nothing
    Sweep sweep(engine_of(large.path), writer, priority, {large.to_file()}, kSmallPieces);
    for (u64 i = 0; i < count; ++i) writer->write(writer->take(), size, i * size);
    sweep.cancel();
    wait(sweep);
    CHECK_EQUAL(sweep.error(), ECANCELED);
    dropped = writer->bytes_written() < count * size;
  }
  CHECK(dropped);
}

void test_a_sweep_to_scratch_waits_for_urgent_reads_and_for_sweeps_to_memory(const Large& large) {
  Bytes first(large.table.rows.size()), second(first.size());
  File file("scratch");
  auto priority = std::make_shared<Priority>();
  auto read = std::make_unique<packs::Urgent>(priority);
  auto writer = std::make_shared<Writer>(std::vector{file.fd}, 1, 4, 1 << 20);
  Sweep to_scratch(engine_of(large.path), writer, priority, {large.to_memory(first.data())}, kSmallPieces);
  CHECK(!to_scratch.wait_for(250));
  CHECK(std::all_of(first.begin(), first.end(), [](std::byte b) { return b == std::byte{0}; }));
  {
    Sweep to_memory(engine_of(large.path), nullptr, priority, {large.to_memory(second.data())}, kSmallPieces);
    read.reset();
    priority->yield(std::atomic<bool>(false));  // returns when the sweep to memory has ended
    CHECK(second == large.table.rows);
    wait(to_memory);
  }
  wait(to_scratch);
  CHECK_EQUAL(to_scratch.error(), 0);
  CHECK(first == large.table.rows);
}

void test_what_a_sweep_refuses(const Large& large) {
  auto refused = [&](packs::TableSweep table, std::shared_ptr<Writer> writer, packs::SweepOptions options) {
    try {
      Sweep sweep(engine_of(large.path), writer, std::make_shared<Priority>(), {table}, options);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  Bytes memory(large.table.rows.size());
  packs::SweepOptions short_pieces = kSmallPieces;
  short_pieces.piece_bytes = 2048;
  CHECK(refused(large.to_memory(memory.data()), nullptr, short_pieces));
  CHECK(refused(large.to_file(), nullptr, kSmallPieces));
  File file("scratch");
  CHECK(refused(large.to_file(), std::make_shared<Writer>(std::vector{file.fd}, 1, 2, 4096), kSmallPieces));
  packs::TableSweep other = large.to_memory(memory.data());
  other.targets[0].rows = list_of({1}, large.table.g.row_count + 1);
  CHECK(refused(other, nullptr, kSmallPieces));
}

void test_an_engine_that_is_closed_ends_the_sweep(const Large& large) {
  Bytes memory(large.table.rows.size());
  auto engine = engine_of(large.path);
  engine->close();
  Sweep sweep(engine, nullptr, std::make_shared<Priority>(), {large.to_memory(memory.data())}, kSmallPieces);
  wait(sweep);
  CHECK_EQUAL(sweep.error(), ECANCELED);
}

// --- reading packs ---

void test_a_pack_is_read_and_lost_bytes_are_named(const Large& large, Random& random) {
  const u64 size = large.table.rows.size();
  for (int round = 0; round < 10; ++round) {
    const u32 most = static_cast<u32>(between(random, 1, 64)) * 4096;
    auto engine = engine_of(large.path, most);
    const u64 begin = random() % 4 ? random() % size / 4096 * 4096 : random() % size;
    const u64 bytes = round == 0 ? 0 : random() % (std::min<u64>(size - begin, 2 << 20) + 1);
    std::vector<u64> at;
    std::vector<io::Fault> faults;
    for (u64 i = bytes ? random() % 4 : 0; i > 0; --i) {
      at.push_back(random() % bytes);
      faults.push_back({0, begin + at.back(), EIO, ~0u});
    }
    engine->inject_faults(faults);
    auto priority = std::make_shared<Priority>();
    Bytes memory(bytes + 2 * kGuard, kUntouched);
    PackRead read(engine, priority, 0, begin, memory.data() + kGuard, bytes);
    wait(read);
    std::vector<PackRead::Bad> bad = read.bad();
    for (const PackRead::Bad& one : bad) {
      CHECK_EQUAL(one.error, EIO);
      CHECK(one.begin < one.end && one.end <= bytes && one.end - one.begin <= most);
      CHECK(std::any_of(at.begin(), at.end(), [&](u64 a) { return one.begin <= a && a < one.end; }));
    }
    for (const u64 a : at)
      CHECK_EQUAL(std::count_if(bad.begin(), bad.end(),
                                [&](const PackRead::Bad& one) { return one.begin <= a && a < one.end; }),
                  1);
    for (u64 i = 0; i < bytes; ++i)
      if (std::none_of(bad.begin(), bad.end(), [&](const PackRead::Bad& one) { return one.begin <= i && i < one.end; }))
        CHECK(memory[kGuard + i] == large.table.rows[begin + i]);
    CHECK(std::all_of(memory.begin(), memory.begin() + kGuard, [](std::byte b) { return b == kUntouched; }));
    CHECK(std::all_of(memory.end() - kGuard, memory.end(), [](std::byte b) { return b == kUntouched; }));
    const std::atomic<bool> go_on{false};  // nothing urgent is left
    auto yielded = std::async(std::launch::async, [&] { priority->yield(go_on); });
    CHECK(yielded.wait_for(std::chrono::seconds(60)) == std::future_status::ready);
  }
}

void test_a_dropped_or_refused_read_leaves_nothing_urgent(const Large& large) {
  auto priority = std::make_shared<Priority>();
  const std::atomic<bool> go_on{false};
  auto nothing_urgent = [&] {
    auto yielded = std::async(std::launch::async, [&] { priority->yield(go_on); });
    CHECK(yielded.wait_for(std::chrono::seconds(60)) == std::future_status::ready);
  };
  Bytes memory(large.table.rows.size());
  for (int i = 0; i < 10; ++i) {
    PackRead read(engine_of(large.path), priority, 0, 0, memory.data(), memory.size());
  }
  nothing_urgent();
  auto closed = engine_of(large.path);
  closed->close();
  bool refused = false;
  try {
    PackRead read(closed, priority, 0, 0, memory.data(), memory.size());
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused);
  nothing_urgent();
}

// --- gathering ---

template <class T>
void append(Bytes& bytes, T value) {
  const auto* at = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), at, at + sizeof value);
}

// Rows of small whole numbers, which every type holds exactly.
void test_a_gather_takes_each_row_from_the_first_holder(Random& random) {
  enum Kind { as_stored, widened, narrowed, by_row, by_column };
  for (int round = 0; round < 20; ++round) {
    const Kind kind = static_cast<Kind>(round % 5);
    const u32 values = static_cast<u32>(between(random, 1, 40));
    const u64 row_count = between(random, 1, 2000);
    cache::RowForm form;
    form.values = values;
    std::vector<float> scales;
    if (kind == as_stored) {
      form.row_bytes = values;
    } else if (kind == widened) {
      form.from = bfloat16, form.to = float32, form.row_bytes = 2 * values;
    } else if (kind == narrowed) {
      form.from = float32, form.to = bfloat16, form.row_bytes = 4 * values;
    } else if (kind == by_row) {
      form.from = int8_by_row, form.to = float32, form.row_bytes = static_cast<u32>(scale_offset(values)) + 4;
    } else {
      form.from = int8_by_column, form.to = float32, form.row_bytes = values;
      for (u32 v = 0; v < values; ++v) scales.push_back(static_cast<float>(random() % 100) * 0.37f);
    }
    form.scales = scales;
    form.validate();
    std::vector<Bytes> stored(row_count), out(row_count);
    for (u32 row = 0; row < row_count; ++row) {
      const float scale = static_cast<float>(random() % 1000) * 0.013f;
      for (u32 v = 0; v < values; ++v) {
        const int number = static_cast<int>(random() % 255) - 127;
        const float value = static_cast<float>(number);
        const u32 bits = std::bit_cast<u32>(value);
        if (kind == as_stored) {
          append(stored[row], static_cast<signed char>(number));
          append(out[row], static_cast<signed char>(number));
        } else if (kind == widened) {
          append(stored[row], static_cast<u16>(bits >> 16));
          append(out[row], value);
        } else if (kind == narrowed) {
          append(stored[row], value);
          append(out[row], static_cast<u16>(bits >> 16));
        } else {
          append(stored[row], static_cast<signed char>(number));
          append(out[row], value * (kind == by_row ? scale : scales[v]));
        }
      }
      if (kind != by_row) continue;
      stored[row].resize(scale_offset(values));
      append(stored[row], scale);
    }
    // Rows that several holders have are only right in the first one.
    const u64 holder_count = between(random, 1, 3);
    std::vector<RowSet> sets;
    std::vector<Bytes> memories;
    std::set<u32> had;
    for (u64 h = 0; h < holder_count; ++h) {
      const std::set<u32> rows = random_rows(random, row_count, between(random, 1, 4));
      sets.push_back(set_of(rows, row_count));
      Bytes& memory = memories.emplace_back();
      for (const u32 row : rows) {
        const bool first = had.insert(row).second;
        const Bytes wrong(form.row_bytes, std::byte{0x55});
        const Bytes& bytes = first ? stored[row] : wrong;
        memory.insert(memory.end(), bytes.begin(), bytes.end());
      }
    }
    std::vector<packs::Holder> holders;
    for (u64 h = 0; h < holder_count; ++h) holders.push_back({&sets[h], memories[h].data()});
    std::vector<u32> ids(random() % 3000);
    for (u32& id : ids) id = static_cast<u32>(random() % row_count);
    Bytes found(ids.size() * form.out_row_bytes());
    cache::Workers workers(static_cast<u32>(between(random, 1, 3)));
    const auto [missing, overflowed] = packs::gather(workers, ids, holders, form, found.data());
    u64 expected_missing = 0;
    for (u64 i = 0; i < ids.size(); ++i) {
      if (!had.contains(ids[i])) ++expected_missing;
      else CHECK(std::memcmp(&found[i * form.out_row_bytes()], out[ids[i]].data(), form.out_row_bytes()) == 0);
    }
    CHECK_EQUAL(missing, expected_missing);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  g_dir = argv[1];
  const char* given = std::getenv("GIDS_TEST_SEED");
  const u64 seed = given ? std::strtoull(given, nullptr, 10) : 7;
  std::fprintf(stderr, "GIDS_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  Random random(seed);
  test_ranks_are_positions_in_a_sorted_list(random);
  test_a_row_list_holds_gaps_of_any_length();
  test_counts_and_the_hottest_rows(random);
  test_a_count_stays_at_its_most();
  test_cuts_are_those_of_a_model(random);
  test_a_writer_writes_every_buffer_at_its_offset(random);
  test_a_write_error_is_returned_once_and_buffers_come_back("/dev/full", ENOSPC);
  test_a_write_error_is_returned_once_and_buffers_come_back(nullptr, ESPIPE);
  test_a_sweep_copies_every_wanted_row(random);
  test_a_page_that_cannot_be_read_loses_its_own_rows_only(random);
  const Large large;
  test_a_full_disk_ends_the_sweep(large);
  test_a_sweep_that_is_cancelled_ends_soon(large, random);
  test_a_cancelled_sweep_does_not_write_what_waits(large);
  test_a_sweep_to_scratch_waits_for_urgent_reads_and_for_sweeps_to_memory(large);
  test_what_a_sweep_refuses(large);
  test_an_engine_that_is_closed_ends_the_sweep(large);
  test_a_pack_is_read_and_lost_bytes_are_named(large, random);
  test_a_dropped_or_refused_read_leaves_nothing_urgent(large);
  test_a_gather_takes_each_row_from_the_first_holder(random);
  std::printf("ok\n");
}
