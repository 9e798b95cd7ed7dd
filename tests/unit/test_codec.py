"""JSON is read strictly, or refused."""

from __future__ import annotations

import pytest

from replicast.codec import (
    MAX_DEPTH,
    MAX_INTEGER,
    json_bytes,
    parse_integer,
    parse_json,
    parse_object,
    sealed,
    unsealed,
)

BODY = json_bytes({"step": 1200, "note": "fix é\udc80", "sizes": [1, -2.5, None], "on": True}).rstrip()


def test_what_is_sealed_is_read_back() -> None:
    line, seal = sealed(BODY)
    assert unsealed(line) == (BODY, seal)
    assert parse_object(line)["seal"] == seal


def test_every_flipped_bit_and_every_other_end_breaks_the_seal() -> None:
    line, _ = sealed(BODY)
    for bit in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="checksum"):
            unsealed(bytes(flipped))
    for content in (BODY, line[:-1], line * 2, b""):
        with pytest.raises(ValueError, match="checksum"):
            unsealed(content)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1e400}',
        '{"a": -1e400}',
        f'{{"a": {10**400}}}',
        '{"a": 1' + "0" * 10_000 + "}",
        '{"a": 36893488147419103232}',
        '{"a": 1, "a": 2}',
        '{"b": {"a": 1, "a": 1}}',
        "[" * 100_000,
        '{"a":' * 500 + "1" + "}" * 500,
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "",
        "{",
    ],
)
def test_what_no_file_of_ours_holds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_what_our_files_hold_is_read() -> None:
    nested = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    for text in ("1", "-0.0", "18446744073709551615", '{"a": [1, {"b": null}]}', nested):
        parse_json(text)
    with pytest.raises(ValueError, match="Received: list"):
        parse_object("[]")


def test_an_integer_is_decimal_and_of_bounded_size_or_refused() -> None:
    for text in ("0", "7", "-7", "007", str(MAX_INTEGER), str(-MAX_INTEGER)):
        assert parse_integer(text) == int(text)
    for text in (
        "",
        "-",
        "+1",
        "--1",
        " 1",
        "1_0",
        "1.0",
        "²",
        "٣",
        str(MAX_INTEGER + 1),
        "9" * 4300,
        "9" * 9999,
    ):
        with pytest.raises(ValueError, match=r"is not an integer|is too large"):
            parse_integer(text)
