"""Conditions of the split table's refusals: when a field can't be served, mostly on one handoff, and what the client
can do.

`fields.py` names them in its rows, `legs.py` asks them before a request's first leg. Without them the reply
would be wrong and say 200.
"""

from __future__ import annotations

from connectors.handoff import PARAMS_FIELD
from router.core.split.client_body import ClientBody
from router.core.split.rules import Refusal
from router.core.split.values import count_prompts, is_null, read, read_flag, read_number


def several_samples(body: ClientBody) -> str | None:
    """n: the decode engine's samples would all use one handoff, and get wrong tokens."""
    count = read_number((body.sampling or {}).get("n"))
    return "n must be 1 on one handoff: send one request per sample" if count is not None and count > 1 else None


def best_of_several(body: ClientBody) -> str | None:
    count = read_number(body.fields.get("best_of"))
    return "best_of must be 1 on one handoff" if count is not None and count > 1 else None


def several_prompts(body: ClientBody) -> str | None:
    if count_prompts(body.fields.get("prompt")) > 1:
        return "prompt must be one prompt on one handoff: send one request per prompt"
    return None


def several_embeds(body: ClientBody) -> str | None:
    if count_prompts(body.fields.get("prompt_embeds")) + count_prompts(body.fields.get("prompt")) > 1:
        return "prompt_embeds must be one prompt, without a prompt beside it: send one request per prompt"
    return None


def beam_search(body: ClientBody) -> str | None:
    if read_flag(body.fields.get("use_beam_search")):
        return "beam search is not possible on a handoff from a prefill engine: use n or an engine that does both"
    return None


def prompt_scores_streamed(body: ClientBody) -> str | None:
    """Streams have no place for them."""
    return "scores of the prompt are not available when streaming: leave out stream" if body.is_streaming else None


def echo_with_scores(body: ClientBody) -> str | None:
    """Completions: the prompt's log-probabilities would be asked of the engine that never ran the prompt."""
    if read_flag(body.fields.get("echo")) and not is_null(body.fields.get("logprobs")):
        return "echo with logprobs needs an engine that runs the prompt itself: ask for prompt_logprobs instead"
    return None


def echo_in_chat(body: ClientBody) -> str | None:
    """Chat: the engine takes echo for a request for the prompt's log-probabilities, always."""
    if read_flag(body.fields.get("echo")):
        return "echo needs an engine that runs the prompt itself: leave it out"
    return None


def truncation_to_the_limit(body: ClientBody) -> str | None:
    """-1 is "as long as the model allows", which can depend on the cap: it differs between the legs, so would the
    prompt."""
    limit = read_number(body.fields.get("truncate_prompt_tokens"))
    return "truncate_prompt_tokens must be a number of tokens here" if limit is not None and limit < 0 else None


def own_handoff(_body: ClientBody) -> str:
    return f"{PARAMS_FIELD} is set by the router: leave it out"


def own_handoff_inside(name: str) -> Refusal:
    """The refusal of a field in which engines look for a handoff when none stands at the top."""

    def refusal(body: ClientBody) -> str | None:
        extra = read((body.sampling or {}).get(name))
        if isinstance(extra, dict) and PARAMS_FIELD in extra:
            return f"{PARAMS_FIELD} in {name} is set by the router: leave it out"
        return None

    return refusal
