"""What ranks say of their parts of files, joined: each says it in a step of its own."""

from compiled_llm.parallel.rank_files import RankFiles
from compiled_llm.scheduling.worker import FileResult

A, B, C = b"a", b"b", b"c"
NOTHING = FileResult()


def test_a_block_is_there_if_all_its_parts_are() -> None:
    files = RankFiles([(A, B), (B, C)])
    assert files.there == {B}
    assert files.joined([FileResult(found=(C,)), NOTHING]).found == (C,)
    assert files.joined([NOTHING, FileResult(lost=(B,), num_evicted=1)]) == FileResult(lost=(B,), num_evicted=1)
    assert files.joined([FileResult(lost=(B,)), NOTHING]) == NOTHING, "it was told before"
    assert files.joined([FileResult(lost=(A,)), NOTHING]) == NOTHING, "it never was there"
    assert files.there == {C}


def test_a_write_ends_with_its_last_rank() -> None:
    files = RankFiles([(), ()])
    assert files.joined([FileResult(written=((A, True), (B, True)), copy_seconds=2.0), NOTHING]) == FileResult(
        copy_seconds=2.0
    )
    ended = files.joined([NOTHING, FileResult(written=((A, True), (B, False)), file_seconds=1.0)])
    assert ended == FileResult(written=((A, True), (B, False)), found=(A,), file_seconds=1.0)
    assert files.there == {A}
    # The part that there is of B counts, once the other is written.
    ended = files.joined([FileResult(written=((B, True),)), FileResult(written=((B, True),))])
    assert (ended.written, files.there) == (((B, True),), {A, B})


def test_a_part_that_made_room_before_the_last_rank_had_written_its_own_is_missed() -> None:
    files = RankFiles([(), ()])
    files.joined([FileResult(written=((A, True),)), NOTHING])
    assert files.joined([FileResult(lost=(A,)), NOTHING]) == NOTHING
    assert files.joined([NOTHING, FileResult(written=((A, True),))]) == FileResult(written=((A, False),))
    assert files.there == set()
    # Within one step: what was written there made room at once.
    both = [FileResult(written=((B, True), (C, True)), lost=(B,)), FileResult(written=((B, True), (C, True)))]
    assert files.joined(both) == FileResult(written=((B, False), (C, True)), found=(C,))


def test_a_read_ends_with_its_last_rank_and_takes_what_all_have() -> None:
    files = RankFiles([(A, B), (A, B)])
    first = FileResult(read=((A, (0, 1), 3.0), (B, (), 1.0)))
    assert files.joined([first, NOTHING]).read == ()
    ended = files.joined([NOTHING, FileResult(read=((A, (1,), 1.0), (B, None, 2.0)))])
    assert ended == FileResult(read=((A, (1,), 3.0), (B, None, 2.0)), lost=(B,))
    assert files.there == {A}


def test_what_was_dropped_is_not_waited_for() -> None:
    files = RankFiles([(A,), (A,)])
    files.joined([FileResult(read=((A, (), 1.0),), written=((B, True),)), NOTHING])
    files.reset()
    both = FileResult(read=((A, (), 1.0),), written=((B, True),))
    assert files.joined([both, NOTHING]).read == ()
    ended = files.joined([NOTHING, both])
    assert (ended.read, ended.written) == (both.read, both.written)
