"""The native half of gids, bound in native/bind. Every call releases the GIL while it works.

Arrays are in C order and are not converted: each has the dtype that its alias names.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt8 = NDArray[np.uint8]
UInt16 = NDArray[np.uint16]
UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
Index = Int32 | Int64

# native/bind/cuda.cpp
def enqueue(functions: list[int], context: int, stream: int, commands: UInt64) -> tuple[int, int]:
    """native/cuda/commands.h"""

# native/bind/store.cpp
def map_file(fd: int, nbytes: int, path: str) -> tuple[UInt8, int]:
    """The first bytes of a file, mapped for reading: uint8[nbytes], and a duplicate of fd.

    The duplicate is open while the array lives. path: for errors."""

class MapGuard:
    """Of a with statement: reads of mapped files that fail raise StorageError at its end.

    Guards the reads of this thread, in the block."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, error: object, value: object, traceback: object) -> None: ...

def crc32c(pages: UInt8) -> UInt32:
    """CRC32C of each page. pages: uint8[n, page_bytes], C order. Returns uint32[n]."""

def crc32c_extend(crc: int, data: UInt8) -> int:
    """CRC32C of the bytes that led to crc (0: none) followed by data, uint8[n]."""

def crc32c_portable(crc: int, data: UInt8) -> int:
    """crc32c_extend without the processor's instruction, for comparison."""

def count_sources(indices: Index, limit: int, first: int, counts: UInt32) -> int | None:
    """Add to counts (saturating) how often each of first, first + 1, ... occurs in indices.

    Returns None, or the position of the first index outside [0, limit)."""

def sort_edges(
    sources: Int64,
    destinations: Int64,
    ids: Int64,
    first: int,
    offsets: Int64,
    sorted_sources: Int64,
    sorted_ids: Int64,
) -> int | None:
    """Stable sort of edges by destination, all in [first, first + len(offsets) - 1).

    Fills offsets and the sorted arrays. Returns None, or the position of the first
    destination out of range."""

def sort_neighbors(offsets: Int64, sources: Int64, ids: Int64) -> None:
    """Sort the edges of each destination by source, stably and in place.

    Destination v has those from offsets[v] to offsets[v + 1]. ValueError when offsets are none."""

def carry_to_sources(indptr: Int64, indices: Index, shares: Float64, visits: Float64) -> int | None:
    """Add shares[v] to visits[s] for each in-edge of destination v from source s.

    Destination v has the edges indptr[v] to indptr[v + 1] of indices. Returns None, or the position
    of the first source that visits has no place for. ValueError for a bad indptr."""

# native/bind/parts.cpp
class HeldRows:
    """The ids of the rows that a part of a dataset holds, a bitmap. A row's position there is its rank."""

    def __init__(self, id_count: int) -> None: ...
    def add_owned(self, owners: UInt8 | UInt16, first: int, part: int) -> None:
        """Add the ids first + i with owners[i] == part."""
    def add(self, ids: Index) -> int | None:
        """Add ids. Returns None, or the position of the first that is out of range or repeated."""
    def seal(self) -> None:
        """End of adding: only now are there positions. ValueError for 2^32 ids or more."""
    def positions_of(self, ids: Int64, out: Int64) -> int | None:
        """out[i] = the number of held ids below ids[i].

        Returns None, or the position of the first id that is not held."""
    def ids(self, out: Int64) -> None:
        """Write the held ids, ascending, to out, int64[len(self)]."""
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

# native/bind/row_order.cpp
SLOT_BYTES: int
"""Of a record of a scattered file, before the row."""

def to_positions(order: Index, ids: Int64, out: Int64) -> None:
    """out[i] = order[ids[i]]; an id out of range stays as it is, for whoever checks ids to find."""

def sum_by_page(order: Index, weights: Float32, rows_per_page: int, sums: Float32) -> int | None:
    """Add each row's weight to the sum of the page that order puts it in.

    Returns None, or the first row whose page there is not."""

def mark_positions(order: Index, row_count: int, first: int, marks: UInt8) -> int | None:
    """Mark each position in [first, first + len(marks)).

    Returns None, or the first row whose position is out of range or marked already."""

