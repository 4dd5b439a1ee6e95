from __future__ import annotations

from router.core.load import LoadIndex

NONE: frozenset[str] = frozenset()


def make_index(*names: str) -> LoadIndex:
    index = LoadIndex(names)
    for name in names:
        index.set_present(name, True)
    return index


def test_the_order_is_sessions_then_tokens_then_the_least_recent_choice() -> None:
    index = make_index("a", "b", "c")
    assert index.least_loaded(NONE) == "a"
    index.mark_chosen("a")
    assert index.least_loaded(NONE) == "b"
    index.change("b", tokens=1)
    assert index.least_loaded(NONE) == "c"
    index.change("c", sessions=1)
    assert index.least_loaded(NONE) == "a"
    index.change("a", tokens=2)
    assert index.least_loaded(NONE) == "b"
    index.change("c", sessions=-1)
    assert index.least_loaded(NONE) == "c"


def test_what_is_avoided_or_absent_is_not_found_and_not_forgotten() -> None:
    index = make_index("a", "b")
    assert index.least_loaded(frozenset({"a"})) == "b"
    assert index.least_loaded(frozenset({"a", "b"})) is None
    assert index.least_loaded(NONE) == "a"
    index.set_present("a", False)
    index.change("a", legs=1)
    assert (index.least_loaded(NONE), index.present_count) == ("b", 1)
    index.set_present("a", True)
    assert (index.least_loaded(NONE), index["a"].legs) == ("a", 1)


def test_the_index_stays_small_while_its_top_is_still() -> None:
    index = make_index("a", *(f"r{number}" for number in range(9)))
    for _ in range(5000):
        index.change("r3", sessions=1)
        index.change("r3", sessions=-1)
    assert len(index._heap) <= 64 + 4 * 10
    assert index.least_loaded(NONE) == "a"
