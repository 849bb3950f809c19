"""What one turn of the policy says: the code it asks to run, the answer it gives, or neither (a void turn).

The rules, and what they mean in the corners:

- A **code block** opens with a line that is exactly ```` ```python ```` or ```` ```py ```` (tag in any case, trailing
  blanks allowed, no indentation) and closes with the next line that is exactly ```` ``` ```` (trailing blanks allowed;
  the text may end right after it). The first complete block is the turn's code. Later complete blocks do not run but
  are still code, so nothing in them is an answer. An empty block is a block (``code == ""``).
- An **unclosed fence is not a block**: it is ordinary text, and so is what follows it, answers included. Fences of
  any other language are ordinary text too: only python fences make code.
- An **answer** is ``\\boxed{...}`` or ``final_answer(...)`` in the text outside code blocks. The one that ends last
  counts, so an outer answer wins over one nested in it. None reaches across a code block. An unbalanced one is no
  answer, and does not hide complete ones inside or after it.
- ``\\boxed{...}``: braces balance; a backslash escapes the character after it. Blanks before ``{`` are allowed.
- ``final_answer(...)``: brackets of all three kinds nest by depth alone, so half-open intervals parse; only ``)``
  closes the call. String literals hide the brackets in them. A quote opens a string where Python could start one, if
  it is closed on the same line (a triple quote: anywhere later); the apostrophe of ``it's`` is a character. A single
  string literal stands for its value, in which an escaped quote or backslash is unescaped and every other backslash is
  kept, because answers are LaTeX (``"\\frac12"`` holds no form feed). Anything else, several arguments included,
  stands for its source text.
- Answers are stripped of surrounding whitespace. An empty answer is an answer (``""``, never correct), not a void turn.

Every pass is linear in the length of the text, whatever the model wrote.
"""

import re
from dataclasses import dataclass

_OPEN_FENCE = re.compile(r"```(?:python|py)[ \t\r]*\Z", re.IGNORECASE)
_CLOSE_FENCE = re.compile(r"```[ \t\r]*\Z")
# A backslash escapes the next character, but never hides a box: models double backslashes freely.
_BOX_TOKEN = re.compile(r"(?P<box>\\boxed[ \t]*\{)|\\(?!\\boxed[ \t]*\{)[\s\S]|[{}]")
_CALL = re.compile(r"(?<!\w)final_answer\(")
_CALL_TOKEN = re.compile(r"(?P<call>(?<!\w)final_answer\()|(?P<quote>\"\"\"|'''|[\"'])|[()\[\]{}]")
_NO_STRING_AFTER = re.compile(r"(?<=[)\]}])|(?<=\w)(?<!\b[rubf])(?<!\b[bf]r)(?<!\br[bf])", re.IGNORECASE)
_LITERAL = re.compile(r"(?:(?P<raw>[rR])|[uU])?(?P<quote>\"\"\"|'''|[\"'])")
_STRING_END = {
    '"': re.compile(r'(?:[^"\\\n]|\\.)*+"'),
    "'": re.compile(r"(?:[^'\\\n]|\\.)*+'"),
    '"""': re.compile(r'(?:[^"\\]|\\[\s\S]|"(?!""))*+"""'),
    "'''": re.compile(r"(?:[^'\\]|\\[\s\S]|'(?!''))*+'''"),
}
_ESCAPED = re.compile(r"\\([\"'\\])")


@dataclass(frozen=True)
class ParsedTurn:
    """One turn's text, parsed.

    Attributes:
        code: the source of the first complete code block without its fences and last newline; None when there is none.
        answer: the last answer given in text outside code blocks; None when there is none.
    """

    code: str | None
    answer: str | None

    @property
    def is_void(self) -> bool:
        """True when the turn holds neither a complete code block nor an answer."""
        return self.code is None and self.answer is None


def parse_turn(text: str) -> ParsedTurn:
    """Parse the text of one policy turn (feedback and prompt excluded by the caller). Never raises; linear time."""
    blocks, prose = _split_blocks(text)
    answer: str | None = None
    for segment in prose:
        candidates = [span for span in (_last_box(segment), _last_call(segment)) if span is not None]
        if candidates:
            answer = max(candidates)[1]
    return ParsedTurn(code=blocks[0] if blocks else None, answer=answer)


def is_void_turn(text: str) -> bool:
    """True when ``text`` holds neither a complete code block nor an answer."""
    return parse_turn(text).is_void


def _split_blocks(text: str) -> tuple[list[str], list[str]]:
    """The sources of the complete code blocks, and the stretches of text around them, both in order."""
    blocks: list[str] = []
    prose: list[str] = []
    lines = text.split("\n")
    prose_from, open_at = 0, -1
    for i, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if open_at < 0:
            if _OPEN_FENCE.match(line):
                open_at = i
        elif _CLOSE_FENCE.match(line):
            prose.append("\n".join(lines[prose_from:open_at]))
            blocks.append("\n".join(lines[open_at + 1 : i]))
            prose_from, open_at = i + 1, -1
    prose.append("\n".join(lines[prose_from:]))
    return blocks, prose


def _last_box(text: str) -> tuple[int, str] | None:
    """(end, content) of the balanced ``\\boxed{...}`` that ends last, by one pass with a stack of open braces."""
    stack: list[int] = []  # where the content starts for a box, -1 for any other brace
    span: tuple[int, int, int] | None = None  # content start, content end, end
    for token in _BOX_TOKEN.finditer(text):
        if token["box"]:
            stack.append(token.end())
        elif token[0] == "{":
            stack.append(-1)
        elif token[0] == "}" and stack:
            start = stack.pop()
            if start >= 0:
                span = (start, token.start(), token.end())
    return span and (span[2], text[span[0] : span[1]].strip())


def _last_call(text: str) -> tuple[int, str] | None:
    """(end, value) of the closed ``final_answer(...)`` that ends last. Only the inside of a call is tokenised."""
    stack: list[int] = []  # where the arguments start for a call, -1 for any other bracket
    span: tuple[int, int] | None = None  # arguments' start and end
    unclosed: dict[str, int] = {}  # quote -> no string with this quote closes before this position
    position = 0
    while token := (_CALL_TOKEN if stack else _CALL).search(text, position):
        mark, position = token[0], token.end()
        if mark.startswith("final_answer"):
            stack.append(position)
        elif mark[0] in "\"'":
            position = _after_string(text, token.start(), mark, unclosed)
        elif mark in "([{":
            stack.append(-1)
        elif stack[-1] < 0:
            stack.pop()
        elif mark == ")":
            span = (stack.pop(), token.start())
    return span and (span[1] + 1, _argument_value(text[span[0] : span[1]].strip()))


def _after_string(text: str, start: int, quote: str, unclosed: dict[str, int]) -> int:
    """Where to go on after the quote at ``start``: past its string literal, or past one character if it opens none."""
    if start < unclosed.get(quote, 0) or _NO_STRING_AFTER.match(text, start):
        return start + 1
    closed = _STRING_END[quote].match(text, start + len(quote))
    if closed:
        return closed.end()
    line_end = text.find("\n", start)
    unclosed[quote] = len(text) if len(quote) == 3 or line_end < 0 else line_end
    return start + 1


def _argument_value(source: str) -> str:
    """The value of one string literal; any other source as it stands."""
    opened = _LITERAL.match(source)
    if not opened or not (closed := _STRING_END[opened["quote"]].fullmatch(source, opened.end())):
        return source
    value = source[opened.end() : closed.end() - len(opened["quote"])]
    return (value if opened["raw"] else _ESCAPED.sub(r"\1", value)).strip()