def propagate_labels(
    indptr: Int64, indices: Index, labels: UInt32, sizes: UInt32, most: int, seed: int
) -> int:
    """One round: each node takes the label of most of its in-neighbors, of clusters below `most` nodes.

    Returns how many moved. ValueError for a damaged topology."""

def adopt_lone(indptr: Int64, indices: Index, labels: UInt32, sizes: UInt32, most: int) -> int:
    """Nodes that are alone join the cluster of a node that they point to. Returns how many."""

def by_weight(weights: UInt32, nodes: UInt32) -> None:
    """All nodes by falling weight, equals in their order. Weights above 65535 are equal."""

def place_in_clusters(nodes: UInt32, labels: UInt32, ranks: UInt32, starts: UInt64, order: Index) -> None:
    """order[node] = the next place of cluster ranks[labels[node]], for nodes in turn. starts are advanced."""

def scatter_rows(
    fd: int, rows: UInt8, positions: Int64, bucket_rows: int, row_count: int, filled: UInt64
) -> int:
    """Append rows (uint8[n, row_bytes]) to the buckets of their positions in a file. Returns 0 or errno.

    Bucket b, of positions from b * bucket_rows, begins at that record; filled: records in each, advanced.
    A record is the place within the bucket (SLOT_BYTES) and the row. EINVAL for a position without room."""

def place_rows(records: UInt8, out: UInt8) -> bool:
    """Put a bucket's records in their places. Returns whether they were a whole bucket."""

