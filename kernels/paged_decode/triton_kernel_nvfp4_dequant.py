"""Triton device code: packed e2m1 codes to fp16, in few instructions.

A code times 2^-14 is an fp16 number whose bits are those of the code, moved: sign to bit 15, the
other three to bits 11 to 9 (0.5 becomes a subnormal, which fp16 products keep). Times an e4m3 scale
it is exact still, so the factor 2^14 waits for the end. bf16 would lose it: 0.5 would be a
subnormal that fp32 arithmetic flushes.

``DEQUANT`` says how the bits are moved. ``shift`` and ``carry`` move the four even and the four odd
codes of a word at once, as bytes, and then spread bytes to halves: 11 and 10 instructions for eight
codes. ``carry`` adds 7 to the three bits above the sign of even codes, so that the sign's carry
arrives at the top. ``hardware`` is the conversion that sm_100a, sm_103a and sm_120a have, to values
without the factor. ``arithmetic`` runs in the interpreter too.
"""

import triton
import triton.language as tl

_EVEN_BY_SHIFT = tl.constexpr(
    """
    shl.b32 even, word, 1;
    and.b32 even, even, 0x0E0E0E0E;
    shl.b32 sign, word, 4;
    lop3.b32 even, sign, 0x80808080, even, 0xEA;
    """
)
_EVEN_BY_CARRY = tl.constexpr(
    """
    and.b32 even, word, 0x0F0F0F0F;
    mad.lo.u32 even, even, 2, 0x70707070;
    and.b32 even, even, 0x8E8E8E8E;
    """
)
_ODD = tl.constexpr(
    """
    shr.u32 odd, word, 3;
    and.b32 odd, odd, 0x0E0E0E0E;
    lop3.b32 odd, word, 0x80808080, odd, 0xEA;
    """
)
_HALVES_OF_PLANES = tl.constexpr(
    """
    prmt.b32 $0, even, 0, 0x2404;
    prmt.b32 $1, odd, 0, 0x2404;
    and.b32 $2, even, 0xFF00FF00;
    and.b32 $3, odd, 0xFF00FF00;
    }
    """
)
_HALVES_OF_WORD = tl.constexpr(
    """
    prmt.b32 sign, even, 0, 0x2404;
    mov.b32 {$0, $4}, sign;
    prmt.b32 sign, odd, 0, 0x2404;
    mov.b32 {$1, $5}, sign;
    and.b32 sign, even, 0xFF00FF00;
    mov.b32 {$2, $6}, sign;
    and.b32 sign, odd, 0xFF00FF00;
    mov.b32 {$3, $7}, sign;
    }
    """
)
_PLANES_BY_HARDWARE = tl.constexpr(
    """
    {
    .reg .b8 b0, b1, b2, b3;
    .reg .b32 x0, x1, y0, y1;
    mov.b32 {b0, b1, b2, b3}, $4;
    cvt.rn.f16x2.e2m1x2 x0, b0;
    cvt.rn.f16x2.e2m1x2 x1, b1;
    cvt.rn.f16x2.e2m1x2 y0, b2;
    cvt.rn.f16x2.e2m1x2 y1, b3;
    prmt.b32 $0, x0, y0, 0x5410;
    prmt.b32 $1, x0, y0, 0x7632;
    prmt.b32 $2, x1, y1, 0x5410;
    prmt.b32 $3, x1, y1, 0x7632;
    }
    """
)
_WORD_BY_HARDWARE = tl.constexpr(
    """
    {
    .reg .b8 b0, b1, b2, b3;
    .reg .b32 x;
    mov.b32 {b0, b1, b2, b3}, $8;
    cvt.rn.f16x2.e2m1x2 x, b0;
    mov.b32 {$0, $1}, x;
    cvt.rn.f16x2.e2m1x2 x, b1;
    mov.b32 {$2, $3}, x;
    cvt.rn.f16x2.e2m1x2 x, b2;
    mov.b32 {$4, $5}, x;
    cvt.rn.f16x2.e2m1x2 x, b3;
    mov.b32 {$6, $7}, x;
    }
    """
)
_PLANES_START = tl.constexpr("{ .reg .b32 word, even, odd, sign; mov.b32 word, $4;")
_WORD_START = tl.constexpr("{ .reg .b32 word, even, odd, sign; mov.b32 word, $8;")
_PLANES_BY_SHIFT = tl.constexpr(_PLANES_START + _EVEN_BY_SHIFT + _ODD + _HALVES_OF_PLANES)
_PLANES_BY_CARRY = tl.constexpr(_PLANES_START + _EVEN_BY_CARRY + _ODD + _HALVES_OF_PLANES)
_WORD_BY_SHIFT = tl.constexpr(_WORD_START + _EVEN_BY_SHIFT + _ODD + _HALVES_OF_WORD)
_WORD_BY_CARRY = tl.constexpr(_WORD_START + _EVEN_BY_CARRY + _ODD + _HALVES_OF_WORD)


