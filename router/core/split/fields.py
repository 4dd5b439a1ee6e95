"""The split table: what happens to each field on the prefill leg, on the decode leg and in the reply.

`legs.py` carries it out. Three tables have all fields of the engines' own request models (a test on the installed
engine fails, naming the field, where one has no row): completions and chat, generate, and the `sampling_params` inside
generate. What decides the rows:
- **Both legs see the same prompt.** What shapes it passes on both, and with it tools, tool_choice and response_format:
  some chat templates show them to the model.
- **The prefill leg ends after one token, by length.** A leg that ends otherwise may come back without a handoff.
- **Its token is thrown away**, so nothing is scored, constrained or searched for in it. Plain sampling fields stay:
  they cost nothing, and a value that no engine takes is refused before the prompt is computed.
- **The prompt's scores come from where the prompt ran**; asked of the decode engine they can kill it.
"""

from __future__ import annotations

from collections.abc import Mapping

from connectors.handoff import PARAMS_FIELD, REMOTE_DECODE
from router.core.split import conditions
from router.core.split.rules import DROP, PASS, SAMPLED_ON_DECODE, FieldRule, Route, put, replace

_HANDOFF = FieldRule(prefill=put(REMOTE_DECODE), decode=DROP, refusal=conditions.own_handoff, refused_everywhere=True)
"""The decode leg's value is the handoff, put in by `decode_body`."""

_ROUTERS = FieldRule(prefill=DROP, decode=DROP)
"""The router's own, see `body.py`."""

_MODEL_AND_ORDER = {
    "model": PASS,
    "priority": PASS,
    "user": PASS,
    # Replaced on both legs by the router's salt.
    "cache_salt": PASS,
    "request_id": _ROUTERS,
    # Passes where the settings do not name it as a session field, which are the router's own.
    "session_id": PASS,
    PARAMS_FIELD: _HANDOFF,
    # Where the encoder's output is: the prefill leg reads it, a decode leg without a handoff would too.
    "ec_transfer_params": PASS,
    # What the generate route calls extra_args.
    "vllm_xargs": FieldRule(refusal=conditions.own_handoff_inside("vllm_xargs"), refused_everywhere=True),
}

_PROMPT = {
    "add_special_tokens": PASS,
    "truncate_prompt_tokens": FieldRule(refusal=conditions.truncation_to_the_limit),
    "truncation_side": PASS,
    # Only the render routes read these.
    "mm_payload": PASS,
    "return_mm_kwargs": PASS,
    "return_token_offsets": PASS,
}

_SAMPLING = {
    "temperature": PASS,
    "top_p": PASS,
    "top_k": PASS,
    "min_p": PASS,
    "presence_penalty": PASS,
    "frequency_penalty": PASS,
    "repetition_penalty": PASS,
    "seed": PASS,
    "logit_bias": PASS,
    # May leave only a stop token to choose: ignore_eos and the dropped stops make it end by length all the same.
    "allowed_token_ids": PASS,
    "bad_words": PASS,
    "watermarking": PASS,
    # How text is made of tokens.
    "skip_special_tokens": PASS,
    "spaces_between_special_tokens": PASS,
    "include_stop_str_in_output": PASS,
    # One token, whichever cap the client chose: an engine that misses one generates the whole answer twice.
    "max_tokens": FieldRule(prefill=put(b"1")),
    # More than max_tokens would be refused by the engine.
    "min_tokens": SAMPLED_ON_DECODE,
    "stop": SAMPLED_ON_DECODE,
    "stop_token_ids": SAMPLED_ON_DECODE,
    "ignore_eos": FieldRule(prefill=put(b"true")),
    "repetition_detection": SAMPLED_ON_DECODE,
    "thinking_token_budget": SAMPLED_ON_DECODE,
    # A grammar is compiled before the first token: once, where the output is.
    "structured_outputs": SAMPLED_ON_DECODE,
    "n": FieldRule(prefill=put(b"1"), refusal=conditions.several_samples),
    # Scores of output. On completions the engine wants logprobs wherever logprob_token_ids is: both go.
    "logprobs": SAMPLED_ON_DECODE,
    "logprob_token_ids": SAMPLED_ON_DECODE,
    "stream_interval": SAMPLED_ON_DECODE,
    "prompt_logprobs": FieldRule(decode=DROP, refusal=conditions.prompt_scores_streamed, merged="prompt_logprobs"),
    # How many of the prompt's rows to leave out. The prefill engine has the rows up to the prompt's end, the decode
    # engine those of its own tokens; its rows before that are of a prompt that it never ran.
    "routed_experts_prompt_start": FieldRule(merged="routed_experts"),
}