# native/bind/io.cpp
class Engine:
    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def alignment(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def max_read_bytes(self) -> int: ...
    @property
    def bounce_bytes(self) -> int: ...
    def read(self, files: UInt32, offsets: Int64, out: UInt8, errors: Int32) -> None: ...
    def read_extents(
        self, files: UInt32, offsets: Int64, lengths: Int64, out: UInt8, out_offsets: Int64, errors: Int32
    ) -> None: ...
    def stats(self) -> dict[str, int | float]: ...
    def latencies(self) -> tuple[list[float], list[int]]: ...
    def inject_faults(self, faults: list[tuple[int, int, int, int]]) -> None: ...
    def close(self) -> None: ...

def open_engine(
    kind: str,
    paths: list[str],
    *,
    depth: int,
    threads: int,
    rings: int,
    most_rings: int,
    direct: bool,
    max_read_bytes: int,
    max_merge_bytes: int,
    descriptors: list[int] = ...,
) -> Engine: ...
def probe_file(path: str, *, direct: bool) -> tuple[str, int]: ...
def why_no_uring() -> str: ...

# native/bind/queue.cpp
QUEUE_SLOT_UNIT: int
"""The longest page is rounded up to a multiple of this many bytes."""
QUEUE_ROUNDS_MAX: int
"""The most rounds that are posted and not copied."""
QUEUE_COUNT_BITS: int
"""An answer is the number of failed requests | (round + 1) << this."""
IO_THREADS_MAX: int
SCRATCH_STRIPE_BYTES: int

class QueueMemory:
    """A queue pair in memory that host and device share. The engine and the service keep it alive."""

    def __init__(self, *, staging_bytes: int, slot_bytes: int, rounds_max: int, spin_ns: int) -> None: ...
    @property
    def address(self) -> int:
        """Host address of the shared memory."""
    @property
    def shared_bytes(self) -> int: ...
    @property
    def local_bytes(self) -> int:
        """Bytes of the posting side's own memory, which must be zeroed."""
    @property
    def round_max(self) -> int:
        """The most requests of a round."""
    @property
    def slot_bytes(self) -> int: ...
    def pair(self, shared: int, local: int) -> bytes:
        """The bytes of the gids::queue::Pair, with device addresses of shared and local memory."""
    def offsets(self, round: int) -> tuple[int, int]:
        """Offsets in shared memory of a round's answer and of its pages."""

class QueueService:
    """The thread that answers requests.

    tables: (page_count, first_file, file_count, page_bytes, checksums) of each, see
    gids.io.device.QueueTable."""

    def __init__(
        self,
        engine: Engine,
        tables: Sequence[tuple[int, int, int, int, UInt32 | None]],
        memory: QueueMemory,
        *,
        timeout_ms: int,
    ) -> None: ...
    def arm(self) -> int:
        """Announce a kernel that posts a round; returns the round's number. It must be launched."""
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

# native/bind/cache.cpp
USE_BITS: int
"""The most minibatches that may be live (in the window or planned) at once."""
HEAT_LEVELS: int
HEAT_SHIFT: int
LINE_SHIFT: int
STATE_SHIFT: int
"""The lowest bit of each field of a page word."""
ABSENT: int
RESIDENT: int
"""States of a page word."""
LINE_METADATA_BYTES: int
LISTS_BYTES: int
"""Bytes of a table's lists of lines when it has no lines."""
PLANNED_ROW_BYTES: int
"""Upper bound of the bytes of requests, per row of a planned minibatch."""
PLANNING_ROW_BYTES: int
"""Bytes to plan and gather one minibatch, per row."""
MAX_LINES: int
VALUE_TYPES: dict[str, int]
"""gids::ValueType by name."""
DEVICE_POLICIES: dict[str, int]
"""score::Policy by name."""
DEVICE_COUNTERS: dict[str, int]
"""The word of each counter in a device::Counters."""
DEVICE_COUNTER_WORDS: int
DEVICE_CHOICE_BYTES: int
"""sizeof(device::Choice)"""

def device_candidates(lines: int, misses: int) -> int:
    """The number of lines that a plan of the GPU cache looks at."""

def copy_as(count: int, stored_as: int, wanted_as: int) -> int:
    """RowCopy::as. count: bytes (unchanged) or values (converted) that a lane copies at once."""

class Workers:
    @staticmethod
    def create(threads: int) -> Workers: ...

class BufferPool:
    @staticmethod
    def create(keep_bytes: int) -> BufferPool: ...
    def take(self, bytes: int, room: int = 0) -> UInt8:
        """uint8[bytes]. The buffer returns to the pool with the last view of it.

        room: expected size of later requests. A request of more than half of it gets a buffer of this size.
        """
    def keep(self, bytes: int) -> None:
        """Keep idle buffers as long as they and those in use take at most so many bytes."""
    @property
    def taken_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...

class Planner:
    """The metadata of a cache, without pages. Steps enter, are planned and retire in order."""

    def __init__(
        self,
        pages: int,
        lines: int,
        policy: str = "lookahead",
        seed: int = 0,
        heat: UInt8 | None = None,
        keep: bool = False,
    ) -> None:
        """keep: a page of heat 255 keeps its line for good."""
    def enter(self, step: int, pages: Int64) -> int:
        """Mark a minibatch's pages, int64[n]; returns the number of unique ones. IndexError marks nothing."""
    def plan(self, step: int) -> tuple[int, int, int]:
        """(hits, loads, bypasses) in pages. Loads complete at once."""
    def retire(self, step: int) -> None: ...
    def words(self) -> UInt64: ...
    def audit(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

class PageCache:
    """One table's cache in host memory, used by gids.cache.FeatureCache."""

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        *,
        row_count: int,
        row_bytes: int,
        page_bytes: int,
        rows_per_page: int,
        shard_count: int,
        first_file: int,
        lines: int,
        policy: str,
        seed: int = 0,
        heat: UInt8 | None = None,
        keep: bool = False,
        checksums: UInt32 | None = None,
        stored_as: int = 0,
        wanted_as: int = 0,
        row_values: int = 0,
        scales: Float32 | None = None,
    ) -> None: ...
    def check(self, ids: Int64) -> None: ...
    def enter(self, step: int, ids: Int64) -> int: ...
    def plan(self, step: int, ids: Int64, out: UInt8) -> None:
        """Plan and submit reads."""
    def gather_ready(self, step: int) -> None:
        """Copy the rows of pages that were read. wait() and gather_rest() must follow."""
    def wait(self, step: int) -> None:
        """Wait until the reads of the step are complete."""
    def gather_rest(self, step: int) -> list[tuple[int, int, int]]:
        """Copy the other rows. Returns (file, offset, errno) of each page that could not be read."""
    def retire(self, step: int) -> None: ...
    def cancel(self) -> int:
        """Retire every live step. Does nothing in a forked child, where other calls raise RuntimeError."""
    def read_through(self, ids: Int64, out: UInt8) -> list[tuple[int, int, int]]: ...
    def audit(self) -> None: ...
    def words(self) -> UInt64: ...
    def stats(self) -> dict[str, int | float]: ...
    @property
    def plan_bytes(self) -> int:
        """Peak bytes of requests of planned steps and of memory to plan in."""

# native/bind/place.cpp
MAX_DEVICES: int

_Heat = Float32 | Float64
_Masks = UInt8 | UInt16 | UInt32 | UInt64

def by_heat(heat: _Heat, rows: UInt32) -> None:
    """All rows by falling heat, equals in their order. No heat may be negative or NaN."""

def place(
    rows: UInt32, heat: _Heat, capacities: list[int], worth: tuple[float, float], holders: _Masks
) -> tuple[int, list[float]]:
    """Set bit d of holders[v] for every device d that holds row v. rows: from by_heat.

    worth: of a new row and of a copy, per heat. Returns the copies exchanged for new rows, and what each
    device gained by that."""

# native/bind/bench.cpp
def unique_pages(ids: Int64, rows_per_page: int, marks: UInt32, mark: int, out: Int64) -> int:
    """Write the pages of ids, each once, in order of first appearance, into out; returns their number.

    marks: uint32[page_count], none equal to mark before. IndexError for an id beyond the last page."""

def min_hits(next: UInt32, ends: Int64, lines: int, warm: int, hits: Int64) -> None:
    """Hits of each minibatch under Belady's MIN with bypass, int64[batches].

    next: for each page of each minibatch, the minibatch of its next use (batches: none). ends:
    int64[batches + 1], the start of each minibatch in next. Before minibatch `warm` nothing is dropped."""

# native/bind/sampler.cpp
MAX_NODES: int
"""The most nodes of a type."""

def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four words from a counter of four and a key of two."""

class BadTopology(ValueError): ...

class NeighborTopology:
    """In-edges by relation, between numbered node types."""

    def __init__(self, node_types: list[tuple[int, str]]) -> None: ...
    def add(self, indptr: Int64, indices: Index, src: int, dst: int, name: str) -> None:
        """Add a relation. Keeps the arrays without a copy."""

_Arrays = tuple[Int64, Int64, Int64, Float32 | None, int]
_Sampled = tuple[list[Int64], list[list[_Arrays]], list[Int64]]
_Trees = tuple[list[Int64], UInt32, Int64 | None]

class HostSampler:
    """Threads, hash maps and buffers, which are reused for each minibatch."""

    def __init__(self, threads: int, keep_bytes: int) -> None: ...
    def neighbor(
        self,
        topology: NeighborTopology,
        seeds: list[list[Int64]],
        fanouts: list[list[int]],
        numbers: tuple[int, int, int],
        only: int | None,
        replace: bool,
        weights: list[Float32 | None],
        dependency: tuple[int, bool],
        near: list[UInt8 | None],
        factor: float,
        weigh_near: bool,
        trees: list[_Trees],
        times: list[tuple[NDArray[Any], bool] | None],
        last: bool,
        newest: bool,
        induced: bool,
    ) -> list[_Sampled]:
        """Minibatches of successive steps. seeds: by minibatch and node type; fanouts: by layer, the seeds'
        first, by relation; numbers: (seed, epoch, first step); only: draw this layer alone, for the seeds as
        its nodes, and leave node ids in indices; weights: by relation, of each edge; dependency: (kappa,
        nested), where kappa 0 is infinite; near: by relation, a bit for each source whose edges are drawn
        `factor` times as often, the lowest bit of a byte first; weigh_near: blocks of these relations have
        weights.

        trees: by minibatch (the tree of each seed by node type, tags, times), or empty; times: by relation
        (times of edges or of sources, whether of sources): later edges are left out; last: draw among the
        last edges; newest: only nodes that the layer before found draw; induced: one layer, of all edges
        among the nodes.

        Returns of each minibatch (nodes by type, by layer and relation (indptr, indices, positions, weights
        or None, number of sources), trees of the nodes by type or nothing)."""
    def labor(
        self,
        topology: NeighborTopology,
        seeds: list[list[Int64]],
        fanouts: list[list[int]],
        numbers: tuple[int, int, int],
        only: int | None,
        importance_sampling: int,
        fixed_count: bool,
        layer_dependency: bool,
        dependency: tuple[int, bool],
    ) -> list[_Sampled]:
        """The same by LABOR. importance_sampling -1: to convergence."""
    def ladies(
        self,
        topology: NeighborTopology,
        seeds: list[list[Int64]],
        sizes: list[list[int]],
        numbers: tuple[int, int, int],
        only: int | None,
        by_count: bool,
        replace: bool,
        poisson: bool,
    ) -> list[_Sampled]:
        """The same by LADIES. sizes: how many sources to draw, by layer and relation; by_count: draw a source
        in proportion to the square of its edges to the nodes."""
    def walk(
        self,
        topology: NeighborTopology,
        seeds: list[list[Int64]],
        counts: list[list[int]],
        numbers: tuple[int, int, int],
        only: int | None,
        path: list[int],
        walks: int,
        length: int,
        restart: float,
    ) -> list[_Sampled]:
        """The same by random walks; one block in a layer. counts: neighbors, by layer; path: relations."""
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def together_bytes(self) -> int:
        """Of these, what threads use that make one minibatch together."""
    @property
    def taken_bytes(self) -> int:
        """Of buffers that minibatches are in."""
    @property
    def idle_bytes(self) -> int:
        """Of buffers for minibatches to come."""

def hop_walks(
    topology: NeighborTopology,
    relation: int,
    numbers: tuple[int, int, int],
    layer: int,
    starts: Int64,
    draws: Int64,
    nodes: Int64,
    out: Int64,
) -> None:
    """One hop of random walks from nodes; starts, draws: where each began, and the number of its draw.

    out: the next nodes; -1 in a dead end."""

def restart_walks(
    numbers: tuple[int, int, int], layer: int, restart: float, starts: Int64, draws: Int64, out: Bool
) -> None:
    """Whether walks go back to their starts."""

def rank_walks(visited: Int64, each: int, most: int, indptr: Int64, sources: Int64, shares: Float32) -> int:
    """The neighbors that `each` visits of every node make; -1: no visit. Returns their number."""

class FoundNodes:
    """The nodes of a minibatch by type, while its edges come from several samplers."""

    def __init__(self, threads: int, seeds: list[Int64], trees: list[Int64] | None = None) -> None: ...
    def relabel(self, type: int, ids: Int64, trees: UInt32 | None = None) -> None:
        """Replace ids by local ids, in place; new nodes get the next ones, in order of appearance."""
    def size(self, type: int) -> int: ...
    def nodes(self, type: int) -> Int64:
        """A copy, in order of first appearance."""
    def trees(self, type: int) -> UInt32:
        """The tree of each node, a copy."""

def tree_tags(node_type: int, roots: Int64, times: Int64, out: UInt32) -> None:
    """What the trees with these roots draw by."""

def variate_keys(
    numbers: tuple[int, int, int], dependency: tuple[int, bool], layer: int, number: int
) -> tuple[int, int, float, float]:
    """What kernels need for these numbers: the keys of the group and of the next one, and their shares."""

def variates(
    numbers: tuple[int, int, int], kappa: int, layer: int, number: int, nodes: Int64, out: UInt64
) -> None:
    """64 random bits for each node, which it has as a source of type `number` in a layer, with dependence
    kappa (0: without end). out: uint64[n]."""

def philox2(counter: int, key: int) -> int:
    """Philox2x32-10: 64 bits of 64 bits and a key of 32."""

def check_rows(ids: Int64, row_count: int) -> None:
    """Raise IndexError for an id outside 0 to row_count - 1."""

class PackWriter:
    """Threads that write packs to a scratch file, which is striped over these files."""

    @staticmethod
    def create(fds: Sequence[int], *, threads: int, buffers: int, buffer_bytes: int) -> PackWriter: ...

# native/bind/packs.cpp

ANNEX_MOST_STEPS: int
"""Steps of a superbatch, at most."""
ANNEX_USE_BYTES: int
"""Of the file of RowUses, for each use."""
ANNEX_RANGES: int
"""Ranges of rows in which the offline cache is counted: of equal next uses, it drops a range at a time."""

ANNEX_RUNS_AT_ONCE: int

def annex_group_bytes(row_bytes: int) -> int:
    """The least bytes of a write buffer of the sweep."""

def annex_row_bytes(row_bytes: int) -> int:
    """Bytes of a row in an annex, and in a line."""

class RowUses:
    """The rows of a table that each minibatch of a superbatch uses, in a file."""

    @staticmethod
    def create(fd: int, row_count: int) -> RowUses:
        """fd: of an empty file, without O_DIRECT, which is duplicated."""
    def append(self, rows: UInt32) -> None:
        """The rows of the next step, which may repeat."""
    def count(self, step: int) -> int: ...
    def __len__(self) -> int: ...
    @property
    def uses(self) -> int: ...
    @property
    def longest(self) -> int:
        """Uses of the step that has most."""

class Cancel:
    """Ends plan_annex(), which raises OSError (ECANCELED) then, and an AnnexSweep, from another thread."""

    @staticmethod
    def create() -> Cancel: ...
    def cancel(self) -> None: ...

class AnnexPlan:
    """Which copies of rows an annex has, and how long lines keep them."""

    @property
    def copies(self) -> int: ...
    @property
    def kept(self) -> int:
        """Copies that lines keep."""
    @property
    def runs(self) -> int:
        """Steps with copies."""
    @property
    def group_bytes(self) -> int:
        """Of a buffer that the sweep needs for each run, and for one more."""
    @property
    def chunk_bytes(self) -> int:
        """Of the table, that the sweep reads at a time."""
    @property
    def nbytes(self) -> int:
        """Of the annex."""

def plan_annex(
    uses: RowUses,
    workers: Workers,
    *,
    cancel: Cancel | None = None,
    row_count: int,
    row_bytes: int,
    page_bytes: int,
    rows_per_page: int,
    shard_count: int,
    first_file: int,
    lines: int,
    group_bytes: int,
    chunk_bytes: int,
) -> AnnexPlan:
    """Plan the copies for a cache of so many lines. The uses become what a RunReader does. Blocks."""

class AnnexSweep:
    """Makes the copies of a plan, in a thread."""

    def __init__(
        self,
        engine: Engine,
        writer: PackWriter,
        workers: Workers,
        uses: RowUses,
        plan: AnnexPlan,
        *,
        cancel: Cancel | None = None,
        chunks: int,
        gap_bytes: int,
        checksums: UInt32 | None = None,
    ) -> None: ...
    def wait(self) -> dict[str, Any]:
        """Block. error: errno or 0; in_table or in_annex; file; offset; bytes_read; bytes_written; busy_s."""

class RunMemory:
    """Memory for the rows that a RunReader keeps, and for pieces of its runs."""

    @staticmethod
    def create(
        *, lines: int, row_bytes: int, pieces: int, piece_bytes: int, lines_here: bool = True
    ) -> RunMemory: ...
    @property
    def lines(self) -> int: ...
    @property
    def pieces(self) -> int: ...
    @property
    def pieces_address(self) -> int: ...
    @property
    def pieces_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class RunReader:
    """Reads the steps of a superbatch from its annex, in their order."""

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        memory: RunMemory,
        uses: RowUses,
        plan: AnnexPlan,
        *,
        stored_as: int,
        wanted_as: int,
        row_values: int,
        scales: Float32 | None = None,
    ) -> None: ...
    def read(self, out: UInt8) -> tuple[int, int, int, bool]:
        """The rows of the next step, to uint8[uses, bytes of a row], in the order of its uses. Blocks.

        Returns (an errno or 0, file, offset, whether a finite value became infinite).
        """
    @property
    def next_step(self) -> int: ...
    @property
    def next_uses(self) -> int: ...
    @property
    def next_copies(self) -> int: ...
    def numbers(self, sources: UInt32, keeps: UInt32) -> None:
        """Where lines are elsewhere, of the next step: for each use its line, or 2^31 + the row of the run.

        For each row of the run the line that keeps it, or 2^32 - 1.
        """
    def next_piece(self) -> tuple[int, int, int, int, int, int]:
        """Then rows of its run: (an errno or 0, file, offset, address, first row, rows). Blocks."""
    def free_piece(self) -> None:
        """The memory of the oldest piece that came is read into again."""
    def end_step(self) -> None: ...
    def stats(self) -> dict[str, Any]:
        """steps, rows, bytes_read, wait_s, gather_s."""