@triton.jit
def value_factor(DEQUANT: tl.constexpr):
    """What a code's value is over what the functions here make of it."""
    return 1.0 if DEQUANT == "hardware" else 16384.0


@triton.jit
def _half_of(words, NIBBLE: tl.constexpr):
    """fp16 of one code of each word, times 2^-14."""
    code = ((words >> (4 * NIBBLE)) & 15).to(tl.uint16)
    return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def four_planes(words, DEQUANT: tl.constexpr):
    """uint16 words of four codes to four fp16 tensors of that shape: the first codes, the second...

    Neighbouring elements share a register, of the words and of each result, so the tensors may be
    operands of a product as they are, contracted over the words of a row.
    """
    if DEQUANT == "arithmetic":
        return _half_of(words, 0), _half_of(words, 1), _half_of(words, 2), _half_of(words, 3)
    if DEQUANT == "hardware":
        CODE: tl.constexpr = _PLANES_BY_HARDWARE
    elif DEQUANT == "carry":
        CODE: tl.constexpr = _PLANES_BY_CARRY
    else:
        CODE: tl.constexpr = _PLANES_BY_SHIFT
    return tl.inline_asm_elementwise(
        CODE,
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _eight_halves(words, DEQUANT: tl.constexpr):
    """uint32 words of eight codes to eight fp16 tensors, in the order of the codes."""
    if DEQUANT == "arithmetic":
        return (
            _half_of(words, 0),
            _half_of(words, 1),
            _half_of(words, 2),
            _half_of(words, 3),
            _half_of(words, 4),
            _half_of(words, 5),
            _half_of(words, 6),
            _half_of(words, 7),
        )
    if DEQUANT == "hardware":
        CODE: tl.constexpr = _WORD_BY_HARDWARE
    elif DEQUANT == "carry":
        CODE: tl.constexpr = _WORD_BY_CARRY
    else:
        CODE: tl.constexpr = _WORD_BY_SHIFT
    return tl.inline_asm_elementwise(
        CODE,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
            tl.float16,
        ),
        is_pure=True,
        pack=1,
    )


@triton.jit
def eight_columns(words, ROWS: tl.constexpr, WORDS: tl.constexpr, DEQUANT: tl.constexpr):
    """``[ROWS, WORDS]`` uint32 to ``[ROWS, 8 * WORDS]`` fp16, codes of a word in register order.

    Two codes that come out of one instruction stay neighbours, so nothing is moved to pair them:
    columns 2i and 2i + 1 of a word are its codes i and i + 4, under ``hardware`` 2i and 2i + 1.
    ``in_order`` puts rows of a result that has such columns right.
    """
    c0, c1, c2, c3, c4, c5, c6, c7 = _eight_halves(words, DEQUANT)
    if DEQUANT == "hardware":
        low = tl.join(tl.join(c0, c4), tl.join(c2, c6))
        high = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    else:
        low = tl.join(tl.join(c0, c2), tl.join(c1, c3))
        high = tl.join(tl.join(c4, c6), tl.join(c5, c7))
    return tl.reshape(tl.join(low, high), (ROWS, 8 * WORDS))


@triton.jit
def in_order(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEQUANT: tl.constexpr):
    """``[ROWS, COLUMNS]`` with the columns of ``eight_columns`` as they belong."""
    if DEQUANT == "hardware":
        return x
    words = tl.reshape(x, (ROWS, COLUMNS // 8, 4, 2))
    return tl.reshape(tl.permute(words, (0, 1, 3, 2)), (ROWS, COLUMNS))
