"""The router's own HTTP/1.1: `server.py` towards clients, `client.py` towards engines.

Both are callbacks on asyncio protocols: a request costs no task and no coroutine on either side. Bytes are parsed by
httptools (llhttp); these modules add what a parser doesn't know: limits, timeouts, one request at a time, keep-alive,
pooling. `server.py` holds connections, `request_reader.py` reads a request, `responder.py` writes its reply;
`client.py` holds the pool, `engine_connection.py` is one of its connections, `reply_reader.py` reads a reply.
`message.py` has what all of them share.
"""
