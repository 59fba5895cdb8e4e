"""`GrammarCompiler`: the grammars of one model, compiled in a thread and kept."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraints.grammar_payload import (
    GrammarPayload,
    grammar_key,
    parse_grammar,
    refused,
)
from engine.constraints.grammar_template import GrammarTemplate
from engine.constraints.grammar_text import grammar_text
from engine.constraints.template_cache import Entry, TemplateCache
from engine.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

MAX_CACHE_BYTES = 256 * 2**20
STACK_BYTES = 512 * 2**20
"""Stack of the compiling thread, virtual. llguidance descends a grammar recursively: 20,000 chained
rules overflow 256 MiB."""
MAX_MESSAGE = 300
"""Characters of llguidance's words in an error."""
_POINTER = re.compile(r"\s*(\^+|\d+ \|.*)?$")
NOTHING_ALLOWED = "the grammar allows no output at all"


class GrammarCompiler:
    """Compiles grammars to templates, whose copies share a lexer: the states that one request finds
    serve the others (64 matchers of their own take 5 times as long to make masks, measured).

    `template` and `prepare` may be called by several threads.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], str],
        vocab_size: int,
        eos_token_ids: Collection[int],
        max_cache_bytes: int = MAX_CACHE_BYTES,
    ) -> None:
        """`load_tokenizer` gives the tokenizer as JSON (`tokenizer.json`). It is called once, by
        `load` or before the first grammar. `vocab_size` is the model's."""
        self._load_tokenizer = load_tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        # Ambiguous grammars cost the square of the items: with these limits a mask takes at most
        # about 0.15 s, and an object may have about 500 optional properties.
        self._limits = LLParserLimits(
            max_items_in_row=4_000,
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=10_000,
            max_lexer_states=50_000,
            max_grammar_size=250_000,
            verbose_errors=False,
        )
        self._executor: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._pending: dict[bytes, Future[Entry]] = {}
        self.cache = TemplateCache(max_cache_bytes)

    @property
    def tokenizer(self) -> LLTokenizer:
        """llguidance's tokenizer of the model. Raises `ConfigError` if it can't be loaded."""
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def load(self) -> None:
        """Load the tokenizer, about 2 s for a vocabulary of 128,000, and start the thread.

        Raises `ConfigError` if this can't be done.
        """
        _ = self.tokenizer
        with self._lock:
            self._get_executor()

    def template(self, payload: dict[str, Any]) -> GrammarTemplate:
        """The compiled grammar; waits for the thread if it isn't yet.

        Raises `RequestError` if the grammar is wrong or beyond a limit.
        """
        grammar, key = parse_grammar(payload), grammar_key(payload)
        with self._lock:
            found = self.cache.get(key)
            future = None if found is not None else self._start(key, grammar)
        if future is not None:
            found = future.result()
        assert found is not None
        if isinstance(found, RequestError):
            raise RequestError(found.message, found.param)
        return found

    def prepare(self, payload: dict[str, Any]) -> Future[Entry] | None:
        """Begin to compile, so that `template` won't wait. None if it wouldn't wait now."""
        try:
            grammar, key = parse_grammar(payload), grammar_key(payload)
        except RequestError:
            return None
        with self._lock:
            return None if self.cache.get(key) is not None else self._start(key, grammar)

    def _start(self, key: bytes, grammar: GrammarPayload) -> Future[Entry]:
        future = self._pending.get(key)
        if future is None:
            future = self._pending[key] = self._get_executor().submit(self._run, key, grammar)
        return future

    def _get_executor(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = _thread_with_stack(STACK_BYTES)
        return self._executor

    def _run(self, key: bytes, grammar: GrammarPayload) -> Entry:
        made: Entry
        try:
            made = self._compile(grammar)
        except RequestError as error:
            made = error
        except BaseException as error:  # a panic of native code isn't an Exception
            logger.error("a grammar can't be compiled: %s", type(error).__name__)
            made = refused(f"the grammar can't be compiled ({type(error).__name__})")
        with self._lock:
            self.cache.put(key, made)
            del self._pending[key]
        return made

    def _compile(self, grammar: GrammarPayload) -> GrammarTemplate:
        try:
            text = grammar_text(grammar, self._special_token)
            matcher = LLMatcher(self.tokenizer, text, log_level=0, limits=self._limits)
        except ConfigError as error:
            raise refused(f"structured output isn't available: {error}") from error
        except ValueError as error:
            raise refused(_explain(str(error))) from None
        if matcher.is_error():
            raise refused(_explain(matcher.get_error()))
        # The first mask takes longer than others. What the lexer finds out for it stays.
        first = matcher.deep_copy()
        mask = first.compute_bitmask()
        if first.is_error():
            raise refused(_explain(first.get_error()))
        if not any(mask):
            raise refused(NOTHING_ALLOWED)
        return GrammarTemplate(matcher, len(text))

    def _special_token(self, text: str) -> int | None:
        """The id of a special token by its name."""
        tokens = self.tokenizer.tokenize_str(text, parse_special=True)
        if len(tokens) == 1 and self.tokenizer.is_special_token(tokens[0]):
            return tokens[0]
        return None

    def _make_tokenizer(self) -> LLTokenizer:
        text = self._load_tokenizer()
        eos = self._eos_token_ids or None
        try:
            try:
                return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)
            except ValueError as error:
                if "too small" not in str(error):
                    raise
                # The tokenizer has ids that the model can't produce.
                return LLTokenizer(text, eos_token=eos)
        except ValueError as error:
            raise ConfigError(f"llguidance can't take the model's tokenizer: {error}") from error


def _thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """An executor of one thread, which runs already. Threads that others start at this very moment
    get the same stack, which costs them nothing: it is virtual."""
    executor = ThreadPoolExecutor(1, "grammar-compiler")
    before = threading.stack_size(num_bytes)
    try:
        executor.submit(bool).result()
    except RuntimeError as error:
        raise ConfigError(
            f"there can't be a thread with a stack of {num_bytes >> 20} MiB ({error}), which "
            "grammars need; raise the limit of virtual memory (ulimit -v)"
        ) from error
    finally:
        threading.stack_size(before)
    return executor


def _explain(error: str) -> str:
    """llguidance's words, without the lines that point into the grammar, and shortened."""
    lines = error.replace("<non-verbose/>", "").splitlines()
    error = " ".join(" ".join(line for line in lines if not _POINTER.match(line)).split())
    if error in ("NoExtensionBias", "NoExtension"):
        return NOTHING_ALLOWED
    if len(error) > MAX_MESSAGE:
        error = f"{error[:MAX_MESSAGE]}..."
    return f"the grammar can't be compiled: {error}"
