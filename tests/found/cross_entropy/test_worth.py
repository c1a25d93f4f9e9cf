"""How many chunks pay for a head."""

import pytest

from jaxamp.found.cross_entropy.worth import Sizes, chunks_for

HEAD = Sizes(tokens=16384, width=4096, words=65536, again=1)


@pytest.mark.parametrize("chunks", [8, 4, 2])
def test_half_as_many_chunks_are_tried_where_more_take_too_long(chunks):
    """A program in which one so large takes just 1.02 times as long gets no more than it allows."""
    program = HEAD.longer(chunks) / 0.02
    assert chunks_for(HEAD, None, 1.001 * program) == chunks
    fewer = chunks // 2 if chunks > 2 else "a step would take 1.02 times as long"
    assert chunks_for(HEAD, None, 0.999 * program) == fewer


def test_who_asks_for_memory_waits():
    assert chunks_for(HEAD, "memory", program=1.0) > chunks_for(HEAD, None, program=1e15)
