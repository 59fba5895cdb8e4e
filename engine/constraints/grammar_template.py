"""`GrammarTemplate`: a compiled grammar, which requests copy."""

from __future__ import annotations

from dataclasses import dataclass

from llguidance import LLMatcher

LEXER_BYTES_PER_S = 250 * 2**20
"""What the lexer grows by in a second of finding new states (measured: 0.6 million states of 0.4 to
0.9 kB)."""
MAX_LEXER_BYTES = 45 * 2**20
"""Memory of `max_lexer_states` states."""
FAST_MASK_S = 0.0002
"""A mask for which no state had to be found takes about this long, for 128,000 tokens."""
FREE_S = 0.2
FREE_S_PER_TOKEN = 0.003
"""CPU time that tokens may take: usual grammars need 0.02 to 1 ms a token."""


@dataclass(slots=True, eq=False)
class GrammarTemplate:
    """The state before the first token, and what all requests together spent on the grammar.

    The requests' copies share the lexer, which finds its states as it needs them. llguidance
    doesn't tell its size, so it is estimated from the time that this took.
    """

    matcher: LLMatcher
    num_chars: int
    """Length of the grammar."""
    num_tokens: int = 0
    spent_s: float = 0.0
    """CPU seconds for masks and tokens."""
    searched_s: float = 0.0
    """The part of it in which the lexer may have grown."""

    @property
    def num_bytes(self) -> int:
        """Estimate of its memory: 350 bytes a character at most when it was compiled (measured),
        and the lexer's growth since."""
        grown = min(int(self.searched_s * LEXER_BYTES_PER_S), MAX_LEXER_BYTES)
        return 2**17 + 350 * self.num_chars + grown

    @property
    def is_too_slow(self) -> bool:
        """Whether its requests hold up all others: their masks are made one after the other, by the
        scheduler's loop. A very ambiguous grammar takes longer with every token."""
        return self.spent_s > FREE_S + FREE_S_PER_TOKEN * self.num_tokens

    def charge_mask(self, seconds: float) -> None:
        """Note the CPU time of one mask."""
        self.spent_s += seconds
        self.searched_s += max(0.0, seconds - FAST_MASK_S)

    def charge_token(self, seconds: float) -> None:
        """Note the CPU time of going on by one token."""
        self.num_tokens += 1
        self.spent_s += seconds
