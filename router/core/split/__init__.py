"""What happens to a request's fields on the prefill leg, on the decode leg and in the reply.

    fields.py      the table: one row per field and route
    rules.py       what a row can say
    conditions.py  when a field can't be served
    body.py        the client's body (client_body.py)
    legs.py        the bodies of the legs, by the table
    reply.py       the prefill leg's reply (reply_parts.py), and what of it belongs in the client's
    experts.py     the two halves of a request's expert routing
    values.py      values as the engines read them
    numbers.py     long lists of numbers, carried past the JSON decoder

`flow.py` calls it with the client's body; `connectors/handoff.py` knows how engines spell a handoff; `stream.py` does
for streamed replies what `merge_reply` does for whole ones. A field without a row passes on both legs untouched, and
only the values that change are ever decoded: a long prompt stays the bytes that the client sent.
"""

from router.core.split.body import parse_body, read_object
from router.core.split.client_body import ClientBody
from router.core.split.fields import FIELDS, SAMPLING_FIELDS
from router.core.split.legs import check_single, check_split, decode_body, prefill_body, single_body
from router.core.split.reply import merge_reply, read_prefill_reply, reply_failed
from router.core.split.reply_parts import PrefillResult
from router.core.split.rules import ROUTE_OF_PATH, FieldRule, Route, Treatment

__all__ = [
    "FIELDS",
    "ROUTE_OF_PATH",
    "SAMPLING_FIELDS",
    "ClientBody",
    "FieldRule",
    "PrefillResult",
    "Route",
    "Treatment",
    "check_single",
    "check_split",
    "decode_body",
    "merge_reply",
    "parse_body",
    "prefill_body",
    "read_object",
    "read_prefill_reply",
    "reply_failed",
    "single_body",
]
