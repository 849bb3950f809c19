"""As much of HTTP/1.1 as ``POST /run_code`` needs, on asyncio streams: messages with a body, kept-alive connections."""

from __future__ import annotations

import asyncio

MAX_HEADER_BYTES = 65536
MAX_BODY_BYTES = 64 << 20


class HttpError(ValueError):
    """What arrived is not HTTP, or is too large."""


async def read_message(reader: asyncio.StreamReader) -> tuple[list[str], dict[str, str], bytes]:
    """The next request or response: the words of its first line (at most three), its headers by lower-case name, and
    its body.

    Raises:
        EOFError: the connection ended before or within the message (``asyncio.IncompleteReadError``).
        HttpError: malformed, or beyond the size limits.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise HttpError(f"more than {MAX_HEADER_BYTES} bytes of headers") from None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    words = first.split(" ", 2)
    if len(words) < 2:
        raise HttpError(f"not an HTTP message: {first[:80]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise HttpError(f"not an HTTP header: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "identity").lower() == "chunked":
        return words, headers, await _read_chunks(reader)
    if "content-length" in headers:
        return words, headers, await reader.readexactly(_size(headers["content-length"], 10))
    if words[0].startswith("HTTP/"):  # a response without a length ends with its connection
        body = b""
        while piece := await reader.read(1 << 16):
            body += piece
            _size(str(len(body)), 10)
        return words, {**headers, "connection": "close"}, body
    return words, headers, b""


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = await reader.readline()
        if not line:
            raise asyncio.IncompleteReadError(body, None)
        size = _size(line.partition(b";")[0].decode("latin-1").strip(), 16)
        if size == 0:
            while (await reader.readline()).strip():  # trailers
                continue
            return body
        body += await reader.readexactly(size)
        _size(str(len(body)), 10)
        await reader.readexactly(2)


def _size(text: str, base: int) -> int:
    try:
        size = int(text, base)
    except ValueError:
        raise HttpError(f"not a length: {text[:40]!r}") from None
    if not 0 <= size <= MAX_BODY_BYTES:
        raise HttpError(f"a body of {size} bytes; at most {MAX_BODY_BYTES} are taken")
    return size


def message(first_line: str, body: bytes, *headers: str) -> bytes:
    """A request or response with a JSON body."""
    lines = [first_line, "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
