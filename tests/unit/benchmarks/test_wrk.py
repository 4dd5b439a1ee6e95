"""Reading what wrk prints."""

from __future__ import annotations

from tests.benchmarks.wrk import WrkResult, parse_result

OUTPUT = """Running 5s test @ http://127.0.0.1:20000/v1/completions
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    33.71ms   12.02ms 103.11ms   78.55%
    Req/Sec     1.91k   201.77     2.27k    72.00%
  9512 requests in 5.01s, 5.10MB read
Requests/sec:   1898.60
Transfer/sec:      1.02MB
{"requests": 9512, "duration_us": 5010000, "failed": 3, "p50_us": 31020, "p99_us": 84110}
"""


def test_the_last_line_counts() -> None:
    assert parse_result(OUTPUT) == WrkResult(requests=9512, duration_s=5.01, failed=3, p50_ms=31.02, p99_ms=84.11)
