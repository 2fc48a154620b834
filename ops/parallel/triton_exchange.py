"""How programs of several GPUs exchange pieces within a CUDA graph: memory, flags, and why nothing comes too early.

Each rank has memory that all others can read and write (symmetric memory), zeros at the start. Program c of a launch
is channel c. It exchanges with program c of the same launch in the other ranks, and with no other program:

    bytes 1,024 * c       64 flags of channel c, int64: which meeting each rank says that it has come to
          512 further     how many pieces the channel has exchanged, int64; the rank's own
    from byte 65,536      a slot for each channel, for pieces with even numbers; then as many for those with odd ones

Piece k of a channel has meeting 2 k, and 2 k + 1 if ranks share the work of a sum (``TWO_SHOT``). A rank

 1. writes its piece into its own slot for numbers like k,
 2. comes to meeting 2 k: it writes 2 k as its flag into the memory of every rank, and waits until its own memory has
    a flag of at least 2 k from every rank,
 3. reads the slots of all ranks. Or, two-shot, it reads its section of all, writes the sum behind its piece in its own
    slot, comes to meeting 2 k + 1, and reads the sums of all.

Nothing is read before it is written. A flag is written with release by a thread that has met all others of its program
at a barrier behind their writes, and read with acquire before a barrier behind which the program reads. Both are at
system scope, so they order what GPUs do to each other's memory (PTX ISA, "Memory Consistency Model").

Nothing is overwritten before it is read. The slot of piece k is written again for piece k + 2, so behind meeting
2 (k + 1). A rank's flag for that one was written behind a barrier behind its last read of piece k. The sum that
two-shot ranks write lies behind the piece, so nobody reads there before meeting 2 k + 1. Flags only grow, and have one
writer each.

Launches need no more than that. They may have different grids, sizes and dtypes, and be of different ops: a channel
knows how many pieces it has exchanged, not in which launches. Only its own program reads and writes that number, and
launches of a rank come one after the other. All numbers are on the device, so a graph finds its piece each time that it
is replayed.

What is needed: ranks launch the same, of the same sizes, in the same order, when they warm up and replay graphs, too.
All programs of a launch fit on the GPU at once, or two ranks could each wait for programs that the other has not
started: there are 64 channels at most, and two of their programs fit on an SM, so 32 SMs are enough, which
``gpu_group`` (``worker/rank_gpus.py``) asks for. Other launches keep no SM from it for good: those before it wait for
no rank, and one that may start early behind it (``programmatic_launch.py``) does so when all programs have started. And
flags are written by atomics, which links between GPUs must support: NVLink does, PCIe does not.

``tests/ops/parallel/protocol.py`` is a model of this that runs ranks in any order.
"""

import triton
import triton.language as tl

from compiled_llm.ops.parallel.rank_group import MOST_RANKS

CHANNELS = tl.constexpr(64)
_CHANNEL_WORDS = tl.constexpr(128)  # int64
_COUNT = tl.constexpr(64)  # the word of a channel that counts its pieces
HEADER_BYTES = tl.constexpr(65536)
assert _COUNT.value >= MOST_RANKS
assert CHANNELS.value * _CHANNEL_WORDS.value * 8 == HEADER_BYTES.value


@triton.jit
def pieces_before(memory):
    """A pointer to how many pieces this program has exchanged, in its rank's ``memory``."""
    return memory.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * _CHANNEL_WORDS + _COUNT


@triton.jit
def slot_of(piece, SLOT: tl.constexpr):
    """Where this program's slot for ``piece`` begins, in bytes from the start of any rank's memory."""
    return HEADER_BYTES + (piece % 2 * CHANNELS + tl.program_id(0)) * SLOT


@triton.jit
def memory_of(place, rank, first, DTYPE: tl.constexpr):
    """A pointer to byte ``first`` of the memory of ``rank``; ``place``: as ``RankGroup.place``."""
    address = tl.load(place + 1 + rank) + first
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def come_to(meeting, place, memory, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Tell all ranks, then wait for them. What any of them wrote before may then be read.

    Args:
        LANES: the power of two from RANKS on. Those behind the last rank do the same as the last.
    """
    tl.debug_barrier()  # all threads have read and written before one of them tells it
    lane = tl.minimum(tl.arange(0, LANES), RANKS - 1)
    word = tl.program_id(0) * _CHANNEL_WORDS
    theirs = tl.load(place + 1 + lane).to(tl.pointer_type(tl.int64)) + word + tl.load(place)
    tl.atomic_xchg(theirs, tl.zeros([LANES], tl.int64) + meeting, sem="release", scope="sys")
    wait_for_ranks(memory.to(tl.pointer_type(tl.int64)) + word + lane, meeting, LANES)
    tl.debug_barrier()  # all threads know it before one of them reads


@triton.jit
def wait_for_ranks(flags, meeting, LANES: tl.constexpr):
    nothing = tl.zeros([LANES], tl.int64)
    while tl.min(tl.atomic_add(flags, nothing, sem="acquire", scope="sys"), 0) < meeting:
        pass