_BEAMS = {
    "use_beam_search": FieldRule(refusal=conditions.beam_search),
    "length_penalty": PASS,
    # Not in 0.32; engines that know them multiply by the one.
    "best_of": FieldRule(prefill=DROP, refusal=conditions.best_of_several),
    "early_stopping": PASS,
}

_STREAM = {
    "stream": FieldRule(prefill=put(b"false")),
    # Refused by the engine without stream.
    "stream_options": SAMPLED_ON_DECODE,
}

_REPLY = {
    # The ids are equal: both legs render the same body. The prefill engine's are those that the KV is of.
    "return_token_ids": FieldRule(merged="prompt_token_ids"),
    "return_tokens_as_token_ids": PASS,
}

_BOTH_OPENAI_ROUTES = {
    **_MODEL_AND_ORDER,
    **_PROMPT,
    **_SAMPLING,
    **_BEAMS,
    **_STREAM,
    **_REPLY,
    # Chat's newer name of the cap; where only this one is sent, max_tokens alone would not hold.
    "max_completion_tokens": FieldRule(prefill=replace(b"1")),
}

_COMPLETIONS = {
    **_BOTH_OPENAI_ROUTES,
    "prompt": FieldRule(refusal=conditions.several_prompts),
    "prompt_embeds": FieldRule(refusal=conditions.several_embeds),
    # Shapes the prompt of models that fill in the middle.
    "suffix": PASS,
    # The decode engine has the prompt's text and ids without running it.
    "echo": FieldRule(prefill=DROP, refusal=conditions.echo_with_scores),
    # No template sees it on this route: only a grammar, like structured_outputs.
    "response_format": SAMPLED_ON_DECODE,
}

_CHAT = {
    **_BOTH_OPENAI_ROUTES,
    "messages": PASS,
    "documents": PASS,
    "chat_template": PASS,
    "chat_template_kwargs": PASS,
    "add_generation_prompt": PASS,
    "continue_final_message": PASS,
    "reasoning_effort": PASS,
    "media_io_kwargs": PASS,
    "mm_processor_kwargs": PASS,
    # In the prompt of some models. The grammar that comes with them can't end the leg early: it ends by length.
    "tools": PASS,
    "tool_choice": PASS,
    "response_format": PASS,
    "parallel_tool_calls": PASS,
    "include_reasoning": PASS,
    "top_logprobs": SAMPLED_ON_DECODE,
    "echo": FieldRule(prefill=DROP, refusal=conditions.echo_in_chat),
    # The decode engine renders the prompt itself.
    "return_prompt_text": SAMPLED_ON_DECODE,
}

_GENERATE = {
    **_STREAM,
    "model": PASS,
    "priority": PASS,
    "cache_salt": PASS,
    "request_id": _ROUTERS,
    PARAMS_FIELD: _HANDOFF,
    "ec_transfer_params": PASS,
    "token_ids": PASS,
    "token_offsets": PASS,
    "features": PASS,
    "content_parts": PASS,
    # By the table below.
    "sampling_params": PASS,
    "reasoning_ended": PASS,
    "reasoning_parser_kwargs": PASS,
    "output_mode": PASS,
    "return_token_ids": FieldRule(merged="prompt_token_ids"),
}

FIELDS: Mapping[Route, Mapping[str, FieldRule]] = {"completions": _COMPLETIONS, "chat": _CHAT, "generate": _GENERATE}

SAMPLING_FIELDS: Mapping[str, FieldRule] = {
    **_SAMPLING,
    # More scores of the prompt: of chosen ids, from a chosen row on.
    "prompt_logprob_token_ids": FieldRule(
        decode=DROP, refusal=conditions.prompt_scores_streamed, merged="prompt_token_id_logprobs"
    ),
    "prompt_logprob_start": FieldRule(decode=DROP),
    "flat_logprobs": SAMPLED_ON_DECODE,
    # The output that the engine has to give, in place of sampling.
    "trace_decode_token_ids": SAMPLED_ON_DECODE,
    # It would skip the handoff too: the decode engine would run the prompt, and the handoff stay held until its lease
    # is over. What the client wants not read is read on the prefill engine alone.
    "skip_reading_prefix_cache": FieldRule(decode=DROP),
    "extra_args": FieldRule(refusal=conditions.own_handoff_inside("extra_args"), refused_everywhere=True),
    # A stop text needs it, and so does output_mode "text".
    "detokenize": PASS,
    # The engine sets these itself, whatever was sent.
    "output_kind": PASS,
    "output_text_buffer_length": PASS,
    "skip_clone": PASS,
}
