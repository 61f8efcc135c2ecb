"""Triton device code: how the tokens of a batch are cut into pieces, decided from the lengths.

A pair is a request with one row tile of one KV head. The tokens that a pair attends to, its span,
are cut into pieces; a pair of one piece writes its result, the pieces of any other write partial
results into slots, in order, at a fixed distance. Everything is read from device memory, so a
captured launch serves other lengths.

What travels together is a tuple:

- ``table`` (indptr, indices, lengths, table_stride, window_left), with the constants ``TABLE``
  (PAGE_SIZE, DENSE_TABLE, QUERY_LEN, HAS_WINDOW). CSR tables: ``indptr`` counts pages and
  ``lengths`` holds the tokens of each last page; dense tables: ``lengths`` holds the tokens of each
  request and ``table_stride`` is the width of a row.
- ``splits`` (batch, num_splits, split_tokens), ``SPLIT`` (SPLIT_RULE, BLOCK_N, BLOCK_B, PAIRS):
  BLOCK_B is a power of two not below the batch, PAIRS is the number of pairs of a request.
"""

import triton
import triton.language as tl


@triton.jit
def span_of(table, request, mask, TABLE: tl.constexpr):
    """(first token attended to, tokens) of the requests, a scalar or a vector of indices.

    Both are 0 where ``mask`` is false and for a request without tokens.
    """
    indptr, _, lengths, _, window_left = table
    last = tl.load(lengths + request, mask=mask, other=0)
    if TABLE[1]:
        tokens = last
    else:
        begin = tl.load(indptr + request, mask=mask, other=0)
        pages = tl.load(indptr + request + 1, mask=mask, other=0) - begin
        tokens = tl.where(pages > 0, (pages - 1) * TABLE[0] + last, 0)
    first = tokens * 0
    if TABLE[3]:
        first = tl.maximum(tokens - TABLE[2] - window_left, 0)
    return first, tokens


@triton.jit
def all_spans(table, splits, TABLE: tl.constexpr, SPLIT: tl.constexpr):
    """(index, is a request, tokens attended to) of every request, as vectors of BLOCK_B."""
    index = tl.arange(0, SPLIT[2])
    is_request = index < splits[0]
    first, tokens = span_of(table, index, is_request, TABLE)
    return index, is_request, tokens - first


@triton.jit
def piece_tokens(span, splits, SPLIT: tl.constexpr):
    """Tokens of one piece: as given, or of ``num_splits`` equal runs of whole tiles."""
    if SPLIT[0] == "size":
        run = span * 0 + splits[2]
    else:
        run = tl.maximum(tl.cdiv(tl.cdiv(span, splits[1]), SPLIT[1]), 1) * SPLIT[1]
    return run


@triton.jit
def _tiles(span, SPLIT: tl.constexpr):
    """Tiles of a pair; one, of nothing, where there is no token."""
    return tl.maximum(tl.cdiv(span, SPLIT[1]), 1)


@triton.jit
def _pieces(span, splits):
    """Pieces of ``split_tokens``; one, of nothing, where there is no token."""
    return tl.maximum(tl.cdiv(span, splits[2]), 1)


@triton.jit
def _stream_share(tiles, splits):
    """(tiles up to and with each request, tiles of a stream, all tiles), of one pair a request.

    Streams own equal runs of the tiles of all requests, numbered through.
    """
    ends = tl.cumsum(tiles, 0)
    total = tl.max(ends, 0)
    return ends, tl.maximum(tl.cdiv(total, splits[1]), 1), total


@triton.jit
def pieces_of_pair(table, splits, request, pair, TABLE: tl.constexpr, SPLIT: tl.constexpr):
    """(first slot, distance of slots, pieces) of a pair.

    ``count``: every pair has ``num_splits`` slots. ``size``: slots are numbered through the pieces
    of all requests. ``stream``: the piece of request r that stream s computes has slot s + r, which
    no other piece has, since each next piece is another stream's, another request's, or both;
    ``num_splits`` is the number of streams there. Slots of the pairs of a request alternate.
    """
    PAIRS: tl.constexpr = SPLIT[3]
    if SPLIT[0] == "count":
        first, tokens = span_of(table, request, True, TABLE)
        run = piece_tokens(tokens - first, splits, SPLIT)
        slot = request * splits[1] * PAIRS + pair
        count = tl.maximum(tl.cdiv(tokens - first, run), 1)
    else:
        index, is_request, spans = all_spans(table, splits, TABLE, SPLIT)
        if SPLIT[0] == "size":
            counts = tl.where(is_request, _pieces(spans, splits), 0)
            slot = tl.sum(tl.where(index < request, counts, 0), 0) * PAIRS + pair
            count = tl.sum(tl.where(index == request, counts, 0), 0)
        else:
            tiles = tl.where(is_request, _tiles(spans, SPLIT), 0)
            ends, share, _ = _stream_share(tiles, splits)
            own_tiles = tl.sum(tl.where(index == request, tiles, 0), 0)
            begin = tl.sum(tl.where(index == request, ends, 0), 0) - own_tiles
            stream = begin // share
            slot = (stream + request) * PAIRS + pair
            count = (begin + own_tiles - 1) // share - stream + 1
    return slot, PAIRS, count


@triton.jit
def request_of_item(table, splits, item, TABLE: tl.constexpr, SPLIT: tl.constexpr):
    """(request, piece) of a work item under ``count`` and ``size``.

    Past the last item the request is ``batch``; under ``count`` the last pieces may be empty.
    """
    if SPLIT[0] == "size":
        _, is_request, spans = all_spans(table, splits, TABLE, SPLIT)
        counts = tl.where(is_request, _pieces(spans, splits), 0)
        is_before = (tl.cumsum(counts, 0) <= item) & is_request
        request = tl.sum(is_before.to(tl.int32), 0)
        piece = item - tl.sum(tl.where(is_before, counts, 0), 0)
    else:
        request = item // splits[1]
        piece = item - request * splits[1]
    return request, piece


@triton.jit
def stream_start(table, splits, stream, TABLE: tl.constexpr, SPLIT: tl.constexpr):
    """(request, tile in it, tiles) of a stream's run of tiles."""
    _, is_request, spans = all_spans(table, splits, TABLE, SPLIT)
    tiles = tl.where(is_request, _tiles(spans, SPLIT), 0)
    ends, share, total = _stream_share(tiles, splits)
    begin = stream * share
    is_before = (ends <= begin) & is_request
    request = tl.sum(is_before.to(tl.int32), 0)
    return (
        request,
        begin - tl.max(tl.where(is_before, ends, 0), 0),
        tl.minimum(total - begin, share),
    )
