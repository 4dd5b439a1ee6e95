"""What `make check-stale` counts as stale, as a hit of another epoch, and as a chance for one."""

from __future__ import annotations

from dataclasses import replace

from tests.fleet.versions import version_name, weights_of
from tests.stale.judge import Reply, crossings, hits_across_epochs, judge
from tests.stale.schedule import BLOCK, Ask

PROMPT = tuple(range(1, 3 * BLOCK + 9))
ASK = Ask(
    talk="talk",
    session="talk",
    salt="",
    new_part=PROMPT,
    completion=3,
    starts_s=0.0,
    stream=False,
    sampling_seed=None,
    leaves_s=None,
)
FIRST = Reply(
    schedule=1,
    ask=ASK,
    prompt=PROMPT,
    token_ids=(7, 8, 9),
    logprobs=(-1.0, -2.0, -3.0),
    outcome="whole",
    detail="",
    epochs=(1,),
    versions=("initial",),
    single_version=True,
    attempts=1,
    may_be_kept=False,
    cached_tokens=0,
    replicas="prefill-0 > decode-0",
    started_s=0.0,
    ended_s=1.0,
)
AGAIN = replace(FIRST, cached_tokens=3 * BLOCK, started_s=2.0, ended_s=3.0)
"""The same prompt in the same epoch, as far as it can be cached."""
NEXT_EPOCH = replace(AGAIN, epochs=(2,), versions=("weights-1-push-1",))
NOTHING = {"token_ids": (), "logprobs": (), "epochs": (), "versions": (), "single_version": False, "attempts": 0}
LEFT = replace(FIRST, outcome="left", **NOTHING)


def across(replies: list[Reply]) -> int:
    return sum(each.tokens for each in hits_across_epochs(replies, replies))


def chances(replies: list[Reply]) -> int:
    return crossings(replies, replies)


def test_a_reply_is_held_against_the_reference_token_by_token() -> None:
    assert judge(FIRST, [[-1.00005, -2.0, -3.0]]) is None
    verdict = judge(FIRST, [[-1.0, -2.5, -3.0]])
    assert verdict is not None
    assert (verdict.at, verdict.off_by) == (1, 0.5)


def test_a_reply_of_two_versions_has_tokens_of_the_first_and_then_of_the_second() -> None:
    assert judge(FIRST, [[-1.0, -2.0, 0.0], [0.0, 0.0, -3.0]]) is None
    verdict = judge(FIRST, [[-1.0, 0.0, -3.0], [0.0, -2.0, 0.0]])
    assert verdict is not None
    assert verdict.at == 2


def test_hits_of_the_same_epoch_are_no_hits_across() -> None:
    assert across([FIRST, AGAIN]) == 0
    longer = replace(AGAIN, prompt=(*PROMPT, *FIRST.token_ids, *range(100, 150)), cached_tokens=3 * BLOCK)
    assert across([FIRST, longer]) == 0


def test_what_only_another_epoch_knew_is_counted() -> None:
    assert across([FIRST, NEXT_EPOCH]) == 3 * BLOCK
    assert across([FIRST, replace(AGAIN, ask=replace(ASK, salt="of-a-client"))]) == 3 * BLOCK


def test_a_request_that_does_not_say_its_epoch_may_have_run_in_any() -> None:
    assert across([LEFT, NEXT_EPOCH]) == 0
    assert across([replace(LEFT, started_s=9.0), NEXT_EPOCH]) == 3 * BLOCK


def test_a_crossing_is_a_prompt_that_another_epoch_knew_and_this_one_did_not() -> None:
    cold = replace(NEXT_EPOCH, cached_tokens=0)
    assert chances([FIRST, AGAIN]) == 0
    assert chances([FIRST, cold]) == 1
    assert chances([cold]) == 0


def test_who_lived_on_through_an_update_is_not_judged() -> None:
    readmitted = replace(FIRST, epochs=(1, 2), versions=("initial", "weights-2-push-1"), single_version=False)
    assert readmitted.judged
    assert not replace(readmitted, may_be_kept=True).judged
    assert not replace(FIRST, single_version=False, may_be_kept=True).judged
    assert not LEFT.judged


def test_a_version_name_says_which_weights_it_stands_for() -> None:
    assert [weights_of(name) for name in ("initial", version_name(4, 17))] == [0, 4]


def test_a_reply_that_was_begun_more_than_once_may_have_left_blocks_in_any_epoch() -> None:
    hit = replace(AGAIN, epochs=(2,), versions=("weights-1-push-1",))
    assert across([FIRST, hit]) == 3 * BLOCK
    assert across([replace(FIRST, attempts=2), hit]) == 0
    assert across([FIRST, replace(hit, attempts=2)]) == 0
