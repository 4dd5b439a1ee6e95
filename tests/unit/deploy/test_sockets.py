from __future__ import annotations

from deploy.local.sockets import SocketEntry, parse_tcp_table

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 12345 1 0000 100 0 0 10 0
   1: 0100007F:ADF2 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 22111 1 0000 20 4 30 10 -1
   2: 0100007F:1F91 0100007F:C350 06 00000000:00000000 03:00000E6A 00000000     0        0 0 3 0000
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 \
00000000     0        0 8807 1 0000000000000000 100 0 0 10 0
"""


def test_tcp_table():
    assert parse_tcp_table(TCP) == (
        SocketEntry(port=8080, state="0A", uid=1000, inode=12345),
        SocketEntry(port=44530, state="01", uid=0, inode=22111),
        SocketEntry(port=8081, state="06", uid=0, inode=0),
    )


def test_tcp6_table():
    assert parse_tcp_table(TCP6) == (SocketEntry(port=22, state="0A", uid=0, inode=8807),)


def test_a_line_cut_short_is_passed_over():
    assert parse_tcp_table(TCP + "   3: 0100007F:1F92 0100") == parse_tcp_table(TCP)
    assert parse_tcp_table("") == ()
