"""Turn grammar: a table of cases, properties, and linear time on adversarial text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastir.tir.grammar import ParsedTurn, is_void_turn, parse_turn

CODE_CASES = {
    "plain": ("Let me see.\n```python\nprint(1)\n```", "print(1)"),
    "text_after": ("```python\nprint(1)\n```\nso it is one", "print(1)"),
    "py_tag": ("```py\nx = 1\n```\n", "x = 1"),
    "upper_case_tag": ("```PyThOn\nx = 1\n```", "x = 1"),
    "trailing_blanks": ("```python \t\nx = 1\n``` \t\n", "x = 1"),
    "crlf": ("a\r\n```python\r\nx = 1\r\n```\r\n", "x = 1\r"),
    "several_lines": ("```python\na = 1\n\nprint(a)\n\n```", "a = 1\n\nprint(a)\n"),
    "empty_block": ("```python\n```", ""),
    "first_of_two": ("```python\n1\n```\n```python\n2\n```", "1"),
    "after_other_language": ("```text\nx\n```\n```python\n1\n```", "1"),
    "closing_needs_its_own_line": ("```python\nprint(1)```\nprint(2)\n```", "print(1)```\nprint(2)"),
    "indented_fence_does_not_close": ('```python\ns = """\n    ```\n"""\n```', 's = """\n    ```\n"""'),
    "tagged_fence_does_not_close": ("```python\n1\n```python\n2\n```", "1\n```python\n2"),
    "unclosed": ("```python\nprint(1)\n", None),
    "closed_on_the_code_line": ("```python\nprint(1)```", None),
    "no_tag": ("```\nprint(1)\n```", None),
    "other_tag": ("```python3\nprint(1)\n```", None),
    "javascript": ("```javascript\nprint(1)\n```", None),
    "tag_then_text": ("```python print(1)\n```", None),
    "not_at_line_start": ("see ```python\nprint(1)\n```", None),
    "indented_opening": ("  ```python\nprint(1)\n```", None),
    "four_backticks": ("````python\nprint(1)\n```", None),
    "unicode_line_separator_is_no_newline": ("x\u2028```python\nprint(1)\n```", None),
}

