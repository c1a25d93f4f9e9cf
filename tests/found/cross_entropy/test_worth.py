"""How many chunks pay for a head."""

import pytest

from jaxamp.found.cross_entropy.worth import Cost, Sizes, chunks_for

HEAD = Sizes(tokens=16384, width=4096, words=65536, again=1)
LARGE = 1e15
"""What takes so long, or moves so much, that no head counts."""


def _least(chunks, measure, part):
    """The measure of a program of which so many chunks add just such a part."""
    head = HEAD.softmax(is_stored=True) * HEAD.logits
    more = getattr(HEAD.cost(chunks), measure) - getattr(HEAD.cost(1), measure)
    return more / part - head


@pytest.mark.parametrize(
    ("measure", "part", "words"),
    [("time", 0.02, "take 1.02 times as"), ("moved", 0.05, "move 1.05")],
)
@pytest.mark.parametrize("chunks", [8, 4, 2])
def test_half_as_many_chunks_are_tried_where_more_take_too_much(chunks, measure, part, words):
    """A program in which one so large takes just as much as it may gets no more than it allows."""
    least = _least(chunks, measure, part)
    ample, short = (
        Cost(LARGE, LARGE)._replace(**{measure: least * share}) for share in (1.0001, 0.9999)
    )
    assert chunks_for(HEAD, None, ample) == chunks
    fewer = chunks_for(HEAD, None, short)
    assert fewer == chunks // 2 if chunks > 2 else words in fewer


def test_who_asks_for_memory_waits():
    assert chunks_for(HEAD, "memory", Cost(1, 1)) > chunks_for(HEAD, None, Cost(LARGE, LARGE))


def test_a_matrix_without_a_gradient_is_not_added_to():
    """So more chunks cost less."""
    frozen = HEAD._replace(is_trained=False)
    more, less = (s.cost(8).moved - s.cost(1).moved for s in (HEAD, frozen))
    assert more > 2 * less


def test_words_that_are_padded_cost_more():
    """XLA:GPU copies what its products read where eight do not divide the number of words."""
    even, odd = (Sizes(tokens=8192, width=768, words=words) for words in (30520, 30522))
    assert even.cost(1).moved == pytest.approx(odd.cost(1).moved, rel=1e-3)
    assert even.cost(2).moved < odd.cost(2).moved