ANSWER_CASES = {
    "boxed": (r"so \boxed{18}.", "18"),
    "boxed_nested": (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    "boxed_escaped_braces": (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    "boxed_one_escaped_brace": (r"\boxed{\left\{x : x > 0\right.} or", r"\left\{x : x > 0\right."),
    "boxed_blank_before_brace": (r"\boxed {3}", "3"),
    "boxed_spaces_stripped": (r"\boxed{ 3 }", "3"),
    "boxed_over_lines": ("\\boxed{\n3\n}", "3"),
    "boxed_empty": (r"\boxed{}", ""),
    "boxed_doubled_backslash": (r"\\boxed{3}", "3"),
    "boxed_after_line_break": (r"x\\\boxed{3}", "3"),
    "boxed_last_counts": (r"\boxed{1} no, \boxed{2}", "2"),
    "boxed_outer_counts": (r"\boxed{\boxed{1}+1}", r"\boxed{1}+1"),
    "boxed_unbalanced": (r"\boxed{3", None),
    "boxed_unbalanced_then_complete": (r"\boxed{3 and then \boxed{4}", "4"),
    "boxed_complete_then_unbalanced": (r"\boxed{4} and then \boxed{3", "4"),
    "boxed_closed_by_escape_only": (r"\boxed{3\}", None),
    "boxed_without_braces": (r"\boxed 3", None),
    "boxed_stray_closer_before": (r"} \boxed{3}", "3"),
    "call": ("final_answer(18)", "18"),
    "call_in_sentence": ("I say final_answer(18).", "18"),
    "call_nested_parens": ("final_answer((1 + 2) * (3))", "(1 + 2) * (3)"),
    "call_string": ('final_answer("18")', "18"),
    "call_single_quotes": ("final_answer('18')", "18"),
    "call_triple_quotes": ('final_answer("""a "b" c""")', 'a "b" c'),
    "call_string_with_paren": ('final_answer("f(x) = :)")', "f(x) = :)"),
    "call_string_with_closers": ('final_answer("a}b)c")', "a}b)c"),
    "call_string_with_escaped_quote": (r'final_answer("say \")\" now")', 'say ")" now'),
    "call_string_with_latex": (r'final_answer("\frac{1}{2}")', r"\frac{1}{2}"),
    "call_string_with_doubled_backslash": (r'final_answer("\\frac{1}{2}")', r"\frac{1}{2}"),
    "call_raw_string": (r'final_answer(r"\\frac12")', r"\\frac12"),
    "call_spaces": ('final_answer( "18" )', "18"),
    "call_two_arguments": ('final_answer("a)", 2)', '"a)", 2'),
    "call_two_strings": ("""final_answer("a" "b")""", '"a" "b"'),
    "call_keyword": ("final_answer(x, note='a)b')", "x, note='a)b'"),
    "call_prefixed_string_is_source": ("final_answer(f'{x})')", "f'{x})'"),
    "call_list": ("final_answer([1, (2, 3)])", "[1, (2, 3)]"),
    "call_half_open_interval": ("final_answer([0, 1))", "[0, 1)"),
    "call_half_open_interval_left": ("final_answer((0, 1])", "(0, 1]"),
    "call_apostrophe": ("final_answer(it's 5)", "it's 5"),
    "call_apostrophe_pair": ("final_answer(it's 5) and that's all)", "it's 5"),
    "call_prime": ("final_answer(y' = 5)", "y' = 5"),
    "call_prime_pair": ("final_answer(f(x)' + g(x)')", "f(x)' + g(x)'"),
    "call_over_lines": ("final_answer(\n  18,\n)", "18,"),
    "call_empty": ("final_answer()", ""),
    "call_unclosed": ("final_answer(18", None),
    "call_unclosed_string": ('final_answer("18)', '"18'),
    "call_bracket_does_not_close": ("final_answer(18]", None),
    "call_unclosed_then_closed": ("final_answer(1 then final_answer(2)", "2"),
    "call_other_name": ("my_final_answer(18)", None),
    "call_without_parens": ("the final_answer is 18", None),
    "last_of_both_box": (r"final_answer(1) \boxed{2}", "2"),
    "last_of_both_call": (r"\boxed{2} final_answer(1)", "1"),
    "box_inside_call": (r"final_answer(\boxed{2})", r"\boxed{2}"),
    "box_in_other_fence": ("```text\n\\boxed{2}\n```", "2"),
    "box_in_code": ("```python\nprint('\\boxed{1}')\n```", None),
    "call_in_code": ("```python\nfinal_answer(1)\n```", None),
    "call_in_second_block": ("```python\n1\n```\n```python\nfinal_answer(2)\n```", None),
    "box_before_code": ("\\boxed{1}\n```python\n2\n```", "1"),
    "box_after_code": ("```python\n2\n```\n\\boxed{1}", "1"),
    "box_cut_by_code": ("\\boxed{1\n```python\n2\n```\n}", None),
    "box_in_unclosed_fence": ("```python\n\\boxed{1}", "1"),
    "none": ("I do not know.", None),
    "empty_text": ("", None),
}


@pytest.mark.parametrize(("text", "code"), CODE_CASES.values(), ids=CODE_CASES)
def test_code(text: str, code: str | None) -> None:
    assert parse_turn(text).code == code


@pytest.mark.parametrize(("text", "answer"), ANSWER_CASES.values(), ids=ANSWER_CASES)
def test_answer(text: str, answer: str | None) -> None:
    assert parse_turn(text).answer == answer


def test_void_is_neither_code_nor_answer() -> None:
    assert is_void_turn("hm")
    assert is_void_turn("```python\nprint(1)")
    assert not is_void_turn("```python\n```")
    assert not is_void_turn(r"\boxed{}")
    assert parse_turn("```py\n1\n```\nfinal_answer(1)") == ParsedTurn(code="1", answer="1")


# Fragments that hold every character the grammar looks at, so that random joins hit its corners.
FRAGMENTS = st.sampled_from(
    ["```", "```python", "```py ", "\n", "\\boxed{", "\\boxed", "{", "}", "\\", "final_answer(", "(", ")", "[", "]",
     '"', "'", '"""', "'''", "r", "x", " ", "é", "😀", "\r"]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=40).map("".join)
INNER = st.recursive(
    st.text("ab1 \\,+", max_size=4).map(lambda s: s.replace("\\", "\\{")),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
)


@given(TEXTS)
def test_any_text_parses_and_void_agrees(text: str) -> None:
    parsed = parse_turn(text)
    assert is_void_turn(text) == (parsed.code is None and parsed.answer is None)
    if parsed.code is not None:
        assert parsed.code in text


@given(TEXTS, INNER)
def test_a_balanced_box_at_the_end_is_the_answer(before: str, inner: str) -> None:
    # A newline, a closing fence and a newline end any block or unclosed fence that `before` may have left open.
    text = f"{before}\n```\n\\boxed{{{inner}}}"
    assert parse_turn(text).answer == inner.strip()


@given(st.text(max_size=30))
def test_a_python_string_literal_is_unquoted(value: str) -> None:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    assert parse_turn(f'so final_answer("{escaped}") it is').answer == value.replace("\n", " ").strip()


@given(st.text(max_size=60), st.text(max_size=20))
def test_a_block_round_trips_and_hides_its_content(code: str, before: str) -> None:
    if any(line.rstrip(" \t\r") == "```" for line in code.split("\n")) or "```" in before:
        return
    parsed = parse_turn(f"{before}\n```python\n{code}\n\\boxed{{1}} final_answer(2)\n```\n")
    assert parsed.code == f"{code}\n\\boxed{{1}} final_answer(2)"
    assert parsed.answer == parse_turn(before).answer


MEGABYTE = 1_000_000
ADVERSARIAL = [
    "\\boxed{", "}", "\\", "\\boxed ", "final_answer(", "final_answer('", 'final_answer("""', "```python\n", "```\n",
    "```python", '"', "'\\'", "\\'\\\n", '\\"""', "(", "final_answer('\\", "''''", "x\n", "\\boxed{final_answer(",
]  # fmt: skip


@pytest.mark.parametrize("unit", ADVERSARIAL)
@pytest.mark.parametrize("prefix", ["", "final_answer('"])
def test_linear_time_on_a_megabyte(prefix: str, unit: str) -> None:
    text = prefix + unit * (MEGABYTE // len(unit))
    started = time.process_time()
    parse_turn(text)
    # Under a second here; quadratic work would take hours.
    assert time.process_time() - started < 10


@pytest.mark.parametrize(("opening", "closing"), [("\\boxed{", "}"), ("final_answer(", ")")])
def test_deep_nesting_is_linear_and_gives_the_outermost(opening: str, closing: str) -> None:
    depth = 70_000
    started = time.process_time()
    answer = parse_turn(opening * depth + "1" + closing * depth).answer
    assert answer == opening * (depth - 1) + "1" + closing * (depth - 1)
    assert time.process_time() - started < 10
